//! Builds of a search that run at a time. They begin when a revision is needed that has no build, and no process of the search runs until all of
//! them have ended: a compiler beside a server that is timed or watched would be measured with it.
//!
//! ```text
//!   needed ── has a build, or had none in an earlier batch ──> that
//!      └── which others are needed or may be (`Ahead`) ── have none ── as many as pay (`at_a_time`) ──> built together
//!             ├─ the one that is needed ───────> told to the search
//!             ├─ another one is built ─────────> there when it is asked for
//!             ├─ another one cannot be built ──> remembered, and told when it is asked for
//!             └─ memory or disk ran out ───────> from here on one after the other, the needed one at once
//! ```

use std::collections::BTreeMap;
use std::num::NonZeroUsize;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use tokio_util::sync::CancellationToken;
use warden_builder::machine::cores;
use warden_builder::{Backend, BuildId, Builder, Built, Error, Event, Kind, Plan, Reporter, Request};
use warden_diagnose::between::{Needed, NoServer};
use warden_policies::experiment::between::{Ahead, Machine, Split, Takes, Wanted, at_a_time};

use super::{Between, lock};
use crate::out;

/// So many revisions that may be asked for next are thought of: three steps of a search are seven, and some of them are there or failed.
pub(super) const AHEAD: usize = 16;

/// What is known of the builds of a line, by the places of their revisions.
#[derive(Debug, Default)]
pub(super) struct Builds {
    /// Made, or found in the store.
    known: BTreeMap<usize, BuildId>,
    /// Made, and not in the file of the search yet.
    new: Vec<BuildId>,
    /// Could not be built while another one was needed, and why. Nobody asked for them yet.
    failed: BTreeMap<usize, String>,
    /// Memory or disk ran out while several ran.
    singly: bool,
}

impl Builds {
    /// Those that were made since it was asked last.
    pub(super) fn new_ones(&mut self) -> Vec<BuildId> {
        std::mem::take(&mut self.new)
    }

    fn made(&mut self, revision: usize, built: &Built) {
        self.known.insert(revision, built.id.clone());
        if !built.hit {
            self.new.push(built.id.clone());
        }
    }
}

/// What is built together.
struct Batch {
    /// The one that is needed now is the first.
    revisions: Vec<usize>,
    /// So many of them are needed in any case.
    certain: usize,
    /// Compilers of each; `None`: as many as a build takes that is alone.
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
        if let Some(made) = self.make(&batch, &needed.ahead.otherwise).await {
            return made;
        }
        // What is wrong may be that there were several.
        let alone = self.make(&Batch::alone(needed.revision), &[]).await;
        alone.unwrap_or(Err(NoServer::Interrupted))
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
        if wish == Some(1) || certain.is_empty() || lock(&self.builds).singly {
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

    /// Whether a revision can be built and is not.
    async fn is_missing(&self, revision: usize) -> bool {
        let known = {
            let all = lock(&self.builds);
            if all.failed.contains_key(&revision) {
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
            "between: {} at a time, with {} each: {}{next}",
            out::counted(batch.revisions.len(), "build"),
            out::counted(jobs, "compiler"),
            names(certain)
        )
    }

    /// Makes all of them, and says what came of the first one; `None` if it failed for something that it may have had to share. If it cannot be
    /// built, those are broken off that are not needed then.
    async fn make(&self, batch: &Batch, otherwise: &[usize]) -> Option<Result<BuildId, NoServer>> {
        let each = |revision: &usize| (*revision, self.builder.cancel.child_token());
        let stops: BTreeMap<usize, CancellationToken> = batch.revisions.iter().map(each).collect();
        let all = stops.iter().map(|(revision, stop)| self.one(*revision, batch, stop));
        let mut running: FuturesUnordered<_> = all.collect();
        let mut first = None;
        while let Some((revision, ended)) = running.next().await {
            let is_first = batch.revisions.first() == Some(&revision);
            let came = match ended {
                Ok(built) => {
                    lock(&self.builds).made(revision, &built);
                    Ok(built.id)
                }
                Err(error) if error.kind() == Kind::Cancelled => Err(NoServer::Interrupted),
                Err(error) if error.kind() == Kind::Machine || is_of_the_machine(&error) => {
                    if batch.is_alone() {
                        return Some(self.stop_for(error.into()));
                    }
                    lock(&self.builds).singly = true;
                    let label = &self.line[revision].label;
                    out::error_line(&format!(
                        "between: {label} had no room: from here on one build after the other"
                    ));
                    continue;
                }
                Err(error) => Err(NoServer::Cannot(error.to_string())),
            };
            match came {
                came if is_first => {
                    if came.is_err() {
                        let spare = stops.iter().filter(|(revision, _)| !otherwise.contains(revision));
                        spare.for_each(|(_, stop)| stop.cancel());
                    }
                    first = Some(came);
                }
                Err(NoServer::Cannot(why)) => {
                    lock(&self.builds).failed.insert(revision, why);
                }
                Ok(_) | Err(NoServer::Interrupted) => {}
            }
        }
        first
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
            let why = if is_spare { "it is not needed any more".to_owned() } else { first_words(error) };
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

/// Whether a build failed for want of memory or disk, whatever the source is.
fn is_of_the_machine(error: &Error) -> bool {
    let full = ["No space left on device", "Disk quota exceeded"];
    match error {
        Error::Build { killed: true, .. } => true,
        Error::Build { excerpt, .. } => full.iter().any(|words| excerpt.contains(words)),
        _ => false,
    }
}
