//! Checks everything in a `set.toml` that its types do not enforce.

mod conformance;
mod fixes;
mod words;

use std::collections::BTreeSet;

use super::DocumentFault;
use super::position::PathStep::{self, Item, Key};
use crate::marker::MARKER_PREFIX;
use crate::scan;
use crate::set::life::LifeStatement;
use crate::set::{HookPosition, PatchSet, ProbeConsequence, SetHook, SetProbe};
use fixes::check_fix;
use words::{backends, build, container, fault, file_name, files, id, said, unique, with, word};

type SetCheckResult = Result<(), DocumentFault>;

pub(super) fn set(set: &PatchSet, folder: &str) -> SetCheckResult {
    id(&set.id, &[Key("id")])?;
    if set.id != folder {
        return fault(&[Key("id")], format!("the folder is called `{folder}`: both must be the same"));
    }
    said(&set.title, &[Key("title")])?;
    backends(&set.backends, &[Key("backends")])?;
    if let Some(first) = &set.first {
        build(first, &[Key("first")])?;
    }
    if set.hooks.is_empty() && set.diffs.is_empty() {
        return fault(&[], "a set needs a [[hook]] or a [[diff]]: this one changes nothing".to_owned());
    }
    unique("hook", "id", set.hooks.iter().map(|hook| hook.id.as_str()))?;
    unique("probe", "id", set.probes.iter().map(|probe| probe.id.as_str()))?;
    unique("seam", "id", set.seams.iter().map(|seam| seam.id.as_str()))?;
    unique("fix", "id", set.fixes.iter().map(|fix| fix.id.as_str()))?;
    unique("sidecar", "file", set.sidecars.iter().map(|sidecar| sidecar.file.as_str()))?;
    unique("diff", "file", set.diffs.iter().map(|diff| diff.file.as_str()))?;
    for (number, hook) in set.hooks.iter().enumerate() {
        check_hook(hook, &[Key("hook"), Item(number)])?;
    }
    for (number, sidecar) in set.sidecars.iter().enumerate() {
        let at = [Key("sidecar"), Item(number)];
        file_name(&sidecar.file, &with(&at, &[Key("file")]))?;
        if set.hook(&sidecar.beside).is_none() {
            return fault(&with(&at, &[Key("beside")]), format!("there is no hook `{}`", sidecar.beside));
        }
    }
    let mut defines = BTreeSet::new();
    for (number, probe) in set.probes.iter().enumerate() {
        let at = [Key("probe"), Item(number)];
        check_probe(set, probe, &at)?;
        if let Some(define) = &probe.define
            && !defines.insert(define)
        {
            return fault(&with(&at, &[Key("define")]), format!("another probe defines {define} too"));
        }
    }
    for (number, seam) in set.seams.iter().enumerate() {
        let at = [Key("seam"), Item(number)];
        word(&seam.id, "-_", &with(&at, &[Key("id")]))?;
        files(&seam.files, &at)?;
        container(&seam.container, &at)?;
    }
    let mut variables = BTreeSet::new();
    for (number, fix) in set.fixes.iter().enumerate() {
        check_fix(set, fix, &[Key("fix"), Item(number)], &mut variables)?;
    }
    if let Some(own) = &set.conformance {
        conformance::check(set, own)?;
    }
    for (number, diff) in set.diffs.iter().enumerate() {
        let at = [Key("diff"), Item(number)];
        file_name(&diff.file, &with(&at, &[Key("file")]))?;
        for (key, bound) in [("first", &diff.first), ("last", &diff.last)] {
            if let Some(bound) = bound {
                build(bound, &with(&at, &[Key(key)]))?;
            }
        }
        let ranged = diff.first.is_some() || diff.last.is_some();
        if ranged != diff.commits.is_empty() {
            return fault(
                &at,
                "a diff says for which revisions it is, either by `first` and `last` or by `commits`"
                    .to_owned(),
            );
        }
    }
    Ok(())
}

fn check_hook(hook: &SetHook, at: &[PathStep]) -> SetCheckResult {
    id(&hook.id, &with(at, &[Key("id")]))?;
    files(&hook.files, at)?;
    if let Some(inside) = &hook.container {
        container(inside, at)?;
    }
    if hook.optional && hook.container.is_none() {
        let text = "without a container it cannot be told whether the hook is needed".to_owned();
        return fault(&with(at, &[Key("optional")]), text);
    }
    let anchor_at = with(at, &[Key("anchor")]);
    match (hook.at, &hook.anchor) {
        (HookPosition::BeforeContainer, None) if hook.container.is_none() => {
            return fault(&with(at, &[Key("container")]), "`before-container` needs a container".to_owned());
        }
        (HookPosition::BeforeContainer, None) => {}
        (HookPosition::BeforeContainer, Some(_)) => {
            return fault(
                &anchor_at,
                "`before-container` takes no anchor: the container is its place".to_owned(),
            );
        }
        (HookPosition::Before | HookPosition::After, None) => {
            return fault(&anchor_at, "`before` and `after` need an anchor".to_owned());
        }
        (HookPosition::Before | HookPosition::After, Some(anchor)) => check_anchor(anchor, &anchor_at)?,
    }
    if hook.when.is_some() && hook.container.is_none() {
        let text = "without a container there is nowhere to look whether the hook is needed".to_owned();
        return fault(&with(at, &[Key("when")]), text);
    }
    if let Some(marker) = &hook.marker {
        let at = with(at, &[Key("marker")]);
        said(marker, &at)?;
        if !hook.insert.iter().any(|line| line.contains(marker)) {
            return fault(&at, "none of the lines has this text in it".to_owned());
        }
    }
    let insert_at = with(at, &[Key("insert")]);
    if hook.insert.is_empty() {
        return fault(&insert_at, "there is no line to insert".to_owned());
    }
    for (number, line) in hook.insert.iter().enumerate() {
        let at = with(&insert_at, &[Item(number)]);
        if line.trim().is_empty() {
            return fault(&at, "an empty line cannot carry its mark".to_owned());
        }
        if line.contains(['\n', '\r']) {
            return fault(&at, "each line is an item of its own".to_owned());
        }
        if line.ends_with('\\') {
            return fault(&at, "a line cannot be continued: a mark stands at its end".to_owned());
        }
        if line.trim() != line {
            return fault(
                &at,
                "give the line without blanks around it: it is indented as the line beside it".to_owned(),
            );
        }
        if line.contains(MARKER_PREFIX) {
            return fault(&at, format!("`{MARKER_PREFIX}` is put behind it when it is inserted"));
        }
        // An open string or comment would include the marker, and the line could not be removed again.
        let marked = format!("{line} {MARKER_PREFIX}a/b");
        if !scan::keeps_marker(&marked) {
            return fault(&at, "a comment, string or character that this line does not close".to_owned());
        }
    }
    Ok(())
}

fn check_anchor(anchor: &str, at: &[PathStep]) -> SetCheckResult {
    if anchor.trim().is_empty() {
        return fault(at, "an empty anchor is everywhere".to_owned());
    }
    if !anchor.is_ascii() || anchor.contains(['\n', '\r']) {
        return fault(at, "an anchor is one line of ASCII".to_owned());
    }
    if scan::ScannedSource::new(anchor.as_bytes().to_vec()).code() != anchor {
        return fault(
            at,
            "an anchor holds no comment and no string (but for the name behind #include): these are not looked at"
                .to_owned(),
        );
    }
    Ok(())
}

fn check_probe(set: &PatchSet, probe: &SetProbe, at: &[PathStep]) -> SetCheckResult {
    id(&probe.id, &with(at, &[Key("id")]))?;
    files(&probe.files, at)?;
    if let Some(inside) = &probe.container {
        container(inside, at)?;
    }
    if !probe.outside.is_empty() && probe.container.is_some() {
        return fault(&with(at, &[Key("outside")]), "either `container` or `outside`".to_owned());
    }
    for (number, one) in probe.outside.iter().enumerate() {
        container(one, &with(at, &[Key("outside"), Item(number)]))?;
    }
    if !probe.guarded.is_empty() && probe.container.is_some() {
        return fault(&with(at, &[Key("guarded")]), "either `container` or `guarded`".to_owned());
    }
    for (number, one) in probe.guarded.iter().enumerate() {
        let at = with(at, &[Key("guarded"), Item(number)]);
        match set.hook(one) {
            None => return fault(&at, format!("there is no hook `{one}`")),
            Some(hook) if hook.container.is_none() => {
                return fault(&at, format!("the hook `{one}` has no container that it could guard"));
            }
            Some(_) => {}
        }
    }
    said(&probe.why, &with(at, &[Key("why")]))?;
    if probe.count.is_some() && (probe.min.is_some() || probe.max.is_some()) {
        return fault(&with(at, &[Key("count")]), "either `count`, or `min` and `max`".to_owned());
    }
    let (least, most) = probe.bounds();
    if least > most {
        return fault(&with(at, &[Key("min")]), format!("at least {least} and at most {most} is impossible"));
    }
    if (least, most) == (0, usize::MAX) {
        return fault(&with(at, &[Key("min")]), "this holds for every tree".to_owned());
    }
    if let Some(fix) = &probe.fix
        && set.fix(fix).is_none()
    {
        return fault(&with(at, &[Key("fix")]), format!("there is no fix `{fix}` in this set"));
    }
    if let Some(define) = &probe.define {
        let good = define.starts_with(|sign: char| sign.is_ascii_uppercase())
            && define.bytes().all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_');
        if !good {
            return fault(
                &with(at, &[Key("define")]),
                format!("`{define}` is not the name of a macro: [A-Z][A-Z0-9_]*"),
            );
        }
    }
    let asked = |life: &LifeStatement| life.holds.contains(&probe.id) || life.fails.contains(&probe.id);
    let asked = set.fixes.iter().flat_map(|fix| &fix.life).any(asked);
    if probe.on_fail == ProbeConsequence::Ignore && probe.define.is_none() && !asked {
        let why = "`ignore` without a `define`, and without a fix whose `life` asks for it, does nothing";
        return fault(&with(at, &[Key("on_fail")]), why.to_owned());
    }
    Ok(())
}
