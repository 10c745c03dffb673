//! Arguments of `llama-warden diagnose`.

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Parser, ValueEnum};
use warden_builder::BackendChoice;
use warden_experiment::Workload;
use warden_experiment::between::RevisionAim;

use crate::cli::build;
use crate::cli::shared::ConfigArgs;
use crate::exit::CommandError;

#[derive(Debug, Args)]
#[command(
    after_help = "Exit codes: 0 no leak, 3 a leak was found, 4 the server crashed, 5 too few readings to tell, \
                  2 wrong use, 130 interrupted (after the table so far), 1 anything else. With --between: \
                  0 the commit was found, 5 it was not. With --against: 0 the new build may take the place \
                  of the old one, 3 it is worse, 5 it cannot be told. With --isolation: 0 separate, 3 mixed, \
                  5 undecided."
)]
pub(crate) struct DiagnoseArgs {
    #[command(flatten)]
    pub(super) config: ConfigArgs,
    /// Model of the configuration, with its arguments, variables and mitigations. Default: the only one.
    #[arg(long, value_name = "NAME", conflicts_with = "flags")]
    pub(super) model: Option<String>,
    /// Folder of models to choose from (`paths.models`). May be repeated.
    #[arg(long, value_name = "DIR", conflicts_with = "flags")]
    pub(super) models_dir: Vec<String>,
    /// Run this llama-server in place of the model's own.
    #[arg(long, value_name = "PATH", conflicts_with = "build")]
    pub(super) binary: Option<PathBuf>,
    /// Run this build in place of the model's own.
    #[arg(long, value_name = "ID")]
    pub(super) build: Option<String>,
    /// Workload to run. May be repeated. Default: all that the server supports.
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub(super) workload: Vec<Workload>,
    /// Maximum number of readings of each workload. More readings find slower leaks.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub(super) requests: Option<u64>,
    /// Then search for mitigations that stop the leaks or crashes: each alone, all together, and the
    /// smallest set, with its cost.
    #[arg(long)]
    pub(super) bisect: bool,
    /// Write a shareable folder: report, findings, and a script that shows the growth with llama-server and
    /// curl alone.
    #[arg(long, value_name = "DIR")]
    pub(super) report: Option<PathBuf>,
    /// Print the report as JSON, with all readings.
    #[arg(long)]
    pub(super) json: bool,
    /// Report the call sites of the growth: preloads a library that counts host and CUDA allocations.
    #[arg(long)]
    pub(super) trace: bool,
    /// Library for --trace, in place of the built-in one.
    #[arg(long, value_name = "PATH", requires = "trace")]
    pub(super) tracer: Option<PathBuf>,
    #[command(flatten)]
    pub(super) against: AgainstArgs,
    #[command(flatten)]
    pub(super) between: BetweenArgs,
    #[command(flatten)]
    pub(super) isolation: IsolationArgs,
    /// llama-server's own flags, in place of a configuration.
    #[arg(last = true, value_name = "LLAMA-SERVER FLAGS")]
    pub(super) flags: Vec<String>,
}

#[derive(Debug, Parser)]
struct DiagnoseCommandLine {
    #[command(flatten)]
    args: DiagnoseArgs,
}

impl DiagnoseArgs {
    /// The first word is the program.
    pub(crate) fn parse_words(words: &[String]) -> Result<Self, CommandError> {
        let parsed = DiagnoseCommandLine::try_parse_from(words);
        parsed.map(|alone| alone.args).map_err(|error| CommandError::failed(error.to_string()))
    }

    /// The configuration file may come from `LLAMA_WARDEN_CONFIG`.
    pub(crate) fn ignore_config(&mut self) {
        self.config.config = None;
    }

    pub(super) fn workloads(&self) -> Vec<Workload> {
        if self.workload.is_empty() {
            return Workload::ALL.to_vec();
        }
        let mut workloads = Vec::new();
        for workload in &self.workload {
            if !workloads.contains(workload) {
                workloads.push(*workload);
            }
        }
        workloads
    }
}

#[derive(Debug, Args)]
pub(crate) struct AgainstArgs {
    /// Compares the build with OLD (a build id or the path of a llama-server): answers, speed, start,
    /// memory, flags, routes, growth.
    #[arg(
        long,
        value_name = "OLD",
        conflicts_with_all = ["between", "bisect", "trace", "report"]
    )]
    pub(super) against: Option<String>,
    /// Skips the search for growth and crashes, which takes the longest.
    #[arg(long, requires = "against", conflicts_with = "workload")]
    pub(super) no_growth: bool,
}

#[derive(Debug, Args)]
pub(crate) struct IsolationArgs {
    /// Tests if the server answers one conversation with content of another.
    ///
    /// More conversations than slots take turns. Each answer is compared with the answer of a server with one
    /// slot and without caches. --requests is the number of requests, --bisect tries the known mitigations.
    #[arg(long, conflicts_with_all = ["workload", "trace", "against", "between"])]
    pub(super) isolation: bool,
}

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
        conflicts_with_all = ["binary", "build", "bisect", "trace"]
    )]
    pub(super) between: Option<CommitRange>,
    /// Change to look for.
    #[arg(long = "for", value_name = "WHAT", value_enum, default_value_t, requires = "between")]
    pub(super) aim: SearchAim,
    /// Repository of the commits: a URL, a folder, or a name from `[build.sources]`.
    #[arg(long, value_name = "URL|PATH|NAME", requires = "between")]
    pub(super) git: Option<String>,
    /// Never uses the network for the repository: takes what was fetched before.
    #[arg(long, requires = "between")]
    pub(super) offline: bool,
    /// Backend of the builds: auto, cpu, cuda, hip or vulkan.
    #[arg(
        long,
        value_name = "NAME",
        default_value = "auto",
        requires = "between",
        value_parser = build::parse_with_hint::<BackendChoice>
    )]
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
    pub(super) const fn aim(&self) -> RevisionAim {
        self.between.aim.aim()
    }

    pub(super) fn search_workloads(&self) -> Result<Vec<Workload>, CommandError> {
        if self.aim().is_growth() {
            return Ok(self.workloads());
        }
        let given = [("--workload", !self.workload.is_empty()), ("--requests", self.requests.is_some())];
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
