//! Search for a switch with which a server starts that otherwise dies while it loads.
//!
//! ```text
//!  configured command, until it died often enough ──> each switch alone ── one starts ──> configured command again
//!         │ starts                                      │ none                              │ dies        │ starts
//!         v                                             v                                   v             v
//!  not every time                                   no switch                             found     not every time
//! ```
//!
//! Starts also fail for other reasons (memory, a file, a flag). Such a failure says nothing about a switch;
//! if the configured command fails in this way, the search ends. The owner starts the processes and reports
//! the results to this module.

mod finding;

use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use self::finding::{StartFinding, StartOutcome, TriedSwitch, configuration_line};

/// Limits of the search. `defaults.toml`, section `[start_search]`, gives the reasons.
pub type StartSearchPolicy = crate::defaults::StartSearch;

/// An addition to the command line or the environment that may help.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartSwitch {
    /// Mitigation name as in `mitigations`, such as `no-repack`; empty if the switch is the model's
    /// `fallback`.
    pub item: String,
    /// Words appended to the command line; they take precedence because they come last.
    pub args: Vec<String>,
    /// Variables to set.
    pub env: Vec<(String, String)>,
    /// The switch makes sense only on a machine with a GPU; set if the binary's GPU support is unknown.
    pub needs_gpu: bool,
    /// Configuration line to add, for people.
    pub line: String,
    /// Cost of the switch, for people; may be empty.
    pub cost: String,
}

impl StartSwitch {
    /// Returns the added words as typed in a shell.
    pub fn words(&self) -> String {
        let env = self.env.iter().map(|(name, value)| format!("{name}={value}"));
        env.chain(self.args.iter().cloned()).collect::<Vec<_>>().join(" ")
    }

    /// Returns true if the switch is the model's `fallback`, which the configuration already allows.
    pub fn is_fallback(&self) -> bool {
        self.item.is_empty()
    }
}

/// Result of a start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StartAttempt {
    /// The server reported ready.
    Ready,
    /// The server died of a signal or a failed assertion; description for people.
    Died(String),
    /// The server failed for a known reason; description for people.
    Failed(String),
}

/// Next step of a search.
#[derive(Clone, Debug, PartialEq)]
pub enum SearchStep {
    /// Start the configured command, with the switch of this index if given.
    Start(Option<usize>),
    /// The search is over.
    Done(StartFinding),
}

/// State of a search.
#[derive(Clone, Debug)]
pub struct StartSearch {
    policy: StartSearchPolicy,
    switches: Vec<StartSwitch>,
    deaths: u32,
    death: String,
    tried: Vec<TriedSwitch>,
    /// Switch with which the server started, until the result is confirmed.
    hit: Option<usize>,
    starts: u32,
    outcome: Option<StartOutcome>,
}

impl StartSearch {
    /// Creates a search for switches ordered by cost and likelihood, best first. `deaths`: consecutive
    /// deaths of the configured command; `death` describes the last one.
    pub fn new(policy: StartSearchPolicy, switches: Vec<StartSwitch>, deaths: u32, death: String) -> Self {
        let tried = Vec::new();
        Self { policy, switches, deaths, death, tried, hit: None, starts: 0, outcome: None }
    }

    /// Returns the next step, `elapsed` after the start of the search. Repeated calls return the same step.
    pub fn next_step(&self, elapsed: Duration) -> SearchStep {
        if let Some(outcome) = &self.outcome {
            return SearchStep::Done(self.finding(outcome.clone()));
        }
        if self.starts >= self.policy.starts || elapsed >= self.policy.time {
            return SearchStep::Done(self.finding(StartOutcome::GivenUp));
        }
        // A switch counts as helpful only if the server dies without it before and after.
        if self.deaths < self.policy.deaths || self.hit.is_some() {
            return SearchStep::Start(None);
        }
        match self.tried.len() {
            next if next < self.switches.len() => SearchStep::Start(Some(next)),
            _ => SearchStep::Done(self.finding(StartOutcome::NoSwitch)),
        }
    }

    /// Returns the switch of this index.
    pub fn switch(&self, index: usize) -> Option<&StartSwitch> {
        self.switches.get(index)
    }

    /// Adds the result of the start requested by [`StartSearch::next_step`].
    pub fn observe(&mut self, which: Option<usize>, attempt: StartAttempt) {
        self.starts += 1;
        match (which, attempt) {
            (None, StartAttempt::Died(how)) => {
                self.deaths += 1;
                self.death = how;
                if let Some(switch) = self.hit.and_then(|hit| self.switches.get(hit)) {
                    self.outcome = Some(StartOutcome::Found { switch: Box::new(switch.clone()) });
                }
            }
            (None, StartAttempt::Ready) => self.outcome = Some(StartOutcome::NotEveryTime),
            (None, StartAttempt::Failed(why)) => self.outcome = Some(StartOutcome::Otherwise { why }),
            (Some(index), attempt) => {
                let Some(switch) = self.switches.get(index) else { return };
                let (started, how) = match attempt {
                    StartAttempt::Ready => (true, "it starts".to_owned()),
                    StartAttempt::Died(how) | StartAttempt::Failed(how) => (false, how),
                };
                self.tried.push(TriedSwitch { words: switch.words(), started, how });
                self.hit = started.then_some(index);
            }
        }
    }

    /// Returns the result of a search that is stopped now.
    pub fn give_up(&self) -> StartFinding {
        self.finding(self.outcome.clone().unwrap_or(StartOutcome::GivenUp))
    }

    fn finding(&self, outcome: StartOutcome) -> StartFinding {
        let (deaths, death, tried) = (self.deaths, self.death.clone(), self.tried.clone());
        StartFinding { outcome, deaths, death, tried }
    }
}

#[cfg(test)]
mod tests;
