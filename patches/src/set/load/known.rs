//! Loads the file with the known versions of a set's seams.

use crate::error::{Error, Result};
use crate::scan::normal::{DIGITS, PIECE_DIGITS};
use crate::set::Seam;
use crate::set::fingerprints::{ABSENT, Fingerprints, SCHEMA};

/// Parses a `fingerprints.json`; `file` is its name in errors.
pub(crate) fn parse(file: &str, text: &[u8], seams: &[Seam]) -> Result<Fingerprints> {
    let fault =
        |line: Option<usize>, key: String, why: String| Error::Set { file: file.to_owned(), line, key, why };
    let read: Fingerprints = serde_json::from_slice(text)
        .map_err(|error| fault(Some(error.line()), String::new(), error.to_string()))?;
    if read.schema != SCHEMA {
        return Err(fault(
            None,
            "schema".to_owned(),
            format!("this is schema {}, known is {SCHEMA}", read.schema),
        ));
    }
    let is_hex = |text: &str, digits: usize| {
        text.len() == digits
            && text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
    };
    for (seam, versions) in &read.seams {
        let key = format!("seams.{seam}");
        if !seams.iter().any(|known| known.id == *seam) {
            return Err(fault(None, key, "the set has no such seam".to_owned()));
        }
        for (number, version) in versions.iter().enumerate() {
            let key = |of: &str| format!("{key}[{}].{of}", number + 1);
            if version.hash != ABSENT && !is_hex(&version.hash, DIGITS) {
                let why = format!("`{}` is neither {DIGITS} hexadecimal digits nor `{ABSENT}`", version.hash);
                return Err(fault(None, key("hash"), why));
            }
            if versions.iter().take(number).any(|before| before.hash == version.hash) {
                return Err(fault(None, key("hash"), format!("`{}` stands here twice", version.hash)));
            }
            if version.label.is_empty() {
                return Err(fault(None, key("label"), "this says nothing".to_owned()));
            }
            if let Some(bad) = version.statements.iter().find(|piece| !is_hex(piece, PIECE_DIGITS)) {
                return Err(fault(
                    None,
                    key("statements"),
                    format!("`{bad}` is not {PIECE_DIGITS} hexadecimal digits"),
                ));
            }
        }
    }
    Ok(read)
}
