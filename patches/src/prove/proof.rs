//! The record of what was shown. It counts for the set and the code that it was shown for, by their hashes, and for no other:
//! where either changes, it says what changed and counts no more.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::judgement::{Edits, Judgement, SeamSeen, Status};
use crate::set::PatchSet;

/// The version of the file that is written and read.
pub const SCHEMA: u32 = 1;

/// A file of records, `verified.toml`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Proofs {
    /// Version of the format: 1.
    pub schema: u32,
    /// The records, oldest first.
    #[serde(default, rename = "verified")]
    pub all: Vec<Proof>,
}

/// What was shown for one set in one tree.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Proof {
    /// The set.
    pub set: String,
    /// The hash of the set's files, as [`PatchSet::digest`].
    pub digest: String,
    /// What the tree called itself, and where it was: for people.
    pub tree: String,
    /// When, RFC 3339 in UTC.
    pub shown: String,
    /// On which machine.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub host: String,
    /// With which tools, as they call themselves.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tools: Vec<String>,
    /// What was shown; what could not be, and why.
    #[serde(default)]
    pub steps: Vec<Done>,
    /// The hash of each seam in that tree, or `absent`.
    pub seams: BTreeMap<String, String>,
    /// The hash of all lines that the hooks put into the tree and of the sidecars as they were written there.
    pub placed: String,
}

/// One step of a proof.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Done {
    /// What it is about.
    pub what: String,
    /// How it ended.
    pub how: How,
    /// What was seen, or why it could not be.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub text: String,
}

/// How a step ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum How {
    /// It was shown.
    Shown,
    /// The tree has nothing that it is about.
    NotHere,
    /// It could not be shown on this machine.
    NotShown,
    /// It is not as promised.
    Failed,
}

impl How {
    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Shown => "shown",
            Self::NotHere => "not here",
            Self::NotShown => "not shown",
            Self::Failed => "FAILED",
        }
    }
}

impl fmt::Display for Done {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<9}  {}", self.how.name(), self.what)?;
        if self.text.is_empty() { Ok(()) } else { write!(f, ": {}", self.text) }
    }
}

/// Why a record does not count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WhyNot {
    /// There is none for this set.
    None,
    /// The set is another one by now.
    SetChanged {
        /// When it was shown for the earlier one.
        shown: String,
    },
    /// The code is another; these seams differ from the nearest record.
    CodeChanged {
        /// When it was shown for the nearest.
        shown: String,
        /// The seams that differ; none: what is placed differs.
        seams: Vec<String>,
    },
}

impl fmt::Display for WhyNot {
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

impl Default for Proofs {
    fn default() -> Self {
        Self { schema: SCHEMA, all: Vec::new() }
    }
}

impl Proofs {
    /// Reads the text of a file.
    ///
    /// # Errors
    ///
    /// It is not such a file; the text says where and what.
    pub fn parse(text: &str) -> Result<Self, String> {
        let read: Self = toml::from_str(text).map_err(|error| error.to_string().trim().to_owned())?;
        if read.schema == SCHEMA {
            Ok(read)
        } else {
            Err(format!("it is of version {}, and this program reads {SCHEMA}", read.schema))
        }
    }

    /// The text of the file.
    ///
    /// # Errors
    ///
    /// None that is known: there is nothing in it that TOML cannot say.
    pub fn to_toml(&self) -> Result<String, toml::ser::Error> {
        Ok(format!(
            "# What `llama-warden patches prove` has shown on this machine, and for which code: the hashes say so. Written by it.\n\
             # A record that is taken out counts no more; one that is changed by hand is worth what its author says.\n{}",
            toml::to_string(self)?
        ))
    }

    /// Adds a record. One of the same set for the same code goes.
    pub fn add(&mut self, proof: Proof) {
        self.all.retain(|old| {
            (&old.set, &old.digest, &old.seams, &old.placed)
                != (&proof.set, &proof.digest, &proof.seams, &proof.placed)
        });
        self.all.push(proof);
    }

    /// The record that counts for a set as it was judged in a tree.
    ///
    /// # Errors
    ///
    /// None does, and why.
    pub fn find(&self, set: &PatchSet, judgement: &Judgement) -> Result<&Proof, WhyNot> {
        let (seams, placed) = (seams_of(&judgement.seams), &judgement.placed);
        let mut why = WhyNot::None;
        for proof in self.all.iter().rev().filter(|proof| proof.set == set.id) {
            if proof.digest != set.digest {
                if why == WhyNot::None {
                    why = WhyNot::SetChanged { shown: proof.shown.clone() };
                }
                continue;
            }
            if proof.seams == seams && proof.placed == *placed {
                return Ok(proof);
            }
            let differ = seams.iter().filter(|(seam, hash)| proof.seams.get(*seam) != Some(hash));
            let differ: Vec<String> = differ.map(|(seam, _)| seam.clone()).collect();
            let nearer = match &why {
                WhyNot::CodeChanged { seams: before, .. } => differ.len() < before.len(),
                _ => true,
            };
            if nearer {
                why = WhyNot::CodeChanged { shown: proof.shown.clone(), seams: differ };
            }
        }
        Err(why)
    }
}

impl Proof {
    /// A record for a set as it was judged, with nothing shown yet.
    pub fn of(set: &PatchSet, judgement: &Judgement, tree: String, shown: String) -> Self {
        Self {
            set: set.id.clone(),
            digest: set.digest.clone(),
            tree,
            shown,
            host: String::new(),
            tools: Vec::new(),
            steps: Vec::new(),
            seams: seams_of(&judgement.seams),
            placed: judgement.placed.clone(),
        }
    }

    /// In a line: when and what.
    pub fn short(&self) -> String {
        let count = |how| self.steps.iter().filter(|step| step.how == how).count();
        let missing = match count(How::NotShown) {
            0 => String::new(),
            missing => format!(", {missing} could not be"),
        };
        format!("on {}: {} steps shown{missing}", self.shown, count(How::Shown))
    }
}

fn seams_of(seen: &[SeamSeen]) -> BTreeMap<String, String> {
    seen.iter().map(|seam| (seam.seam.clone(), seam.hash.clone())).collect()
}

/// A hash over the lines that hooks place, with the hooks' names, and over the files that are new: what a set is in this tree,
/// without the rest of the tree's files.
pub(crate) fn placed(edits: &Edits) -> String {
    let mut text = String::new();
    for edit in &edits.0 {
        for line in &edit.inserted {
            text.extend([line.hook.as_str(), "\0", line.text.trim(), "\n"]);
        }
        if edit.before.is_none() {
            text.extend([edit.path.as_str(), "\0", &crate::series::digest(&[&edit.after]), "\n"]);
        }
    }
    crate::series::digest(&[text.as_bytes()])
}

impl Judgement {
    /// Takes a set for locally verified if that is all that it lacks, and if a record says so for just this code.
    pub fn accept(&mut self, set: &PatchSet, proofs: &Proofs) {
        if !self.can_be_proved() {
            return;
        }
        if let Ok(proof) = proofs.find(set, self) {
            self.proof = Some(proof.clone());
            self.status = Status::LocallyVerified;
            for fix in self.fixes.iter_mut().filter(|fix| fix.status == Status::Unverified) {
                fix.status = Status::LocallyVerified;
                fix.reason = None;
            }
        }
    }

    /// Whether a proof could make it good: all that it lacks is that somebody looked at its seams, whose hashes say which code
    /// is meant.
    pub fn can_be_proved(&self) -> bool {
        self.status == Status::Unverified
            && self.reasons.iter().all(|reason| {
                reason.status != Status::Unverified
                    || self.seams.iter().any(|seam| reason.part == format!("seam `{}`", seam.seam))
            })
    }
}

#[cfg(test)]
mod tests;
