//! Runs what a [`Search`] asks for: fresh processes of revisions, until it is known which one brought a symptom, or ended it.
//!
//! ```text
//!   Search ── Ask ──> the server of the revision ──> an experiment (an end), one leg, or a visit of a proof ──> Seen ──> Search ── … ──> Conclusion
//!                                                                                                           └──> told, to be kept: what is known is not run again
//! ```
//!
//! Where a server of a revision comes from is the caller's business.

use std::pin::Pin;
use std::sync::OnceLock;

use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;
use warden_policies::experiment::between::{Ahead, Aim, Ask, Conclusion, Rules, Search, Seen, Step};
use warden_policies::experiment::{Ended, Finding, Workload};
use warden_supervisor::SoloSpec;

use crate::error::DiagnoseError;
use crate::experiment::{Experiment, without_prompt_cache};
use crate::lab::Lab;
use crate::leg::{Leg, Progress, run_leg, told};
use crate::proof::Lengths;
use crate::proof::visit::{self, Wanted};

/// A revision whose server is needed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Needed {
    /// Which, by its place in the line.
    pub revision: usize,
    /// What else may be asked for after it, so that it can be made ready at the same time.
    pub ahead: Ahead,
}

impl Needed {
    /// That one, and nothing after it.
    pub fn only(revision: usize) -> Self {
        Self { revision, ahead: Ahead::default() }
    }
}

/// The server of a revision; why there is none, if there is none.
pub type Serving<'a> = Pin<Box<dyn Future<Output = Result<SoloSpec, NoServer>> + Send + 'a>>;

/// Why a revision has no server.
#[derive(Debug)]
pub enum NoServer {
    /// It cannot be built, or not be run as it is asked for, in words.
    Cannot(String),
    /// An end of the line cannot be built: it is another one, and nothing can be told without it.
    End {
        /// Which.
        revision: usize,
        /// In words.
        why: String,
    },
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
    /// How long the requests are that its processes are timed and asked with; empty until one was.
    pub lengths: &'a OnceLock<Lengths>,
    /// So many revisions that may be asked for next are told to whoever gives the servers; 0: none.
    pub ahead: usize,
    /// Their servers. No process of the search runs while one is waited for.
    pub server: &'a (dyn Fn(Needed) -> Serving<'a> + Sync),
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
    /// How long its requests were, if it was timed or asked: they are as long for those after it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lengths: Option<Lengths>,
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

impl Told {
    /// Whether it says that an end could not be run just then. It may be run next time, and nothing else is known without it, so it is not
    /// kept.
    fn is_passing(&self, last: usize) -> bool {
        let is_end = self.ask.revision == 0 || self.ask.revision == last;
        is_end
            && match &self.seen {
                Seen::Cannot(_) => true,
                // What an end shows counts however it ended; one process of it is run again.
                Seen::Findings(all) => {
                    !self.ask.is_end && all.iter().any(|one| matches!(one.ended, Ended::Killed { .. }))
                }
                Seen::Visit(_) => false,
            }
    }
}

/// A search with what is known so far, and how much of that it could use: what does not fit is not used, nor what comes after it. Nor are,
/// at its end, failures that may be over, and processes of which those are missing that have to run behind them.
pub fn resumed(rules: Rules<'_>, aim: Aim, last: usize, known: &[Told]) -> (Search, usize) {
    let lasting = known.iter().rposition(|told| !told.is_passing(last)).map_or(0, |at| at + 1);
    let mut search = Search::new(rules, aim, last);
    let (mut used, mut whole) = (0, 0);
    for told in &known[..lasting] {
        if search.next() != Step::Run(told.ask) {
            break;
        }
        search.observe(told.ask, told.seen.clone());
        used += 1;
        if search.is_whole() {
            whole = used;
        }
    }
    if whole < used { resumed(rules, aim, last, &known[..whole]) } else { (search, used) }
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
            let needed = Needed { revision: ask.revision, ahead: search.ahead(self.ahead) };
            let served = (self.server)(needed).await;
            if stop.is_cancelled() {
                return Ok(search.interrupt());
            }
            let seen = match served {
                Ok(spec) => self.see(lab, ask, &spec, watch, stop).await?,
                Err(NoServer::Cannot(why)) => Some(Seen::Cannot(why)),
                Err(NoServer::End { revision, why }) => {
                    search.end_failed(revision, why);
                    continue;
                }
                Err(NoServer::Interrupted) => None,
            };
            let Some(seen) = seen else { return Ok(search.interrupt()) };
            let lengths = self.lengths.get().copied().filter(|_| !ask.aim.is_growth());
            let told = Told { ask, seen, lengths };
            if !told.is_passing(self.last) {
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
        spec: &SoloSpec,
        watch: &mut (dyn FnMut(Searching<'_>) + Send),
        stop: &CancellationToken,
    ) -> Result<Option<Seen>, DiagnoseError> {
        match ask.aim {
            Aim::Growth => self.work(lab, ask, spec, watch, stop).await,
            Aim::Slowdown | Aim::Answers => visit(lab, ask, spec, self.lengths, watch, stop).await,
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
    lengths: &OnceLock<Lengths>,
    watch: &mut (dyn FnMut(Searching<'_>) + Send),
    stop: &CancellationToken,
) -> Result<Option<Seen>, DiagnoseError> {
    let (answers, pace) = (ask.aim == Aim::Answers, ask.aim == Aim::Slowdown);
    let wanted = Wanted { answers, pace, lengths: lengths.get().copied(), ..Wanted::default() };
    let mut tried = 0;
    loop {
        tried += 1;
        let seen = tokio::select! {
            biased;
            () = stop.cancelled() => return Ok(None),
            seen = visit::run(lab, spec, wanted) => seen?,
        };
        match seen {
            Ok(visited) => {
                lengths.get_or_init(|| visited.lengths);
                return Ok(Some(Seen::Visit(visited.visit)));
            }
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

#[cfg(test)]
mod tests {
    use super::*;
    use warden_policies::experiment::proof::{Metric, Visit};

    /// All answers that a search was given, in the order of its questions; `seen` gives them, until it has none.
    fn told(aim: Aim, last: usize, seen: &mut dyn FnMut(Ask) -> Option<Seen>) -> Vec<Told> {
        let all = warden_policies::defaults();
        let rules = Rules { cure: &all.diagnose.cure, crash: &all.diagnose.crash, proof: &all.proof };
        let mut search = Search::new(rules, aim, last);
        let mut told = Vec::new();
        while let Step::Run(ask) = search.next()
            && let Some(seen) = seen(ask)
        {
            search.observe(ask, seen.clone());
            told.push(Told { ask, seen, lengths: None });
        }
        told
    }

    fn again(aim: Aim, last: usize, known: &[Told]) -> (Search, usize) {
        let all = warden_policies::defaults();
        let rules = Rules { cure: &all.diagnose.cure, crash: &all.diagnose.crash, proof: &all.proof };
        resumed(rules, aim, last, known)
    }

    /// The newer half takes a third more; a process of its own differs by a little.
    fn timed(ask: Ask, count: usize) -> Seen {
        let own = if ask.revision >= 8 { 0.0266 } else { 0.02 };
        let by = [1.0, 1.003, 0.998, 1.001][count % 4];
        Seen::Visit(Visit { measured: vec![(Metric::Decode, own * by)], replies: Vec::new() })
    }

    #[test]
    fn an_end_that_could_not_be_run_for_a_while_does_not_end_the_search_for_ever() {
        let (mut count, mut left) = (0, 4);
        let all = told(Aim::Slowdown, 16, &mut |ask| {
            count += 1;
            if !ask.is_end && ask.revision == 16 {
                left -= 1;
                return (left >= 0).then(|| Seen::Cannot("it did not start".to_owned()));
            }
            Some(timed(ask, count))
        });
        // It ended because the slower end failed; so a file of an older version says.
        assert!(all.iter().rev().take(3).all(|told| matches!(told.seen, Seen::Cannot(_))), "{all:?}");
        assert!(all.iter().rev().take(3).all(|told| told.is_passing(16)), "none of it is written");
        let (mut search, used) = again(Aim::Slowdown, 16, &all);
        assert!(used > 0 && used < all.len());
        assert!(matches!(search.next(), Step::Run(ask) if !ask.is_end), "{:?}", search.next());
        // What cannot be told of others stays.
        let ask = Ask { revision: 7, ..all[0].ask };
        assert!(!Told { ask, seen: Seen::Cannot(String::new()), lengths: None }.is_passing(16));
    }

    #[test]
    fn a_round_of_which_a_process_is_missing_is_run_anew() {
        let mut count = 0;
        let all = told(Aim::Slowdown, 16, &mut |ask| {
            count += 1;
            Some(timed(ask, count))
        });
        let first = all.iter().position(|told| !told.ask.is_end).unwrap();
        assert!(first.is_multiple_of(2) && all.len() > first + 6);
        for known in 0..first + 6 {
            let (mut search, used) = again(Aim::Slowdown, 16, &all[..known]);
            let round = if known < first { 2 } else { 3 };
            let begun = if known < first { 0 } else { first };
            assert_eq!(used, known - (known - begun) % round, "{known} known");
            assert_eq!(search.next(), Step::Run(all[used].ask));
        }
    }
}
