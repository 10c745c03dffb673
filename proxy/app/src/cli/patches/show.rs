//! `patches show`: prints all that is known about a set or a fix.

use std::fmt::Write as _;

use clap::Args;
use serde_json::{Value, json};
use warden_patches::marker::marker;
use warden_patches::set::{FixVariable, HookPosition};
use warden_patches::{PatchSet, SetFix, SetHook};

use super::CatalogueArgs;
use super::list::{affected_text, upstream_text};
use crate::cli::ConfigArgs;
use crate::config::machine::HostMachine;
use crate::exit::CommandError;
use crate::out;

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

pub(super) fn run(args: &PatchShowArgs) -> Result<(), CommandError> {
    let machine = HostMachine::read();
    let loaded = args.config.load(&machine, Vec::new())?;
    let catalogue = args.catalogue.load(&loaded, &machine)?;
    let found = match args.id.split_once('/') {
        Some((set, fix)) => catalogue.set(set).and_then(|set| Some((set, Some(set.fix(fix)?)))),
        None => catalogue
            .set(&args.id)
            .map(|set| (set, None))
            .or_else(|| catalogue.fix(&args.id).map(|(set, fix)| (set, Some(fix)))),
    };
    let Some((set, fix)) = found else {
        let known = catalogue.sets().iter().flat_map(|set| {
            std::iter::once(set.id.as_str()).chain(set.fixes.iter().map(|fix| fix.id.as_str()))
        });
        let known: Vec<&str> = known.collect();
        return Err(CommandError::usage(
            format!("there is no patch set and no fix `{}`", args.id),
            format!("there are: {}; sets of your own come with --patches DIR", known.join(", ")),
        ));
    };
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
    let mut text = variable.name.clone();
    let kind = format!("{:?}", variable.kind).to_lowercase();
    let _infallible = write!(text, ", {kind}");
    if !variable.unit.is_empty() {
        let _infallible = write!(text, " of {}", variable.unit);
    }
    if let Some(default) = &variable.default {
        let _infallible = write!(text, ", {default} when switched on");
    }
    match (variable.min, variable.max) {
        (Some(min), Some(max)) => {
            let _infallible = write!(text, ", {min} to {max}");
        }
        (Some(min), None) => {
            let _infallible = write!(text, ", at least {min}");
        }
        (None, Some(max)) => {
            let _infallible = write!(text, ", at most {max}");
        }
        (None, None) => {}
    }
    text
}

/// Appends a line with its name; skips empty values.
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
    use warden_patches::SetCatalogue;

    #[test]
    fn a_set_is_shown_with_all_that_it_leans_on_and_what_its_fixes_cost() {
        let catalogue = SetCatalogue::embedded().unwrap();
        let set = catalogue.set("server").unwrap();
        insta::assert_snapshot!(set_text(set));
        let (set, fix) = catalogue.fix("graph-cache-cap").unwrap();
        insta::assert_snapshot!("a_fix_is_shown_with_its_variables", fix_text(set, fix));
    }
}
