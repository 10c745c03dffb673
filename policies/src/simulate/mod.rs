//! What a policy would do to a backend that leaks, before it does it to a real one.
//!
//! ```text
//!  Scenario ──> made-up world ──> readings ──> detector ──> decide ──> cooldown ──> restart
//!                     └──────────────< memory begins anew <─────────────────────────────┘
//! ```
//!
//! The detector, the decisions and the cooldown are those of the product. The world is [`crate::world`]'s: memory, load
//! and time are made up, the same for each run with the same seed. What is simplified: answers all take the same time, a
//! process that ran out of memory is made anew by itself, requests that come meanwhile wait, and after a restart in a
//! pause the next request comes a pause later.

mod run;
#[cfg(test)]
mod tests;

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::growth::GrowthPolicy;
use crate::recycle::RecyclePolicy;
use crate::schedule::Windows;
use crate::world::World;

/// A backend, its machine and its load.
#[derive(Clone, Debug, PartialEq)]
pub struct Scenario {
    /// How memory and requests behave. Its seed decides every random number.
    pub world: World,
    /// Requests in all.
    pub requests: u64,
    /// Host memory in bytes that the backend can have before it fails.
    pub memory: u64,
    /// VRAM in bytes that it can have before it fails.
    pub device: u64,
    /// From spawn to ready.
    pub load_time: Duration,
    /// From the beginning of an answer to its end.
    pub service: Duration,
    /// The next process is started before the old one drains. Needs memory for both.
    pub overlap: bool,
    /// Times of the day at which nobody asks; [`Windows::ALWAYS`] for none.
    pub asleep: Windows,
    /// Bytes of host memory that the server is told to keep.
    pub allowance: u64,
}

/// Who decides about restarts.
#[derive(Clone, Debug)]
pub enum Strategy<'a> {
    /// Nobody: the process lives until it runs out of memory.
    Nothing,
    /// A counter, as `max_requests` elsewhere: drain and restart.
    Every(u64),
    /// The product.
    Policy(&'a Policy),
}

/// All numbers of a policy.
#[derive(Clone, Debug)]
pub struct Policy {
    /// Budgets and rules, and what holds recycles back.
    pub recycle: RecyclePolicy,
    /// The detector's.
    pub growth: GrowthPolicy,
}

/// What a strategy came to.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    /// Who decided, in words: `no policy`, `every 500 requests`, `policy`.
    pub strategy: String,
    /// Requests that came.
    pub requests: u64,
    /// Hours that they took.
    pub hours: f64,
    /// Planned restarts.
    pub restarts: u64,
    /// The same by reason, in the order in which the reasons came first.
    pub reasons: Vec<(String, u64)>,
    /// Times that memory ran out.
    pub out_of_memory: u64,
    /// Of these, the ones that a restart brought about: memory did not do for the old and the new process.
    pub out_of_memory_caused: u64,
    /// Requests that failed because of that, or were cut by a kill.
    pub failed: u64,
    /// Minutes that requests waited for a process, all together.
    pub waited_minutes: f64,
    /// Requests that waited.
    pub waited: u64,
    /// What held recycles back for good, in words; empty if nothing did.
    pub held: Vec<String>,
}

/// Strategies side by side.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Nobody decides.
    pub nothing: Outcome,
    /// A counter that somebody who knew the future would set: half of the requests that the shortest life lasted without
    /// a policy. `None` if memory never ran out, so that there is nothing to tune by.
    pub counter: Option<Outcome>,
    /// The policy.
    pub policy: Outcome,
    /// Times that memory ran out without the policy and did not with it.
    pub avoided: u64,
    /// Times that the policy itself made memory run out.
    pub caused: u64,
}

/// Runs one strategy. The same scenario and strategy give the same outcome, on every machine.
pub fn run(scenario: &Scenario, strategy: &Strategy<'_>) -> Outcome {
    run::Simulation::new(scenario, strategy).run().0
}

/// Runs the policy against no policy and against a tuned counter. `every` sets the counter by hand.
pub fn compare(scenario: &Scenario, policy: &Policy, every: Option<u64>) -> Report {
    let (nothing, shortest) = run::Simulation::new(scenario, &Strategy::Nothing).run();
    let every = every.or_else(|| shortest.map(|requests| (requests / 2).max(1)));
    let counter = every.map(|every| run(scenario, &Strategy::Every(every)));
    let policy = run(scenario, &Strategy::Policy(policy));
    let avoided = nothing.out_of_memory.saturating_sub(policy.out_of_memory);
    let caused = policy.out_of_memory_caused;
    Report { nothing, counter, policy, avoided, caused }
}
