//! Loads the files of a set; errors name file, line and key.

mod check;
mod position;
#[cfg(test)]
mod tests;

use position::{TomlDocument, ValuePath, count_newlines};

use super::fingerprints::SeamFingerprints;
use super::{PatchSet, SetOrigin};
use crate::error::{PatchError, Result};

pub(super) const SET_FILE: &str = "set.toml";
pub(super) const FINGERPRINTS_FILE: &str = "fingerprints.json";

const SET_SCHEMA: u32 = 1;

/// Loads a set. `folder` is its folder's name, `shown` the folder's name in errors, `read` returns its files.
pub(crate) fn load_set(
    folder: &str,
    shown: &str,
    origin: SetOrigin,
    read: &dyn Fn(&str) -> Result<Option<Vec<u8>>>,
) -> Result<PatchSet> {
    let name = |file: &str| format!("{shown}/{file}");
    let missing = |file: &str| PatchError::set(name(file), "", "this file is missing");
    let text = read(SET_FILE)?.ok_or_else(|| missing(SET_FILE))?;
    let text = String::from_utf8(text).map_err(|error| PatchError::Set {
        file: name(SET_FILE),
        line: Some(1 + count_newlines(error.as_bytes(), error.utf8_error().valid_up_to())),
        key: String::new(),
        why: "this is not UTF-8".to_owned(),
    })?;
    let file = name(SET_FILE);
    let document = TomlDocument::parse(&file, &text)?;
    let fault = |fault| document.value_error(fault);
    let top = ValuePath::default();
    let mut set: PatchSet = document.read()?;
    set.origin = origin;
    if set.schema != SET_SCHEMA {
        let why = format!("this is schema {}, known is {SET_SCHEMA}", set.schema);
        return Err(fault(top.key("schema").error(why)));
    }
    check::check_set(&set, folder).map_err(fault)?;
    let content = |at: &ValuePath, file: &str, place: &str| {
        read(file)?.ok_or_else(|| fault(at.error(format!("there is no file {file} {place}"))))
    };
    for (number, sidecar) in set.sidecars.iter_mut().enumerate() {
        let at = top.element("sidecar", number).key("file");
        sidecar.content = content(&at, &sidecar.file, "beside this one")?;
    }
    for (number, diff) in set.diffs.iter_mut().enumerate() {
        let at = top.element("diff", number).key("file");
        diff.content = content(&at, &diff.file, "beside this one")?;
        super::diff::validate_diff(diff).map_err(|why| fault(at.error(why)))?;
    }
    if let Some(conformance) = &mut set.conformance {
        let at = top.key("conformance");
        let place = "in the set's folder";
        conformance.before_text = content(&at.key("before"), &conformance.before, place)?;
        conformance.program_text = content(&at.key("program"), &conformance.program, place)?;
    }
    set.digest = set_digest(&set, &text);
    set.fingerprints = match read(FINGERPRINTS_FILE)? {
        Some(text) => SeamFingerprints::parse(&name(FINGERPRINTS_FILE), &text, &set.seams)?,
        None if set.seams.is_empty() => SeamFingerprints::default(),
        None => return Err(missing(FINGERPRINTS_FILE)),
    };
    Ok(set)
}

/// Hash over all files of a set, except known versions of upstream's code, which do not change its effect.
fn set_digest(set: &PatchSet, text: &str) -> String {
    let mut parts: Vec<&[u8]> = vec![text.as_bytes()];
    parts.extend(set.sidecars.iter().flat_map(|one| [one.file.as_bytes(), &one.content]));
    parts.extend(set.diffs.iter().flat_map(|one| [one.file.as_bytes(), &one.content]));
    let own = set.conformance.iter();
    parts.extend(own.flat_map(|one| [one.before_text.as_slice(), &one.program_text]));
    crate::edits::hash_parts(&parts)
}
