//! The patch sets of a build, judged against its source, in the form stored in its provenance.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::edits::TreeEdits;
use crate::error::{PatchError, Result, SetRefusal};
use crate::judgement::{PatchStatus, SetJudgement};
use crate::prove::{ProofObstacle, SetProof};
use crate::series::{self, PatchSeries};
use crate::set::SetSelection;
use crate::set::life::FixStanding;
use crate::set::{PatchSet, SetFix, SetHook, SetOrigin};
use crate::tree::SourceTree;

/// A patch set of a build.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlannedSet {
    /// Id of the set.
    pub set: String,
    /// Status of the set.
    pub status: PatchStatus,
    /// Reasons against verification, one line each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reasons: Vec<String>,
    /// Fixes of the set.
    #[serde(default)]
    pub fixes: Vec<PlannedFix>,
    /// Seams of the set in this source.
    #[serde(default)]
    pub seams: Vec<PlannedSeam>,
    /// Placed hooks that leave a text in the binary.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hooks: Vec<PlannedHook>,
    /// Hash over all changes of the set, 12 hexadecimal digits; empty if the set is not applied.
    #[serde(default)]
    pub edits: String,
    /// The set is applied although unverified, because the user allowed that.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub allowed_unverified: bool,
    /// Record of this machine for exactly this code, if the set is locally verified.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proof: Option<SetProof>,
    /// Fixes of a user's own set, so that the build can be used without the set's folder.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub own: Vec<SetFix>,
}

/// A fix of a planned set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedFix {
    /// Id of the fix.
    pub fix: String,
    /// Status of the fix.
    pub status: PatchStatus,
    /// Reason in one line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// State in this source: needed, superseded or harmful; `None` if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub life: Option<FixStanding>,
    /// Text that the binary will contain; empty if unknown.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub marker: String,
}

/// A hook whose lines leave a text in the binary if they are compiled.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedHook {
    /// Id of the hook.
    pub hook: String,
    /// Text in the binary.
    pub marker: String,
}

/// Code that a set depends on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedSeam {
    /// Id of the seam.
    pub seam: String,
    /// Hash of the seam's text, or `absent`.
    pub hash: String,
    /// Label of the matching known version; `None`: not reviewed.
    pub known: Option<String>,
}

/// All sets of a build with their changes, each on top of those before it.
#[derive(Clone, Debug)]
pub struct PlannedSeries {
    /// Stored facts about each set.
    pub sets: Vec<PlannedSet>,
    /// Combined changes of all sets.
    pub series: PatchSeries,
}

impl PlannedSet {
    /// Returns true if the set changes the source.
    pub const fn is_applied(&self) -> bool {
        !self.edits.is_empty()
    }

    /// Fixes that the set adds to the binary.
    pub fn applied_fixes(&self) -> impl Iterator<Item = &PlannedFix> {
        let had = |fix: &&PlannedFix| {
            matches!(
                fix.status,
                PatchStatus::Verified | PatchStatus::LocallyVerified | PatchStatus::Unverified
            )
        };
        self.fixes.iter().filter(|_| self.is_applied()).filter(had)
    }

    /// Required markers in the binary, each with the name of the fix or hook that leaves it.
    pub fn markers(&self) -> impl Iterator<Item = (String, &str)> {
        let fixes = self.applied_fixes().map(|fix| (fix.fix.clone(), fix.marker.as_str()));
        let placed = self.hooks.iter().filter(|_| self.is_applied());
        fixes
            .chain(placed.map(|hook| (format!("hook `{}` of {}", hook.hook, self.set), hook.marker.as_str())))
    }
}

impl fmt::Display for PlannedSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let allowed = if self.allowed_unverified { ", allowed" } else { "" };
        write!(f, "  {} {}{allowed}", self.set, self.status)?;
        if let Some(proof) = &self.proof {
            write!(f, "\n    shown {}", proof.short())?;
        }
        for reason in &self.reasons {
            write!(f, "\n    {reason}")?;
        }
        for fix in &self.fixes {
            let why = fix.reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default();
            write!(f, "\n    {} {}{why}", fix.fix, fix.status)?;
            if let Some(life) = fix.life.as_ref().filter(|_| fix.reason.is_none()) {
                write!(f, ", {}: {}", life.is.name(), life.reason())?;
            }
        }
        Ok(())
    }
}

impl PlannedSeries {
    /// Judges the chosen sets in sequence, for a build with this backend, such as `cuda`.
    ///
    /// # Errors
    /// Fails if sets are refused, or are unverified without the user's permission; the error names all such
    /// sets. Fails if an existing file of the tree cannot be read.
    pub fn judge(selection: &SetSelection, backend: &str, tree: &dyn SourceTree) -> Result<Self> {
        let chosen = selection.sets_for(backend)?;
        let fitting: Vec<&PatchSet> = chosen.iter().copied().filter(|set| set.is_for(backend)).collect();
        let series = PatchSeries::judge(&fitting, tree)?.accept(&fitting, &selection.proofs);
        let (mut all, mut refusals) = (Vec::new(), Vec::new());
        for set in chosen {
            match series.judgements.iter().find(|judgement| judgement.set == set.id) {
                None => refusals.push(wrong_backend(set, backend)),
                Some(judgement) if judgement.status.forbids(selection.allow_unverified) => {
                    refusals.push(set_refusal(set, judgement, selection));
                }
                Some(judgement) => all.push(planned_set(set, judgement)),
            }
        }
        if refusals.is_empty() { Ok(Self { sets: all, series }) } else { Err(PatchError::Refused(refusals)) }
    }
}

fn wrong_backend(set: &PatchSet, backend: &str) -> SetRefusal {
    let why = format!("it is for {}, and the build for {backend}", set.backends.join(", "));
    SetRefusal { set: set.id.clone(), unverified: false, reasons: vec![why] }
}

fn set_refusal(set: &PatchSet, judgement: &SetJudgement, selection: &SetSelection) -> SetRefusal {
    let mut reasons: Vec<String> = judgement.reasons.iter().map(ToString::to_string).collect();
    // Records for other code are invalid; give the user the reason.
    if judgement.can_be_proved()
        && let Err(why) = selection.proofs.find(set, judgement)
        && why != ProofObstacle::None
    {
        reasons.push(why.to_string());
    }
    SetRefusal {
        set: judgement.set.clone(),
        unverified: judgement.status == PatchStatus::Unverified,
        reasons,
    }
}

fn planned_set(set: &PatchSet, judgement: &SetJudgement) -> PlannedSet {
    let fixes = judgement.fixes.iter().map(|fix| PlannedFix {
        fix: fix.fix.clone(),
        status: fix.status,
        reason: fix.reason.clone(),
        life: fix.life.clone(),
        marker: set.fix(&fix.fix).map(|fix| fix.marker.clone()).unwrap_or_default(),
    });
    let seams = judgement.seams.iter().map(|seam| PlannedSeam {
        seam: seam.seam.clone(),
        hash: seam.hash.clone(),
        known: seam.known.clone(),
    });
    let placed = |hook: &&SetHook| {
        let edits = judgement.edits.iter().flat_map(|edits| &edits.0);
        edits.flat_map(|edit| &edit.inserted).any(|line| line.hook == hook.id)
    };
    let hooks =
        set.hooks.iter().filter(placed).filter_map(|hook| {
            hook.marker.clone().map(|marker| PlannedHook { hook: hook.id.clone(), marker })
        });
    PlannedSet {
        set: judgement.set.clone(),
        status: judgement.status,
        reasons: judgement.reasons.iter().map(ToString::to_string).collect(),
        fixes: fixes.collect(),
        seams: seams.collect(),
        hooks: hooks.collect(),
        edits: judgement.edits.as_ref().map(TreeEdits::hash).unwrap_or_default(),
        allowed_unverified: judgement.status == PatchStatus::Unverified,
        proof: judgement.proof.clone(),
        own: if set.origin == SetOrigin::Embedded { Vec::new() } else { set.fixes.clone() },
    }
}

/// The applied sets in a recipe: `none`, or ids with hashes in the order of application.
pub fn recipe_name(sets: &[PlannedSet]) -> String {
    let applied = sets.iter().filter(|set| set.is_applied());
    series::series_name(applied.map(|set| (set.set.as_str(), set.edits.as_str())))
}
