//! Judges changed answers: finds the first revision that answers unlike the older end.
//!
//! ```text
//!  ends, alternating, asked twice; five times if one answers differently the second time
//!     questions that each end answers consistently, and the other end differently ──> these distinguish
//!  a revision ── answers all of them like the older end ──────────────────> healthy
//!             ├─ answers one of them differently ─────────────────────────> ill: like the newer end, or a third answer
//!             └─ varies, or was not asked all ────────────────────────────> cannot be judged
//! ```
//!
//! Two answers differ if their distance is above `proof.distance`, or above twice the distance between
//! answers of the same end. With `proof.answers = "equal"` every difference counts. A refusal differs from an
//! answer. If a revision gives a third answer, several revisions changed answers: the search reports the
//! first, and that there are others.

use serde::{Deserialize, Serialize};

use warden_policies::defaults::Strictness;

use super::super::proof::{BuildReply, ProofPolicy, answers};
use super::conclusion::{
    JudgedRevision, RevisionConclusion, RevisionOutcome, RevisionStanding, RevisionSymptom,
};
use super::{JudgeReply, JudgingPolicies, ProcessOrder, ProcessResult, RevisionAim, SymptomJudge};

/// Each end answers at least twice, because only a second answer shows if the end repeats itself.
const ROUNDS_LEAST: usize = 2;
/// Answers per question of each end if one end does not repeat itself. Then two equally likely answers look
/// like a difference once in five hundred times.
const ROUNDS_IF_UNSTEADY: usize = 5;
/// Answers per question of a revision if an end does not repeat itself.
const REVISION_ROUNDS_IF_UNSTEADY: usize = 3;

/// Answers of a revision to the questions that distinguish the ends.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RevisionAnswers {
    /// Number of questions answered like the older end.
    pub as_older: usize,
    /// Number of questions answered like the newer end.
    pub as_newer: usize,
    /// Questions whose answer differs from those of both ends.
    pub otherwise: Vec<String>,
    /// Questions answered sometimes like the older end and sometimes not.
    pub unsteady: Vec<String>,
    /// Questions that were asked too seldom or not at all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub missing: Vec<String>,
}

impl RevisionAnswers {
    /// Returns true if the answers match neither end.
    pub const fn is_third(&self) -> bool {
        !self.otherwise.is_empty() || (self.as_older > 0 && self.as_newer > 0)
    }
}

/// A question that the ends answer differently.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EndsDifference {
    /// Name of the request.
    pub request: String,
    /// Number of equal tokens before the first difference.
    pub shared: usize,
    /// Number of tokens in the older end's answer.
    pub of: usize,
    /// Distance of the answers; `None` if it cannot be measured.
    pub distance: Option<f64>,
    /// Answer of the older end, or its refusal.
    pub older: String,
    /// Answer of the newer end, or its refusal.
    pub newer: String,
}

#[derive(Clone, Debug)]
struct DistinguishingQuestion {
    request: String,
    /// Largest distance in nats that does not count as a difference.
    limit: f64,
}

#[derive(Debug)]
struct AskedRevision {
    revision: usize,
    asked: Vec<Vec<BuildReply>>,
    least: usize,
}

#[derive(Debug)]
pub(super) struct RepliesJudge {
    proof: ProofPolicy,
    last: usize,
    older: Vec<Vec<BuildReply>>,
    newer: Vec<Vec<BuildReply>>,
    telling: Vec<DistinguishingQuestion>,
    is_quiet: bool,
    open: Option<AskedRevision>,
}

impl SymptomJudge for RepliesJudge {
    fn next(&self) -> Option<ProcessOrder> {
        if self.telling.is_empty() {
            let revision = if self.newer.len() <= self.older.len() { self.last } else { 0 };
            return Some(ProcessOrder::new(RevisionAim::Answers, revision, true));
        }
        self.open.as_ref().map(|open| ProcessOrder::new(RevisionAim::Answers, open.revision, false))
    }

    fn add_result(&mut self, ask: ProcessOrder, seen: ProcessResult) -> JudgeReply {
        let replies = match seen {
            ProcessResult::Visit(visit) => visit.replies,
            ProcessResult::Cannot(why) => return self.close_revision(RevisionStanding::Unknown { why }),
            ProcessResult::Findings(_) => {
                return self.close_revision(RevisionStanding::Unknown { why: "it was not asked".to_owned() });
            }
        };
        if let Some(open) = &mut self.open {
            open.asked.push(replies);
            return self.judge_open();
        }
        if ask.revision == self.last { &mut self.newer } else { &mut self.older }.push(replies);
        self.look_at_ends()
    }

    fn begin(&mut self, revision: usize, again: bool) -> JudgeReply {
        if revision == 0 && !again {
            let answers =
                Some(RevisionAnswers { as_older: self.telling.len(), ..RevisionAnswers::default() });
            let judged = JudgedRevision::new(0, RevisionStanding::Healthy, self.older.len());
            return JudgeReply::Judged(Box::new(JudgedRevision { answers, ..judged }));
        }
        let least = match (self.is_quiet, again) {
            (true, false) => 1,
            (true, true) => ROUNDS_LEAST,
            (false, _) => REVISION_ROUNDS_IF_UNSTEADY,
        };
        self.open = Some(AskedRevision { revision, asked: Vec::new(), least });
        JudgeReply::More
    }

    fn describe_ends(&self, conclusion: &mut RevisionConclusion) {
        if self.telling.is_empty() {
            // List differences that are too small to count, but only of ends that repeat their answers
            // exactly.
            let is_alike = matches!(conclusion.outcome, RevisionOutcome::Alike { sure: true });
            let near =
                self.requests().filter(|_| is_alike).filter_map(|request| self.small_difference(request));
            conclusion.differences = near.collect();
            return;
        }
        conclusion.differences =
            self.telling.iter().filter_map(|one| self.ends_difference(&one.request)).collect();
        let answers = Some(RevisionAnswers { as_newer: self.telling.len(), ..RevisionAnswers::default() });
        let judged = JudgedRevision::new(self.last, RevisionStanding::Ill, self.newer.len());
        conclusion.judged.push(JudgedRevision { answers, ..judged });
    }
}

impl RepliesJudge {
    pub(super) fn new(rules: JudgingPolicies<'_>, last: usize) -> Self {
        let mut proof = rules.proof.clone();
        if proof.answers == Strictness::Any {
            proof.answers = Strictness::Near;
        }
        let (older, newer, telling) = (Vec::new(), Vec::new(), Vec::new());
        Self { proof, last, older, newer, telling, is_quiet: true, open: None }
    }

    fn look_at_ends(&mut self) -> JudgeReply {
        let asked = self.older.len();
        if asked != self.newer.len() || asked < ROUNDS_LEAST {
            return JudgeReply::More;
        }
        let is_quiet = self.requests().all(|request| self.is_quiet_at(request));
        self.is_quiet = is_quiet;
        if !self.is_quiet && asked < ROUNDS_IF_UNSTEADY {
            return JudgeReply::More;
        }
        let telling = self.requests().filter_map(|request| self.distinguishing_question(request)).collect();
        self.telling = telling;
        if self.telling.is_empty() {
            return JudgeReply::Over(
                self.silent_end().unwrap_or(RevisionOutcome::Alike { sure: self.is_quiet }),
            );
        }
        let requests = self.telling.iter().map(|one| one.request.clone()).collect();
        JudgeReply::Differ { symptom: RevisionSymptom::Answers { requests }, is_newer: true }
    }

    fn requests(&self) -> impl Iterator<Item = &str> {
        let newer = self.newer.first().map_or(&[][..], Vec::as_slice);
        let both = self.older.first().into_iter().flatten().map(|reply| reply.request.as_str());
        both.filter(|request| newer.iter().any(|reply| reply.request == *request))
    }

    /// Returns the outcome if an end refuses all requests and nothing can be compared.
    fn silent_end(&self) -> Option<RevisionOutcome> {
        let (older, newer) = (self.older.iter().flatten(), self.newer.iter().flatten());
        let refused = |reply: &BuildReply| reply.refused.clone();
        let is_asked =
            |mut end: std::slice::Iter<'_, Vec<BuildReply>>| end.any(|replies| !replies.is_empty());
        if self.requests().next().is_none() {
            let why = "it answers none of the questions".to_owned();
            return Some(RevisionOutcome::EndFailed { newer: is_asked(self.older.iter()), why });
        }
        let mut all = older.chain(newer).map(refused).peekable();
        let first = all.peek().cloned().flatten()?;
        let why = format!("it refuses all questions, as the newer one does: {first}");
        all.all(|refused| refused.is_some()).then_some(RevisionOutcome::EndFailed { newer: false, why })
    }

    /// Returns the difference between the ends' first answers, however small.
    fn small_difference(&self, request: &str) -> Option<EndsDifference> {
        let (older, newer) = self.first_of_both(request)?;
        let differs = answers::answers_differ(Strictness::Equal, 0.0, older, newer);
        differs.then(|| self.ends_difference(request)).flatten()
    }

    fn is_quiet_at(&self, request: &str) -> bool {
        [&self.older, &self.newer].into_iter().all(|end| {
            pairs(&replies_to(end, request)).all(|(one, other)| {
                one.text == other.text && one.vector == other.vector && one.refused == other.refused
            })
        })
    }

    /// Returns the question if each end repeats its answer and the answers of the ends differ.
    fn distinguishing_question(&self, request: &str) -> Option<DistinguishingQuestion> {
        let (older, newer) = (replies_to(&self.older, request), replies_to(&self.newer, request));
        let own = || pairs(&older).chain(pairs(&newer)).collect::<Vec<_>>();
        let distance =
            |(one, other): (&BuildReply, &BuildReply)| answers::compare(one, other).difference.distance;
        let noise = own().into_iter().filter_map(distance).fold(0.0, f64::max);
        let limit = self.proof.distance.max(2.0 * noise);
        let question = DistinguishingQuestion { request: request.to_owned(), limit };
        let is_steady = own().iter().all(|(one, other)| !self.differ(&question, one, other));
        let mut across = older.iter().flat_map(|one| newer.iter().map(move |other| (*one, *other)));
        let is_told = !older.is_empty() && !newer.is_empty();
        let differs = is_told && across.all(|(one, other)| self.differ(&question, one, other));
        (is_steady && differs).then_some(question)
    }

    fn differ(&self, question: &DistinguishingQuestion, one: &BuildReply, other: &BuildReply) -> bool {
        answers::answers_differ(self.proof.answers, question.limit, one, other)
    }

    fn first_of_both(&self, request: &str) -> Option<(&BuildReply, &BuildReply)> {
        let first = |end| replies_to(end, request).first().copied();
        Some((first(&self.older)?, first(&self.newer)?))
    }

    fn ends_difference(&self, request: &str) -> Option<EndsDifference> {
        let (older, newer) = self.first_of_both(request)?;
        let difference = answers::compare(older, newer).difference;
        let said = |reply: &BuildReply| match &reply.refused {
            Some(why) => format!("refused: {why}"),
            None if reply.vector.is_empty() => reply.text.clone(),
            None => format!("{} numbers", reply.vector.len()),
        };
        Some(EndsDifference {
            request: request.to_owned(),
            shared: difference.shared,
            of: difference.of,
            distance: difference.distance,
            older: said(older),
            newer: said(newer),
        })
    }

    fn count_answers(&self, open: &AskedRevision) -> RevisionAnswers {
        let mut said = RevisionAnswers::default();
        for question in &self.telling {
            let own = replies_to(&open.asked, &question.request);
            let is_as = |end: &[Vec<BuildReply>], one: &BuildReply| {
                replies_to(end, &question.request).iter().any(|other| !self.differ(question, other, one))
            };
            let older = own.iter().filter(|one| is_as(&self.older, one)).count();
            if own.len() < open.asked.len() {
                // The missing answer might be one that differs.
                said.missing.push(question.request.clone());
            } else if older == own.len() {
                said.as_older += 1;
            } else if older > 0 {
                said.unsteady.push(question.request.clone());
            } else if own.iter().all(|one| is_as(&self.newer, one)) {
                said.as_newer += 1;
            } else {
                said.otherwise.push(question.request.clone());
            }
        }
        said
    }

    fn judge_open(&mut self) -> JudgeReply {
        let Some(open) = self.open.as_ref().filter(|open| open.asked.len() >= open.least) else {
            return JudgeReply::More;
        };
        let said = self.count_answers(open);
        let standing = if said.as_newer > 0 || !said.otherwise.is_empty() {
            RevisionStanding::Ill
        } else if !said.missing.is_empty() {
            let names = said.missing.join("”, “");
            RevisionStanding::Unknown {
                why: format!("nothing is known of its answer to “{names}”, which the ends answer"),
            }
        } else if said.unsteady.is_empty() {
            RevisionStanding::Healthy
        } else if open.asked.len() < ROUNDS_IF_UNSTEADY {
            return JudgeReply::More;
        } else {
            let names = said.unsteady.join("”, “");
            RevisionStanding::Unknown {
                why: format!("now it answers as the older end, now otherwise: “{names}”"),
            }
        };
        self.close_revision(standing)
    }

    fn close_revision(&mut self, standing: RevisionStanding) -> JudgeReply {
        let Some(open) = self.open.take() else { return JudgeReply::More };
        let answers = (!open.asked.is_empty()).then(|| self.count_answers(&open));
        let judged = JudgedRevision::new(open.revision, standing, open.asked.len());
        JudgeReply::Judged(Box::new(JudgedRevision { answers, ..judged }))
    }
}

fn replies_to<'a>(asked: &'a [Vec<BuildReply>], request: &str) -> Vec<&'a BuildReply> {
    asked.iter().filter_map(|replies| replies.iter().find(|reply| reply.request == request)).collect()
}

fn pairs<'a>(all: &[&'a BuildReply]) -> impl Iterator<Item = (&'a BuildReply, &'a BuildReply)> {
    let pairs: Vec<_> = all
        .iter()
        .enumerate()
        .flat_map(|(at, one)| all[at + 1..].iter().map(|other| (*one, *other)))
        .collect();
    pairs.into_iter()
}
