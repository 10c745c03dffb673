//! Renders the catalogue as Markdown: the reference part of `docs/mitigations.md`.

use std::fmt::Write as _;

use super::catalogue::MitigationCatalogue;
use super::entry::{LeakMemory, MitigationAction, MitigationEntry};
use super::leak::{KnownLeak, LeakKind};
use crate::set::FixEvidence;

/// The whole catalogue as Markdown, deterministic.
pub fn render_markdown(catalogue: &MitigationCatalogue) -> String {
    let mut text = String::from("## Leaks, and what looks like one\n\n");
    write_table(&mut text, catalogue.leaks().iter().filter(|leak| leak.kind != LeakKind::Defect));
    text.push_str("\n## Crashes, wedges and wrong answers\n\n");
    write_table(&mut text, catalogue.leaks().iter().filter(|leak| leak.kind == LeakKind::Defect));
    text.push_str("\n## Mitigations\n\n| in `mitigations` | kind | memory | backends | what it does |\n|---|---|---|---|---|\n");
    for entry in catalogue.mitigations() {
        write_line(
            &mut text,
            format_args!(
                "| [`{}`](#{}) | {} | {} | {} | {} |",
                entry.usage(),
                entry.id,
                entry.action.kind(),
                format_memories(&entry.memory),
                format_backends(&entry.backends),
                entry.title,
            ),
        );
    }
    text.push_str("\n## Each mitigation\n");
    for entry in catalogue.mitigations() {
        write_mitigation(&mut text, entry);
    }
    text.push_str("\n## Each leak and defect\n");
    for one in catalogue.leaks() {
        write_leak(&mut text, one);
    }
    text
}

/// Writes a table with one row per leak.
fn write_table<'a>(text: &mut String, leaks: impl Iterator<Item = &'a KnownLeak>) {
    text.push_str("| id | memory | backends | builds | what helps |\n|---|---|---|---|---|\n");
    for leak in leaks {
        let cures: Vec<String> = leak.cures.iter().map(super::leak::LeakCure::short).collect();
        write_line(
            text,
            format_args!(
                "| [`{id}`](#{id}): {} | {} | {} | {} | {} |",
                leak.title,
                format_memories(&leak.memory),
                format_backends(&leak.backends),
                format_builds(&leak.builds()),
                cures.join(", "),
                id = leak.id,
            ),
        );
    }
}

fn write_line(text: &mut String, what: std::fmt::Arguments<'_>) {
    let _infallible = writeln!(text, "{what}");
}

/// Writes a list item unless its text is empty.
fn write_item(text: &mut String, name: &str, what: &str) {
    if !what.is_empty() {
        write_line(text, format_args!("- {name}: {what}"));
    }
}

/// Capitalizes a text and adds a full stop.
fn to_sentence(text: &str) -> String {
    let mut letters = text.chars();
    let Some(first) = letters.next() else { return String::new() };
    let stop = if text.ends_with('.') { "" } else { "." };
    format!("{}{}{stop}", first.to_uppercase(), letters.as_str())
}

fn format_memories(all: &[LeakMemory]) -> String {
    all.iter().map(|one| one.name()).collect::<Vec<_>>().join(", ")
}

fn format_backends(all: &[String]) -> String {
    if all.is_empty() { "all".to_owned() } else { all.join(", ") }
}

fn format_builds(text: &str) -> &str {
    if text.is_empty() { "see below" } else { text }
}

fn write_mitigation(text: &mut String, entry: &MitigationEntry) {
    write_line(text, format_args!("\n### {}\n", entry.id));
    write_line(text, format_args!("{}", to_sentence(&entry.title)));
    write_line(text, format_args!("{}\n", to_sentence(&entry.text)));
    write_item(text, "how", &entry.how());
    write_item(text, "value", &entry.value.as_ref().map(format_value).unwrap_or_default());
    for part in &entry.parts {
        let takes = part.value.as_ref().map(|spec| format!(" = {}", format_value(spec))).unwrap_or_default();
        write_item(
            text,
            &format!("`{}.{}`", entry.id, part.name),
            &format!("{}{takes}. {}", part.variable, to_sentence(&part.text)),
        );
    }
    write_item(text, "builds", &entry.builds());
    write_item(text, "helps against", &entry.cures.join(", "));
    if matches!(entry.action, MitigationAction::Patch { .. }) {
        write_item(text, "symptom", &entry.symptoms.join(" "));
    }
    write_item(text, "cost", &entry.cost);
    write_item(text, "risk", &entry.risk);
    if let Some(upstream) = &entry.upstream {
        let status = format!("{:?}", upstream.status).to_lowercase();
        let all = [&status, &upstream.since, &upstream.how].into_iter().filter(|said| !said.is_empty());
        let all: Vec<&str> = all.map(String::as_str).collect();
        write_item(text, "upstream", &all.join("; "));
    }
    for life in &entry.life {
        write_line(text, format_args!("- {life}"));
    }
    write_evidence(text, &entry.evidence);
    write_item(text, "confidence", &entry.confidence);
    write_item(text, "references", &entry.references.join(", "));
}

fn write_leak(text: &mut String, leak: &KnownLeak) {
    write_line(text, format_args!("\n### {}\n", leak.id));
    write_line(text, format_args!("{} {}\n", to_sentence(&leak.title), to_sentence(&leak.symptom)));
    let range = [leak.builds(), leak.range.clone()].into_iter().filter(|part| !part.is_empty());
    write_item(text, "builds", &range.collect::<Vec<_>>().join("; "));
    write_item(text, "upstream", &leak.upstream);
    for cure in &leak.cures {
        write_item(text, "helps", &cure.to_string());
    }
    write_item(text, "how to tell", &leak.detect);
    for sign in &leak.signs {
        write_item(text, "fingerprint", &sign.to_string());
    }
    write_evidence(text, &leak.evidence);
    write_item(text, "confidence", &leak.confidence);
    write_item(text, "references", &leak.references.join(", "));
}

fn write_evidence(text: &mut String, all: &[FixEvidence]) {
    for one in all {
        write_item(text, "seen", &one.to_line());
    }
}

fn format_value(spec: &super::value::ValueSpec) -> String {
    let default = spec.default.as_ref().map(|value| format!("; default {value}")).unwrap_or_default();
    format!("{}{default}", spec.description())
}

impl FixEvidence {
    /// The measurement in one line.
    pub fn to_line(&self) -> String {
        let mut text = self.effect.clone();
        let with: Vec<&str> = [&self.hardware, &self.build, &self.command]
            .into_iter()
            .filter(|part| !part.is_empty())
            .map(String::as_str)
            .collect();
        if !with.is_empty() {
            let _infallible = write!(text, " ({})", with.join("; "));
        }
        text
    }
}

impl MitigationEntry {
    /// Describes in one line the variables, flags or builds of the mitigation.
    pub fn how(&self) -> String {
        match &self.action {
            MitigationAction::Patch { set, variable: Some(name), .. } => {
                format!("patch set {set}; the variable {name}")
            }
            MitigationAction::Patch { set, variable: None, .. } => format!("patch set {set}"),
            MitigationAction::Variable { name, fixed, presence } => {
                let value = fixed.as_deref().unwrap_or("VALUE");
                let presence = if *presence { "; it acts by being present, whatever its value" } else { "" };
                format!("the variable {name}={value}{presence}")
            }
            MitigationAction::Unset { names, .. } => {
                format!("removes {} from what the process inherits", names.join(", "))
            }
            MitigationAction::Flags { flags } => {
                let all = flags.iter().map(|flag| {
                    let value = flag.value.as_deref().map(|value| value.replace("{}", "VALUE"));
                    std::iter::once(flag.write.clone()).chain(value).collect::<Vec<_>>().join(" ")
                });
                format!("llama-server's `{}`", all.collect::<Vec<_>>().join(" "))
            }
            MitigationAction::BuildOption { name, setting } => format!("a build with -D{name}={setting}"),
        }
    }
}
