//! Runs what a [`Search`] asks for: fresh processes of revisions, until it is known which one brought a symptom, or ended it.
//!
//! ```text
//!   Search ── Ask ──> the server of the revision ──> an experiment (an end), one leg, or a visit of a proof ──> Seen ──> Search ── … ──> Conclusion
//!                                                                                                           └──> told, to be kept: what is known is not run again
//! ```
//!
//! Where a server of a revision comes from is the caller's business.

use std::pin::Pin;

use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;
use warden_policies::experiment::between::{Aim, Ask, Conclusion, Rules, Search, Seen, Step};
use warden_policies::experiment::{Ended, Finding, Workload};
use warden_supervisor::SoloSpec;

use crate::error::DiagnoseError;
use crate::experiment::{Experiment, without_prompt_cache};
use crate::lab::Lab;
use crate::leg::{Leg, Progress, run_leg, told};
use crate::proof::visit::{self, Wanted};

/// The server of a revision; why there is none, if there is none.
pub type Serving<'a> = Pin<Box<dyn Future<Output = Result<SoloSpec, NoServer>> + Send + 'a>>;

/// Why a revision has no server.
#[derive(Debug)]
pub enum NoServer {
    /// It cannot be built, or not be run as it is asked for, in words.
    Cannot(String),
    /// Somebody asked for an end.
    Interrupted,
}

/// A line of revisions.
pub struct Line<'a> {
    /// The work, and how much of it. The server in it is not used.
    pub base: Experiment,
    /// The place of the newest revision; the oldest one is 0.
    pub last: usize,
    /// Ends as soon as it is known that only the older end has the symptom: whoever wants to know nothing but whether the newer one is worse
    /// knows it then.
    pub newer_only: bool,
    /// Their servers.
    pub server: &'a (dyn Fn(usize) -> Serving<'a> + Sync),
}

impl std::fmt::Debug for Line<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Line").field("base", &self.base).field("last", &self.last).finish_non_exhaustive()
    }
}

/// What one process was asked for, and what came of it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Told {
    /// What was asked for.
    pub ask: Ask,
    /// What came of it.
    pub seen: Seen,
}

/// What happens, for whoever watches.
#[derive(Debug)]
pub enum Searching<'a> {
    /// A process of a revision comes next; so many revisions may be it, once that can be said.
    Next(Ask, Option<usize>),
    /// What it does.
    Leg(Progress<'a>),
    /// It did not start, or was ended by somebody else, and is tried once more.
    OnceMore(&'a str),
    /// It is over, and this came of it.
    Told(&'a Told),
}

/// A search with what is known so far, and how much of that it could use: what does not fit is not used, nor what comes after it.
pub fn resumed(rules: Rules<'_>, aim: Aim, last: usize, known: &[Told]) -> (Search, usize) {
    let mut search = Search::new(rules, aim, last);
    for (used, told) in known.iter().enumerate() {
        if search.next() != Step::Run(told.ask) {
            return (search, used);
        }
        search.observe(told.ask, told.seen.clone());
    }
    (search, known.len())
}

impl Line<'_> {
    /// Runs it to its end. Cancel `stop` for an early one: what is known by then is the conclusion.
    ///
    /// # Errors
    /// Nothing that a server could be blamed for.
    pub async fn run(
        &self,
        lab: &Lab,
        mut search: Search,
        watch: &mut (dyn FnMut(Searching<'_>) + Send),
        stop: &CancellationToken,
    ) -> Result<Conclusion, DiagnoseError> {
        loop {
            let ask = match search.next() {
                Step::Done(conclusion) => return Ok(conclusion),
                Step::Run(ask) => ask,
            };
            if stop.is_cancelled() || (self.newer_only && search.only_the_older_is_ill()) {
                return Ok(search.interrupt());
            }
            watch(Searching::Next(ask, search.left()));
            let Some(seen) = self.see(lab, ask, watch, stop).await? else { return Ok(search.interrupt()) };
            let told = Told { ask, seen };
            // An end that cannot be had ends the search, and may be had next time.
            if !(ask.is_end && matches!(told.seen, Seen::Cannot(_))) {
                watch(Searching::Told(&told));
            }
            search.observe(ask, told.seen);
        }
    }

    /// What comes of one process; `None` if somebody asked for an end.
    async fn see(
        &self,
        lab: &Lab,
        ask: Ask,
        watch: &mut (dyn FnMut(Searching<'_>) + Send),
        stop: &CancellationToken,
    ) -> Result<Option<Seen>, DiagnoseError> {
        let served = (self.server)(ask.revision).await;
        if stop.is_cancelled() {
            return Ok(None);
        }
        let spec = match served {
            Ok(spec) => spec,
            Err(NoServer::Cannot(why)) => return Ok(Some(Seen::Cannot(why))),
            Err(NoServer::Interrupted) => return Ok(None),
        };
        match ask.aim {
            Aim::Growth => self.work(lab, ask, &spec, watch, stop).await,
            Aim::Slowdown | Aim::Answers => visit(lab, ask, &spec, watch, stop).await,
        }
    }

    /// What comes of a process that works.
    async fn work(
        &self,
        lab: &Lab,
        ask: Ask,
        spec: &SoloSpec,
        watch: &mut (dyn FnMut(Searching<'_>) + Send),
        stop: &CancellationToken,
    ) -> Result<Option<Seen>, DiagnoseError> {
        let mut without_cache = spec.clone();
        without_prompt_cache(&mut without_cache);
        let mut tried = 0;
        loop {
            tried += 1;
            // A build that does not know the flag has no such cache.
            let control = ask.control && tried == 1;
            let spec = if control { without_cache.clone() } else { spec.clone() };
            let mut show = |progress: Progress<'_>| watch(Searching::Leg(progress));
            let found = self.once(lab, ask, spec, &mut show, stop).await;
            if stop.is_cancelled() {
                return Ok(None);
            }
            let why = match found {
                Ok((_, true)) | Err(DiagnoseError::Interrupted) => return Ok(None),
                Ok((findings, false)) if findings.is_empty() => {
                    return Ok(Some(Seen::Cannot("it can do none of these workloads".to_owned())));
                }
                Ok((findings, false)) => match from_outside(&findings) {
                    Some(why) if tried < TRIES => why,
                    _ => return Ok(Some(Seen::Findings(findings))),
                },
                Err(DiagnoseError::Start(failure)) => {
                    let why = format!("it did not start: {}", told(&failure));
                    if tried >= TRIES {
                        return Ok(Some(Seen::Cannot(why)));
                    }
                    why
                }
                Err(error @ DiagnoseError::CannotDo { .. }) => {
                    return Ok(Some(Seen::Cannot(error.to_string())));
                }
                Err(error) => return Err(error),
            };
            watch(Searching::OnceMore(&why));
        }
    }

    /// What one process does, and whether it was broken off.
    async fn once(
        &self,
        lab: &Lab,
        ask: Ask,
        spec: SoloSpec,
        show: &mut (dyn FnMut(Progress<'_>) + Send),
        stop: &CancellationToken,
    ) -> Result<(Vec<Finding>, bool), DiagnoseError> {
        if ask.is_end {
            let experiment = Experiment { spec, ..self.base.clone() };
            let outcome = Box::pin(experiment.run(lab, show, stop)).await?;
            let findings = outcome.legs.into_iter().map(|leg| leg.finding).collect();
            return Ok((findings, outcome.interrupted));
        }
        let workload = ask.workload.or_else(|| self.base.workloads.first().copied());
        let workload = workload.unwrap_or(Workload::ShortText);
        let leg = Leg {
            spec,
            workload,
            steps: self.base.steps,
            early: !ask.whole,
            replay: self.base.replay.clone(),
        };
        let finding = run_leg(lab, &leg, show, stop).await?.finding;
        let interrupted = finding.ended == Ended::Interrupted;
        Ok((vec![Finding { control: ask.control, ..finding }], interrupted))
    }
}

/// What comes of a process that is timed or asked questions; `None` if somebody asked for an end.
async fn visit(
    lab: &Lab,
    ask: Ask,
    spec: &SoloSpec,
    watch: &mut (dyn FnMut(Searching<'_>) + Send),
    stop: &CancellationToken,
) -> Result<Option<Seen>, DiagnoseError> {
    let (answers, pace) = (ask.aim == Aim::Answers, ask.aim == Aim::Slowdown);
    let wanted = Wanted { answers, pace, ..Wanted::default() };
    let mut tried = 0;
    loop {
        tried += 1;
        let seen = tokio::select! {
            biased;
            () = stop.cancelled() => return Ok(None),
            seen = visit::run(lab, spec, wanted) => seen?,
        };
        match seen {
            Ok(visited) => return Ok(Some(Seen::Visit(visited.visit))),
            Err(why) if tried >= TRIES => return Ok(Some(Seen::Cannot(why))),
            Err(why) => watch(Searching::OnceMore(&why)),
        }
    }
}

/// So often a process is tried that does not start or is ended by somebody else: memory may be somebody else's for a moment.
const TRIES: u32 = 3;

/// That somebody else ended it, or the machine had no memory left.
fn from_outside(findings: &[Finding]) -> Option<String> {
    findings.iter().find_map(|finding| match &finding.ended {
        Ended::Killed { why } | Ended::OutOfMemory { why } => Some(why.clone()),
        _ => None,
    })
}
