//! Judges the outcomes of one weight format. Pure functions.

use std::collections::BTreeMap;

use super::ComputedTrial;
use super::answers::Answers;
use super::settings::Setting;
use crate::error::{Error, Result};
use crate::sample_model::WeightKind;

/// Outcome of one server start.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Outcome {
    Answered(Answers),
    /// The server answers without probabilities.
    NoProbabilities,
    /// The server exited, with the reason.
    Refused(String),
    /// A signal ended the server.
    Died(String),
    /// The server gave an invalid answer.
    Wrong(String),
    /// The server did not answer in time: the machine may be busy.
    Late(String),
}

/// The largest distance that counts as equal.
///
/// Kernels for quantised weights round the activations to 8 bits, those for f16 to f16, and a `q8_0` cache
/// rounds keys and values. With llama.cpp 0c1e57098 on an AMD EPYC the distance is 0.006 in f16, 0.07 to
/// 0.16 in the other formats, and 0.19 with the cache. A doubled scale in every 32nd block gives 2 and
/// more, one in every eighth block of one matrix of fourteen up to 1.9.
const LIMIT: f64 = 0.5;

/// The distances of all settings; `None` if the server does not support the format.
///
/// # Errors
/// Returns the first setting that crashed, exited or differed, with the settings that were right.
pub(super) fn judge(
    kind: WeightKind,
    reference: &Answers,
    outcomes: Vec<(Setting, Outcome)>,
) -> Result<Option<Vec<ComputedTrial>>> {
    if outcomes.iter().all(|(_, outcome)| matches!(outcome, Outcome::Refused(_))) {
        return Ok(None);
    }
    if let Some((setting, Outcome::Late(why))) =
        outcomes.iter().find(|(_, outcome)| matches!(outcome, Outcome::Late(_)))
    {
        let why = format!("{} weights ({}): {why}", kind.name(), setting.words());
        return Err(Error::Verify { check: "computing", why, illegal_instruction: false });
    }
    let (mut right, mut faults) = (Vec::new(), Vec::new());
    for (setting, outcome) in outcomes {
        match fault(kind, setting, reference, outcome) {
            Ok(trial) => right.push((setting, trial)),
            Err(why) => faults.push((setting, why)),
        }
    }
    let was_right = |wanted: Setting| right.iter().any(|(setting, _)| *setting == wanted);
    let failed = |wanted: Setting| faults.iter().any(|(setting, _)| *setting == wanted);
    let repacked_alone = was_right(Setting::NotRepacked)
        && failed(Setting::Repacked)
        && faults.iter().all(|(setting, _)| matches!(setting, Setting::Repacked | Setting::QuantisedCache));
    match faults.into_iter().next() {
        None => Ok(Some(right.into_iter().map(|(_, trial)| trial).collect())),
        Some((setting, why)) => Err(Error::Kernel {
            weights: kind.name(),
            setting: setting.words(),
            why,
            right: right.iter().map(|(setting, _)| setting.words()).collect(),
            repacked_alone,
        }),
    }
}

/// The distance of one setting, or its failure.
fn fault(
    kind: WeightKind,
    setting: Setting,
    reference: &Answers,
    outcome: Outcome,
) -> std::result::Result<ComputedTrial, String> {
    let answers = match outcome {
        Outcome::Answered(answers) => answers,
        Outcome::NoProbabilities => return Err("an answer without probabilities".to_owned()),
        Outcome::Refused(why) | Outcome::Died(why) | Outcome::Wrong(why) | Outcome::Late(why) => {
            return Err(why);
        }
    };
    // Four decimal places suffice for readers.
    let distance = (distance(reference, &answers) * 1e4).round() / 1e4;
    if distance > LIMIT {
        let much = if distance.is_finite() { format!("{distance:.3}") } else { "beyond measure".to_owned() };
        return Err(format!(
            "its log-probabilities are {much} from those of the same numbers in f32, at most {LIMIT} is rounding"
        ));
    }
    let (weights, setting) = (kind.name().to_owned(), setting.words().to_owned());
    Ok(ComputedTrial { weights, setting, distance, limit: LIMIT })
}

/// Root mean square of the differences, for the prompt where it is largest. Infinite if words are missing.
fn distance(reference: &Answers, answers: &Answers) -> f64 {
    if reference.len() != answers.len() {
        return f64::INFINITY;
    }
    reference.iter().zip(answers).map(|(one, other)| distance_of_one(one, other)).fold(0.0, f64::max)
}

fn distance_of_one(reference: &BTreeMap<String, f64>, answer: &BTreeMap<String, f64>) -> f64 {
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

    fn answers(shift: f64) -> Answers {
        // The second prompt differs twice as much.
        let one = |shift: f64| [(" ba".to_owned(), -1.0 + shift), (" do".to_owned(), -2.0 - shift)].into();
        vec![one(shift), one(2.0 * shift)]
    }

    fn judged(outcomes: &[(Setting, Outcome)]) -> Result<Option<Vec<ComputedTrial>>> {
        judge(WeightKind::Q4_0, &answers(0.0), outcomes.to_vec())
    }

    fn good() -> Outcome {
        Outcome::Answered(answers(0.01))
    }

    #[test]
    fn what_is_near_is_computed_with_its_distance() {
        let trials = judged(&[(Setting::Repacked, good()), (Setting::NotRepacked, good())]).unwrap().unwrap();
        assert_eq!(trials.len(), 2);
        assert!((trials[0].distance - 0.02).abs() < 1e-9, "that of the worst prompt: {trials:?}");
        assert_eq!((trials[1].weights.as_str(), trials[1].setting.as_str()), ("q4_0", "--no-repack"));
    }

    #[test]
    fn a_kernel_that_dies_or_differs_is_named_with_form_and_setting() {
        let dies = Outcome::Died("signal: 11 (SIGSEGV)".to_owned());
        let error = judged(&[(Setting::Repacked, dies), (Setting::NotRepacked, good())]).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("q4_0") && text.contains("(repacked)") && text.contains("SIGSEGV"), "{text}");
        assert!(matches!(error, Error::Kernel { repacked_alone: true, .. }));
        assert!(error.hint().unwrap().contains("--no-repack"), "{:?}", error.hint());

        let differs = Outcome::Answered(answers(2.0));
        let error = judged(&[(Setting::Repacked, good()), (Setting::NotRepacked, differs)]).unwrap_err();
        assert!(error.to_string().contains("4.000 from those of the same numbers in f32"), "{error}");
        assert!(matches!(error, Error::Kernel { repacked_alone: false, .. }));
    }

    #[test]
    fn an_answer_that_does_not_come_in_time_is_no_fault_of_a_kernel() {
        let late = Outcome::Late("no answer within 60s".to_owned());
        let error = judged(&[(Setting::Repacked, late), (Setting::NotRepacked, good())]).unwrap_err();
        assert!(matches!(error, Error::Verify { check: "computing", .. }), "{error}");
    }

    #[test]
    fn words_that_are_missing_are_beyond_measure() {
        let mut short = answers(0.0);
        short[1].remove(" do");
        let error = judged(&[(Setting::Repacked, Outcome::Answered(short))]).unwrap_err();
        assert!(error.to_string().contains("beyond measure"), "{error}");
        let error = judged(&[(Setting::Repacked, Outcome::Answered(Vec::new()))]).unwrap_err();
        assert!(error.to_string().contains("beyond measure"), "{error}");
    }

    #[test]
    fn a_form_that_no_setting_loads_is_not_known_and_one_that_one_setting_refuses_is_a_fault() {
        let refuses = || Outcome::Refused("exit status: 1\nunknown type 39".to_owned());
        assert_eq!(
            judged(&[(Setting::Repacked, refuses()), (Setting::NotRepacked, refuses())]).unwrap(),
            None
        );
        let error = judged(&[(Setting::Repacked, good()), (Setting::QuantisedCache, refuses())]).unwrap_err();
        assert!(error.to_string().contains("-ctk q8_0"), "{error}");
    }
}
