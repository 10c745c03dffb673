//! Whether the largest prompts fit: what prompts of some lengths took, what the worst case will take, what would fit.
//!
//! ```text
//!  bytes above idle                          . ' predicted worst case: all slots full
//!                                     _ . '|
//!                              _ . '       |  bytes per token
//!              . - - ' ' - - '
//!   _ _ _ _ _ /  step: the second micro-batch of a prompt
//!  ───────────┼────────────────────────────┼──> tokens
//!           ubatch                     slot's context
//! ```
//!
//! llama-server takes buffers for the largest prompt so far and keeps them, so the highest figure so far is what a prompt
//! of a length takes. Between measured lengths the curve is a line. Beyond the longest it goes on as steeply as the upper
//! half of what was measured, or, where that explains the measurements far better, like a pool that keeps every buffer that
//! became too small. Nothing here measures.

use serde::{Deserialize, Serialize};

mod beyond;

use self::beyond::{beyond, hoarded};
use warden_policies::admission::Price;
use warden_policies::defaults;
use warden_policies::sample::MemoryKind;
use warden_policies::units::{ByteSize, exact, whole};

/// Below this prefill is hardly faster than decoding.
const MIN_UBATCH: u64 = 32;

/// What prompts of one length took of one memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Peak {
    /// Tokens of each prompt.
    pub tokens: u64,
    /// Prompts at a time.
    pub together: u32,
    /// The most bytes that the process held meanwhile.
    pub bytes: u64,
}

/// How the server was set up while that was measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setup {
    /// `-c`: tokens of context in all slots together.
    pub context: u64,
    /// Slots.
    pub slots: u32,
    /// The longest prompt of one slot, in tokens.
    pub slot_context: u64,
    /// What `-c` gives to one prompt; a slot's context is less where the model was trained on less. `None` if not told.
    #[serde(default)]
    pub sequence_context: Option<u64>,
    /// `-ub`: tokens of a micro-batch.
    pub ubatch: u64,
}

impl Setup {
    /// Tokens of each prompt when all slots are as full as they can be at the same time.
    pub fn full_slot(&self) -> u64 {
        (self.context / u64::from(self.slots.max(1))).min(self.slot_context)
    }

    /// The longest prompt of one slot with another `-c`, in tokens. What the model was trained on stays a limit.
    fn slot_context_with(&self, context: u64) -> u64 {
        let Self { slot_context: slot, context: all, .. } = *self;
        match self.sequence_context {
            _ if all == 0 => context,
            Some(sequence) => slot.min(scaled(sequence, context, all)),
            None if slot >= all => context,
            // A share, a limit, or both: the larger of what it may become.
            None => slot.min(context),
        }
    }
}

/// What prompts take of one memory, by their length.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Curve {
    /// Which memory.
    pub series: MemoryKind,
    /// Bytes of the process before the first prompt.
    pub idle: u64,
    /// Lengths in ascending order, and the bytes above idle that such a prompt takes, alone.
    points: Vec<(u64, f64)>,
    /// Bytes more for each further prompt at the same time, and the length at which that was measured.
    more: Option<(u64, f64)>,
    ubatch: u64,
    /// How it goes on beyond the longest prompt: bytes for each token, and for each token of [`hoarded`].
    beyond: (f64, f64),
}

impl Curve {
    /// From what was measured. `None` if no prompt alone was.
    pub fn of(series: MemoryKind, idle: u64, peaks: &[Peak], setup: &Setup) -> Option<Self> {
        let mut points: Vec<(u64, f64)> = Vec::new();
        let mut alone: Vec<&Peak> = peaks.iter().filter(|peak| peak.together <= 1).collect();
        alone.sort_by_key(|peak| peak.tokens);
        for peak in alone {
            // Memory is kept, so a longer prompt never needs less.
            let before = points.last().map_or(0.0, |(_, bytes)| *bytes);
            let bytes = exact(peak.bytes.saturating_sub(idle)).max(before);
            match points.last_mut() {
                Some(last) if last.0 == peak.tokens => last.1 = bytes,
                _ => points.push((peak.tokens, bytes)),
            }
        }
        let beyond = beyond(&points, setup.ubatch)?;
        let mut curve = Self { series, idle, points, more: None, ubatch: setup.ubatch, beyond };
        let most = peaks.iter().filter(|peak| peak.together > 1);
        curve.more = most.max_by_key(|peak| (peak.together, peak.tokens)).map(|peak| {
            let others = f64::from(peak.together - 1);
            let above = exact(peak.bytes.saturating_sub(idle)) - curve.above_idle(peak.tokens);
            (peak.tokens, (above / others).max(0.0))
        });
        Some(curve)
    }

    /// Lengths of prompts and what they took above idle, in bytes.
    pub fn points(&self) -> &[(u64, f64)] {
        &self.points
    }

    /// The same as if no longer prompt than this had been measured: for holding a prediction against what came.
    #[must_use]
    pub fn up_to(&self, tokens: u64) -> Option<Self> {
        let points: Vec<_> = self.points.iter().copied().filter(|(own, _)| *own <= tokens).collect();
        let beyond = beyond(&points, self.ubatch)?;
        Some(Self { points, more: None, beyond, ..self.clone() })
    }

    /// Bytes for each token of a prompt that is a quarter longer than the longest that was measured.
    pub(crate) fn end_slope(&self) -> f64 {
        let longest = self.points.last().map_or(0, |(tokens, _)| *tokens);
        let more = (longest / 4).max(1);
        (self.above_idle(longest + more) - self.above_idle(longest)) / exact(more)
    }

    /// What each token of a prompt beyond the largest so far costs at most, for weighing prompts before they are sent: the
    /// steepest stretch of a quarter of the length or more, the first micro-batch left out, which the first requests of
    /// any process pay.
    pub fn price(&self) -> Price {
        let longest = self.points.last().map_or(0, |(tokens, _)| *tokens);
        let above: Vec<(u64, f64)> =
            self.points.iter().copied().filter(|(tokens, _)| *tokens > self.ubatch).collect();
        let steepest = slopes(&above, longest / 4).into_iter().fold(0.0, f64::max);
        Price {
            series: self.series,
            bytes_per_token: steepest.max(self.end_slope()),
            evidence: self.points.len(),
        }
    }

    /// The bytes by which the first prompt of more than one micro-batch is above the last one of a single micro-batch,
    /// less what its tokens cost; `None` if that was not measured, or there is no such step.
    pub fn step(&self) -> Option<u64> {
        let below = self.points.iter().rfind(|(tokens, _)| *tokens <= self.ubatch)?;
        let above = self.points.iter().find(|(tokens, _)| *tokens > self.ubatch)?;
        let tokens = exact(above.0 - below.0);
        let step = above.1 - below.1 - tokens * self.price().bytes_per_token;
        (step > 0.0).then(|| rounded(step))
    }

    /// Bytes above idle that one prompt of this length takes.
    pub(crate) fn above_idle(&self, tokens: u64) -> f64 {
        let mut before = (0, 0.0);
        for point in &self.points {
            if tokens <= point.0 {
                let share = exact(tokens - before.0) / exact((point.0 - before.0).max(1));
                return before.1 + share * (point.1 - before.1);
            }
            before = *point;
        }
        let (token, buffer) = self.beyond;
        let more =
            if buffer > 0.0 { hoarded(tokens, self.ubatch) - hoarded(before.0, self.ubatch) } else { 0.0 };
        before.1 + token * exact(tokens - before.0) + buffer * more
    }

    /// Bytes that the process holds with so many prompts of this length at the same time.
    pub fn at(&self, tokens: u64, together: u32) -> u64 {
        let others = exact(u64::from(together.max(1) - 1));
        let more = self.more.map_or(0.0, |(measured, bytes)| {
            // What further prompts take is in proportion to their length: their part of the cache that is looked at.
            bytes * exact(tokens) / exact(measured.max(1))
        });
        self.idle.saturating_add(rounded(self.above_idle(tokens) + others * more))
    }

    /// The most bytes that the process can hold: the longest prompt alone, or all slots full.
    pub fn worst(&self, setup: &Setup) -> u64 {
        self.at(setup.slot_context, 1).max(self.at(setup.full_slot(), setup.slots))
    }

    /// The worst case with another `-c`.
    fn worst_with(&self, setup: &Setup, context: u64) -> u64 {
        let slot_context = setup.slot_context_with(context);
        let sequence_context =
            setup.sequence_context.map(|sequence| scaled(sequence, context, setup.context.max(1)));
        self.worst(&Setup { context, slot_context, sequence_context, ..*setup })
    }
}

/// Whether the worst case fits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// Which memory.
    pub series: MemoryKind,
    /// Bytes of the process before the first prompt.
    pub idle: u64,
    /// The most bytes that the process can hold.
    pub worst: u64,
    /// The most bytes that it may hold: what it held, and what was free beside it, less the reserve; `None` if not known.
    pub limit: Option<u64>,
    /// Tokens of context with which that worst case is.
    pub context: u64,
    /// The largest `-c` that would fit; `None` if the present one does, or none would.
    pub smaller_context: Option<u64>,
    /// The largest `-ub` that would fit; likewise, and `None` where smaller micro-batches were not measured.
    pub smaller_ubatch: Option<u64>,
    /// Bytes that each token of context takes before any prompt, most of them the KV cache; `None` where that was not
    /// measured.
    #[serde(default)]
    pub context_token: Option<f64>,
    /// Bytes for each prompt token.
    pub price: Price,
    /// Bytes that the second micro-batch of a prompt takes once.
    pub step: Option<u64>,
}

/// The numbers. Reasons: `defaults.toml`, section `[diagnose.headroom]`.
fn numbers() -> &'static defaults::Headroom {
    &defaults().diagnose.headroom
}

/// Holds the worst case against what may be held. `smaller`: the same measured with smaller micro-batches, and those.
/// `context_token`: bytes that each token of context takes before any prompt, where that was measured.
pub fn judge(
    curve: &Curve,
    setup: &Setup,
    limit: Option<u64>,
    smaller: Option<(&Curve, u64)>,
    context_token: Option<f64>,
) -> Verdict {
    let worst = curve.worst(setup);
    let mut verdict = Verdict {
        series: curve.series,
        idle: curve.idle,
        worst,
        limit,
        context: setup.context,
        smaller_context: None,
        smaller_ubatch: None,
        context_token,
        price: curve.price(),
        step: curve.step(),
    };
    let Some(limit) = limit.filter(|limit| *limit < worst) else { return verdict };
    let step = previous_power_of_two(setup.context / numbers().context_steps).max(numbers().context_grain);
    let mut context = setup.context.saturating_sub(1) / step * step;
    // A smaller context makes prompts shorter, and what holds it smaller.
    let with = |context: u64| {
        let saved = context_token.unwrap_or(0.0) * exact(setup.context - context);
        curve.worst_with(setup, context).saturating_sub(rounded(saved))
    };
    while context >= step && with(context) > limit {
        context -= step;
    }
    verdict.smaller_context = (context >= step).then_some(context);
    if let Some((other, ubatch)) = smaller
        && ubatch < setup.ubatch
    {
        // Between two measured sizes, and below the smaller one, what a micro-batch takes is in proportion to it.
        let (there, here) = (exact(other.worst(setup)), exact(worst));
        let slope = (here - there) / exact(setup.ubatch - ubatch);
        let mut size = previous_power_of_two(setup.ubatch - 1);
        while size >= MIN_UBATCH {
            if slope > 0.0 && here - slope * exact(setup.ubatch - size) <= exact(limit) {
                verdict.smaller_ubatch = Some(size);
                break;
            }
            size /= 2;
        }
    }
    verdict
}

impl Verdict {
    /// Bytes that are missing; 0 if it fits or nothing is known of a limit.
    pub fn short(&self) -> u64 {
        self.limit.map_or(0, |limit| self.worst.saturating_sub(limit))
    }

    /// Whether it fits; `None` if nothing is known of a limit.
    pub fn fits(&self) -> Option<bool> {
        self.limit.map(|limit| self.worst <= limit)
    }

    /// All of it in one sentence.
    pub fn sentence(&self) -> String {
        let context = grouped(self.context);
        let worst = ByteSize(self.worst);
        match (self.limit, self.short()) {
            (None, _) => format!("needs {worst} at {context} tokens; what is free is not known"),
            (Some(limit), 0) => {
                let left = ByteSize(limit - self.worst);
                format!("fits: needs {worst} at {context} tokens, and {left} more would be free")
            }
            (Some(_), short) => {
                let mut ways: Vec<String> = Vec::new();
                ways.extend(self.smaller_context.map(|tokens| format!("-c to {}", grouped(tokens))));
                ways.extend(self.smaller_ubatch.map(|tokens| format!("-ub to {}", grouped(tokens))));
                let advice = match (ways.is_empty(), self.context_token) {
                    (false, _) => format!("lower {}", ways.join(" or ")),
                    (true, Some(_)) => {
                        "no smaller -c would do: the model itself has to be smaller, or in part elsewhere"
                            .to_owned()
                    }
                    (true, None) => {
                        "shorter prompts alone would not do, and what a smaller -c would free is not known"
                            .to_owned()
                    }
                };
                format!("will not fit: needs {} more at {context} tokens; {advice}", ByteSize(short))
            }
        }
    }
}

/// A number with a comma before every third digit from the end: `57,344`.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Bytes per token between all pairs of points that are at least so many tokens apart.
fn slopes(points: &[(u64, f64)], apart: u64) -> Vec<f64> {
    let mut slopes = Vec::new();
    for (at, early) in points.iter().enumerate() {
        for late in &points[at + 1..] {
            let tokens = late.0 - early.0;
            if tokens >= apart.max(1) {
                slopes.push((late.1 - early.1) / exact(tokens));
            }
        }
    }
    slopes
}

/// `value × part ÷ whole`, without overflow.
fn scaled(value: u64, part: u64, whole: u64) -> u64 {
    let product = u128::from(value) * u128::from(part) / u128::from(whole.max(1));
    u64::try_from(product).unwrap_or(u64::MAX)
}

/// The largest power of two that is not above the number; 0 for 0.
fn previous_power_of_two(number: u64) -> u64 {
    number.checked_ilog2().map_or(0, |log| 1 << log)
}

/// The nearest whole number of bytes; never below zero.
fn rounded(value: f64) -> u64 {
    whole(value.round())
}

#[cfg(test)]
#[path = "headroom_tests.rs"]
mod tests;
