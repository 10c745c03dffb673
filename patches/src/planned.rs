//! The patch sets of a build: judged against the source, and written down with what was seen.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::error::{Error, Refusal, Result};
use crate::judgement::{Judgement, Status};
use crate::prove::{Proof, WhyNot};
use crate::series::{self, Series};
use crate::set::Selection;
use crate::set::life::Standing;
use crate::set::{Fix, Hook, Origin, PatchSet};
use crate::tree::Tree;

/// One patch set of a build.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
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
    /// The hooks that were placed and leave a text in the binary.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hooks: Vec<PlannedHook>,
    /// A hash over all that it changes, in 12 hexadecimal digits; empty when it is not applied.
    #[serde(default)]
    pub edits: String,
    /// Whether it is applied although it is not verified, because the user allowed that.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub allowed_unverified: bool,
    /// What was shown for this code on this machine, if it is locally verified.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub proof: Option<Proof>,
    /// For a set of the user's own: all that it says of its fixes, so that a build can be used without the set's folder.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub own: Vec<Fix>,
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
    /// Whether it is needed in this source, superseded or harmful; none: nothing is known of that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub life: Option<Standing>,
    /// Text that the binary will contain; empty: none is known.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub marker: String,
}

/// A hook whose lines leave a text in the binary where they are compiled.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedHook {
    /// Its id.
    pub hook: String,
    /// The text.
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
#[derive(Clone, Debug)]
pub struct Planned {
    /// What is written down of each.
    pub sets: Vec<PlannedSet>,
    /// What they would do, together.
    pub series: Series,
}

impl PlannedSet {
    /// Whether it changes the source.
    pub const fn applied(&self) -> bool {
        !self.edits.is_empty()
    }

    /// The fixes that the binary gets from it.
    pub fn applied_fixes(&self) -> impl Iterator<Item = &PlannedFix> {
        let had = |fix: &&PlannedFix| {
            matches!(fix.status, Status::Verified | Status::LocallyVerified | Status::Unverified)
        };
        self.fixes.iter().filter(|_| self.applied()).filter(had)
    }

    /// What the binary must have in it, by the name of what puts it there.
    pub fn markers(&self) -> impl Iterator<Item = (String, &str)> {
        let fixes = self.applied_fixes().map(|fix| (fix.fix.clone(), fix.marker.as_str()));
        let placed = self.hooks.iter().filter(|_| self.applied());
        fixes
            .chain(placed.map(|hook| (format!("hook `{}` of {}", hook.hook, self.set), hook.marker.as_str())))
    }
}

impl fmt::Display for PlannedSet {
    /// The set, and below it its reasons and its fixes, each on a line of its own.
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
                write!(f, ", {}: {}", life.is.name(), life.why())?;
            }
        }
        Ok(())
    }
}

impl Planned {
    /// Judges the chosen sets one after the other, for a build for this backend, such as `cuda`.
    ///
    /// # Errors
    ///
    /// All sets that are refused, or not verified and not allowed so, in one error; or a file of the tree is there and
    /// cannot be read.
    pub fn judge(selection: &Selection, backend: &str, tree: &dyn Tree) -> Result<Self> {
        let chosen = selection.sets_for(backend)?;
        let fitting: Vec<&PatchSet> = chosen.iter().copied().filter(|set| set.is_for(backend)).collect();
        let series = Series::judge(&fitting, tree)?.accept(&fitting, &selection.proofs);
        let (mut all, mut refusals) = (Vec::new(), Vec::new());
        for set in chosen {
            match series.judgements.iter().find(|judgement| judgement.set == set.id) {
                None => refusals.push(foreign(set, backend)),
                Some(judgement) if judgement.status.forbids(selection.allow_unverified) => {
                    refusals.push(refusal(set, judgement, selection));
                }
                Some(judgement) => all.push(planned(set, judgement)),
            }
        }
        if refusals.is_empty() { Ok(Self { sets: all, series }) } else { Err(Error::Refused(refusals)) }
    }
}

fn foreign(set: &PatchSet, backend: &str) -> Refusal {
    let why = format!("it is for {}, and the build for {backend}", set.backends.join(", "));
    Refusal { set: set.id.clone(), unverified: false, reasons: vec![why] }
}

fn refusal(set: &PatchSet, judgement: &Judgement, selection: &Selection) -> Refusal {
    let mut reasons: Vec<String> = judgement.reasons.iter().map(ToString::to_string).collect();
    // What was shown for other code does not count, and it should be known why.
    if judgement.can_be_proved()
        && let Err(why) = selection.proofs.find(set, judgement)
        && why != WhyNot::None
    {
        reasons.push(why.to_string());
    }
    Refusal { set: judgement.set.clone(), unverified: judgement.status == Status::Unverified, reasons }
}

fn planned(set: &PatchSet, judgement: &Judgement) -> PlannedSet {
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
    let placed = |hook: &&Hook| {
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
        edits: judgement.edits.as_ref().map(series::hash).unwrap_or_default(),
        allowed_unverified: judgement.status == Status::Unverified,
        proof: judgement.proof.clone(),
        own: if set.origin == Origin::Embedded { Vec::new() } else { set.fixes.clone() },
    }
}

/// The applied sets as a recipe names them: `none`, or ids with hashes in the order of application.
pub fn recipe_name(sets: &[PlannedSet]) -> String {
    let applied = sets.iter().filter(|set| set.applied());
    series::name(applied.map(|set| (set.set.as_str(), set.edits.as_str())))
}
