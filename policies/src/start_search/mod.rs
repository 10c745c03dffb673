//! What starts a server that dies while it loads: which switch is tried next, when the search is over, and how its finding is worded.
//!
//! ```text
//!  as configured, until it has died often enough ──> each switch alone ── one starts ──> as configured once more
//!         │ starts                                      │ none                              │ dies        │ starts
//!         v                                             v                                   v             v
//!  not every time                                   no switch                             found     not every time
//! ```
//!
//! A start fails for other reasons, too (memory, a file, a flag): such a start says nothing of a switch, and as configured it ends the
//! search. Pure: the owner starts processes and reports what became of them.

mod finding;

use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use self::finding::{StartFinding, StartOutcome, TriedSwitch, configuration_line};

/// Deaths as configured, and bounds of the search. Reasons: `defaults.toml`, section `[start_search]`.
pub type StartSearchPolicy = crate::defaults::StartSearch;

/// Something to add to a command line with which the server may start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartSwitch {
    /// As `mitigations` writes it, such as `no-repack`. Empty: the arguments of `fallback`.
    pub item: String,
    /// Words at the end of the command line, so that they count.
    pub args: Vec<String>,
    /// Variables to set.
    pub env: Vec<(String, String)>,
    /// Only where the machine has a GPU: for which backend the binary was built is not known.
    pub needs_gpu: bool,
    /// What to write into the configuration, for people.
    pub line: String,
    /// What it costs, for people; may be empty.
    pub cost: String,
}

impl StartSwitch {
    /// The words that are added, as typed in a shell.
    pub fn words(&self) -> String {
        let env = self.env.iter().map(|(name, value)| format!("{name}={value}"));
        env.chain(self.args.iter().cloned()).collect::<Vec<_>>().join(" ")
    }

    /// Whether the configuration allows its use without being asked: the arguments of `fallback`.
    pub fn is_fallback(&self) -> bool {
        self.item.is_empty()
    }
}

/// What became of a start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StartAttempt {
    /// It answered that it is ready.
    Ready,
    /// It died of a signal or a failed assertion; how, for people.
    Died(String),
    /// It failed for a reason that has a name of its own; which, for people.
    Failed(String),
}

/// What to do next.
#[derive(Clone, Debug, PartialEq)]
pub enum SearchStep {
    /// Start it: as configured, or with this switch.
    Start(Option<usize>),
    /// Nothing more.
    Done(StartFinding),
}

/// The state of a search.
#[derive(Clone, Debug)]
pub struct StartSearch {
    policy: StartSearchPolicy,
    switches: Vec<StartSwitch>,
    deaths: u32,
    death: String,
    tried: Vec<TriedSwitch>,
    /// The switch with which it started, until that is confirmed.
    hit: Option<usize>,
    starts: u32,
    outcome: Option<StartOutcome>,
}

impl StartSearch {
    /// For these switches, the cheapest and likeliest first. `deaths`: how often it has died as configured in a row, the last time so.
    pub fn new(policy: StartSearchPolicy, switches: Vec<StartSwitch>, deaths: u32, death: String) -> Self {
        let tried = Vec::new();
        Self { policy, switches, deaths, death, tried, hit: None, starts: 0, outcome: None }
    }

    /// What to do, `elapsed` after the search began. Two calls in a row return the same.
    pub fn step(&self, elapsed: Duration) -> SearchStep {
        if let Some(outcome) = &self.outcome {
            return SearchStep::Done(self.finding(outcome.clone()));
        }
        if self.starts >= self.policy.starts || elapsed >= self.policy.time {
            return SearchStep::Done(self.finding(StartOutcome::GivenUp));
        }
        // A switch counts only against a death that comes again, before it and after it.
        if self.deaths < self.policy.deaths || self.hit.is_some() {
            return SearchStep::Start(None);
        }
        match self.tried.len() {
            next if next < self.switches.len() => SearchStep::Start(Some(next)),
            _ => SearchStep::Done(self.finding(StartOutcome::NoSwitch)),
        }
    }

    /// A switch of this search.
    pub fn switch(&self, index: usize) -> Option<&StartSwitch> {
        self.switches.get(index)
    }

    /// Takes in what became of the start that [`StartSearch::step`] asked for.
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

    /// What is known if nothing more is started.
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
