//! The body of every response to a client: a fixed text of the gateway, the operators' page, a relayed
//! backend response ([`Relay`]), or a response whose model is still loading ([`Interim`]).

use std::convert::Infallible;
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::combinators::UnsyncBoxBody;

use crate::answer::flight::Flight;
use crate::answer::interim::Interim;
use crate::answer::relay::Relay;
use crate::answer::unread::UnreadAnswer;
use crate::body::budget::Held;
use crate::observe::Outcome;
use crate::protocol::conn_state::{Busy, ConnState, ReadAhead};

/// Frame size for the gateway's own bodies. The exchange counts as over once the last frame is handed out,
/// and the idle timeout of the connection starts then. A large body in one frame would give a slow client
/// too little time.
const PORTION: usize = 64 * 1024;

pub(crate) struct AnswerBody {
    kind: Kind,
    busy: Option<Busy>,
}

enum Kind {
    Fixed { bytes: Option<Bytes>, flight: Option<Box<Flight>>, outcome: Outcome },
    Page { body: UnsyncBoxBody<Bytes, Infallible>, flight: Box<Flight> },
    Relay(Arc<UnreadAnswer>),
    Interim { interim: Arc<Mutex<Interim>>, conn: Arc<ConnState> },
}

impl AnswerBody {
    pub(crate) fn fixed(bytes: Bytes, flight: Box<Flight>, outcome: Outcome, busy: Busy) -> Self {
        let bytes = (!bytes.is_empty()).then_some(bytes);
        Self { kind: Kind::Fixed { bytes, flight: Some(flight), outcome }, busy: Some(busy) }
    }

    pub(crate) fn page(body: UnsyncBoxBody<Bytes, Infallible>, flight: Box<Flight>, busy: Busy) -> Self {
        Self { kind: Kind::Page { body, flight }, busy: Some(busy) }
    }

    /// Relays a backend response. At most `ahead` bytes that the client has not read are buffered, charged
    /// to `held`. With `ahead` 0 nothing is read ahead.
    pub(crate) fn relay(relay: Box<Relay>, held: Held, ahead: u64, busy: Busy) -> Self {
        let answer = Arc::new(UnreadAnswer::new(relay, held, ahead));
        if ahead > 0 {
            let answer: Arc<dyn ReadAhead> = answer.clone();
            busy.conn().answers(Arc::downgrade(&answer));
        }
        Self { kind: Kind::Relay(answer), busy: Some(busy) }
    }

    /// The inner response marks the connection as busy itself.
    pub(crate) fn interim(interim: Interim, conn: Arc<ConnState>) -> Self {
        let interim = Arc::new(Mutex::new(interim));
        let waits: Arc<dyn ReadAhead> = interim.clone();
        conn.answers(Arc::downgrade(&waits));
        Self { kind: Kind::Interim { interim, conn }, busy: None }
    }
}

fn lock(interim: &Mutex<Interim>) -> MutexGuard<'_, Interim> {
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
            Kind::Fixed { bytes, flight, .. } => {
                // The answer is complete and the client reads it: take the cancel request here, so that a
                // late one does not cut the body.
                let _too_late = busy.as_ref().is_some_and(Busy::takes_cancel);
                let portion = bytes.as_mut().map(|left| left.split_to(left.len().min(PORTION)));
                if bytes.as_ref().is_some_and(Bytes::is_empty) {
                    *bytes = None;
                }
                if let (Some(portion), Some(flight)) = (&portion, flight) {
                    flight.passed(portion.len());
                }
                Poll::Ready(portion.map(|portion| Ok(Frame::data(portion))))
            }
            Kind::Page { body, flight } => {
                let polled = std::task::ready!(Pin::new(body).poll_frame(context));
                if let Some(Ok(bytes)) = polled.as_ref().map(|frame| frame.as_ref().map(Frame::data_ref)) {
                    flight.passed(bytes.map_or(0, Bytes::len));
                }
                Poll::Ready(polled.map(|frame| frame.map_err(|never| match never {})))
            }
            Kind::Relay(relay) => {
                let cancelled = busy.as_ref().is_some_and(Busy::takes_cancel).then(|| relay.cancel(context));
                let polled = cancelled.flatten().unwrap_or_else(|| relay.poll(context));
                if let Some(busy) = busy {
                    busy.conn().passed(matches!(polled, Poll::Ready(Some(Ok(_)))));
                }
                polled
            }
            Kind::Interim { interim, conn } => {
                let polled = lock(interim).poll(context);
                conn.passed(matches!(polled, Poll::Ready(Some(Ok(_)))));
                polled
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Fixed { bytes, .. } => bytes.is_none(),
            Kind::Page { body, .. } => body.is_end_stream(),
            Kind::Relay(relay) => relay.is_over(),
            Kind::Interim { interim, .. } => lock(interim).is_over(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Fixed { bytes, .. } => {
                SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64))
            }
            Kind::Page { body, .. } => body.size_hint(),
            Kind::Relay(relay) => relay.size_hint(),
            Kind::Interim { .. } => SizeHint::default(),
        }
    }
}

impl Drop for AnswerBody {
    fn drop(&mut self) {
        if let Kind::Fixed { flight: Some(flight), outcome, bytes } = &mut self.kind {
            // A client that leaves before these few bytes is not counted as cancelled.
            let is_cut = bytes.is_some() && flight.progress.is_cancelled();
            flight.finish(if is_cut { Outcome::Cancelled } else { *outcome });
        }
        if let Kind::Page { flight, .. } = &mut self.kind {
            flight.finish(Outcome::Ok);
        }
    }
}
