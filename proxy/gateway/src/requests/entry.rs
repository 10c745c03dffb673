//! One request as it is seen from outside, and what writes it: all by atomics, so that nobody waits.

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use http::{Method, Version};
use tokio::time::Instant;
use warden_policies::{GenerationId, ModelName};

/// What is known of a request by its head.
pub(crate) struct Begun<'a> {
    pub(crate) request_id: &'a str,
    pub(crate) peer: IpAddr,
    pub(crate) method: &'a Method,
    pub(crate) protocol: Version,
    pub(crate) route: &'static str,
    /// Its answer is text that is generated.
    pub(crate) generates: bool,
    pub(crate) at: Instant,
}

/// How far it has come. In this order, but for `Continues`, which may go back to `Sent` once more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Stage {
    /// Its body comes.
    Receives,
    /// It waits for a lease.
    Waits,
    /// A backend has it, or is being given it.
    Sent,
    /// Something of its answer is there.
    Answers,
    /// Its backend is gone, and another one is to go on.
    Continues,
}

/// No time, no generation.
const NONE: u64 = u64::MAX;

/// One request.
#[derive(Debug)]
pub(super) struct Entry {
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
    course: Course,
}

/// What changes while it runs.
#[derive(Debug, Default)]
struct Course {
    stage: AtomicU8,
    streams: AtomicBool,
    cancelled: AtomicBool,
    /// The generation that has it, or had it last.
    generation: Maybe,
    attempts: AtomicU32,
    /// Time in queues that are behind it.
    queued: Micros,
    /// Since when it waits for a lease.
    waits: Micros,
    /// When a backend was given it.
    sent: Micros,
    /// When the first of its answer came.
    answers: Micros,
    /// What the backend says that evaluating the prompt took, and generating.
    evaluated: Micros,
    generated: Micros,
    prompt: AtomicU64,
    /// Tokens of the prompt by its length, while nobody has counted.
    guess: AtomicU64,
    output: AtomicU64,
    /// As which of those of its shard it ended.
    ended: Maybe,
}

/// A number that may not be there yet.
#[derive(Debug)]
struct Maybe(AtomicU64);

impl Default for Maybe {
    fn default() -> Self {
        Self(AtomicU64::new(NONE))
    }
}

impl Maybe {
    fn set(&self, number: u64) {
        self.0.store(number, Ordering::Relaxed);
    }

    fn get(&self) -> Option<u64> {
        let number = self.0.load(Ordering::Relaxed);
        (number != NONE).then_some(number)
    }
}

/// A time that may not be there yet, in whole microseconds.
#[derive(Debug, Default)]
struct Micros(Maybe);

impl Micros {
    fn set(&self, time: Duration) {
        self.0.set(time.as_secs().saturating_mul(1_000_000).saturating_add(time.subsec_micros().into()));
    }

    fn get(&self) -> Option<Duration> {
        self.0.get().map(Duration::from_micros)
    }
}

impl Entry {
    pub(super) fn new(number: u64, begun: &Begun<'_>) -> Self {
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
            course: Course::default(),
        }
    }

    /// Another request in the same place, by whoever has it alone. Its text goes where the last one's was, and nothing is moved.
    pub(super) fn anew(&mut self, number: u64, begun: &Begun<'_>) {
        let Self { number: its, id, peer, method, protocol, route, generates, began, key, model, course } =
            self;
        id.clear();
        id.push_str(begun.request_id);
        method.clone_from(begun.method);
        (*its, *peer, *protocol, *route) = (number, begun.peer, begun.protocol, begun.route);
        (*generates, *began) = (begun.generates, begun.at);
        (*key, *model) = (OnceLock::new(), OnceLock::new());
        *course = Course::default();
    }

    pub(super) fn stage(&self) -> Stage {
        match self.course.stage.load(Ordering::Relaxed) {
            0 => Stage::Receives,
            1 => Stage::Waits,
            2 => Stage::Sent,
            3 => Stage::Answers,
            _ => Stage::Continues,
        }
    }

    fn is(&self, stage: Stage) {
        self.course.stage.store(stage as u8, Ordering::Relaxed);
    }

    pub(super) fn streams(&self) -> bool {
        self.course.streams.load(Ordering::Relaxed)
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.course.cancelled.load(Ordering::Relaxed)
    }

    /// It is told to end; whether it had been told before.
    pub(super) fn cancel(&self) -> bool {
        self.course.cancelled.swap(true, Ordering::Relaxed)
    }

    pub(super) fn generation(&self) -> Option<GenerationId> {
        self.course.generation.get().map(GenerationId)
    }

    pub(super) fn attempts(&self) -> u32 {
        self.course.attempts.load(Ordering::Relaxed)
    }

    /// Time in queues so far, `age` after it began.
    pub(super) fn queued(&self, age: Duration) -> Duration {
        let before = self.course.queued.get().unwrap_or_default();
        let now = self.course.waits.get().filter(|_| self.stage() == Stage::Waits);
        before + now.map(|since| age.saturating_sub(since)).unwrap_or_default()
    }

    pub(super) fn sent(&self) -> Option<Duration> {
        self.course.sent.get()
    }

    pub(super) fn answers(&self) -> Option<Duration> {
        self.course.answers.get()
    }

    /// How long its backend says that the prompt took, and the answer.
    pub(super) fn told(&self) -> (Option<Duration>, Option<Duration>) {
        (self.course.evaluated.get(), self.course.generated.get())
    }

    /// It is over, as the `nth` of its shard.
    pub(super) fn ends(&self, nth: u64) {
        self.course.ended.set(nth);
    }

    /// Whether it was in flight when so many of its shard had ended.
    pub(super) fn was_in_flight(&self, ended: u64) -> bool {
        self.course.ended.get().is_none_or(|nth| nth > ended)
    }

    /// Whether a backend has it.
    pub(super) fn is_on_a_backend(&self) -> bool {
        matches!(self.stage(), Stage::Sent | Stage::Answers | Stage::Continues)
    }

    /// Tokens that it holds in its backend, as far as they are known.
    pub(super) fn held(&self) -> u64 {
        let (prompt, output) = self.tokens();
        let prompt = if prompt == 0 { self.course.guess.load(Ordering::Relaxed) } else { prompt };
        prompt.saturating_add(output)
    }

    /// Tokens of the prompt, and generated, as far as they are known.
    pub(super) fn tokens(&self) -> (u64, u64) {
        (self.course.prompt.load(Ordering::Relaxed), self.course.output.load(Ordering::Relaxed))
    }
}

/// How a request on its way is shown; nothing for what we answer ourselves.
#[derive(Clone, Debug, Default)]
pub(crate) struct Progress(pub(super) Option<Arc<Entry>>);

impl Progress {
    /// Whose key it came with.
    pub(crate) fn key(&self, key: Option<&Arc<str>>) {
        if let (Some(entry), Some(key)) = (&self.0, key) {
            // It is told once.
            let _once = entry.key.set(key.clone());
        }
    }

    /// Which model it is for.
    pub(crate) fn model(&self, model: &ModelName) {
        if let Some(entry) = &self.0 {
            let _once = entry.model.set(model.clone());
        }
    }

    /// Its body is here, as far as it has to be, and it waits for a lease.
    pub(crate) fn waits(&self) {
        if let Some(entry) = &self.0 {
            entry.course.waits.set(entry.began.elapsed());
            entry.is(Stage::Waits);
        }
    }

    /// It waits for another lease: that of a dead backend is gone.
    pub(crate) fn waits_again(&self, continues: bool) {
        if let Some(entry) = &self.0 {
            entry.course.waits.set(entry.began.elapsed());
            entry.is(if continues { Stage::Continues } else { Stage::Waits });
        }
    }

    /// A lease was granted, after so long in queues in all, and the request goes there.
    pub(crate) fn leased(&self, generation: GenerationId, queued: Duration) {
        if let Some(entry) = &self.0 {
            let course = &entry.course;
            course.generation.set(generation.0);
            // One writer: no locked operation.
            let attempts = course.attempts.load(Ordering::Relaxed);
            course.attempts.store(attempts.saturating_add(1), Ordering::Relaxed);
            course.queued.set(queued);
            if attempts == 0 {
                // Its wait began then and took so long: no look at the clock.
                course.sent.set(course.waits.get().unwrap_or_default() + queued);
            }
            if entry.stage() != Stage::Continues {
                entry.is(Stage::Sent);
            }
        }
    }

    /// What its backend is asked for: a stream or not, with a prompt of so many tokens where somebody has counted.
    /// `guess`: by its length.
    pub(crate) fn asks(&self, streams: bool, tokens: Option<u64>, guess: u64) {
        if let Some(entry) = &self.0 {
            entry.course.guess.store(guess, Ordering::Relaxed);
            entry.course.streams.store(streams, Ordering::Relaxed);
            if let Some(tokens) = tokens {
                entry.course.prompt.store(tokens, Ordering::Relaxed);
            }
        }
    }

    /// Something of the answer is here, or of what goes on with it.
    pub(crate) fn answers(&self, now: Instant) {
        if let Some(entry) = &self.0 {
            if entry.course.answers.get().is_none() {
                entry.course.answers.set(now.saturating_duration_since(entry.began));
            }
            entry.is(Stage::Answers);
        }
    }

    /// Its backend is gone in the middle of the answer.
    pub(crate) fn continues(&self) {
        if let Some(entry) = &self.0 {
            entry.is(Stage::Continues);
        }
    }

    /// Tokens that were generated for it so far. What its prompt cost is told at the end.
    pub(crate) fn generated(&self, tokens: u64) {
        if let Some(entry) = &self.0 {
            entry.course.output.store(tokens, Ordering::Relaxed);
        }
    }

    /// Milliseconds that its backend says it took for the prompt, and for the answer.
    pub(crate) fn took(&self, prompt_ms: Option<f64>, answer_ms: Option<f64>) {
        let Some(entry) = &self.0 else { return };
        for (of, ms) in [(&entry.course.evaluated, prompt_ms), (&entry.course.generated, answer_ms)] {
            if let Some(time) = ms.and_then(|ms| Duration::try_from_secs_f64(ms / 1e3).ok()) {
                of.set(time);
            }
        }
    }

    /// Whether a backend may have it.
    pub(crate) fn is_sent(&self) -> bool {
        self.0.as_ref().is_some_and(|entry| entry.sent().is_some())
    }

    /// Whether an operator has told it to end.
    pub(crate) fn is_cancelled(&self) -> bool {
        self.0.as_ref().is_some_and(|entry| entry.is_cancelled())
    }
}
