//! Checks the conformance program of a set, as far as possible without a tree.

use super::SetCheckResult;
use super::words::{container, fault, files, id, is_inside, said, unique, with};
use crate::set::PatchSet;
use crate::set::conformance::ConformanceSpec;
use crate::set::load::position::PathStep::{Item, Key};

pub(super) fn check(set: &PatchSet, own: &ConformanceSpec) -> SetCheckResult {
    let at = [Key("conformance")];
    said(&own.title, &with(&at, &[Key("title")]))?;
    for (key, file) in [("before", &own.before), ("program", &own.program)] {
        if !is_inside(file) {
            return fault(&with(&at, &[Key(key)]), format!("`{file}` is not a path in the set's folder"));
        }
    }
    if set.sidecars.is_empty() {
        let why = "there is nothing to compile: a set without a sidecar is shown by a server only";
        return fault(&at, why.to_owned());
    }
    if own.scenarios.is_empty() {
        return fault(&at, "it needs a [[conformance.scenario]]: this shows nothing".to_owned());
    }
    for (number, part) in own.parts.iter().enumerate() {
        let at = with(&at, &[Key("part"), Item(number)]);
        files(&part.files, &at)?;
        match (&part.container, &part.lines) {
            (Some(one), None) => container(one, &at)?,
            (None, Some(_)) => {}
            _ => return fault(&at, "either `container` or `lines`".to_owned()),
        }
        if part.under.as_ref().is_some_and(|under| {
            under.is_empty() || !under.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
        }) {
            return fault(&with(&at, &[Key("under")]), "this is not the name of a macro".to_owned());
        }
    }
    unique("scenario", "id", own.scenarios.iter().map(|one| one.id.as_str()))
        .map_err(|(_, why)| (at.to_vec(), why))?;
    for (number, scenario) in own.scenarios.iter().enumerate() {
        let at = with(&at, &[Key("scenario"), Item(number)]);
        id(&scenario.id, &with(&at, &[Key("id")]))?;
        said(&scenario.text, &with(&at, &[Key("text")]))?;
    }
    Ok(())
}
