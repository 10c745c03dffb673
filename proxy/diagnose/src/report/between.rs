//! Which revision brought a symptom, in words and as a table: conclusions in, text out.

use serde::{Deserialize, Serialize};
use warden_policies::experiment::between::{Conclusion, Judged, Outcome, Standing, Symptom};
use warden_policies::{MemoryKind, phrases};

use super::crash::runs;

/// A revision, as people know it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Revision {
    /// 40 hexadecimal digits.
    pub commit: String,
    /// Its build tag, or what comes closest to one.
    pub label: String,
    /// The day: `2026-08-22`.
    pub date: String,
    /// The first line of its message.
    pub subject: String,
}

/// What a search between two revisions found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BetweenReport {
    /// Where they are from.
    pub repository: String,
    /// All of them, the oldest first: places in the conclusion are places in this list.
    pub line: Vec<Revision>,
    /// What came of it.
    pub conclusion: Conclusion,
}

/// Digits of a commit that people read.
const SHORT: usize = 9;

/// The head of the table.
const HEAD: [&str; 6] = ["REVISION", "COMMIT", "DATE", "SAYS", "PROCESSES", "SUBJECT"];

impl Revision {
    fn short(&self) -> &str {
        self.commit.get(..SHORT).unwrap_or(&self.commit)
    }

    /// `b9602 (1593d5684, 2026-08-22)`
    fn named(&self) -> String {
        format!("{} ({}, {})", self.label, self.short(), self.date)
    }
}

impl BetweenReport {
    /// What was found, a line each.
    pub fn sentences(&self) -> Vec<String> {
        let found = &self.conclusion;
        let what = found.symptom.as_ref().map_or_else(|| "the symptom".to_owned(), symptom);
        let did = if found.ill_is_newer == Some(false) { "ended" } else { "brought" };
        let name = |at: usize| self.line.get(at).map_or_else(|| format!("number {at}"), Revision::named);
        let end = |newer: bool| if newer { "newer" } else { "older" };
        let mut lines = Vec::new();
        match &found.outcome {
            Outcome::Found { revision } => {
                let subject = self.line.get(*revision).map_or("", |one| one.subject.as_str());
                lines.push(format!("{} {did} {what}: {subject}", name(*revision)));
                let before = name(revision.saturating_sub(1));
                lines.push(match found.ill_is_newer {
                    Some(false) => {
                        format!("{before}, the one before it, still has it; both were judged twice")
                    }
                    _ => format!("{before}, the one before it, does not have it; both were judged twice"),
                });
            }
            Outcome::Among { first, last } => {
                lines.push(format!(
                    "one of {} revisions {did} {what}: from {} to {}; those between them cannot be told, which the table explains",
                    last - first + 1,
                    name(*first),
                    name(*last)
                ));
            }
            Outcome::Unsteady { revision } => {
                lines.push(format!(
                    "not sure: {} was judged otherwise when it was judged once more; {}",
                    name(*revision),
                    "more readings (`--requests`) make processes differ less"
                ));
                lines.extend(found.bounds.map(|(healthy, ill)| {
                    format!(
                        "until then it lay between {} and {}",
                        name(healthy.min(ill)),
                        name(healthy.max(ill))
                    )
                }));
            }
            Outcome::BothIll => {
                lines
                    .push("both ends have it, so no revision between them brought it or ended it".to_owned());
            }
            Outcome::NeitherIll { suspected: true, .. } => {
                lines.push(
                    "an end is suspected to leak, and nothing more than that: take more readings (`--requests`)".to_owned(),
                );
            }
            Outcome::NeitherIll { short: false, .. } => {
                lines.push(
                    "neither end leaks or dies under this work, so there is nothing to look for".to_owned(),
                );
            }
            Outcome::NeitherIll { short: true, .. } => {
                lines.push(
                    "there are too few readings of an end to say whether it leaks: take more (`--requests`)"
                        .to_owned(),
                );
            }
            Outcome::NotAgain => {
                lines.push("the crash did not come again, so nobody can see where it came from".to_owned());
            }
            Outcome::EndFailed { newer, why } => {
                lines.push(format!("the {} end cannot be judged: {why}", end(*newer)));
            }
            Outcome::IllFailed { why } => {
                lines.push(format!("the end that has it could not be run any more: {why}"));
            }
            Outcome::Interrupted => {
                lines.push("broken off; the same command goes on from here".to_owned());
                lines.extend(found.bounds.map(|(healthy, ill)| {
                    let (low, high) = (healthy.min(ill), healthy.max(ill));
                    let left = format!(
                        "{} revisions are left, from {} to {}",
                        high - low,
                        name(low + 1),
                        name(high)
                    );
                    if high - low == 1 {
                        format!("{} is left, to be judged once more", name(high))
                    } else {
                        left
                    }
                }));
            }
        }
        lines
    }

    /// What was judged, in the order of the line; the first row is the head. What was judged more than once stands so.
    pub fn rows(&self) -> Vec<Vec<String>> {
        let mut judged: Vec<&Judged> = self.conclusion.judged.iter().collect();
        judged.sort_by_key(|one| one.revision);
        let rows = judged.into_iter().map(|one| {
            let revision = self.line.get(one.revision);
            let text = |of: fn(&Revision) -> &str| revision.map_or("?", of).to_owned();
            vec![
                text(|one| &one.label),
                text(Revision::short),
                text(|one| &one.date),
                says(one),
                (one.legs + one.runs.len()).to_string(),
                text(|one| &one.subject),
            ]
        });
        std::iter::once(HEAD.map(str::to_owned).to_vec()).chain(rows).collect()
    }
}

/// `growth of host memory under same-image`
pub(super) fn symptom(symptom: &Symptom) -> String {
    match symptom {
        Symptom::Growth { track, .. } => {
            let memory = match track.series {
                MemoryKind::Host => "host memory".to_owned(),
                MemoryKind::Vram(gpu) => format!("the memory of GPU {}", gpu.0),
            };
            format!("the growth of {memory} under {}", track.workload)
        }
        Symptom::Crash { workload, .. } => format!("the crash under {workload}"),
    }
}

/// What one judgement says.
fn says(judged: &Judged) -> String {
    let stands = match &judged.standing {
        Standing::Healthy => "healthy",
        Standing::Ill => "ill",
        Standing::Unknown { why } => {
            return format!("not known: {}", why.lines().next().unwrap_or_default());
        }
    };
    if !judged.runs.is_empty() {
        return format!("{stands}: {}", runs(&judged.runs));
    }
    match judged.judgement.as_ref().and_then(|found| found.with) {
        Some(rate) => format!("{stands}: {} a request", phrases::grows(rate)),
        None => stands.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use warden_policies::experiment::Workload;
    use warden_policies::experiment::bisect::Track;
    use warden_policies::experiment::crash::Run;
    use warden_policies::experiment::sequential::{Does, Judgement};

    fn report(outcome: Outcome, ill_is_newer: bool) -> BetweenReport {
        let revision = |at: usize| Revision {
            commit: format!("{at:040}"),
            label: format!("b{}", 9000 + at),
            date: "2026-08-22".to_owned(),
            subject: format!("server : change number {at}"),
        };
        let judgement =
            |rate| Judgement { does: Does::Nothing, share: None, without: Some(4e5), with: Some(rate) };
        let judged = |revision, standing, rate: Option<f64>| Judged {
            revision,
            standing,
            legs: 2,
            judgement: rate.map(judgement),
            runs: Vec::new(),
            again: false,
        };
        let unknown = Standing::Unknown { why: "compile failed:\nerror: x".to_owned() };
        BetweenReport {
            repository: "https://example.org/llama.cpp".to_owned(),
            line: (0..9).map(revision).collect(),
            conclusion: Conclusion {
                outcome,
                symptom: Some(Symptom::Growth {
                    track: Track { workload: Workload::SameImage, series: MemoryKind::Host },
                    control: false,
                }),
                ill_is_newer: Some(ill_is_newer),
                bounds: Some((3, 5)),
                judged: vec![
                    judged(0, Standing::Healthy, Some(120.0)),
                    judged(5, Standing::Ill, Some(409_600.0)),
                    judged(4, unknown, None),
                    Judged {
                        runs: vec![Run { requests: 22, died: true }, Run { requests: 184, died: false }],
                        ..judged(3, Standing::Ill, None)
                    },
                ],
                newer: Vec::new(),
                older: Vec::new(),
                legs: 12,
            },
        }
    }

    #[test]
    fn what_was_found_is_told_in_words_and_what_was_judged_in_a_table() {
        let all = [
            (Outcome::Found { revision: 5 }, true),
            (Outcome::Found { revision: 5 }, false),
            (Outcome::Among { first: 4, last: 5 }, true),
            (Outcome::Unsteady { revision: 3 }, true),
            (Outcome::BothIll, true),
            (Outcome::NeitherIll { short: false, suspected: false }, true),
            (Outcome::NeitherIll { short: false, suspected: true }, true),
            (Outcome::NeitherIll { short: true, suspected: false }, true),
            (Outcome::NotAgain, true),
            (Outcome::EndFailed { newer: false, why: "it does not build".to_owned() }, true),
            (Outcome::IllFailed { why: "killed".to_owned() }, true),
            (Outcome::Interrupted, true),
        ];
        let mut text = String::new();
        for (outcome, newer) in all {
            text += &(report(outcome, newer).sentences().join("\n") + "\n\n");
        }
        for row in report(Outcome::NotAgain, true).rows() {
            text += &(row.join(" | ") + "\n");
        }
        insta::assert_snapshot!(text);
    }
}
