//! Whether a crash comes again, and whether a switch stops it.
//!
//! ```text
//!  the same work in fresh processes ──> died, survived, died, … ──> Always | Sometimes | NotAgain
//!  with a switch: one that dies ─────> Nothing
//!                 survivors ─────────> Stops, once a switch without effect would hardly have shown as much
//! ```
//!
//! Both are sequential tests with declared errors:
//!
//! - **Again** is Wald's test between a chance of `seldom` and one of `always` that a process dies. Beyond the largest number
//!   of processes it is `Sometimes`.
//! - **Stops** holds two explanations against what was seen, and both have to fail. Either each process dies with some chance,
//!   whatever the switch; or each request kills with some chance, whatever the switch. Of the first, the worst chance is
//!   taken: that of so many deaths without and none with it. Of the second, the deaths would fall on the requests with it and
//!   without it in proportion to their numbers. So a survivor counts by the requests that it survived.
//!
//! Nothing here runs anything.

use serde::{Deserialize, Serialize};

use super::sequential::Does;
use warden_policies::units::exact;

/// Ten processes that each do all of the work take as long as one search for a cure.
const REPETITION_LIMIT: usize = 10;

/// The numbers. Reasons: `defaults.toml`, section `[diagnose.crash]`.
pub type CrashPolicy = warden_policies::defaults::Crash;

/// What one fresh process did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// The request at which it died, or all that it answered.
    pub requests: u64,
    /// Whether it died.
    pub died: bool,
}

/// Whether a crash comes again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Again {
    /// More processes are needed to say.
    #[default]
    Undecided,
    /// It comes (nearly) every time.
    Always,
    /// It came again, but not each time.
    Sometimes,
    /// It did not come again.
    NotAgain,
}

/// A server that ended by itself under a workload.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Crash {
    /// The request at which it died, from 1.
    pub at_request: u64,
    /// How it ended.
    pub why: String,
    /// Its last lines of output, oldest first.
    pub lines: Vec<String>,
    /// The same again in fresh processes, in order.
    pub runs: Vec<Run>,
    /// What those say.
    pub again: Again,
}

impl Crash {
    /// The first one and all that were the same.
    pub fn all(&self) -> Vec<Run> {
        let first = Run { requests: self.at_request, died: true };
        std::iter::once(first).chain(self.runs.iter().copied()).collect()
    }
}

/// Judges repetitions. The crash that they repeat is none of them: it was what made somebody look.
pub fn again(policy: &CrashPolicy, runs: &[Run]) -> Again {
    let died = runs.iter().filter(|run| run.died).count();
    let (always, seldom) = (policy.always, policy.seldom);
    let odds = size(died) * (always / seldom).ln()
        + size(runs.len() - died) * ((1.0 - always) / (1.0 - seldom)).ln();
    let high = ((1.0 - policy.false_seldom) / policy.false_always).ln();
    let low = (policy.false_seldom / (1.0 - policy.false_always)).ln();
    let over = runs.len() >= REPETITION_LIMIT;
    match died {
        _ if odds >= high => Again::Always,
        0 if odds <= low || over => Again::NotAgain,
        _ if odds <= low || over => Again::Sometimes,
        _ => Again::Undecided,
    }
}

/// Judges a switch by processes without it and with it.
pub fn judge(policy: &CrashPolicy, without: &[Run], with: &[Run]) -> Does {
    if with.iter().any(|run| run.died) {
        return Does::Nothing;
    }
    // There is more than one course that ends so: with all dead without it, and with some that survived.
    if doubt(without, with) <= policy.false_cure / 2.0 { Does::Stops } else { Does::Undecided }
}

/// The greatest chance of at least so many deaths without a switch and none with it, were it without effect.
pub fn doubt(without: &[Run], with: &[Run]) -> f64 {
    let died = without.iter().filter(|run| run.died).count();
    if died == 0 || with.is_empty() {
        return 1.0;
    }
    let per_process = (1..1000_u32)
        .map(|share| {
            let chance = f64::from(share) / 1000.0;
            at_least(died, without.len(), chance) * (1.0 - chance).powf(size(with.len()))
        })
        .fold(0.0, f64::max);
    let requests = |runs: &[Run]| exact(runs.iter().map(|run| run.requests).sum());
    let (base, new) = (requests(without), requests(with));
    let per_request = if base + new > 0.0 { (base / (base + new)).powf(size(died)) } else { 1.0 };
    per_process.max(per_request)
}

/// The chance of so many hits or more in so many tries.
fn at_least(hits: usize, tries: usize, chance: f64) -> f64 {
    let mut all = 0.0;
    // Of exactly `count` hits; begun with none.
    let mut one = (1.0 - chance).powf(size(tries));
    for count in 0..=tries {
        if count >= hits {
            all += one;
        }
        one *= size(tries - count) / (size(count) + 1.0) * chance / (1.0 - chance);
    }
    all
}

fn size(count: usize) -> f64 {
    exact(count as u64)
}

#[cfg(test)]
#[path = "crash_tests.rs"]
mod tests;
