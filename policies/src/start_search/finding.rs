//! Result of a search for a helpful switch, and its description.

use serde::{Deserialize, Serialize};

use super::StartSwitch;

/// Outcome of a search.
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

/// Result of a search.
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

/// Returns the configuration line that enables the mitigation `item` for `model`. `configured` lists the
/// model's present mitigations, `overruled` the words of its `args` that would override the mitigation,
/// `words` the words added to the command. `typed`: the model comes from llama-server's command line
/// instead of a file.
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

/// Formats a name as a TOML key.
fn toml_key(name: &str) -> String {
    let bare = !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_'));
    if bare { name.to_owned() } else { format!("\"{}\"", name.escape_default()) }
}
