//! `patches list`, `patches show`: prints what is known about the sets and their fixes.

use std::fmt::Write as _;

use clap::Args;
use serde_json::{Value, json};
use warden_patches::marker::marker;
use warden_patches::set::{AffectedBuilds, FixVariable, HookPosition, UpstreamStatus};
use warden_patches::{PatchSet, SetCatalogue, SetFix, SetHook};

use super::find_patch;
use crate::cli::build::CatalogueArgs;
use crate::cli::shared::ConfigArgs;
use crate::exit::CommandError;
use crate::out;

#[derive(Debug, Args)]
pub(crate) struct PatchListArgs {
    #[command(flatten)]
    catalogue: CatalogueArgs,
    /// Prints JSON, for programs.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    config: ConfigArgs,
}

pub(super) fn list(args: &PatchListArgs) -> Result<(), CommandError> {
    let (machine, loaded) = args.config.read()?;
    let catalogue = args.catalogue.load(&loaded, &machine)?;
    if args.json {
        return out::print_json(&catalogue.sets().iter().map(listed_json).collect::<Vec<_>>());
    }
    if catalogue.sets().is_empty() {
        return out::print_line("no patch sets");
    }
    out::print_text(&table(&catalogue))
}

fn table(catalogue: &SetCatalogue) -> String {
    let mut rows = Vec::new();
    for set in catalogue.sets() {
        let backends =
            if set.backends.is_empty() { "every backend".to_owned() } else { set.backends.join(", ") };
        rows.push(vec![set.id.clone(), backends, String::new(), set.title.clone()]);
        for fix in &set.fixes {
            rows.push(vec![
                format!("{}/{}", set.id, fix.id),
                affected_text(&fix.affects),
                upstream_text(fix),
                fix.title.clone(),
            ]);
        }
    }
    out::table(["PATCH", "AFFECTS", "UPSTREAM", "TITLE"], rows)
}

fn affected_text(affects: &AffectedBuilds) -> String {
    let builds = match (affects.first.as_str(), affects.last.as_str()) {
        ("", "") => String::new(),
        (first, last) => format!("{first}..{last}"),
    };
    let parts = [affects.backends.join(", "), builds];
    let told: Vec<&str> = parts.iter().map(String::as_str).filter(|part| !part.is_empty()).collect();
    if told.is_empty() { "all".to_owned() } else { told.join(" ") }
}

fn upstream_text(fix: &SetFix) -> String {
    match (fix.upstream.status, fix.upstream.since.as_str()) {
        (UpstreamStatus::Open, _) => "open".to_owned(),
        (UpstreamStatus::Superseded, "") => "superseded".to_owned(),
        (UpstreamStatus::Superseded, since) => format!("superseded since {since}"),
    }
}

fn listed_json(set: &PatchSet) -> Value {
    let fixes = set.fixes.iter().map(|fix| {
        json!({
            "id": fix.id,
            "title": fix.title,
            "affects": fix.affects,
            "upstream": fix.upstream,
        })
    });
    json!({
        "id": set.id,
        "title": set.title,
        "backends": set.backends,
        "first": set.first,
        "origin": set.origin.to_string(),
        "fixes": fixes.collect::<Vec<_>>(),
    })
}

#[derive(Debug, Args)]
pub(crate) struct PatchShowArgs {
    /// Set, fix, or both as SET/FIX.
    id: String,
    #[command(flatten)]
    catalogue: CatalogueArgs,
    /// Prints JSON, for programs.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    config: ConfigArgs,
}

pub(super) fn show(args: &PatchShowArgs) -> Result<(), CommandError> {
    let (machine, loaded) = args.config.read()?;
    let catalogue = args.catalogue.load(&loaded, &machine)?;
    let (set, fix) = find_patch(catalogue.sets(), &args.id)?;
    match (fix, args.json) {
        (Some(fix), true) => {
            let value = serde_json::to_value(fix).map_err(|error| CommandError::failed(error.to_string()))?;
            out::print_json(&json!({ "set": set.id, "fix": value }))
        }
        (Some(fix), false) => out::print_text(&fix_text(set, fix)),
        (None, true) => out::print_json(&set_json(set)),
        (None, false) => out::print_text(&set_text(set)),
    }
}

fn set_text(set: &PatchSet) -> String {
    let mut text = String::new();
    let or_all = |names: &[String]| if names.is_empty() { "every one".to_owned() } else { names.join(", ") };
    push_pair(&mut text, "set", &set.id);
    push_pair(&mut text, "title", &set.title);
    push_pair(&mut text, "backends", &or_all(&set.backends));
    push_pair(&mut text, "promised from", set.first.as_deref().unwrap_or_default());
    push_pair(&mut text, "from", &set.origin.to_string());
    for sidecar in &set.sidecars {
        let lines = sidecar.content.split(|byte| *byte == b'\n').count();
        push_pair(
            &mut text,
            "file of ours",
            &format!("{} ({lines} lines), next to the file of hook {}", sidecar.file, sidecar.beside),
        );
    }
    for hook in &set.hooks {
        let place = hook_place(hook);
        let _infallible = writeln!(text, "\nhook {}: {place}\n  in {}", hook.id, hook.files.join(" or "));
        for line in &hook.insert {
            let _infallible = writeln!(text, "  + {line} {}", marker(&set.id, &hook.id));
        }
    }
    for diff in &set.diffs {
        let range =
            [diff.first.as_deref().unwrap_or_default(), diff.last.as_deref().unwrap_or_default()].join("..");
        let range = if range == ".." { diff.commits.join(", ") } else { range };
        let _infallible = writeln!(text, "\ndiff {} for {range}", diff.file);
    }
    let _infallible = writeln!(
        text,
        "\n{}, {} with {}",
        out::count_noun(set.probes.len(), "probe"),
        out::count_noun(set.seams.len(), "fingerprinted seam"),
        out::count_noun(set.fingerprints.seams.values().map(Vec::len).sum(), "known version")
    );
    for fix in &set.fixes {
        text.push('\n');
        text.push_str(&fix_text(set, fix));
    }
    text
}

fn hook_place(hook: &SetHook) -> String {
    let anchor = hook.anchor.as_deref().unwrap_or_default();
    let container = hook.container.as_ref().map_or_else(|| "the file".to_owned(), ToString::to_string);
    match hook.at {
        HookPosition::BeforeContainer => format!("before {container}"),
        HookPosition::Before => format!("before `{anchor}` in {container}"),
        HookPosition::After => format!("after `{anchor}` in {container}"),
    }
}

fn fix_text(set: &PatchSet, fix: &SetFix) -> String {
    let mut text = String::new();
    push_pair(&mut text, "fix", &format!("{} (of the set {})", fix.id, set.id));
    push_pair(&mut text, "title", &fix.title);
    push_pair(&mut text, "symptom", &fix.symptom);
    push_pair(&mut text, "affects", &affected_text(&fix.affects));
    push_pair(&mut text, "", &fix.affects.text);
    push_pair(&mut text, "upstream", &upstream_text(fix));
    push_pair(&mut text, "seen by", &fix.upstream.how);
    push_pair(&mut text, "risk", &fix.risk);
    push_pair(&mut text, "cost", &fix.cost);
    push_pair(&mut text, "references", &fix.references.join(", "));
    for life in &fix.life {
        push_pair(&mut text, "life", &life.to_string());
    }
    for variable in &fix.variables {
        push_pair(&mut text, "variable", &variable_text(variable));
        push_pair(&mut text, "", &variable.text);
    }
    for evidence in &fix.evidence {
        push_pair(&mut text, "measured", &evidence.effect);
        let on = [evidence.hardware.as_str(), evidence.build.as_str(), evidence.command.as_str()];
        let on: Vec<&str> = on.into_iter().filter(|part| !part.is_empty()).collect();
        push_pair(&mut text, "", &on.join("; "));
    }
    text
}

fn variable_text(variable: &FixVariable) -> String {
    let mut text = format!("{}, {}", variable.name, format!("{:?}", variable.kind).to_lowercase());
    if !variable.unit.is_empty() {
        text.extend([" of ", &variable.unit]);
    }
    text.extend(variable.default.as_ref().map(|default| format!(", {default} when switched on")));
    text.extend(match (variable.min, variable.max) {
        (Some(min), Some(max)) => Some(format!(", {min} to {max}")),
        (Some(min), None) => Some(format!(", at least {min}")),
        (None, Some(max)) => Some(format!(", at most {max}")),
        (None, None) => None,
    });
    text
}

fn push_pair(text: &mut String, name: &str, value: &str) {
    if !value.is_empty() {
        let _infallible = writeln!(text, "{name:<13} {value}");
    }
}

fn set_json(set: &PatchSet) -> Value {
    let hooks = set.hooks.iter().map(|hook| {
        let marked = |line: &String| format!("{line} {}", marker(&set.id, &hook.id));
        json!({
            "id": hook.id,
            "files": hook.files,
            "container": hook.container,
            "anchor": hook.anchor,
            "where": match hook.at {
                HookPosition::BeforeContainer => "before-container",
                HookPosition::Before => "before",
                HookPosition::After => "after",
            },
            "insert": hook.insert.iter().map(marked).collect::<Vec<_>>(),
        })
    });
    let diffs = set.diffs.iter().map(
        |diff| json!({ "file": diff.file, "first": diff.first, "last": diff.last, "commits": diff.commits }),
    );
    let probes = set.probes.iter().map(|probe| json!({ "id": probe.id, "why": probe.why, "fix": probe.fix }));
    let seams = set.seams.iter().map(|seam| {
        let known = set.fingerprints.seams.get(&seam.id).map_or(0, Vec::len);
        json!({ "id": seam.id, "container": seam.container, "known": known })
    });
    json!({
        "id": set.id,
        "title": set.title,
        "backends": set.backends,
        "first": set.first,
        "origin": set.origin.to_string(),
        "sidecars": set.sidecars.iter().map(|sidecar| &sidecar.file).collect::<Vec<_>>(),
        "hooks": hooks.collect::<Vec<_>>(),
        "diffs": diffs.collect::<Vec<_>>(),
        "probes": probes.collect::<Vec<_>>(),
        "seams": seams.collect::<Vec<_>>(),
        "fixes": set.fixes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_is_shown_with_all_that_it_leans_on_and_what_its_fixes_cost() {
        let catalogue = SetCatalogue::embedded().unwrap();
        let set = catalogue.set("server").unwrap();
        insta::assert_snapshot!(set_text(set));
        let (set, fix) = catalogue.fix("graph-cache-cap").unwrap();
        insta::assert_snapshot!("a_fix_is_shown_with_its_variables", fix_text(set, fix));
    }

    #[test]
    fn every_set_is_listed_with_its_fixes() {
        insta::assert_snapshot!(table(&SetCatalogue::embedded().unwrap()));
    }
}
