//! Loads the files of a set; errors name file, line and key.

mod check;
pub(crate) mod known;
mod position;
#[cfg(test)]
mod tests;

use position::{PathStep, TomlDocument, count_newlines};

use super::fingerprints::SeamFingerprints;
use super::{PatchSet, SetDocument, SetOrigin};
use crate::error::{PatchError, Result};

/// File that makes a folder a set.
pub(super) const SET_FILE: &str = "set.toml";
/// File with the known versions of a set's seams.
pub(super) const FINGERPRINTS_FILE: &str = "fingerprints.json";

/// Supported version of the format.
const SET_SCHEMA: u32 = 1;

/// An error with its position in the document.
type DocumentFault = (Vec<PathStep>, String);

/// Loads a set. `folder` is its folder's name, `shown` the folder's name in errors, `read` returns its files.
pub(crate) fn load_set(
    folder: &str,
    shown: &str,
    origin: SetOrigin,
    read: &dyn Fn(&str) -> Result<Option<Vec<u8>>>,
) -> Result<PatchSet> {
    let name = |file: &str| format!("{shown}/{file}");
    let missing = |file: &str| PatchError::Set {
        file: name(file),
        line: None,
        key: String::new(),
        why: "this file is missing".to_owned(),
    };
    let text = read(SET_FILE)?.ok_or_else(|| missing(SET_FILE))?;
    let text = String::from_utf8(text).map_err(|error| PatchError::Set {
        file: name(SET_FILE),
        line: Some(1 + count_newlines(error.as_bytes(), error.utf8_error().valid_up_to())),
        key: String::new(),
        why: "this is not UTF-8".to_owned(),
    })?;
    let file = name(SET_FILE);
    let document = TomlDocument::parse(&file, &text)?;
    let stated: SetDocument = document.read()?;
    let mut set = PatchSet {
        id: stated.id,
        title: stated.title,
        backends: stated.backends,
        first: stated.first,
        sidecars: stated.sidecars,
        hooks: stated.hooks,
        probes: stated.probes,
        seams: stated.seams,
        fixes: stated.fixes,
        diffs: stated.diffs,
        conformance: stated.conformance,
        digest: String::new(),
        fingerprints: SeamFingerprints::default(),
        origin,
    };
    let fault = |(path, why): DocumentFault| document.value_error(&path, why);
    if stated.schema != SET_SCHEMA {
        let why = format!("this is schema {}, known is {SET_SCHEMA}", stated.schema);
        return Err(fault((vec![PathStep::Key("schema")], why)));
    }
    check::check_set(&set, folder).map_err(fault)?;
    let content = |key: &'static str, number: usize, file: &str| {
        read(file)?.ok_or_else(|| {
            let path = vec![PathStep::Key(key), PathStep::Item(number), PathStep::Key("file")];
            document.value_error(&path, format!("there is no file {file} beside this one"))
        })
    };
    for (number, sidecar) in set.sidecars.iter_mut().enumerate() {
        sidecar.content = content("sidecar", number, &sidecar.file)?;
    }
    for (number, diff) in set.diffs.iter_mut().enumerate() {
        diff.content = content("diff", number, &diff.file)?;
        super::diff::validate_diff(diff).map_err(|why| {
            document.value_error(&[PathStep::Key("diff"), PathStep::Item(number), PathStep::Key("file")], why)
        })?;
    }
    if let Some(conformance) = &mut set.conformance {
        let content = |key: &'static str, file: &str| {
            read(file)?.ok_or_else(|| {
                let path = [PathStep::Key("conformance"), PathStep::Key(key)];
                document.value_error(&path, format!("there is no file {file} in the set's folder"))
            })
        };
        conformance.before_text = content("before", &conformance.before)?;
        conformance.program_text = content("program", &conformance.program)?;
    }
    set.digest = set_digest(&set, &text);
    set.fingerprints = match read(FINGERPRINTS_FILE)? {
        Some(text) => known::parse_fingerprints(&name(FINGERPRINTS_FILE), &text, &set.seams)?,
        None if set.seams.is_empty() => SeamFingerprints::default(),
        None => return Err(missing(FINGERPRINTS_FILE)),
    };
    Ok(set)
}

/// Hash over all files of a set except the known versions of upstream's code: these record reviews, and do
/// not change the set's effect.
fn set_digest(set: &PatchSet, text: &str) -> String {
    let mut parts: Vec<&[u8]> = vec![text.as_bytes()];
    parts.extend(set.sidecars.iter().flat_map(|one| [one.file.as_bytes(), &one.content]));
    parts.extend(set.diffs.iter().flat_map(|one| [one.file.as_bytes(), &one.content]));
    let own = set.conformance.iter();
    parts.extend(own.flat_map(|one| [one.before_text.as_slice(), &one.program_text]));
    crate::series::hash_parts(&parts)
}
