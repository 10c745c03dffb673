//! Compares each answer with the right one, and with the right answers of all other conversations.
//!
//! ```text
//!  limit = 4 × the largest measured noise, at least 1/16 of the distance between conversations
//!  distance from the right answer <= limit                          ──> right
//!  above, and within the limit of another conversation's            ──> that conversation's content
//!  above, otherwise                                                 ──> changed: it fits no prompt
//! ```
//!
//! Changed answers alone show mixing only if so many cannot be chance: the process with one conversation
//! had none.

use super::{
    AskedAnswer, FittingPrompt, ForeignAnswer, IsolationAnswers, IsolationEffect, IsolationFinding,
    IsolationOutcome, IsolationScales, NoiseSample, PromptPlace,
};
use crate::proof::BuildReply;
use crate::proof::answers::compare;

/// An answer further away than so many times the largest noise is no noise: of some dozens of samples, the next
/// ones seldom exceed twice the largest.
const NOISE_FACTOR: f64 = 4.0;
/// Least limit, as a share of the distance between conversations. On a processor the measured noise may be 0.
const LEAST_LIMIT: f64 = 1.0 / 16.0;
/// Two right answers closer than so many limits are too alike: one could pass for the other.
const TELLING_LIMITS: f64 = 2.0;
/// Least share of prompts that must have a right answer of their own.
const LEAST_TELLING: f64 = 0.5;
/// Probability with which a mixing server is missed at the share in [`IsolationFinding::finds`].
const MISSED: f64 = 0.05;
/// Greatest probability of an accident among changed answers.
const ACCIDENT: f64 = 0.01;

/// Judges all answers. `failure` is the reason why answers are missing, if some are.
pub fn judge_answers(slots: usize, all: &IsolationAnswers, failure: Option<&str>) -> IsolationFinding {
    let scales = measure(all);
    let foreign: Vec<ForeignAnswer> = all
        .together
        .iter()
        .enumerate()
        .filter_map(|(at, answer)| foreign_answer(all, &scales, at + 1, answer))
        .collect();
    let is_telling = |place: PromptPlace| {
        nearest_other(all, place, false).is_some_and(|nearest| nearest >= TELLING_LIMITS * scales.limit)
    };
    let telling = all.together.iter().filter(|answer| is_telling(answer.place)).count();
    let mut finding = IsolationFinding {
        outcome: IsolationOutcome::Separate,
        slots,
        conversations: count_conversations(all),
        rounds: all.together.iter().map(|answer| answer.round).max().unwrap_or(0),
        answers: all.together.len(),
        telling,
        scales,
        finds: None,
        foreign,
    };
    finding.outcome = outcome(&finding, failure);
    let is_decided = !matches!(finding.outcome, IsolationOutcome::Undecided { .. });
    finding.finds = is_decided.then(|| found_share(telling));
    finding
}

/// Judges a switch by the number of foreign answers and of all answers, without it and with it.
pub fn judge_cure(without: (usize, usize), with: (usize, usize)) -> IsolationEffect {
    if with.0 > 0 {
        return IsolationEffect::Nothing;
    }
    if chance_of_split(without.0, without.1, with.1) < MISSED {
        IsolationEffect::Stops
    } else {
        IsolationEffect::Undecided
    }
}

fn outcome(found: &IsolationFinding, failure: Option<&str>) -> IsolationOutcome {
    let undecided = |why: String| IsolationOutcome::Undecided { why };
    let scales = &found.scales;
    // A server that differs from itself by as much as from another conversation shows nothing.
    let too_noisy = |noise: NoiseSample| NOISE_FACTOR * noise.most > scales.apart / TELLING_LIMITS;
    if scales.apart <= 0.0 {
        let why = "the server reports no log probabilities, or answers all conversations alike";
        return undecided(failure.unwrap_or(why).to_owned());
    }
    if too_noisy(scales.repeated) {
        return undecided(format!(
            "with one slot, without caches and with `cache_prompt: false`, the server gives one prompt answers that \
             are {:.3} nats apart; those of different conversations are {:.3} apart",
            scales.repeated.most, scales.apart
        ));
    }
    if too_noisy(scales.alone) {
        return undecided(format!(
            "already with one conversation alone, reused prompts change its answers by {:.3} nats; those of \
             different conversations are {:.3} apart",
            scales.alone.most, scales.apart
        ));
    }
    let changed = found.foreign.iter().filter(|one| one.fits.is_none()).count();
    let is_mixed = found.fitting().next().is_some()
        || (changed > 0 && chance_of_split(changed, found.answers, scales.alone.count) < ACCIDENT);
    if is_mixed {
        return IsolationOutcome::Mixed;
    }
    if let Some(why) = failure {
        return undecided(why.to_owned());
    }
    if changed > 0 {
        return undecided(format!(
            "{changed} of {} answers are further from the right one than noise explains, but fit no other conversation",
            found.answers
        ));
    }
    if as_f64(found.telling) < LEAST_TELLING * as_f64(found.answers) {
        return undecided(format!(
            "the model answers different conversations too much alike: only {} of {} prompts have an answer of \
             their own",
            found.telling, found.answers
        ));
    }
    IsolationOutcome::Separate
}

fn measure(all: &IsolationAnswers) -> IsolationScales {
    let noise = |pairs: &[(PromptPlace, BuildReply)]| {
        let of = |(place, reply): &(PromptPlace, BuildReply)| distance(all.truths.get(place)?, reply);
        let distances: Vec<f64> = pairs.iter().filter_map(of).collect();
        NoiseSample { count: distances.len(), most: distances.into_iter().fold(0.0, f64::max) }
    };
    let (repeated, alone) = (noise(&all.repeated), noise(&all.alone));
    let mut nearest: Vec<f64> =
        all.truths.keys().filter_map(|place| nearest_other(all, *place, true)).collect();
    nearest.sort_unstable_by(f64::total_cmp);
    let apart = nearest.get(nearest.len() / 2).copied().unwrap_or(0.0);
    let limit = (NOISE_FACTOR * repeated.most.max(alone.most)).max(LEAST_LIMIT * apart);
    IsolationScales { repeated, alone, apart, limit }
}

/// Returns the distance of a right answer from the nearest one of another conversation; with `same_turn`, only
/// among prompts that end with the same words.
fn nearest_other(all: &IsolationAnswers, place: PromptPlace, same_turn: bool) -> Option<f64> {
    let own = all.truths.get(&place)?;
    let others = all.truths.iter().filter(|(other, _)| {
        other.conversation != place.conversation && (!same_turn || other.turn == place.turn)
    });
    others.filter_map(|(_, truth)| distance(own, truth)).min_by(f64::total_cmp)
}

fn foreign_answer(
    all: &IsolationAnswers,
    scales: &IsolationScales,
    request: usize,
    answer: &AskedAnswer,
) -> Option<ForeignAnswer> {
    let truth = all.truths.get(&answer.place)?;
    let own = distance(truth, &answer.reply).filter(|own| *own > scales.limit)?;
    let candidates = all.truths.iter().filter(|(place, other)| {
        place.conversation != answer.place.conversation
            && distance(truth, other).is_some_and(|apart| apart >= TELLING_LIMITS * scales.limit)
    });
    let nearest = candidates
        .filter_map(|(place, other)| {
            Some(FittingPrompt { place: *place, distance: distance(other, &answer.reply)? })
        })
        .min_by(|one, other| one.distance.total_cmp(&other.distance));
    Some(ForeignAnswer {
        request,
        round: answer.round,
        concurrent: answer.concurrent,
        place: answer.place,
        cached: answer.cached,
        distance: own,
        fits: nearest.filter(|nearest| nearest.distance <= scales.limit),
    })
}

/// Returns the distance of two answers in nats; `None` if one was refused or has no log probabilities.
fn distance(truth: &BuildReply, reply: &BuildReply) -> Option<f64> {
    let compared = compare(truth, reply).difference;
    if compared.refused.is_some() {
        return None;
    }
    compared.distance
}

fn count_conversations(all: &IsolationAnswers) -> usize {
    let mut known: Vec<usize> = all.together.iter().map(|answer| answer.place.conversation).collect();
    known.sort_unstable();
    known.dedup();
    known.len()
}

/// Returns the share of mixed answers that `answers` answers contain at least once with 95 %.
fn found_share(answers: usize) -> f64 {
    1.0 - MISSED.powf(1.0 / as_f64(answers.max(1)))
}

/// Returns the probability that all `hits` of `here + there` draws fall among the `here`, if chance places them.
fn chance_of_split(hits: usize, here: usize, there: usize) -> f64 {
    let ways =
        |hit: usize| as_f64(here.saturating_sub(hit)) / as_f64((here + there).saturating_sub(hit).max(1));
    (0..hits).map(ways).product()
}

fn as_f64(count: usize) -> f64 {
    f64::from(u32::try_from(count).unwrap_or(u32::MAX))
}
