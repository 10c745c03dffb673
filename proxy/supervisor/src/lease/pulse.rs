//! Progress of the requests of one generation. It distinguishes a hanging server from a client that does not
//! read, and the evaluation of a long prompt from a pause between two tokens.
//!
//! ```text
//!     asks ──> waits ── event ──> rests ── the client wants more ──> waits ── event ──> … ── lease ends
//!          the server's turn         the client's turn
//! ```

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;
use warden_policies::health::{AwaitedWork, TokenGaps};
use warden_policies::quarantine::RequestFingerprint;
use warden_policies::{QuickMap, defaults, units};

use crate::sync::lock;

/// Body of a request that is being sent.
pub trait SentRequest: Send + Sync {
    /// True if the backend has the whole body. Until then, the backend waits for the client.
    fn is_whole(&self) -> bool;
    /// Bytes so far.
    fn bytes(&self) -> u64;
    /// Images and sound recordings so far.
    fn media_count(&self) -> u64;
    /// Fingerprint of a complete body; `None` without a body.
    fn fingerprint(&self) -> Option<RequestFingerprint>;
}

#[derive(Default)]
pub(crate) struct RequestProgress {
    request: Mutex<Option<Arc<dyn SentRequest>>>,
    /// Moment since which the server has to send next, in microseconds since the tracker's creation, plus
    /// one; 0 while the client has to send or read.
    awaited_since: AtomicU64,
    streams: AtomicBool,
    /// Events with data so far.
    events: AtomicU64,
}

/// After this many events, the server has computed a token: the first event may precede any computation.
const BEGUN_EVENTS: u64 = 2;

impl RequestProgress {
    fn has_begun(&self) -> bool {
        self.events.load(Ordering::Relaxed) >= BEGUN_EVENTS
    }

    fn is_awaited(&self) -> bool {
        self.awaited_since.load(Ordering::Relaxed) > 0
    }
}

pub(crate) struct ProgressTracker {
    born: Instant,
    /// Microseconds from `born` to the last received byte, plus one; 0 before the first byte.
    received: AtomicU64,
    /// Requests in flight, by their address. A list would be searched at the end of each request, under a lock
    /// that all threads share.
    all: Mutex<QuickMap<usize, Arc<RequestProgress>>>,
    /// Time and tokens of prompts that may still be evaluated although their clients have left.
    abandoned: Mutex<VecDeque<(Instant, u64)>>,
    /// Running requests that save or restore a slot, which stops all computing.
    pausing: AtomicU32,
    /// Events with data, and complete answers.
    moves: AtomicU64,
    /// Histogram of pauses between tokens, four steps per doubling.
    gaps: [AtomicU32; GAP_STEPS],
    /// Context size in tokens; 0 while unknown.
    context: AtomicU64,
}

const GAP_STEPS: usize = 160;
const ABANDONED_KEPT: usize = 64;

impl ProgressTracker {
    pub(crate) fn new() -> Self {
        Self {
            born: Instant::now(),
            received: AtomicU64::new(0),
            all: Mutex::default(),
            abandoned: Mutex::default(),
            pausing: AtomicU32::new(0),
            moves: AtomicU64::new(0),
            gaps: [const { AtomicU32::new(0) }; GAP_STEPS],
            context: AtomicU64::new(0),
        }
    }

    pub(crate) fn begin(&self) -> Arc<RequestProgress> {
        let pulse = Arc::<RequestProgress>::default();
        lock(&self.all).insert(Arc::as_ptr(&pulse).addr(), Arc::clone(&pulse));
        pulse
    }

    pub(crate) fn end(&self, pulse: &Arc<RequestProgress>) {
        lock(&self.all).remove(&Arc::as_ptr(pulse).addr());
        if pulse.is_awaited() && !pulse.has_begun() {
            let mut left = lock(&self.abandoned);
            if left.len() == ABANDONED_KEPT {
                left.pop_front();
            }
            left.push_back((Instant::now(), self.estimate_tokens(pulse)));
        }
    }

    /// `streams`: the request asks for an event stream.
    pub(crate) fn note_sent(&self, pulse: &RequestProgress, asked: Arc<dyn SentRequest>, streams: bool) {
        *lock(&pulse.request) = Some(asked);
        // Events of an earlier request of this lease are no progress of this one.
        pulse.events.store(0, Ordering::Relaxed);
        pulse.streams.store(streams, Ordering::Relaxed);
        pulse.awaited_since.store(self.micros(Instant::now()) + 1, Ordering::Relaxed);
    }

    /// `streams`: the answer is an event stream.
    pub(crate) fn note_answered(&self, pulse: &RequestProgress, streams: bool, succeeds: bool) {
        pulse.streams.store(streams, Ordering::Relaxed);
        if !streams && succeeds {
            self.moves.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Records since when the server has to send next.
    pub(crate) fn note_waiting(&self, pulse: &RequestProgress, since: Instant) {
        // An event without data or an empty wake-up does not reset the moment.
        if pulse.awaited_since.load(Ordering::Relaxed) == 0 {
            pulse.awaited_since.store(self.micros(since) + 1, Ordering::Relaxed);
        }
    }

    pub(crate) fn note_events(&self, pulse: &RequestProgress, events: u64) {
        if events == 0 {
            return;
        }
        let since = pulse.awaited_since.swap(0, Ordering::Relaxed);
        if pulse.events.fetch_add(events, Ordering::Relaxed) >= BEGUN_EVENTS && since > 0 {
            let gap = self.micros(Instant::now()).saturating_sub(since - 1);
            self.gaps[gap_step(gap)].fetch_add(1, Ordering::Relaxed);
        }
        self.moves.fetch_add(events, Ordering::Relaxed);
    }

    /// Records the begin or end of a request that stops all computing.
    pub(crate) fn note_pause(&self, begins: bool) {
        if begins {
            self.pausing.fetch_add(1, Ordering::Relaxed);
        } else {
            self.pausing.fetch_sub(1, Ordering::Relaxed);
        }
    }

    pub(crate) fn progress_count(&self) -> u64 {
        self.moves.load(Ordering::Relaxed)
    }

    pub(crate) fn set_context(&self, tokens: u64) {
        self.context.store(tokens, Ordering::Relaxed);
    }

    pub(crate) fn awaited_output(&self, forget: Duration) -> AwaitedWork {
        let mut awaited = AwaitedWork::default();
        let prompt = |awaited: &mut AwaitedWork, tokens: u64| {
            awaited.prompt_tokens = awaited.prompt_tokens.saturating_add(tokens);
            awaited.largest_prompt = awaited.largest_prompt.max(tokens);
        };
        for pulse in lock(&self.all).values().filter(|pulse| pulse.is_awaited()) {
            let asked = lock(&pulse.request).clone();
            let Some(asked) = asked.filter(|asked| asked.is_whole()) else { continue };
            if pulse.has_begun() {
                awaited.begun += 1;
                continue;
            }
            if pulse.streams.load(Ordering::Relaxed) {
                awaited.prompts += 1;
            } else {
                awaited.whole += 1;
            }
            prompt(&mut awaited, self.estimate_tokens(pulse));
            awaited.media =
                awaited.media.saturating_add(u32::try_from(asked.media_count()).unwrap_or(u32::MAX));
        }
        let mut left = lock(&self.abandoned);
        left.retain(|(at, _)| at.elapsed() < forget);
        for (_, tokens) in left.iter() {
            awaited.left += 1;
            prompt(&mut awaited, *tokens);
        }
        awaited.media = awaited.media.saturating_add(self.pausing.load(Ordering::Relaxed));
        awaited
    }

    pub(crate) fn gap_stats(&self) -> Option<TokenGaps> {
        let counts: Vec<u64> =
            self.gaps.iter().map(|count| u64::from(count.load(Ordering::Relaxed))).collect();
        let all: u64 = counts.iter().sum();
        let at = |share: u64| {
            let mut left = (all * share).div_ceil(100).max(1);
            counts.iter().enumerate().find_map(|(step, count)| {
                left = left.saturating_sub(*count);
                (left == 0).then(|| Duration::from_micros(step_limit(step)))
            })
        };
        (all > 0).then(|| Some(TokenGaps { middle: at(50)?, most: at(99)? })).flatten()
    }

    /// Estimates the prompt's tokens from the bytes of the request, limited by the context.
    fn estimate_tokens(&self, pulse: &RequestProgress) -> u64 {
        let bytes = lock(&pulse.request).as_ref().map_or(0, |asked| asked.bytes());
        let tokens = units::scale_bytes(bytes, 1.0 / defaults().admission.bytes_per_token);
        match self.context.load(Ordering::Relaxed) {
            0 => tokens,
            context => tokens.min(context),
        }
    }

    pub(super) fn note_received(&self) {
        self.received.store(self.micros(Instant::now()) + 1, Ordering::Relaxed);
    }

    pub(crate) fn received_since(&self, moment: Instant) -> bool {
        self.received.load(Ordering::Relaxed) > self.micros(moment)
    }

    fn micros(&self, at: Instant) -> u64 {
        u64::try_from(at.saturating_duration_since(self.born).as_micros()).unwrap_or(u64::MAX - 1)
    }
}

impl std::fmt::Debug for ProgressTracker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ProgressTracker({} requests)", lock(&self.all).len())
    }
}

/// Histogram step of a pause, with four steps per doubling.
fn gap_step(micros: u64) -> usize {
    let micros = micros.max(4);
    let doublings = micros.ilog2();
    let quarter = (micros >> (doublings - 2)) & 3;
    usize::try_from(u64::from(doublings) * 4 + quarter).unwrap_or(GAP_STEPS).min(GAP_STEPS - 1)
}

/// Longest pause of a step, in microseconds.
fn step_limit(step: usize) -> u64 {
    let doublings = step / 4;
    let quarter = step as u64 % 4;
    ((5 + quarter) << doublings) >> 2
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Text {
        whole: AtomicBool,
        bytes: u64,
    }

    impl SentRequest for Text {
        fn is_whole(&self) -> bool {
            self.whole.load(Ordering::Relaxed)
        }
        fn bytes(&self) -> u64 {
            self.bytes
        }
        fn media_count(&self) -> u64 {
            0
        }
        fn fingerprint(&self) -> Option<RequestFingerprint> {
            None
        }
    }

    fn text(bytes: u64) -> Arc<Text> {
        Arc::new(Text { whole: AtomicBool::new(true), bytes })
    }

    const LONG: Duration = Duration::from_secs(900);

    #[test]
    fn a_step_holds_its_pause_and_is_at_most_a_quarter_wider() {
        for micros in [4, 5, 100, 1000, 48_000, 100_000_000] {
            let upper = step_limit(gap_step(micros));
            assert!(upper >= micros && upper <= micros + micros / 4 + 1, "{micros}: {upper}");
        }
        assert!(gap_step(u64::MAX) < GAP_STEPS && gap_step(0) == gap_step(4));
    }

    #[tokio::test(start_paused = true)]
    async fn who_sends_or_reads_waits_for_nothing_and_who_has_had_a_token_waits_for_the_next() {
        let pulses = ProgressTracker::new();
        let pulse = pulses.begin();
        assert_eq!(pulses.awaited_output(LONG), AwaitedWork::default());
        let body = text(3000);
        body.whole.store(false, Ordering::Relaxed);
        pulses.note_sent(&pulse, body.clone(), true);
        assert_eq!(pulses.awaited_output(LONG).count(), 0, "it is still on its way");
        body.whole.store(true, Ordering::Relaxed);
        let waits =
            AwaitedWork { prompts: 1, prompt_tokens: 1000, largest_prompt: 1000, ..AwaitedWork::default() };
        assert_eq!(pulses.awaited_output(LONG), waits);
        pulses.set_context(512);
        assert_eq!(pulses.awaited_output(LONG).prompt_tokens, 512);
        pulses.note_answered(&pulse, true, true);
        assert_eq!(
            (pulses.progress_count(), pulses.awaited_output(LONG).prompts),
            (0, 1),
            "a head is no work"
        );
        for events in [2, 0, 1, 1] {
            tokio::time::advance(Duration::from_millis(50)).await;
            pulses.note_events(&pulse, events);
            if events > 0 {
                assert_eq!(pulses.awaited_output(LONG).count(), 0, "the client reads");
            }
            pulses.note_waiting(&pulse, Instant::now());
            assert_eq!(pulses.awaited_output(LONG), AwaitedWork { begun: 1, ..AwaitedWork::default() });
        }
        // An event without data did not end the pause before it.
        let gaps = pulses.gap_stats().unwrap();
        assert!(
            gaps.middle >= Duration::from_millis(50) && gaps.most >= Duration::from_millis(100),
            "{gaps:?}"
        );
        assert_eq!(pulses.progress_count(), 4);
        pulses.end(&pulse);
        assert_eq!(pulses.awaited_output(LONG), AwaitedWork::default());
    }

    #[tokio::test(start_paused = true)]
    async fn a_prompt_whose_client_left_counts_for_a_while_and_a_whole_answer_is_a_move() {
        let pulses = ProgressTracker::new();
        let pulse = pulses.begin();
        pulses.note_sent(&pulse, text(300), false);
        assert_eq!(pulses.awaited_output(LONG).whole, 1);
        pulses.end(&pulse);
        let left = AwaitedWork { left: 1, prompt_tokens: 100, largest_prompt: 100, ..AwaitedWork::default() };
        assert_eq!((pulses.awaited_output(LONG), left.count()), (left, 0));
        tokio::time::advance(LONG).await;
        assert_eq!(pulses.awaited_output(LONG), AwaitedWork::default());
        let pulse = pulses.begin();
        pulses.note_sent(&pulse, text(300), false);
        pulses.note_answered(&pulse, false, false);
        assert_eq!(pulses.progress_count(), 0, "a refusal is no work");
        pulses.note_answered(&pulse, false, true);
        assert_eq!(pulses.progress_count(), 1);
    }
}
