//! The body of a request to a backend: the held pieces, then the rest as it arrives. Counts bytes, enforces
//! limits, and records why the body failed, which the connection does not report.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tokio::time::{Instant, Sleep, sleep};
use tokio_util::task::TaskTracker;
use warden_policies::quarantine::{RequestFingerprint, RequestStanding};
use warden_supervisor::SolitudeResult;

use crate::backend::{BackendLease, BoxFuture, SharedLease};
use crate::body::{BodyIntake, RequestStream, SentBody};
use crate::refusal::BodyError;

pub(crate) struct RequestBody {
    from: BodySource,
    sent: Arc<SentBody>,
}

enum BodySource {
    Nothing,
    Again(VecDeque<Bytes>),
    Live(Box<LiveBody>),
}

struct LiveBody {
    intake: Box<BodyIntake>,
    /// Start and time limit of the current wait for the client's next piece.
    waiting: Option<(Instant, Pin<Box<Sleep>>)>,
    checkpoint: Option<BodyCheckpoint>,
    /// The last piece, held back until the checkpoint permits it.
    last: Option<Bytes>,
}

impl RequestBody {
    pub(crate) fn empty(sent: Arc<SentBody>) -> Self {
        Self::new(BodySource::Nothing, sent)
    }

    /// Creates a body from pieces that the caller keeps, too.
    pub(crate) fn from_held(pieces: VecDeque<Bytes>, sent: Arc<SentBody>) -> Self {
        Self::new(BodySource::Again(pieces), sent)
    }

    pub(crate) fn from_intake(mut intake: Box<BodyIntake>) -> Self {
        let sent = intake.sent.clone();
        if !intake.begin_passing() {
            return Self::empty(sent);
        }
        let live = LiveBody { intake, waiting: None, checkpoint: None, last: None };
        Self::new(BodySource::Live(Box::new(live)), sent)
    }

    /// Sets a checkpoint at the end of the body, unless the end has already arrived.
    pub(crate) fn set_checkpoint(&mut self, checkpoint: impl FnOnce() -> BodyCheckpoint) {
        if let BodySource::Live(live) = &mut self.from
            && live.intake.rest.is_some()
        {
            live.checkpoint = Some(checkpoint());
        }
    }

    fn new(from: BodySource, sent: Arc<SentBody>) -> Self {
        let body = Self { from, sent };
        if body.ended() {
            // The connection never polls an empty body, so record its end here.
            body.sent.note_end(true);
        }
        body
    }

    fn ended(&self) -> bool {
        match &self.from {
            BodySource::Nothing => true,
            BodySource::Again(pieces) => pieces.is_empty(),
            BodySource::Live(live) => {
                live.intake.held.len() == 0
                    && live.last.is_none()
                    && live.checkpoint.is_none()
                    && live.intake.rest.as_ref().is_none_or(is_body_done)
            }
        }
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = &mut *self;
        let item = match &mut this.from {
            BodySource::Nothing => None,
            BodySource::Again(pieces) => pieces.pop_front().map(Ok),
            BodySource::Live(live) => match live.intake.held.pop() {
                Some(piece) => Some(Ok(piece)),
                None => ready!(live.poll_rest(context)),
            },
        };
        match item {
            Some(Ok(piece)) => {
                if this.ended() {
                    this.sent.note_end(true);
                }
                Poll::Ready(Some(Ok(Frame::data(piece))))
            }
            Some(Err(fault)) => {
                this.sent.note_fault(fault);
                this.from = BodySource::Nothing;
                Poll::Ready(Some(Err(fault)))
            }
            None => {
                this.sent.note_end(this.sent.fault().is_none());
                Poll::Ready(None)
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.ended()
    }

    fn size_hint(&self) -> SizeHint {
        match &self.from {
            BodySource::Nothing => SizeHint::with_exact(0),
            BodySource::Again(pieces) => {
                SizeHint::with_exact(pieces.iter().map(|piece| piece.len() as u64).sum())
            }
            BodySource::Live(live) => {
                match live.intake.rest.as_ref().map_or(Some(0), |rest| rest.size_hint().exact()) {
                    Some(rest) => {
                        let last = live.last.as_ref().map_or(0, Bytes::len) as u64;
                        SizeHint::with_exact(live.intake.held.len() + last + rest)
                    }
                    None => SizeHint::new(),
                }
            }
        }
    }
}

/// The end of a body may be a separate frame after the last declared byte.
fn is_body_done(rest: &RequestStream) -> bool {
    rest.is_end_stream() || rest.size_hint().exact() == Some(0)
}

impl LiveBody {
    fn poll_rest(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Bytes, BodyError>>> {
        if self.last.is_some() {
            return self.poll_last(context);
        }
        let intake = &mut *self.intake;
        loop {
            let Some(rest) = &mut intake.rest else { return Poll::Ready(None) };
            let frame = match Pin::new(rest).poll_frame(context) {
                Poll::Ready(frame) => frame,
                Poll::Pending => {
                    let left = intake.limits.rate.left();
                    let start = || (Instant::now(), Box::pin(sleep(left)));
                    let (_, until) = self.waiting.get_or_insert_with(start);
                    ready!(until.as_mut().poll(context));
                    return Poll::Ready(Some(Err(BodyError::TooSlow)));
                }
            };
            let waited = self.waiting.take().map_or(Duration::ZERO, |(since, _)| since.elapsed());
            let piece = match frame {
                None => {
                    // The end of a chunked body is known only after its last piece.
                    self.last = Some(Bytes::new());
                    return self.poll_last(context);
                }
                Some(Err(fault)) => return Poll::Ready(Some(Err(fault))),
                // llama-server ignores the trailers of a request.
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(piece) => piece,
                    Err(_) => continue,
                },
            };
            intake.limits.rate.note_piece(waited, piece.len());
            if let Err(fault) = intake.note_piece(&piece) {
                return Poll::Ready(Some(Err(fault)));
            }
            if intake.has_second_model() {
                return Poll::Ready(Some(Err(BodyError::TwoModels)));
            }
            intake.count_media();
            if intake.rest.as_ref().is_none_or(is_body_done) {
                self.last = Some(piece);
                return self.poll_last(context);
            }
            return Poll::Ready(Some(Ok(piece)));
        }
    }

    /// Returns the last piece once the checkpoint permits it. An empty piece only marks the end.
    fn poll_last(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Bytes, BodyError>>> {
        let print = self.intake.seal();
        if let Some(checkpoint) = &mut self.checkpoint
            && let Err(fault) = ready!(checkpoint.poll(print, context))
        {
            return Poll::Ready(Some(Err(fault)));
        }
        self.checkpoint = None;
        Poll::Ready(self.last.take().filter(|piece| !piece.is_empty()).map(Ok))
    }
}

/// Quarantine check for a streamed body, whose fingerprint is known only with its last piece. Holds back the
/// last piece until the check permits it: llama-server starts nothing before it has the whole body.
///
/// ```text
///   pieces ... last piece --> [ not suspected? ] -- yes ----------------------> sent
///                                | suspect: waits until no other request runs -> sent
///                                | refused, or the process ends --------------> the body fails, incomplete
/// ```
pub(crate) struct BodyCheckpoint {
    /// Weak, because the body must not keep the lease after its exchange has ended.
    lease: Weak<dyn BackendLease>,
    tracker: TaskTracker,
    waiting: Option<BoxFuture<'static, SolitudeResult>>,
}

impl BodyCheckpoint {
    pub(crate) fn new(lease: &SharedLease, tracker: TaskTracker) -> Self {
        Self { lease: Arc::downgrade(lease), tracker, waiting: None }
    }

    /// Resolves when the last piece may be sent.
    pub(crate) fn poll(
        &mut self,
        print: RequestFingerprint,
        context: &mut Context<'_>,
    ) -> Poll<Result<(), BodyError>> {
        if self.waiting.is_none() {
            let Some(lease) = self.lease.upgrade() else { return Poll::Ready(Err(BodyError::Stopped)) };
            match lease.request_standing(print) {
                RequestStanding::Clear => return Poll::Ready(Ok(())),
                RequestStanding::Refused { .. } => return Poll::Ready(Err(BodyError::Quarantined)),
                RequestStanding::Suspect => self.waiting = Some(lease.alone(print)),
            }
        }
        let Some(waiting) = &mut self.waiting else { return Poll::Ready(Ok(())) };
        let alone = ready!(waiting.as_mut().poll(context));
        self.waiting = None;
        Poll::Ready(match alone {
            SolitudeResult::Granted => {
                if let Some(lease) = self.lease.upgrade() {
                    join_others_later(&lease, print, &self.tracker);
                }
                Ok(())
            }
            SolitudeResult::Shared => Ok(()),
            SolitudeResult::Refused(_) => Err(BodyError::Quarantined),
            SolitudeResult::Gone => Err(BodyError::Stopped),
        })
    }
}

/// Admits other requests on the generation again if a suspect still runs after its time limit.
pub(crate) fn join_others_later(lease: &SharedLease, print: RequestFingerprint, tracker: &TaskTracker) {
    let lone = Arc::downgrade(lease);
    let after = lease.solitude_limit(print);
    drop(tracker.spawn(async move {
        sleep(after).await;
        if let Some(lease) = lone.upgrade() {
            lease.end_solitude();
        }
    }));
}
