//! Reports in words whether a server mixes conversations.

use serde::{Deserialize, Serialize};
use warden_experiment::isolation::{
    FittingPrompt, ForeignAnswer, IsolationEffect, IsolationFinding, IsolationOutcome, PromptPlace,
};

use super::UntriedSwitch;

/// Setting that keeps llama-server from reusing cached prompts, as llama-warden's configuration has it.
pub const NO_REUSE: &str = "request.default = { cache_prompt = false }";

const TABLE_HEAD: [&str; 6] =
    ["REQUEST", "ROUND", "PROMPT", "NATS FROM THE RIGHT ANSWER", "FITS", "NATS FROM THAT"];
/// Most answers in the table; `findings.json` has all.
const MAX_ROWS: usize = 40;

/// Result of an isolation experiment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct IsolationReport {
    /// Finding without a switch.
    pub finding: IsolationFinding,
    /// Switches that were tried.
    pub cures: Vec<IsolationCure>,
    /// Switches that were not tried, with the reason.
    pub not_tried: Vec<UntriedSwitch>,
    /// Prompt of each request file, by its number.
    pub requests: Vec<PromptPlace>,
    /// Numbers of the request files in the order of the requests; those of a list ran at the same time.
    pub order: Vec<Vec<usize>>,
    /// Further arguments of the process with the right answers.
    pub truth_args: Vec<String>,
}

/// A switch, and the answers with it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct IsolationCure {
    /// Entry of `mitigations`, or [`NO_REUSE`].
    pub item: String,
    /// Effect.
    pub effect: IsolationEffect,
    /// Number of foreign answers with the switch.
    pub foreign: usize,
    /// Number of answers with the switch.
    pub answers: usize,
}

impl IsolationReport {
    pub(super) const fn title(&self) -> &'static str {
        match self.finding.outcome {
            IsolationOutcome::Mixed => "llama-server mixes conversations",
            IsolationOutcome::Separate => "llama-server keeps conversations separate",
            IsolationOutcome::Undecided { .. } => "Whether llama-server mixes conversations is undecided",
        }
    }

    /// Returns the findings, a line each.
    pub fn sentences(&self) -> Vec<String> {
        let found = &self.finding;
        let mut lines = vec![self.outcome_sentence()];
        if let Some((first, fits)) = found.fitting().next() {
            lines.push(first_mixed(first, fits));
        }
        let changed = found.foreign.iter().filter(|one| one.fits.is_none()).count();
        if changed > 0 {
            lines.push(format!(
                "answers that are neither the right one nor that of another conversation: {changed}"
            ));
        }
        if found.answers > 0 {
            let at_a_time =
                if found.slots > 1 { format!(" and {} at a time", found.slots) } else { String::new() };
            lines.push(format!(
                "tested: {} requests of {} conversations in {} rounds on {} slots, one after the other{at_a_time}",
                found.answers, found.conversations, found.rounds, found.slots
            ));
            let scales = &found.scales;
            lines.push(format!(
                "an answer is right up to {} nats from the right one; measured noise: {} for the same request again \
                 ({} answers), {} for one conversation alone ({} answers); different conversations: {} apart",
                nats(scales.limit),
                nats(scales.repeated.most),
                scales.repeated.count,
                nats(scales.alone.most),
                scales.alone.count,
                nats(scales.apart)
            ));
        }
        lines.extend(self.cures.iter().map(cure_sentence));
        lines.extend(self.not_tried.iter().map(|one| format!("not tried: `{}`: {}", one.item, one.why)));
        lines
    }

    /// Returns a table of the answers that are not the right ones, with its head.
    pub fn rows(&self) -> Vec<Vec<String>> {
        let row = |one: &ForeignAnswer| {
            let fits = one.fits.map_or_else(String::new, |fits| place_text(fits.place));
            let from_it = one.fits.map_or_else(String::new, |fits| nats(fits.distance));
            vec![
                one.request.to_string(),
                one.round.to_string(),
                place_text(one.place),
                nats(one.distance),
                fits,
                from_it,
            ]
        };
        let head = TABLE_HEAD.map(str::to_owned).to_vec();
        std::iter::once(head).chain(self.finding.foreign.iter().take(MAX_ROWS).map(row)).collect()
    }

    fn outcome_sentence(&self) -> String {
        let found = &self.finding;
        match &found.outcome {
            IsolationOutcome::Mixed => {
                let fitting = found.fitting().count();
                let what = if fitting > 0 {
                    "have content of another conversation's prompt"
                } else {
                    "depend on other conversations; alone, the conversation gets the right answers"
                };
                let count = if fitting > 0 { fitting } else { found.foreign.len() };
                format!("mixed: {count} of {} answers {what}", found.answers)
            }
            IsolationOutcome::Separate => format!(
                "separate: each of {} answers is the right one to its prompt{}",
                found.answers,
                found.finds.map_or_else(String::new, |share| format!(
                    "; mixing in {:.1} % of the requests or more would have been found with 95 %",
                    share * 100.0
                ))
            ),
            IsolationOutcome::Undecided { why } => format!("undecided: {why}"),
        }
    }
}

fn first_mixed(first: &ForeignAnswer, fits: FittingPrompt) -> String {
    let cached = first
        .cached
        .map_or_else(String::new, |tokens| format!("; llama-server reports {tokens} cached tokens"));
    format!(
        "first: request {} (round {}{}): the answer to {} is {} nats from the right one, and {} from the answer to \
         {}{cached}",
        first.request,
        first.round,
        if first.concurrent { ", with others at the same time" } else { ", alone" },
        place_text(first.place),
        nats(first.distance),
        nats(fits.distance),
        place_text(fits.place)
    )
}

fn place_text(place: PromptPlace) -> String {
    format!("conversation {}, turn {}", place.conversation + 1, place.turn + 1)
}

/// Formats a distance: two digits that count, from the last digits of a float to whole nats.
fn nats(distance: f64) -> String {
    if distance == 0.0 || distance >= 0.01 { format!("{distance:.2}") } else { format!("{distance:.1e}") }
}

fn cure_sentence(cure: &IsolationCure) -> String {
    let effect = match cure.effect {
        IsolationEffect::Stops => "stops it",
        IsolationEffect::Nothing => "does not stop it",
        IsolationEffect::Undecided => "may stop it, or chance did",
    };
    format!(
        "`{}` {effect}: {} of {} answers with it are not the right ones",
        cure.item, cure.foreign, cure.answers
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use warden_experiment::isolation::{IsolationScales, NoiseSample};

    fn finding(outcome: IsolationOutcome, foreign: Vec<ForeignAnswer>) -> IsolationFinding {
        let noise = |count, most| NoiseSample { count, most };
        IsolationFinding {
            outcome,
            slots: 2,
            conversations: 14,
            rounds: 10,
            answers: 59,
            telling: 59,
            scales: IsolationScales {
                repeated: noise(14, 0.0),
                alone: noise(16, 0.0004),
                apart: 3.2,
                limit: 0.2,
            },
            finds: Some(0.0495),
            foreign,
        }
    }

    fn foreign(request: usize, fits: bool) -> ForeignAnswer {
        let place = |conversation| PromptPlace { conversation, turn: 1 };
        ForeignAnswer {
            request,
            round: 3,
            concurrent: request > 20,
            place: place(0),
            cached: (request > 20).then_some(0),
            distance: 3.1,
            fits: fits.then(|| FittingPrompt { place: place(4), distance: 0.0003 }),
        }
    }

    #[test]
    fn a_finding_names_the_first_answer_the_noise_and_the_cures() {
        let undecided = IsolationOutcome::Undecided { why: "the server ended: signal 6".to_owned() };
        let all = [
            finding(IsolationOutcome::Mixed, vec![foreign(9, false), foreign(21, true), foreign(30, true)]),
            finding(IsolationOutcome::Mixed, vec![foreign(9, false), foreign(12, false)]),
            finding(IsolationOutcome::Separate, Vec::new()),
            finding(undecided, Vec::new()),
        ];
        let mut text = String::new();
        for finding in all {
            let cure = |item: &str, effect, foreign| IsolationCure {
                item: item.to_owned(),
                effect,
                foreign,
                answers: 59,
            };
            let is_mixed = finding.is_mixed();
            let cures = vec![
                cure("no-cache-idle-slots", IsolationEffect::Nothing, 4),
                cure(NO_REUSE, IsolationEffect::Stops, 0),
            ];
            let report = IsolationReport {
                finding,
                cures: if is_mixed { cures } else { Vec::new() },
                not_tried: Vec::new(),
                requests: Vec::new(),
                order: Vec::new(),
                truth_args: Vec::new(),
            };
            text.extend([format!("# {}\n- {}\n\n", report.title(), report.sentences().join("\n- "))]);
        }
        insta::assert_snapshot!(text);
    }
}
