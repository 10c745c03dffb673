//! Checks everything in a `set.toml` that its types do not enforce.

mod fixes;
mod words;

use std::collections::BTreeSet;

use super::position::{DocumentFault, ValuePath};
use crate::marker::MARKER_PREFIX;
use crate::scan;
use crate::set::conformance::ConformanceSpec;
use crate::set::life::LifeStatement;
use crate::set::{HookPosition, PatchSet, ProbeConsequence, SetDiff, SetHook, SetProbe};
use fixes::check_fix;
use words::{
    check_backends, check_build, check_container, check_file_name, check_files, check_id, check_not_empty,
    check_unique, check_word, is_constant_name, is_inside, is_word,
};

type SetCheckResult = Result<(), DocumentFault>;

pub(super) fn check_set(set: &PatchSet, folder: &str) -> SetCheckResult {
    let top = ValuePath::default();
    check_id(&set.id, &top.key("id"))?;
    if set.id != folder {
        return top.key("id").fault(format!("the folder is called `{folder}`: both must be the same"));
    }
    check_not_empty(&set.title, &top.key("title"))?;
    check_backends(&set.backends, &top.key("backends"))?;
    if let Some(first) = &set.first {
        check_build(first, &top.key("first"))?;
    }
    if set.hooks.is_empty() && set.diffs.is_empty() {
        return top.fault("a set needs a [[hook]] or a [[diff]]: this one changes nothing");
    }
    check_unique("hook", "id", set.hooks.iter().map(|hook| hook.id.as_str()), &top)?;
    check_unique("probe", "id", set.probes.iter().map(|probe| probe.id.as_str()), &top)?;
    check_unique("seam", "id", set.seams.iter().map(|seam| seam.id.as_str()), &top)?;
    check_unique("fix", "id", set.fixes.iter().map(|fix| fix.id.as_str()), &top)?;
    check_unique("sidecar", "file", set.sidecars.iter().map(|sidecar| sidecar.file.as_str()), &top)?;
    check_unique("diff", "file", set.diffs.iter().map(|diff| diff.file.as_str()), &top)?;
    for (number, hook) in set.hooks.iter().enumerate() {
        check_hook(hook, &top.element("hook", number))?;
    }
    for (number, sidecar) in set.sidecars.iter().enumerate() {
        let at = top.element("sidecar", number);
        check_file_name(&sidecar.file, &at.key("file"))?;
        if set.hook(&sidecar.beside).is_none() {
            return at.key("beside").fault(format!("there is no hook `{}`", sidecar.beside));
        }
    }
    let mut defines = BTreeSet::new();
    for (number, probe) in set.probes.iter().enumerate() {
        let at = top.element("probe", number);
        check_probe(set, probe, &at)?;
        if let Some(define) = &probe.define
            && !defines.insert(define)
        {
            return at.key("define").fault(format!("another probe defines {define} too"));
        }
    }
    for (number, seam) in set.seams.iter().enumerate() {
        let at = top.element("seam", number);
        check_word(&seam.id, "-_", &at.key("id"))?;
        check_files(&seam.files, &at)?;
        check_container(&seam.container, &at)?;
    }
    let mut variables = BTreeSet::new();
    for (number, fix) in set.fixes.iter().enumerate() {
        check_fix(set, fix, &top.element("fix", number), &mut variables)?;
    }
    if let Some(own) = &set.conformance {
        check_conformance(set, own, &top.key("conformance"))?;
    }
    for (number, diff) in set.diffs.iter().enumerate() {
        check_diff(diff, &top.element("diff", number))?;
    }
    Ok(())
}

fn check_diff(diff: &SetDiff, at: &ValuePath) -> SetCheckResult {
    check_file_name(&diff.file, &at.key("file"))?;
    for (key, bound) in [("first", &diff.first), ("last", &diff.last)] {
        if let Some(bound) = bound {
            check_build(bound, &at.key(key))?;
        }
    }
    let ranged = diff.first.is_some() || diff.last.is_some();
    if ranged != diff.commits.is_empty() {
        return at
            .fault("a diff says for which revisions it is, either by `first` and `last` or by `commits`");
    }
    Ok(())
}

fn check_hook(hook: &SetHook, at: &ValuePath) -> SetCheckResult {
    check_id(&hook.id, &at.key("id"))?;
    check_files(&hook.files, at)?;
    if let Some(inside) = &hook.container {
        check_container(inside, at)?;
    }
    if hook.optional && hook.container.is_none() {
        return at.key("optional").fault("without a container it cannot be told whether the hook is needed");
    }
    let anchor_at = at.key("anchor");
    match (hook.at, &hook.anchor) {
        (HookPosition::BeforeContainer, None) if hook.container.is_none() => {
            return at.key("container").fault("`before-container` needs a container");
        }
        (HookPosition::BeforeContainer, None) => {}
        (HookPosition::BeforeContainer, Some(_)) => {
            return anchor_at.fault("`before-container` takes no anchor: the container is its place");
        }
        (HookPosition::Before | HookPosition::After, None) => {
            return anchor_at.fault("`before` and `after` need an anchor");
        }
        (HookPosition::Before | HookPosition::After, Some(anchor)) => check_anchor(anchor, &anchor_at)?,
    }
    if hook.when.is_some() && hook.container.is_none() {
        let why = "without a container there is nowhere to look whether the hook is needed";
        return at.key("when").fault(why);
    }
    if let Some(marker) = &hook.marker {
        let at = at.key("marker");
        check_not_empty(marker, &at)?;
        if !hook.insert.iter().any(|line| line.contains(marker)) {
            return at.fault("none of the lines has this text in it");
        }
    }
    let insert_at = at.key("insert");
    if hook.insert.is_empty() {
        return insert_at.fault("there is no line to insert");
    }
    for (number, line) in hook.insert.iter().enumerate() {
        check_inserted_line(line, &insert_at.item(number))?;
    }
    Ok(())
}

fn check_inserted_line(line: &str, at: &ValuePath) -> SetCheckResult {
    if line.trim().is_empty() {
        return at.fault("an empty line cannot carry its mark");
    }
    if line.contains(['\n', '\r']) {
        return at.fault("each line is an item of its own");
    }
    if line.ends_with('\\') {
        return at.fault("a line cannot be continued: a mark stands at its end");
    }
    if line.trim() != line {
        return at.fault("give the line without blanks around it: it is indented as the line beside it");
    }
    if line.contains(MARKER_PREFIX) {
        return at.fault(format!("`{MARKER_PREFIX}` is put behind it when it is inserted"));
    }
    // An open string or comment would include the marker, and the line could not be removed again.
    if !scan::keeps_marker(&format!("{line} {MARKER_PREFIX}a/b")) {
        return at.fault("a comment, string or character that this line does not close");
    }
    Ok(())
}

fn check_anchor(anchor: &str, at: &ValuePath) -> SetCheckResult {
    if anchor.trim().is_empty() {
        return at.fault("an empty anchor is everywhere");
    }
    if !anchor.is_ascii() || anchor.contains(['\n', '\r']) {
        return at.fault("an anchor is one line of ASCII");
    }
    if scan::ScannedSource::new(anchor.as_bytes().to_vec()).code() != anchor {
        return at.fault(
            "an anchor holds no comment and no string (but for the name behind #include): these are not looked at",
        );
    }
    Ok(())
}

fn check_probe(set: &PatchSet, probe: &SetProbe, at: &ValuePath) -> SetCheckResult {
    check_id(&probe.id, &at.key("id"))?;
    check_files(&probe.files, at)?;
    if let Some(inside) = &probe.container {
        check_container(inside, at)?;
    }
    if !probe.outside.is_empty() && probe.container.is_some() {
        return at.key("outside").fault("either `container` or `outside`");
    }
    for (number, one) in probe.outside.iter().enumerate() {
        check_container(one, &at.element("outside", number))?;
    }
    if !probe.guarded.is_empty() && probe.container.is_some() {
        return at.key("guarded").fault("either `container` or `guarded`");
    }
    for (number, one) in probe.guarded.iter().enumerate() {
        let at = at.element("guarded", number);
        match set.hook(one) {
            None => return at.fault(format!("there is no hook `{one}`")),
            Some(hook) if hook.container.is_none() => {
                return at.fault(format!("the hook `{one}` has no container that it could guard"));
            }
            Some(_) => {}
        }
    }
    check_not_empty(&probe.why, &at.key("why"))?;
    if probe.count.is_some() && (probe.min.is_some() || probe.max.is_some()) {
        return at.key("count").fault("either `count`, or `min` and `max`");
    }
    let (least, most) = probe.bounds();
    if least > most {
        return at.key("min").fault(format!("at least {least} and at most {most} is impossible"));
    }
    if (least, most) == (0, usize::MAX) {
        return at.key("min").fault("this holds for every tree");
    }
    if let Some(fix) = &probe.fix
        && set.fix(fix).is_none()
    {
        return at.key("fix").fault(format!("there is no fix `{fix}` in this set"));
    }
    if let Some(define) = probe.define.as_ref().filter(|define| !is_constant_name(define)) {
        return at.key("define").fault(format!("`{define}` is not the name of a macro: [A-Z][A-Z0-9_]*"));
    }
    let asked = |life: &LifeStatement| life.holds.contains(&probe.id) || life.fails.contains(&probe.id);
    let asked = set.fixes.iter().flat_map(|fix| &fix.life).any(asked);
    if probe.on_fail == ProbeConsequence::Ignore && probe.define.is_none() && !asked {
        let why = "`ignore` without a `define`, and without a fix whose `life` asks for it, does nothing";
        return at.key("on_fail").fault(why);
    }
    Ok(())
}

fn check_conformance(set: &PatchSet, own: &ConformanceSpec, at: &ValuePath) -> SetCheckResult {
    check_not_empty(&own.title, &at.key("title"))?;
    for (key, file) in [("before", &own.before), ("program", &own.program)] {
        if !is_inside(file) {
            return at.key(key).fault(format!("`{file}` is not a path in the set's folder"));
        }
    }
    if set.sidecars.is_empty() {
        return at.fault("there is nothing to compile: a set without a sidecar is shown by a server only");
    }
    if own.scenarios.is_empty() {
        return at.fault("it needs a [[conformance.scenario]]: this shows nothing");
    }
    for (number, part) in own.parts.iter().enumerate() {
        let at = at.element("part", number);
        check_files(&part.files, &at)?;
        match (&part.container, &part.lines) {
            (Some(one), None) => check_container(one, &at)?,
            (None, Some(_)) => {}
            _ => return at.fault("either `container` or `lines`"),
        }
        if part.under.as_ref().is_some_and(|under| under.is_empty() || !is_word(under)) {
            return at.key("under").fault("this is not the name of a macro");
        }
    }
    // Report a repeated id at the whole conformance program, not at a scenario.
    check_unique("scenario", "id", own.scenarios.iter().map(|one| one.id.as_str()), at)
        .map_err(|fault| at.error(fault.why))?;
    for (number, scenario) in own.scenarios.iter().enumerate() {
        let at = at.element("scenario", number);
        check_id(&scenario.id, &at.key("id"))?;
        check_not_empty(&scenario.text, &at.key("text"))?;
    }
    Ok(())
}
