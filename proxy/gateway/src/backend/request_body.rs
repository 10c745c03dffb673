//! The body of a request to a backend: the held pieces, then the rest as it arrives. This type counts
//! bytes, enforces limits, and records the reason for a failure, because the connection that sends the body
//! reports only *that* it failed.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tokio::time::{Instant, Sleep, sleep};

use crate::backend::checkpoint::BodyCheckpoint;
use crate::body::fingerprint::cache_sized_parts;
use crate::body::intake::{BodyIntake, PassingBody};
use crate::body::request_stream::RequestStream;
use crate::body::sent::SentBody;
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
    body: PassingBody,
    /// Start of the current wait for the client's next piece, and its time limit.
    waiting: Option<(Instant, Pin<Box<Sleep>>)>,
    checkpoint: Option<BodyCheckpoint>,
    /// The last piece, held back until the checkpoint decides.
    last: Option<Bytes>,
}

impl RequestBody {
    pub(crate) fn empty(sent: Arc<SentBody>) -> Self {
        Self::new(BodySource::Nothing, sent)
    }

    /// Creates a body from pieces that the caller keeps as well.
    pub(crate) fn from_held(pieces: VecDeque<Bytes>, sent: Arc<SentBody>) -> Self {
        Self::new(BodySource::Again(pieces), sent)
    }

    /// Creates a body from the pieces already read, followed by the rest as it arrives.
    pub(crate) fn from_intake(intake: Box<BodyIntake>) -> Self {
        let sent = intake.sent.clone();
        let live = |body| Box::new(LiveBody { body, waiting: None, checkpoint: None, last: None });
        Self::new(
            intake.into_passing().map_or(BodySource::Nothing, |body| BodySource::Live(live(body))),
            sent,
        )
    }

    /// Sets a checkpoint for the end of the body; does nothing if the end has already arrived.
    pub(crate) fn set_checkpoint(&mut self, checkpoint: impl FnOnce() -> BodyCheckpoint) {
        if let BodySource::Live(live) = &mut self.from
            && live.body.rest.is_some()
        {
            live.checkpoint = Some(checkpoint());
        }
    }

    fn new(from: BodySource, sent: Arc<SentBody>) -> Self {
        let body = Self { from, sent };
        if body.ended() {
            // A connection never polls an empty body, so record its end here.
            body.sent.note_end(true);
        }
        body
    }

    fn end_copy(&mut self) {
        if let BodySource::Live(live) = &mut self.from
            && let Some(copy) = live.body.copy.take()
        {
            copy.end();
        }
    }

    fn ended(&self) -> bool {
        match &self.from {
            BodySource::Nothing => true,
            BodySource::Again(pieces) => pieces.is_empty(),
            BodySource::Live(live) => {
                live.body.held.len() == 0
                    && live.last.is_none()
                    && live.checkpoint.is_none()
                    && live.body.rest.as_ref().is_none_or(is_body_done)
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
            BodySource::Live(live) => match live.body.held.pop() {
                Some(piece) => Some(Ok(piece)),
                None => ready!(live.poll_rest(context, &this.sent)),
            },
        };
        match item {
            Some(Ok(piece)) => {
                if this.ended() {
                    this.sent.note_end(true);
                    this.end_copy();
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
                this.end_copy();
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
                match live.body.rest.as_ref().map_or(Some(0), |rest| rest.size_hint().exact()) {
                    Some(rest) => {
                        let last = live.last.as_ref().map_or(0, Bytes::len) as u64;
                        SizeHint::with_exact(live.body.held.len() + last + rest)
                    }
                    None => SizeHint::new(),
                }
            }
        }
    }
}

/// Returns whether no more bytes can come. Over HTTP/2 the end of a stream may be a separate frame after
/// the last declared byte.
fn is_body_done(rest: &RequestStream) -> bool {
    rest.is_end_stream() || rest.size_hint().exact() == Some(0)
}

impl LiveBody {
    fn poll_rest(
        &mut self,
        context: &mut Context<'_>,
        sent: &SentBody,
    ) -> Poll<Option<Result<Bytes, BodyError>>> {
        if self.last.is_some() {
            return self.poll_last(context, sent);
        }
        let Some(rest) = &mut self.body.rest else { return Poll::Ready(None) };
        loop {
            let frame = match Pin::new(&mut *rest).poll_frame(context) {
                Poll::Ready(frame) => frame,
                Poll::Pending => {
                    let left = self.body.limits.rate.left();
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
                    return self.poll_last(context, sent);
                }
                Some(Err(fault)) => return Poll::Ready(Some(Err(fault))),
                // llama-server ignores the trailers of a request.
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(piece) => piece,
                    Err(_) => continue,
                },
            };
            self.body.limits.rate.note_piece(waited, piece.len());
            let total = sent.bytes.fetch_add(piece.len() as u64, Ordering::Relaxed) + piece.len() as u64;
            if total > self.body.limits.bytes {
                return Poll::Ready(Some(Err(BodyError::TooLarge)));
            }
            for part in cache_sized_parts(&piece) {
                if let Some(scanner) = &mut self.body.scanner {
                    scanner.feed(part);
                }
                self.body.printer.add(part);
            }
            if let Some(scanner) = &self.body.scanner {
                if self.body.one_model && scanner.models() > 1 {
                    return Poll::Ready(Some(Err(BodyError::TwoModels)));
                }
                sent.note_media(scanner.images(), scanner.audio());
            }
            self.body.copy = self.body.copy.take().and_then(|mut copy| copy.add(&piece).then_some(copy));
            if self.body.rest.as_ref().is_none_or(is_body_done) {
                self.last = Some(piece);
                return self.poll_last(context, sent);
            }
            return Poll::Ready(Some(Ok(piece)));
        }
    }

    /// Returns the last piece once the checkpoint lets it pass; an empty piece only marks the end.
    fn poll_last(
        &mut self,
        context: &mut Context<'_>,
        sent: &SentBody,
    ) -> Poll<Option<Result<Bytes, BodyError>>> {
        let print = self.body.printer.finish();
        if sent.bytes.load(Ordering::Relaxed) > 0 {
            sent.set_fingerprint(print);
        }
        if let Some(checkpoint) = &mut self.checkpoint
            && let Err(fault) = ready!(checkpoint.poll(print, context))
        {
            return Poll::Ready(Some(Err(fault)));
        }
        self.checkpoint = None;
        Poll::Ready(self.last.take().filter(|piece| !piece.is_empty()).map(Ok))
    }
}
