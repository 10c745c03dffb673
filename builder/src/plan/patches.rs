//! The patch sets of a plan: judged against the source, and written down with what was seen.

use std::fmt;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::Backend;
use crate::error::{Error, Refusal, Result};
use crate::patch::{Edits, FileEdit, Judgement, Overlay, PatchSet, Selection, Status, Tree, judge};

/// Digits of the hash in a set's name: enough to tell the versions of one set apart.
const DIGITS: usize = 12;

/// One patch set of a plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedSet {
    /// Its id.
    pub set: String,
    /// What was found.
    pub status: Status,
    /// Why it is not verified, one line each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reasons: Vec<String>,
    /// Its fixes.
    #[serde(default)]
    pub fixes: Vec<PlannedFix>,
    /// The code that it leans on, as it is in this source.
    #[serde(default)]
    pub seams: Vec<PlannedSeam>,
    /// A hash over all that it changes, in 12 hexadecimal digits; empty when it is not applied.
    #[serde(default)]
    pub edits: String,
    /// Whether it is applied although it is not verified, because the user allowed that.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub allowed_unverified: bool,
}

/// One fix of a planned set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedFix {
    /// Its id.
    pub fix: String,
    /// What was found.
    pub status: Status,
    /// Why, in one line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Text that the binary will contain; empty: none is known.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub marker: String,
}

/// Code that a set leans on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedSeam {
    /// Its id.
    pub seam: String,
    /// The hash of its text, or `absent`.
    pub hash: String,
    /// Which known version it is; none: nobody has looked at it.
    pub known: Option<String>,
}

/// All sets of a build with what they change, each on top of those before it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Patches {
    pub(crate) planned: Vec<PlannedSet>,
    edits: Vec<Edits>,
}

impl PlannedSet {
    /// Whether it changes the source.
    pub const fn applied(&self) -> bool {
        !self.edits.is_empty()
    }

    /// The fixes that the binary gets from it.
    pub fn applied_fixes(&self) -> impl Iterator<Item = &PlannedFix> {
        let had = |fix: &&PlannedFix| matches!(fix.status, Status::Verified | Status::Unverified);
        self.fixes.iter().filter(|_| self.applied()).filter(had)
    }

    pub(super) fn tell(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let allowed = if self.allowed_unverified { ", allowed" } else { "" };
        writeln!(f, "  {} {}{allowed}", self.set, self.status)?;
        for reason in &self.reasons {
            writeln!(f, "    {reason}")?;
        }
        for fix in &self.fixes {
            let why = fix.reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default();
            writeln!(f, "    {} {}{why}", fix.fix, fix.status)?;
        }
        Ok(())
    }
}

impl Patches {
    /// Judges the chosen sets one after the other.
    ///
    /// # Errors
    ///
    /// All sets that are refused, or not verified and not allowed so, in one error.
    pub(crate) fn judge(selection: &Selection, backend: Backend, tree: &dyn Tree) -> Result<Self> {
        let (mut patches, mut refusals) = (Self::default(), Vec::new());
        let mut overlay = Overlay::new(tree);
        for set in selection.sets_for(backend.name())? {
            if !set.is_for(backend.name()) {
                refusals.push(Refusal {
                    set: set.id.clone(),
                    unverified: false,
                    reasons: vec![format!(
                        "it is for {}, and the build for {backend}",
                        set.backends.join(", ")
                    )],
                });
                continue;
            }
            let judgement = judge(set, &overlay)?;
            if let Some(refusal) = refusal(&judgement, selection.allow_unverified) {
                refusals.push(refusal);
                continue;
            }
            patches.planned.push(planned(set, &judgement));
            if let Some(edits) = judgement.edits {
                overlay.add(&edits);
                patches.edits.push(edits);
            }
        }
        if refusals.is_empty() { Ok(patches) } else { Err(Error::Patches(refusals)) }
    }

    /// Every file that changes: as it is in the source, and as it is when all sets are applied.
    pub(crate) fn files(&self) -> Vec<FileEdit> {
        let mut files: Vec<FileEdit> = Vec::new();
        for edit in self.edits.iter().flat_map(|edits| &edits.0) {
            match files.iter_mut().find(|file| file.path == edit.path) {
                Some(file) => file.after.clone_from(&edit.after),
                None => files.push(edit.clone()),
            }
        }
        files
    }
}

fn refusal(judgement: &Judgement, allow_unverified: bool) -> Option<Refusal> {
    let unverified = match judgement.status {
        Status::Refused => false,
        Status::Unverified if !allow_unverified => true,
        _ => return None,
    };
    let reasons = judgement.reasons.iter().map(ToString::to_string).collect();
    Some(Refusal { set: judgement.set.clone(), unverified, reasons })
}

fn planned(set: &PatchSet, judgement: &Judgement) -> PlannedSet {
    let fixes = judgement.fixes.iter().map(|fix| PlannedFix {
        fix: fix.fix.clone(),
        status: fix.status,
        reason: fix.reason.clone(),
        marker: set.fix(&fix.fix).map(|fix| fix.marker.clone()).unwrap_or_default(),
    });
    let seams = judgement.seams.iter().map(|seam| PlannedSeam {
        seam: seam.seam.clone(),
        hash: seam.hash.clone(),
        known: seam.known.clone(),
    });
    PlannedSet {
        set: judgement.set.clone(),
        status: judgement.status,
        reasons: judgement.reasons.iter().map(ToString::to_string).collect(),
        fixes: fixes.collect(),
        seams: seams.collect(),
        edits: judgement.edits.as_ref().map(rendered).unwrap_or_default(),
        allowed_unverified: judgement.status == Status::Unverified,
    }
}

/// A hash over everything that edits write.
fn rendered(edits: &Edits) -> String {
    let mut hash = Sha256::new();
    for edit in &edits.0 {
        // Lengths go before, so that the parts cannot run into each other.
        for part in [edit.path.as_bytes(), edit.after.as_slice()] {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
    }
    hex::encode(hash.finalize())[..DIGITS].to_owned()
}

/// The applied sets as a recipe names them: `none`, or ids with hashes in the order of application.
pub(super) fn name(sets: &[PlannedSet]) -> String {
    let applied: Vec<String> =
        sets.iter().filter(|set| set.applied()).map(|set| format!("{}@{}", set.set, set.edits)).collect();
    if applied.is_empty() { "none".to_owned() } else { applied.join("+") }
}
