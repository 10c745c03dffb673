//! Builds of a search that run at a time. They begin when a revision is needed that has no build, and no process of the search runs until all of
//! them have ended: a compiler beside a server that is timed or watched would be measured with it.
//!
//! ```text
//!   needed ── has a build, or had none in an earlier batch ──> that
//!      └── which others are needed or may be (`Ahead`) ── have none ── as many as pay (`at_a_time`) ──> built together
//!             ├─ the one that is needed ───────> told to the search
//!             ├─ another one is built ─────────> there when it is asked for
//!             ├─ another one cannot be built ──> remembered, and told when it is asked for
//!             ├─ memory or disk ran out ───────> from here on one after the other, the needed one at once
//!             └─ it failed its checks ─────────> the needed one once more, alone: they may be why
//! ```
//!
//! How long the others are waited for is the business of [`Course`].

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroUsize;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;
use warden_builder::machine::cores;
use warden_builder::{Backend, BuildId, Builder, Built, Error, Event, Kind, Plan, Reporter, Request};
use warden_diagnose::between::{Needed, NoServer};
use warden_policies::experiment::between::{Ahead, Machine, Split, Takes, Wanted, at_a_time};

use super::course::Course;
use super::{Between, lock};
use crate::out;

/// So many revisions that may be asked for next are thought of: three steps of a search are seven, and some of them are there or failed.
pub(super) const AHEAD: usize = 16;

/// What is known of the builds of a line, by the places of their revisions.
#[derive(Debug, Default)]
pub(super) struct Builds {
    /// Made, or found in the store.
    known: BTreeMap<usize, BuildId>,
    /// Could not be built while another one was needed, and why. Nobody asked for them yet.
    failed: BTreeMap<usize, String>,
    /// Failed their checks beside others, and are made alone if they are needed.
    unsure: BTreeSet<usize>,
    /// What one build has is not enough for several.
    singly: bool,
}

/// What is built together.
struct Batch {
    /// The one that is needed now is the first.
    revisions: Vec<usize>,
    /// So many of them are needed in any case.
    certain: usize,
    /// Compilers of each at most; `None`: as many as a build takes that is alone.
    jobs: Option<NonZeroUsize>,
}

impl Batch {
    fn alone(revision: usize) -> Self {
        Self { revisions: vec![revision], certain: 1, jobs: None }
    }

    fn is_alone(&self) -> bool {
        self.revisions.len() == 1
    }
}

impl Between<'_> {
    /// The build of a revision, made if it is not there, and others with it.
    pub(super) async fn build(&self, needed: &Needed) -> Result<BuildId, NoServer> {
        if let Some(known) = self.known(needed.revision) {
            return known;
        }
        let batch = self.batch(needed).await;
        if !batch.is_alone() {
            out::error_line(&self.told(&batch));
        }
        let made = match self.make(&batch, &needed.ahead.otherwise).await {
            Some(made) => made,
            None => self.once_more(needed.revision).await,
        };
        let id = made?;
        match self.failed_end(needed.revision) {
            Some(failed) => Err(failed),
            None => Ok(id),
        }
    }

    /// What is wrong may be that there were several.
    async fn once_more(&self, revision: usize) -> Result<BuildId, NoServer> {
        let alone = self.make(&Batch::alone(revision), &[]).await;
        let alone = alone.unwrap_or(Err(NoServer::Interrupted));
        if alone.is_ok() && !std::mem::replace(&mut lock(&self.builds).singly, true) {
            let label = &self.line[revision].label;
            self.note(&format!("{label} passes its checks alone: from here on one build after the other"));
        }
        alone
    }

    /// The other end, if this is an end and that one could not be built beside it: the work of this one would be in vain.
    fn failed_end(&self, revision: usize) -> Option<NoServer> {
        let other = (self.line.len() - 1).checked_sub(revision)?;
        let why = (revision == 0 || other == 0).then(|| lock(&self.builds).failed.remove(&other))??;
        Some(NoServer::End { revision: other, why })
    }

    /// What came of it in an earlier batch. That it could not be built is told once: whoever asks again has it tried again.
    fn known(&self, revision: usize) -> Option<Result<BuildId, NoServer>> {
        let mut all = lock(&self.builds);
        if let Some(why) = all.failed.remove(&revision) {
            return Some(Err(NoServer::Cannot(why)));
        }
        let id = all.known.get(&revision)?.clone();
        drop(all);
        self.builder.store().binary(&id).is_ok().then_some(Ok(id))
    }

    /// What is built together with what is needed.
    async fn batch(&self, needed: &Needed) -> Batch {
        let alone = Batch::alone(needed.revision);
        let wish = self.args.between.builds.map(NonZeroUsize::get);
        let Ahead { certain, likely, .. } = &needed.ahead;
        if wish == Some(1) || certain.is_empty() || self.is_single(needed.revision) {
            return alone;
        }
        // What is wrong with its plan is told when it is built; and what the store has is no reason to build others.
        let Some(plan) = self.planned(needed.revision).await else { return alone };
        if self.builder.store().binary(&plan.id).is_ok() {
            return alone;
        }
        let split = |certain: usize, likely: usize| {
            self.split(plan.recipe.backend, Wanted { certain, likely, at_a_time: wish })
        };
        let most = split(certain.len(), likely.len()).builds;
        let (mut revisions, mut others) = (vec![needed.revision], 0);
        for (at, revision) in certain.iter().chain(likely).enumerate().skip(1) {
            if revisions.len() >= most {
                break;
            }
            if self.is_missing(*revision).await {
                revisions.push(*revision);
                others += usize::from(at >= certain.len());
            }
        }
        // Some of those that are certain may be there: then fewer pay.
        let certain = revisions.len() - others;
        let Split { builds, jobs } = split(certain, others);
        revisions.truncate(builds);
        if revisions.len() == 1 {
            return alone;
        }
        Batch { certain: certain.min(builds), revisions, jobs: NonZeroUsize::new(jobs) }
    }

    /// Whether it is made alone after what happened.
    fn is_single(&self, revision: usize) -> bool {
        let all = lock(&self.builds);
        all.singly || all.unsure.contains(&revision)
    }

    fn split(&self, backend: Backend, wanted: Wanted) -> Split {
        let (needs, numbers) = (self.plain.needs, &self.numbers);
        let is_gpu = matches!(backend, Backend::Cuda | Backend::Hip);
        let takes = Takes {
            memory_per_job: needs.per_job(backend),
            disk: needs.disk,
            jobs_to_spare: if is_gpu { numbers.gpu_jobs_to_spare } else { numbers.jobs_to_spare },
        };
        // A disk that cannot be asked is one that a build complains of.
        let disk = self.builder.free_disk().unwrap_or_default();
        at_a_time(Machine { cores: cores(), memory: (self.builder.memory)(), disk }, takes, wanted)
    }

    /// What a build of it would be; `None`: that cannot be said.
    async fn planned(&self, revision: usize) -> Option<Plan> {
        let silent = Builder { reporter: Reporter::silent(), ..self.builder.clone() };
        silent.plan(&self.request(self.line.get(revision)?)).await.ok()
    }

    /// Whether a revision can be built beside others and is not.
    async fn is_missing(&self, revision: usize) -> bool {
        let known = {
            let all = lock(&self.builds);
            if all.failed.contains_key(&revision) || all.unsure.contains(&revision) {
                return false;
            }
            all.known.get(&revision).cloned()
        };
        let store = self.builder.store();
        if known.is_some_and(|id| store.binary(&id).is_ok()) {
            return false;
        }
        let Some(plan) = self.planned(revision).await else { return false };
        let is_there = store.binary(&plan.id).is_ok();
        if is_there {
            lock(&self.builds).known.insert(revision, plan.id);
        }
        !is_there
    }

    fn told(&self, batch: &Batch) -> String {
        let names = |revisions: &[usize]| {
            let all: Vec<&str> = revisions.iter().map(|at| self.line[*at].label.as_str()).collect();
            all.join(", ")
        };
        let (certain, likely) = batch.revisions.split_at(batch.certain);
        let jobs = batch.jobs.map_or(1, NonZeroUsize::get);
        let next = if likely.is_empty() {
            String::new()
        } else {
            format!("; in case it is asked for next: {}", names(likely))
        };
        format!(
            "between: {} at a time, with up to {} each: {}{next}",
            out::counted(batch.revisions.len(), "build"),
            out::counted(jobs, "compiler"),
            names(certain)
        )
    }

    /// Makes all of them, and says what came of the first one; `None` if it failed for what may be only because it was not alone.
    async fn make(&self, batch: &Batch, otherwise: &[usize]) -> Option<Result<BuildId, NoServer>> {
        let each = |revision: &usize| (*revision, self.builder.cancel.child_token());
        let stops: BTreeMap<usize, CancellationToken> = batch.revisions.iter().map(each).collect();
        let break_off =
            |all: Vec<usize>| all.iter().filter_map(|at| stops.get(at)).for_each(CancellationToken::cancel);
        let all = stops.iter().map(|(revision, stop)| self.one(*revision, batch, stop));
        let mut running: FuturesUnordered<_> = all.collect();
        let mut course = Course::new(&batch.revisions, batch.certain);
        let (begun, mut until) = (Instant::now(), None);
        let mut first = None;
        loop {
            let next = match until {
                None => running.next().await,
                Some(at) => {
                    let Ok(next) = timeout_at(at, running.next()).await else {
                        until = None;
                        break_off(course.breaks_off());
                        continue;
                    };
                    next
                }
            };
            let Some((revision, ended)) = next else { return first };
            course.ended(revision);
            let is_first = batch.revisions.first() == Some(&revision);
            let came = self.came(revision, ended, is_first, batch.is_alone());
            match &came {
                Some(Ok(_)) => {}
                Some(Err(NoServer::Cannot(_))) if is_first => {
                    let next = self.next_ones(otherwise, batch.revisions.len());
                    break_off(course.goes_on_with(&next));
                }
                // It is made alone, or there is no going on.
                _ if is_first => break_off(course.breaks_off()),
                Some(Err(NoServer::Cannot(why))) => {
                    lock(&self.builds).failed.insert(revision, why.clone());
                }
                _ => {}
            }
            if is_first {
                first = came;
            }
            if until.is_none() && course.only_spares() {
                until = Some(Instant::now() + begun.elapsed());
            }
        }
    }

    /// What came of one that has ended; `None` if that says nothing of its revision.
    fn came(
        &self,
        revision: usize,
        ended: Result<Built, Error>,
        is_first: bool,
        is_alone: bool,
    ) -> Option<Result<BuildId, NoServer>> {
        let error = match ended {
            Ok(built) => return Some(Ok(self.made(revision, built))),
            Err(error) => error,
        };
        let label = &self.line[revision].label;
        match blame(&error) {
            Blame::Nobody => Some(Err(NoServer::Interrupted)),
            Blame::Room if !is_alone => {
                lock(&self.builds).singly = true;
                self.note(&format!("{label} had no room: from here on one build after the other"));
                None
            }
            Blame::Checks if !is_alone => {
                lock(&self.builds).unsure.insert(revision);
                if is_first {
                    self.note(&format!("{label} failed its checks beside other builds: once more, alone"));
                }
                None
            }
            Blame::Room | Blame::Machine if is_first => Some(self.stop_for(error.into())),
            // The error is told when the search asks for that revision.
            Blame::Room | Blame::Machine => None,
            Blame::Checks | Blame::Source => Some(Err(NoServer::Cannot(error.to_string()))),
        }
    }

    /// It is written down at once, so that it is removed some day whatever happens now.
    fn made(&self, revision: usize, built: Built) -> BuildId {
        if !built.hit {
            self.keep(|kept| kept.add_build(built.id.as_str()));
        }
        lock(&self.builds).known.insert(revision, built.id.clone());
        built.id
    }

    /// What the next batch has if the one that is needed now cannot be built.
    fn next_ones(&self, otherwise: &[usize], most: usize) -> Vec<usize> {
        let all = lock(&self.builds);
        let is_open = |at: &usize| !all.known.contains_key(at) && !all.failed.contains_key(at);
        otherwise.iter().copied().filter(is_open).take(most).collect()
    }

    /// Not past the display of the builds: a line of it may be changing.
    fn note(&self, text: &str) {
        self.builder.reporter.tell(Event::Note(format!("between: {text}")));
    }

    /// Makes one of them.
    async fn one(
        &self,
        revision: usize,
        batch: &Batch,
        stop: &CancellationToken,
    ) -> (usize, Result<Built, Error>) {
        let info = &self.line[revision];
        let mut builder = Builder { cancel: stop.clone(), ..self.builder.clone() };
        if !batch.is_alone() {
            builder.reporter = self.builder.reporter.of(&info.label);
        }
        let request = Request { jobs: batch.jobs.map(NonZeroUsize::get), ..self.request(info) };
        let ended = builder.build(&request).await;
        if let (Err(error), false) = (&ended, batch.is_alone()) {
            let is_spare = error.kind() == Kind::Cancelled && !self.builder.cancel.is_cancelled();
            let why = if is_spare { "it is not needed now".to_owned() } else { first_words(error) };
            builder.reporter.tell(Event::Failed(why));
        }
        (revision, ended)
    }
}

/// The first line of an error, with the next one if it only announces that.
fn first_words(error: &Error) -> String {
    let text = error.to_string();
    let mut lines = text.lines();
    let first = lines.next().unwrap_or_default();
    let next = lines.next().filter(|_| first.ends_with(':'));
    next.map_or_else(|| first.to_owned(), |next| format!("{first} {}", next.trim()))
}

/// What a build failed for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Blame {
    /// It was broken off.
    Nobody,
    /// Memory or disk ran out.
    Room,
    /// Something else on this machine is amiss.
    Machine,
    /// It was built and did not do what it should, or not in time: a machine that is busy may be why.
    Checks,
    /// Its revision.
    Source,
}

fn blame(error: &Error) -> Blame {
    match (error, error.kind()) {
        (_, Kind::Cancelled) => Blame::Nobody,
        _ if error.had_no_room() => Blame::Room,
        (_, Kind::Machine) => Blame::Machine,
        (Error::Verify { illegal_instruction: false, .. }, _) => Blame::Checks,
        _ => Blame::Source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_revision_is_blamed_for_what_is_its_own_alone() {
        let build = |no_room| Error::Build {
            phase: "compiling",
            excerpt: "collect2: error: ld returned 1 exit status".to_owned(),
            log: "/logs/1.log".into(),
            killed: false,
            no_room,
        };
        let verify = |illegal_instruction| Error::Verify {
            check: "health",
            why: "no answer within 60 s".to_owned(),
            illegal_instruction,
        };
        let io = |source: std::io::ErrorKind| Error::Io {
            doing: "writing",
            path: "/store/x".into(),
            source: source.into(),
        };
        let missing = Error::MissingProgram { program: "ninja".to_owned(), package: "ninja-build" };
        for (error, expected) in [
            (Error::Cancelled, Blame::Nobody),
            (build(true), Blame::Room),
            (Error::Memory { available: 1, need: 2 }, Blame::Room),
            (io(std::io::ErrorKind::StorageFull), Blame::Room),
            (io(std::io::ErrorKind::PermissionDenied), Blame::Machine),
            (missing, Blame::Machine),
            (verify(false), Blame::Checks),
            (verify(true), Blame::Source),
            (build(false), Blame::Source),
        ] {
            assert_eq!(blame(&error), expected, "{error}");
        }
    }
}
