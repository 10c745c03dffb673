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
use words::{
    check_backends, check_build, check_container, check_error, check_file_name, check_files, check_id,
    check_not_empty, check_unique, check_word, extend_path,
};

type SetCheckResult = Result<(), DocumentFault>;

pub(super) fn check_set(set: &PatchSet, folder: &str) -> SetCheckResult {
    check_id(&set.id, &[Key("id")])?;
    if set.id != folder {
        return check_error(&[Key("id")], format!("the folder is called `{folder}`: both must be the same"));
    }
    check_not_empty(&set.title, &[Key("title")])?;
    check_backends(&set.backends, &[Key("backends")])?;
    if let Some(first) = &set.first {
        check_build(first, &[Key("first")])?;
    }
    if set.hooks.is_empty() && set.diffs.is_empty() {
        return check_error(&[], "a set needs a [[hook]] or a [[diff]]: this one changes nothing".to_owned());
    }
    check_unique("hook", "id", set.hooks.iter().map(|hook| hook.id.as_str()))?;
    check_unique("probe", "id", set.probes.iter().map(|probe| probe.id.as_str()))?;
    check_unique("seam", "id", set.seams.iter().map(|seam| seam.id.as_str()))?;
    check_unique("fix", "id", set.fixes.iter().map(|fix| fix.id.as_str()))?;
    check_unique("sidecar", "file", set.sidecars.iter().map(|sidecar| sidecar.file.as_str()))?;
    check_unique("diff", "file", set.diffs.iter().map(|diff| diff.file.as_str()))?;
    for (number, hook) in set.hooks.iter().enumerate() {
        check_hook(hook, &[Key("hook"), Item(number)])?;
    }
    for (number, sidecar) in set.sidecars.iter().enumerate() {
        let at = [Key("sidecar"), Item(number)];
        check_file_name(&sidecar.file, &extend_path(&at, &[Key("file")]))?;
        if set.hook(&sidecar.beside).is_none() {
            return check_error(
                &extend_path(&at, &[Key("beside")]),
                format!("there is no hook `{}`", sidecar.beside),
            );
        }
    }
    let mut defines = BTreeSet::new();
    for (number, probe) in set.probes.iter().enumerate() {
        let at = [Key("probe"), Item(number)];
        check_probe(set, probe, &at)?;
        if let Some(define) = &probe.define
            && !defines.insert(define)
        {
            return check_error(
                &extend_path(&at, &[Key("define")]),
                format!("another probe defines {define} too"),
            );
        }
    }
    for (number, seam) in set.seams.iter().enumerate() {
        let at = [Key("seam"), Item(number)];
        check_word(&seam.id, "-_", &extend_path(&at, &[Key("id")]))?;
        check_files(&seam.files, &at)?;
        check_container(&seam.container, &at)?;
    }
    let mut variables = BTreeSet::new();
    for (number, fix) in set.fixes.iter().enumerate() {
        check_fix(set, fix, &[Key("fix"), Item(number)], &mut variables)?;
    }
    if let Some(own) = &set.conformance {
        conformance::check_conformance(set, own)?;
    }
    for (number, diff) in set.diffs.iter().enumerate() {
        let at = [Key("diff"), Item(number)];
        check_file_name(&diff.file, &extend_path(&at, &[Key("file")]))?;
        for (key, bound) in [("first", &diff.first), ("last", &diff.last)] {
            if let Some(bound) = bound {
                check_build(bound, &extend_path(&at, &[Key(key)]))?;
            }
        }
        let ranged = diff.first.is_some() || diff.last.is_some();
        if ranged != diff.commits.is_empty() {
            return check_error(
                &at,
                "a diff says for which revisions it is, either by `first` and `last` or by `commits`"
                    .to_owned(),
            );
        }
    }
    Ok(())
}

fn check_hook(hook: &SetHook, at: &[PathStep]) -> SetCheckResult {
    check_id(&hook.id, &extend_path(at, &[Key("id")]))?;
    check_files(&hook.files, at)?;
    if let Some(inside) = &hook.container {
        check_container(inside, at)?;
    }
    if hook.optional && hook.container.is_none() {
        let text = "without a container it cannot be told whether the hook is needed".to_owned();
        return check_error(&extend_path(at, &[Key("optional")]), text);
    }
    let anchor_at = extend_path(at, &[Key("anchor")]);
    match (hook.at, &hook.anchor) {
        (HookPosition::BeforeContainer, None) if hook.container.is_none() => {
            return check_error(
                &extend_path(at, &[Key("container")]),
                "`before-container` needs a container".to_owned(),
            );
        }
        (HookPosition::BeforeContainer, None) => {}
        (HookPosition::BeforeContainer, Some(_)) => {
            return check_error(
                &anchor_at,
                "`before-container` takes no anchor: the container is its place".to_owned(),
            );
        }
        (HookPosition::Before | HookPosition::After, None) => {
            return check_error(&anchor_at, "`before` and `after` need an anchor".to_owned());
        }
        (HookPosition::Before | HookPosition::After, Some(anchor)) => check_anchor(anchor, &anchor_at)?,
    }
    if hook.when.is_some() && hook.container.is_none() {
        let text = "without a container there is nowhere to look whether the hook is needed".to_owned();
        return check_error(&extend_path(at, &[Key("when")]), text);
    }
    if let Some(marker) = &hook.marker {
        let at = extend_path(at, &[Key("marker")]);
        check_not_empty(marker, &at)?;
        if !hook.insert.iter().any(|line| line.contains(marker)) {
            return check_error(&at, "none of the lines has this text in it".to_owned());
        }
    }
    let insert_at = extend_path(at, &[Key("insert")]);
    if hook.insert.is_empty() {
        return check_error(&insert_at, "there is no line to insert".to_owned());
    }
    for (number, line) in hook.insert.iter().enumerate() {
        let at = extend_path(&insert_at, &[Item(number)]);
        if line.trim().is_empty() {
            return check_error(&at, "an empty line cannot carry its mark".to_owned());
        }
        if line.contains(['\n', '\r']) {
            return check_error(&at, "each line is an item of its own".to_owned());
        }
        if line.ends_with('\\') {
            return check_error(&at, "a line cannot be continued: a mark stands at its end".to_owned());
        }
        if line.trim() != line {
            return check_error(
                &at,
                "give the line without blanks around it: it is indented as the line beside it".to_owned(),
            );
        }
        if line.contains(MARKER_PREFIX) {
            return check_error(&at, format!("`{MARKER_PREFIX}` is put behind it when it is inserted"));
        }
        // An open string or comment would include the marker, and the line could not be removed again.
        let marked = format!("{line} {MARKER_PREFIX}a/b");
        if !scan::keeps_marker(&marked) {
            return check_error(
                &at,
                "a comment, string or character that this line does not close".to_owned(),
            );
        }
    }
    Ok(())
}

fn check_anchor(anchor: &str, at: &[PathStep]) -> SetCheckResult {
    if anchor.trim().is_empty() {
        return check_error(at, "an empty anchor is everywhere".to_owned());
    }
    if !anchor.is_ascii() || anchor.contains(['\n', '\r']) {
        return check_error(at, "an anchor is one line of ASCII".to_owned());
    }
    if scan::ScannedSource::new(anchor.as_bytes().to_vec()).code() != anchor {
        return check_error(
            at,
            "an anchor holds no comment and no string (but for the name behind #include): these are not looked at"
                .to_owned(),
        );
    }
    Ok(())
}

fn check_probe(set: &PatchSet, probe: &SetProbe, at: &[PathStep]) -> SetCheckResult {
    check_id(&probe.id, &extend_path(at, &[Key("id")]))?;
    check_files(&probe.files, at)?;
    if let Some(inside) = &probe.container {
        check_container(inside, at)?;
    }
    if !probe.outside.is_empty() && probe.container.is_some() {
        return check_error(
            &extend_path(at, &[Key("outside")]),
            "either `container` or `outside`".to_owned(),
        );
    }
    for (number, one) in probe.outside.iter().enumerate() {
        check_container(one, &extend_path(at, &[Key("outside"), Item(number)]))?;
    }
    if !probe.guarded.is_empty() && probe.container.is_some() {
        return check_error(
            &extend_path(at, &[Key("guarded")]),
            "either `container` or `guarded`".to_owned(),
        );
    }
    for (number, one) in probe.guarded.iter().enumerate() {
        let at = extend_path(at, &[Key("guarded"), Item(number)]);
        match set.hook(one) {
            None => return check_error(&at, format!("there is no hook `{one}`")),
            Some(hook) if hook.container.is_none() => {
                return check_error(&at, format!("the hook `{one}` has no container that it could guard"));
            }
            Some(_) => {}
        }
    }
    check_not_empty(&probe.why, &extend_path(at, &[Key("why")]))?;
    if probe.count.is_some() && (probe.min.is_some() || probe.max.is_some()) {
        return check_error(
            &extend_path(at, &[Key("count")]),
            "either `count`, or `min` and `max`".to_owned(),
        );
    }
    let (least, most) = probe.bounds();
    if least > most {
        return check_error(
            &extend_path(at, &[Key("min")]),
            format!("at least {least} and at most {most} is impossible"),
        );
    }
    if (least, most) == (0, usize::MAX) {
        return check_error(&extend_path(at, &[Key("min")]), "this holds for every tree".to_owned());
    }
    if let Some(fix) = &probe.fix
        && set.fix(fix).is_none()
    {
        return check_error(&extend_path(at, &[Key("fix")]), format!("there is no fix `{fix}` in this set"));
    }
    if let Some(define) = &probe.define {
        let good = define.starts_with(|sign: char| sign.is_ascii_uppercase())
            && define.bytes().all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_');
        if !good {
            return check_error(
                &extend_path(at, &[Key("define")]),
                format!("`{define}` is not the name of a macro: [A-Z][A-Z0-9_]*"),
            );
        }
    }
    let asked = |life: &LifeStatement| life.holds.contains(&probe.id) || life.fails.contains(&probe.id);
    let asked = set.fixes.iter().flat_map(|fix| &fix.life).any(asked);
    if probe.on_fail == ProbeConsequence::Ignore && probe.define.is_none() && !asked {
        let why = "`ignore` without a `define`, and without a fix whose `life` asks for it, does nothing";
        return check_error(&extend_path(at, &[Key("on_fail")]), why.to_owned());
    }
    Ok(())
}
