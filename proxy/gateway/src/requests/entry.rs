//! The entry of one request in the operators' list, and the handle that updates it. The fields that change
//! are atomics, so no thread waits.

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use http::{Method, Version};
use tokio::time::Instant;
use warden_policies::{GenerationId, ModelName};

/// Data of a request that is known from its head.
pub(crate) struct RequestStart<'a> {
    pub(crate) request_id: &'a str,
    pub(crate) peer: IpAddr,
    pub(crate) method: &'a Method,
    pub(crate) protocol: Version,
    pub(crate) route: &'static str,
    /// The answer is generated text.
    pub(crate) generates: bool,
    pub(crate) at: Instant,
}

/// Stages of a request, in this order. Only from `Continuing` may a request return to `Sent`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum RequestStage {
    /// The request's body is being received.
    Receiving,
    /// The request waits for a lease.
    Waiting,
    /// The request was sent to a backend, or is being sent.
    Sent,
    /// A part of the answer has arrived.
    Answering,
    /// The backend is lost, and another backend is to continue the answer.
    Continuing,
}

/// Value of an [`AtomicOption`] without a number.
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
    course: EntryProgress,
}

/// Fields that change while the request runs.
#[derive(Debug, Default)]
struct EntryProgress {
    stage: AtomicU8,
    streams: AtomicBool,
    cancelled: AtomicBool,
    /// Generation that has the request or had it last.
    generation: AtomicOption,
    attempts: AtomicU32,
    /// Time spent in queues so far, without the current wait.
    queued: AtomicMicros,
    /// Start of the current wait for a lease.
    waits: AtomicMicros,
    /// Time at which the request was first sent to a backend.
    sent: AtomicMicros,
    /// Time at which the first part of the answer arrived.
    answers: AtomicMicros,
    /// Times for evaluating the prompt and for generating, as the backend reports them.
    evaluated: AtomicMicros,
    generated: AtomicMicros,
    prompt: AtomicU64,
    /// Estimate of the prompt tokens from the length of the request, used until they are counted.
    guess: AtomicU64,
    output: AtomicU64,
    /// Number of requests of the same shard that had ended when this request ended, including this one.
    ended: AtomicOption,
}

/// An atomic number that may be missing.
#[derive(Debug)]
struct AtomicOption(AtomicU64);

impl Default for AtomicOption {
    fn default() -> Self {
        Self(AtomicU64::new(MISSING))
    }
}

impl AtomicOption {
    fn set(&self, number: u64) {
        self.0.store(number, Ordering::Relaxed);
    }

    fn get(&self) -> Option<u64> {
        let number = self.0.load(Ordering::Relaxed);
        (number != MISSING).then_some(number)
    }
}

/// An atomic time that may be missing, in whole microseconds.
#[derive(Debug, Default)]
struct AtomicMicros(AtomicOption);

impl AtomicMicros {
    fn set(&self, time: Duration) {
        self.0.set(time.as_secs().saturating_mul(1_000_000).saturating_add(time.subsec_micros().into()));
    }

    fn get(&self) -> Option<Duration> {
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

    pub(super) fn streams(&self) -> bool {
        self.course.streams.load(Ordering::Relaxed)
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.course.cancelled.load(Ordering::Relaxed)
    }

    /// Asks the request to end. Returns whether it was asked before.
    pub(super) fn cancel(&self) -> bool {
        self.course.cancelled.swap(true, Ordering::Relaxed)
    }

    pub(super) fn generation(&self) -> Option<GenerationId> {
        self.course.generation.get().map(GenerationId)
    }

    pub(super) fn attempts(&self) -> u32 {
        self.course.attempts.load(Ordering::Relaxed)
    }

    /// Returns the time spent in queues, when the request is `age` old.
    pub(super) fn queued(&self, age: Duration) -> Duration {
        let before = self.course.queued.get().unwrap_or_default();
        let now = self.course.waits.get().filter(|_| self.stage() == RequestStage::Waiting);
        before + now.map(|since| age.saturating_sub(since)).unwrap_or_default()
    }

    pub(super) fn sent_time(&self) -> Option<Duration> {
        self.course.sent.get()
    }

    pub(super) fn answer_time(&self) -> Option<Duration> {
        self.course.answers.get()
    }

    /// Returns the times for prompt and answer that the backend reports.
    pub(super) fn reported_times(&self) -> (Option<Duration>, Option<Duration>) {
        (self.course.evaluated.get(), self.course.generated.get())
    }

    /// Records that this is the `nth` request of its shard that has ended.
    pub(super) fn note_ended(&self, nth: u64) {
        self.course.ended.set(nth);
    }

    /// Returns whether the request was in flight when `ended` requests of its shard had ended.
    pub(super) fn was_in_flight(&self, ended: u64) -> bool {
        self.course.ended.get().is_none_or(|nth| nth > ended)
    }

    /// Returns whether a backend has the request.
    pub(super) fn is_on_a_backend(&self) -> bool {
        matches!(self.stage(), RequestStage::Sent | RequestStage::Answering | RequestStage::Continuing)
    }

    /// Returns the tokens that the request occupies in its backend's context, as far as known.
    pub(super) fn held_tokens(&self) -> u64 {
        let (prompt, output) = self.tokens();
        let prompt = if prompt == 0 { self.course.guess.load(Ordering::Relaxed) } else { prompt };
        prompt.saturating_add(output)
    }

    /// Returns prompt and generated tokens, as far as known.
    pub(super) fn tokens(&self) -> (u64, u64) {
        (self.course.prompt.load(Ordering::Relaxed), self.course.output.load(Ordering::Relaxed))
    }
}

/// Handle that updates the entry of a request in flight; empty for a request to the gateway's own routes.
#[derive(Clone, Debug, Default)]
pub(crate) struct ProgressHandle(pub(super) Option<Arc<RequestEntry>>);

impl ProgressHandle {
    /// Records the client's key.
    pub(crate) fn set_key(&self, key: Option<&Arc<str>>) {
        if let (Some(entry), Some(key)) = (&self.0, key) {
            // Later calls have no effect.
            let _once = entry.key.set(key.clone());
        }
    }

    /// Records the model.
    pub(crate) fn set_model(&self, model: &ModelName) {
        if let Some(entry) = &self.0 {
            let _once = entry.model.set(model.clone());
        }
    }

    /// Records that the body was read as far as needed, and that the request waits for a lease.
    pub(crate) fn note_waiting(&self) {
        if let Some(entry) = &self.0 {
            entry.course.waits.set(entry.began.elapsed());
            entry.set_stage(RequestStage::Waiting);
        }
    }

    /// Records that the request waits for another lease, because its backend has died.
    pub(crate) fn note_waiting_again(&self, continues: bool) {
        if let Some(entry) = &self.0 {
            entry.course.waits.set(entry.began.elapsed());
            entry.set_stage(if continues { RequestStage::Continuing } else { RequestStage::Waiting });
        }
    }

    /// Records that a lease was granted and the request is sent. `queued`: total time in queues.
    pub(crate) fn note_leased(&self, generation: GenerationId, queued: Duration) {
        if let Some(entry) = &self.0 {
            let course = &entry.course;
            course.generation.set(generation.0);
            // Only one thread writes, so no atomic read-modify-write is needed.
            let attempts = course.attempts.load(Ordering::Relaxed);
            course.attempts.store(attempts.saturating_add(1), Ordering::Relaxed);
            course.queued.set(queued);
            if attempts == 0 {
                // Adding the wait to its start saves reading the clock.
                course.sent.set(course.waits.get().unwrap_or_default() + queued);
            }
            if entry.stage() != RequestStage::Continuing {
                entry.set_stage(RequestStage::Sent);
            }
        }
    }

    /// Records whether a stream is requested, the number of prompt tokens if it was counted, and an
    /// estimate of that number (`guess`).
    pub(crate) fn note_asked(&self, streams: bool, tokens: Option<u64>, guess: u64) {
        if let Some(entry) = &self.0 {
            entry.course.guess.store(guess, Ordering::Relaxed);
            entry.course.streams.store(streams, Ordering::Relaxed);
            if let Some(tokens) = tokens {
                entry.course.prompt.store(tokens, Ordering::Relaxed);
            }
        }
    }

    /// Records that a part of the answer, or of its continuation, has arrived.
    pub(crate) fn note_answer(&self, now: Instant) {
        if let Some(entry) = &self.0 {
            if entry.course.answers.get().is_none() {
                entry.course.answers.set(now.saturating_duration_since(entry.began));
            }
            entry.set_stage(RequestStage::Answering);
        }
    }

    /// Records that the backend was lost in the middle of the answer.
    pub(crate) fn note_continuing(&self) {
        if let Some(entry) = &self.0 {
            entry.set_stage(RequestStage::Continuing);
        }
    }

    /// Records the tokens generated so far. The prompt tokens are recorded when the request ends.
    pub(crate) fn note_generated(&self, tokens: u64) {
        if let Some(entry) = &self.0 {
            entry.course.output.store(tokens, Ordering::Relaxed);
        }
    }

    /// Records the milliseconds for prompt and answer that the backend reports.
    pub(crate) fn note_times(&self, prompt_ms: Option<f64>, answer_ms: Option<f64>) {
        let Some(entry) = &self.0 else { return };
        for (of, ms) in [(&entry.course.evaluated, prompt_ms), (&entry.course.generated, answer_ms)] {
            if let Some(time) = ms.and_then(|ms| Duration::try_from_secs_f64(ms / 1e3).ok()) {
                of.set(time);
            }
        }
    }

    /// Returns whether a backend may have received the request.
    pub(crate) fn is_sent(&self) -> bool {
        self.0.as_ref().is_some_and(|entry| entry.sent_time().is_some())
    }

    /// Returns whether an operator has cancelled the request.
    pub(crate) fn is_cancelled(&self) -> bool {
        self.0.as_ref().is_some_and(|entry| entry.is_cancelled())
    }
}
