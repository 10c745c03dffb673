//! Versions of upstream's code that somebody looked at: hashes only, never the code.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::judgement::SeamSeen;
use crate::scan::normal::NORMALISATION;

/// The version of the file that is written and read.
pub const SCHEMA: u32 = 1;

/// The content of a set's `fingerprints.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fingerprints {
    /// Version of the format: 1.
    pub schema: u32,
    /// What was hashed, in words.
    #[serde(default)]
    pub normalisation: String,
    /// The known versions of each seam, oldest first.
    #[serde(default)]
    pub seams: BTreeMap<String, Vec<Known>>,
}

impl Default for Fingerprints {
    fn default() -> Self {
        Self { schema: SCHEMA, normalisation: NORMALISATION.to_owned(), seams: BTreeMap::new() }
    }
}

/// One known version of a container.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Known {
    /// 16 hexadecimal digits, or `absent`.
    pub hash: String,
    /// For people, such as `b8121`.
    pub label: String,
    /// The first commit that has it.
    #[serde(default)]
    pub commit: String,
    /// The named source that it was seen in, such as `llama.cpp`.
    #[serde(default)]
    pub source: String,
    /// A hash of 8 hexadecimal digits for each piece of the container.
    #[serde(default)]
    pub statements: Vec<String>,
}

/// The hash of a container that is not there.
pub(crate) const ABSENT: &str = "absent";

impl Fingerprints {
    /// The known versions of a seam.
    pub fn of(&self, seam: &str) -> &[Known] {
        self.seams.get(seam).map(Vec::as_slice).unwrap_or_default()
    }

    /// The content of the file, ending with a line end.
    ///
    /// # Errors
    ///
    /// None that is known: there is nothing in it that JSON cannot say.
    pub fn to_json(&self) -> Result<String, serde_json::Error> {
        serde_json::to_string_pretty(self).map(|text| text + "\n")
    }
}

/// `existing` with the versions of `seen` that it does not have. Pure, and the same for the same arguments: what is
/// known keeps its place, what is new is appended.
pub fn learn(
    existing: &Fingerprints,
    seen: &[SeamSeen],
    label: &str,
    commit: &str,
    source: &str,
) -> Fingerprints {
    let mut all = existing.clone();
    for one in seen {
        let known = all.seams.entry(one.seam.clone()).or_default();
        if !known.iter().any(|version| version.hash == one.hash) {
            known.push(Known {
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
