//! Reports in words, and in a table, a crash and the switches that stop it.

use serde::{Deserialize, Serialize};
use warden_experiment::crash::{CrashRecurrence, CrashRun, WorkloadCrash};
use warden_experiment::sequential::SwitchEffect;
use warden_experiment::survive::{SurvivalConclusion, SurvivalOutcome, SurvivalTrial};
use warden_experiment::{LegFinding, Workload};

use super::cure::{CommandChanges, TrialSwitch, UntriedSwitch, explained, left_out, names};
use super::table::leg_name;

/// Result of the trials against a crash under one workload.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SurvivalReport {
    /// Workload that crashes the server.
    pub workload: Workload,
    /// Switches in order of trial; indices elsewhere refer to this list.
    pub switches: Vec<TrialSwitch>,
    /// Switches that could not be tried, with reasons.
    pub not_tried: Vec<UntriedSwitch>,
    /// Conclusion of the trials.
    pub conclusion: SurvivalConclusion,
    /// `mitigations` of the model with the cure; empty without a cure.
    pub mitigations: Vec<String>,
    /// Flags and variables of the cure, for use without a configuration.
    pub added: CommandChanges,
}

pub(super) fn crash_text(leg: &LegFinding, crash: &WorkloadCrash) -> String {
    format!(
        "the server crashed under {} at request {}, {}: {}",
        leg_name(leg),
        crash.at_request,
        repeat_text(crash),
        crash.why
    )
}

pub(super) fn repeat_text(crash: &WorkloadCrash) -> String {
    let died = crash.runs.iter().filter(|run| run.died).count();
    match (crash.again, crash.runs.len()) {
        (CrashRecurrence::Always, all) => format!("every time ({died} of {all} further runs)"),
        (CrashRecurrence::Sometimes, all) => format!("not every time ({died} of {all} further runs)"),
        (CrashRecurrence::NotAgain, all) => format!("and not again in {all} further runs"),
        (CrashRecurrence::Undecided, 0) => "which was not repeated".to_owned(),
        (CrashRecurrence::Undecided, all) => format!("in {died} of {all} further runs"),
    }
}

/// Describes the crash, a line each; the last lines are from the server's output.
pub(super) fn crash_lines(leg: &LegFinding, crash: &WorkloadCrash) -> Vec<String> {
    let of = leg_name(leg);
    let mut lines = vec![crash_text(leg, crash)];
    if !crash.runs.is_empty() {
        lines.push(format!("{of}: the same in fresh processes: {}", runs_text(&crash.runs)));
    }
    if !crash.lines.is_empty() {
        lines.push(format!("{of}: the last lines of the server:"));
        lines.extend(crash.lines.iter().map(|line| format!("{of} | {}", line.trim_end())));
    }
    lines
}

/// Formats `died at request 22, 22 and 21; survived 184`.
pub(super) fn runs_text(runs: &[CrashRun]) -> String {
    let list = |died: bool| {
        let all: Vec<String> =
            runs.iter().filter(|run| run.died == died).map(|run| run.requests.to_string()).collect();
        match all.split_last() {
            Some((last, [])) => last.clone(),
            Some((last, others)) => format!("{} and {last}", others.join(", ")),
            None => String::new(),
        }
    };
    let died = list(true);
    let survived = list(false);
    match (died.is_empty(), survived.is_empty()) {
        (false, false) => format!("died at request {died}; survived {survived}"),
        (false, true) => format!("died at request {died}"),
        (true, false) => format!("survived {survived}"),
        (true, true) => "none".to_owned(),
    }
}

const TABLE_HEAD: [&str; 5] = ["SWITCHES", "RUNS", "DOES", "MEMORY", "TOKENS/S"];

impl SurvivalReport {
    /// Returns the table of trials; the first row is the head.
    pub fn rows(&self) -> Vec<Vec<String>> {
        let speed = |speed: Option<f64>| speed.map_or_else(|| "?".to_owned(), |speed| format!("{speed:.0}"));
        let mut rows = vec![TABLE_HEAD.map(str::to_owned).to_vec()];
        let found = &self.conclusion;
        if !found.without.is_empty() {
            rows.push(vec![
                "(none)".to_owned(),
                runs_text(&found.without),
                String::new(),
                String::new(),
                speed(found.tokens_per_second),
            ]);
        }
        for trial in &found.trials {
            let name = self.names(&trial.switches);
            match &trial.failed {
                Some(why) if trial.runs.is_empty() => {
                    rows.push(vec![name, format!("no result: {}", why.lines().next().unwrap_or_default())]);
                }
                _ => rows.push(vec![
                    name,
                    runs_text(&trial.runs),
                    effect_text(trial).to_owned(),
                    memory_text(trial),
                    speed(trial.tokens_per_second),
                ]),
            }
        }
        rows
    }

    /// Returns the findings, a sentence a line.
    pub fn sentences(&self) -> Vec<String> {
        let found = &self.conclusion;
        let under = format!("the crash under {}", self.workload);
        let mut lines = vec![match &found.outcome {
            SurvivalOutcome::Cured => {
                let stop = if found.cure.len() == 1 { "stops" } else { "stop" };
                format!("{} {stop} {under}", self.names(&found.cure))
            }
            SurvivalOutcome::NotCured => format!("nothing that was tried stops {under}"),
            SurvivalOutcome::NotAgain => format!("{under} did not recur, so what stops it cannot be found"),
            SurvivalOutcome::BaselineFailed { why } => {
                format!("the search for what stops {under} failed: {why}")
            }
            SurvivalOutcome::Interrupted => {
                format!("it was interrupted before it was sure what stops {under}")
            }
        }];
        let cured = found.trials.iter().find(|trial| !found.cure.is_empty() && trial.switches == found.cure);
        if let Some(trial) = cured {
            lines.push(format!(
                "without it: {}; with it: {}",
                runs_text(&found.without),
                runs_text(&trial.runs)
            ));
            if let Some(doubt) = found.doubt {
                lines.push(format!(
                    "were the switch without effect, as much would be seen in {:.1} of 100 searches at most",
                    (doubt * 100.0).max(0.1)
                ));
            }
            let memory = memory_text(trial);
            if !memory.is_empty() {
                lines.push(format!("the memory of a process that survives: {memory}"));
            }
        }
        lines
    }

    /// Returns all switches that were not tried, with reasons.
    pub fn left_out(&self) -> Vec<UntriedSwitch> {
        let why = match &self.conclusion.outcome {
            SurvivalOutcome::Cured => {
                format!("it was not needed: {} stops the crash", self.names(&self.conclusion.cure))
            }
            SurvivalOutcome::NotAgain => "the crash did not recur".to_owned(),
            SurvivalOutcome::Interrupted => "it was interrupted before its turn".to_owned(),
            SurvivalOutcome::NotCured | SurvivalOutcome::BaselineFailed { .. } => {
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

    /// Returns the quoted names of switches.
    pub fn names(&self, switches: &[usize]) -> String {
        names(&self.switches, switches)
    }
}

fn effect_text(trial: &SurvivalTrial) -> &'static str {
    match trial.does {
        SwitchEffect::Stops => "stops it",
        SwitchEffect::Nothing => "nothing",
        SwitchEffect::Halves | SwitchEffect::Undecided => "undecided",
    }
}

fn memory_text(trial: &SurvivalTrial) -> String {
    let all = trial.memory.iter().map(|(series, verdict)| format!("{series} {}", verdict.as_str()));
    all.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_told_with_the_request_at_which_each_died() {
        let run = |requests, died| CrashRun { requests, died };
        assert_eq!(
            runs_text(&[run(22, true), run(21, true), run(184, false)]),
            "died at request 22 and 21; survived 184"
        );
        assert_eq!(runs_text(&[run(3, true)]), "died at request 3");
        assert_eq!(runs_text(&[run(9, false), run(8, false), run(7, false)]), "survived 9, 8 and 7");
    }
}
