//! Reports a bisection: a table of trials, and sentences about the cure and its cost.

use std::collections::HashSet;

use serde::{Deserialize, Serialize};
use warden_experiment::bisect::{CureConclusion, CureOutcome, SwitchCost, TrialReport, WorkloadMemory};
use warden_experiment::sequential::{SwitchEffect, SwitchJudgement};
use warden_policies::phrases::growth_phrase;
use warden_supervisor::ServerCommand;

use crate::shell::{quote_assignment, quote_word};

/// Result of a bisection.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CureReport {
    /// Switches in order of trial; indices elsewhere refer to this list.
    pub switches: Vec<TrialSwitch>,
    /// Switches that could not be tried, with reasons.
    pub not_tried: Vec<UntriedSwitch>,
    /// Conclusion of the bisection.
    pub conclusion: CureConclusion,
    /// `mitigations` of the model with the cure; empty without a cure.
    pub mitigations: Vec<String>,
    /// Flags and variables of the cure, for use without a configuration.
    #[serde(default)]
    pub added: CommandChanges,
}

/// Changes that a cure makes to the server's command.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommandChanges {
    /// Variables to set.
    pub env: Vec<(String, String)>,
    /// Variables to remove.
    pub env_remove: Vec<String>,
    /// Arguments to append.
    pub args: Vec<String>,
}

impl CommandChanges {
    /// Returns the changes from `old` to `new`.
    pub fn between(old: &ServerCommand, new: &ServerCommand) -> Self {
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

    /// Returns a shell command line, with `…` for the existing command.
    pub fn command_line(&self) -> String {
        let mut words: Vec<String> = Vec::new();
        if !self.env_remove.is_empty() {
            words.push("env".to_owned());
            words.extend(self.env_remove.iter().flat_map(|name| ["-u".to_owned(), quote_word(name)]));
        }
        words.extend(self.env.iter().map(|(name, value)| quote_assignment(name, value)));
        words.extend(["llama-server".to_owned(), "…".to_owned()]);
        words.extend(self.args.iter().map(|word| quote_word(word)));
        words.join(" ")
    }
}

/// Mitigation to try.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrialSwitch {
    /// Item for `mitigations` of a model.
    pub item: String,
    /// Short description.
    pub title: String,
    /// Variables and flags of the mitigation, in words.
    pub does: String,
    /// Known leak that the growth resembles and the mitigation cures; `None` if the mitigation only affects
    /// the growing memory.
    pub against: Option<String>,
}

/// Switch that was not tried.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UntriedSwitch {
    /// Name of the switch.
    pub item: String,
    /// Reason.
    pub why: String,
}

const TABLE_HEAD: [&str; 8] =
    ["SWITCHES", "WORKLOAD", "MEMORY", "A REQUEST", "WITH IT", "LEFT", "DOES", "TOKENS/S"];

impl CureReport {
    /// Returns the table of trials; the first row is the head.
    pub fn rows(&self) -> Vec<Vec<String>> {
        let mut rows = vec![TABLE_HEAD.map(str::to_owned).to_vec()];
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
                    growth_text(found.without),
                    growth_text(found.with),
                    remaining_text(found),
                    found.does.as_str().to_owned(),
                    first(speed_change_text(&trial.cost)),
                ]);
            }
        }
        rows
    }

    /// Returns the findings, a sentence a line.
    pub fn sentences(&self) -> Vec<String> {
        let conclusion = &self.conclusion;
        let stop = if conclusion.cure.len() == 1 { "stops" } else { "stop" };
        let cure = format!("{} {stop}", self.names(&conclusion.cure));
        let open: Vec<WorkloadMemory> =
            conclusion.leaking.iter().copied().filter(|track| !conclusion.stopped.contains(track)).collect();
        let stopped = self.tracks(&conclusion.stopped);
        let growing = self.tracks(&open);
        let mut lines = vec![match &conclusion.outcome {
            CureOutcome::NothingToCure => "no leak was found, so there was nothing to cure".to_owned(),
            CureOutcome::NotKnown { why } => format!("no cure was looked for: {why}"),
            CureOutcome::BaselineFailed { why } => {
                format!("no cure could be looked for: the server itself fails: {why}")
            }
            CureOutcome::Interrupted => "it was interrupted before a cure was sure".to_owned(),
            CureOutcome::NotCured => format!("nothing that was tried stops the growth of {growing}"),
            CureOutcome::Cured => format!("{cure} the growth of {stopped}"),
            CureOutcome::PartlyCured => {
                format!("{cure} the growth of {stopped}; nothing that was tried stops that of {growing}")
            }
        }];
        if let Some(trial) = self.trial(&conclusion.cure) {
            for (track, found) in &trial.tracks {
                lines.push(format!(
                    "{}: {} a request without it, {} with it",
                    self.tracks(&[*track]),
                    growth_text(found.without),
                    growth_text(found.with)
                ));
            }
            lines.push(format!("its cost: {}", cost_text(&trial.cost)));
        }
        if conclusion.cure.len() > 1 {
            for (track, set) in
                conclusion.by_track.iter().filter(|(_, set)| set.len() < conclusion.cure.len())
            {
                lines.push(format!("for {} alone, {} is enough", self.tracks(&[*track]), self.names(set)));
            }
        }
        for trial in conclusion.trials.iter().filter(|trial| trial.switches.len() == 1) {
            let halves = |track: &&WorkloadMemory| {
                trial.tracks.iter().any(|(own, found)| own == *track && found.does == SwitchEffect::Halves)
            };
            let some: Vec<WorkloadMemory> = open.iter().filter(halves).copied().collect();
            if !some.is_empty() {
                lines.push(format!("{} lessens that of {}", self.names(&trial.switches), self.tracks(&some)));
            }
        }
        lines
    }

    /// Returns all switches that were not tried, with reasons.
    pub fn left_out(&self) -> Vec<UntriedSwitch> {
        let why = match &self.conclusion.outcome {
            CureOutcome::NothingToCure => "no leak was found".to_owned(),
            CureOutcome::NotKnown { why } => why.clone(),
            CureOutcome::BaselineFailed { .. } => "the server fails without any switch".to_owned(),
            CureOutcome::Interrupted => "it was interrupted before its turn".to_owned(),
            CureOutcome::Cured if self.conclusion.cure.len() == 1 => {
                format!("it was not needed: {} alone stops everything", self.names(&self.conclusion.cure))
            }
            CureOutcome::Cured | CureOutcome::PartlyCured | CureOutcome::NotCured => {
                "the search ended before its turn".to_owned()
            }
        };
        left_out(&self.switches, &self.not_tried, self.tried_switches(), &why)
    }

    fn tried_switches(&self) -> impl Iterator<Item = &[usize]> {
        self.conclusion.trials.iter().map(|trial| trial.switches.as_slice())
    }

    /// Returns explanations of the tried switches, a line each.
    pub fn explanations(&self) -> Vec<String> {
        explained(&self.switches, self.tried_switches())
    }

    /// Returns the trial of exactly these switches.
    pub fn trial(&self, switches: &[usize]) -> Option<&TrialReport> {
        let own = |trial: &&TrialReport| !switches.is_empty() && trial.switches == switches;
        self.conclusion.trials.iter().find(own)
    }

    /// Returns the quoted names of switches.
    pub fn names(&self, switches: &[usize]) -> String {
        names(&self.switches, switches)
    }

    /// Formats `host and vram0`, with the workload if there are several.
    fn tracks(&self, tracks: &[WorkloadMemory]) -> String {
        let all = &self.conclusion.leaking;
        let several = all.iter().any(|track| Some(track.workload) != all.first().map(|first| first.workload));
        let name = |track: &WorkloadMemory| {
            if several {
                format!("{} under {}", track.series, track.workload)
            } else {
                track.series.to_string()
            }
        };
        tracks.iter().map(name).collect::<Vec<_>>().join(" and ")
    }
}

pub(super) fn names(all: &[TrialSwitch], switches: &[usize]) -> String {
    let name = |at: &usize| all.get(*at).map(|switch| format!("`{}`", switch.item));
    switches.iter().filter_map(name).collect::<Vec<_>>().join(" and ")
}

fn switches_by_trial<'a>(
    all: &'a [TrialSwitch],
    trials: impl Iterator<Item = &'a [usize]>,
    tried: bool,
) -> impl Iterator<Item = &'a TrialSwitch> {
    let known: HashSet<usize> = trials.flatten().copied().collect();
    all.iter().enumerate().filter(move |(at, _)| known.contains(at) == tried).map(|(_, switch)| switch)
}

pub(super) fn explained<'a>(
    all: &'a [TrialSwitch],
    trials: impl Iterator<Item = &'a [usize]>,
) -> Vec<String> {
    let line = |switch: &TrialSwitch| format!("`{}`: {} ({})", switch.item, switch.title, switch.does);
    switches_by_trial(all, trials, true).map(line).collect()
}

/// Returns first the switches that were not reached, then those that cannot be tried.
pub(super) fn left_out<'a>(
    all: &'a [TrialSwitch],
    not_tried: &[UntriedSwitch],
    trials: impl Iterator<Item = &'a [usize]>,
    why: &str,
) -> Vec<UntriedSwitch> {
    let untried = |switch: &TrialSwitch| UntriedSwitch { item: switch.item.clone(), why: why.to_owned() };
    switches_by_trial(all, trials, false).map(untried).chain(not_tried.iter().cloned()).collect()
}

fn growth_text(bytes: Option<f64>) -> String {
    bytes.map_or_else(|| "?".to_owned(), growth_phrase)
}

fn remaining_text(found: &SwitchJudgement) -> String {
    found.share.map_or_else(|| "?".to_owned(), |share| format!("{:.0} %", (share.value * 100.0).max(0.0)))
}

fn speed_change_text(cost: &SwitchCost) -> String {
    cost.tokens_per_second.map_or_else(String::new, |rate| format!("{:+.1} %", rate.change() * 100.0))
}

pub(crate) fn cost_text(cost: &SwitchCost) -> String {
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

    fn command(args: &[&str], env: &[(&str, &str)], away: &[&str]) -> ServerCommand {
        let words = |list: &[&str]| list.iter().map(|&word| word.to_owned()).collect();
        ServerCommand {
            args: words(args),
            env: env.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect(),
            env_remove: words(away),
            ..ServerCommand::from_binary("llama-server".into())
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
        let added = CommandChanges::between(&old, &new);
        assert_eq!(added.command_line(), r#"env -u Y B='2 3' llama-server … --flag "it's" --last 1"#);
        assert_eq!(CommandChanges::between(&old, &old), CommandChanges::default());
    }
}
