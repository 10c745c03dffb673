//! Searches for a switch that keeps a server from dying while it loads.
//!
//! ```text
//!  configured command, until it died often enough ──> each switch alone ── one starts ──> configured command again
//!         │ starts                                      │ none                              │ dies        │ starts
//!         v                                             v                                   v             v
//!  not every time                                   no switch                             found     not every time
//! ```
//!
//! Starts also fail for other reasons (memory, a file, a flag). Such a failure says nothing about a switch;
//! if the configured command fails in this way, the search ends.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Limits of the search. `defaults.toml`, section `[start_search]`, gives the reasons.
pub type StartSearchPolicy = crate::defaults::StartSearch;

/// Flags or variables with which a server may survive its load.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartSwitch {
    /// Name of the mitigation, such as `no-repack`; empty if the switch is the model's `fallback`.
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
    /// Creates a search for switches, best first. `deaths`: consecutive deaths of the configured command.
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

/// Outcome of the search for a switch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum StartOutcome {
    /// The server starts with this switch, and died without the switch before and after that start.
    Found {
        /// Switch that helps.
        switch: Box<StartSwitch>,
    },
    /// None of the switches makes the server start.
    NoSwitch,
    /// The configured command also started: the server does not die every time.
    NotEveryTime,
    /// The configured command failed for another reason.
    Otherwise {
        /// Reason, for people.
        why: String,
    },
    /// The limit of time or starts was reached, or the search was stopped.
    GivenUp,
}

/// A switch that was tried.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TriedSwitch {
    /// Words added to the command.
    pub words: String,
    /// True if the server became ready.
    pub started: bool,
    /// Result of the start, for people.
    pub how: String,
}

/// Outcome of a search, with all tried switches.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartFinding {
    /// Outcome of the search.
    pub outcome: StartOutcome,
    /// Number of deaths with the configured command.
    pub deaths: u32,
    /// Description of the last death, for people.
    pub death: String,
    /// Switches that were tried, in order.
    pub tried: Vec<TriedSwitch>,
}

impl StartFinding {
    /// Returns the switch that helps.
    pub fn switch(&self) -> Option<&StartSwitch> {
        match &self.outcome {
            StartOutcome::Found { switch } => Some(switch),
            _ => None,
        }
    }

    /// Returns true if another search with the same command would have the same result.
    pub const fn is_lasting(&self) -> bool {
        matches!(self.outcome, StartOutcome::Found { .. } | StartOutcome::NoSwitch)
    }

    /// Returns the advice that follows from the result, as one sentence without a full stop.
    pub fn advice(&self) -> String {
        match &self.outcome {
            StartOutcome::Found { switch } => {
                format!("with `{}` it starts: {}", switch.words(), switch.line)
            }
            StartOutcome::NoSwitch if self.tried.is_empty() => {
                "no switch is known that could help with this command".to_owned()
            }
            StartOutcome::NoSwitch => {
                let all: Vec<String> = self.tried.iter().map(|one| format!("`{}`", one.words)).collect();
                format!("it starts with none of {}: try another build or model file", all.join(", "))
            }
            StartOutcome::NotEveryTime => {
                "it does not die every time: the next start as configured was ready".to_owned()
            }
            StartOutcome::Otherwise { why } => format!("the next start failed for another reason: {why}"),
            StartOutcome::GivenUp => "the search for a switch that starts it was not finished".to_owned(),
        }
    }

    /// Returns all lines of the description: configured command, each switch, advice.
    pub fn lines(&self) -> Vec<String> {
        let times = if self.deaths == 1 { "once".to_owned() } else { format!("{} times", self.deaths) };
        let first = format!("the server died {times} while it loaded: {}", self.death);
        let tried = self.tried.iter().map(|one| format!("  with `{}`: {}", one.words, one.how));
        let cost = self.switch().filter(|switch| !switch.cost.is_empty());
        let cost = cost.map(|switch| format!("what that costs: {}", switch.cost));
        std::iter::once(first).chain(tried).chain([self.advice()]).chain(cost).collect()
    }
}

/// Returns the configuration line that enables the mitigation `item` for `model`. `configured`: present
/// mitigations; `overruled`: words of `args` that would override `item`; `words`: words added to the command;
/// `typed`: the model comes from llama-server's command line instead of a file.
pub fn configuration_line(
    model: &str,
    item: &str,
    configured: &[String],
    overruled: Option<&str>,
    words: &str,
    typed: bool,
) -> String {
    let section = format!("[models.{}]", toml_key(model));
    match overruled {
        Some(old) if typed => format!("write `{words}` in place of `{old}`"),
        None if typed => format!("add `{words}` to its command line"),
        Some(old) => format!("in `args` of {section}, write `{words}` in place of `{old}`"),
        None => {
            let list: Vec<String> =
                configured.iter().map(String::as_str).chain([item]).map(|one| format!("\"{one}\"")).collect();
            format!("write `mitigations = [{}]` into {section}", list.join(", "))
        }
    }
}

fn toml_key(name: &str) -> String {
    let bare = !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_'));
    if bare { name.to_owned() } else { format!("\"{}\"", name.escape_default()) }
}

#[cfg(test)]
mod tests;
