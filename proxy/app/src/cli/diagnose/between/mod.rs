//! `diagnose --between A..B`: which commit brought a leak or a crash, or ended it.
//!
//! ```text
//!   A..B ── repository ──> the line of commits ──> Line (warden_diagnose) ── which revision? ──> build ──> the server of that build
//!                                                    │ what came of each process                 (a store of its own: `serve` never takes them)
//!                                                    └──> the file of the search, for the next time
//! ```

mod kept;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::UNIX_EPOCH;

use clap::Args;
use rustix::fs::FlockOperation;
use tokio_util::sync::CancellationToken;
use warden_builder::git::{Named, Obtained, Request as Commits, RevisionInfo};
use warden_builder::{BackendWish, Builder, Kind, Request, Source};
use warden_diagnose::between::{Line, NoServer, Searching, Serving};
use warden_diagnose::report::{BetweenReport, Revision};
use warden_diagnose::{Experiment, Lab, Outcome, Recording, Report};
use warden_patches::{Catalogue, Selection, Sets};
use warden_policies::experiment::Workload;
use warden_policies::experiment::between::{Ask, Conclusion, Outcome as Ended, Symptom};
use warden_supervisor::Starter;
use warden_supervisor::nursery::NurseryHandle;

use self::kept::{Kept, What};
use super::display::Display;
use super::target::Target;
use super::{DiagnoseArgs, folder, interruptible, outputs};
use crate::admin::instance;
use crate::cli::build;
use crate::config::machine::Machine;
use crate::config::resolve::binary::Choice;
use crate::exit::Failure;
use crate::out;
use crate::serve::Signals;

/// What `--between` takes.
#[derive(Debug, Args)]
pub(crate) struct BetweenArgs {
    /// Which commit brought a leak or a crash, or ended it: builds and tries those between two, halfway each time.
    ///
    /// A is the older one; both may be tags, branches or commits. Builds are without patches. The same command goes on where it was
    /// broken off.
    #[arg(
        long,
        value_name = "A..B",
        conflicts_with_all = ["binary", "build", "bisect", "headroom", "trace", "wrap", "html"]
    )]
    between: Option<Range>,
    /// Where the commits are: a URL, a folder, or a name from `[build.sources]`.
    #[arg(long, value_name = "URL|PATH|NAME", requires = "between")]
    git: Option<String>,
    /// Never uses the network for them.
    #[arg(long, requires = "between")]
    offline: bool,
    /// What the builds compute on: auto, cpu, cuda, hip, vulkan or metal.
    #[arg(long, value_name = "NAME", default_value = "auto", requires = "between", value_parser = build::flags::hinted::<BackendWish>)]
    backend: BackendWish,
}

/// Two ends of a line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    older: String,
    newer: String,
}

impl FromStr for Range {
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

/// A search: what it is about, and what its servers come from.
struct Between<'a> {
    args: &'a DiagnoseArgs,
    machine: &'a Machine,
    builder: Builder,
    /// The requests for builds, but for the source.
    plain: Request,
    repository: PathBuf,
    shown: String,
    line: Vec<RevisionInfo>,
    /// What is wrong with the machine, and with no revision.
    trouble: Mutex<Option<Failure>>,
}

impl DiagnoseArgs {
    /// Whether a line of commits is to be searched.
    pub(super) const fn searches(&self) -> bool {
        self.between.between.is_some()
    }
}

/// Runs it.
pub(super) async fn run(args: &DiagnoseArgs, nursery: NurseryHandle) -> Result<(), Failure> {
    let Some(range) = args.between.between.clone() else { return Ok(()) };
    let workloads = args.workloads()?;
    let recording = args.replay.as_deref().map(Recording::read).transpose()?.map(Arc::new);
    outputs::prepare(args)?;
    let mut signals = Signals::new()?;
    let machine = Machine::read();
    let loaded = args.config.load(&machine, Vec::new())?;
    let numbers = &loaded.settings.build;
    build::with_builder(&loaded, &machine, async |mut builder| {
        // Never the builds that somebody serves with.
        builder.dirs.data = builder.dirs.data.join("between");
        let named = Named::parse(args.between.git.as_deref().unwrap_or(&numbers.source), &numbers.sources)?;
        let (reference, offline) = (Some(range.newer.clone()), args.between.offline);
        let commits = Commits { location: named.location, reference, offline, history: true };
        let Obtained { repository, commit } = builder.repository(&commits).await?;
        let line = repository.line(&range.older, &commit)?;
        let catalogue = Catalogue::embedded()?;
        let selection = Selection { catalogue, sets: Sets::None, allow_unverified: false };
        let source = Source::Commit {
            repository: repository.path().to_owned(),
            shown: repository.shown().to_owned(),
            commit,
        };
        let plain = Request { backend: args.between.backend, ..build::request(source, selection, numbers) };
        let between = Between {
            args,
            machine: &machine,
            builder,
            plain,
            repository: repository.path().to_owned(),
            shown: repository.shown().to_owned(),
            line,
            trouble: Mutex::default(),
        };
        Box::pin(between.search(nursery, &mut signals, workloads, recording)).await
    })
    .await
}

impl Between<'_> {
    async fn search(
        &self,
        nursery: NurseryHandle,
        signals: &mut Signals,
        workloads: Vec<Workload>,
        recording: Option<Arc<Recording>>,
    ) -> Result<(), Failure> {
        let last = self.line.len() - 1;
        let count = out::counted(last, "commit");
        out::error_line(&format!(
            "between: {count} after {}, up to {}",
            self.line[0].label, self.line[last].label
        ));
        // What an experiment needs besides a server is the same for all; and without this one there is nothing to search.
        let target = match self.target(last).await {
            Ok(target) => target,
            Err(NoServer::Interrupted) => return Err(self.take_trouble()),
            Err(NoServer::Cannot(why)) => {
                return Err(Failure::hinted(
                    format!("{}, the newer end, cannot be run: {why}", self.line[last].label),
                    "choose an end that builds and starts",
                ));
            }
        };
        for warning in &target.warnings {
            out::error_line(&format!("warning: {warning}"));
        }
        let numbers = target.resolved.diagnose.clone();
        let steps = self.args.requests.unwrap_or(numbers.requests);
        let mut kept = Kept::open(&target.resolved.dirs.state, &self.what(&target, &workloads, steps))?;
        if !kept.known.is_empty() {
            out::error_line(&format!(
                "between: goes on after {}; to begin anew remove {}",
                out::counted(kept.known.len(), "process"),
                kept.path().display()
            ));
        }
        let in_use = self.in_use()?;
        let sockets = instance::private_dir(&target.runtime_dir)?;
        let starter = Starter::new(nursery, sockets.path(), &target.lifecycle, target.watch)?;
        let lab = Lab { numbers, ..Lab::new(starter, target.growth.clone()) };
        let base = Experiment { spec: target.spec.clone(), workloads, steps, early: true, replay: recording };
        let server = |revision: usize| -> Serving<'_> {
            Box::pin(async move { self.target(revision).await.map(|target| target.spec) })
        };
        let line = Line { base: base.clone(), last, server: &server };
        let stop = CancellationToken::new();
        let known = std::mem::take(&mut kept.known);
        let mut display = Display::new(1);
        let mut watch = |searching: Searching<'_>| match searching {
            Searching::Next(ask, left) => {
                out::error_line(&self.next(ask, left));
                display = Display::new(1);
            }
            Searching::Leg(progress) => display.see(&progress),
            Searching::Told(told) => {
                display.close();
                if let Err(failure) = kept.add(told) {
                    // The search goes on; it could only not be taken up again.
                    failure.lines().iter().for_each(|line| out::error_line(line));
                }
            }
        };
        let running = Box::pin(line.run(&lab, &known, &mut watch, &stop));
        let conclusion = interruptible(signals, &stop, running).await?;
        display.close();
        let conclusion = conclusion?;
        if let Some(failure) = self.trouble.lock().unwrap_or_else(PoisonError::into_inner).take() {
            return Err(failure);
        }
        let report = self.report(conclusion);
        self.show(&report)?;
        if let (Some(path), Ended::Found { revision }) = (&self.args.report, &report.conclusion.outcome) {
            let ill = revision - usize::from(report.conclusion.ill_is_newer == Some(false));
            let writing = Box::pin(self.write(path, ill, &report, &base, &lab, &stop));
            interruptible(signals, &stop, writing).await??;
        }
        drop(sockets);
        self.tidy(&report.conclusion, &in_use);
        end(&report.conclusion)
    }

    /// The server of a revision, built if it is not there.
    async fn target(&self, revision: usize) -> Result<Target, NoServer> {
        let Some(info) = self.line.get(revision) else {
            return Err(NoServer::Cannot("there is no such revision".to_owned()));
        };
        let (repository, shown, commit) = (self.repository.clone(), self.shown.clone(), info.commit.clone());
        let request = Request { source: Source::Commit { repository, shown, commit }, ..self.plain.clone() };
        let built = match self.builder.build(&request).await {
            Ok(built) => built,
            Err(error) => match error.kind() {
                Kind::Build | Kind::Refused | Kind::Input => return Err(NoServer::Cannot(error.to_string())),
                Kind::Cancelled => return Err(NoServer::Interrupted),
                Kind::Machine => {
                    *self.trouble.lock().unwrap_or_else(PoisonError::into_inner) = Some(error.into());
                    return Err(NoServer::Interrupted);
                }
            },
        };
        let choice = Choice::Build(built.id.to_string());
        let chosen =
            Target::with(self.args, self.machine, Some(("--between", choice)), Some(&self.builder.dirs.data));
        chosen.await.map_err(|failure| NoServer::Cannot(failure.lines().join("; ")))
    }

    /// A file that all who search here hold.
    fn in_use(&self) -> Result<File, Failure> {
        let path = self.builder.dirs.data.join("in-use");
        let held = File::create(&path).and_then(|file| {
            rustix::fs::flock(&file, FlockOperation::LockShared)?;
            Ok(file)
        });
        held.map_err(|error| Failure::failed(format!("cannot hold {}: {error}", path.display())))
    }

    /// The reason for an end that no revision is to be blamed for.
    fn take_trouble(&self) -> Failure {
        let trouble = self.trouble.lock().unwrap_or_else(PoisonError::into_inner).take();
        trouble.unwrap_or(Failure::Told { code: crate::exit::INTERRUPTED })
    }

    fn what(&self, target: &Target, workloads: &[Workload], requests: u64) -> What {
        let command = &target.spec.command;
        let files = command.args.iter().map(PathBuf::from).chain(self.args.replay.clone());
        let facts = |path: PathBuf| {
            let facts = std::fs::metadata(&path).ok().filter(std::fs::Metadata::is_file)?;
            let changed = facts.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
            Some((path.display().to_string(), facts.len(), changed.map_or(0, |since| since.as_secs())))
        };
        let text = |text: &std::ffi::OsStr| text.to_string_lossy().into_owned();
        What {
            repository: self.shown.clone(),
            older: self.line[0].commit.clone(),
            newer: self.line[self.line.len() - 1].commit.clone(),
            backend: self.args.between.backend.to_string(),
            workloads: workloads.iter().map(ToString::to_string).collect(),
            requests,
            args: command.args.clone(),
            env: command
                .env
                .iter()
                .map(|(name, value)| (text(name.as_ref()), text(value.as_ref())))
                .collect(),
            files: files.filter_map(facts).collect(),
        }
    }

    fn next(&self, ask: Ask, left: Option<usize>) -> String {
        let info = &self.line[ask.revision];
        let left = left.map_or_else(String::new, |left| format!("{} left, ", out::counted(left, "commit")));
        format!("between: {left}next {} ({}): {}", info.label, info.date, info.subject)
    }

    fn report(&self, conclusion: Conclusion) -> BetweenReport {
        let revision = |info: &RevisionInfo| Revision {
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

    fn show(&self, report: &BetweenReport) -> Result<(), Failure> {
        if self.args.json {
            return out::json(report);
        }
        let mut text = String::new();
        text.extend(report.sentences().iter().map(|line| format!("between: {line}\n")));
        let rows = report.rows();
        if rows.len() > 1 {
            text.extend(["\n", &out::table(&rows)]);
        }
        out::write(&text)
    }

    /// The folder for others: about the revision that has it.
    async fn write(
        &self,
        path: &Path,
        ill: usize,
        between: &BetweenReport,
        base: &Experiment,
        lab: &Lab,
        stop: &CancellationToken,
    ) -> Result<(), Failure> {
        let target = self.target(ill).await.map_err(|_| self.take_trouble())?;
        let (Symptom::Growth { control, .. } | Symptom::Crash { control, .. }) = between
            .conclusion
            .symptom
            .clone()
            .unwrap_or(Symptom::Crash { workload: Workload::ShortText, control: false });
        let workloads = match &between.conclusion.symptom {
            Some(Symptom::Growth { track, .. }) => vec![track.workload],
            Some(Symptom::Crash { workload, .. }) => vec![*workload],
            None => base.workloads.clone(),
        };
        let mut spec = target.spec.clone();
        if control {
            // The last one counts.
            spec.command.args.extend(["--cache-ram".to_owned(), "0".to_owned()]);
        }
        let experiment = Experiment { spec, workloads, ..base.clone() };
        let mut display = Display::new(1);
        let outcome: Outcome = experiment.run(lab, &mut |progress| display.see(&progress), stop).await?;
        display.close();
        let about = target.about(crate::clock::now_text(), self.machine);
        let mut report = Report { between: Some(between.clone()), ..Report::new(about, &outcome) };
        report.about.system = folder::system(&target, &outcome).await;
        folder::write(path, &report, &outcome, &target, &self.machine.cwd, base.replay.as_deref())
    }

    /// Removes the builds that nobody needs any more: those of the line, but the two that matter. A search that is to go on keeps all, and so
    /// does one beside which others go on.
    fn tidy(&self, conclusion: &Conclusion, in_use: &File) {
        if conclusion.outcome == Ended::Interrupted
            || rustix::fs::flock(in_use, FlockOperation::NonBlockingLockExclusive).is_err()
        {
            return;
        }
        let place = |commit: &str| self.line.iter().position(|info| info.commit == commit);
        let matters = |at: usize| conclusion.bounds.is_some_and(|(healthy, ill)| at == healthy || at == ill);
        let store = self.builder.store();
        for build in store.list().map(|listing| listing.builds).unwrap_or_default() {
            let at = build.plan.source.revision.commit.as_deref().and_then(place);
            if at.is_some_and(|at| !matters(at))
                && let Err(error) = store.remove(&build.id)
            {
                out::error_line(&format!("build {} was not removed: {error}", build.id));
            }
        }
    }
}

/// How it ends for whoever looks at the exit code alone.
fn end(conclusion: &Conclusion) -> Result<(), Failure> {
    let code = match conclusion.outcome {
        Ended::Found { .. } => return Ok(()),
        Ended::Interrupted => crate::exit::INTERRUPTED,
        Ended::EndFailed { .. } | Ended::IllFailed { .. } => crate::exit::FAILURE,
        Ended::Among { .. }
        | Ended::Unsteady { .. }
        | Ended::BothIll
        | Ended::NeitherIll { .. }
        | Ended::NotAgain => crate::exit::TOO_FEW,
    };
    Err(Failure::Told { code })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_has_two_ends() {
        let range = |text: &str| text.parse::<Range>();
        let ends = |older: &str, newer: &str| Range { older: older.to_owned(), newer: newer.to_owned() };
        assert_eq!(range("b8827..b9602"), Ok(ends("b8827", "b9602")));
        assert_eq!(range("v1.2..origin/main"), Ok(ends("v1.2", "origin/main")));
        for wrong in ["b8827", "..b1", "b1..", "a...b", ""] {
            assert!(range(wrong).unwrap_err().contains("A..B"), "{wrong}");
        }
    }
}
