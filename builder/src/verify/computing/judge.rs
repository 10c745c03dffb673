//! Judges the outcomes of one weight format. Pure functions.

use std::collections::BTreeMap;

use super::settings::KernelSetting;
use super::{ComputedTrial, WordProbabilities};
use crate::error::{BuilderError, Result};
use crate::sample_model::WeightKind;

#[derive(Clone, Debug, PartialEq)]
pub(super) enum TrialOutcome {
    Answered(WordProbabilities),
    NoProbabilities,
    Refused(String),
    /// A signal ended the server.
    Died(String),
    Wrong(String),
    /// The server did not answer in time: the machine may be busy.
    Late(String),
}

/// The largest distance that counts as equal.
///
/// Kernels for quantised weights round the activations to 8 bits, those for f16 to f16, and a `q8_0` cache
/// rounds keys and values. Measured with llama.cpp 0c1e57098 on an AMD EPYC: 0.006 in f16, 0.07 to 0.16 in
/// the other formats, 0.19 with the cache. Doubling the scale of every 32nd block gives 2 or more.
const MAX_DISTANCE: f64 = 0.5;

/// The distances of all settings; `None` if the server does not support the format. The error has the first
/// setting that crashed, exited or differed, and the settings that were right.
pub(super) fn judge_format(
    kind: WeightKind,
    reference: &WordProbabilities,
    outcomes: Vec<(KernelSetting, TrialOutcome)>,
) -> Result<Option<Vec<ComputedTrial>>> {
    if outcomes.iter().all(|(_, outcome)| matches!(outcome, TrialOutcome::Refused(_))) {
        return Ok(None);
    }
    if let Some((setting, TrialOutcome::Late(why))) =
        outcomes.iter().find(|(_, outcome)| matches!(outcome, TrialOutcome::Late(_)))
    {
        let why = format!("{} weights ({}): {why}", kind.name(), setting.words());
        return Err(BuilderError::Verify { check: "computing", why, illegal_instruction: false });
    }
    let (mut right, mut faults) = (Vec::new(), Vec::new());
    for (setting, outcome) in outcomes {
        match judge_setting(kind, setting, reference, outcome) {
            Ok(trial) => right.push((setting, trial)),
            Err(why) => faults.push((setting, why)),
        }
    }
    let was_right = |wanted: KernelSetting| right.iter().any(|(setting, _)| *setting == wanted);
    let failed = |wanted: KernelSetting| faults.iter().any(|(setting, _)| *setting == wanted);
    let repacked_alone = was_right(KernelSetting::NotRepacked)
        && failed(KernelSetting::Repacked)
        && faults
            .iter()
            .all(|(setting, _)| matches!(setting, KernelSetting::Repacked | KernelSetting::QuantisedCache));
    match faults.into_iter().next() {
        None => Ok(Some(right.into_iter().map(|(_, trial)| trial).collect())),
        Some((setting, why)) => Err(BuilderError::Kernel {
            weights: kind.name(),
            setting: setting.words(),
            why,
            right: right.iter().map(|(setting, _)| setting.words()).collect(),
            repacked_alone,
        }),
    }
}

fn judge_setting(
    kind: WeightKind,
    setting: KernelSetting,
    reference: &WordProbabilities,
    outcome: TrialOutcome,
) -> std::result::Result<ComputedTrial, String> {
    let answers = match outcome {
        TrialOutcome::Answered(answers) => answers,
        TrialOutcome::NoProbabilities => return Err("an answer without probabilities".to_owned()),
        TrialOutcome::Refused(why)
        | TrialOutcome::Died(why)
        | TrialOutcome::Wrong(why)
        | TrialOutcome::Late(why) => {
            return Err(why);
        }
    };
    // Four decimal places suffice for readers.
    let distance = (largest_distance(reference, &answers) * 1e4).round() / 1e4;
    if distance > MAX_DISTANCE {
        let much = if distance.is_finite() { format!("{distance:.3}") } else { "beyond measure".to_owned() };
        return Err(format!(
            "its log-probabilities are {much} from those of the same numbers in f32, at most {MAX_DISTANCE} is rounding"
        ));
    }
    let (weights, setting) = (kind.name().to_owned(), setting.words().to_owned());
    Ok(ComputedTrial { weights, setting, distance, limit: MAX_DISTANCE })
}

/// Root mean square of the differences, for the prompt where it is largest. Infinite if words are missing.
fn largest_distance(reference: &WordProbabilities, answers: &WordProbabilities) -> f64 {
    if reference.len() != answers.len() {
        return f64::INFINITY;
    }
    reference.iter().zip(answers).map(|(one, other)| word_distance(one, other)).fold(0.0, f64::max)
}

fn word_distance(reference: &BTreeMap<String, f64>, answer: &BTreeMap<String, f64>) -> f64 {
    let (mut sum, mut count) = (0.0, 0.0);
    for (word, log) in reference {
        let Some(other) = answer.get(word) else { return f64::INFINITY };
        sum += (log - other).powi(2);
        count += 1.0;
    }
    if count == 0.0 { f64::INFINITY } else { (sum / count).sqrt() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answers(shift: f64) -> WordProbabilities {
        // The second prompt differs twice as much.
        let one = |shift: f64| [(" ba".to_owned(), -1.0 + shift), (" do".to_owned(), -2.0 - shift)].into();
        vec![one(shift), one(2.0 * shift)]
    }

    fn judged(outcomes: &[(KernelSetting, TrialOutcome)]) -> Result<Option<Vec<ComputedTrial>>> {
        judge_format(WeightKind::Q4_0, &answers(0.0), outcomes.to_vec())
    }

    fn good() -> TrialOutcome {
        TrialOutcome::Answered(answers(0.01))
    }

    #[test]
    fn what_is_near_is_computed_with_its_distance() {
        let trials = judged(&[(KernelSetting::Repacked, good()), (KernelSetting::NotRepacked, good())])
            .unwrap()
            .unwrap();
        assert_eq!(trials.len(), 2);
        assert!((trials[0].distance - 0.02).abs() < 1e-9, "that of the worst prompt: {trials:?}");
        assert_eq!((trials[1].weights.as_str(), trials[1].setting.as_str()), ("q4_0", "--no-repack"));
    }

    #[test]
    fn a_kernel_that_dies_or_differs_is_named_with_form_and_setting() {
        let dies = TrialOutcome::Died("signal: 11 (SIGSEGV)".to_owned());
        let error =
            judged(&[(KernelSetting::Repacked, dies), (KernelSetting::NotRepacked, good())]).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("q4_0") && text.contains("(repacked)") && text.contains("SIGSEGV"), "{text}");
        assert!(matches!(error, BuilderError::Kernel { repacked_alone: true, .. }));
        assert!(error.hint().unwrap().contains("--no-repack"), "{:?}", error.hint());

        let differs = TrialOutcome::Answered(answers(2.0));
        let error =
            judged(&[(KernelSetting::Repacked, good()), (KernelSetting::NotRepacked, differs)]).unwrap_err();
        assert!(error.to_string().contains("4.000 from those of the same numbers in f32"), "{error}");
        assert!(matches!(error, BuilderError::Kernel { repacked_alone: false, .. }));
    }

    #[test]
    fn an_answer_that_does_not_come_in_time_is_no_fault_of_a_kernel() {
        let late = TrialOutcome::Late("no answer within 60s".to_owned());
        let error =
            judged(&[(KernelSetting::Repacked, late), (KernelSetting::NotRepacked, good())]).unwrap_err();
        assert!(matches!(error, BuilderError::Verify { check: "computing", .. }), "{error}");
    }

    #[test]
    fn words_that_are_missing_are_beyond_measure() {
        let mut short = answers(0.0);
        short[1].remove(" do");
        let error = judged(&[(KernelSetting::Repacked, TrialOutcome::Answered(short))]).unwrap_err();
        assert!(error.to_string().contains("beyond measure"), "{error}");
        let error = judged(&[(KernelSetting::Repacked, TrialOutcome::Answered(Vec::new()))]).unwrap_err();
        assert!(error.to_string().contains("beyond measure"), "{error}");
    }

    #[test]
    fn a_form_that_no_setting_loads_is_not_known_and_one_that_one_setting_refuses_is_a_fault() {
        let refuses = || TrialOutcome::Refused("exit status: 1\nunknown type 39".to_owned());
        assert_eq!(
            judged(&[(KernelSetting::Repacked, refuses()), (KernelSetting::NotRepacked, refuses())]).unwrap(),
            None
        );
        let error = judged(&[(KernelSetting::Repacked, good()), (KernelSetting::QuantisedCache, refuses())])
            .unwrap_err();
        assert!(error.to_string().contains("-ctk q8_0"), "{error}");
    }
}
