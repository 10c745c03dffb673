//! The life of a fix, or of another mitigation: in which revisions of llama.cpp it is needed, superseded or harmful, and what
//! says so.
//!
//! ```text
//!  what a set knows: [Life]  ──┐
//!                              ├── Standing::of ──> needed, superseded or harmful there, and all that was said of it
//!  what was looked at: Looked ─┘      (the probes that hold in a source; else the number of a build)
//! ```
//!
//! A source that was looked at counts before a number: forks count their builds otherwise, and take single commits over.

use std::collections::BTreeSet;
use std::fmt;

use serde::{Deserialize, Serialize};

/// What is known of some revisions.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Life {
    /// What it is there.
    pub is: LifeState,
    /// The first build of llama.cpp's own history that is meant, such as `b8832`; empty: from the beginning.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub first: String,
    /// The last one; empty: the newest.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub last: String,
    /// Probes of the set that all hold in a source that is meant.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub holds: Vec<String>,
    /// Probes of the set of which none holds there.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub fails: Vec<String>,
    /// How that is known.
    pub by: By,
    /// The upstream commit that brought it, where there is one.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub commit: String,
    /// What was read, measured or reported.
    pub text: String,
    /// On what it was measured.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub hardware: String,
    /// With which llama.cpp it was measured, or up to which one it was read.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub build: String,
}

/// What a fix is in a revision. Ordered by what speaks for several.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum LifeState {
    /// Upstream does what it does, or what it was against is gone.
    Superseded,
    /// The defect is there.
    Needed,
    /// It does harm.
    Harmful,
}

/// How something is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum By {
    /// Read in the source.
    Source,
    /// Measured by us.
    Measurement,
    /// Reported by others, and not measured by us.
    Report,
}

/// What was looked at.
#[derive(Clone, Copy, Debug, Default)]
pub struct Looked<'a> {
    /// The number of the build, if known.
    pub build: Option<u32>,
    /// The probes that hold in the source; none: no source was looked at.
    pub probes: Option<&'a BTreeSet<String>>,
}

/// What a fix is in one revision, and what says so.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub struct Standing {
    /// What counts.
    pub is: LifeState,
    /// Whether the source itself shows it, by a probe, and not a number alone.
    pub by_source: bool,
    /// All that holds there, that which counts first.
    pub because: Vec<Life>,
}

impl LifeState {
    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Superseded => "superseded",
            Self::Needed => "needed",
            Self::Harmful => "harmful",
        }
    }
}

impl By {
    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Source => "source",
            Self::Measurement => "measured",
            Self::Report => "reported",
        }
    }
}

impl Life {
    /// The builds that are meant, in short; empty: all.
    pub fn builds(&self) -> String {
        match (self.first.as_str(), self.last.as_str()) {
            ("", "") => String::new(),
            ("", last) => format!("to {last}"),
            (first, "") => format!("from {first}"),
            (first, last) => format!("{first}..{last}"),
        }
    }

    /// Whether a source can show it.
    fn has_probes(&self) -> bool {
        !self.holds.is_empty() || !self.fails.is_empty()
    }

    /// Whether it is about what was looked at.
    fn is_about(&self, looked: &Looked<'_>) -> bool {
        match looked.probes {
            Some(probes) if self.has_probes() => {
                self.holds.iter().all(|probe| probes.contains(probe))
                    && !self.fails.iter().any(|probe| probes.contains(probe))
            }
            _ => self.has(looked.build),
        }
    }

    /// Whether this build of llama.cpp's own history is meant. Of one that is not known only what holds for all is.
    fn has(&self, build: Option<u32>) -> bool {
        let number = |text: &str| text.strip_prefix('b').and_then(|digits| digits.parse::<u32>().ok());
        match build {
            None => self.first.is_empty() && self.last.is_empty(),
            Some(build) => {
                number(&self.first).is_none_or(|first| first <= build)
                    && number(&self.last).is_none_or(|last| build <= last)
            }
        }
    }

    /// How it is known, in brackets: what, where, with which revision.
    fn known_by(&self) -> String {
        let parts = [self.by.name(), &self.commit, &self.hardware, &self.build];
        let all: Vec<&str> = parts.into_iter().filter(|part| !part.is_empty()).collect();
        all.join(", ")
    }
}

impl fmt::Display for Life {
    /// One line, such as `needed b7821..b8831: … (source, 81ab64f3c)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let builds = self.builds();
        let builds = if builds.is_empty() { builds } else { format!(" {builds}") };
        write!(f, "{}{builds}: {} ({})", self.is.name(), self.text, self.known_by())
    }
}

impl Standing {
    /// What a life comes to in what was looked at; `None`: nothing is known of it.
    pub fn of(life: &[Life], looked: &Looked<'_>) -> Option<Self> {
        let mut because: Vec<Life> = life.iter().filter(|one| one.is_about(looked)).cloned().collect();
        let is = because.iter().map(|one| one.is).max()?;
        // Stable: what counts comes first, each part in its order.
        because.sort_by_key(|one| one.is != is);
        let by_source = looked.probes.is_some() && because.iter().any(|one| one.is == is && one.has_probes());
        Some(Self { is, by_source, because })
    }

    /// Why, in one line: the first of what counts.
    pub fn why(&self) -> String {
        self.because.first().map(|one| format!("{} ({})", one.text, one.known_by())).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn life(is: LifeState, first: &str, last: &str, holds: &[&str], fails: &[&str]) -> Life {
        let all = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        Life {
            is,
            first: first.to_owned(),
            last: last.to_owned(),
            holds: all(holds),
            fails: all(fails),
            by: By::Source,
            commit: String::new(),
            text: format!("{} {first}", is.name()),
            hardware: String::new(),
            build: String::new(),
        }
    }

    fn cap() -> Vec<Life> {
        vec![
            life(LifeState::Needed, "b10", "b19", &["map"], &["sweep"]),
            life(LifeState::Superseded, "b20", "", &["sweep"], &[]),
            life(LifeState::Harmful, "b30", "b31", &["new-pool"], &[]),
        ]
    }

    fn is(build: Option<u32>, probes: Option<&[&str]>) -> Option<(LifeState, bool)> {
        let probes: Option<BTreeSet<String>> =
            probes.map(|all| all.iter().map(|&probe| probe.to_owned()).collect());
        let looked = Looked { build, probes: probes.as_ref() };
        Standing::of(&cap(), &looked).map(|standing| (standing.is, standing.by_source))
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
        all[1].by = By::Measurement;
        all[1].hardware = "one GPU".to_owned();
        all[1].build = "b21".to_owned();
        all[2].first = "b20".to_owned();
        let standing = Standing::of(&all, &Looked { build: Some(20), probes: None }).unwrap();
        assert_eq!(
            standing.because.iter().map(|one| one.is).collect::<Vec<_>>(),
            [LifeState::Harmful, LifeState::Superseded]
        );
        assert_eq!(standing.why(), "harmful b30 (source)");
        assert_eq!(
            standing.because[1].to_string(),
            "superseded from b20: superseded b20 (measured, one GPU, b21)"
        );
    }
}
