//! The record of a verification, valid only for the set and the code with the recorded hashes.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::judgement::{PatchStatus, SetJudgement};
use crate::set::PatchSet;
use crate::set::fingerprints::SeamSeen;

/// Supported version of the file.
pub const PROOFS_SCHEMA: u32 = 1;

/// Content of `verified.toml`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ProofRecords {
    /// Version of the format: 1.
    pub schema: u32,
    /// Records, oldest first.
    #[serde(default, rename = "verified")]
    pub all: Vec<SetProof>,
}

/// Record of a set in a tree.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct SetProof {
    /// Id of the set.
    pub set: String,
    /// Hash of the set's files: `PatchSet::digest`.
    pub digest: String,
    /// Revision and location of the tree, for readers.
    pub tree: String,
    /// Time of the verification, RFC 3339 in UTC.
    pub shown: String,
    /// Machine of the verification.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub host: String,
    /// Tools by their version output.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tools: Vec<String>,
    /// Results of all steps, including impossible ones.
    #[serde(default)]
    pub steps: Vec<ProofStep>,
    /// Hash of each seam in that tree, or `absent`.
    pub seams: BTreeMap<String, String>,
    /// Hash of all lines inserted by hooks, and of the sidecars as written there.
    pub placed: String,
}

/// A step of a verification.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ProofStep {
    /// Tested property.
    pub what: String,
    /// Result.
    pub how: StepResult,
    /// Observation, or why there is none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub text: String,
}

/// Result of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum StepResult {
    /// The property was shown.
    Shown,
    /// The property does not concern this tree.
    NotHere,
    /// The property cannot be tested on this machine.
    NotShown,
    /// The property does not hold.
    Failed,
}

impl StepResult {
    /// Name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Shown => "shown",
            Self::NotHere => "not here",
            Self::NotShown => "not shown",
            Self::Failed => "FAILED",
        }
    }
}

impl ProofStep {
    /// A step with its result; `text` may be empty.
    pub fn new(what: String, how: StepResult, text: impl Into<String>) -> Self {
        Self { what, how, text: text.into() }
    }
}

impl fmt::Display for ProofStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<9}  {}", self.how.name(), self.what)?;
        if self.text.is_empty() { Ok(()) } else { write!(f, ": {}", self.text) }
    }
}

/// Reason why no record is valid for a set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProofObstacle {
    /// No record for this set.
    None,
    /// The set has changed.
    SetChanged {
        /// Time of the verification of the earlier set.
        shown: String,
    },
    /// The code differs from the nearest record.
    CodeChanged {
        /// Time of the nearest verification.
        shown: String,
        /// Differing seams; empty: the inserted lines differ.
        seams: Vec<String>,
    },
}

impl fmt::Display for ProofObstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("nothing was shown for it on this machine"),
            Self::SetChanged { shown } => {
                write!(f, "what was shown on {shown} was shown for another version of the set")
            }
            Self::CodeChanged { shown, seams } if seams.is_empty() => {
                write!(f, "what was shown on {shown} was shown for a tree in which other lines are placed")
            }
            Self::CodeChanged { shown, seams } => {
                write!(f, "what was shown on {shown} was shown for other code: {} differs", seams.join(", "))
            }
        }
    }
}

impl Default for ProofRecords {
    fn default() -> Self {
        Self { schema: PROOFS_SCHEMA, all: Vec::new() }
    }
}

impl ProofRecords {
    /// Parses the text of a file.
    ///
    /// # Errors
    /// Fails for other content; the text names place and problem.
    pub fn parse(text: &str) -> Result<Self, String> {
        let read: Self = toml::from_str(text).map_err(|error| error.to_string().trim().to_owned())?;
        if read.schema == PROOFS_SCHEMA {
            Ok(read)
        } else {
            Err(format!("it is of version {}, and this program reads {PROOFS_SCHEMA}", read.schema))
        }
    }

    /// Serializes the file.
    ///
    /// # Errors
    /// None known: all content can be represented in TOML.
    pub fn to_toml(&self) -> Result<String, toml::ser::Error> {
        Ok(format!(
            "# What `llama-warden patches prove` has shown on this machine, and for which code: the hashes say so. \
             Written by it.\n\
             # A record that is taken out counts no more; one that is changed by hand is worth what its author \
             says.\n{}",
            toml::to_string(self)?
        ))
    }

    /// Adds a record, replacing one of the same set for the same code.
    pub fn add(&mut self, proof: SetProof) {
        self.all.retain(|old| {
            (&old.set, &old.digest, &old.seams, &old.placed)
                != (&proof.set, &proof.digest, &proof.seams, &proof.placed)
        });
        self.all.push(proof);
    }

    /// The valid record for a set as judged in a tree.
    ///
    /// # Errors
    /// Returns why no record is valid.
    pub fn find(&self, set: &PatchSet, judgement: &SetJudgement) -> Result<&SetProof, ProofObstacle> {
        let (seams, placed) = (seam_hashes(&judgement.seams), &judgement.placed);
        let mut why = ProofObstacle::None;
        for proof in self.all.iter().rev().filter(|proof| proof.set == set.id) {
            if proof.digest != set.digest {
                if why == ProofObstacle::None {
                    why = ProofObstacle::SetChanged { shown: proof.shown.clone() };
                }
                continue;
            }
            if proof.seams == seams && proof.placed == *placed {
                return Ok(proof);
            }
            let differ = seams.iter().filter(|(seam, hash)| proof.seams.get(*seam) != Some(hash));
            let differ: Vec<String> = differ.map(|(seam, _)| seam.clone()).collect();
            let nearer = match &why {
                ProofObstacle::CodeChanged { seams: before, .. } => differ.len() < before.len(),
                _ => true,
            };
            if nearer {
                why = ProofObstacle::CodeChanged { shown: proof.shown.clone(), seams: differ };
            }
        }
        Err(why)
    }
}

impl SetProof {
    /// A record for a set as judged, still without results.
    pub fn new(set: &PatchSet, judgement: &SetJudgement, tree: String, shown: String) -> Self {
        Self {
            set: set.id.clone(),
            digest: set.digest.clone(),
            tree,
            shown,
            seams: seam_hashes(&judgement.seams),
            placed: judgement.placed.clone(),
            ..Self::default()
        }
    }

    /// Time and results in one line.
    pub fn short(&self) -> String {
        let count = |how| self.steps.iter().filter(|step| step.how == how).count();
        let missing = match count(StepResult::NotShown) {
            0 => String::new(),
            missing => format!(", {missing} could not be"),
        };
        format!("on {}: {} steps shown{missing}", self.shown, count(StepResult::Shown))
    }
}

fn seam_hashes(seen: &[SeamSeen]) -> BTreeMap<String, String> {
    seen.iter().map(|seam| (seam.seam.clone(), seam.hash.clone())).collect()
}

impl SetJudgement {
    /// Marks a set as locally verified if it only lacks a review, and if a record is valid for this code.
    pub fn accept(&mut self, set: &PatchSet, proofs: &ProofRecords) {
        if !self.can_be_proved() {
            return;
        }
        if let Ok(proof) = proofs.find(set, self) {
            self.proof = Some(proof.clone());
            self.status = PatchStatus::LocallyVerified;
            for fix in self.fixes.iter_mut().filter(|fix| fix.status == PatchStatus::Unverified) {
                fix.status = PatchStatus::LocallyVerified;
                fix.reason = None;
            }
        }
    }

    /// Returns true if a record could verify the set, which only lacks a review of its seams.
    pub fn can_be_proved(&self) -> bool {
        self.status == PatchStatus::Unverified
            && self.reasons.iter().all(|reason| {
                reason.status != PatchStatus::Unverified
                    || self.seams.iter().any(|seam| reason.part == format!("seam `{}`", seam.seam))
            })
    }
}

#[cfg(test)]
mod tests;
