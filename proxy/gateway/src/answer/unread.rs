//! Reads a backend's answer in advance for a client that does not read, so that the backend's slot is free
//! after the last byte.
//!
//! ```text
//!   client reads ──────── pieces pass as they come, nothing is held
//!   client does not ───── its connection cannot write: the backend's answer is read on, and held
//!        │ last byte of the backend ──> lease returned, the rest waits for the client
//!        │ no room: a stream holds `upstream.unread_bytes`, or `server.buffered_bytes` are used up
//!        └──> the backend waits, and keeps its slot
//! ```

use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Frame, SizeHint};

use super::relay::AnswerRelay;
use crate::body::budget::HeldPieces;
use crate::protocol::conn_state::AnswerReadAhead;

type PolledFrame = Poll<Option<Result<Frame<Bytes>, io::Error>>>;

/// A backend's answer, with the part that was read in advance.
pub(super) struct UnreadAnswer(Mutex<ReadAheadState>);

struct ReadAheadState {
    relay: Box<AnswerRelay>,
    held: HeldPieces,
    /// Most bytes held at a time.
    limit: u64,
    /// The budget had no room after the last held piece: nothing is read until the client has taken all held
    /// pieces.
    is_full: bool,
    /// Error with which the answer breaks off after the held pieces.
    failure: Option<io::Error>,
}

impl UnreadAnswer {
    pub(super) fn new(relay: Box<AnswerRelay>, held: HeldPieces, limit: u64) -> Self {
        Self(Mutex::new(ReadAheadState { relay, held, limit, is_full: false, failure: None }))
    }

    fn lock(&self) -> MutexGuard<'_, ReadAheadState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the next piece for the client.
    pub(super) fn poll(&self, context: &mut Context<'_>) -> PolledFrame {
        self.lock().poll(context)
    }

    /// Ends the answer at an operator's request: see [`AnswerRelay::cancel`].
    pub(super) fn cancel(&self, context: &Context<'_>) -> Option<PolledFrame> {
        self.lock().relay.cancel(context)
    }

    pub(super) fn is_over(&self) -> bool {
        let state = self.lock();
        !state.held.has_pieces() && state.failure.is_none() && state.relay.is_over()
    }

    pub(super) fn size_hint(&self) -> SizeHint {
        let state = self.lock();
        if state.held.has_pieces() { SizeHint::new() } else { state.relay.size_hint() }
    }
}

impl AnswerReadAhead for UnreadAnswer {
    fn read_ahead(&self, context: &mut Context<'_>) {
        let mut state = self.lock();
        let state = &mut *state;
        while !state.is_full && state.failure.is_none() && state.held.len() < state.limit {
            match state.relay.poll(context) {
                Poll::Ready(Some(Ok(frame))) => {
                    let piece = frame.into_data().unwrap_or_default();
                    if let Err(piece) = state.held.push_ahead(piece) {
                        state.is_full = true;
                        state.held.push_unreserved(piece);
                    }
                }
                Poll::Ready(Some(Err(error))) => state.failure = Some(error),
                Poll::Ready(None) | Poll::Pending => break,
            }
        }
    }
}

impl ReadAheadState {
    fn poll(&mut self, context: &mut Context<'_>) -> PolledFrame {
        while let Some(piece) = self.held.pop() {
            self.is_full &= self.held.has_pieces();
            if !piece.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(piece))));
            }
        }
        match self.failure.take() {
            Some(error) => Poll::Ready(Some(Err(error))),
            None => self.relay.poll(context),
        }
    }
}
