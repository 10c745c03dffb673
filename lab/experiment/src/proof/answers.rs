//! Whether two builds answer the same, and if not, how far they are apart.
//!
//! Answers are compared token by token up to the first that differs: until there both have read the same, so what they think of the next
//! token can be compared, the one that differs included. Behind it they speak of different things.
//!
//! The distance of two answers is the largest, over those tokens, of how far the logarithms of probability are apart that both give to the
//! likeliest tokens, each weighed by its probability. Builds whose kernels add up in another order are hundredths apart; one that computes
//! something else is whole nats away. The distance of two embeddings is the angle between them in radians, which is as small or large.

use serde::{Deserialize, Serialize};

use warden_policies::defaults::Strictness;

use super::{ProofPolicy, Ruling};

/// What one request was answered.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Reply {
    /// Which request.
    pub request: String,
    /// The text, or what else there is to compare.
    pub text: String,
    /// Its tokens, where the build tells them.
    pub tokens: Vec<Token>,
    /// Of an embedding: its numbers.
    pub vector: Vec<f64>,
    /// Why there is no answer.
    pub refused: Option<String>,
}

/// A token, and what the build thought when it chose it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Token {
    /// Its text, as the build gives it.
    pub text: String,
    /// The likeliest tokens with the natural logarithm of their probability.
    pub top: Vec<(String, f64)>,
}

/// How two answers to one request differ.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Difference {
    /// Which request.
    pub request: String,
    /// Tokens until the first that differs.
    pub shared: usize,
    /// Tokens of the old answer.
    pub of: usize,
    /// How far apart in nats; `None` where a build tells no probabilities.
    pub distance: Option<f64>,
    /// Only one of them answered: what the other said.
    pub refused: Option<String>,
}

/// What is known of the answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Answers {
    /// How they stand.
    pub ruling: Ruling,
    /// Requests that both were sent.
    pub asked: usize,
    /// Answers that are equal to the last byte.
    pub equal: usize,
    /// Tokens that agree, as a share; `None` where there are none.
    pub agreement: Option<f64>,
    /// The largest distance, those of equal answers included.
    pub distance: Option<f64>,
    /// The largest distance of the old build from itself; `None` if it was not asked twice.
    pub noise: Option<f64>,
    /// The old build gave another answer itself to so many requests.
    pub unsteady: usize,
    /// Those that differ, and that the old build answered alike both times.
    pub differences: Vec<Difference>,
}

/// Compares what both were asked.
pub(super) fn judge(policy: &ProofPolicy, old: &[Reply], new: &[Reply], again: Option<&[Reply]>) -> Answers {
    let of =
        |replies: &'_ [Reply], request: &str| replies.iter().find(|reply| reply.request == request).cloned();
    let mut answers = Answers {
        ruling: Ruling::Unknown,
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
        // What neither can do is no difference.
        if reply.refused.is_some() && other.refused.is_some() {
            continue;
        }
        answers.asked += 1;
        let difference = compare(reply, &other);
        let itself = again.and_then(|again| of(again, &reply.request)).map(|again| compare(reply, &again));
        let moved = itself.as_ref().is_some_and(|itself| !itself.is_none);
        if let Some(noise) = itself.and_then(|itself| itself.told.distance) {
            answers.noise = Some(answers.noise.unwrap_or(0.0).max(noise));
        }
        shared += difference.told.shared;
        tokens += difference.told.of;
        if let Some(distance) = difference.told.distance {
            answers.distance = Some(answers.distance.unwrap_or(0.0).max(distance));
        }
        if difference.is_none {
            answers.equal += 1;
        } else if moved && difference.told.refused.is_none() {
            answers.unsteady += 1;
        } else {
            answers.differences.push(difference.told);
        }
    }
    if tokens > 0 {
        answers.agreement = Some(share(shared, tokens));
    }
    answers.ruling = answers.judge(policy);
    answers
}

impl Answers {
    fn judge(&self, policy: &ProofPolicy) -> Ruling {
        if self.asked == 0 {
            return Ruling::Unknown;
        }
        let limit = policy.distance.max(2.0 * self.noise.unwrap_or(0.0));
        let is_far = |distance: Option<f64>| distance.is_some_and(|distance| distance > limit);
        // A build that refuses what the old one answered is worse whatever is asked of its answers; one that answers more is not.
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
        if is_worse { Ruling::Worse } else { Ruling::Same }
    }
}

/// Whether two answers to one request differ so that it counts, where so many nats are no difference. Other than in a proof it counts, too,
/// if only the second one is an answer.
pub(crate) fn differ(strictness: Strictness, limit: f64, one: &Reply, other: &Reply) -> bool {
    let compared = compare(one, other);
    let is_far = || compared.told.distance.map_or(!compared.is_none, |distance| distance > limit);
    let is_refused = compared.told.refused.is_some() && !compared.is_none;
    is_refused
        || match strictness {
            Strictness::Any => false,
            Strictness::Equal => !compared.is_none,
            Strictness::Near => is_far(),
        }
}

/// How far apart two answers are, as far as that can be measured.
pub(crate) fn distance(one: &Reply, other: &Reply) -> Option<f64> {
    compare(one, other).told.distance
}

/// How two answers differ.
pub(crate) fn difference(one: &Reply, other: &Reply) -> Difference {
    compare(one, other).told
}

struct Compared {
    is_none: bool,
    told: Difference,
}

fn compare(old: &Reply, new: &Reply) -> Compared {
    let request = old.request.clone();
    if let Some(refused) = old.refused.as_ref().or(new.refused.as_ref()) {
        let of = if old.refused.is_some() { 0 } else { old.tokens.len().max(1) };
        let is_none = old.refused.is_some() && new.refused.is_some();
        let told = Difference { request, shared: 0, of, distance: None, refused: Some(refused.clone()) };
        return Compared { is_none, told };
    }
    if !old.vector.is_empty() || !new.vector.is_empty() {
        let told = Difference {
            request,
            shared: 0,
            of: 0,
            distance: angle(&old.vector, &new.vector),
            refused: None,
        };
        return Compared { is_none: old.vector == new.vector, told };
    }
    let pairs = || old.tokens.iter().zip(&new.tokens);
    let shared = pairs().take_while(|(one, other)| one.text == other.text).count();
    // The one that differs was chosen behind the same text.
    let read_alike = pairs().take(shared + 1);
    let distance = read_alike
        .filter_map(|(one, other)| apart(&one.top, &other.top))
        .fold(None, |most: Option<f64>, distance| Some(most.unwrap_or(0.0).max(distance)));
    let is_none = old.text == new.text;
    // The same tokens to the end of one of them, and yet another text: it was cut short, or lost on its way. No distance tells that.
    let is_cut = !is_none && shared == old.tokens.len().min(new.tokens.len()) && shared > 0;
    let distance = distance.filter(|_| !is_cut);
    let told = Difference { request, shared, of: old.tokens.len(), distance, refused: None };
    Compared { is_none, told }
}

/// The angle between two vectors; `None` if they are of different spaces.
fn angle(one: &[f64], other: &[f64]) -> Option<f64> {
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let lengths = (dot(one, one) * dot(other, other)).sqrt();
    let is_told = one.len() == other.len() && lengths > 0.0;
    is_told.then(|| (dot(one, other) / lengths).clamp(-1.0, 1.0).acos())
}

/// How far two opinions are apart: over the tokens of the first, weighed by what it thinks of them. One that the second does not name is to
/// it less likely than all that it names.
fn apart(one: &[(String, f64)], other: &[(String, f64)]) -> Option<f64> {
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
