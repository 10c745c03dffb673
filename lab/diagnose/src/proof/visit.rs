//! Runs one process of a proof.

use reqwest::Method;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::time::Instant;
use warden_experiment::proof::{BuildMetric, BuildReply, BuildVisit};
use warden_policies::MemoryKind;
use warden_policies::sample::{SampleEdge, WorkDone};
use warden_policies::units::{as_f64, format_span, scale_bytes};
use warden_supervisor::{SoloProcess, SoloReading, SoloSpec};

use super::questions;
use crate::client::{LabAnswer, LabClient, LabRequest, LabRequestError};
use crate::error::DiagnoseError;
use crate::lab::Lab;
use crate::leg::{failure_text, stuck_crash_text};
use crate::workload::{SAMPLE_WORDS, ServerLimits, TextGenerator};

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct VisitTasks<'a> {
    pub(crate) answers: bool,
    pub(crate) pace: bool,
    pub(crate) longest: bool,
    pub(crate) paths: Option<&'a [String]>,
    /// Lengths of the process's requests; `None` for the first process, which sets them.
    pub(crate) lengths: Option<TextLengths>,
}

pub(crate) struct VisitResult {
    pub(crate) visit: BuildVisit,
    /// Checked paths that exist; `None` if there were no paths to check.
    pub(super) routes: Option<Vec<String>>,
    pub(crate) lengths: TextLengths,
}

/// Lengths of the texts that processes are sent. The first process sets them, so that all compared processes
/// get the same texts, even with other default slots or a late token count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TextLengths {
    /// Tokens of a text of a known number of words; 0 if the server does not count.
    tokens: u32,
    /// Tokens of context in a slot; `None` if unknown.
    n_ctx: Option<u64>,
}

impl TextLengths {
    async fn measure(lab: &Lab, solo: &SoloProcess, client: &LabClient) -> Result<Self, LabRequestError> {
        let counted = client.count_tokens(&TextGenerator::sample(), lab.numbers.question_limit).await;
        Self::from_count(counted, solo.props().n_ctx)
    }

    /// A server that refuses to count does so each time, so a refusal counts as 0. A late count is an error,
    /// because the next process might count in time and get other texts.
    fn from_count(
        counted: Result<u32, LabRequestError>,
        n_ctx: Option<u64>,
    ) -> Result<Self, LabRequestError> {
        match counted {
            Ok(tokens) => Ok(Self { tokens, n_ctx }),
            Err(LabRequestError::Refused { .. }) => Ok(Self { tokens: 0, n_ctx }),
            Err(error) => Err(error),
        }
    }

    fn facts(self, slots: u32) -> ServerLimits {
        let tokens_per_word = f64::from(self.tokens) / f64::from(SAMPLE_WORDS);
        ServerLimits { slots, n_ctx: self.n_ctx, tokens_per_word }
    }
}

/// The inner `Err` is a failure of the build, in words.
pub(crate) async fn run_visit(
    lab: &Lab,
    spec: &SoloSpec,
    wanted: VisitTasks<'_>,
) -> Result<Result<VisitResult, String>, DiagnoseError> {
    let solo = match lab.starter.start(spec).await {
        Ok(solo) => solo,
        Err(failure) => return Ok(Err(format!("it did not start: {}", failure_text(&failure)))),
    };
    let client = LabClient::new(&solo)?;
    let deadline = Instant::now() + lab.numbers.leg_limit;
    let seen = tokio::select! {
        biased;
        failure = solo.until_end() => Err(format!("it ended: {}", failure_text(&failure))),
        line = solo.until_crash_hang() => Err(stuck_crash_text(&line)),
        () = tokio::time::sleep_until(deadline) => {
            let limit = format_span(lab.numbers.leg_limit);
            Err(format!("it did not answer everything within {limit}"))
        }
        seen = run_tasks(lab, &solo, &client, wanted) => match seen {
            Ok(visited) => Ok(visited),
            Err(error) => Err(match tokio::time::timeout(lab.numbers.noticed, solo.until_end()).await {
                Ok(failure) => format!("it ended: {}", failure_text(&failure)),
                Err(_) => format!("a request failed: {error}"),
            }),
        },
    };
    drop(client);
    solo.stop().await;
    Ok(seen)
}

async fn run_tasks(
    lab: &Lab,
    solo: &SoloProcess,
    client: &LabClient,
    wanted: VisitTasks<'_>,
) -> Result<VisitResult, LabRequestError> {
    let mut measured = vec![(BuildMetric::Start, solo.ready_after().as_secs_f64())];
    let reading = solo.read_sample(SampleEdge::Idle, WorkDone::default(), 0, 0).await;
    add_memory(&reading, BuildMetric::AtReady, &mut measured);
    let lengths = match wanted.lengths {
        Some(lengths) => lengths,
        None => TextLengths::measure(lab, solo, client).await?,
    };
    let props = solo.props();
    let facts = lengths.facts(props.slots.unwrap_or(1));
    let mut replies = Vec::new();
    if wanted.answers {
        for question in questions::all_questions(&lab.numbers, &lab.proof, facts, props)? {
            replies.push(ask_question(lab, client, &question).await?);
        }
    }
    if wanted.pace {
        measure_pace(lab, client, facts, &mut measured).await?;
    }
    // A build with less context than the first build gets a shorter prompt.
    let room = facts.n_ctx.and_then(|room| props.n_ctx.map(|own| room.min(own)));
    if wanted.longest && fill_context(lab, client, ServerLimits { n_ctx: room, ..facts }).await? {
        tokio::time::sleep(lab.numbers.settle).await;
        let reading = solo.read_sample(SampleEdge::Idle, WorkDone::default(), 0, 0).await;
        add_memory(&reading, BuildMetric::AtLongest, &mut measured);
    }
    let routes = match wanted.paths {
        Some(paths) => Some(existing_paths(lab, client, paths).await),
        None => None,
    };
    Ok(VisitResult { visit: BuildVisit { measured, replies }, routes, lengths })
}

/// A server answers 404 on a missing path for every method, and another status on a disabled one.
async fn existing_paths(lab: &Lab, client: &LabClient, paths: &[String]) -> Vec<String> {
    let limit = lab.numbers.question_limit;
    let mut known = Vec::new();
    for path in paths {
        let get = LabRequest { method: Method::GET, body: None, ..LabRequest::post(path, json!({})) };
        let is_there = |answer: Result<(), LabRequestError>| {
            !matches!(answer, Err(LabRequestError::Refused { status: 404, .. }))
        };
        // No route can do anything with an empty request.
        if is_there(client.send_head(&get, limit).await)
            || is_there(client.send_head(&LabRequest::post(path, json!({})), limit).await)
        {
            known.push(path.clone());
        }
    }
    known
}

/// Returns the requests that ask these questions, or that time the server if there are none. `lengths` are
/// those of earlier requests, if any. The inner `Err` is a failure of the build, in words.
///
/// # Errors
/// Only errors that are not a build's fault.
pub async fn published_requests(
    lab: &Lab,
    spec: &SoloSpec,
    questions: &[String],
    lengths: Option<TextLengths>,
) -> Result<Result<Vec<PublishedRequest>, String>, DiagnoseError> {
    let solo = match lab.starter.start(spec).await {
        Ok(solo) => solo,
        Err(failure) => return Ok(Err(format!("it did not start: {}", failure_text(&failure)))),
    };
    let client = LabClient::new(&solo)?;
    let props = solo.props();
    let lengths = match lengths {
        Some(lengths) => Ok(lengths),
        None => TextLengths::measure(lab, &solo, &client).await,
    };
    drop(client);
    solo.stop().await;
    let facts = match lengths {
        Ok(lengths) => lengths.facts(props.slots.unwrap_or(1)),
        Err(error) => return Ok(Err(error.to_string())),
    };
    let all = questions::all_questions(&lab.numbers, &lab.proof, facts, props);
    let asks: Vec<LabRequest> = match all {
        _ if questions.is_empty() => timed_requests(lab, facts, 1).into(),
        Ok(all) => all.into_iter().filter(|one| questions.contains(&one.name)).map(|one| one.ask).collect(),
        Err(error) => return Ok(Err(error.to_string())),
    };
    let sent = asks.into_iter().filter_map(|ask| Some(PublishedRequest { path: ask.path, body: ask.body? }));
    Ok(Ok(sent.collect()))
}

/// Request to publish with a report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublishedRequest {
    /// URL path.
    pub path: String,
    /// JSON body.
    pub body: serde_json::Value,
}

async fn ask_question(
    lab: &Lab,
    client: &LabClient,
    question: &questions::ProofQuestion,
) -> Result<BuildReply, LabRequestError> {
    match client.send_json(&question.ask, lab.numbers.request_limit).await {
        Ok(json) => Ok(question.parse_reply(&json)),
        Err(LabRequestError::Refused { status, message }) => Ok(BuildReply {
            request: question.name.clone(),
            refused: Some(format!("{message} (status {status})")),
            ..BuildReply::default()
        }),
        Err(error) => Err(error),
    }
}

fn add_memory(
    reading: &SoloReading,
    metric: fn(MemoryKind) -> BuildMetric,
    measured: &mut Vec<(BuildMetric, f64)>,
) {
    let host = reading.sample.host.map(|host| (MemoryKind::Host, host.charged()));
    let vram = reading.sample.vram.iter().map(|vram| (MemoryKind::Vram(vram.gpu), vram.bytes));
    measured.extend(host.into_iter().chain(vram).map(|(kind, bytes)| (metric(kind), as_f64(bytes))));
}

/// Times some requests of each kind. A model that generates nothing has no timings.
async fn measure_pace(
    lab: &Lab,
    client: &LabClient,
    facts: ServerLimits,
    measured: &mut Vec<(BuildMetric, f64)>,
) -> Result<(), LabRequestError> {
    let numbers = &lab.numbers;
    let mut times = [Vec::new(), Vec::new(), Vec::new()];
    // The first request is a warm-up.
    for at in 0..=u64::try_from(lab.proof.repeats).unwrap_or(0) {
        let [long, short] = timed_requests(lab, facts, at);
        let (prefill, decode) = match client.send(&long, numbers.request_limit).await {
            Ok(answer) => (per_prompt_token(&answer), per_token(&answer)),
            Err(LabRequestError::Refused { .. }) => return Ok(()),
            Err(error) => return Err(error),
        };
        let first = match client.send(&short, numbers.request_limit).await {
            Ok(answer) => answer.first_token.map(|time| time.as_secs_f64()),
            Err(LabRequestError::Refused { .. }) => None,
            Err(error) => return Err(error),
        };
        if at > 0 {
            for (all, one) in times.iter_mut().zip([prefill, decode, first]) {
                all.extend(one);
            }
        }
    }
    for (metric, mut all) in
        [BuildMetric::Prefill, BuildMetric::Decode, BuildMetric::FirstToken].into_iter().zip(times)
    {
        all.sort_unstable_by(f64::total_cmp);
        measured.extend(all.get(all.len() / 2).map(|middle| (metric, *middle)));
    }
    Ok(())
}

/// Returns the requests to time: a long prompt with an answer, and a short prompt.
fn timed_requests(lab: &Lab, facts: ServerLimits, at: u64) -> [LabRequest; 2] {
    let words = TextGenerator::new(facts.tokens_per_word);
    let answer = lab.proof.answer;
    let long = facts.limit_prompt(lab.proof.prompt, answer);
    [
        completion(&words.text(FIRST_TIMED_SEED + at, long), answer),
        questions::chat_request(&words.text(FIRST_TIMED_SEED + at, lab.numbers.short_prompt), 1, true),
    ]
}

/// First seed of timed texts, which must differ from the compared texts.
const FIRST_TIMED_SEED: u64 = 1000;

fn completion(text: &str, answer: u64) -> LabRequest {
    let body = json!({
        "prompt": text,
        "n_predict": answer,
        "ignore_eos": true,
        "temperature": 0,
        "cache_prompt": false,
        "stream": true,
    });
    LabRequest::post("/completion", body)
}

fn per_prompt_token(answer: &LabAnswer) -> Option<f64> {
    let ms = answer.prompt_ms.filter(|ms| *ms > 0.0 && answer.prompt_tokens > 0)?;
    Some(ms / 1000.0 / as_f64(answer.prompt_tokens))
}

fn per_token(answer: &LabAnswer) -> Option<f64> {
    // Some builds count the time of the first token as the prompt's.
    let ms = answer.output_ms.filter(|ms| *ms > 0.0 && answer.output_tokens > 1)?;
    Some(ms / 1000.0 / as_f64(answer.output_tokens))
}

/// Evaluates the longest prompt that fits; returns true on success. A refused prompt is shortened, because
/// its tokens are known only to within some percent.
async fn fill_context(lab: &Lab, client: &LabClient, facts: ServerLimits) -> Result<bool, LabRequestError> {
    let Some(context) = facts.n_ctx else { return Ok(false) };
    let tokens = facts.limit_prompt(context.min(lab.numbers.sweep_most), 1);
    for share in PROMPT_SHARES {
        let text =
            TextGenerator::new(facts.tokens_per_word).text(2 * FIRST_TIMED_SEED, scale_bytes(tokens, share));
        match client.send(&completion(&text, 1), lab.numbers.request_limit).await {
            Ok(_) => return Ok(true),
            Err(LabRequestError::Refused { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(false)
}

/// Shares of the longest prompt, tried in order until the server accepts one.
const PROMPT_SHARES: [f64; 3] = [0.95, 0.85, 0.7];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proof::questions;
    use std::time::Duration;
    use warden_supervisor::ServerProps;

    #[test]
    fn a_count_that_came_too_late_is_no_count_of_zero() {
        let late = Err(LabRequestError::Late(Duration::from_secs(5)));
        assert_eq!(TextLengths::from_count(late, None), Err(LabRequestError::Late(Duration::from_secs(5))));
        let refused = Err(LabRequestError::Refused { status: 501, message: String::new() });
        assert_eq!(TextLengths::from_count(refused, Some(9)), Ok(TextLengths { tokens: 0, n_ctx: Some(9) }));
    }

    #[test]
    fn what_is_kept_asks_the_same() {
        let all = warden_policies::defaults();
        let asked = |lengths: TextLengths, slots| -> Vec<_> {
            let questions = questions::all_questions(
                &all.diagnose,
                &all.proof,
                lengths.facts(slots),
                ServerProps::default(),
            );
            questions.unwrap().into_iter().map(|question| question.ask).collect()
        };
        let first = TextLengths { tokens: 301, n_ctx: Some(1000) };
        let kept: TextLengths = serde_json::from_str(&serde_json::to_string(&first).unwrap()).unwrap();
        assert_eq!(asked(kept, 4), asked(first, 1), "whatever else another build has");
        assert_ne!(asked(TextLengths { tokens: 0, ..first }, 1), asked(first, 1));
        assert_ne!(asked(TextLengths { n_ctx: Some(250), ..first }, 1), asked(first, 1));
    }
}
