//! The finding of a search, and its words.

use serde::{Deserialize, Serialize};

use super::StartSwitch;

/// How a search ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum StartOutcome {
    /// With this switch it starts, and without it, it died before and after.
    Found {
        /// The switch.
        switch: Box<StartSwitch>,
    },
    /// With none of the switches it starts.
    NoSwitch,
    /// As configured it started, too: the death does not come every time.
    NotEveryTime,
    /// As configured it failed for another reason.
    Otherwise {
        /// Which, for people.
        why: String,
    },
    /// Time or starts were used up, or the search was stopped.
    GivenUp,
}

/// One switch of a search.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TriedSwitch {
    /// What was added to the command.
    pub words: String,
    /// Whether the server was ready with it.
    pub started: bool,
    /// What became of that start, for people.
    pub how: String,
}

/// What a search found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartFinding {
    /// How it ended.
    pub outcome: StartOutcome,
    /// Deaths as configured.
    pub deaths: u32,
    /// How it died the last time, for people.
    pub death: String,
    /// All switches that were tried, in order.
    pub tried: Vec<TriedSwitch>,
}

impl StartFinding {
    /// The switch with which it starts.
    pub fn switch(&self) -> Option<&StartSwitch> {
        match &self.outcome {
            StartOutcome::Found { switch } => Some(switch),
            _ => None,
        }
    }

    /// Whether another search of the same command would find the same.
    pub const fn is_lasting(&self) -> bool {
        matches!(self.outcome, StartOutcome::Found { .. } | StartOutcome::NoSwitch)
    }

    /// What follows, in one sentence without a full stop.
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

    /// All of it, line by line: what was seen as configured, each switch, what follows.
    pub fn lines(&self) -> Vec<String> {
        let times = if self.deaths == 1 { "once".to_owned() } else { format!("{} times", self.deaths) };
        let first = format!("the server died {times} while it loaded: {}", self.death);
        let tried = self.tried.iter().map(|one| format!("  with `{}`: {}", one.words, one.how));
        let cost = self.switch().filter(|switch| !switch.cost.is_empty());
        let cost = cost.map(|switch| format!("what that costs: {}", switch.cost));
        std::iter::once(first).chain(tried).chain([self.advice()]).chain(cost).collect()
    }
}

/// What to write into the configuration of `model` for a mitigation: `configured` are those that it has. `overruled`: words of its
/// `args` that say otherwise, and would win. `words`: what is added to the command; `typed`: the model is no entry of a file but
/// llama-server's own command line.
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

/// A name as a key of TOML.
fn toml_key(name: &str) -> String {
    let bare = !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_'));
    if bare { name.to_owned() } else { format!("\"{}\"", name.escape_default()) }
}
