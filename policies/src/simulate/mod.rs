//! Simulates the effect of a policy on a leaking backend.
//!
//! ```text
//!  SimulationScenario ──> simulated world ──> readings ──> detector ──> decide ──> cooldown ──> restart
//!                               └──────────────< fresh memory <──────────────────────────────────────┘
//! ```
//!
//! [`crate::world`] simulates memory, load and time; equal seeds give equal runs. Simplifications: all
//! answers take the same time; a process without memory restarts by itself, and requests wait meanwhile;
//! after a restart during a pause, the next request comes one whole pause later.

mod run;
#[cfg(test)]
mod tests;

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::growth::GrowthPolicy;
use crate::recycle::RecyclePolicy;
use crate::schedule::DayWindows;
use crate::world::SimulatedWorld;

/// A simulated backend, machine and load.
#[derive(Clone, Debug, PartialEq)]
pub struct SimulationScenario {
    /// Behaviour of memory and requests; its seed determines all random numbers.
    pub world: SimulatedWorld,
    /// Total number of requests.
    pub requests: u64,
    /// Host memory in bytes beyond which the backend fails.
    pub memory: u64,
    /// VRAM in bytes beyond which the backend fails.
    pub device: u64,
    /// Time from spawn to ready.
    pub load_time: Duration,
    /// Time that an answer takes.
    pub service: Duration,
    /// True if the next process starts before the old one drains, which needs memory for both.
    pub overlap: bool,
    /// Times of the day without requests; [`DayWindows::ALWAYS`] for none.
    pub asleep: DayWindows,
    /// Declared caches in host memory, in bytes.
    pub allowance: u64,
}

/// Rule for restarts.
#[derive(Clone, Debug)]
pub enum RestartStrategy<'a> {
    /// No restarts: the process lives until memory is exhausted.
    Nothing,
    /// Drain and restart after this many requests, like `max_requests` in other servers.
    Every(u64),
    /// Restart by the recycle policy of this crate.
    Policy(&'a SimulatedPolicy),
}

/// All settings of a policy.
#[derive(Clone, Debug)]
pub struct SimulatedPolicy {
    /// Budgets, rules and cooldowns.
    pub recycle: RecyclePolicy,
    /// Settings of the detector.
    pub growth: GrowthPolicy,
}

/// Result of a strategy.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StrategyOutcome {
    /// Name of the strategy: `no policy`, `every 500 requests`, `policy`.
    pub strategy: String,
    /// Number of requests.
    pub requests: u64,
    /// Simulated hours.
    pub hours: f64,
    /// Planned restarts.
    pub restarts: u64,
    /// Planned restarts by reason, in order of first occurrence.
    pub reasons: Vec<(String, u64)>,
    /// Number of times that memory was exhausted.
    pub out_of_memory: u64,
    /// Number of exhaustions caused by a restart: memory did not suffice for the old and the new process.
    pub out_of_memory_caused: u64,
    /// Number of requests that failed because memory was exhausted, or were cut off by a kill.
    pub failed: u64,
    /// Total minutes that requests waited for a process.
    pub waited_minutes: f64,
    /// Number of requests that waited.
    pub waited: u64,
    /// Cooldown reasons that only an operator can end, in words; empty if there were none.
    pub held: Vec<String>,
}

/// Comparison of strategies.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SimulationReport {
    /// Result without restarts.
    pub nothing: StrategyOutcome,
    /// Result of a counter at half the fewest requests that exhausted memory without a policy, if any did.
    pub counter: Option<StrategyOutcome>,
    /// Result of the policy.
    pub policy: StrategyOutcome,
    /// Number of exhaustions that happened without the policy, but not with it.
    pub avoided: u64,
    /// Number of exhaustions caused by restarts of the policy.
    pub caused: u64,
}

/// Runs one strategy. Equal scenarios and strategies give equal outcomes on every machine.
pub fn run(scenario: &SimulationScenario, strategy: &RestartStrategy<'_>) -> StrategyOutcome {
    run::StrategyRun::new(scenario, strategy).run().0
}

/// Runs the policy, no policy, and a request counter: `every` if given, else tuned in hindsight.
pub fn compare(
    scenario: &SimulationScenario,
    policy: &SimulatedPolicy,
    every: Option<u64>,
) -> SimulationReport {
    let (nothing, shortest) = run::StrategyRun::new(scenario, &RestartStrategy::Nothing).run();
    let every = every.or_else(|| shortest.map(|requests| (requests / 2).max(1)));
    let counter = every.map(|every| run(scenario, &RestartStrategy::Every(every)));
    let policy = run(scenario, &RestartStrategy::Policy(policy));
    let avoided = nothing.out_of_memory.saturating_sub(policy.out_of_memory);
    let caused = policy.out_of_memory_caused;
    SimulationReport { nothing, counter, policy, avoided, caused }
}
