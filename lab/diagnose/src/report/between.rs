//! Reports in words, and in a table, the revision that introduced a symptom.

use serde::{Deserialize, Serialize};
use warden_experiment::between::{
    EndsDifference, JudgedRevision, RevisionAim, RevisionAnswers, RevisionConclusion, RevisionOutcome,
    RevisionPace, RevisionStanding, RevisionSymptom,
};
use warden_experiment::proof::{MetricRatio, ProofRuling};
use warden_policies::{MemoryKind, phrases};

use super::crash::runs_text;
use super::proof::{change_text, metric_name, metric_value};

/// Names of a revision for people.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RevisionLabel {
    /// 40 hexadecimal digits.
    pub commit: String,
    /// Build tag of the commit, or the closest one.
    pub label: String,
    /// Date of the commit: `2026-08-22`.
    pub date: String,
    /// First line of the commit message.
    pub subject: String,
}

/// Result of a search between two revisions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BetweenReport {
    /// URL or path of the repository.
    pub repository: String,
    /// Revisions, oldest first; indices in the conclusion refer to this list.
    pub line: Vec<RevisionLabel>,
    /// Conclusion of the search.
    pub conclusion: RevisionConclusion,
}

const SHORT_DIGITS: usize = 9;

/// Most questions named in a sentence, and most listed with their differences.
const MAX_NAMED: usize = 3;
/// Most characters shown of an answer.
const MAX_ANSWER_CHARS: usize = 240;
/// Least share of a slowdown that counts as all of it.
const WHOLE_SLOWDOWN: f64 = 0.75;

const TABLE_HEAD: [&str; 6] = ["REVISION", "COMMIT", "DATE", "SAYS", "PROCESSES", "SUBJECT"];

impl RevisionLabel {
    fn short_commit(&self) -> &str {
        self.commit.get(..SHORT_DIGITS).unwrap_or(&self.commit)
    }

    /// Formats `b9602 (1593d5684, 2026-08-22)`.
    fn full_label(&self) -> String {
        format!("{} ({}, {})", self.label, self.short_commit(), self.date)
    }
}

impl BetweenReport {
    /// Returns the findings, a line each.
    pub fn sentences(&self) -> Vec<String> {
        let found = &self.conclusion;
        let name = |at| self.revision_name(at);
        let bounds = found.bounds.map(|(healthy, ill)| (healthy.min(ill), healthy.max(ill)));
        let mut lines = vec![self.outcome_sentence()];
        match (&found.outcome, bounds) {
            (RevisionOutcome::Found { revision }, _) => {
                let before = name(revision.saturating_sub(1));
                let stands = match (found.aim, found.ill_is_newer) {
                    (RevisionAim::Answers, _) => "answers as the older end does",
                    (_, Some(false)) => "still has it",
                    _ => "does not have it",
                };
                lines.push(format!("{before}, the one before it, {stands}; both were judged twice"));
                lines.extend(self.more_than_one());
            }
            (RevisionOutcome::Unsteady { .. }, Some((low, high))) => {
                lines.push(format!("until then it lay between {} and {}", name(low), name(high)));
            }
            (RevisionOutcome::Interrupted, Some((low, high))) => lines.push(if high - low == 1 {
                format!("{} is left, to be judged once more", name(high))
            } else {
                let count = high - low;
                let first = name(low + 1);
                let last = name(high);
                format!("{count} revisions are left, from {first} to {last}")
            }),
            _ => {}
        }
        lines.extend(found.ratios.iter().map(speed_text));
        let named = found.differences.iter().take(MAX_NAMED);
        lines.extend(named.map(|one| distance_text(&one.request, one.distance, one.shared, one.of)));
        lines
    }

    fn revision_name(&self, at: usize) -> String {
        self.line.get(at).map_or_else(|| format!("number {at}"), RevisionLabel::full_label)
    }

    fn outcome_sentence(&self) -> String {
        let found = &self.conclusion;
        let what = found.symptom.as_ref().map_or_else(|| "the symptom".to_owned(), symptom_text);
        let did = if found.ill_is_newer == Some(false) { "ended" } else { "brought" };
        let name = |at| self.revision_name(at);
        match &found.outcome {
            RevisionOutcome::Found { revision } => {
                let subject = self.line.get(*revision).map_or("", |one| one.subject.as_str());
                format!("{} {did} {what}: {subject}", name(*revision))
            }
            RevisionOutcome::Among { first, last } => format!(
                "one of {} revisions {did} {what}: from {} to {}; those between them cannot be told, which \
                 the table explains",
                last - first + 1,
                name(*first),
                name(*last)
            ),
            RevisionOutcome::Unsteady { revision } => {
                let hint = match found.aim {
                    RevisionAim::Growth => "more readings (`--requests`) make processes differ less",
                    RevisionAim::Slowdown => "with nothing else on the machine processes differ less",
                    RevisionAim::Answers => "it does not answer alike each time",
                };
                let name = name(*revision);
                format!("not sure: {name} was judged otherwise when it was judged once more; {hint}")
            }
            RevisionOutcome::BothIll => {
                "both ends have it, so no revision between them brought it or ended it".to_owned()
            }
            RevisionOutcome::NeitherIll { suspected: true, .. } => {
                "an end is suspected to leak, and nothing more than that: take more readings (`--requests`)"
                    .to_owned()
            }
            RevisionOutcome::NeitherIll { short: false, .. } => {
                "neither end leaks or dies under this work, so there is nothing to look for".to_owned()
            }
            RevisionOutcome::NeitherIll { short: true, .. } => {
                "there are too few readings of an end to say whether it leaks: take more (`--requests`)"
                    .to_owned()
            }
            RevisionOutcome::Alike { sure } => small_difference_text(&found.differences)
                .unwrap_or_else(|| no_difference_text(found.aim, *sure).to_owned()),
            RevisionOutcome::NotAgain => "the crash did not recur, so its origin cannot be found".to_owned(),
            RevisionOutcome::EndFailed { newer, why } => {
                format!("the {} end cannot be judged: {why}", if *newer { "newer" } else { "older" })
            }
            RevisionOutcome::IllFailed { why } => {
                format!("the end that has it could not be run any more: {why}")
            }
            RevisionOutcome::Interrupted => "interrupted; the same command continues from here".to_owned(),
        }
    }

    /// Returns a sentence if more than one revision contributed to the ends' difference.
    fn more_than_one(&self) -> Option<String> {
        let judged = || self.conclusion.judged.iter();
        let third = |one: &&JudgedRevision| one.answers.as_ref().is_some_and(RevisionAnswers::is_third);
        if let Some(third) = judged().find(third) {
            let name = self.line.get(third.revision).map(RevisionLabel::full_label)?;
            return Some(format!(
                "more than one revision changed answers, because {name} answers neither as the older end \
                 nor as the newer one; this is the \
                 first that differs from the older end"
            ));
        }
        let share = |at: usize| {
            let own = judged().rev().find(|one| one.revision == at && one.pace.is_some())?;
            own.pace.as_ref()?.share.map(|share| share.value)
        };
        let (healthy, ill) = self.conclusion.bounds?;
        let own = (share(ill)? - share(healthy)?).max(0.0);
        (own < WHOLE_SLOWDOWN).then(|| {
            format!(
                "it has {:.0} % of the difference between the ends; other revisions have the rest",
                own * 100.0
            )
        })
    }

    /// Returns the answers that differ between the ends; the first row is the head.
    pub fn answer_rows(&self) -> Vec<Vec<String>> {
        let cut = |text: &str| {
            let short: String = text.chars().take(MAX_ANSWER_CHARS).collect();
            if short.len() < text.len() { format!("{short}…") } else { short }
        };
        let rows = self.conclusion.differences.iter();
        let rows = rows.map(|one| vec![one.request.clone(), cut(&one.older), cut(&one.newer)]);
        let head = ["REQUEST", "OLDER", "NEWER"].map(str::to_owned).to_vec();
        std::iter::once(head).chain(rows).collect()
    }

    /// Returns the judged revisions in their order, repeated judgements marked; the first row is the head.
    pub fn rows(&self) -> Vec<Vec<String>> {
        let mut judged: Vec<&JudgedRevision> = self.conclusion.judged.iter().collect();
        judged.sort_by_key(|one| one.revision);
        let rows = judged.into_iter().map(|one| {
            let revision = self.line.get(one.revision);
            let text = |of: fn(&RevisionLabel) -> &str| revision.map_or("?", of).to_owned();
            vec![
                text(|one| &one.label),
                text(RevisionLabel::short_commit),
                text(|one| &one.date),
                judgement_text(one),
                (one.legs + one.runs.len()).to_string(),
                text(|one| &one.subject),
            ]
        });
        std::iter::once(TABLE_HEAD.map(str::to_owned).to_vec()).chain(rows).collect()
    }
}

/// Formats `growth of host memory under same-image`.
pub(super) fn symptom_text(symptom: &RevisionSymptom) -> String {
    match symptom {
        RevisionSymptom::Growth { track, .. } => {
            let memory = match track.series {
                MemoryKind::Host => "host memory".to_owned(),
                MemoryKind::Vram(gpu) => format!("the memory of GPU {}", gpu.0),
            };
            format!("the growth of {memory} under {}", track.workload)
        }
        RevisionSymptom::Crash { workload, .. } => format!("the crash under {workload}"),
        RevisionSymptom::Slowdown { metric } => format!("the slowdown of {}", metric_name(*metric)),
        RevisionSymptom::Answers { requests } => {
            let named: Vec<String> =
                requests.iter().take(MAX_NAMED).map(|request| format!("“{request}”")).collect();
            let more = match requests.len().saturating_sub(MAX_NAMED) {
                0 => String::new(),
                more => format!(" and {more} more"),
            };
            format!("other answers to {}{more}", named.join(", "))
        }
    }
}

fn small_difference_text(differences: &[EndsDifference]) -> Option<String> {
    let count = Some(differences.len()).filter(|count| *count > 0)?;
    let most = differences.iter().filter_map(|one| one.distance).fold(0.0, f64::max);
    Some(format!(
        "both ends answer nearly the same: {count} answer{} otherwise, no difference is larger than \
         {most:.3}, and `proof.distance` allows \
         for more; `proof.answers = \"equal\"` counts all",
        if count == 1 { " reads" } else { "s read" }
    ))
}

const fn no_difference_text(aim: RevisionAim, sure: bool) -> &'static str {
    match (aim, sure) {
        (RevisionAim::Answers, true) => "both ends answer the same, so there is nothing to look for",
        (RevisionAim::Answers, false) => {
            "no question tells the ends apart: one of them does not answer alike each time, and that hides \
             what else differs"
        }
        (_, true) => "neither end is slower than the other, so there is nothing to look for",
        (_, false) => "processes of one build differ too much to say whether an end is slower",
    }
}

/// Formats `decode: 401.2 t/s at the older end, 350.0 t/s at the newer one (-12.8 % (-14.0 to -11.0)),
/// worse`.
fn speed_text(ratio: &MetricRatio) -> String {
    let older = metric_value(ratio.metric, ratio.old);
    let newer = metric_value(ratio.metric, ratio.new);
    let ruling = match ratio.ruling {
        ProofRuling::Worse => ", slower",
        ProofRuling::Better => ", faster",
        ProofRuling::Same | ProofRuling::Unknown => "",
    };
    let name = metric_name(ratio.metric);
    format!("{name}: {older} at the older end, {newer} at the newer one ({}){ruling}", change_text(ratio))
}

/// Formats `“text 1”: 12 of 64 tokens agree, 1.250 nats apart`.
pub(super) fn distance_text(request: &str, distance: Option<f64>, shared: usize, of: usize) -> String {
    match distance {
        Some(distance) if of > 0 => {
            format!("“{request}”: {shared} of {of} tokens agree, {distance:.3} nats apart")
        }
        Some(distance) => format!("“{request}”: {distance:.3} apart"),
        None => format!("“{request}”: another answer"),
    }
}

fn judgement_text(judged: &JudgedRevision) -> String {
    let stands = match &judged.standing {
        RevisionStanding::Healthy => "healthy",
        RevisionStanding::Ill => "ill",
        RevisionStanding::Unknown { why } => {
            return format!("not known: {}", why.lines().next().unwrap_or_default());
        }
    };
    if let Some(pace) = &judged.pace {
        return format!("{stands}: {}", pace_text(pace));
    }
    if let Some(said) = &judged.answers {
        return format!("{stands}: {}", answers_text(said));
    }
    if !judged.runs.is_empty() {
        return format!("{stands}: {}", runs_text(&judged.runs));
    }
    match judged.judgement.as_ref().and_then(|found| found.with) {
        Some(rate) => format!("{stands}: {} a request", phrases::growth_phrase(rate)),
        None => stands.to_owned(),
    }
}

/// Formats `350.1 t/s, 97 % of the slowdown`.
fn pace_text(pace: &RevisionPace) -> String {
    let seconds = metric_value(pace.metric, pace.seconds);
    // A revision faster than the faster end has a negative share.
    let share = |share: f64| if share < 0.005 { 0.0 } else { share * 100.0 };
    pace.share.map_or(seconds.clone(), |own| format!("{seconds}, {:.0} % of the slowdown", share(own.value)))
}

fn answers_text(said: &RevisionAnswers) -> String {
    let all = [&said.otherwise, &said.unsteady, &said.missing].map(Vec::len).into_iter().sum::<usize>();
    let all = all + said.as_older + said.as_newer;
    match said.otherwise.first() {
        Some(request) => {
            format!("otherwise than both ends to {} of {all}, “{request}”", said.otherwise.len())
        }
        None if said.as_newer == all => "as the newer end".to_owned(),
        None if said.as_older == all => "as the older end".to_owned(),
        None => format!("as the newer end to {} of {all}", said.as_newer),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use warden_experiment::Workload;
    use warden_experiment::bisect::WorkloadMemory;
    use warden_experiment::crash::CrashRun;
    use warden_experiment::proof::BuildMetric;
    use warden_experiment::sequential::{SwitchEffect, SwitchJudgement};
    use warden_policies::growth::IntervalEstimate;

    fn report(outcome: RevisionOutcome, ill_is_newer: bool) -> BetweenReport {
        let revision = |at: usize| RevisionLabel {
            commit: format!("{at:040}"),
            label: format!("b{}", 9000 + at),
            date: "2026-08-22".to_owned(),
            subject: format!("server : change number {at}"),
        };
        let judgement = |rate| SwitchJudgement {
            does: SwitchEffect::Nothing,
            share: None,
            without: Some(4e5),
            with: Some(rate),
        };
        let judged = |revision, standing, rate: Option<f64>| JudgedRevision {
            revision,
            standing,
            legs: 2,
            judgement: rate.map(judgement),
            runs: Vec::new(),
            again: false,
            pace: None,
            answers: None,
        };
        let unknown = RevisionStanding::Unknown { why: "compile failed:\nerror: x".to_owned() };
        BetweenReport {
            repository: "https://example.org/llama.cpp".to_owned(),
            line: (0..9).map(revision).collect(),
            conclusion: RevisionConclusion {
                outcome,
                aim: RevisionAim::Growth,
                symptom: Some(RevisionSymptom::Growth {
                    track: WorkloadMemory { workload: Workload::SameImage, series: MemoryKind::Host },
                    control: false,
                }),
                ill_is_newer: Some(ill_is_newer),
                bounds: Some((3, 5)),
                judged: vec![
                    judged(0, RevisionStanding::Healthy, Some(120.0)),
                    judged(5, RevisionStanding::Ill, Some(409_600.0)),
                    judged(4, unknown, None),
                    JudgedRevision {
                        runs: vec![
                            CrashRun { requests: 22, died: true },
                            CrashRun { requests: 184, died: false },
                        ],
                        ..judged(3, RevisionStanding::Ill, None)
                    },
                ],
                newer: Vec::new(),
                older: Vec::new(),
                ratios: Vec::new(),
                differences: Vec::new(),
                legs: 12,
            },
        }
    }

    #[test]
    fn what_was_found_is_told_in_words_and_what_was_judged_in_a_table() {
        let all = [
            (RevisionOutcome::Found { revision: 5 }, true),
            (RevisionOutcome::Found { revision: 5 }, false),
            (RevisionOutcome::Among { first: 4, last: 5 }, true),
            (RevisionOutcome::Unsteady { revision: 3 }, true),
            (RevisionOutcome::BothIll, true),
            (RevisionOutcome::NeitherIll { short: false, suspected: false }, true),
            (RevisionOutcome::NeitherIll { short: false, suspected: true }, true),
            (RevisionOutcome::NeitherIll { short: true, suspected: false }, true),
            (RevisionOutcome::NotAgain, true),
            (RevisionOutcome::EndFailed { newer: false, why: "it does not build".to_owned() }, true),
            (RevisionOutcome::IllFailed { why: "killed".to_owned() }, true),
            (RevisionOutcome::Interrupted, true),
        ];
        let mut text = String::new();
        for (outcome, newer) in all {
            text += &(report(outcome, newer).sentences().join("\n") + "\n\n");
        }
        for row in report(RevisionOutcome::NotAgain, true).rows() {
            text += &(row.join(" | ") + "\n");
        }
        insta::assert_snapshot!(text);
    }

    fn told(all: &[BetweenReport]) -> String {
        let mut text = String::new();
        for report in all {
            let rows = report.rows().into_iter().map(|row| row.join(" | "));
            let lines: Vec<String> = report.sentences().into_iter().chain(rows).collect();
            text.extend([lines.join("\n"), "\n\n".to_owned()]);
        }
        text
    }

    #[test]
    fn a_slowdown_is_told_with_how_much_of_it_each_revision_has() {
        let interval = |value| IntervalEstimate { value, low: value - 0.1, high: value + 0.1 };
        let metric = BuildMetric::Decode;
        let of = |outcome, newer: bool, share| {
            let mut report = report(outcome, newer);
            let found = &mut report.conclusion;
            (found.aim, found.symptom) = (RevisionAim::Slowdown, Some(RevisionSymptom::Slowdown { metric }));
            let ratio = MetricRatio {
                metric,
                old: 0.0025,
                new: 0.003,
                ratio: Some(interval(1.2)),
                ruling: ProofRuling::Worse,
            };
            found.ratios = vec![ratio];
            let pace =
                |share| RevisionPace { metric, rounds: 4, seconds: 0.0025, share: Some(interval(share)) };
            found.bounds = Some((0, 5));
            for (judged, share) in found.judged.iter_mut().zip([-0.02, share]) {
                judged.pace = Some(pace(share));
            }
            report
        };
        let found = RevisionOutcome::Found { revision: 5 };
        insta::assert_snapshot!(told(&[
            of(found.clone(), true, 0.98),
            of(found.clone(), false, 1.0),
            of(found, true, 0.4),
            of(RevisionOutcome::Unsteady { revision: 5 }, true, 0.5),
            of(RevisionOutcome::Alike { sure: true }, true, 0.5),
            of(RevisionOutcome::Alike { sure: false }, true, 0.5),
        ]));
    }

    #[test]
    fn other_answers_are_told_with_what_they_are_and_whether_more_than_one_revision_changed_them() {
        let of = |outcome, otherwise: &[&str]| {
            let mut report = report(outcome, true);
            let found = &mut report.conclusion;
            let requests = ["text 1", "text 2", "chat", "schema"].map(str::to_owned).to_vec();
            (found.aim, found.symptom) = (RevisionAim::Answers, Some(RevisionSymptom::Answers { requests }));
            let difference = |request: &str, of, distance| EndsDifference {
                request: request.to_owned(),
                shared: 3,
                of,
                distance,
                older: "yes".repeat(100),
                newer: "no".to_owned(),
            };
            found.differences = vec![
                difference("text 1", 64, Some(1.25)),
                difference("embedding", 0, Some(0.5)),
                difference("tokens", 0, None),
            ];
            let said = |as_older, as_newer, otherwise: &[&str]| RevisionAnswers {
                as_older,
                as_newer,
                otherwise: otherwise.iter().copied().map(str::to_owned).collect(),
                unsteady: Vec::new(),
                missing: Vec::new(),
            };
            let all =
                [said(3, 0, &[]), said(0, 3 - otherwise.len(), otherwise), said(0, 0, &[]), said(1, 2, &[])];
            for (judged, said) in found.judged.iter_mut().zip(all) {
                judged.answers = Some(said);
            }
            if otherwise.is_empty() {
                found.judged.pop();
            }
            report
        };
        let without = |mut report: BetweenReport| {
            report.conclusion.differences.clear();
            report
        };
        let found = RevisionOutcome::Found { revision: 5 };
        let all = [
            of(found.clone(), &[]),
            of(found, &["text 1"]),
            of(RevisionOutcome::Unsteady { revision: 5 }, &[]),
            of(RevisionOutcome::Alike { sure: true }, &[]),
            without(of(RevisionOutcome::Alike { sure: true }, &[])),
            without(of(RevisionOutcome::Alike { sure: false }, &[])),
        ];
        let said: Vec<String> = all[0].answer_rows().into_iter().map(|row| row.join(" | ")).collect();
        insta::assert_snapshot!(told(&all) + &said.join("\n"));
    }
}
