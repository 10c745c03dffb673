//! Tests if a server mixes conversations: asks more conversations than the server has slots, and compares each
//! answer with the right one.
//!
//! ```text
//!   alone      own arguments, one conversation ──> slots, context, noise of reused prompts
//!   truth      one slot, no prompt cache, `cache_prompt: false` ──> the right answers, noise of a repetition
//!   together   own arguments, all conversations: one after the other, then as many at a time as slots
//!              ──> judge_answers ──> IsolationFinding
//!   a cure     as `together`, with a switch
//! ```
//!
//! Each is a fresh process. The right answers come first, so that conversations contain them, and a mixed answer
//! does not spread to later turns.

mod process;
mod texts;

use std::time::Duration;

use tokio_util::sync::CancellationToken;
use warden_experiment::isolation::{
    AskedAnswer, IsolationAnswers, IsolationFinding, IsolationPlan, PromptPlace, judge_answers,
};
use warden_supervisor::{ServerProps, SoloSpec};

use self::process::{IsolationProcess, RunStop};
use self::texts::ConversationTexts;
use crate::error::DiagnoseError;
use crate::experiment::without_prompt_cache;
use crate::lab::Lab;
use crate::proof::PublishedRequest;
use crate::workload::ServerLimits;

/// Pause after a round, in which the server may save idle slots.
const ROUND_PAUSE: Duration = Duration::from_millis(300);
/// Most prompts that are evaluated twice for the right answer: on a slow processor each takes seconds.
const REPEATED_MOST: usize = 8;
/// Seed of texts and order, so that two runs send the same requests.
const SEED: u64 = 1;

/// Requests to the tested process, unless another number is given: they find mixing in 3 % of the requests.
pub const ISOLATION_REQUESTS: usize = 100;

/// Server to test.
#[derive(Clone, Debug)]
pub struct IsolationExperiment {
    /// Server with the arguments to test.
    pub spec: SoloSpec,
    /// True if the server knows `--cache-ram`.
    pub has_prompt_cache: bool,
    /// Fewest requests to the tested process.
    pub requests: usize,
}

/// Progress of an experiment: the process, and its requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IsolationProgress<'a> {
    /// Process: `alone`, `truth`, `together` or a switch.
    pub process: &'a str,
    /// Answered requests.
    pub done: usize,
    /// All requests; 0 while the process starts.
    pub of: usize,
}

/// Answers and result of an experiment.
#[derive(Clone, Debug)]
pub struct IsolationRun {
    /// Result.
    pub finding: IsolationFinding,
    /// Properties that the server reported.
    pub props: ServerProps,
    /// Tokens per word of generated texts; 0 if unknown.
    pub tokens_per_word: f64,
    /// True if the user interrupted the experiment.
    pub interrupted: bool,
    /// Reason why answers are missing, if some are.
    pub failure: Option<String>,
    plan: IsolationPlan,
    texts: ConversationTexts,
    answers: IsolationAnswers,
}

type ProgressWatcher<'a> = dyn FnMut(IsolationProgress<'_>) + Send + 'a;

/// Returns the server with one slot, so that the answers to prompts without reuse are the right ones.
pub fn with_one_slot(mut spec: SoloSpec, has_prompt_cache: bool) -> SoloSpec {
    // llama-server uses the last occurrence of a flag.
    spec.command.args.extend(["-np".to_owned(), "1".to_owned()]);
    if has_prompt_cache {
        without_prompt_cache(&mut spec);
    }
    spec
}

impl IsolationExperiment {
    /// Runs the processes. Cancelling `stop` ends them early, with the results so far.
    ///
    /// # Errors
    /// The server does not start, or the user interrupted the experiment before the first start.
    pub async fn run(
        &self,
        lab: &Lab,
        watch: &mut ProgressWatcher<'_>,
        stop: &CancellationToken,
    ) -> Result<IsolationRun, DiagnoseError> {
        watch(IsolationProgress { process: "alone", done: 0, of: 0 });
        let process = IsolationProcess::start(lab, &self.spec, stop).await?;
        let props = process.props();
        let slots = usize::try_from(props.slots.unwrap_or(1)).unwrap_or(1);
        let plan = IsolationPlan::new(slots, self.requests, SEED);
        let facts = process.facts().await;
        let tokens_per_word = facts.as_ref().map_or(0.0, |facts| facts.tokens_per_word);
        let limits = ServerLimits { slots: props.slots.unwrap_or(1), n_ctx: props.n_ctx, tokens_per_word };
        let mut run = IsolationRun {
            finding: judge_answers(slots, &IsolationAnswers::default(), None),
            props,
            tokens_per_word,
            interrupted: false,
            failure: None,
            plan,
            texts: ConversationTexts::new(limits, SEED),
            answers: IsolationAnswers::default(),
        };
        let mut ended = match facts {
            Ok(_) => run.ask_alone(&process, watch).await,
            Err(stopped) => Err(stopped),
        };
        process.stop().await;
        if ended.is_ok() {
            ended = self.find_truths(&mut run, lab, watch, stop).await?;
        }
        if ended.is_ok() {
            ended = run.ask_together(lab, &self.spec, ("together", true), watch, stop).await?;
        }
        match ended {
            Ok(()) => {}
            Err(RunStop::Interrupted) => {
                run.interrupted = true;
                run.failure = Some("it was interrupted".to_owned());
            }
            Err(RunStop::Failed(why)) => run.failure = Some(why),
        }
        run.finding = judge_answers(slots, &run.answers, run.failure.as_deref());
        Ok(run)
    }

    async fn find_truths(
        &self,
        run: &mut IsolationRun,
        lab: &Lab,
        watch: &mut ProgressWatcher<'_>,
        stop: &CancellationToken,
    ) -> Result<Result<(), RunStop>, DiagnoseError> {
        watch(IsolationProgress { process: "truth", done: 0, of: 0 });
        let spec = with_one_slot(self.spec.clone(), self.has_prompt_cache);
        let process = match IsolationProcess::start(lab, &spec, stop).await {
            Err(DiagnoseError::Interrupted) => return Ok(Err(RunStop::Interrupted)),
            started => started?,
        };
        let ended = run.ask_truths(&process, watch).await;
        process.stop().await;
        Ok(ended)
    }
}

impl IsolationRun {
    /// Runs the requests once more with a switch: on another command line, or without reuse of prompts.
    ///
    /// # Errors
    /// The server does not start, or the user interrupted the trial.
    pub async fn try_cure(
        &self,
        lab: &Lab,
        spec: &SoloSpec,
        (switch, reuses): (&str, bool),
        watch: &mut ProgressWatcher<'_>,
        stop: &CancellationToken,
    ) -> Result<IsolationFinding, DiagnoseError> {
        let mut run = self.clone();
        run.answers.together.clear();
        let failure = match run.ask_together(lab, spec, (switch, reuses), watch, stop).await? {
            Ok(()) => None,
            Err(RunStop::Interrupted) => return Err(DiagnoseError::Interrupted),
            Err(RunStop::Failed(why)) => Some(why),
        };
        Ok(judge_answers(self.plan.slots, &run.answers, failure.as_deref()))
    }

    /// Returns the prompt of each request file.
    pub fn places(&self) -> Vec<PromptPlace> {
        self.answers.truths.keys().copied().collect()
    }

    /// Returns the request of each request file.
    pub fn published(&self, lab: &Lab) -> Vec<PublishedRequest> {
        let request = |place: PromptPlace| texts::request(&self.texts.prompt(place), lab.proof.top, true);
        let all = self.places().into_iter().map(request);
        all.filter_map(|ask| Some(PublishedRequest { path: ask.path, body: ask.body? })).collect()
    }

    /// Returns the numbers of the request files in order; requests that ran at the same time are in one list.
    pub fn order(&self) -> Vec<Vec<usize>> {
        let places = self.places();
        let number = |place: &PromptPlace| places.binary_search(place).ok();
        let batches = self.plan.rounds.iter().flat_map(|round| round.prompts.chunks(self.plan.width(round)));
        batches.map(|batch| batch.iter().filter_map(number).collect()).collect()
    }

    async fn ask_alone(
        &mut self,
        process: &IsolationProcess<'_>,
        watch: &mut ProgressWatcher<'_>,
    ) -> Result<(), RunStop> {
        let batches = self.plan.alone();
        let of = batches.iter().map(Vec::len).sum();
        for batch in batches {
            let prompts: Vec<String> = batch.iter().map(|place| self.texts.prompt(*place)).collect();
            for (place, (reply, _)) in batch.into_iter().zip(process.ask(&prompts, true).await?) {
                self.texts.add_answer(place, &reply.text);
                self.answers.alone.push((place, reply));
            }
            watch(IsolationProgress { process: "alone", done: self.answers.alone.len(), of });
        }
        Ok(())
    }

    async fn ask_truths(
        &mut self,
        process: &IsolationProcess<'_>,
        watch: &mut ProgressWatcher<'_>,
    ) -> Result<(), RunStop> {
        let places = self.plan.prompts();
        // In another order, so that an answer that depends on the request before shows.
        let first_turns = places.iter().rev().copied().filter(|place| place.turn == 0);
        let again: Vec<PromptPlace> = first_turns.take(REPEATED_MOST).collect();
        let of = places.len() + again.len();
        for place in places {
            let (reply, _) = process.ask_one(&self.texts, place).await?;
            self.texts.add_answer(place, &reply.text);
            self.answers.truths.insert(place, reply);
            watch(IsolationProgress { process: "truth", done: self.answers.truths.len(), of });
        }
        for place in again {
            let (reply, _) = process.ask_one(&self.texts, place).await?;
            self.answers.repeated.push((place, reply));
            let done = self.answers.truths.len() + self.answers.repeated.len();
            watch(IsolationProgress { process: "truth", done, of });
        }
        Ok(())
    }

    async fn ask_together(
        &mut self,
        lab: &Lab,
        spec: &SoloSpec,
        (name, reuses): (&str, bool),
        watch: &mut ProgressWatcher<'_>,
        stop: &CancellationToken,
    ) -> Result<Result<(), RunStop>, DiagnoseError> {
        watch(IsolationProgress { process: name, done: 0, of: 0 });
        let process = match IsolationProcess::start(lab, spec, stop).await {
            Err(DiagnoseError::Interrupted) => return Ok(Err(RunStop::Interrupted)),
            started => started?,
        };
        let ended = self.ask_rounds(&process, (name, reuses), watch).await;
        process.stop().await;
        Ok(ended)
    }

    async fn ask_rounds(
        &mut self,
        process: &IsolationProcess<'_>,
        (name, reuses): (&str, bool),
        watch: &mut ProgressWatcher<'_>,
    ) -> Result<(), RunStop> {
        let of = self.plan.request_count();
        for (number, round) in self.plan.rounds.iter().enumerate() {
            for batch in round.prompts.chunks(self.plan.width(round)) {
                let prompts: Vec<String> = batch.iter().map(|place| self.texts.prompt(*place)).collect();
                let replies = process.ask(&prompts, reuses).await?;
                for (place, (reply, cached)) in batch.iter().zip(replies) {
                    let (round, concurrent) = (number + 1, round.concurrent);
                    let answer = AskedAnswer { round, concurrent, place: *place, cached, reply };
                    self.answers.together.push(answer);
                }
                watch(IsolationProgress { process: name, done: self.answers.together.len(), of });
            }
            process.pause(ROUND_PAUSE).await?;
        }
        Ok(())
    }
}
