//! Runs a leg: a fresh process, one workload, readings between the requests, a stop.
//!
//! ```text
//!   start ─ ready ─ warm-up ─┬─ step: request(s) ─ settle ─ reading ─┬─ stop
//!                            └──────────────────<────────────────────┘
//!   ends: all steps sent · decided · out of time · hardly any memory left · interrupted · the server ended
//! ```
//!
//! However a leg ends, its readings are judged and its process is stopped. Every wait has a deadline and ends
//! at an interrupt, so that a hanging server delays nothing.

use std::time::Duration;

use futures_util::future::join_all;
use serde_json::json;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use warden_experiment::crash::{CrashRecurrence, WorkloadCrash};
use warden_experiment::{LegDecision, LegEnd, LegFinding, LegJudge, LegReading, LegSpeed, Workload};
use warden_policies::growth::SeriesGrowth;
use warden_policies::sample::{BackendSample, SampleEdge, WorkDone};
use warden_policies::units::{as_f64, scale_bytes};
use warden_supervisor::{
    BackendFailure, DeviceView, ListenAddress, ProcessExit, ServerProps, SoloProcess, SoloReading, SoloSpec,
};

use crate::client::{LabAnswer, LabClient, LabRequest, LabRequestError};
use crate::error::{DiagnoseError, RequiredCapability};
use crate::lab::Lab;
use crate::workload::{SAMPLE_WORDS, ServerLimits, TextGenerator, WorkloadScript};

/// A leg to run.
#[derive(Clone, Debug)]
pub struct LegSpec {
    /// Server to test.
    pub spec: SoloSpec,
    /// Workload of the leg.
    pub workload: Workload,
    /// Most readings.
    pub steps: u64,
    /// True to end once more readings would not change the result, and to take some readings more than
    /// `steps` while a leak is only suspected.
    pub early: bool,
}

/// Result of a leg.
#[derive(Clone, Debug)]
pub struct LegResult {
    /// Verdicts and figures.
    pub finding: LegFinding,
    /// All readings.
    pub readings: Vec<LegReading>,
    /// Properties that the server reported.
    pub props: ServerProps,
    /// Caches that the server's settings allow, in sentences.
    pub allowance: Vec<String>,
    /// Time from the spawn until the server was ready.
    pub ready_after: Duration,
    /// Reason why VRAM could not be read; `None` if it was, or if there is none to read.
    pub vram_unknown: Option<String>,
    /// GPUs at the last reading.
    pub devices: Vec<DeviceView>,
    /// Last lines of the server's output.
    pub lines: Vec<String>,
    /// Reason why the server computes no embeddings; `None` if it does, or was not asked.
    pub no_embeddings: Option<String>,
    /// Refused requests, if any.
    pub refused: Option<RefusedRequests>,
    /// Tokens per word of generated texts; 0 if unknown.
    pub tokens_per_word: f64,
}

/// Requests that a server refused.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct RefusedRequests {
    /// Number of refused requests.
    pub requests: u64,
    /// Reason of the last refusal.
    pub why: String,
}

/// Progress of a leg.
#[derive(Clone, Copy, Debug)]
pub enum LegProgress<'a> {
    /// A process starts.
    Starting(Workload),
    /// The process is ready, after this time.
    Ready(Workload, Duration),
    /// A reading was taken.
    Step {
        /// Workload of the leg.
        workload: Workload,
        /// Readings so far.
        done: u64,
        /// Most readings.
        of: u64,
        /// First reading.
        first: &'a BackendSample,
        /// Latest reading.
        now: &'a BackendSample,
        /// Growth according to the leak detector.
        growth: &'a [SeriesGrowth],
    },
    /// The workload is repeated without the prompt cache, which may have caused the growth.
    Control(Workload),
    /// The workload is repeated in fresh processes to see if the crash recurs; no other progress is reported.
    Again(Workload, &'a WorkloadCrash),
    /// The leg is over.
    Ended(&'a LegFinding),
    /// The workload cannot be run, with the reason.
    Skipped(Workload, &'a str),
}

/// Cancelling `stop` ends the leg with the results so far.
///
/// # Errors
///
/// The server does not start, cannot do this work, or the user interrupted the leg before the server was
/// ready.
pub(crate) async fn run_leg(
    lab: &Lab,
    leg: &LegSpec,
    watch: &mut (dyn FnMut(LegProgress<'_>) + Send),
    stop: &CancellationToken,
) -> Result<LegResult, DiagnoseError> {
    watch(LegProgress::Starting(leg.workload));
    let started = stop.run_until_cancelled(lab.starter.start(&leg.spec)).await;
    let solo = started.ok_or(DiagnoseError::Interrupted)?.map_err(DiagnoseError::Start)?;
    watch(LegProgress::Ready(leg.workload, solo.ready_after()));
    let mut run = LegRun {
        lab,
        leg,
        judge: LegJudge::new(leg.workload, leg.steps, &lab.growth, &lab.numbers),
        work: WorkDone::default(),
        largest: 0,
        times: AnswerTimes::default(),
        last: None,
        refused: None,
        tokens_per_word: 0.0,
        watch,
    };
    let ended = run.run_steps(&solo, stop).await;
    let no_embeddings = match &ended {
        Ok(LegEnd::Complete | LegEnd::Early) => {
            let known = check_embeddings(&solo, lab.numbers.question_limit);
            stop.run_until_cancelled(known).await.flatten()
        }
        _ => None,
    };
    let LegRun { judge, times, last, refused, tokens_per_word, watch, work, .. } = run;
    let props = solo.props();
    let allowance = solo.allowance();
    let ready_after = solo.ready_after();
    let lines = solo.last_lines();
    solo.stop().await;
    let mut finding = judge.finding(times.speed(), ended?);
    // Include requests answered after the last reading.
    finding.requests = work.requests;
    finding.work = work;
    if let LegEnd::Crashed { why } = &finding.ended {
        let kept = lines.len().saturating_sub(lab.numbers.crash.lines);
        finding.crash = Some(WorkloadCrash {
            at_request: work.requests + 1,
            why: why.clone(),
            lines: lines[kept..].to_vec(),
            runs: Vec::new(),
            again: CrashRecurrence::Undecided,
        });
    }
    watch(LegProgress::Ended(&finding));
    let (vram_unknown, devices) =
        last.map(|reading| (reading.vram_unknown, reading.devices)).unwrap_or_default();
    Ok(LegResult {
        finding,
        readings: judge.readings().to_vec(),
        props,
        allowance,
        ready_after,
        vram_unknown,
        devices,
        lines,
        no_embeddings,
        refused,
        tokens_per_word,
    })
}

struct LegRun<'a> {
    lab: &'a Lab,
    leg: &'a LegSpec,
    judge: LegJudge,
    work: WorkDone,
    largest: u64,
    times: AnswerTimes,
    last: Option<SoloReading>,
    refused: Option<RefusedRequests>,
    tokens_per_word: f64,
    watch: &'a mut (dyn FnMut(LegProgress<'_>) + Send),
}

enum StepOutcome {
    Answered,
    Refused(String),
}

impl LegRun<'_> {
    async fn run_steps(
        &mut self,
        solo: &SoloProcess,
        stop: &CancellationToken,
    ) -> Result<LegEnd, DiagnoseError> {
        let workload = self.leg.workload;
        check_capability(workload, &solo.props())?;
        let client = LabClient::new(solo)?;
        let deadline = Instant::now() + self.lab.numbers.leg_limit;
        let facts = tokio::select! {
            biased;
            ended = wait_cut(solo, stop, deadline) => return Ok(ended),
            facts = server_facts(solo, &client, self.lab.numbers.question_limit) => facts,
        };
        self.tokens_per_word = facts.tokens_per_word;
        let mut script = WorkloadScript::new(workload, &self.lab.numbers, facts)?;
        let mut refused = 0;
        let patience = self.lab.numbers.failures;
        while self.reading_count() < self.max_readings() {
            let sent = tokio::select! {
                biased;
                ended = wait_cut(solo, stop, deadline) => return Ok(ended),
                sent = self.run_step(&client, &mut script) => sent,
            };
            match sent {
                Ok(StepOutcome::Answered) => refused = 0,
                // The first request shows if the server can do this work at all.
                Ok(StepOutcome::Refused(why)) if self.work.requests == 0 => {
                    return Err(DiagnoseError::CannotDo {
                        workload,
                        why,
                        kind: RequiredCapability::for_workload(workload),
                    });
                }
                Ok(StepOutcome::Refused(why)) => {
                    refused += 1;
                    if refused >= patience {
                        let why = format!("{refused} requests in a row failed: {why}");
                        return Ok(LegEnd::Failed { why });
                    }
                    continue;
                }
                Err(error) => {
                    return Ok(broken_end(solo, &error, self.lab.numbers.noticed).await);
                }
            }
            tokio::select! {
                biased;
                ended = wait_cut(solo, stop, deadline) => return Ok(ended),
                () = tokio::time::sleep(self.lab.numbers.settle) => {}
            }
            if let Some(ended) = self.read(solo).await {
                return Ok(ended);
            }
        }
        Ok(LegEnd::Complete)
    }

    fn max_readings(&self) -> u64 {
        if self.leg.early { self.judge.readings_most() } else { self.leg.steps }
    }

    fn reading_count(&self) -> u64 {
        u64::try_from(self.judge.readings().len()).unwrap_or(u64::MAX)
    }

    async fn run_step(
        &mut self,
        client: &LabClient,
        script: &mut WorkloadScript,
    ) -> Result<StepOutcome, LabRequestError> {
        let asks = script.next();
        let limit = self.lab.numbers.request_limit;
        let answers = join_all(asks.iter().map(|ask| client.send(ask, limit))).await;
        let mut refusal = None;
        let mut taken = Vec::new();
        for (ask, answer) in asks.iter().zip(answers) {
            match answer {
                Ok(answer) => {
                    self.count_request(ask, &answer);
                    taken.push(Some(answer));
                }
                Err(LabRequestError::Refused { status, message }) => {
                    let why = format!("{message} (status {status})");
                    let refused = self.refused.get_or_insert_default();
                    refused.requests += 1;
                    refused.why.clone_from(&why);
                    refusal = Some(why);
                    taken.push(None);
                }
                Err(error) => return Err(error),
            }
        }
        script.take_answers(&taken);
        match refusal {
            Some(why) if taken.iter().all(Option::is_none) => Ok(StepOutcome::Refused(why)),
            _ => Ok(StepOutcome::Answered),
        }
    }

    fn count_request(&mut self, ask: &LabRequest, answer: &LabAnswer) {
        self.work += WorkDone {
            requests: 1,
            prompt_tokens: answer.prompt_tokens,
            output_tokens: answer.output_tokens,
            images: ask.images,
            audio: ask.audio,
        };
        self.largest = self.largest.max(answer.prompt_size);
        // The first request also pays for everything that the server creates at first use.
        if self.work.requests > 1 {
            self.times.add_answer(answer);
        }
    }

    /// Reads the memory; returns the reason if the leg must end.
    async fn read(&mut self, solo: &SoloProcess) -> Option<LegEnd> {
        let reading = solo.read_sample(SampleEdge::Idle, self.work, 0, self.largest).await;
        let graphs = reading.graphs();
        let next = self.judge.observe(reading.sample.clone(), reading.allowed, graphs);
        let done = self.reading_count();
        let most = self.max_readings();
        if let (Some(first), Some(now)) = (self.judge.readings().first(), self.judge.readings().last()) {
            (self.watch)(LegProgress::Step {
                workload: self.leg.workload,
                done,
                of: most,
                first: &first.sample,
                now: &now.sample,
                growth: self.judge.growth(),
            });
        }
        let totals = reading.totals;
        self.last = Some(reading);
        if let Some(totals) = totals
            && totals.available < scale_bytes(totals.total, self.lab.numbers.least_memory)
        {
            let why =
                format!("the machine has {} of memory left", warden_policies::ByteSize(totals.available));
            return Some(LegEnd::OutOfMemory { why });
        }
        (next == LegDecision::Decided && self.leg.early).then_some(LegEnd::Early)
    }
}

async fn wait_cut(solo: &SoloProcess, stop: &CancellationToken, deadline: Instant) -> LegEnd {
    tokio::select! {
        biased;
        () = stop.cancelled() => LegEnd::Interrupted,
        (exit, failure) = solo.until_exit() => end_kind(exit, &failure),
        line = solo.until_crash_hang() => LegEnd::Crashed { why: stuck_crash_text(&line) },
        () = tokio::time::sleep_until(deadline) => LegEnd::OutOfTime,
    }
}

pub(crate) async fn server_facts(solo: &SoloProcess, client: &LabClient, limit: Duration) -> ServerLimits {
    let props = solo.props();
    // A server that does not count tokens has 0 tokens per word.
    let tokens = client.count_tokens(&TextGenerator::sample(), limit).await.unwrap_or(0);
    let tokens_per_word = f64::from(tokens) / f64::from(SAMPLE_WORDS);
    ServerLimits { slots: props.slots.unwrap_or(1), n_ctx: props.n_ctx, tokens_per_word }
}

/// Returns the end of a leg after a broken connection. Mostly the server has ended, which the supervisor
/// notices a moment later.
async fn broken_end(solo: &SoloProcess, error: &LabRequestError, noticed: Duration) -> LegEnd {
    match tokio::time::timeout(noticed, solo.until_exit()).await {
        Ok((exit, failure)) => end_kind(exit, &failure),
        Err(_) => LegEnd::Failed { why: failure_of_request(solo.endpoint(), error) },
    }
}

/// A server whose socket was removed still runs, but no client can reach it.
fn failure_of_request(endpoint: &ListenAddress, error: &LabRequestError) -> String {
    match endpoint {
        ListenAddress::Unix(path) if !path.exists() => {
            format!("its socket {} was removed while it ran: {error}", path.display())
        }
        _ => format!("a request failed: {error}"),
    }
}

fn end_kind(exit: ProcessExit, failure: &BackendFailure) -> LegEnd {
    let why = failure_text(failure);
    if exit.is_from_outside() { LegEnd::Killed { why } } else { LegEnd::Crashed { why } }
}

pub(crate) fn stuck_crash_text(line: &str) -> String {
    format!("it crashed, but its process did not end by itself; it logged: {line}")
}

pub(crate) fn failure_text(failure: &BackendFailure) -> String {
    match failure.lines.iter().rev().find(|line| !line.trim().is_empty()) {
        Some(last) => format!("{}; its last line: {}", failure.message, last.trim()),
        None => failure.message.clone(),
    }
}

fn check_capability(workload: Workload, props: &ServerProps) -> Result<(), DiagnoseError> {
    let Some(modalities) = props.modalities else { return Ok(()) };
    let kind = RequiredCapability::for_workload(workload);
    let has = match kind {
        RequiredCapability::Vision => modalities.vision,
        RequiredCapability::Audio => modalities.audio,
        RequiredCapability::Text | RequiredCapability::Embeddings => true,
    };
    if has {
        Ok(())
    } else {
        Err(DiagnoseError::CannotDo { workload, why: kind.missing_text().to_owned(), kind })
    }
}

/// Returns the reason why a server computes no embeddings. Asking at the end of a leg saves a process.
async fn check_embeddings(solo: &SoloProcess, limit: Duration) -> Option<String> {
    let client = LabClient::new(solo).ok()?;
    match client.send(&LabRequest::post("/v1/embeddings", json!({ "input": "one" })), limit).await {
        Err(LabRequestError::Refused { message, .. }) => Some(message),
        _ => None,
    }
}

#[derive(Debug, Default)]
struct AnswerTimes {
    first: Vec<Duration>,
    tokens: u64,
    ms: f64,
    requests: u64,
}

impl AnswerTimes {
    fn add_answer(&mut self, answer: &LabAnswer) {
        self.requests += 1;
        self.first.extend(answer.first_token);
        if let Some(ms) = answer.output_ms.filter(|ms| *ms > 0.0) {
            self.tokens += answer.output_tokens;
            self.ms += ms;
        }
    }

    fn speed(mut self) -> LegSpeed {
        self.first.sort_unstable();
        let rate = (self.ms > 0.0).then(|| as_f64(self.tokens) * 1000.0 / self.ms);
        let first_token = self.first.get(self.first.len() / 2).copied();
        LegSpeed { tokens_per_second: rate, first_token, requests: self.requests }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_removed_socket_is_named_as_the_reason() {
        let folder = tempfile::tempdir().unwrap();
        let endpoint = ListenAddress::Unix(folder.path().join("server.sock"));
        let error = LabRequestError::Broken("No such file".to_owned());
        let why = failure_of_request(&endpoint, &error);
        assert!(why.starts_with("its socket ") && why.contains("was removed while it ran"), "{why}");
        std::fs::write(folder.path().join("server.sock"), "").unwrap();
        assert_eq!(
            failure_of_request(&endpoint, &error),
            "a request failed: the connection broke: No such file"
        );
    }
}
