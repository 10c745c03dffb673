//! `diagnose --between A..B`: which commit brought a leak, a crash, a slowdown or other answers, or ended it.
//!
//! ```text
//!   A..B ── repository ──> the line of commits ──> Line (warden_diagnose) ── which revision? ──> build ──> the server of that build
//!                                                    │ what came of each process                 (a store of its own: `serve` never takes them)
//!                                                    └──> the file of the search, for the next time
//! ```

mod kept;
mod servers;
mod what;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use clap::{Args, ValueEnum};
use tokio_util::sync::CancellationToken;
use warden_builder::git::{Named, Obtained, Request as Commits, RevisionInfo};
use warden_builder::{BackendWish, BuildId, Builder, Request, Source};
use warden_diagnose::between::{Line, Searching, Serving, resumed};
use warden_diagnose::proof;
use warden_diagnose::report::{BetweenReport, Revision};
use warden_diagnose::{Experiment, Lab, Outcome, Recording, Report, without_prompt_cache};
use warden_patches::{Catalogue, Selection, Sets};
use warden_policies::experiment::Workload;
use warden_policies::experiment::between::{Aim, Ask, Conclusion, Outcome as Ended, Rules, Symptom};
use warden_supervisor::nursery::NurseryHandle;
use warden_supervisor::{SoloSpec, Starter};

use self::kept::Kept;
use self::servers::text_of;
use super::display::Display;
use super::target::Target;
use super::{DiagnoseArgs, folder, interruptible, outputs};
use crate::admin::instance;
use crate::cli::{build, builds_between};
use crate::config::machine::Machine;
use crate::config::resolve::Resolved;
use crate::exit::Failure;
use crate::out;
use crate::serve::Signals;

/// What `--between` takes.
#[derive(Debug, Args)]
pub(crate) struct BetweenArgs {
    /// Which commit brought a leak or a crash, or what --for names, or ended it: builds and tries those between two, halfway each time.
    ///
    /// A is the older one; both may be tags, branches or commits. Builds are without patches. The same command goes on where it was
    /// broken off.
    #[arg(
        long,
        value_name = "A..B",
        conflicts_with_all = ["binary", "build", "bisect", "headroom", "trace", "wrap", "html"]
    )]
    between: Option<Range>,
    /// What is looked for between them: growth of a memory or a crash under the workloads, a slowdown, or other answers, as a proof of two builds
    /// finds these.
    #[arg(long = "for", value_name = "WHAT", value_enum, default_value_t, requires = "between")]
    aim: For,
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

/// What `--for` takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum For {
    /// What workloads show: a memory that grows, a crash.
    #[default]
    Growth,
    /// Prompts, tokens or the first token take longer.
    Slowdown,
    /// The questions of a proof are answered otherwise.
    Answers,
}

impl For {
    const fn aim(self) -> Aim {
        match self {
            Self::Growth => Aim::Growth,
            Self::Slowdown => Aim::Slowdown,
            Self::Answers => Aim::Answers,
        }
    }
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
    /// As it was when the search began, with the model's place in it.
    configured: Resolved,
    index: usize,
    /// What the configuration file was then.
    file: Option<String>,
    /// Builds that were made or found, by place, and those that were made and are not in the file of the search yet.
    built: Mutex<(BTreeMap<usize, BuildId>, Vec<BuildId>)>,
    /// What is wrong with the machine or the configuration, and with no revision.
    trouble: Mutex<Option<Failure>>,
}

impl DiagnoseArgs {
    /// Whether a line of commits is to be searched.
    pub(super) const fn searches(&self) -> bool {
        self.between.between.is_some()
    }

    const fn aim(&self) -> Aim {
        self.between.aim.aim()
    }

    /// The work under which a line is searched: none for what needs none.
    fn searched(&self) -> Result<Vec<Workload>, Failure> {
        if self.aim().is_growth() {
            return self.workloads();
        }
        let given = [
            ("--workload", !self.workload.is_empty()),
            ("--requests", self.requests.is_some()),
            ("--replay", self.replay.is_some()),
        ];
        match given.into_iter().find(|(_, is_given)| *is_given) {
            Some((flag, _)) => Err(Failure::usage(
                format!("{flag} says nothing of a slowdown or of answers: a proof has its own requests"),
                format!("leave out `{flag}`, or look for growth and crashes without `--for`"),
            )),
            None => Ok(Vec::new()),
        }
    }
}

/// Runs it.
pub(super) async fn run(args: &DiagnoseArgs, nursery: NurseryHandle) -> Result<(), Failure> {
    let Some(range) = args.between.between.clone() else { return Ok(()) };
    let workloads = args.searched()?;
    let recording = args.replay.as_deref().map(Recording::read).transpose()?.map(Arc::new);
    outputs::prepare(args)?;
    let mut signals = Signals::new()?;
    let machine = Machine::read();
    // What is wrong with the configuration is told before anything is fetched.
    let (configured, index) = Target::configured(args, &machine)?;
    let loaded = args.config.load(&machine, Vec::new())?;
    let numbers = &loaded.settings.build;
    build::with_builder(&loaded, &machine, async |mut builder| {
        // Never the builds that somebody serves with.
        builder.dirs.data = builds_between::folder(&builder.dirs.data);
        let named = Named::parse(args.between.git.as_deref().unwrap_or(&numbers.source), &numbers.sources)?;
        let commits = |reference| Commits {
            location: named.location.clone(),
            reference,
            offline: args.between.offline,
            history: true,
        };
        let (repository, commit) = match builder.repository(&commits(Some(range.newer.clone()))).await {
            Ok(Obtained { repository, commit }) => (repository, commit),
            // A server gives what its branches and tags lead to: an older commit is in their history.
            Err(error) => {
                let Ok(all) = builder.repository(&commits(named.reference.clone())).await else {
                    return Err(error.into());
                };
                let Ok(commit) = all.repository.resolve(&range.newer) else { return Err(error.into()) };
                (all.repository, commit)
            }
        };
        let line = repository.line(&range.older, &commit)?;
        let catalogue = Catalogue::embedded()?;
        let selection = Selection { catalogue, sets: Sets::None, ..Selection::default() };
        let source = Source::Commit {
            repository: repository.path().to_owned(),
            shown: repository.shown().to_owned(),
            commit,
        };
        let plain = Request {
            backend: args.between.backend,
            // Nobody looks at it, and it takes longer than the server.
            options: vec!["LLAMA_BUILD_UI=OFF".to_owned()],
            ..build::request(source, selection, numbers)
        };
        let between = Between {
            args,
            machine: &machine,
            builder,
            plain,
            repository: repository.path().to_owned(),
            shown: repository.shown().to_owned(),
            line,
            configured,
            index,
            file: text_of(args),
            built: Mutex::default(),
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
        for warning in &self.configured.warnings {
            out::error_line(&format!("warning: {warning}"));
        }
        let numbers = self.configured.diagnose.clone();
        let steps = self.args.requests.unwrap_or(numbers.requests);
        let mut kept = Kept::open(&self.configured.dirs.state, &self.what(&workloads, steps).await?)?;
        let in_use = self.in_use()?;
        let known = kept.known();
        let proof = self.configured.proof.clone();
        let rules = Rules { cure: &numbers.cure, crash: &numbers.crash, proof: &proof };
        let (search, used) = resumed(rules, self.args.aim(), last, &known);
        kept.keep(used)?;
        if used > 0 {
            out::error_line(&format!(
                "between: goes on where it was, {used} {}; to begin anew remove {}",
                if used == 1 { "process was run" } else { "processes were run" },
                kept.path().display()
            ));
        }
        let sockets = instance::private_dir(&self.configured.dirs.runtime)?;
        let model = &self.configured.fleet.models[self.index];
        let starter = Starter::new(nursery, sockets.path(), &model.lifecycle, self.configured.fleet.watch)?;
        let lab = Lab { numbers, proof, ..Lab::new(starter, self.configured.fleet.growth.clone()) };
        let spec = SoloSpec {
            command: model.command.clone(),
            oom_score_adj: model.oom_score_adj,
            socket: model.run.socket,
            facts: model.facts,
        };
        let base = Experiment { spec, workloads, steps, early: true, replay: recording };
        let server = |revision: usize| -> Serving<'_> {
            Box::pin(async move { self.target(revision).await.map(|target| target.spec) })
        };
        let line = Line { base: base.clone(), last, newer_only: false, server: &server };
        let stop = CancellationToken::new();
        let mut display = Display::new(1);
        let mut watch = |searching: Searching<'_>| match searching {
            Searching::Next(ask, left) => {
                out::error_line(&self.next(ask, left));
                display = Display::new(1);
            }
            Searching::Leg(progress) => display.see(&progress),
            Searching::OnceMore(why) => {
                display.close();
                out::error_line(&format!("between: once more, because {why}"));
            }
            Searching::Told(told) => {
                display.close();
                let new: Vec<BuildId> = lock(&self.built).1.drain(..).collect();
                let kept =
                    new.iter().try_for_each(|id| kept.add_build(id.as_str())).and_then(|()| kept.add(told));
                if let Err(failure) = kept {
                    // The search goes on; it could only not be taken up again.
                    failure.lines().iter().for_each(|line| out::error_line(line));
                }
            }
        };
        let running = Box::pin(line.run(&lab, search, &mut watch, &stop));
        let conclusion = interruptible(signals, &stop, running).await?;
        display.close();
        let conclusion = conclusion?;
        if let Some(failure) = lock(&self.trouble).take() {
            return Err(failure);
        }
        let report = self.report(conclusion);
        self.show(&report)?;
        let written = match (&self.args.report, &report.conclusion.outcome) {
            (Some(path), Ended::Found { revision }) => {
                let ill = revision - usize::from(report.conclusion.ill_is_newer == Some(false));
                let writing = Box::pin(self.write(path, ill, &report, &base, &lab, &stop));
                interruptible(signals, &stop, writing).await?
            }
            (Some(path), _) => {
                out::error_line(&format!("--report {}: nothing was found to write about", path.display()));
                Ok(())
            }
            (None, _) => Ok(()),
        };
        drop(sockets);
        self.tidy(&report.conclusion, kept.built(), &in_use);
        written?;
        if stop.is_cancelled() {
            return Err(Failure::INTERRUPTED);
        }
        end(&report.conclusion)
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
        let Some(symptom) = &between.conclusion.symptom else { return Ok(()) };
        let Ok(target) = self.target(ill).await else {
            let trouble = lock(&self.trouble).take();
            return Err(trouble.unwrap_or(Failure::INTERRUPTED));
        };
        let mut spec = target.spec.clone();
        let (outcome, sent) = match symptom.work() {
            Some((workload, control)) => {
                if control {
                    without_prompt_cache(&mut spec);
                }
                let experiment = Experiment { spec, workloads: vec![workload], ..base.clone() };
                let mut display = Display::new(1);
                let outcome = experiment.run(lab, &mut |progress| display.see(&progress), stop).await?;
                display.close();
                (outcome, Vec::new())
            }
            None => (Outcome::default(), self.requests(symptom, &spec, lab, stop).await?),
        };
        if outcome.interrupted {
            return Err(Failure::INTERRUPTED);
        }
        let about = target.about(crate::clock::now_text(), self.machine);
        let mut report = Report { between: Some(between.clone()), ..Report::new(about, &outcome) };
        report.about.system = folder::system(&target, &outcome).await;
        folder::write(path, &report, &outcome, &target, &self.machine.cwd, base.replay.as_deref(), &sent)
    }

    /// The requests that show what no workload shows.
    async fn requests(
        &self,
        symptom: &Symptom,
        spec: &SoloSpec,
        lab: &Lab,
        stop: &CancellationToken,
    ) -> Result<Vec<proof::Sent>, Failure> {
        let questions: &[String] = match symptom {
            Symptom::Answers { requests } => requests,
            _ => &[],
        };
        let sent = tokio::select! {
            biased;
            () = stop.cancelled() => return Err(Failure::INTERRUPTED),
            sent = proof::requests(lab, spec, questions) => sent?,
        };
        sent.map_err(|why| Failure::failed(format!("--report: the requests could not be written: {why}")))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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
        | Ended::Alike { .. }
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
