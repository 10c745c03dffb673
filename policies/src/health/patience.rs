//! Limits of a server's silence while requests wait, derived from its own token and prompt times instead of
//! one number for all machines. Each [`SilenceLimit`] names its basis, so that people can check it.
//!
//! ```text
//!   all waiting have had a first token ─ progress is reported ── TOKEN_TIME_FACTOR × 99th percentile of token times
//!                                      └ not reported ────────── silent_tokens tokens (a tool call gives few events)
//!   one waits for a first token ──────── progress is reported ── PREFILL_TIME_FACTOR × one batch of the prompt
//!                                      └ not reported ────────── PREFILL_TIME_FACTOR × all waiting prompts
//!   nothing measured yet ─────────────────────────────────────── wedged_after
//!   an answer in one piece, not reported ─────────────────────── wedged_unseen
//! ```
//!
//! llama-server answers `/slots` and `/metrics` in its main loop between two batches, so an answer shows
//! progress of the loop, and silence for longer than a batch shows that the loop is stuck.

use std::collections::VecDeque;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::HealthPolicy;
use crate::units::{as_f64, format_span};

/// Depth in tokens at which attention is estimated to be half of the work; 8,000 to 30,000 for common models.
const ATTENTION_HALF_DEPTH: u64 = 8192;
/// Factor on prompt times: other programs often halve the speed, but do not quarter it.
const PREFILL_TIME_FACTOR: f64 = 4.0;
/// Factor on token times: prompts in other slots and context shifts make single tokens several times slower.
const TOKEN_TIME_FACTOR: f64 = 20.0;

/// Answers that a server owes at one moment, without those whose client does not read or still sends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AwaitedWork {
    /// Number of streams after their first token.
    pub begun: u32,
    /// Number of streams before their first token.
    pub prompts: u32,
    /// Number of answers without streaming.
    pub whole: u32,
    /// Number of prompts of clients that have left, which the server may still be evaluating.
    pub left: u32,
    /// Prompt tokens of all requests that have no token yet.
    pub prompt_tokens: u64,
    /// Tokens of the largest prompt of a request that has no token yet.
    pub largest_prompt: u64,
    /// Images and recordings in these prompts, plus requests that pause computing, such as saving a slot.
    pub media: u32,
}

impl AwaitedWork {
    /// Returns the number of waiting requests.
    pub const fn count(&self) -> u32 {
        self.begun.saturating_add(self.prompts).saturating_add(self.whole)
    }
}

/// Pauses between the tokens of streams so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenGaps {
    /// Median pause.
    pub middle: Duration,
    /// 99th percentile of the pauses.
    pub most: Duration,
}

/// Longest silence of a healthy server, and its basis.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SilenceLimit {
    /// Limit in seconds.
    pub seconds: f64,
    /// Basis of the limit.
    #[serde(flatten)]
    pub basis: LimitBasis,
}

/// Basis of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "basis")]
pub enum LimitBasis {
    /// Pauses between tokens so far.
    Tokens {
        /// 99th percentile of token times, in milliseconds.
        usual_ms: f64,
    },
    /// Token times of a server that does not report progress, and some of whose tokens may cause no event.
    Silent {
        /// Median token time, in milliseconds.
        token_ms: f64,
        /// Number of consecutive tokens that may cause no event.
        tokens: u64,
    },
    /// Prompts that wait for evaluation, and the prompt speed so far.
    Prompt {
        /// Tokens of the batch, or of all waiting prompts.
        tokens: u64,
        /// Milliseconds per token at the depth of these prompts.
        token_ms: f64,
        /// Number of images and recordings that were allowed for.
        media: u32,
    },
    /// No prompt and no token was measured yet.
    Unmeasured,
    /// The server answers queries, but its computation makes no progress.
    Unmoved,
    /// An answer without streaming, from a server that does not report progress.
    Unseen,
}

impl std::fmt::Display for SilenceLimit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let limit = Duration::try_from_secs_f64(self.seconds).unwrap_or(Duration::MAX);
        write!(f, "the limit is {}", format_span(limit))?;
        match self.basis {
            LimitBasis::Tokens { usual_ms } => {
                write!(f, ", because 99 of 100 tokens so far came within {usual_ms:.0} ms")
            }
            LimitBasis::Silent { token_ms, tokens } => write!(
                f,
                ", because {tokens} tokens of {token_ms:.0} ms each may give no event, and this server cannot be asked \
                 how far it is (`--slots` or `--metrics`)"
            ),
            LimitBasis::Prompt { tokens, token_ms, media } => {
                write!(f, ", because {tokens} tokens of prompt take {token_ms:.2} ms each at the speed so far")?;
                if media > 0 { write!(f, ", and {media} images or recordings were allowed for") } else { Ok(()) }
            }
            LimitBasis::Unmeasured => f.write_str(", because its speed is not known yet"),
            LimitBasis::Unmoved => f.write_str(" for a server that answers questions and computes nothing"),
            LimitBasis::Unseen => f.write_str(
                ", because the answer comes in one piece and this server cannot be asked how far it is (`--slots` or \
                 `--metrics`)",
            ),
        }
    }
}

#[derive(Clone, Debug, Default)]
pub(super) struct PromptPace {
    /// Seconds per token of the latest prompts, converted to depth 0.
    prompts: VecDeque<f64>,
}

/// Number of remembered prompts, so that a single outlier has no effect.
const PROMPTS_KEPT: usize = 32;
/// Least tokens that a prompt counts as: fewer take as long, because the server reads the whole model anyway.
const PRICED_TOKENS_LEAST: u64 = 64;

impl PromptPace {
    pub(super) fn record_prompt(&mut self, new: u64, all: u64, ms: f64) {
        if new == 0 || !ms.is_finite() || ms <= 0.0 {
            return;
        }
        // New tokens follow the cached ones, so their average depth is that of the middle new token.
        let depth = all.max(new) - new / 2;
        let price = ms / 1000.0 / as_f64(new.max(PRICED_TOKENS_LEAST)) / slowdown(depth);
        if self.prompts.len() == PROMPTS_KEPT {
            self.prompts.pop_front();
        }
        self.prompts.push_back(price);
    }

    fn price(&self) -> Option<f64> {
        let mut prices: Vec<f64> = self.prompts.iter().copied().collect();
        prices.sort_by(f64::total_cmp);
        prices.get(prices.len() * 9 / 10).copied()
    }

    /// Returns the longest silence of a healthy server. `told`: the server reports progress; `wake`: time of
    /// a reload.
    pub(super) fn limit(
        &self,
        awaited: &AwaitedWork,
        gaps: Option<TokenGaps>,
        told: bool,
        wake: Duration,
        policy: &HealthPolicy,
    ) -> SilenceLimit {
        let of_tokens = gaps.map(|gaps| token_gap_limit(gaps, told, policy));
        if awaited.prompts == 0 && awaited.whole == 0 && awaited.left == 0 && awaited.media == 0 {
            return of_tokens.unwrap_or(SilenceLimit {
                seconds: policy.wedged_after.as_secs_f64(),
                basis: LimitBasis::Unmeasured,
            });
        }
        // A batch may contain both prompts and tokens, so both limits apply.
        let of_prompts = self.prompt_limit(awaited, told, wake, policy);
        let of_tokens = of_tokens.filter(|_| awaited.begun > 0 || told && awaited.whole > 0);
        match of_tokens {
            Some(of_tokens) if of_tokens.seconds > of_prompts.seconds => of_tokens,
            _ => of_prompts,
        }
    }

    fn prompt_limit(
        &self,
        awaited: &AwaitedWork,
        told: bool,
        wake: Duration,
        policy: &HealthPolicy,
    ) -> SilenceLimit {
        let wake = wake.as_secs_f64();
        // Media are processed one after another; a server that reports progress shows the end of each.
        let media = if told { awaited.media.min(1) } else { awaited.media };
        let pictures = policy.media_patience.as_secs_f64() * f64::from(media);
        if awaited.whole > 0 && !told {
            let seconds = policy.wedged_unseen.as_secs_f64() + wake;
            return SilenceLimit { seconds, basis: LimitBasis::Unseen };
        }
        let Some(price) = self.price() else {
            let seconds = policy.wedged_after.as_secs_f64() + pictures + wake;
            return SilenceLimit { seconds, basis: LimitBasis::Unmeasured };
        };
        let tokens =
            if told { awaited.prompt_tokens.min(policy.prefill_step) } else { awaited.prompt_tokens };
        let price = price * slowdown(awaited.largest_prompt);
        let seconds = (PREFILL_TIME_FACTOR * as_f64(tokens.max(PRICED_TOKENS_LEAST)) * price)
            .max(policy.prefill_least.as_secs_f64());
        let basis = LimitBasis::Prompt { tokens, token_ms: price * 1000.0, media };
        SilenceLimit { seconds: seconds + pictures + wake, basis }
    }
}

fn token_gap_limit(gaps: TokenGaps, told: bool, policy: &HealthPolicy) -> SilenceLimit {
    let usual = gaps.most.as_secs_f64();
    let seconds = (TOKEN_TIME_FACTOR * usual).max(policy.token_least.as_secs_f64());
    if told {
        return SilenceLimit { seconds, basis: LimitBasis::Tokens { usual_ms: usual * 1000.0 } };
    }
    let token = gaps.middle.as_secs_f64();
    let silent = (as_f64(policy.silent_tokens) * token).max(policy.silent_least.as_secs_f64());
    let basis = LimitBasis::Silent { token_ms: token * 1000.0, tokens: policy.silent_tokens };
    SilenceLimit { seconds: seconds.max(silent), basis }
}

/// Returns the factor by which a token costs more at a depth: attention reads all earlier tokens.
fn slowdown(depth: u64) -> f64 {
    1.0 + as_f64(depth) / as_f64(ATTENTION_HALF_DEPTH)
}
