//! A request as it is shown: plain values, for programs and for people. Never what it says.

use std::time::Duration;

use http::Version;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use warden_policies::{GenerationId, ModelName};

use super::entry::Stage;
use super::shard::Seen;

/// How far a request has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RequestState {
    /// Its body comes.
    Receiving,
    /// It waits for a slot of a model that serves.
    Queued,
    /// It waits for a model that no process serves now.
    Loading,
    /// A backend has it, and nothing of the answer is here. Of an answer that is no stream it cannot be seen from outside
    /// whether the prompt is still evaluated.
    Sent,
    /// A backend has it, and has not sent the first event of its stream: the prompt is evaluated.
    Prefill,
    /// Its answer is generated as a stream.
    Generating,
    /// Its answer passes.
    Answering,
    /// Its backend is gone, and another one is to go on with it.
    Continuing,
    /// It is over.
    Ended,
}

impl RequestState {
    /// All of them, in the order in which a request may go through them.
    pub const ALL: [Self; 9] = [
        Self::Receiving,
        Self::Queued,
        Self::Loading,
        Self::Sent,
        Self::Prefill,
        Self::Generating,
        Self::Answering,
        Self::Continuing,
        Self::Ended,
    ];

    /// Its name, in JSON too.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Receiving => "receiving",
            Self::Queued => "queued",
            Self::Loading => "loading",
            Self::Sent => "sent",
            Self::Prefill => "prefill",
            Self::Generating => "generating",
            Self::Answering => "answering",
            Self::Continuing => "continuing",
            Self::Ended => "ended",
        }
    }
}

/// One request. Times are milliseconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RequestView {
    /// Its `X-Request-Id`, as clients, backends and the access log have it. Clients may give several the same.
    pub id: String,
    /// Its number, which no other request of this instance has. No order.
    pub number: u64,
    /// How far it has come.
    pub state: RequestState,
    /// The model, once it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<ModelName>,
    /// Which replica of it, from 0, if its generation still runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replica: Option<u32>,
    /// The generation that has it, or had it last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<GenerationId>,
    /// Label of the route, as in the access log.
    pub route: String,
    /// Its method.
    pub method: String,
    /// `http/1.0`, `http/1.1` or `h2`.
    pub protocol: String,
    /// Name of the client's key, where keys are asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// The client's address.
    pub peer: String,
    /// Whether its backend was asked for a stream.
    pub stream: bool,
    /// When its head was here, in milliseconds since 1970.
    pub began_unix_ms: u64,
    /// When it ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_unix_ms: Option<u64>,
    /// From its head until now, or to its end.
    pub total_ms: f64,
    /// Time in queues so far, waiting for a model included.
    pub queued_ms: f64,
    /// Evaluating the prompt, as the backend says it; before that, and where it does not say, what a stream shows: from being sent to
    /// the first event, or until now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefill_ms: Option<f64>,
    /// Generating, in the same way: from the first event to the end, or until now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generating_ms: Option<f64>,
    /// Tokens of the prompt that are evaluated, as far as that is known; in flight often not.
    pub prompt_tokens: u64,
    /// Tokens that were generated. In flight only a stream shows them, by an event for each and some more around them.
    pub output_tokens: u64,
    /// Leases that it had: 1 where the first backend answers.
    pub attempts: u32,
    /// Whether an operator has told it to end.
    pub cancelled: bool,
    /// Whether it was executed again because its server had died.
    pub continued: bool,
    /// The status that its client got, if it has ended; 0 if there was none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    /// How it ended, as in the access log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outcome: Option<String>,
}

impl RequestView {
    /// Whether it is in flight.
    pub const fn is_in_flight(&self) -> bool {
        self.ended_unix_ms.is_none()
    }
}

/// Milliseconds. Whole microseconds: more digits are noise.
fn ms(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}

fn whole_ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

impl Seen {
    /// As it is `now`, which is `wall` milliseconds after 1970.
    pub(super) fn view(&self, now: Instant, wall: u64) -> RequestView {
        let Self { entry, end } = self;
        let age = end.as_ref().map_or_else(|| now.saturating_duration_since(entry.began), |end| end.total);
        let stage = entry.stage();
        let streams = entry.streams();
        let come_to = match stage {
            _ if end.is_some() => RequestState::Ended,
            Stage::Receives => RequestState::Receiving,
            Stage::Waits => RequestState::Queued,
            Stage::Sent if streams && entry.generates => RequestState::Prefill,
            Stage::Sent => RequestState::Sent,
            Stage::Answers if streams && entry.generates => RequestState::Generating,
            Stage::Answers => RequestState::Answering,
            Stage::Continues => RequestState::Continuing,
        };
        let (sent, answers) = (entry.sent(), entry.answers());
        let shows = streams && entry.generates;
        let prefill = sent.filter(|_| shows).map(|sent| answers.unwrap_or(age).saturating_sub(sent));
        let generating = answers.filter(|_| shows).map(|first| age.saturating_sub(first));
        let (prompt, output) = entry.tokens();
        let (evaluated, generated) = entry.told();
        let last = end.as_ref();
        // What is over stays where it was, however the clock is set later.
        let until = last.map_or(wall, |end| end.unix_ms);
        let began = until.saturating_sub(whole_ms(age));
        RequestView {
            id: entry.id.clone(),
            number: entry.number,
            state: come_to,
            model: entry.model.get().cloned(),
            replica: None,
            generation: last.map_or_else(|| entry.generation(), |end| end.generation),
            route: entry.route.to_owned(),
            method: entry.method.as_str().to_owned(),
            protocol: protocol(entry.protocol).to_owned(),
            key: entry.key.get().map(|key| String::from(&**key)),
            peer: entry.peer.to_string(),
            stream: streams || last.is_some_and(|end| end.stream),
            began_unix_ms: began,
            ended_unix_ms: last.map(|end| end.unix_ms),
            total_ms: ms(age),
            // One that ended in the queue had no lease that would know for how long.
            queued_ms: ms(entry.queued(age).max(last.map_or(Duration::ZERO, |end| end.queued))),
            prefill_ms: evaluated.or(prefill).map(ms),
            generating_ms: generated.or(generating).map(ms),
            // In the end it is counted, if its backend tells.
            prompt_tokens: last.map(|end| end.work.prompt_tokens).filter(|told| *told > 0).unwrap_or(prompt),
            output_tokens: last.map(|end| end.work.output_tokens).filter(|told| *told > 0).unwrap_or(output),
            attempts: last.map_or_else(|| entry.attempts(), |end| end.attempts),
            cancelled: entry.is_cancelled(),
            continued: stage == Stage::Continues || last.is_some_and(|end| end.continued),
            status: last.map(|end| end.status),
            outcome: last.map(|end| end.outcome.to_owned()),
        }
    }
}

fn protocol(version: Version) -> &'static str {
    match version {
        Version::HTTP_10 => "http/1.0",
        Version::HTTP_2 => "h2",
        _ => "http/1.1",
    }
}
