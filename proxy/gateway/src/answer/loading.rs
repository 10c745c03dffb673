//! The body of an answer that begins before its model is loaded: first keep-alives and progress messages,
//! then the model's own answer.
//!
//! ```text
//!   Waiting ── the model's answer: a stream ──────> Passing, until that stream ends
//!     │ └─── any other answer, or a refusal ──────> its error is read and sent as an event ─> end
//!     └ keep-alive comments meanwhile
//! ```
//!
//! A client that does not read does not delay its request: once its model is loaded, the request proceeds
//! ([`AnswerReadAhead`]).

use std::fmt::Write as _;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::Response;
use http_body::Body as _;
use serde_json::json;
use tokio::time::{Instant, Sleep, sleep_until};
use warden_policies::ModelName;
use warden_supervisor::NextProcess;

use super::answer_body::{AnswerBody, PolledFrame, frame};
use crate::backend::{BoxFuture, LeaseProvider};
use crate::protocol::AnswerReadAhead;
use crate::protocol::headers::is_events;
use crate::refusal::{ErrorDialect, answer_error_event};

/// Maximum number of bytes read of an error body. If it is longer, the client gets only the status.
const MAX_ERROR_BYTES: usize = 64 * 1024;

pub(crate) struct InterimBody {
    state: InterimState,
    teller: LoadingNotifier,
    every: Duration,
    next_sign: Pin<Box<Sleep>>,
    /// Last text of the gateway before the model's own answer.
    last_words: Option<Bytes>,
    dialect: ErrorDialect,
}

enum InterimState {
    Waiting(BoxFuture<'static, Response<AnswerBody>>),
    Passing(Box<AnswerBody>),
    Gathers { status: u16, body: Box<AnswerBody>, read: Vec<u8> },
    Over,
}

impl InterimBody {
    /// Creates the body, whose first keep-alive is sent with the head.
    pub(crate) fn new(
        answer: BoxFuture<'static, Response<AnswerBody>>,
        teller: LoadingNotifier,
        every: Duration,
        dialect: ErrorDialect,
    ) -> Self {
        let next_sign = Box::pin(sleep_until(Instant::now()));
        Self { state: InterimState::Waiting(answer), teller, every, next_sign, last_words: None, dialect }
    }

    fn note_answer(&mut self, answer: Response<AnswerBody>) {
        let (head, body) = answer.into_parts();
        if head.status.is_success() && is_events(&head.headers) {
            self.state = InterimState::Passing(Box::new(body));
            self.last_words = self.teller.end_notice();
        } else {
            let status = head.status.as_u16();
            self.state = InterimState::Gathers { status, body: Box::new(body), read: Vec::new() };
        }
    }

    pub(super) fn poll(&mut self, context: &mut Context<'_>) -> PolledFrame {
        loop {
            if let Some(words) = self.last_words.take() {
                return frame(words);
            }
            match &mut self.state {
                InterimState::Waiting(answer) => match answer.as_mut().poll(context) {
                    Poll::Ready(answer) => self.note_answer(answer),
                    Poll::Pending => {
                        ready!(self.next_sign.as_mut().poll(context));
                        self.next_sign.as_mut().reset(Instant::now() + self.every);
                        return frame(self.teller.next_sign());
                    }
                },
                InterimState::Passing(body) => return Pin::new(body.as_mut()).poll_frame(context),
                InterimState::Gathers { status, body, read } => {
                    // If an error body breaks off, the client gets the part that arrived.
                    let Some(Ok(piece)) = ready!(Pin::new(body.as_mut()).poll_frame(context)) else {
                        let event = answer_error_event(*status, read, self.dialect);
                        self.state = InterimState::Over;
                        return frame(Bytes::from(event));
                    };
                    let data = piece.into_data().unwrap_or_default();
                    let room = MAX_ERROR_BYTES.saturating_sub(read.len());
                    read.extend_from_slice(&data[..data.len().min(room)]);
                }
                InterimState::Over => return Poll::Ready(None),
            }
        }
    }

    pub(super) fn is_over(&self) -> bool {
        match &self.state {
            InterimState::Passing(body) => self.last_words.is_none() && body.is_end_stream(),
            InterimState::Over => true,
            InterimState::Waiting(_) | InterimState::Gathers { .. } => false,
        }
    }
}

impl AnswerReadAhead for Mutex<InterimBody> {
    fn read_ahead(&self, context: &mut Context<'_>) {
        let mut interim = self.lock().unwrap_or_else(PoisonError::into_inner);
        // The model's own answer reads ahead itself.
        if let InterimState::Waiting(answer) = &mut interim.state
            && let Poll::Ready(answer) = answer.as_mut().poll(context)
        {
            interim.note_answer(answer);
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LoadingNoticeForm {
    /// Comments, and events that clients skip.
    Comments,
    /// Reasoning text, in chat chunks.
    Reasoning,
}

pub(crate) struct LoadingNotifier {
    backends: Arc<dyn LeaseProvider>,
    model: ModelName,
    request_id: String,
    manner: LoadingNoticeForm,
    dialect: ErrorDialect,
    began: Instant,
    /// Last message, which is not sent twice in a row.
    last_notice: Option<String>,
}

impl LoadingNotifier {
    pub(crate) fn new(
        backends: Arc<dyn LeaseProvider>,
        model: ModelName,
        request_id: String,
        manner: LoadingNoticeForm,
        dialect: ErrorDialect,
        began: Instant,
    ) -> Self {
        Self { backends, model, request_id, manner, dialect, began, last_notice: None }
    }

    pub(crate) fn next_sign(&mut self) -> Bytes {
        let now = Instant::now();
        let coming = self.backends.next_process(&self.model);
        match self.manner {
            LoadingNoticeForm::Comments => {
                let far = coming.map_or_else(|| "starts".to_owned(), |coming| describe_stage(&coming, now));
                let waited = now.saturating_duration_since(self.began).as_secs();
                keep_alive(self.dialect, false, &format!("the model {far}; waited for {waited} s"))
            }
            LoadingNoticeForm::Reasoning => {
                let stage =
                    coming.map_or_else(|| "starts".to_owned(), |coming| describe_first_stage(&coming));
                let text = if self.last_notice.as_ref() == Some(&stage) {
                    ".".to_owned()
                } else {
                    let line = if self.last_notice.is_some() { "\n" } else { "" };
                    format!("{line}`{}` {stage} ", self.model)
                };
                self.last_notice = Some(stage);
                self.chunk(&text)
            }
        }
    }

    /// Returns the text that ends the messages when the model answers; `None` if no message was sent.
    pub(crate) fn end_notice(&self) -> Option<Bytes> {
        self.last_notice.as_ref().map(|_| self.chunk("\n\n"))
    }

    fn chunk(&self, text: &str) -> Bytes {
        let created = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs();
        let chunk = json!({
            "choices": [{ "delta": { "reasoning_content": text }, "finish_reason": null, "index": 0 }],
            "created": created,
            "id": format!("chatcmpl-{}", self.request_id),
            "model": self.model.as_str(),
            "object": "chat.completion.chunk",
        });
        Bytes::from(format!("data: {chunk}\n\n"))
    }
}

/// Describes the progress of the load, and the remaining time if known.
fn describe_stage(coming: &NextProcess, now: Instant) -> String {
    let mut words = stage_verb(coming).to_owned();
    if let Some(left) =
        coming.time_left(now).filter(|left| *left >= Duration::from_secs(1) && coming.since.is_some())
    {
        // Writing to a String cannot fail.
        let _written = write!(words, ", some {} s are left", left.as_secs());
    }
    words
}

/// Describes the progress of the load in words that change only with its stage.
fn describe_first_stage(coming: &NextProcess) -> String {
    let mut words = stage_verb(coming).to_owned();
    if let Some(took) = coming.took.filter(|took| *took >= Duration::from_secs(1) && coming.since.is_some()) {
        let _written = write!(words, " (the last time it took {} s)", took.as_secs());
    }
    words
}

fn stage_verb(coming: &NextProcess) -> &'static str {
    match (coming.since, coming.waits_for_room) {
        (Some(_), _) => "is being loaded",
        (None, true) => "waits until other models are unloaded for it",
        (None, false) => "waits to be loaded",
    }
}

/// Returns a comment of one line, and an event if clients of this dialect need one.
///
/// Proxies are content with a comment. Clients such as Codex and Claude Code reset their timeout on events
/// only, so the streams of `/v1/messages` and `/v1/responses` also get a harmless event.
pub(super) fn keep_alive(dialect: ErrorDialect, has_begun: bool, comment: &str) -> Bytes {
    let event = match dialect {
        ErrorDialect::Anthropic => "event: ping\ndata: {\"type\":\"ping\"}\n\n",
        // OpenAI's own streams have this event. OpenAI's Python client (3.54) fails if the first event is not
        // `response.created`, or if a second one has another id. So no event is harmless before the answer
        // begins.
        ErrorDialect::Responses if has_begun => "event: keepalive\ndata: {\"type\":\"keepalive\"}\n\n",
        ErrorDialect::Responses | ErrorDialect::OpenAi => "",
    };
    Bytes::from(format!(": {comment}\n\n{event}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_told_how_far_a_load_is_as_far_as_that_is_known() {
        let now = Instant::now();
        let unknown = NextProcess::default();
        assert_eq!(describe_stage(&unknown, now), "waits to be loaded");
        let room = NextProcess { waits_for_room: true, took: Some(Duration::from_secs(40)), ..unknown };
        assert_eq!(describe_stage(&room, now), "waits until other models are unloaded for it");
        let loads = NextProcess { since: now.checked_sub(Duration::from_secs(15)), ..room };
        assert_eq!(describe_stage(&loads, now), "is being loaded, some 25 s are left");
        assert_eq!(describe_first_stage(&loads), "is being loaded (the last time it took 40 s)");
        let late = NextProcess { since: now.checked_sub(Duration::from_secs(50)), ..room };
        assert_eq!(
            describe_stage(&late, now),
            "is being loaded",
            "it takes longer than the last one, nobody knows how long"
        );
    }
}

#[cfg(test)]
mod keep_alive_tests {
    use super::*;

    #[test]
    fn each_dialect_gets_the_event_that_its_clients_count_as_life() {
        for has_begun in [false, true] {
            let sign = |dialect| keep_alive(dialect, has_begun, "x");
            assert_eq!(sign(ErrorDialect::OpenAi), ": x\n\n");
            assert_eq!(sign(ErrorDialect::Anthropic), ": x\n\nevent: ping\ndata: {\"type\":\"ping\"}\n\n");
            let alive = if has_begun { "event: keepalive\ndata: {\"type\":\"keepalive\"}\n\n" } else { "" };
            assert_eq!(sign(ErrorDialect::Responses), format!(": x\n\n{alive}"));
        }
    }
}
