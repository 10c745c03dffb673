//! Checks the conformance program of a set, as far as possible without a tree.

use super::SetCheckResult;
use super::words::{
    check_container, check_error, check_files, check_id, check_not_empty, check_unique, extend_path,
    is_inside,
};
use crate::set::PatchSet;
use crate::set::conformance::ConformanceSpec;
use crate::set::load::position::PathStep::{Item, Key};

pub(super) fn check_conformance(set: &PatchSet, own: &ConformanceSpec) -> SetCheckResult {
    let at = [Key("conformance")];
    check_not_empty(&own.title, &extend_path(&at, &[Key("title")]))?;
    for (key, file) in [("before", &own.before), ("program", &own.program)] {
        if !is_inside(file) {
            return check_error(
                &extend_path(&at, &[Key(key)]),
                format!("`{file}` is not a path in the set's folder"),
            );
        }
    }
    if set.sidecars.is_empty() {
        let why = "there is nothing to compile: a set without a sidecar is shown by a server only";
        return check_error(&at, why.to_owned());
    }
    if own.scenarios.is_empty() {
        return check_error(&at, "it needs a [[conformance.scenario]]: this shows nothing".to_owned());
    }
    for (number, part) in own.parts.iter().enumerate() {
        let at = extend_path(&at, &[Key("part"), Item(number)]);
        check_files(&part.files, &at)?;
        match (&part.container, &part.lines) {
            (Some(one), None) => check_container(one, &at)?,
            (None, Some(_)) => {}
            _ => return check_error(&at, "either `container` or `lines`".to_owned()),
        }
        if part.under.as_ref().is_some_and(|under| {
            under.is_empty() || !under.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
        }) {
            return check_error(
                &extend_path(&at, &[Key("under")]),
                "this is not the name of a macro".to_owned(),
            );
        }
    }
    check_unique("scenario", "id", own.scenarios.iter().map(|one| one.id.as_str()))
        .map_err(|(_, why)| (at.to_vec(), why))?;
    for (number, scenario) in own.scenarios.iter().enumerate() {
        let at = extend_path(&at, &[Key("scenario"), Item(number)]);
        check_id(&scenario.id, &extend_path(&at, &[Key("id")]))?;
        check_not_empty(&scenario.text, &extend_path(&at, &[Key("text")]))?;
    }
    Ok(())
}
