//! `diagnose --between A..B`: finds the commit that introduced or ended a leak, a crash, a slowdown or
//! other answers.
//!
//! Builds go to a separate store. A file keeps the result of each process, so that a search can continue.

mod kept;
mod servers;
mod written;

use std::path::PathBuf;
use std::str::FromStr;
use std::sync::{Arc, OnceLock};

use clap::{Args, ValueEnum};
use tokio_util::sync::CancellationToken;
use warden_builder::git::{CommitRequest, ObtainedCommit, RevisionInfo};
use warden_builder::{BackendChoice, BuildRequest, BuildSource, Builder};
use warden_config::machine::HostMachine;
use warden_config::resolve::ResolvedConfig;
use warden_diagnose::between::{RevisionLine, SearchEvent, ServerFuture, resume_search};
use warden_diagnose::report::{BetweenReport, RevisionLabel};
use warden_diagnose::{Experiment, RequestRecording};
use warden_experiment::Workload;
use warden_experiment::between::{ProcessOrder, RevisionAim, RevisionConclusion, RevisionOutcome as Ended};
use warden_patches::{SelectedSets, SetCatalogue, SetSelection};
use warden_supervisor::nursery::NurseryHandle;
use warden_supervisor::spec::SharedSpec;

use self::kept::SearchFile;
use self::servers::config_file_text;
use self::written::SearchRequests;
use super::display::ExperimentDisplay;
use super::target::{self, DiagnoseTarget};
use super::{DiagnoseArgs, open_lab, outputs, wait_or_interrupt};
use crate::cli::build::{self, GitArgs};
use crate::cli::builds_between;
use crate::exit::CommandError;
use crate::out;
use crate::serve::SignalHandlers;

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
    aim: SearchAim,
    /// Repository of the commits: a URL, a folder, or a name from `[build.sources]`.
    #[arg(long, value_name = "URL|PATH|NAME", requires = "between")]
    git: Option<String>,
    /// Never uses the network for the repository: takes what was fetched before.
    #[arg(long, requires = "between")]
    offline: bool,
    /// Backend of the builds: auto, cpu, cuda, hip, vulkan or metal.
    #[arg(
        long,
        value_name = "NAME",
        default_value = "auto",
        requires = "between",
        value_parser = build::parse_with_hint::<BackendChoice>
    )]
    backend: BackendChoice,
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
    older: String,
    newer: String,
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

    fn search_workloads(&self) -> Result<Vec<Workload>, CommandError> {
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

struct CommitSearch<'a> {
    args: &'a DiagnoseArgs,
    machine: &'a HostMachine,
    builder: Builder,
    plain: BuildRequest,
    repository: PathBuf,
    shown: String,
    line: Vec<RevisionInfo>,
    /// The configuration as read when the search started; `index` selects the model.
    configured: ResolvedConfig,
    index: usize,
    file: Option<String>,
}

pub(super) async fn run(args: &DiagnoseArgs, nursery: NurseryHandle) -> Result<(), CommandError> {
    let Some(range) = args.between.between.clone() else { return Ok(()) };
    let workloads = args.search_workloads()?;
    let recording = args.replay.as_deref().map(RequestRecording::read).transpose()?.map(Arc::new);
    outputs::check_outputs(args)?;
    let mut signals = SignalHandlers::new()?;
    let machine = HostMachine::read();
    // Read the configuration first, to report its errors before anything is fetched.
    let (configured, index) = DiagnoseTarget::configured(args, &machine)?;
    let loaded = args.config.load(&machine, Vec::new())?;
    let numbers = &loaded.settings.build;
    Box::pin(build::with_builder(&loaded, &machine, async |mut builder| {
        // Use a store of its own: instances must never serve with these builds.
        builder.dirs.data = builds_between::search_store_dir(&builder.dirs.data);
        let BetweenArgs { git, offline, backend, .. } = &args.between;
        let git = GitArgs { git: git.clone(), reference: None, offline: *offline };
        let request = git.repository_request(numbers, true)?;
        let newer = CommitRequest { reference: Some(range.newer.clone()), ..request.clone() };
        let ObtainedCommit { repository, commit } = match builder.repository(&newer).await {
            Ok(obtained) => obtained,
            // A remote may refuse to serve a commit by its id. An older commit is in the history of the
            // remote's branches and tags.
            Err(error) => {
                let Ok(all) = builder.repository(&request).await else {
                    return Err(error.into());
                };
                let Ok(commit) = all.repository.resolve(&range.newer) else { return Err(error.into()) };
                ObtainedCommit { commit, ..all }
            }
        };
        let line = repository.line(&range.older, &commit)?;
        let selection = SetSelection {
            catalogue: SetCatalogue::embedded()?,
            sets: SelectedSets::None,
            ..SetSelection::default()
        };
        let (repository, shown) = (repository.path().to_owned(), repository.shown().to_owned());
        let source = BuildSource::Commit { repository: repository.clone(), shown: shown.clone(), commit };
        let plain = BuildRequest {
            backend: *backend,
            // Skip the web page, which takes longer to build than the server.
            options: vec!["LLAMA_BUILD_UI=OFF".to_owned()],
            ..build::build_request(source, selection, numbers)
        };
        let machine = &machine;
        let file = config_file_text(args);
        let between =
            CommitSearch { args, machine, builder, plain, repository, shown, line, configured, index, file };
        Box::pin(between.search(nursery, &mut signals, workloads, recording)).await
    }))
    .await
}

impl CommitSearch<'_> {
    async fn search(
        &self,
        nursery: NurseryHandle,
        signals: &mut SignalHandlers,
        workloads: Vec<Workload>,
        replay: Option<Arc<RequestRecording>>,
    ) -> Result<(), CommandError> {
        let last = self.line.len() - 1;
        let count = out::count_noun(last, "commit");
        out::error_line(&format!(
            "between: {count} after {}, up to {}",
            self.line[0].label, self.line[last].label
        ));
        for warning in &self.configured.warnings {
            out::error_line(&format!("warning: {warning}"));
        }
        let model = self.model();
        let numbers = self.configured.settings.diagnose.clone();
        let steps = self.args.requests.unwrap_or(numbers.requests);
        let name = self.file_name(&workloads, steps).await?;
        let mut kept = SearchFile::open(&self.configured.dirs.state, &name)?;
        let in_use = self.lock_in_use_file()?;
        let (lab, sockets) = open_lab(nursery, &self.configured, &model.lifecycle, numbers)?;
        let known = kept.records();
        let (search, used) = resume_search(lab.rules(), self.args.aim(), last, &known);
        kept.truncate(used)?;
        if used > 0 {
            out::error_line(&format!(
                "between: continues where it was, {used} {}; to start over remove {}",
                if used == 1 { "process was run" } else { "processes were run" },
                kept.path().display()
            ));
        }
        // Keep builds that another search made. A continued search owns all builds in the store.
        let others = if used == 0 { self.builds() } else { Vec::new() };
        let base = Experiment { spec: target::solo_spec(model), workloads, steps, early: true, replay };
        let server = |revision: usize| -> ServerFuture<'_, CommandError> {
            Box::pin(async move { self.target(revision).await.map(|target| target.spec) })
        };
        // Reuse the request lengths of earlier results, to keep the results comparable.
        let lengths = known[..used].iter().find_map(|record| record.lengths);
        let lengths = lengths.map_or_else(OnceLock::new, OnceLock::from);
        let line =
            RevisionLine { base: base.clone(), last, newer_only: false, lengths: &lengths, server: &server };
        let stop = CancellationToken::new();
        let mut display = ExperimentDisplay::new(1);
        let mut watch = |event: SearchEvent<'_>| self.show_event(&event, &mut display, &mut kept);
        let running = Box::pin(line.run(&lab, search, &mut watch, &stop));
        let conclusion = wait_or_interrupt(signals, &stop, running).await;
        display.close();
        let report = self.report(conclusion??);
        self.show(&report)?;
        let written = match self.requested_report(&report) {
            Some((path, ill)) => {
                let asked = SearchRequests { lengths: lengths.get().copied(), base: &base };
                let writing = Box::pin(self.write_report(path, ill, &report, asked, &lab, &stop));
                wait_or_interrupt(signals, &stop, writing).await?
            }
            None => Ok(()),
        };
        drop(sockets);
        self.remove_builds(&report.conclusion, &others, &in_use);
        written?;
        if stop.is_cancelled() {
            return Err(CommandError::INTERRUPTED);
        }
        exit_for_conclusion(&report.conclusion)
    }

    fn model(&self) -> &SharedSpec {
        &self.configured.fleet.models[self.index]
    }

    fn show_event(&self, event: &SearchEvent<'_>, display: &mut ExperimentDisplay, kept: &mut SearchFile) {
        match event {
            SearchEvent::Next(ask, left) => {
                out::error_line(&self.describe_next(*ask, *left));
                *display = ExperimentDisplay::new(1);
            }
            SearchEvent::Leg(progress) => display.show(progress),
            SearchEvent::OnceMore(why) => {
                display.close();
                out::error_line(&format!("between: once more, because {why}"));
            }
            SearchEvent::Record(record) => {
                display.close();
                // Continue after a failed write: a later run then only has to repeat this process.
                if let Err(failure) = kept.add(record) {
                    failure.lines().iter().for_each(|line| out::error_line(line));
                }
            }
        }
    }

    fn describe_next(&self, ask: ProcessOrder, left: Option<usize>) -> String {
        let info = &self.line[ask.revision];
        let left =
            left.map_or_else(String::new, |left| format!("{} left, ", out::count_noun(left, "commit")));
        format!("between: {left}next {} ({}): {}", info.label, info.date, info.subject)
    }

    fn report(&self, conclusion: RevisionConclusion) -> BetweenReport {
        let revision = |info: &RevisionInfo| RevisionLabel {
            commit: info.commit.clone(),
            label: info.label.clone(),
            date: info.date.clone(),
            subject: info.subject.clone(),
        };
        BetweenReport {
            repository: self.shown.clone(),
            line: self.line.iter().map(revision).collect(),
            conclusion,
        }
    }

    fn show(&self, report: &BetweenReport) -> Result<(), CommandError> {
        if self.args.json {
            return out::print_json(report);
        }
        let mut text = String::new();
        text.extend(report.sentences().iter().map(|line| format!("between: {line}\n")));
        let rows = report.rows();
        if rows.len() > 1 {
            text.extend(["\n", &out::format_table(&rows)]);
        }
        out::print_text(&text)
    }
}

fn exit_for_conclusion(conclusion: &RevisionConclusion) -> Result<(), CommandError> {
    let code = match conclusion.outcome {
        Ended::Found { .. } => return Ok(()),
        Ended::Interrupted => crate::exit::INTERRUPTED_CODE,
        Ended::EndFailed { .. } | Ended::IllFailed { .. } => crate::exit::FAILURE_CODE,
        Ended::Among { .. }
        | Ended::Unsteady { .. }
        | Ended::BothIll
        | Ended::NeitherIll { .. }
        | Ended::Alike { .. }
        | Ended::NotAgain => crate::exit::UNDECIDED_CODE,
    };
    Err(CommandError::Reported { code })
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
