//! How long a server may be silent while somebody waits for it: by what its tokens and prompts took so far, never by one
//! number for all machines. What was measured and what follows from it is in the [`Limit`], for people to check.
//!
//! ```text
//!   all who wait have had a first token ── it can be asked ── token_factor × what 99 of 100 tokens took
//!                                       └─ it cannot ──────── silent_tokens tokens (a tool call gives few events)
//!   somebody waits for a first token ───── it can be asked ── prefill_factor × one batch of the prompt
//!                                       └─ it cannot ──────── prefill_factor × all that waits
//!   nothing was measured yet ───────────────────────────────── wedged_after
//!   a whole answer, and it cannot be asked ─────────────────── wedged_unseen
//! ```
//!
//! "Can be asked" means `/slots` or `/metrics`: llama-server answers them between two batches, from the same loop that
//! computes, so an answer shows that the loop turns and no answer for longer than a batch takes shows that it does not.

use std::collections::VecDeque;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::HealthPolicy;
use crate::units::{exact, span};

/// An estimate: with common models attention is half of the work after 8,000 to 30,000 tokens, and the lower is the
/// careful side.
const ATTENTION_HALF_DEPTH: u64 = 8192;
/// Half of the speed is common where neighbours share a processor; a quarter is not.
const PREFILL_TIME_FACTOR: f64 = 4.0;
/// A prompt of another slot, a shift of the context or a saved cache make single tokens several times slower, not
/// twenty times.
const TOKEN_TIME_FACTOR: f64 = 20.0;

/// What a server owes at one moment: requests that were sent whole and whose next word is the server's. A client that does
/// not read, or is still sending, waits for nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Awaited {
    /// Streams that have had their first token.
    pub begun: u32,
    /// Streams that have not.
    pub prompts: u32,
    /// Answers that come in one piece.
    pub whole: u32,
    /// Prompts whose clients have left, and with which the server may go on all the same. Nobody waits for them.
    pub left: u32,
    /// Tokens of the prompts of those that have had no token yet, all together.
    pub prompt_tokens: u64,
    /// Tokens of the largest of them.
    pub largest_prompt: u64,
    /// Images and recordings of them, and requests for which the server stops computing, as saving a slot: all together.
    pub media: u32,
}

impl Awaited {
    /// Requests that wait.
    pub const fn count(&self) -> u32 {
        self.begun.saturating_add(self.prompts).saturating_add(self.whole)
    }
}

/// What the pauses between the tokens of one stream were so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gaps {
    /// Half of them were at most this long.
    pub middle: Duration,
    /// 99 of 100 were at most this long.
    pub most: Duration,
}

/// The longest silence that is still sound, and how it was computed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Limit {
    /// Seconds.
    pub seconds: f64,
    /// What it follows from.
    #[serde(flatten)]
    pub basis: Basis,
}

/// What a limit follows from.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "basis")]
pub enum Basis {
    /// Pauses between tokens so far.
    Tokens {
        /// What 99 of 100 tokens took, in milliseconds.
        usual_ms: f64,
    },
    /// The same where the server cannot be asked: so many tokens may give no event.
    Silent {
        /// What half of the tokens took, in milliseconds.
        token_ms: f64,
        /// Tokens.
        tokens: u64,
    },
    /// Prompts and the speed at which prompts were evaluated so far.
    Prompt {
        /// Tokens of the batch, or of all prompts that wait.
        tokens: u64,
        /// Milliseconds for one token at the depth of these prompts.
        token_ms: f64,
        /// Images and recordings that were allowed for.
        media: u32,
    },
    /// No prompt and no token was measured yet.
    Unmeasured,
    /// The server answers questions, and nothing is computed.
    Unmoved,
    /// An answer that comes in one piece, from a server that cannot be asked.
    Unseen,
}

impl std::fmt::Display for Limit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let limit = Duration::try_from_secs_f64(self.seconds).unwrap_or(Duration::MAX);
        write!(f, "the limit is {}", span(limit))?;
        match self.basis {
            Basis::Tokens { usual_ms } => {
                write!(f, ", because 99 of 100 tokens so far came within {usual_ms:.0} ms")
            }
            Basis::Silent { token_ms, tokens } => write!(
                f,
                ", because {tokens} tokens of {token_ms:.0} ms each may give no event, and this server cannot be asked \
                 how far it is (`--slots` or `--metrics`)"
            ),
            Basis::Prompt { tokens, token_ms, media } => {
                write!(f, ", because {tokens} tokens of prompt take {token_ms:.2} ms each at the speed so far")?;
                if media > 0 { write!(f, ", and {media} images or recordings were allowed for") } else { Ok(()) }
            }
            Basis::Unmeasured => f.write_str(", because its speed is not known yet"),
            Basis::Unmoved => f.write_str(" for a server that answers questions and computes nothing"),
            Basis::Unseen => f.write_str(
                ", because the answer comes in one piece and this server cannot be asked how far it is (`--slots` or \
                 `--metrics`)",
            ),
        }
    }
}

/// The speed of prompts so far.
#[derive(Clone, Debug, Default)]
pub(super) struct Pace {
    /// Seconds that a token at the beginning of a prompt took, of the last prompts.
    prompts: VecDeque<f64>,
}

/// Prompts that are remembered: enough that one strange one does not count.
const PROMPTS_KEPT: usize = 32;
/// A few tokens take as long as this many: their price is that of reading the model once.
const LEAST_TOKENS: u64 = 64;

impl Pace {
    /// A prompt was evaluated: `new` tokens of `all` in so many milliseconds.
    pub(super) fn prompt(&mut self, new: u64, all: u64, ms: f64) {
        if new == 0 || !ms.is_finite() || ms <= 0.0 {
            return;
        }
        // On average a new token stood in the middle of the new ones.
        let depth = all.max(new) - new / 2;
        let price = ms / 1000.0 / exact(new.max(LEAST_TOKENS)) / slowdown(depth);
        if self.prompts.len() == PROMPTS_KEPT {
            self.prompts.pop_front();
        }
        self.prompts.push_back(price);
    }

    /// Nine of ten prompts were cheaper.
    fn price(&self) -> Option<f64> {
        let mut prices: Vec<f64> = self.prompts.iter().copied().collect();
        prices.sort_by(f64::total_cmp);
        prices.get(prices.len() * 9 / 10).copied()
    }

    /// The longest sound silence of a server that owes this. `told`: it can be asked how far it is. `wake`: it may have to
    /// load its model first.
    pub(super) fn limit(
        &self,
        awaited: &Awaited,
        gaps: Option<Gaps>,
        told: bool,
        wake: Duration,
        policy: &HealthPolicy,
    ) -> Limit {
        let of_tokens = gaps.map(|gaps| between(gaps, told, policy));
        if awaited.prompts == 0 && awaited.whole == 0 && awaited.left == 0 && awaited.media == 0 {
            return of_tokens
                .unwrap_or(Limit { seconds: policy.wedged_after.as_secs_f64(), basis: Basis::Unmeasured });
        }
        // Both may be going on in one batch.
        let of_prompts = self.of_prompts(awaited, told, wake, policy);
        let of_tokens = of_tokens.filter(|_| awaited.begun > 0 || told && awaited.whole > 0);
        match of_tokens {
            Some(of_tokens) if of_tokens.seconds > of_prompts.seconds => of_tokens,
            _ => of_prompts,
        }
    }

    fn of_prompts(&self, awaited: &Awaited, told: bool, wake: Duration, policy: &HealthPolicy) -> Limit {
        let wake = wake.as_secs_f64();
        // One after another; who can be asked shows each.
        let media = if told { awaited.media.min(1) } else { awaited.media };
        let pictures = policy.media_patience.as_secs_f64() * f64::from(media);
        if awaited.whole > 0 && !told {
            let seconds = policy.wedged_unseen.as_secs_f64() + wake;
            return Limit { seconds, basis: Basis::Unseen };
        }
        let Some(price) = self.price() else {
            let seconds = policy.wedged_after.as_secs_f64() + pictures + wake;
            return Limit { seconds, basis: Basis::Unmeasured };
        };
        let tokens =
            if told { awaited.prompt_tokens.min(policy.prefill_step) } else { awaited.prompt_tokens };
        let price = price * slowdown(awaited.largest_prompt);
        let seconds = (PREFILL_TIME_FACTOR * exact(tokens.max(LEAST_TOKENS)) * price)
            .max(policy.prefill_least.as_secs_f64());
        let basis = Basis::Prompt { tokens, token_ms: price * 1000.0, media };
        Limit { seconds: seconds + pictures + wake, basis }
    }
}

/// The longest sound pause between two tokens.
fn between(gaps: Gaps, told: bool, policy: &HealthPolicy) -> Limit {
    let usual = gaps.most.as_secs_f64();
    let seconds = (TOKEN_TIME_FACTOR * usual).max(policy.token_least.as_secs_f64());
    if told {
        return Limit { seconds, basis: Basis::Tokens { usual_ms: usual * 1000.0 } };
    }
    let token = gaps.middle.as_secs_f64();
    let silent = (exact(policy.silent_tokens) * token).max(policy.silent_least.as_secs_f64());
    let basis = Basis::Silent { token_ms: token * 1000.0, tokens: policy.silent_tokens };
    Limit { seconds: seconds.max(silent), basis }
}

/// A token costs more the more stand before it: attention looks at all of them.
fn slowdown(depth: u64) -> f64 {
    1.0 + exact(depth) / exact(ATTENTION_HALF_DEPTH)
}
