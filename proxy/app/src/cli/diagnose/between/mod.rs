//! `diagnose --between A..B`: finds the commit that introduced or ended a leak, a crash, a slowdown or
//! other answers.
//!
//! Builds go to a separate store. A file keeps the result of each process, so that a search can continue.

mod kept;
mod servers;
mod written;

use std::path::PathBuf;
use std::sync::OnceLock;

use tokio_util::sync::CancellationToken;
use warden_builder::git::{CommitRequest, ObtainedCommit, RevisionInfo};
use warden_builder::{BuildRequest, BuildSource, Builder};
use warden_config::machine::HostMachine;
use warden_config::resolve::ResolvedConfig;
use warden_diagnose::Experiment;
use warden_diagnose::between::{RevisionLine, SearchEvent, ServerFuture, resume_search};
use warden_diagnose::report::{BetweenReport, RevisionLabel};
use warden_experiment::Workload;
use warden_experiment::between::{ProcessOrder, RevisionConclusion, RevisionOutcome as Ended};
use warden_patches::{SelectedSets, SetCatalogue, SetSelection};
use warden_supervisor::nursery::NurseryHandle;
use warden_supervisor::spec::SharedSpec;

use self::kept::SearchFile;
use self::servers::config_file_text;
use self::written::SearchRequests;
use super::args::BetweenArgs;
use super::display::ExperimentDisplay;
use super::target::{self, DiagnoseTarget};
use super::{DiagnoseArgs, open_lab, outputs, wait_or_interrupt};
use crate::cli::build::{self, GitArgs};
use crate::cli::builds_between;
use crate::exit::CommandError;
use crate::out;
use crate::serve::SignalHandlers;

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
    outputs::check_outputs(args)?;
    let mut signals = SignalHandlers::new()?;
    let machine = HostMachine::read();
    // Read the configuration first, to report its errors before anything is fetched.
    let (configured, index) = DiagnoseTarget::configured(args, &machine)?;
    let loaded = args.config.load(&machine, Vec::new())?;
    let numbers = &loaded.settings.build;
    Box::pin(build::with_builder(&loaded, &machine, async |mut builder| {
        // Use a separate store: instances must never serve with these builds.
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
        Box::pin(between.search(nursery, &mut signals, workloads)).await
    }))
    .await
}

impl CommitSearch<'_> {
    async fn search(
        &self,
        nursery: NurseryHandle,
        signals: &mut SignalHandlers,
        workloads: Vec<Workload>,
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
        let base = Experiment { spec: target::solo_spec(model), workloads, steps, early: true };
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
