//! The life of a fix or another mitigation: the llama.cpp revisions in which it is needed, superseded or
//! harmful, with the evidence.
//!
//! Evidence from a source takes precedence over a build number: forks count their builds differently, and
//! cherry-pick commits.

use std::collections::BTreeSet;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::builds::{format_range, in_range};

/// A statement about some revisions.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct LifeStatement {
    /// State of the fix in these revisions.
    pub is: LifeState,
    /// First build of llama.cpp's own history, such as `b8832`; empty: from the beginning.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub first: String,
    /// Last build; empty: the newest.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub last: String,
    /// Probes of the set that all have to hold in the source.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub holds: Vec<String>,
    /// Probes of the set of which none may hold in the source.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub fails: Vec<String>,
    /// Kind of evidence.
    pub by: EvidenceKind,
    /// Upstream commit that introduced this state, if any.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub commit: String,
    /// Evidence: what was read, measured or reported.
    pub text: String,
    /// Hardware of the measurement.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub hardware: String,
    /// llama.cpp build of the measurement, or the newest inspected build.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub build: String,
}

/// State of a fix in a revision. Ordered: among several, the greatest counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum LifeState {
    /// Upstream has the same fix, or no longer has the problem.
    Superseded,
    /// The defect exists.
    Needed,
    /// The fix does harm.
    Harmful,
}

/// Kind of evidence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum EvidenceKind {
    /// Read in the source.
    Source,
    /// Measured by us.
    Measurement,
    /// Reported by others, and not measured by us.
    Report,
}

/// Facts about an inspected revision.
#[derive(Clone, Copy, Debug, Default)]
pub struct InspectedRevision<'a> {
    /// Build number, if known.
    pub build: Option<u32>,
    /// Probes that hold in the source; `None`: no source was inspected.
    pub probes: Option<&'a BTreeSet<String>>,
}

/// State of a fix in a revision, with the evidence.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct FixStanding {
    /// The deciding state.
    pub is: LifeState,
    /// The source itself shows the state by a probe, not only a build number.
    pub by_source: bool,
    /// All applicable statements, deciding ones first.
    pub because: Vec<LifeStatement>,
}

impl LifeState {
    /// Name of the state.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Superseded => "superseded",
            Self::Needed => "needed",
            Self::Harmful => "harmful",
        }
    }
}

impl EvidenceKind {
    /// Name of the kind.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Source => "source",
            Self::Measurement => "measured",
            Self::Report => "reported",
        }
    }
}

impl LifeStatement {
    /// Range of builds; empty: all.
    pub fn builds(&self) -> String {
        format_range(&self.first, &self.last)
    }

    /// Returns true if probes in a source can decide this statement.
    fn has_probes(&self) -> bool {
        !self.holds.is_empty() || !self.fails.is_empty()
    }

    fn applies_to(&self, looked: &InspectedRevision<'_>) -> bool {
        match looked.probes {
            Some(probes) if self.has_probes() => {
                self.holds.iter().all(|probe| probes.contains(probe))
                    && !self.fails.iter().any(|probe| probes.contains(probe))
            }
            _ => self.includes_build(looked.build),
        }
    }

    /// Returns true if the range includes this build; for an unknown build only if the range is unlimited.
    fn includes_build(&self, build: Option<u32>) -> bool {
        match build {
            None => self.first.is_empty() && self.last.is_empty(),
            Some(build) => in_range(build, &self.first, &self.last),
        }
    }

    fn evidence(&self) -> String {
        let parts = [self.by.name(), &self.commit, &self.hardware, &self.build];
        let all: Vec<&str> = parts.into_iter().filter(|part| !part.is_empty()).collect();
        all.join(", ")
    }
}

impl fmt::Display for LifeStatement {
    /// Formats one line, such as `needed b7821..b8831: … (source, 81ab64f3c)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let builds = self.builds();
        let builds = if builds.is_empty() { builds } else { format!(" {builds}") };
        write!(f, "{}{builds}: {} ({})", self.is.name(), self.text, self.evidence())
    }
}

impl FixStanding {
    /// Combines the statements that apply to an inspected revision; `None` if there are none.
    pub fn from_life(life: &[LifeStatement], looked: &InspectedRevision<'_>) -> Option<Self> {
        let mut because: Vec<LifeStatement> =
            life.iter().filter(|one| one.applies_to(looked)).cloned().collect();
        let is = because.iter().map(|one| one.is).max()?;
        // A stable sort: deciding statements first, each group in its order.
        because.sort_by_key(|one| one.is != is);
        let by_source = looked.probes.is_some() && because.iter().any(|one| one.is == is && one.has_probes());
        Some(Self { is, by_source, because })
    }

    /// Reason in one line: the first deciding statement.
    pub fn reason(&self) -> String {
        self.because.first().map(|one| format!("{} ({})", one.text, one.evidence())).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn life(is: LifeState, first: &str, last: &str, holds: &[&str], fails: &[&str]) -> LifeStatement {
        let all = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        LifeStatement {
            is,
            first: first.to_owned(),
            last: last.to_owned(),
            holds: all(holds),
            fails: all(fails),
            by: EvidenceKind::Source,
            commit: String::new(),
            text: format!("{} {first}", is.name()),
            hardware: String::new(),
            build: String::new(),
        }
    }

    fn cap() -> Vec<LifeStatement> {
        vec![
            life(LifeState::Needed, "b10", "b19", &["map"], &["sweep"]),
            life(LifeState::Superseded, "b20", "", &["sweep"], &[]),
            life(LifeState::Harmful, "b30", "b31", &["new-pool"], &[]),
        ]
    }

    fn is(build: Option<u32>, probes: Option<&[&str]>) -> Option<(LifeState, bool)> {
        let probes: Option<BTreeSet<String>> =
            probes.map(|all| all.iter().map(|&probe| probe.to_owned()).collect());
        let looked = InspectedRevision { build, probes: probes.as_ref() };
        FixStanding::from_life(&cap(), &looked).map(|standing| (standing.is, standing.by_source))
    }

    #[test]
    fn by_its_number_a_build_is_in_a_range_or_nothing_is_known() {
        assert_eq!(is(None, None), None);
        assert_eq!(is(Some(9), None), None);
        assert_eq!(is(Some(10), None), Some((LifeState::Needed, false)));
        assert_eq!(is(Some(19), None), Some((LifeState::Needed, false)));
        assert_eq!(is(Some(20), None), Some((LifeState::Superseded, false)));
        assert_eq!(is(Some(30), None), Some((LifeState::Harmful, false)), "what does harm speaks for both");
    }

    #[test]
    fn what_a_source_shows_counts_before_its_number() {
        assert_eq!(is(Some(19), Some(&["map", "sweep"])), Some((LifeState::Superseded, true)));
        assert_eq!(is(Some(99), Some(&["map"])), Some((LifeState::Needed, true)), "a fork counts otherwise");
        assert_eq!(is(Some(30), Some(&["sweep"])), Some((LifeState::Superseded, true)));
        assert_eq!(is(None, Some(&["new-pool", "sweep"])), Some((LifeState::Harmful, true)));
        assert_eq!(is(Some(10), Some(&[])), None, "there is nothing to cap");
    }

    #[test]
    fn a_standing_says_why_in_a_line_and_keeps_the_rest() {
        let mut all = cap();
        all[1].by = EvidenceKind::Measurement;
        all[1].hardware = "one GPU".to_owned();
        all[1].build = "b21".to_owned();
        all[2].first = "b20".to_owned();
        let standing =
            FixStanding::from_life(&all, &InspectedRevision { build: Some(20), probes: None }).unwrap();
        assert_eq!(
            standing.because.iter().map(|one| one.is).collect::<Vec<_>>(),
            [LifeState::Harmful, LifeState::Superseded]
        );
        assert_eq!(standing.reason(), "harmful b30 (source)");
        assert_eq!(
            standing.because[1].to_string(),
            "superseded from b20: superseded b20 (measured, one GPU, b21)"
        );
    }
}
