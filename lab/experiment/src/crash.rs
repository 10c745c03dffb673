//! Tests if a crash recurs, and if a switch stops it. Runs nothing.
//!
//! ```text
//!  the same work in fresh processes ──> died, survived, died, … ──> Always | Sometimes | NotAgain
//!  with a switch: a death ───────────> Nothing
//!                 survivors ─────────> Stops, once a switch without effect would hardly have shown as much
//! ```
//!
//! Both are sequential tests with declared error rates:
//!
//! - **Recurrence**: Wald's test between the death probabilities `seldom` and `always`. A mixed result at the
//!   largest number of processes is `Sometimes`.
//! - **Stops**: two null hypotheses must be rejected: each process dies with some probability, or each
//!   request kills with some probability, both independent of the switch. The first is tested at its worst
//!   probability. Under the second, deaths are proportional to requests, so a surviving process counts by its
//!   requests.

use serde::{Deserialize, Serialize};

use super::sequential::SwitchEffect;
use warden_policies::growth::stats::length_as_f64;
use warden_policies::units::as_f64;

/// Most repetitions: ten complete workloads take as long as one search for a cure.
const REPETITION_LIMIT: usize = 10;

/// Settings of the crash tests. `defaults.toml`, section `[diagnose.crash]`, gives the reasons.
pub type CrashPolicy = warden_policies::defaults::Crash;

/// Result of one fresh process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CrashRun {
    /// Number of the request at which the process died; if it survived, number of answered requests.
    pub requests: u64,
    /// True if the process died.
    pub died: bool,
}

/// Answer to the question if a crash recurs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CrashRecurrence {
    /// More processes are needed.
    #[default]
    Undecided,
    /// The crash recurs (nearly) every time.
    Always,
    /// The crash recurred, but not every time.
    Sometimes,
    /// The crash did not recur.
    NotAgain,
}

/// A server that exited by itself under a workload.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkloadCrash {
    /// Number of the request at which the server died, from 1.
    pub at_request: u64,
    /// Exit status or signal, in words.
    pub why: String,
    /// Last lines of the server's output, oldest first.
    pub lines: Vec<String>,
    /// Repetitions in fresh processes, in order.
    pub runs: Vec<CrashRun>,
    /// Recurrence according to `runs`.
    pub again: CrashRecurrence,
}

/// Judges the repetitions of a crash. The first crash does not count, because it caused the test.
pub fn judge_recurrence(policy: &CrashPolicy, runs: &[CrashRun]) -> CrashRecurrence {
    let died = runs.iter().filter(|run| run.died).count();
    let (always, seldom) = (policy.always, policy.seldom);
    let odds = length_as_f64(died) * (always / seldom).ln()
        + length_as_f64(runs.len() - died) * ((1.0 - always) / (1.0 - seldom)).ln();
    let high = ((1.0 - policy.false_seldom) / policy.false_always).ln();
    let low = (policy.false_seldom / (1.0 - policy.false_always)).ln();
    let over = runs.len() >= REPETITION_LIMIT;
    match died {
        _ if odds >= high => CrashRecurrence::Always,
        0 if odds <= low || over => CrashRecurrence::NotAgain,
        _ if odds <= low || over => CrashRecurrence::Sometimes,
        _ => CrashRecurrence::Undecided,
    }
}

/// Judges a switch by processes run without and with it.
pub fn judge(policy: &CrashPolicy, without: &[CrashRun], with: &[CrashRun]) -> SwitchEffect {
    if with.iter().any(|run| run.died) {
        return SwitchEffect::Nothing;
    }
    // Half of the error rate, because processes without the switch may all die, or some may survive.
    if no_effect_probability(without, with) <= policy.false_cure / 2.0 {
        SwitchEffect::Stops
    } else {
        SwitchEffect::Undecided
    }
}

/// Returns the greatest probability of at least as many deaths without the switch, and none with it, if the
/// switch has no effect.
pub fn no_effect_probability(without: &[CrashRun], with: &[CrashRun]) -> f64 {
    let died = without.iter().filter(|run| run.died).count();
    if died == 0 || with.is_empty() {
        return 1.0;
    }
    let per_process = (1..1000_u32)
        .map(|share| {
            let chance = f64::from(share) / 1000.0;
            binomial_tail(died, without.len(), chance) * (1.0 - chance).powf(length_as_f64(with.len()))
        })
        .fold(0.0, f64::max);
    let requests = |runs: &[CrashRun]| as_f64(runs.iter().map(|run| run.requests).sum());
    let (base, new) = (requests(without), requests(with));
    let per_request = if base + new > 0.0 { (base / (base + new)).powf(length_as_f64(died)) } else { 1.0 };
    per_process.max(per_request)
}

fn binomial_tail(hits: usize, tries: usize, chance: f64) -> f64 {
    let mut all = 0.0;
    // Probability of exactly `count` hits.
    let mut one = (1.0 - chance).powf(length_as_f64(tries));
    for count in 0..=tries {
        if count >= hits {
            all += one;
        }
        one *= length_as_f64(tries - count) / (length_as_f64(count) + 1.0) * chance / (1.0 - chance);
    }
    all
}

#[cfg(test)]
#[path = "crash_tests.rs"]
mod tests;
