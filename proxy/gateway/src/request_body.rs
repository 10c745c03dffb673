//! The body of a request on its way to the backend: the pieces that were held, then the rest as it arrives. It counts,
//! keeps the limits, and notes why it failed, because the connection that carries it can only say *that* it failed.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::time::{Instant, Sleep, sleep};
use warden_policies::quarantine::Fingerprint;

use crate::budget::Held;
use crate::checkpoint::Checkpoint;
use crate::fingerprint::{Printer, parts};
use crate::observe::Outcome;
use crate::pace::Pace;
use crate::scan::Scanner;
use crate::tape::Tape;

/// Why a body ended early.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BodyFault {
    #[error("the request body is larger than allowed")]
    TooLarge = 1,
    #[error("the request body did not arrive in time")]
    TooSlow = 2,
    #[error("the request body broke off")]
    Broken = 3,
    #[error("the request body names a second model")]
    TwoModels = 4,
    #[error("the request ended its server while it ran there alone, and is refused")]
    Quarantined = 5,
    #[error("the process that the request was for was stopped before it had the request")]
    Stopped = 6,
}

impl BodyFault {
    /// How a request ends by it.
    pub(crate) const fn outcome(self) -> Outcome {
        match self {
            Self::TooLarge => Outcome::Rejected("body_too_large"),
            Self::TooSlow => Outcome::Rejected("body_too_slow"),
            Self::Broken => Outcome::ClientGone,
            Self::TwoModels => Outcome::Rejected("two_models"),
            Self::Quarantined => Outcome::Rejected("quarantined"),
            Self::Stopped => Outcome::Denied("unreachable"),
        }
    }
}

/// What became of the body, readable while a connection owns it.
#[derive(Debug, Default)]
pub(crate) struct Sent {
    whole: AtomicBool,
    fault: AtomicU8,
    pub(crate) bytes: AtomicU64,
    images: AtomicU32,
    audio: AtomicU32,
    print: OnceLock<Fingerprint>,
}

impl Sent {
    /// For the same body sent once more.
    pub(crate) fn again(before: &Self) -> Self {
        Self {
            bytes: AtomicU64::new(before.bytes.load(Ordering::Relaxed)),
            images: AtomicU32::new(before.images.load(Ordering::Relaxed)),
            audio: AtomicU32::new(before.audio.load(Ordering::Relaxed)),
            print: before.print.clone(),
            ..Self::default()
        }
    }

    /// What was seen in the body so far: images, audio clips.
    pub(crate) fn note_media(&self, images: u32, audio: u32) {
        self.images.store(images, Ordering::Relaxed);
        self.audio.store(audio, Ordering::Relaxed);
    }

    /// Images and audio clips seen in the body.
    pub(crate) fn media(&self) -> (u64, u64) {
        (u64::from(self.images.load(Ordering::Relaxed)), u64::from(self.audio.load(Ordering::Relaxed)))
    }

    /// All of the client's body has come, and this is what it is known by.
    pub(crate) fn seal(&self, print: Fingerprint) {
        // It ends once.
        let _once = self.print.set(print);
    }

    /// What the body is known by, once all of it has come; `None` for an empty one.
    pub(crate) fn print(&self) -> Option<Fingerprint> {
        self.print.get().copied()
    }

    /// Whether the connection took the body to its end.
    pub(crate) fn is_whole(&self) -> bool {
        self.whole.load(Ordering::Acquire)
    }

    /// What the body is known by, if the connection took all of it: only then can the backend be at work on it.
    pub(crate) fn whole_print(&self) -> Option<Fingerprint> {
        self.print().filter(|_| self.is_whole())
    }

    /// Why it ended early, if it did.
    pub(crate) fn fault(&self) -> Option<BodyFault> {
        match self.fault.load(Ordering::Acquire) {
            1 => Some(BodyFault::TooLarge),
            2 => Some(BodyFault::TooSlow),
            3 => Some(BodyFault::Broken),
            4 => Some(BodyFault::TwoModels),
            5 => Some(BodyFault::Quarantined),
            6 => Some(BodyFault::Stopped),
            _ => None,
        }
    }
}

impl warden_supervisor::Asked for Sent {
    fn is_whole(&self) -> bool {
        Self::is_whole(self)
    }

    fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    fn media(&self) -> u64 {
        let (images, audio) = Self::media(self);
        images + audio
    }

    fn print(&self) -> Option<Fingerprint> {
        Self::print(self)
    }
}

/// Limits of what is still to come.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Bytes of the whole body.
    pub(crate) bytes: u64,
    /// The setting that says so.
    pub(crate) key: &'static str,
    /// How slowly it may come.
    pub(crate) pace: Pace,
}

/// What the rest of a body must keep to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Guard {
    pub(crate) limits: Limits,
    /// The model was replaced, and the backend would take a later one.
    pub(crate) one_model: bool,
}

/// The body.
pub(crate) struct RequestBody {
    from: From,
    sent: Arc<Sent>,
}

enum From {
    Nothing,
    Again(VecDeque<Bytes>),
    Live(Box<Live>),
}

struct Live {
    held: Held,
    rest: Option<Incoming>,
    scanner: Option<Scanner>,
    guard: Guard,
    /// Since when the client lets us wait, and until when it may.
    waiting: Option<(Instant, Pin<Box<Sleep>>)>,
    /// A copy for whoever records; the held pieces are in it.
    tape: Option<Tape>,
    printer: Printer,
    checkpoint: Option<Checkpoint>,
    /// The last piece, while it is not known whether it may pass.
    last: Option<Bytes>,
}

impl RequestBody {
    /// No body.
    pub(crate) fn nothing(sent: Arc<Sent>) -> Self {
        Self::new(From::Nothing, sent)
    }

    /// A body of which every piece is held elsewhere.
    pub(crate) fn again(pieces: VecDeque<Bytes>, sent: Arc<Sent>) -> Self {
        Self::new(From::Again(pieces), sent)
    }

    /// Held pieces, then the rest. `scanner` goes on counting images and audio clips.
    pub(crate) fn live(
        held: Held,
        rest: Option<Incoming>,
        scanner: Option<Scanner>,
        guard: Guard,
        sent: Arc<Sent>,
        tape: Option<Tape>,
        printer: Printer,
    ) -> Self {
        let live =
            Live { held, rest, scanner, guard, waiting: None, tape, printer, checkpoint: None, last: None };
        Self::new(From::Live(Box::new(live)), sent)
    }

    /// Where it is looked at when its end is here, if that is still to come.
    pub(crate) fn stop_at(&mut self, checkpoint: impl FnOnce() -> Checkpoint) {
        if let From::Live(live) = &mut self.from
            && live.rest.is_some()
        {
            live.checkpoint = Some(checkpoint());
        }
    }

    fn new(from: From, sent: Arc<Sent>) -> Self {
        let body = Self { from, sent };
        if body.ended() {
            // A connection never asks for the pieces of a body that has none.
            body.sent.whole.store(true, Ordering::Release);
        }
        body
    }

    fn end_tape(&mut self) {
        if let From::Live(live) = &mut self.from
            && let Some(tape) = live.tape.take()
        {
            tape.end();
        }
    }

    fn ended(&self) -> bool {
        match &self.from {
            From::Nothing => true,
            From::Again(pieces) => pieces.is_empty(),
            From::Live(live) => {
                live.held.len() == 0
                    && live.last.is_none()
                    && live.checkpoint.is_none()
                    && live.rest.as_ref().is_none_or(is_done)
            }
        }
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = BodyFault;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyFault>>> {
        let this = &mut *self;
        let item = match &mut this.from {
            From::Nothing => None,
            From::Again(pieces) => pieces.pop_front().map(Ok),
            From::Live(live) => match live.held.pop() {
                Some(piece) => Some(Ok(piece)),
                None => ready!(live.poll_rest(context, &this.sent)),
            },
        };
        match item {
            Some(Ok(piece)) => {
                if this.ended() {
                    this.sent.whole.store(true, Ordering::Release);
                    this.end_tape();
                }
                Poll::Ready(Some(Ok(Frame::data(piece))))
            }
            Some(Err(fault)) => {
                this.sent.fault.store(fault as u8, Ordering::Release);
                this.from = From::Nothing;
                Poll::Ready(Some(Err(fault)))
            }
            None => {
                this.sent.whole.store(this.sent.fault().is_none(), Ordering::Release);
                this.end_tape();
                Poll::Ready(None)
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.ended()
    }

    fn size_hint(&self) -> SizeHint {
        match &self.from {
            From::Nothing => SizeHint::with_exact(0),
            From::Again(pieces) => SizeHint::with_exact(pieces.iter().map(|piece| piece.len() as u64).sum()),
            From::Live(live) => match live.rest.as_ref().map_or(Some(0), |rest| rest.size_hint().exact()) {
                Some(rest) => {
                    let last = live.last.as_ref().map_or(0, Bytes::len) as u64;
                    SizeHint::with_exact(live.held.len() + last + rest)
                }
                None => SizeHint::new(),
            },
        }
    }
}

/// Whether nothing more can come. Over HTTP/2 the end of a stream may be a frame of its own, behind the last byte that was
/// declared.
fn is_done(rest: &Incoming) -> bool {
    rest.is_end_stream() || rest.size_hint().exact() == Some(0)
}

impl Live {
    fn poll_rest(
        &mut self,
        context: &mut Context<'_>,
        sent: &Sent,
    ) -> Poll<Option<Result<Bytes, BodyFault>>> {
        if self.last.is_some() {
            return self.poll_last(context, sent);
        }
        let Some(rest) = &mut self.rest else { return Poll::Ready(None) };
        loop {
            let frame = match Pin::new(&mut *rest).poll_frame(context) {
                Poll::Ready(frame) => frame,
                Poll::Pending => {
                    let left = self.guard.limits.pace.left();
                    let start = || (Instant::now(), Box::pin(sleep(left)));
                    let (_, until) = self.waiting.get_or_insert_with(start);
                    ready!(until.as_mut().poll(context));
                    return Poll::Ready(Some(Err(BodyFault::TooSlow)));
                }
            };
            let waited = self.waiting.take().map_or(Duration::ZERO, |(since, _)| since.elapsed());
            let piece = match frame {
                None => {
                    // The end of what comes in chunks is known only behind its last piece.
                    self.last = Some(Bytes::new());
                    return self.poll_last(context, sent);
                }
                Some(Err(_)) => return Poll::Ready(Some(Err(BodyFault::Broken))),
                // Trailers of a request mean nothing to llama-server.
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(piece) => piece,
                    Err(_) => continue,
                },
            };
            self.guard.limits.pace.came(waited, piece.len());
            let total = sent.bytes.fetch_add(piece.len() as u64, Ordering::Relaxed) + piece.len() as u64;
            if total > self.guard.limits.bytes {
                return Poll::Ready(Some(Err(BodyFault::TooLarge)));
            }
            for part in parts(&piece) {
                if let Some(scanner) = &mut self.scanner {
                    scanner.feed(part);
                }
                self.printer.add(part);
            }
            if let Some(scanner) = &self.scanner {
                if self.guard.one_model && scanner.models() > 1 {
                    return Poll::Ready(Some(Err(BodyFault::TwoModels)));
                }
                sent.note_media(scanner.images(), scanner.audio());
            }
            self.tape = self.tape.take().and_then(|mut tape| tape.add(&piece).then_some(tape));
            if self.rest.as_ref().is_none_or(is_done) {
                self.last = Some(piece);
                return self.poll_last(context, sent);
            }
            return Poll::Ready(Some(Ok(piece)));
        }
    }

    /// The last piece, if it may pass; an empty one is the end.
    fn poll_last(
        &mut self,
        context: &mut Context<'_>,
        sent: &Sent,
    ) -> Poll<Option<Result<Bytes, BodyFault>>> {
        let print = self.printer.finish();
        if sent.bytes.load(Ordering::Relaxed) > 0 {
            sent.seal(print);
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
