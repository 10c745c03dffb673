//! The body of a response to a client: a fixed text, the operators' page, a relayed backend response
//! ([`AnswerRelay`]), or the body sent while a model is loading ([`InterimBody`]).

use std::convert::Infallible;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::combinators::UnsyncBoxBody;

use crate::answer::{AnswerRelay, InFlightRequest, InterimBody};
use crate::body::HeldPieces;
use crate::observe::RequestOutcome;
use crate::protocol::{AnswerReadAhead, ConnBusy, ConnState};

/// Frame size of the gateway's own bodies. An exchange ends when hyper gets its last frame, and the idle
/// timeout of the connection starts then. One large frame would leave a slow client too little time.
const FRAME_BYTES: usize = 64 * 1024;

pub(crate) type PolledFrame = Poll<Option<Result<Frame<Bytes>, io::Error>>>;

pub(super) fn frame(piece: Bytes) -> PolledFrame {
    Poll::Ready(Some(Ok(Frame::data(piece))))
}

pub(crate) struct AnswerBody {
    kind: AnswerBodyKind,
    busy: Option<ConnBusy>,
}

enum AnswerBodyKind {
    Fixed { bytes: Option<Bytes>, flight: Option<Box<InFlightRequest>>, outcome: RequestOutcome },
    Page { body: UnsyncBoxBody<Bytes, Infallible>, flight: Box<InFlightRequest> },
    Relay(Arc<UnreadAnswer>),
    Interim { interim: Arc<Mutex<InterimBody>>, conn: Arc<ConnState> },
}

impl AnswerBody {
    pub(crate) fn fixed(
        bytes: Bytes,
        flight: Box<InFlightRequest>,
        outcome: RequestOutcome,
        busy: ConnBusy,
    ) -> Self {
        let bytes = (!bytes.is_empty()).then_some(bytes);
        Self { kind: AnswerBodyKind::Fixed { bytes, flight: Some(flight), outcome }, busy: Some(busy) }
    }

    pub(crate) fn page(
        body: UnsyncBoxBody<Bytes, Infallible>,
        flight: Box<InFlightRequest>,
        busy: ConnBusy,
    ) -> Self {
        Self { kind: AnswerBodyKind::Page { body, flight }, busy: Some(busy) }
    }

    /// Relays a backend response. Reads `ahead` bytes at most before the client, charged to `held`.
    pub(crate) fn relay(relay: Box<AnswerRelay>, held: HeldPieces, ahead: u64, busy: ConnBusy) -> Self {
        let answer = Arc::new(UnreadAnswer::new(relay, held, ahead));
        if ahead > 0 {
            let answer: Arc<dyn AnswerReadAhead> = answer.clone();
            busy.conn().set_answer(Arc::downgrade(&answer));
        }
        Self { kind: AnswerBodyKind::Relay(answer), busy: Some(busy) }
    }

    /// Takes no `ConnBusy`, unlike the other bodies: the answer for which `interim` waits holds it.
    pub(crate) fn interim(interim: InterimBody, conn: Arc<ConnState>) -> Self {
        let interim = Arc::new(Mutex::new(interim));
        let waits: Arc<dyn AnswerReadAhead> = interim.clone();
        conn.set_answer(Arc::downgrade(&waits));
        Self { kind: AnswerBodyKind::Interim { interim, conn }, busy: None }
    }
}

fn lock_interim(interim: &Mutex<InterimBody>) -> MutexGuard<'_, InterimBody> {
    interim.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Body for AnswerBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> PolledFrame {
        let Self { kind, busy } = &mut *self;
        match kind {
            AnswerBodyKind::Fixed { bytes, flight, .. } => {
                // The answer is complete. Take a pending cancel request now, so that it cannot cut the body.
                let _too_late = busy.as_ref().is_some_and(ConnBusy::takes_cancel);
                let portion = bytes.as_mut().map(|left| left.split_to(left.len().min(FRAME_BYTES)));
                if bytes.as_ref().is_some_and(Bytes::is_empty) {
                    *bytes = None;
                }
                if let (Some(portion), Some(flight)) = (&portion, flight) {
                    flight.count_passed(portion.len());
                }
                Poll::Ready(portion.map(|portion| Ok(Frame::data(portion))))
            }
            AnswerBodyKind::Page { body, flight } => {
                let polled = std::task::ready!(Pin::new(body).poll_frame(context));
                if let Some(Ok(bytes)) = polled.as_ref().map(|frame| frame.as_ref().map(Frame::data_ref)) {
                    flight.count_passed(bytes.map_or(0, Bytes::len));
                }
                Poll::Ready(polled.map(|frame| frame.map_err(|never| match never {})))
            }
            AnswerBodyKind::Relay(relay) => {
                let cancelled =
                    busy.as_ref().is_some_and(ConnBusy::takes_cancel).then(|| relay.cancel(context));
                let polled = cancelled.flatten().unwrap_or_else(|| relay.poll(context));
                if let Some(busy) = busy {
                    busy.conn().note_frame(matches!(polled, Poll::Ready(Some(Ok(_)))));
                }
                polled
            }
            AnswerBodyKind::Interim { interim, conn } => {
                let polled = lock_interim(interim).poll(context);
                conn.note_frame(matches!(polled, Poll::Ready(Some(Ok(_)))));
                polled
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            AnswerBodyKind::Fixed { bytes, .. } => bytes.is_none(),
            AnswerBodyKind::Page { body, .. } => body.is_end_stream(),
            AnswerBodyKind::Relay(relay) => relay.is_over(),
            AnswerBodyKind::Interim { interim, .. } => lock_interim(interim).is_over(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            AnswerBodyKind::Fixed { bytes, .. } => {
                SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64))
            }
            AnswerBodyKind::Page { body, .. } => body.size_hint(),
            AnswerBodyKind::Relay(relay) => relay.size_hint(),
            AnswerBodyKind::Interim { .. } => SizeHint::default(),
        }
    }
}

impl Drop for AnswerBody {
    fn drop(&mut self) {
        if let AnswerBodyKind::Fixed { flight: Some(flight), outcome, bytes } = &mut self.kind {
            // A client that leaves before the last bytes does not change the outcome; a cancel does.
            let is_cut = bytes.is_some() && flight.progress.is_cancelled();
            flight.finish(if is_cut { RequestOutcome::Cancelled } else { *outcome });
        }
        if let AnswerBodyKind::Page { flight, .. } = &mut self.kind {
            flight.finish(RequestOutcome::Ok);
        }
    }
}

/// Reads a backend's answer ahead of a slow client, so that the backend's slot is free after the last byte.
///
/// ```text
///   client reads ──────── pieces pass as they come, nothing is held
///   client does not ───── its connection cannot write: the backend's answer is read on, and held
///        │ last byte of the backend ──> lease returned, the rest waits for the client
///        │ no room: a stream holds `upstream.unread_bytes`, or `server.buffered_bytes` are used up
///        └──> the backend waits, and keeps its slot
/// ```
struct UnreadAnswer(Mutex<ReadAheadState>);

struct ReadAheadState {
    relay: Box<AnswerRelay>,
    held: HeldPieces,
    limit: u64,
    /// True if the budget has no room: the relay reads on when the client has taken all held pieces.
    is_full: bool,
    /// Error that ends the answer after the held pieces.
    failure: Option<io::Error>,
}

impl UnreadAnswer {
    fn new(relay: Box<AnswerRelay>, held: HeldPieces, limit: u64) -> Self {
        Self(Mutex::new(ReadAheadState { relay, held, limit, is_full: false, failure: None }))
    }

    fn lock(&self) -> MutexGuard<'_, ReadAheadState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn poll(&self, context: &mut Context<'_>) -> PolledFrame {
        self.lock().poll(context)
    }

    fn cancel(&self, context: &Context<'_>) -> Option<PolledFrame> {
        self.lock().relay.cancel(context)
    }

    fn is_over(&self) -> bool {
        let state = self.lock();
        !state.held.has_pieces() && state.failure.is_none() && state.relay.is_over()
    }

    fn size_hint(&self) -> SizeHint {
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
                return frame(piece);
            }
        }
        match self.failure.take() {
            Some(error) => Poll::Ready(Some(Err(error))),
            None => self.relay.poll(context),
        }
    }
}
