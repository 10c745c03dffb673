//! Compares the reference part of `docs/mitigations.md` with the catalogue; `WARDEN_RENEW_DOCS=1` writes it.

use super::catalogue::MitigationCatalogue;
use super::entry::{LeakMemory, MitigationAction, MitigationEntry};
use super::leak::{KnownLeak, LeakKind};
use crate::set::FixEvidence;

#[test]
fn the_documentation_is_made_from_the_list() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/mitigations.md");
    let text = std::fs::read_to_string(&path).unwrap();
    let mark = "<!-- from here on: written by a test from patches/ -->\n\n";
    let (page, reference) = text.split_once(mark).unwrap();
    let wanted = render_markdown(&MitigationCatalogue::embedded().unwrap());
    if std::env::var_os("WARDEN_RENEW_DOCS").is_some() {
        std::fs::write(&path, format!("{page}{mark}{wanted}")).unwrap();
        return;
    }
    let differs = reference.lines().zip(wanted.lines()).position(|(is, should)| is != should);
    assert!(
        reference == wanted,
        "WARDEN_RENEW_DOCS=1 renews docs/mitigations.md; its reference differs at line {differs:?}"
    );
}

fn render_markdown(catalogue: &MitigationCatalogue) -> String {
    let mut text = vec!["## Leaks, and what looks like one\n".to_owned()];
    write_table(&mut text, catalogue.leaks().iter().filter(|leak| leak.kind != LeakKind::Defect));
    text.push("\n## Crashes, wedges and wrong answers\n".to_owned());
    write_table(&mut text, catalogue.leaks().iter().filter(|leak| leak.kind == LeakKind::Defect));
    text.push("\n## Mitigations\n".to_owned());
    text.push(
        "| in `mitigations` | kind | memory | backends | what it does |\n|---|---|---|---|---|".to_owned(),
    );
    for entry in catalogue.mitigations() {
        text.push(format!(
            "| [`{}`](#{}) | {} | {} | {} | {} |",
            entry.usage(),
            entry.id,
            entry.action.kind(),
            format_memories(&entry.memory),
            format_backends(&entry.backends),
            entry.title,
        ));
    }
    text.push("\n## Each mitigation".to_owned());
    for entry in catalogue.mitigations() {
        write_mitigation(&mut text, entry);
    }
    text.push("\n## Each leak and defect".to_owned());
    for one in catalogue.leaks() {
        write_leak(&mut text, one);
    }
    text.join("\n") + "\n"
}

fn write_table<'a>(text: &mut Vec<String>, leaks: impl Iterator<Item = &'a KnownLeak>) {
    text.push("| id | memory | backends | builds | what helps |\n|---|---|---|---|---|".to_owned());
    for leak in leaks {
        let cures: Vec<String> = leak.cures.iter().map(super::leak::LeakCure::short).collect();
        text.push(format!(
            "| [`{id}`](#{id}): {} | {} | {} | {} | {} |",
            leak.title,
            format_memories(&leak.memory),
            format_backends(&leak.backends),
            format_builds(&leak.builds()),
            cures.join(", "),
            id = leak.id,
        ));
    }
}

fn write_item(text: &mut Vec<String>, name: &str, what: &str) {
    if !what.is_empty() {
        text.push(format!("- {name}: {what}"));
    }
}

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

fn write_mitigation(text: &mut Vec<String>, entry: &MitigationEntry) {
    text.push(format!("\n### {}\n", entry.id));
    text.push(to_sentence(&entry.title));
    text.push(format!("{}\n", to_sentence(&entry.text)));
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
        text.push(format!("- {life}"));
    }
    write_evidence(text, &entry.evidence);
    write_item(text, "confidence", &entry.confidence);
    write_item(text, "references", &entry.references.join(", "));
}

fn write_leak(text: &mut Vec<String>, leak: &KnownLeak) {
    text.push(format!("\n### {}\n", leak.id));
    text.push(format!("{} {}\n", to_sentence(&leak.title), to_sentence(&leak.symptom)));
    let range = [leak.builds(), leak.range.clone()].into_iter().filter(|part| !part.is_empty());
    write_item(text, "builds", &range.collect::<Vec<_>>().join("; "));
    write_item(text, "upstream", &leak.upstream);
    for cure in &leak.cures {
        write_item(text, "helps", &cure.to_string());
    }
    write_item(text, "signs", &leak.detect);
    for sign in &leak.signs {
        write_item(text, "fingerprint", &sign.to_string());
    }
    write_evidence(text, &leak.evidence);
    write_item(text, "confidence", &leak.confidence);
    write_item(text, "references", &leak.references.join(", "));
}

fn write_evidence(text: &mut Vec<String>, all: &[FixEvidence]) {
    for one in all {
        write_item(text, "seen", &one.to_line());
    }
}

fn format_value(spec: &super::value::ValueSpec) -> String {
    let default = spec.default.as_ref().map(|value| format!("; default {value}")).unwrap_or_default();
    format!("{}{default}", spec.description())
}
