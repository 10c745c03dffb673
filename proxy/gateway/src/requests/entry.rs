//! The entry of a request in the operators' list, and its handle. Fields that change are atomics.

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use http::{Method, Version};
use tokio::time::Instant;
use warden_policies::{GenerationId, ModelName};
use warden_supervisor::ExchangeOutcome;

pub(crate) struct RequestStart<'a> {
    pub(crate) request_id: &'a str,
    pub(crate) peer: IpAddr,
    pub(crate) method: &'a Method,
    pub(crate) protocol: Version,
    pub(crate) route: &'static str,
    pub(crate) generates: bool,
    pub(crate) at: Instant,
}

/// Stages of a request, usually in this order. A request returns to `Waiting` after a failed attempt, and
/// from `Continuing` to `Answering`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum RequestStage {
    Receiving,
    Waiting,
    /// The request was sent to a backend, or is being sent.
    Sent,
    /// A part of the answer has arrived.
    Answering,
    /// The backend is lost, and the gateway searches for another one to continue the answer.
    Continuing,
}

/// Value of an empty [`AtomicOption`].
const MISSING: u64 = u64::MAX;

#[derive(Debug)]
pub(super) struct RequestEntry {
    pub(super) number: u64,
    pub(super) id: String,
    pub(super) peer: IpAddr,
    pub(super) method: Method,
    pub(super) protocol: Version,
    pub(super) route: &'static str,
    pub(super) generates: bool,
    pub(super) began: Instant,
    pub(super) key: OnceLock<Arc<str>>,
    pub(super) model: OnceLock<ModelName>,
    pub(super) course: EntryProgress,
}

#[derive(Debug, Default)]
pub(super) struct EntryProgress {
    stage: AtomicU8,
    pub(super) streams: AtomicBool,
    pub(super) cancelled: AtomicBool,
    /// Generation that has the request, or had it last.
    pub(super) generation: AtomicOption,
    pub(super) attempts: AtomicU32,
    pub(super) times: EntryTimes,
    tokens: EntryTokens,
    /// Number of requests of the same shard that had ended when this one ended, including this one.
    pub(super) ended: AtomicOption,
}

#[derive(Debug, Default)]
pub(super) struct EntryTimes {
    /// Time spent in queues, without the current wait.
    queued: AtomicMicros,
    /// Start of the current wait for a lease.
    waits: AtomicMicros,
    /// Time when the request was first sent to a backend.
    pub(super) sent: AtomicMicros,
    /// Time when the first part of the answer arrived.
    pub(super) answers: AtomicMicros,
    /// Times for evaluating the prompt and for generating, as the backend reports them.
    pub(super) evaluated: AtomicMicros,
    pub(super) generated: AtomicMicros,
}

#[derive(Debug, Default)]
struct EntryTokens {
    prompt: AtomicU64,
    /// Estimate of the prompt tokens from the size of the request, until they are counted.
    guess: AtomicU64,
    output: AtomicU64,
}

#[derive(Debug)]
pub(super) struct AtomicOption(AtomicU64);

impl Default for AtomicOption {
    fn default() -> Self {
        Self(AtomicU64::new(MISSING))
    }
}

impl AtomicOption {
    pub(super) fn set(&self, number: u64) {
        self.0.store(number, Ordering::Relaxed);
    }

    pub(super) fn get(&self) -> Option<u64> {
        let number = self.0.load(Ordering::Relaxed);
        (number != MISSING).then_some(number)
    }
}

/// An atomic time in whole microseconds that may be missing.
#[derive(Debug, Default)]
pub(super) struct AtomicMicros(AtomicOption);

impl AtomicMicros {
    fn set(&self, time: Duration) {
        self.0.set(time.as_secs().saturating_mul(1_000_000).saturating_add(time.subsec_micros().into()));
    }

    pub(super) fn get(&self) -> Option<Duration> {
        self.0.get().map(Duration::from_micros)
    }
}

impl RequestEntry {
    pub(super) fn new(number: u64, begun: &RequestStart<'_>) -> Self {
        Self {
            number,
            id: begun.request_id.to_owned(),
            peer: begun.peer,
            method: begun.method.clone(),
            protocol: begun.protocol,
            route: begun.route,
            generates: begun.generates,
            began: begun.at,
            key: OnceLock::new(),
            model: OnceLock::new(),
            course: EntryProgress::default(),
        }
    }

    /// Reuses the entry and its text buffers for another request. No other thread may hold the entry.
    pub(super) fn reuse(&mut self, number: u64, begun: &RequestStart<'_>) {
        let Self { number: its, id, peer, method, protocol, route, generates, began, key, model, course } =
            self;
        id.clear();
        id.push_str(begun.request_id);
        method.clone_from(begun.method);
        (*its, *peer, *protocol, *route) = (number, begun.peer, begun.protocol, begun.route);
        (*generates, *began) = (begun.generates, begun.at);
        (*key, *model) = (OnceLock::new(), OnceLock::new());
        *course = EntryProgress::default();
    }

    pub(super) fn stage(&self) -> RequestStage {
        match self.course.stage.load(Ordering::Relaxed) {
            0 => RequestStage::Receiving,
            1 => RequestStage::Waiting,
            2 => RequestStage::Sent,
            3 => RequestStage::Answering,
            _ => RequestStage::Continuing,
        }
    }

    fn set_stage(&self, stage: RequestStage) {
        self.course.stage.store(stage as u8, Ordering::Relaxed);
    }

    /// Cancels the request. Returns whether it was cancelled before.
    pub(super) fn cancel(&self) -> bool {
        self.course.cancelled.swap(true, Ordering::Relaxed)
    }

    /// Returns the time spent in queues of a request that is `age` old.
    pub(super) fn queued(&self, age: Duration) -> Duration {
        let before = self.course.times.queued.get().unwrap_or_default();
        match self.course.times.waits.get() {
            Some(since) if self.stage() == RequestStage::Waiting => before + age.saturating_sub(since),
            _ => before,
        }
    }

    pub(super) fn is_on_a_backend(&self) -> bool {
        matches!(self.stage(), RequestStage::Sent | RequestStage::Answering | RequestStage::Continuing)
    }

    /// Returns the known number of tokens that the request occupies in its backend's context.
    pub(super) fn held_tokens(&self) -> u64 {
        let (prompt, output) = self.tokens();
        let prompt = if prompt == 0 { self.course.tokens.guess.load(Ordering::Relaxed) } else { prompt };
        prompt.saturating_add(output)
    }

    /// Returns the known numbers of prompt and generated tokens.
    pub(super) fn tokens(&self) -> (u64, u64) {
        (self.course.tokens.prompt.load(Ordering::Relaxed), self.course.tokens.output.load(Ordering::Relaxed))
    }

    /// Returns whether the request was in flight when `ended` requests of its shard had ended.
    pub(super) fn was_in_flight(&self, ended: u64) -> bool {
        self.course.ended.get().is_none_or(|nth| nth > ended)
    }
}

/// Updates the entry of a request in flight; empty for a request to the gateway's own routes.
#[derive(Clone, Debug, Default)]
pub(crate) struct ProgressHandle(pub(super) Option<Arc<RequestEntry>>);

impl ProgressHandle {
    pub(crate) fn set_key(&self, key: Option<&Arc<str>>) {
        if let (Some(entry), Some(key)) = (&self.0, key) {
            let _once = entry.key.set(key.clone());
        }
    }

    pub(crate) fn set_model(&self, model: &ModelName) {
        if let Some(entry) = &self.0 {
            let _once = entry.model.set(model.clone());
        }
    }

    /// Records that the body was read as far as needed, and that the request waits for a lease.
    pub(crate) fn note_waiting(&self) {
        if let Some(entry) = &self.0 {
            entry.course.times.waits.set(entry.began.elapsed());
            entry.set_stage(RequestStage::Waiting);
        }
    }

    /// Records that the request waits for another lease, after a failed attempt or its backend's death.
    pub(crate) fn note_waiting_again(&self, continues: bool) {
        if let Some(entry) = &self.0 {
            entry.course.times.waits.set(entry.began.elapsed());
            entry.set_stage(if continues { RequestStage::Continuing } else { RequestStage::Waiting });
        }
    }

    /// Records that a lease was granted and the request is sent. `queued` is the total time in queues.
    pub(crate) fn note_leased(&self, generation: GenerationId, queued: Duration) {
        if let Some(entry) = &self.0 {
            let course = &entry.course;
            course.generation.set(generation.0);
            // Only one thread writes, so no atomic read-modify-write is needed.
            let attempts = course.attempts.load(Ordering::Relaxed);
            course.attempts.store(attempts.saturating_add(1), Ordering::Relaxed);
            course.times.queued.set(queued);
            if attempts == 0 {
                // Adding the wait to its start saves reading the clock.
                course.times.sent.set(course.times.waits.get().unwrap_or_default() + queued);
            }
            if entry.stage() != RequestStage::Continuing {
                entry.set_stage(RequestStage::Sent);
            }
        }
    }

    /// Records whether a stream is requested, the counted prompt tokens, and their estimate (`guess`).
    pub(crate) fn note_asked(&self, streams: bool, tokens: Option<u64>, guess: u64) {
        if let Some(entry) = &self.0 {
            entry.course.tokens.guess.store(guess, Ordering::Relaxed);
            entry.course.streams.store(streams, Ordering::Relaxed);
            if let Some(tokens) = tokens {
                entry.course.tokens.prompt.store(tokens, Ordering::Relaxed);
            }
        }
    }

    /// Records that a part of the answer or its continuation has arrived.
    pub(crate) fn note_answer(&self, now: Instant) {
        if let Some(entry) = &self.0 {
            if entry.course.times.answers.get().is_none() {
                entry.course.times.answers.set(now.saturating_duration_since(entry.began));
            }
            entry.set_stage(RequestStage::Answering);
        }
    }

    pub(crate) fn note_continuing(&self) {
        if let Some(entry) = &self.0 {
            entry.set_stage(RequestStage::Continuing);
        }
    }

    /// Records the tokens generated so far; the prompt tokens follow when the request ends.
    pub(crate) fn note_generated(&self, tokens: u64) {
        if let Some(entry) = &self.0 {
            entry.course.tokens.output.store(tokens, Ordering::Relaxed);
        }
    }

    /// Records the times for prompt and answer that the backend reports.
    pub(crate) fn note_times(&self, ended: &ExchangeOutcome) {
        let Some(entry) = &self.0 else { return };
        for (of, took) in
            [(&entry.course.times.evaluated, ended.prefill), (&entry.course.times.generated, ended.decode)]
        {
            if let Some(time) = took.and_then(|(_, ms)| Duration::try_from_secs_f64(ms / 1e3).ok()) {
                of.set(time);
            }
        }
    }

    /// Returns whether a backend may have got the request.
    pub(crate) fn is_sent(&self) -> bool {
        self.0.as_ref().is_some_and(|entry| entry.course.times.sent.get().is_some())
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.0.as_ref().is_some_and(|entry| entry.course.cancelled.load(Ordering::Relaxed))
    }
}
