//! Learns the memory cost of prompts: bytes per token beyond the largest prompt so far.
//!
//! ```text
//!  memory   ______________/‾‾‾‾‾‾‾‾‾‾‾‾   high after  ┐
//!                low before                           ├─ bytes ÷ tokens: one piece of evidence
//!  largest  ______________________/‾‾‾‾   L1          │
//!  prompt          L0                                 ┘
//! ```
//!
//! llama-server reports a prompt's size only after evaluating it. Therefore the learner compares the last
//! idle reading before the prompt with the highest reading since. It skips a process's first prompt, which
//! also pays for the start.

use std::collections::VecDeque;

use super::AdmissionPolicy;
use crate::sample::{BackendSample, MemoryKind};
use crate::units::{as_f64, truncate_to_u64};

const READINGS_SEARCHED: usize = 32;
const EVIDENCE_KEPT: usize = 32;
/// Least increase of the largest prompt, in tokens, that counts as evidence.
const STEP_TOKENS_LEAST: u64 = 64;
/// Least increase as a divisor of the previous largest prompt: pages and pools may hide the cost of less.
const STEP_DIVISOR: u64 = 4;

/// A learnt cost per prompt token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PromptPrice {
    /// Kind of memory that the prompts take.
    pub series: MemoryKind,
    /// Bytes per prompt token beyond the largest prompt so far.
    pub bytes_per_token: f64,
    /// Number of increases of the largest prompt behind this cost.
    pub evidence: usize,
}

/// Learns a model's bytes per prompt token, over several processes in turn.
#[derive(Clone, Debug)]
pub struct PromptCost {
    policy: AdmissionPolicy,
    largest: u64,
    learners: Vec<PriceLearner>,
    told: Vec<PromptPrice>,
}

#[derive(Clone, Debug)]
struct PriceLearner {
    series: MemoryKind,
    /// Latest readings of this process: bytes, and true if no request was in flight.
    recent: VecDeque<(u64, bool)>,
    /// Sums of increases that are too small as evidence until added up: bytes and tokens.
    open: (u64, u64),
    evidence: VecDeque<f64>,
}

impl PromptCost {
    /// Creates a learner without evidence.
    pub fn new(policy: &AdmissionPolicy) -> Self {
        Self { policy: policy.clone(), largest: 0, learners: Vec::new(), told: Vec::new() }
    }

    /// Adds a reading.
    pub fn observe(&mut self, sample: &BackendSample) {
        let before = self.largest;
        self.largest = before.max(sample.largest_prompt);
        let step = self.largest - before;
        let gpus = sample.vram.iter().map(|vram| MemoryKind::Vram(vram.gpu));
        for series in std::iter::once(MemoryKind::Host).chain(gpus) {
            let Some(charged) = sample.charged(series) else { continue };
            // Pools that fill by design are not part of a prompt's cost.
            let bytes = charged.saturating_sub(sample.pooled(series).unwrap_or(0));
            let learner = self.learner(series);
            if step > 0 && before > 0 {
                learner.record_step(bytes, step, before);
            }
            learner.recent.push_back((bytes, sample.in_flight == 0));
            if learner.recent.len() > READINGS_SEARCHED {
                learner.recent.pop_front();
            }
        }
    }

    fn learner(&mut self, series: MemoryKind) -> &mut PriceLearner {
        let at = self.learners.iter().position(|learner| learner.series == series).unwrap_or_else(|| {
            let learner =
                PriceLearner { series, recent: VecDeque::new(), open: (0, 0), evidence: VecDeque::new() };
            self.learners.push(learner);
            self.learners.len() - 1
        });
        &mut self.learners[at]
    }

    /// Sets the price of an earlier process; valid until a higher price is learnt.
    pub fn set_price(&mut self, price: PromptPrice) {
        if price.bytes_per_token.is_finite() && price.bytes_per_token >= 0.0 {
            self.told.retain(|known| known.series != price.series);
            self.told.push(price);
        }
    }

    /// Returns the price for one kind of memory; `None` without enough evidence.
    pub fn price(&self, series: MemoryKind) -> Option<PromptPrice> {
        let told = self.told.iter().find(|price| price.series == series).copied();
        let learnt = self.learners.iter().find(|learner| learner.series == series).and_then(|learner| {
            let evidence = learner.evidence.len();
            let enough = evidence >= self.policy.evidence.max(1);
            enough.then(|| PromptPrice {
                series,
                bytes_per_token: learner.quantile(self.policy.quantile),
                evidence,
            })
        });
        match (told, learnt) {
            (Some(told), Some(learnt)) if told.bytes_per_token > learnt.bytes_per_token => Some(told),
            (told, learnt) => learnt.or(told),
        }
    }

    /// Returns all prices, to be passed to [`PromptCost::set_price`] for the next process of the same kind.
    pub fn learnt_prices(&self) -> Vec<PromptPrice> {
        self.learners.iter().filter_map(|learner| self.price(learner.series)).collect()
    }

    /// Returns the need of a prompt of `tokens` in each priced memory; `largest`: largest prompt so far.
    pub fn needed_bytes(&self, tokens: u64, largest: u64) -> Vec<(MemoryKind, u64)> {
        let mut known: Vec<MemoryKind> = self.learners.iter().map(|learner| learner.series).collect();
        known.extend(self.told.iter().map(|price| price.series));
        known.sort_unstable();
        known.dedup();
        let more = tokens.saturating_sub(largest);
        known
            .into_iter()
            .filter_map(|series| Some((series, price_bytes(self.price(series)?.bytes_per_token, more))))
            .collect()
    }
}

fn price_bytes(bytes_per_token: f64, tokens: u64) -> u64 {
    truncate_to_u64((bytes_per_token * as_f64(tokens)).ceil())
}

impl PriceLearner {
    fn record_step(&mut self, bytes: u64, tokens: u64, before: u64) {
        let quiet = self.recent.iter().rposition(|(_, idle)| *idle);
        let low = match quiet {
            Some(at) => self.recent[at].0,
            None => match self.recent.iter().map(|(bytes, _)| *bytes).min() {
                Some(low) => low,
                None => return,
            },
        };
        let since = self.recent.iter().skip(quiet.map_or(0, |at| at + 1)).map(|(bytes, _)| *bytes);
        let high = since.chain([bytes]).max().unwrap_or(bytes);
        self.open.0 = self.open.0.saturating_add(high.saturating_sub(low));
        self.open.1 = self.open.1.saturating_add(tokens);
        if self.open.1 >= STEP_TOKENS_LEAST.max(before / STEP_DIVISOR) {
            self.evidence.push_back(as_f64(self.open.0) / as_f64(self.open.1));
            self.open = (0, 0);
            if self.evidence.len() > EVIDENCE_KEPT {
                self.evidence.pop_front();
            }
        }
    }

    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "an index into at most KEPT values"
    )]
    fn quantile(&self, quantile: f64) -> f64 {
        let mut sorted: Vec<f64> = self.evidence.iter().copied().collect();
        sorted.sort_by(f64::total_cmp);
        let rank = (quantile.clamp(0.0, 1.0) * sorted.len() as f64).ceil() as usize;
        sorted.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
    }
}
