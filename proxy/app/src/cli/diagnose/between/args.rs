//! Command line of `diagnose --between`.

use std::str::FromStr;

use clap::{Args, ValueEnum};
use warden_builder::BackendChoice;
use warden_experiment::Workload;
use warden_experiment::between::RevisionAim;

use crate::cli::build;
use crate::cli::diagnose::DiagnoseArgs;
use crate::exit::CommandError;

#[derive(Debug, Args)]
pub(crate) struct BetweenArgs {
    /// Finds the commit between A and B that introduced or ended a leak, a crash or an aim of `--for`, by
    /// bisection.
    ///
    /// A is the older one; both may be tags, branches or commits. Builds are without patches. The same
    /// command continues an interrupted search.
    #[arg(
        long,
        value_name = "A..B",
        conflicts_with_all = ["binary", "build", "bisect", "headroom", "trace", "wrap", "html"]
    )]
    pub(super) between: Option<CommitRange>,
    /// Change to look for.
    #[arg(long = "for", value_name = "WHAT", value_enum, default_value_t, requires = "between")]
    pub(super) aim: SearchAim,
    /// Repository of the commits: a URL, a folder, or a name from `[build.sources]`.
    #[arg(long, value_name = "URL|PATH|NAME", requires = "between")]
    pub(super) git: Option<String>,
    /// Never uses the network for the repository.
    #[arg(long, requires = "between")]
    pub(super) offline: bool,
    /// Backend of the builds: auto, cpu, cuda, hip, vulkan or metal.
    #[arg(long, value_name = "NAME", default_value = "auto", requires = "between", value_parser = build::flags::parse_with_hint::<BackendChoice>)]
    pub(super) backend: BackendChoice,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum SearchAim {
    /// Growing memory or a crash under the workloads.
    #[default]
    Growth,
    /// Slower prompts, tokens or first token.
    Slowdown,
    /// Different answers to the questions of a proof.
    Answers,
}

impl SearchAim {
    const fn aim(self) -> RevisionAim {
        match self {
            Self::Growth => RevisionAim::Growth,
            Self::Slowdown => RevisionAim::Slowdown,
            Self::Answers => RevisionAim::Answers,
        }
    }
}

/// Both ends of a range of commits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CommitRange {
    pub(super) older: String,
    pub(super) newer: String,
}

impl FromStr for CommitRange {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once("..") {
            Some((older, newer)) if !older.is_empty() && !newer.is_empty() && !newer.starts_with('.') => {
                Ok(Self { older: older.to_owned(), newer: newer.to_owned() })
            }
            _ => Err("it takes two commits, the older one first, as A..B".to_owned()),
        }
    }
}

impl DiagnoseArgs {
    /// Returns whether a range of commits is searched.
    pub(in crate::cli::diagnose) const fn is_search(&self) -> bool {
        self.between.between.is_some()
    }

    pub(super) const fn aim(&self) -> RevisionAim {
        self.between.aim.aim()
    }

    /// Workloads of the search; empty for aims that need none.
    pub(super) fn search_workloads(&self) -> Result<Vec<Workload>, CommandError> {
        if self.aim().is_growth() {
            return self.workloads();
        }
        let given = [
            ("--workload", !self.workload.is_empty()),
            ("--requests", self.requests.is_some()),
            ("--replay", self.replay.is_some()),
        ];
        match given.into_iter().find(|(_, is_given)| *is_given) {
            Some((flag, _)) => Err(CommandError::usage(
                format!("{flag} says nothing of a slowdown or of answers: a proof has its own requests"),
                format!("leave out `{flag}`, or look for growth and crashes without `--for`"),
            )),
            None => Ok(Vec::new()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_has_two_ends() {
        let range = |text: &str| text.parse::<CommitRange>();
        let ends =
            |older: &str, newer: &str| CommitRange { older: older.to_owned(), newer: newer.to_owned() };
        assert_eq!(range("b8827..b9602"), Ok(ends("b8827", "b9602")));
        assert_eq!(range("v1.2..origin/main"), Ok(ends("v1.2", "origin/main")));
        for wrong in ["b8827", "..b1", "b1..", "a...b", ""] {
            assert!(range(wrong).unwrap_err().contains("A..B"), "{wrong}");
        }
    }
}
