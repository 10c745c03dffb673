//! The page for upstream about a patch: reason, effect, cost, and measurements, all from the set.

use crate::judgement::{PatchStatus, SetJudgement};
use crate::set::life::EvidenceKind;
use crate::set::{PatchSet, SetFix};
use crate::tree::SourceTree;

/// The page for a set, or for one of its fixes, as Markdown.
pub fn rationale(
    set: &PatchSet,
    judgement: &SetJudgement,
    only: Option<&str>,
    tree: &dyn SourceTree,
) -> String {
    let meant: Vec<&SetFix> = set.fixes.iter().filter(|fix| only.is_none_or(|only| fix.id == only)).collect();
    let mut text = Vec::new();
    let title = match (only, meant.as_slice()) {
        (Some(_), [fix]) => fix.title.clone(),
        _ => set.title.clone(),
    };
    text.push(format!("# {title}\n"));
    let status = match judgement.status {
        PatchStatus::Verified => "every piece of code that it depends on was reviewed in this version",
        PatchStatus::LocallyVerified => {
            "a program showed on one machine that it behaves with this code; the code was not reviewed"
        }
        _ => "some of the code that it depends on was not reviewed in this version",
    };
    text.push(format!("For llama.cpp, {}: {status}.", tree.revision()));
    for fix in &meant {
        write_fix(&mut text, set, fix, judgement);
    }
    text.push("\n## What changes\n".to_owned());
    for edit in judgement.edits.iter().flat_map(|edits| &edits.0) {
        if edit.before.is_none() {
            let lines = edit.after.split_inclusive(|byte| *byte == b'\n').count();
            text.push(format!("- `{}`: new, {lines} lines", edit.path));
        }
        for one in &edit.inserted {
            text.push(format!("- `{}:{}`: `{}`", edit.path, one.line, one.text.trim()));
        }
        if edit.before.is_some() && edit.inserted.is_empty() {
            text.push(format!("- `{}`: changed", edit.path));
        }
    }
    if let (Some(only), true) = (only, set.fixes.len() > 1) {
        let others: Vec<String> =
            set.fixes.iter().filter(|fix| fix.id != only).map(|fix| format!("`{}`", fix.id)).collect();
        text.push(format!(
            "\nThe files are those of the whole set. What else is in them ({}) does nothing until its own \
                 variables are set; who wants this fix alone has to take it out by hand.",
            others.join(", ")
        ));
    }
    text.join("\n") + "\n"
}

fn write_fix(text: &mut Vec<String>, set: &PatchSet, fix: &SetFix, judgement: &SetJudgement) {
    text.push(format!("\n## `{}`: {}\n", fix.id, fix.title));
    text.push(format!("- what is seen without it: {}", fix.symptom));
    let found = judgement.fixes.iter().find(|found| found.fix == fix.id);
    if let Some(found) = found {
        let why = found.reason.as_ref().map(|reason| format!(" ({reason})")).unwrap_or_default();
        text.push(format!("- in this source: {}{why}", found.status));
        if let Some(life) = &found.life {
            text.push(format!("- here it is {}: {}", life.is.name(), life.reason()));
        }
    }
    for (name, said) in [
        ("affects", &fix.affects.text),
        ("cost", &fix.cost),
        ("risk", &fix.risk),
        ("what upstream did", &fix.upstream.how),
    ] {
        if !said.is_empty() {
            text.push(format!("- {name}: {said}"));
        }
    }
    for variable in &fix.variables {
        let default =
            variable.default.as_ref().map(|value| format!(", {value} is tried")).unwrap_or_default();
        text.push(format!("- switched on by `{}`{default}: {}", variable.name, variable.text));
    }
    if !fix.references.is_empty() {
        text.push(format!("- references: {}", fix.references.join(", ")));
    }
    let measured =
        fix.life.iter().filter(|life| life.by == EvidenceKind::Measurement).count() + fix.evidence.len();
    if fix.life.is_empty() && fix.evidence.is_empty() {
        text.push("\nNothing was measured, and nothing is recorded of other revisions.".to_owned());
        return;
    }
    text.push(
        "\n| what | how it is known | revisions | hardware | how to see it again |\n|---|---|---|---|---|"
            .to_owned(),
    );
    for life in &fix.life {
        let known = [life.by.name(), &life.commit].into_iter().filter(|part| !part.is_empty());
        let builds = [life.builds(), life.build.clone()].into_iter().filter(|part| !part.is_empty());
        write_row(
            text,
            [
                &format!("{}: {}", life.is.name(), life.text),
                &known.collect::<Vec<_>>().join(", "),
                &builds.collect::<Vec<_>>().join("; "),
                &life.hardware,
                "",
            ],
        );
    }
    for one in &fix.evidence {
        let command = if one.command.is_empty() { String::new() } else { format!("`{}`", one.command) };
        write_row(text, [&one.effect, "measured", &one.build, &one.hardware, &command]);
    }
    if measured == 0 {
        text.push("\nNone of it was measured by us.".to_owned());
    } else {
        text.push(format!(
                "\nMeasured on the hardware and with the revisions that are named, and nowhere else. The commands \
                 are those of llama-warden; `{}` is its patch set.",
                set.id
            ),
        );
    }
}

fn write_row(text: &mut Vec<String>, cells: [&str; 5]) {
    // An unescaped bar would end the cell.
    let cells: Vec<String> = cells.iter().map(|cell| cell.replace('|', "\\|").replace('\n', " ")).collect();
    text.push(format!("| {} |", cells.join(" | ")));
}
