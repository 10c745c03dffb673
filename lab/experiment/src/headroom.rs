//! Predicts if the largest prompts fit into memory, from prompts of several lengths.
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
//! llama-server allocates buffers for the largest prompt so far and keeps them, so a length costs the highest
//! value measured up to that length. Between measured lengths the curve is linear. Beyond the longest, the
//! curve keeps the slope of its upper half, or follows a pool of outgrown buffers if that fits far better.

use serde::{Deserialize, Serialize};

mod beyond;

use self::beyond::{continuation, hoarded_tokens};
use warden_policies::admission::PromptPrice;
use warden_policies::defaults;
use warden_policies::sample::MemoryKind;
use warden_policies::units::{ByteSize, as_f64, truncate_to_u64};

/// Smallest micro-batch that is suggested; below it prompt evaluation is hardly faster than decoding.
const MIN_UBATCH: u64 = 32;

/// Peak of one kind of memory with prompts of one length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PromptPeak {
    /// Tokens of each prompt.
    pub tokens: u64,
    /// Number of concurrent prompts.
    pub together: u32,
    /// Peak bytes of the process.
    pub bytes: u64,
}

/// Settings of the server during the measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerSetup {
    /// `-c`: tokens of context of all slots together.
    pub context: u64,
    /// Number of slots.
    pub slots: u32,
    /// Longest prompt of one slot, in tokens.
    pub slot_context: u64,
    /// Tokens of context that `-c` gives to one prompt, if reported; a slot has less if the model was trained
    /// with less.
    #[serde(default)]
    pub sequence_context: Option<u64>,
    /// `-ub`: tokens per micro-batch.
    pub ubatch: u64,
}

impl ServerSetup {
    /// Returns the tokens of each prompt when all slots are full.
    pub fn full_slot(&self) -> u64 {
        (self.context / u64::from(self.slots.max(1))).min(self.slot_context)
    }

    /// Returns the longest prompt of one slot with another `-c`, in tokens.
    fn slot_context_with(&self, context: u64) -> u64 {
        let Self { slot_context: slot, context: all, .. } = *self;
        match self.sequence_context {
            _ if all == 0 => context,
            Some(sequence) => slot.min(scale_ratio(sequence, context, all)),
            None if slot >= all => context,
            // The slot's context is a share of `-c` or a fixed limit: assume the larger result.
            None => slot.min(context),
        }
    }
}

/// Memory needed by a prompt, as a function of its length.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PromptCurve {
    /// Kind of memory that the curve describes.
    pub series: MemoryKind,
    /// Bytes of the process before the first prompt.
    pub idle: u64,
    /// Prompt lengths in ascending order, each with the bytes above `idle` for one such prompt.
    points: Vec<(u64, f64)>,
    /// Length of the concurrent prompts, and the extra bytes for each prompt after the first.
    more: Option<(u64, f64)>,
    ubatch: u64,
    /// Slope beyond the longest prompt: bytes per token, plus bytes per token of [`hoarded_tokens`].
    beyond: (f64, f64),
}

impl PromptCurve {
    /// Builds the curve from peaks; `None` without a peak of a single prompt.
    pub fn from_peaks(
        series: MemoryKind,
        idle: u64,
        peaks: &[PromptPeak],
        setup: &ServerSetup,
    ) -> Option<Self> {
        let mut points: Vec<(u64, f64)> = Vec::new();
        let mut alone: Vec<&PromptPeak> = peaks.iter().filter(|peak| peak.together <= 1).collect();
        alone.sort_by_key(|peak| peak.tokens);
        for peak in alone {
            // Buffers are kept, so a longer prompt never needs less than a shorter one.
            let before = points.last().map_or(0.0, |(_, bytes)| *bytes);
            let bytes = as_f64(peak.bytes.saturating_sub(idle)).max(before);
            match points.last_mut() {
                Some(last) if last.0 == peak.tokens => last.1 = bytes,
                _ => points.push((peak.tokens, bytes)),
            }
        }
        let beyond = continuation(&points, setup.ubatch)?;
        let mut curve = Self { series, idle, points, more: None, ubatch: setup.ubatch, beyond };
        let most = peaks.iter().filter(|peak| peak.together > 1);
        curve.more = most.max_by_key(|peak| (peak.together, peak.tokens)).map(|peak| {
            let others = f64::from(peak.together - 1);
            let above = as_f64(peak.bytes.saturating_sub(idle)) - curve.above_idle(peak.tokens);
            (peak.tokens, (above / others).max(0.0))
        });
        Some(curve)
    }

    /// Returns the measured prompt lengths with their bytes above `idle`.
    pub fn points(&self) -> &[(u64, f64)] {
        &self.points
    }

    /// Returns a curve from prompts of at most `tokens`, to compare its prediction with longer prompts.
    #[must_use]
    pub fn truncated_at(&self, tokens: u64) -> Option<Self> {
        let points: Vec<_> = self.points.iter().copied().filter(|(own, _)| *own <= tokens).collect();
        let beyond = continuation(&points, self.ubatch)?;
        Some(Self { points, more: None, beyond, ..self.clone() })
    }

    /// Returns the predicted bytes per token of the next quarter beyond the longest measured prompt.
    pub(crate) fn end_slope(&self) -> f64 {
        let longest = self.points.last().map_or(0, |(tokens, _)| *tokens);
        let more = (longest / 4).max(1);
        (self.above_idle(longest + more) - self.above_idle(longest)) / as_f64(more)
    }

    /// Returns the bytes that admission reserves per token above the largest prompt so far: the steepest
    /// stretch of at least a quarter of the longest length. The first micro-batch is left out, because the
    /// first requests of every process pay for it.
    pub fn price(&self) -> PromptPrice {
        let longest = self.points.last().map_or(0, |(tokens, _)| *tokens);
        let above: Vec<(u64, f64)> =
            self.points.iter().copied().filter(|(tokens, _)| *tokens > self.ubatch).collect();
        let steepest = slopes(&above, longest / 4).into_iter().fold(0.0, f64::max);
        PromptPrice {
            series: self.series,
            bytes_per_token: steepest.max(self.end_slope()),
            evidence: self.points.len(),
        }
    }

    /// Returns the extra bytes of the first prompt longer than a micro-batch; `None` without such a step.
    pub fn step(&self) -> Option<u64> {
        let below = self.points.iter().rfind(|(tokens, _)| *tokens <= self.ubatch)?;
        let above = self.points.iter().find(|(tokens, _)| *tokens > self.ubatch)?;
        let tokens = as_f64(above.0 - below.0);
        let step = above.1 - below.1 - tokens * self.price().bytes_per_token;
        (step > 0.0).then(|| round_bytes(step))
    }

    pub(crate) fn above_idle(&self, tokens: u64) -> f64 {
        let mut before = (0, 0.0);
        for point in &self.points {
            if tokens <= point.0 {
                let share = as_f64(tokens - before.0) / as_f64((point.0 - before.0).max(1));
                return before.1 + share * (point.1 - before.1);
            }
            before = *point;
        }
        let (token, buffer) = self.beyond;
        let more = if buffer > 0.0 {
            hoarded_tokens(tokens, self.ubatch) - hoarded_tokens(before.0, self.ubatch)
        } else {
            0.0
        };
        before.1 + token * as_f64(tokens - before.0) + buffer * more
    }

    /// Returns the process's bytes with this many concurrent prompts of this length.
    pub fn bytes_at(&self, tokens: u64, together: u32) -> u64 {
        let others = as_f64(u64::from(together.max(1) - 1));
        let more = self.more.map_or(0.0, |(measured, bytes)| {
            // Attention reads the cache of each concurrent prompt, which costs in proportion to its length.
            bytes * as_f64(tokens) / as_f64(measured.max(1))
        });
        self.idle.saturating_add(round_bytes(self.above_idle(tokens) + others * more))
    }

    /// Returns the worst case in bytes: a single prompt of greatest length, or all slots full.
    pub fn worst_case(&self, setup: &ServerSetup) -> u64 {
        self.bytes_at(setup.slot_context, 1).max(self.bytes_at(setup.full_slot(), setup.slots))
    }

    fn worst_with(&self, setup: &ServerSetup, context: u64) -> u64 {
        let slot_context = setup.slot_context_with(context);
        let sequence_context =
            setup.sequence_context.map(|sequence| scale_ratio(sequence, context, setup.context.max(1)));
        self.worst_case(&ServerSetup { context, slot_context, sequence_context, ..*setup })
    }
}

/// Verdict on the worst case of one kind of memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HeadroomVerdict {
    /// Kind of memory that the verdict is about.
    pub series: MemoryKind,
    /// Bytes of the process before the first prompt.
    pub idle: u64,
    /// Worst case in bytes.
    pub worst: u64,
    /// Limit in bytes: the process's memory plus free memory, less the reserve; `None` if unknown.
    pub limit: Option<u64>,
    /// Tokens of context in the worst case.
    pub context: u64,
    /// Largest `-c` that fits; `None` if the present `-c` fits, or no value does.
    pub smaller_context: Option<u64>,
    /// Largest `-ub` that fits; `None` if the present `-ub` fits, or no smaller value is known to fit.
    pub smaller_ubatch: Option<u64>,
    /// Bytes per token of context before any prompt, mostly KV cache; `None` if not measured.
    #[serde(default)]
    pub context_token: Option<f64>,
    /// Bytes per prompt token.
    pub price: PromptPrice,
    /// Bytes that the first prompt longer than a micro-batch adds once.
    pub step: Option<u64>,
}

fn headroom_config() -> &'static defaults::Headroom {
    &defaults().diagnose.headroom
}

/// Compares the worst case with the limit. `smaller` is the curve with a smaller micro-batch, and its size;
/// `context_token` is the measured bytes per token of context before any prompt.
pub fn judge(
    curve: &PromptCurve,
    setup: &ServerSetup,
    limit: Option<u64>,
    smaller: Option<(&PromptCurve, u64)>,
    context_token: Option<f64>,
) -> HeadroomVerdict {
    let worst = curve.worst_case(setup);
    let mut verdict = HeadroomVerdict {
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
    let step = previous_power_of_two(setup.context / headroom_config().context_steps)
        .max(headroom_config().context_grain);
    let mut context = setup.context.saturating_sub(1) / step * step;
    // A smaller context limits the prompts and needs less memory itself.
    let with = |context: u64| {
        let saved = context_token.unwrap_or(0.0) * as_f64(setup.context - context);
        curve.worst_with(setup, context).saturating_sub(round_bytes(saved))
    };
    while context >= step && with(context) > limit {
        context -= step;
    }
    verdict.smaller_context = (context >= step).then_some(context);
    if let Some((other, ubatch)) = smaller
        && ubatch < setup.ubatch
    {
        // Between two measured micro-batch sizes, and below the smaller one, memory is linear in the size.
        let (there, here) = (as_f64(other.worst_case(setup)), as_f64(worst));
        let slope = (here - there) / as_f64(setup.ubatch - ubatch);
        let mut size = previous_power_of_two(setup.ubatch - 1);
        while size >= MIN_UBATCH {
            if slope > 0.0 && here - slope * as_f64(setup.ubatch - size) <= as_f64(limit) {
                verdict.smaller_ubatch = Some(size);
                break;
            }
            size /= 2;
        }
    }
    verdict
}

impl HeadroomVerdict {
    /// Returns the missing bytes; 0 if the worst case fits or no limit is known.
    pub fn missing_bytes(&self) -> u64 {
        self.limit.map_or(0, |limit| self.worst.saturating_sub(limit))
    }

    /// Returns true if the worst case fits; `None` if no limit is known.
    pub fn fits(&self) -> Option<bool> {
        self.limit.map(|limit| self.worst <= limit)
    }

    /// Returns the verdict as one sentence.
    pub fn sentence(&self) -> String {
        let context = grouped(self.context);
        let worst = ByteSize(self.worst);
        match (self.limit, self.missing_bytes()) {
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

/// Formats a number with thousands separators: `57,344`.
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

fn slopes(points: &[(u64, f64)], apart: u64) -> Vec<f64> {
    let mut slopes = Vec::new();
    for (at, early) in points.iter().enumerate() {
        for late in &points[at + 1..] {
            let tokens = late.0 - early.0;
            if tokens >= apart.max(1) {
                slopes.push((late.1 - early.1) / as_f64(tokens));
            }
        }
    }
    slopes
}

/// Returns `value × part ÷ whole`, without overflow.
fn scale_ratio(value: u64, part: u64, whole: u64) -> u64 {
    let product = u128::from(value) * u128::from(part) / u128::from(whole.max(1));
    u64::try_from(product).unwrap_or(u64::MAX)
}

fn previous_power_of_two(number: u64) -> u64 {
    number.checked_ilog2().map_or(0, |log| 1 << log)
}

fn round_bytes(value: f64) -> u64 {
    truncate_to_u64(value.round())
}

#[cfg(test)]
#[path = "headroom_tests.rs"]
mod tests;
