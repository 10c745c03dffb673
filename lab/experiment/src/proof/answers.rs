//! Compares the answers of two builds, and measures their distance.
//!
//! Answers are compared token by token up to the first difference. Up to and including that token, both
//! builds predicted after the same text; later tokens follow different texts.
//!
//! The distance of two answers is the largest probability-weighted difference of log probabilities over those
//! tokens. Builds that only add numbers in another order are hundredths of a nat apart; a wrong computation
//! is whole nats away. The distance of two embeddings is their angle in radians, which has a similar scale.

use serde::{Deserialize, Serialize};

use warden_policies::defaults::Strictness;

use super::measured::{ProofPolicy, ProofRuling};

/// Answer to one request.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BuildReply {
    /// Name of the request.
    pub request: String,
    /// Text, or other content to compare.
    pub text: String,
    /// Tokens; empty if the build does not report them.
    pub tokens: Vec<ReplyToken>,
    /// Vector, if the answer is an embedding.
    pub vector: Vec<f64>,
    /// Reason why there is no answer; `None` if there is one.
    pub refused: Option<String>,
}

/// A token of an answer, with the build's prediction for its position.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ReplyToken {
    /// Text as reported by the build.
    pub text: String,
    /// Likeliest tokens, each with the natural logarithm of its probability.
    pub top: Vec<(String, f64)>,
}

/// Difference between two answers to one request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AnswerDifference {
    /// Name of the request.
    pub request: String,
    /// Number of equal tokens before the first difference.
    pub shared: usize,
    /// Number of tokens in the old build's answer.
    pub of: usize,
    /// Distance in nats; `None` if a build reports no probabilities.
    pub distance: Option<f64>,
    /// Reason why one build refused, if the other answered.
    pub refused: Option<String>,
}

/// Comparison of all answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AnswerComparison {
    /// Ruling on the answers.
    pub ruling: ProofRuling,
    /// Number of requests sent to both builds.
    pub asked: usize,
    /// Number of answers equal to the last byte.
    pub equal: usize,
    /// Share of tokens that are equal; `None` without tokens.
    pub agreement: Option<f64>,
    /// Largest distance between the builds' answers.
    pub distance: Option<f64>,
    /// Largest distance between two answers of the old build to one request; `None` if it answered only once.
    pub noise: Option<f64>,
    /// Number of requests that the old build answered differently the second time.
    pub unsteady: usize,
    /// Differences in requests that the old build answered alike both times.
    pub differences: Vec<AnswerDifference>,
}

pub(super) fn judge(
    policy: &ProofPolicy,
    old: &[BuildReply],
    new: &[BuildReply],
    again: Option<&[BuildReply]>,
) -> AnswerComparison {
    let of = |replies: &'_ [BuildReply], request: &str| {
        replies.iter().find(|reply| reply.request == request).cloned()
    };
    let mut answers = AnswerComparison {
        ruling: ProofRuling::Unknown,
        asked: 0,
        equal: 0,
        agreement: None,
        distance: None,
        noise: None,
        unsteady: 0,
        differences: Vec::new(),
    };
    let (mut shared, mut tokens) = (0, 0);
    for reply in old {
        let Some(other) = of(new, &reply.request) else { continue };
        if reply.refused.is_some() && other.refused.is_some() {
            continue;
        }
        answers.asked += 1;
        let difference = compare(reply, &other);
        let itself = again.and_then(|again| of(again, &reply.request)).map(|again| compare(reply, &again));
        let moved = itself.as_ref().is_some_and(|itself| !itself.is_none);
        if let Some(noise) = itself.and_then(|itself| itself.difference.distance) {
            answers.noise = Some(answers.noise.unwrap_or(0.0).max(noise));
        }
        shared += difference.difference.shared;
        tokens += difference.difference.of;
        if let Some(distance) = difference.difference.distance {
            answers.distance = Some(answers.distance.unwrap_or(0.0).max(distance));
        }
        if difference.is_none {
            answers.equal += 1;
        } else if moved && difference.difference.refused.is_none() {
            answers.unsteady += 1;
        } else {
            answers.differences.push(difference.difference);
        }
    }
    if tokens > 0 {
        answers.agreement = Some(share(shared, tokens));
    }
    answers.ruling = answers.judge(policy);
    answers
}

impl AnswerComparison {
    fn judge(&self, policy: &ProofPolicy) -> ProofRuling {
        if self.asked == 0 {
            return ProofRuling::Unknown;
        }
        let limit = policy.distance.max(2.0 * self.noise.unwrap_or(0.0));
        let is_far = |distance: Option<f64>| distance.is_some_and(|distance| distance > limit);
        // At any strictness, refusing a request that the old build answered is worse; answering more is not.
        let refuses = self.differences.iter().any(|one| one.refused.is_some() && one.of > 0);
        let is_worse = refuses
            || match policy.answers {
                Strictness::Any => false,
                Strictness::Equal => !self.differences.is_empty(),
                Strictness::Near => {
                    is_far(self.distance)
                        || self.differences.iter().any(|one| one.distance.is_none() && one.refused.is_none())
                }
            };
        if is_worse { ProofRuling::Worse } else { ProofRuling::Same }
    }
}

/// Returns true if the answers differ by more than `limit` nats, or as `strictness` demands. Unlike in a
/// proof, an answer in place of a refusal counts as a difference.
pub(crate) fn answers_differ(
    strictness: Strictness,
    limit: f64,
    one: &BuildReply,
    other: &BuildReply,
) -> bool {
    let compared = compare(one, other);
    let is_far = || compared.difference.distance.map_or(!compared.is_none, |distance| distance > limit);
    let is_refused = compared.difference.refused.is_some() && !compared.is_none;
    is_refused
        || match strictness {
            Strictness::Any => false,
            Strictness::Equal => !compared.is_none,
            Strictness::Near => is_far(),
        }
}

pub(crate) struct ComparedReplies {
    is_none: bool,
    pub(crate) difference: AnswerDifference,
}

pub(crate) fn compare(old: &BuildReply, new: &BuildReply) -> ComparedReplies {
    let request = old.request.clone();
    if let Some(refused) = old.refused.as_ref().or(new.refused.as_ref()) {
        let of = if old.refused.is_some() { 0 } else { old.tokens.len().max(1) };
        let is_none = old.refused.is_some() && new.refused.is_some();
        let told =
            AnswerDifference { request, shared: 0, of, distance: None, refused: Some(refused.clone()) };
        return ComparedReplies { is_none, difference: told };
    }
    if !old.vector.is_empty() || !new.vector.is_empty() {
        let told = AnswerDifference {
            request,
            shared: 0,
            of: 0,
            distance: angle(&old.vector, &new.vector),
            refused: None,
        };
        return ComparedReplies { is_none: old.vector == new.vector, difference: told };
    }
    let pairs = || old.tokens.iter().zip(&new.tokens);
    let shared = pairs().take_while(|(one, other)| one.text == other.text).count();
    // Include the first differing token, which both builds predicted after the same text.
    let read_alike = pairs().take(shared + 1);
    let distance = read_alike
        .filter_map(|(one, other)| prediction_distance(&one.top, &other.top))
        .fold(None, |most: Option<f64>, distance| Some(most.unwrap_or(0.0).max(distance)));
    let is_none = old.text == new.text;
    // The distance does not show that an answer was cut short, so drop it.
    let is_cut = !is_none && shared == old.tokens.len().min(new.tokens.len()) && shared > 0;
    let distance = distance.filter(|_| !is_cut);
    let told = AnswerDifference { request, shared, of: old.tokens.len(), distance, refused: None };
    ComparedReplies { is_none, difference: told }
}

/// Returns the angle between two vectors; `None` if their dimensions differ.
fn angle(one: &[f64], other: &[f64]) -> Option<f64> {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let lengths = (dot(one, one) * dot(other, other)).sqrt();
    let is_told = one.len() == other.len() && lengths > 0.0;
    is_told.then(|| (dot(one, other) / lengths).clamp(-1.0, 1.0).acos())
}

/// Returns the distance of two predictions over the tokens of the first, weighted by its probabilities. A
/// token missing from the second is taken to be less likely than all its tokens.
fn prediction_distance(one: &[(String, f64)], other: &[(String, f64)]) -> Option<f64> {
    let named = || other.iter().filter(|(_, new)| new.is_finite());
    let least = named().map(|(_, new)| *new).fold(f64::INFINITY, f64::min);
    if !least.is_finite() {
        return None;
    }
    let (mut sum, mut weight) = (0.0, 0.0);
    for (text, old) in one.iter().filter(|(_, old)| old.is_finite()) {
        let apart = match named().find(|(own, _)| own == text) {
            Some((_, new)) => (old - new).abs(),
            None => (old - least).max(0.0),
        };
        sum += old.exp() * apart;
        weight += old.exp();
    }
    (weight > 0.0).then(|| sum / weight)
}

fn share(part: usize, whole: usize) -> f64 {
    let (part, whole) = (u32::try_from(part).unwrap_or(u32::MAX), u32::try_from(whole).unwrap_or(u32::MAX));
    f64::from(part) / f64::from(whole.max(1))
}
