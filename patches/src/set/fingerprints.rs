//! Hashes of reviewed versions of upstream's code, without the code.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::SetSeam;
use crate::error::PatchError;
use crate::scan::normal::{CONTAINER_DIGITS, NORMALISATION, PIECE_DIGITS};

/// Supported version of the file.
pub const FINGERPRINTS_SCHEMA: u32 = 1;

/// Content of a set's `fingerprints.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SeamFingerprints {
    /// Version of the format: 1.
    pub schema: u32,
    /// Description of the hashed text.
    #[serde(default)]
    pub normalisation: String,
    /// Known versions of each seam, oldest first.
    #[serde(default)]
    pub seams: BTreeMap<String, Vec<KnownVersion>>,
}

impl Default for SeamFingerprints {
    fn default() -> Self {
        Self { schema: FINGERPRINTS_SCHEMA, normalisation: NORMALISATION.to_owned(), seams: BTreeMap::new() }
    }
}

/// A known version of a container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KnownVersion {
    /// Hash, 16 hexadecimal digits, or `absent`.
    pub hash: String,
    /// Label for users, such as `b8121`.
    pub label: String,
    /// First commit with this version.
    #[serde(default)]
    pub commit: String,
    /// Named source of this version, such as `llama.cpp`.
    #[serde(default)]
    pub source: String,
    /// Hashes of the container's pieces, 8 hexadecimal digits each.
    #[serde(default)]
    pub statements: Vec<String>,
}

impl KnownVersion {
    /// Fails with the invalid key and the reason. `before`: the earlier versions of the same seam.
    fn check(&self, before: &[Self]) -> Result<(), (&'static str, String)> {
        let is_hex = |text: &str, digits: usize| {
            text.len() == digits && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
        };
        let hash = &self.hash;
        if hash != ABSENT_HASH && !is_hex(hash, CONTAINER_DIGITS) {
            let why =
                format!("`{hash}` is neither {CONTAINER_DIGITS} hexadecimal digits nor `{ABSENT_HASH}`");
            return Err(("hash", why));
        }
        if before.iter().any(|before| before.hash == *hash) {
            return Err(("hash", format!("`{hash}` stands here twice")));
        }
        if self.label.is_empty() {
            return Err(("label", "this says nothing".to_owned()));
        }
        match self.statements.iter().find(|piece| !is_hex(piece, PIECE_DIGITS)) {
            Some(bad) => Err(("statements", format!("`{bad}` is not {PIECE_DIGITS} hexadecimal digits"))),
            None => Ok(()),
        }
    }
}

/// A seam in a tree.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SeamSeen {
    /// Id of the seam.
    pub seam: String,
    /// File that contains the seam.
    pub file: Option<String>,
    /// First and last line of the container, from 1; of several containers, those of the first one.
    pub lines: Option<(usize, usize)>,
    /// Hash of 16 hexadecimal digits, or `absent`.
    pub hash: String,
    /// Hashes of the container's pieces, 8 hexadecimal digits each.
    #[serde(skip)]
    pub statements: Vec<String>,
    /// Label of the matching known version; `None`: a new version.
    pub known: Option<String>,
}

pub(crate) const ABSENT_HASH: &str = "absent";

impl SeamFingerprints {
    pub(crate) fn parse(file: &str, text: &[u8], seams: &[SetSeam]) -> crate::Result<Self> {
        let read: Self = serde_json::from_slice(text).map_err(|error| PatchError::Set {
            file: file.to_owned(),
            line: Some(error.line()),
            key: String::new(),
            why: error.to_string(),
        })?;
        if read.schema != FINGERPRINTS_SCHEMA {
            let why = format!("this is schema {}, known is {FINGERPRINTS_SCHEMA}", read.schema);
            return Err(PatchError::set(file, "schema", why));
        }
        for (seam, versions) in &read.seams {
            if !seams.iter().any(|known| known.id == *seam) {
                return Err(PatchError::set(file, format!("seams.{seam}"), "the set has no such seam"));
            }
            for (number, version) in versions.iter().enumerate() {
                version.check(&versions[..number]).map_err(|(key, why)| {
                    PatchError::set(file, format!("seams.{seam}[{}].{key}", number + 1), why)
                })?;
            }
        }
        Ok(read)
    }

    /// Known versions of a seam.
    pub fn versions(&self, seam: &str) -> &[KnownVersion] {
        self.seams.get(seam).map(Vec::as_slice).unwrap_or_default()
    }

    /// Serializes the file, with a final line end.
    ///
    /// # Errors
    /// None known: all content can be represented in JSON.
    pub fn to_json(&self) -> Result<String, serde_json::Error> {
        serde_json::to_string_pretty(self).map(|text| text + "\n")
    }
}

/// Adds the versions in `seen` that `existing` lacks: known versions keep their order, new ones follow.
pub fn add_versions(
    existing: &SeamFingerprints,
    seen: &[SeamSeen],
    label: &str,
    commit: &str,
    source: &str,
) -> SeamFingerprints {
    let mut all = existing.clone();
    for one in seen {
        let known = all.seams.entry(one.seam.clone()).or_default();
        if !known.iter().any(|version| version.hash == one.hash) {
            known.push(KnownVersion {
                hash: one.hash.clone(),
                label: label.to_owned(),
                commit: commit.to_owned(),
                source: source.to_owned(),
                statements: one.statements.clone(),
            });
        }
    }
    all
}
