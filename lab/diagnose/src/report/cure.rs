//! What a bisection found, for programs and in words: a table of trials, and sentences about the cure and its cost.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};
use warden_experiment::bisect::{Conclusion, Cost, Outcome, Track, TrialReport};
use warden_experiment::sequential::{Does, Judgement};
use warden_policies::phrases::grows;
use warden_supervisor::Command;

use crate::shell::quoted;

/// What a bisection found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CureReport {
    /// What was to be tried, in this order: indices elsewhere are places in this list.
    pub switches: Vec<Switch>,
    /// What could not be tried, and why.
    pub not_tried: Vec<NotTried>,
    /// What came of it.
    pub conclusion: Conclusion,
    /// `mitigations` of the model with the cure in it; empty without one.
    pub mitigations: Vec<String>,
    /// What the cure comes to where there is no configuration.
    #[serde(default)]
    pub added: Added,
}

/// What a cure changes in the server's command.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Added {
    /// Variables that are set.
    pub env: Vec<(String, String)>,
    /// Variables that are taken away.
    pub env_remove: Vec<String>,
    /// Arguments, to be put behind all others.
    pub args: Vec<String>,
}

impl Added {
    /// What `new` has and `old` has not.
    pub fn between(old: &Command, new: &Command) -> Self {
        let mut rest = old.args.iter().peekable();
        let mut own = |word: &&String| rest.next_if(|next| next == word).is_none();
        Self {
            env: new.env.iter().filter(|pair| !old.env.contains(pair)).cloned().collect(),
            env_remove: new
                .env_remove
                .iter()
                .filter(|name| !old.env_remove.contains(name))
                .cloned()
                .collect(),
            args: new.args.iter().filter(|word| own(word)).cloned().collect(),
        }
    }

    /// As a command line of a shell, with `…` for what is there already.
    pub fn line(&self) -> String {
        let mut words: Vec<String> = Vec::new();
        if !self.env_remove.is_empty() {
            words.push("env".to_owned());
            words.extend(self.env_remove.iter().flat_map(|name| ["-u".to_owned(), quoted(name)]));
        }
        words.extend(self.env.iter().map(|(name, value)| format!("{name}={}", quoted(value))));
        words.extend(["llama-server".to_owned(), "…".to_owned()]);
        words.extend(self.args.iter().map(|word| quoted(word)));
        words.join(" ")
    }
}

/// A switch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Switch {
    /// As `mitigations` of a model takes it.
    pub item: String,
    /// What it is.
    pub title: String,
    /// What it comes to, in words: variables and flags.
    pub does: String,
    /// Which leak the growth looks like that it is known to cure; `None` if it is tried because it is about this memory.
    pub against: Option<String>,
}

/// A switch that cannot be tried.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NotTried {
    /// Its name.
    pub item: String,
    /// Why.
    pub why: String,
}

/// The head of the table.
const HEAD: [&str; 8] =
    ["SWITCHES", "WORKLOAD", "MEMORY", "A REQUEST", "WITH IT", "LEFT", "DOES", "TOKENS/S"];

impl CureReport {
    /// The table of trials; the first row is the head.
    pub fn rows(&self) -> Vec<Vec<String>> {
        let mut rows = vec![HEAD.map(str::to_owned).to_vec()];
        for trial in &self.conclusion.trials {
            let name = self.names(&trial.switches);
            if let Some(why) = &trial.crashed {
                let why = why.lines().next().unwrap_or_default();
                rows.push(vec![name, String::new(), format!("the server failed: {why}")]);
                continue;
            }
            for (index, (track, found)) in trial.tracks.iter().enumerate() {
                let first = |text: String| if index == 0 { text } else { String::new() };
                rows.push(vec![
                    first(name.clone()),
                    track.workload.to_string(),
                    track.series.to_string(),
                    mib(found.without),
                    mib(found.with),
                    left(found),
                    found.does.as_str().to_owned(),
                    first(speed(&trial.cost)),
                ]);
            }
        }
        rows
    }

    /// What was found, a sentence a line.
    pub fn sentences(&self) -> Vec<String> {
        let conclusion = &self.conclusion;
        let mut lines = Vec::new();
        let stop = if conclusion.cure.len() == 1 { "stops" } else { "stop" };
        let cure = format!("{} {stop}", self.names(&conclusion.cure));
        let open: Vec<Track> =
            conclusion.leaking.iter().copied().filter(|track| !conclusion.stopped.contains(track)).collect();
        match &conclusion.outcome {
            Outcome::NothingToCure => {
                lines.push("no leak was found, so there was nothing to cure".to_owned());
            }
            Outcome::NotKnown { why } => lines.push(format!("no cure was looked for: {why}")),
            Outcome::BaselineFailed { why } => {
                lines.push(format!("no cure could be looked for: the server itself fails: {why}"));
            }
            Outcome::Interrupted => lines.push("it was interrupted before a cure was sure".to_owned()),
            Outcome::NotCured => {
                lines.push(format!("nothing that was tried stops the growth of {}", self.tracks(&open)));
            }
            Outcome::Cured => {
                lines.push(format!("{cure} the growth of {}", self.tracks(&conclusion.stopped)));
            }
            Outcome::PartlyCured => {
                lines.push(format!(
                    "{cure} the growth of {}; nothing that was tried stops that of {}",
                    self.tracks(&conclusion.stopped),
                    self.tracks(&open)
                ));
            }
        }
        if let Some(trial) = self.trial(&conclusion.cure) {
            for (track, found) in &trial.tracks {
                lines.push(format!(
                    "{}: {} a request without it, {} with it",
                    self.tracks(&[*track]),
                    mib(found.without),
                    mib(found.with)
                ));
            }
            lines.push(format!("its cost: {}", cost(&trial.cost)));
        }
        if conclusion.cure.len() > 1 {
            for (track, set) in
                conclusion.by_track.iter().filter(|(_, set)| set.len() < conclusion.cure.len())
            {
                lines.push(format!("for {} alone, {} is enough", self.tracks(&[*track]), self.names(set)));
            }
        }
        let alone = conclusion.trials.iter().filter(|trial| trial.switches.len() == 1);
        for trial in alone {
            let halves = |track: &&Track| {
                trial.tracks.iter().any(|(own, found)| own == *track && found.does == Does::Halves)
            };
            let some: Vec<Track> = open.iter().filter(halves).copied().collect();
            if !some.is_empty() {
                lines.push(format!("{} lessens that of {}", self.names(&trial.switches), self.tracks(&some)));
            }
        }
        lines
    }

    /// All that was not tried, and why: what cannot be, and what could have been but never came to its turn.
    pub fn left_out(&self) -> Vec<NotTried> {
        let why = match &self.conclusion.outcome {
            Outcome::NothingToCure => "no leak was found".to_owned(),
            Outcome::NotKnown { why } => why.clone(),
            Outcome::BaselineFailed { .. } => "the server fails without any switch".to_owned(),
            Outcome::Interrupted => "it was interrupted before its turn".to_owned(),
            Outcome::Cured if self.conclusion.cure.len() == 1 => {
                format!("it was not needed: {} alone stops everything", self.names(&self.conclusion.cure))
            }
            Outcome::Cured | Outcome::PartlyCured | Outcome::NotCured => {
                "the search ended before its turn".to_owned()
            }
        };
        left_out(&self.switches, &self.not_tried, self.tried(), &why)
    }

    fn tried(&self) -> impl Iterator<Item = &[usize]> {
        self.conclusion.trials.iter().map(|trial| trial.switches.as_slice())
    }

    /// What the switches that were tried are, a line each.
    pub fn explained(&self) -> Vec<String> {
        explained(&self.switches, self.tried())
    }

    /// The trial of exactly these switches.
    pub fn trial(&self, switches: &[usize]) -> Option<&TrialReport> {
        let own = |trial: &&TrialReport| !switches.is_empty() && trial.switches == switches;
        self.conclusion.trials.iter().find(own)
    }

    /// Their names, with quotes.
    pub fn names(&self, switches: &[usize]) -> String {
        names(&self.switches, switches)
    }

    /// `host and vram0`, with the work where there is more than one kind.
    fn tracks(&self, tracks: &[Track]) -> String {
        let all = &self.conclusion.leaking;
        let several = all.iter().any(|track| Some(track.workload) != all.first().map(|first| first.workload));
        let name = |track: &Track| {
            if several {
                format!("{} under {}", track.series, track.workload)
            } else {
                track.series.to_string()
            }
        };
        tracks.iter().map(name).collect::<Vec<_>>().join(" and ")
    }
}

/// Their names, with quotes.
pub(super) fn names(all: &[Switch], switches: &[usize]) -> String {
    let name = |at: &usize| all.get(*at).map(|switch| format!("`{}`", switch.item));
    switches.iter().filter_map(name).collect::<Vec<_>>().join(" and ")
}

/// The switches of which there was a trial, or of which there was none.
fn part<'a>(
    all: &'a [Switch],
    trials: impl Iterator<Item = &'a [usize]>,
    tried: bool,
) -> impl Iterator<Item = &'a Switch> {
    let known: HashSet<usize> = trials.flatten().copied().collect();
    all.iter().enumerate().filter(move |(at, _)| known.contains(at) == tried).map(|(_, switch)| switch)
}

/// What the switches that were tried are, a line each.
pub(super) fn explained<'a>(all: &'a [Switch], trials: impl Iterator<Item = &'a [usize]>) -> Vec<String> {
    let line = |switch: &Switch| format!("`{}`: {} ({})", switch.item, switch.title, switch.does);
    part(all, trials, true).map(line).collect()
}

/// All that was not tried, and why: what never came to its turn, then what cannot be.
pub(super) fn left_out<'a>(
    all: &'a [Switch],
    not_tried: &[NotTried],
    trials: impl Iterator<Item = &'a [usize]>,
    why: &str,
) -> Vec<NotTried> {
    let untried = |switch: &Switch| NotTried { item: switch.item.clone(), why: why.to_owned() };
    part(all, trials, false).map(untried).chain(not_tried.iter().cloned()).collect()
}

fn mib(bytes: Option<f64>) -> String {
    bytes.map_or_else(|| "?".to_owned(), grows)
}

fn left(found: &Judgement) -> String {
    found.share.map_or_else(|| "?".to_owned(), |share| format!("{:.0} %", (share.value * 100.0).max(0.0)))
}

fn speed(cost: &Cost) -> String {
    cost.tokens_per_second.map_or_else(String::new, |rate| format!("{:+.1} %", rate.change() * 100.0))
}

/// What a set of switches costs, in words.
pub(crate) fn cost(cost: &Cost) -> String {
    let rate = cost.tokens_per_second.map(|rate| {
        format!(
            "tokens per second {:+.1} % ({:.1} without it, {:.1} with it)",
            rate.change() * 100.0,
            rate.without,
            rate.with
        )
    });
    let first = cost.first_token.map(|time| {
        format!(
            "time to the first token {:+.1} % ({:.0} ms without it, {:.0} ms with it)",
            time.change() * 100.0,
            time.without * 1000.0,
            time.with * 1000.0
        )
    });
    let all: Vec<String> = rate.into_iter().chain(first).collect();
    if all.is_empty() { "not known: the server does not tell its speed".to_owned() } else { all.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(args: &[&str], env: &[(&str, &str)], away: &[&str]) -> Command {
        let words = |list: &[&str]| list.iter().map(|&word| word.to_owned()).collect();
        Command {
            args: words(args),
            env: env.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect(),
            env_remove: words(away),
            ..Command::bare("llama-server".into())
        }
    }

    #[test]
    fn what_a_cure_adds_is_a_line_for_a_shell() {
        let old = command(&["-m", "a", "-np", "1"], &[("A", "1")], &["X"]);
        let new = command(
            &["-m", "a", "--flag", "it's", "-np", "1", "--last", "1"],
            &[("A", "1"), ("B", "2 3")],
            &["X", "Y"],
        );
        let added = Added::between(&old, &new);
        assert_eq!(added.line(), r#"env -u Y B='2 3' llama-server … --flag "it's" --last 1"#);
        assert_eq!(Added::between(&old, &old), Added::default());
    }
}
