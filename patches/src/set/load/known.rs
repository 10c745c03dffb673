//! Loads the file with the known versions of a set's seams.

use crate::error::{PatchError, Result};
use crate::scan::normal::{CONTAINER_DIGITS, PIECE_DIGITS};
use crate::set::SetSeam;
use crate::set::fingerprints::{ABSENT_HASH, FINGERPRINTS_SCHEMA, SeamFingerprints};

/// Parses a `fingerprints.json`; `file` is its name in errors.
pub(crate) fn parse_fingerprints(file: &str, text: &[u8], seams: &[SetSeam]) -> Result<SeamFingerprints> {
    let fault = |line: Option<usize>, key: String, why: String| PatchError::Set {
        file: file.to_owned(),
        line,
        key,
        why,
    };
    let read: SeamFingerprints = serde_json::from_slice(text)
        .map_err(|error| fault(Some(error.line()), String::new(), error.to_string()))?;
    if read.schema != FINGERPRINTS_SCHEMA {
        return Err(fault(
            None,
            "schema".to_owned(),
            format!("this is schema {}, known is {FINGERPRINTS_SCHEMA}", read.schema),
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
            if version.hash != ABSENT_HASH && !is_hex(&version.hash, CONTAINER_DIGITS) {
                let why = format!(
                    "`{}` is neither {CONTAINER_DIGITS} hexadecimal digits nor `{ABSENT_HASH}`",
                    version.hash
                );
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
