//! The body of a response to a client: a fixed text of the gateway, the operators' page, a relayed
//! backend response ([`AnswerRelay`]), or the body sent while a model is still loading ([`InterimBody`]).

use std::convert::Infallible;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::combinators::UnsyncBoxBody;

use crate::answer::flight::InFlightRequest;
use crate::answer::interim::InterimBody;
use crate::answer::relay::AnswerRelay;
use crate::answer::unread::UnreadAnswer;
use crate::body::budget::HeldPieces;
use crate::observe::RequestOutcome;
use crate::protocol::conn_state::{AnswerReadAhead, ConnBusy, ConnState};

/// Frame size of the gateway's own bodies. An exchange ends when its last frame is handed to hyper, and the
/// idle timeout of the connection starts then. Sent as one frame, a large body would leave a slow client
/// too little time.
const FRAME_BYTES: usize = 64 * 1024;

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

    /// Relays a backend response. Reads at most `ahead` bytes before the client reads them, and charges
    /// these bytes to `held`. With `ahead` 0 nothing is read in advance.
    pub(crate) fn relay(relay: Box<AnswerRelay>, held: HeldPieces, ahead: u64, busy: ConnBusy) -> Self {
        let answer = Arc::new(UnreadAnswer::new(relay, held, ahead));
        if ahead > 0 {
            let answer: Arc<dyn AnswerReadAhead> = answer.clone();
            busy.conn().set_answer(Arc::downgrade(&answer));
        }
        Self { kind: AnswerBodyKind::Relay(answer), busy: Some(busy) }
    }

    /// Creates the body of a response that starts while the model loads. The final response inside `interim`
    /// marks the connection as busy itself.
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

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        let Self { kind, busy } = &mut *self;
        match kind {
            AnswerBodyKind::Fixed { bytes, flight, .. } => {
                // The answer is complete and the client reads it. Take a pending cancel request out here,
                // so that it does not cut the body.
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
            // A client that leaves before the last bytes does not change the outcome; only an operator's
            // cancel request does.
            let is_cut = bytes.is_some() && flight.progress.is_cancelled();
            flight.finish(if is_cut { RequestOutcome::Cancelled } else { *outcome });
        }
        if let AnswerBodyKind::Page { flight, .. } = &mut self.kind {
            flight.finish(RequestOutcome::Ok);
        }
    }
}
