//! Reports in words, and in a table, why a build may or may not replace another.

use serde::{Deserialize, Serialize};
use warden_experiment::between::RevisionOutcome;
use warden_experiment::proof::{
    AnswerComparison, BuildGrowth, BuildMetric, BuildProof, BuildSide, MetricRatio, ProofRuling,
};
use warden_policies::units::scale_bytes;
use warden_policies::{ByteSize, MemoryKind, phrases};

use super::between::{distance_text, symptom_text};

/// Result of a proof.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProofReport {
    /// Description of the build in use, in a line.
    pub old: String,
    /// Description of the new build, in a line.
    pub new: String,
    /// Verdict on the replacement: `same`, `worse` or `unknown`.
    pub verdict: ProofRuling,
    /// Reasons against the replacement, a sentence each.
    pub reasons: Vec<String>,
    /// Other differences, a sentence each.
    pub notes: Vec<String>,
    /// Measurements and comparisons.
    pub proof: BuildProof,
}

const TABLE_HEAD: [&str; 5] = ["WHAT", "OLD", "NEW", "CHANGE", "SAYS"];
const MAX_LISTED: usize = 12;

impl ProofReport {
    /// Creates the report of a proof of these builds.
    pub fn new(old: String, new: String, proof: BuildProof) -> Self {
        let verdict = proof.verdict();
        let reasons = rejection_reasons(&proof);
        let notes = difference_notes(&proof);
        Self { old, new, verdict, reasons, notes, proof }
    }

    /// Returns the verdict in a sentence.
    pub fn sentence(&self) -> String {
        match self.verdict {
            ProofRuling::Better | ProofRuling::Same => {
                "the new build may take the place of the old one".to_owned()
            }
            ProofRuling::Worse => "the new build is worse than the old one".to_owned(),
            ProofRuling::Unknown if self.proof.interrupted => {
                "interrupted: nothing is known of the new build yet".to_owned()
            }
            ProofRuling::Unknown => {
                "it cannot be told whether the new build is as good as the old one".to_owned()
            }
        }
    }

    /// Returns all comparisons in a line.
    pub fn summary(&self) -> String {
        let proof = &self.proof;
        let mut parts = Vec::new();
        if proof.answers.asked > 0 {
            parts.push(format!("answers {}", answers_text(&proof.answers)));
        }
        let told = |ratio: &MetricRatio| format!("{} {}", metric_name(ratio.metric), change_text(ratio));
        parts.extend(proof.ratios.iter().map(told));
        parts.extend(
            proof.growth.as_ref().map(|growth| format!("growth and crashes: {}", growth_difference(growth))),
        );
        parts.join("; ")
    }

    /// Returns a row for each aspect; the first row is the head.
    pub fn rows(&self) -> Vec<Vec<String>> {
        let proof = &self.proof;
        let row = |what: &str, old: String, new: String, change: String, ruling: ProofRuling| {
            vec![what.to_owned(), old, new, change, ruling.as_str().to_owned()]
        };
        let none = || "–".to_owned();
        let mut rows = vec![TABLE_HEAD.map(str::to_owned).to_vec()];
        if proof.answers.asked > 0 {
            rows.push(row("answers", none(), none(), answers_text(&proof.answers), proof.answers.ruling));
        }
        rows.extend(proof.ratios.iter().map(|ratio| {
            let shown = |value| metric_value(ratio.metric, value);
            row(
                &metric_name(ratio.metric),
                shown(ratio.old),
                shown(ratio.new),
                change_text(ratio),
                ratio.ruling,
            )
        }));
        let faces = &proof.faces;
        let moved = |gone: &[String], new: &[String]| format!("{} gone, {} new", gone.len(), new.len());
        if proof.rounds > 0 {
            let change = format!(
                "flags: {}; routes: {}",
                moved(&faces.flags_gone, &faces.flags_new),
                moved(&faces.routes_gone, &faces.routes_new)
            );
            rows.push(row("flags and routes", none(), none(), change, faces.ruling()));
        }
        if let Some(growth) = &proof.growth {
            rows.push(row("growth, crashes", none(), none(), growth_difference(growth), growth.ruling));
        }
        rows
    }
}

fn rejection_reasons(proof: &BuildProof) -> Vec<String> {
    let mut all = Vec::new();
    if let Some(fault) = &proof.fault {
        let side = match fault.side {
            BuildSide::Old => "old",
            BuildSide::New => "new",
        };
        all.push(format!("the {side} build: {}", fault.why));
    }
    if proof.answers.ruling == ProofRuling::Worse {
        all.push(format!("answers: {}", answers_text(&proof.answers)));
        all.extend(proof.answers.differences.iter().map(|one| match (&one.refused, one.distance) {
            (Some(why), _) if one.of > 0 => format!("“{}”: refused by one of them: {why}", one.request),
            (Some(why), _) => {
                format!("“{}”: only the new build answers; the old one says: {why}", one.request)
            }
            (None, distance) => distance_text(&one.request, distance, one.shared, one.of),
        }));
    }
    for ratio in proof.ratios.iter().filter(|ratio| ratio.ruling == ProofRuling::Worse) {
        let old = metric_value(ratio.metric, ratio.old);
        let new = metric_value(ratio.metric, ratio.new);
        all.push(format!("{}: {old} before, {new} now ({})", metric_name(ratio.metric), change_text(ratio)));
    }
    let faces = &proof.faces;
    if !faces.flags_missed.is_empty() {
        all.push(format!("flags in use that it does not know: {}", list_names(&faces.flags_missed)));
    }
    if !faces.routes_gone.is_empty() {
        all.push(format!("routes that it does not have: {}", list_names(&faces.routes_gone)));
    }
    if let Some(growth) = proof.growth.as_ref().filter(|growth| growth.ruling == ProofRuling::Worse) {
        all.push(growth_difference(growth));
    }
    all
}

fn difference_notes(proof: &BuildProof) -> Vec<String> {
    let faces = &proof.faces;
    let mut all = Vec::new();
    let lists = [
        ("flags that are gone", &faces.flags_gone),
        ("new flags", &faces.flags_new),
        ("new routes", &faces.routes_new),
    ];
    for (what, names) in lists.into_iter().filter(|(_, names)| !names.is_empty()) {
        all.push(format!("{what}: {}", list_names(names)));
    }
    let unknown = proof.ratios.iter().filter(|ratio| ratio.ruling == ProofRuling::Unknown);
    let unknown: Vec<String> = unknown.map(|ratio| metric_name(ratio.metric)).collect();
    if !unknown.is_empty() && !proof.interrupted {
        all.push(format!(
            "processes of one build differ too much to say whether it is worse in {}; the figures are in the table",
            list_names(&unknown)
        ));
    }
    if let Some(growth) = proof.growth.as_ref().filter(|growth| growth.ruling == ProofRuling::Better) {
        all.push(growth_difference(growth));
    }
    all
}

/// Formats `9 of 11 equal, 97 % of the tokens, at most 0.02 nats apart`.
fn answers_text(answers: &AnswerComparison) -> String {
    let mut text = format!("{} of {} equal", answers.equal, answers.asked);
    if answers.equal < answers.asked
        && let Some(agreement) = answers.agreement
    {
        text.extend([format!(", {:.0} % of the tokens", agreement * 100.0)]);
    }
    if let Some(distance) = answers.distance {
        text.extend([format!(", at most {distance:.3} nats apart")]);
    }
    if let Some(noise) = answers.noise.filter(|noise| *noise >= 0.0005) {
        text.extend([format!(" (the old one from itself: {noise:.3})")]);
    }
    if answers.unsteady > 0 {
        text.extend([format!(", {} that the old one does not answer alike twice", answers.unsteady)]);
    }
    text
}

fn growth_difference(growth: &BuildGrowth) -> String {
    let found = &growth.conclusion;
    let what = found.symptom.as_ref().map_or_else(|| "the symptom".to_owned(), symptom_text);
    match &found.outcome {
        RevisionOutcome::Found { .. } if found.ill_is_newer == Some(false) => format!("it ends {what}"),
        RevisionOutcome::Found { .. } => {
            let rate =
                found.judged.iter().rev().find_map(|one| one.judgement.as_ref().and_then(|one| one.without));
            let rate =
                rate.map_or_else(String::new, |rate| format!(", {} a request", phrases::growth_phrase(rate)));
            format!("it brings {what}{rate}")
        }
        RevisionOutcome::Interrupted if found.ill_is_newer == Some(false) => {
            format!("only the old build shows {what}")
        }
        RevisionOutcome::EndFailed { newer, why } => {
            format!("the {} build cannot do the work: {why}", if *newer { "new" } else { "old" })
        }
        RevisionOutcome::BothIll => "both grow or die alike".to_owned(),
        RevisionOutcome::NeitherIll { short: false, suspected: false } => "neither".to_owned(),
        RevisionOutcome::Interrupted => "interrupted".to_owned(),
        _ => "cannot be told with so few readings (`--requests`)".to_owned(),
    }
}

pub(super) fn metric_name(metric: BuildMetric) -> String {
    let memory = |kind| match kind {
        MemoryKind::Host => "host memory".to_owned(),
        MemoryKind::Vram(gpu) => format!("GPU {}", gpu.0),
    };
    match metric {
        BuildMetric::Start => "start".to_owned(),
        BuildMetric::Prefill => "prefill".to_owned(),
        BuildMetric::Decode => "decode".to_owned(),
        BuildMetric::FirstToken => "first token".to_owned(),
        BuildMetric::AtReady(kind) => format!("{}, ready", memory(kind)),
        BuildMetric::AtLongest(kind) => format!("{}, longest prompt", memory(kind)),
    }
}

pub(super) fn metric_value(metric: BuildMetric, value: f64) -> String {
    match metric {
        BuildMetric::Start | BuildMetric::FirstToken if value < 1.0 => format!("{:.1} ms", value * 1000.0),
        BuildMetric::Start | BuildMetric::FirstToken => format!("{value:.2} s"),
        BuildMetric::Prefill | BuildMetric::Decode => format!("{:.1} t/s", 1.0 / value),
        BuildMetric::AtReady(_) | BuildMetric::AtLongest(_) => ByteSize(scale_bytes(1, value)).to_string(),
    }
}

/// Formats a change: `+4.0 % (+1.0 to +7.1)`. For speeds, the change is of tokens per second.
pub(super) fn change_text(ratio: &MetricRatio) -> String {
    let Some(interval) = ratio.ratio else {
        let none = |value: f64| value <= 0.0;
        let told = match (none(ratio.old), none(ratio.new)) {
            (true, false) => "only the new one has any",
            (false, true) => "only the old one has any",
            _ => "measured once",
        };
        return told.to_owned();
    };
    let is_rate = matches!(ratio.metric, BuildMetric::Prefill | BuildMetric::Decode);
    let share = |value: f64| if is_rate { 1.0 / value - 1.0 } else { value - 1.0 } * 100.0;
    let (low, high) = if is_rate { (interval.high, interval.low) } else { (interval.low, interval.high) };
    format!("{:+.1} % ({:+.1} to {:+.1})", share(interval.value), share(low), share(high))
}

fn list_names(names: &[String]) -> String {
    let shown = names.iter().take(MAX_LISTED).cloned().collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(MAX_LISTED) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use warden_experiment::between::{RevisionAim, RevisionConclusion};
    use warden_experiment::proof::{AnswerDifference, BuildFailure, InterfaceComparison};
    use warden_policies::growth::IntervalEstimate;

    fn proof() -> BuildProof {
        let ratio = |metric, old, new, low, high, ruling| MetricRatio {
            metric,
            old,
            new,
            ratio: Some(IntervalEstimate { value: new / old, low, high }),
            ruling,
        };
        let difference = |request: &str, distance, refused: Option<&str>| AnswerDifference {
            request: request.to_owned(),
            shared: 12,
            of: 64,
            distance,
            refused: refused.map(str::to_owned),
        };
        BuildProof {
            answers: AnswerComparison {
                ruling: ProofRuling::Worse,
                asked: 11,
                equal: 8,
                agreement: Some(0.91),
                distance: Some(1.25),
                noise: Some(0.002),
                unsteady: 1,
                differences: vec![
                    difference("text 1", Some(1.25), None),
                    difference("tokens", None, None),
                    difference("schema", None, Some("no grammar (status 500)")),
                ],
            },
            ratios: vec![
                ratio(BuildMetric::Start, 0.8, 0.9, 1.0, 1.3, ProofRuling::Same),
                ratio(BuildMetric::Prefill, 0.001, 0.0012, 1.12, 1.3, ProofRuling::Worse),
                ratio(BuildMetric::Decode, 0.02, 0.018, 0.88, 0.93, ProofRuling::Better),
                ratio(BuildMetric::FirstToken, 0.012, 0.012, 0.7, 1.4, ProofRuling::Unknown),
                ratio(BuildMetric::AtReady(MemoryKind::Host), 5e8, 5.1e8, 1.0, 1.03, ProofRuling::Same),
            ],
            faces: InterfaceComparison {
                flags_gone: vec!["--draft".to_owned(), "--log-disable".to_owned()],
                flags_missed: vec!["--draft".to_owned()],
                flags_new: vec!["--spec".to_owned()],
                routes_gone: vec!["/infill".to_owned()],
                routes_new: Vec::new(),
            },
            growth: Some(BuildGrowth::from_conclusion(RevisionConclusion {
                outcome: RevisionOutcome::NeitherIll { short: false, suspected: false },
                aim: RevisionAim::Growth,
                symptom: None,
                ill_is_newer: None,
                bounds: None,
                judged: Vec::new(),
                newer: Vec::new(),
                older: Vec::new(),
                ratios: Vec::new(),
                differences: Vec::new(),
                legs: 2,
            })),
            fault: None,
            rounds: 8,
            interrupted: false,
        }
    }

    #[test]
    fn a_proof_is_a_table_a_verdict_and_its_reasons() {
        let mut text = String::new();
        let fault = Some(BuildFailure {
            side: BuildSide::New,
            why: "it did not start: it exited with code 1".to_owned(),
        });
        for proof in [proof(), BuildProof { fault, rounds: 0, ratios: Vec::new(), growth: None, ..proof() }] {
            let report = ProofReport::new("old".to_owned(), "new".to_owned(), proof);
            for row in report.rows() {
                text += &(row.join(" | ") + "\n");
            }
            text.extend([format!("{}\n- {}\n", report.sentence(), report.reasons.join("\n- "))]);
            text.extend([format!("notes\n- {}\n\n", report.notes.join("\n- "))]);
        }
        insta::assert_snapshot!(text);
    }
}
