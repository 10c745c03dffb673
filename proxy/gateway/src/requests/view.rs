//! A request as plain values, for display and programs. Never shows prompts and answers.

use std::sync::atomic::Ordering;
use std::time::Duration;

use http::Version;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use warden_policies::{GenerationId, ModelName};

use super::entry::RequestStage;
use super::shard::ListedRequest;

/// State of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RequestState {
    /// Receiving its body.
    Receiving,
    /// Waiting for a slot of a model that is serving.
    Queued,
    /// Waiting for a model that no process serves at the moment.
    Loading,
    /// A backend has the request, and no part of the answer has arrived. Without a stream, nothing shows the
    /// end of prompt evaluation.
    Sent,
    /// A backend evaluates the prompt: the first event of the requested stream has not arrived.
    Prefill,
    /// The backend generates the answer as a stream.
    Generating,
    /// The client gets an answer that is no generated stream.
    Answering,
    /// The backend is lost, and the gateway searches for another one to continue the answer.
    Continuing,
    /// The request has ended.
    Ended,
}

impl RequestState {
    /// All states, in the order in which a request may pass through them.
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

    /// Name of the state, also in JSON.
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

/// A request. Times are in milliseconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RequestView {
    /// `X-Request-Id`, as in the access log. Clients may give several requests the same id.
    pub id: String,
    /// Number, unique in this instance; not in order of arrival.
    pub number: u64,
    /// Progress of the request.
    pub state: RequestState,
    /// The model, once it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<ModelName>,
    /// Index, from 0, of the model's replica that has the request, if its generation still runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replica: Option<u32>,
    /// Generation that has the request, or had it last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<GenerationId>,
    /// Label of the route, as in the access log.
    pub route: String,
    /// HTTP method.
    pub method: String,
    /// `http/1.0` or `http/1.1`.
    pub protocol: String,
    /// Name of the client's key, if keys are required.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// The client's address.
    pub peer: String,
    /// True if the request asks for a stream.
    pub stream: bool,
    /// Arrival of the request's head, in milliseconds since 1970.
    pub began_unix_ms: u64,
    /// End of the request, in milliseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_unix_ms: Option<u64>,
    /// Time since the request's head, up to its end.
    pub total_ms: f64,
    /// Time in queues so far, including the wait for a model.
    pub queued_ms: f64,
    /// Time for evaluating the prompt, as the backend reports it. Without a report: from sending the request
    /// to the first event of the stream, or until now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefill_ms: Option<f64>,
    /// Time for generating, as the backend reports it, or since the first event of the stream.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generating_ms: Option<f64>,
    /// Number of prompt tokens evaluated, as far as known; often unknown in flight.
    pub prompt_tokens: u64,
    /// Number of tokens generated; in flight, the number of a stream's events, which is slightly higher.
    pub output_tokens: u64,
    /// Number of leases used: 1 if the first backend answers.
    pub attempts: u32,
    /// True if an operator has cancelled the request.
    pub cancelled: bool,
    /// True if the request was executed again because its server died.
    pub continued: bool,
    /// Status that the client got; 0 if it got none. `None` in flight.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    /// Outcome, as in the access log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub outcome: Option<String>,
}

impl RequestView {
    /// Returns whether the request is in flight.
    pub const fn is_in_flight(&self) -> bool {
        self.ended_unix_ms.is_none()
    }
}

/// Rounds to whole microseconds: further digits are noise.
fn rounded_ms(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}

fn whole_ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

impl ListedRequest {
    /// Builds the view at `now`; `wall` is the same time in milliseconds since 1970.
    pub(super) fn view(&self, now: Instant, wall: u64) -> RequestView {
        let Self { entry, end } = self;
        let age = end.as_ref().map_or_else(|| now.saturating_duration_since(entry.began), |end| end.total);
        let stage = entry.stage();
        let course = &entry.course;
        let times = &course.times;
        let streams = course.streams.load(Ordering::Relaxed);
        let come_to = match stage {
            _ if end.is_some() => RequestState::Ended,
            RequestStage::Receiving => RequestState::Receiving,
            RequestStage::Waiting => RequestState::Queued,
            RequestStage::Sent if streams && entry.generates => RequestState::Prefill,
            RequestStage::Sent => RequestState::Sent,
            RequestStage::Answering if streams && entry.generates => RequestState::Generating,
            RequestStage::Answering => RequestState::Answering,
            RequestStage::Continuing => RequestState::Continuing,
        };
        let answers = times.answers.get();
        let shows = streams && entry.generates;
        let (prefill, generating) = if shows {
            let sent = times.sent.get();
            let prefill = sent.map(|sent| answers.unwrap_or(age).saturating_sub(sent));
            (prefill, answers.map(|first| age.saturating_sub(first)))
        } else {
            (None, None)
        };
        let (prompt, output) = entry.tokens();
        let last = end.as_ref();
        // A later change of the system clock must not change the times of an ended request.
        let until = last.map_or(wall, |end| end.unix_ms);
        let began = until.saturating_sub(whole_ms(age));
        RequestView {
            id: entry.id.clone(),
            number: entry.number,
            state: come_to,
            model: entry.model.get().cloned(),
            replica: None,
            generation: last.map_or_else(|| course.generation.get().map(GenerationId), |end| end.generation),
            route: entry.route.to_owned(),
            method: entry.method.as_str().to_owned(),
            protocol: protocol(entry.protocol).to_owned(),
            key: entry.key.get().map(|key| String::from(&**key)),
            peer: entry.peer.to_string(),
            stream: streams || last.is_some_and(|end| end.stream),
            began_unix_ms: began,
            ended_unix_ms: last.map(|end| end.unix_ms),
            total_ms: rounded_ms(age),
            // No lease has recorded the wait of a request that ended in the queue.
            queued_ms: rounded_ms(entry.queued(age).max(last.map_or(Duration::ZERO, |end| end.queued))),
            prefill_ms: times.evaluated.get().or(prefill).map(rounded_ms),
            generating_ms: times.generated.get().or(generating).map(rounded_ms),
            // Use the exact count of an ended request, if the backend reported it.
            prompt_tokens: last.map(|end| end.work.prompt_tokens).filter(|told| *told > 0).unwrap_or(prompt),
            output_tokens: last.map(|end| end.work.output_tokens).filter(|told| *told > 0).unwrap_or(output),
            attempts: last.map_or_else(|| course.attempts.load(Ordering::Relaxed), |end| end.attempts),
            cancelled: course.cancelled.load(Ordering::Relaxed),
            continued: stage == RequestStage::Continuing || last.is_some_and(|end| end.continued),
            status: last.map(|end| end.status),
            outcome: last.map(|end| end.outcome.to_owned()),
        }
    }
}

fn protocol(version: Version) -> &'static str {
    match version {
        Version::HTTP_10 => "http/1.0",
        _ => "http/1.1",
    }
}
