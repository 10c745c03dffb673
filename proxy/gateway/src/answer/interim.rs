//! The body of an answer that began before its model was loaded: keep-alive comments first, then the
//! model's own answer.
//!
//! ```text
//!   Waiting ── the model's answer: a stream ──────> Passing, until that stream ends
//!     │ └─── any other answer, or a refusal ──────> its error is read and sent as an event ─> end
//!     └ keep-alive comments meanwhile
//! ```
//!
//! A client that does not read does not delay its request: the request proceeds ([`AnswerReadAhead`]) once its
//! model is loaded.

use std::io;
use std::pin::Pin;
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::Response;
use http_body::{Body as _, Frame};
use tokio::time::{Instant, Sleep, sleep_until};

use super::answer_body::AnswerBody;
use super::assemble::is_events;
use super::teller::LoadingNotifier;
use crate::backend::backends::BoxFuture;
use crate::protocol::conn_state::AnswerReadAhead;
use crate::refusal::{ErrorDialect, answer_error_event};

/// Most bytes read of an error body. If the body is longer, the client gets only the status.
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
    /// Creates the body. The first keep-alive is sent with the head, further ones at the given interval.
    pub(crate) fn new(
        answer: BoxFuture<'static, Response<AnswerBody>>,
        teller: LoadingNotifier,
        every: Duration,
        dialect: ErrorDialect,
    ) -> Self {
        let next_sign = Box::pin(sleep_until(Instant::now()));
        Self { state: InterimState::Waiting(answer), teller, every, next_sign, last_words: None, dialect }
    }

    /// Handles the arrival of the model's answer or of a refusal.
    fn note_answer(&mut self, answer: Response<AnswerBody>) {
        let (head, body) = answer.into_parts();
        if head.status.is_success() && is_events(&head.headers) {
            self.state = InterimState::Passing(Box::new(body));
            self.last_words = self.teller.end_notice();
        } else {
            let (status, body) = (head.status.as_u16(), Box::new(body));
            self.state = InterimState::Gathers { status, body, read: Vec::new() };
        }
    }

    pub(super) fn poll(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        loop {
            if let Some(words) = self.last_words.take() {
                return Poll::Ready(Some(Ok(Frame::data(words))));
            }
            match &mut self.state {
                InterimState::Waiting(answer) => match answer.as_mut().poll(context) {
                    Poll::Ready(answer) => self.note_answer(answer),
                    Poll::Pending => {
                        ready!(self.next_sign.as_mut().poll(context));
                        self.next_sign.as_mut().reset(Instant::now() + self.every);
                        return Poll::Ready(Some(Ok(Frame::data(self.teller.next_sign()))));
                    }
                },
                InterimState::Passing(body) => return Pin::new(body.as_mut()).poll_frame(context),
                InterimState::Gathers { status, body, read } => {
                    // If an error body breaks off, the client gets the part that arrived.
                    let Some(Ok(frame)) = ready!(Pin::new(body.as_mut()).poll_frame(context)) else {
                        let event = answer_error_event(*status, read, self.dialect);
                        self.state = InterimState::Over;
                        return Poll::Ready(Some(Ok(Frame::data(Bytes::from(event)))));
                    };
                    let data = frame.into_data().unwrap_or_default();
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
        // Once the model's own answer has arrived, that answer reads ahead itself.
        if let InterimState::Waiting(answer) = &mut interim.state
            && let Poll::Ready(answer) = answer.as_mut().poll(context)
        {
            interim.note_answer(answer);
        }
    }
}
