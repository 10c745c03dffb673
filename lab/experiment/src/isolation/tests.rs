//! Simulated servers: answers with noise of many sizes, with another conversation's content, and with traces of it.

use std::collections::{BTreeMap, BTreeSet};

use warden_policies::world::SplitMix;

use super::*;
use crate::proof::ReplyToken;

const SLOTS: usize = 4;
const REQUESTS: usize = 100;

/// Server whose answers depend on the conversation, with noise in the log probabilities.
struct NoisyServer {
    random: SplitMix,
    /// Typical noise in nats.
    noise: f64,
}

/// Replaces an answer to a prompt after these prompts.
type ChangeAnswer<'a> =
    dyn FnMut(&mut NoisyServer, PromptPlace, &BTreeSet<PromptPlace>) -> Option<BuildReply> + 'a;

impl NoisyServer {
    fn new(seed: u64) -> Self {
        let mut random = SplitMix::new(seed);
        // From the last digits of a processor to the largest differences between batches on a GPU.
        let noise = random.between(-11.0, -4.5).exp();
        Self { random, noise }
    }

    fn normal(&mut self) -> f64 {
        (0..12).map(|_| self.random.unit()).sum::<f64>() - 6.0
    }

    fn answer(&mut self, place: PromptPlace) -> BuildReply {
        // Some answers are noisier than others.
        let noise = self.noise * (0.5 * self.normal()).exp();
        self.answer_between(place, place, 0.0, noise)
    }

    /// Answer to a prompt, with this share of another prompt's.
    fn answer_between(
        &mut self,
        place: PromptPlace,
        other: PromptPlace,
        share: f64,
        noise: f64,
    ) -> BuildReply {
        let tokens = (0..3).map(|at| {
            let (own, theirs) = (chances(place, at), chances(other, at));
            let mut top: Vec<(String, f64)> = own
                .iter()
                .zip(&theirs)
                .enumerate()
                .map(|(word, (own, theirs))| {
                    (format!("w{word}"), own * (1.0 - share) + theirs * share + noise * self.normal())
                })
                .collect();
            top.sort_by(|one, other| other.1.total_cmp(&one.1));
            top.truncate(5);
            ReplyToken { text: top[0].0.clone(), top }
        });
        let tokens: Vec<ReplyToken> = tokens.collect();
        let text = tokens.iter().map(|token| token.text.as_str()).collect();
        BuildReply { text, tokens, ..BuildReply::default() }
    }

    /// Answers of all processes; `change` may replace an answer of the tested process.
    fn run(&mut self, plan: &IsolationPlan, change: &mut ChangeAnswer<'_>) -> IsolationAnswers {
        let truths: BTreeMap<PromptPlace, BuildReply> =
            plan.prompts().into_iter().map(|place| (place, self.answer(place))).collect();
        let repeated = truths.keys().filter(|place| place.turn == 0).copied().collect::<Vec<_>>();
        let mut all = IsolationAnswers {
            repeated: repeated.into_iter().map(|place| (place, self.answer(place))).collect(),
            alone: plan.alone().concat().into_iter().map(|place| (place, self.answer(place))).collect(),
            truths,
            together: Vec::new(),
        };
        let mut asked = BTreeSet::new();
        for (number, round) in plan.rounds.iter().enumerate() {
            for place in &round.prompts {
                let reply = change(self, *place, &asked).unwrap_or_else(|| self.answer(*place));
                let answer =
                    AskedAnswer { round: number + 1, place: *place, reply, ..AskedAnswer::default() };
                all.together.push(answer);
                asked.insert(*place);
            }
        }
        all
    }
}

/// Log probabilities of 64 words at a position of the answer to a prompt: the likeliest are about a nat apart.
fn chances(place: PromptPlace, at: u64) -> Vec<f64> {
    let seed = place.conversation * 1000 + place.turn;
    let mut random = SplitMix::new(u64::try_from(seed).unwrap() * 64 + at);
    let mut normal = || (0..12).map(|_| random.unit()).sum::<f64>() - 6.0;
    let logits: Vec<f64> = (0..64).map(|_| 2.5 * normal()).collect();
    let whole = logits.iter().map(|logit| logit.exp()).sum::<f64>().ln();
    logits.into_iter().map(|logit| logit - whole).collect()
}

fn plan(seed: u64) -> IsolationPlan {
    IsolationPlan::new(SLOTS, REQUESTS, seed)
}

fn judged(all: &IsolationAnswers) -> IsolationFinding {
    judge_answers(SLOTS, all, None)
}

#[test]
fn noise_of_any_size_is_never_called_mixed() {
    let mut separate = 0;
    for seed in 0..1000 {
        // A small server, because there are many.
        let plan = IsolationPlan::new(2, 60, seed);
        let found = judge_answers(2, &NoisyServer::new(seed).run(&plan, &mut |_, _, _| None), None);
        assert!(!found.is_mixed(), "{seed}: {found:?}");
        separate += usize::from(found.outcome == IsolationOutcome::Separate);
    }
    assert!(separate >= 990, "{separate} of 1000");
}

#[test]
fn another_conversations_content_in_one_of_twenty_answers_is_found_with_the_conversation() {
    let mut missed = 0;
    for seed in 0..200 {
        let mut swapped = Vec::new();
        let mut count = 0;
        let all = NoisyServer::new(seed).run(&plan(seed), &mut |server, place, asked| {
            count += 1;
            let others: Vec<PromptPlace> =
                asked.iter().copied().filter(|other| other.conversation != place.conversation).collect();
            if others.is_empty() || !server.random.chance(0.05) {
                return None;
            }
            let pick = server.random.below(u64::try_from(others.len()).unwrap());
            let other = others[usize::try_from(pick).unwrap()];
            swapped.push((count, other));
            Some(server.answer(other))
        });
        let found = judged(&all);
        let fitting: Vec<_> = found.fitting().map(|(one, fits)| (one.request, fits.place)).collect();
        assert_eq!(fitting, swapped, "{seed}: {found:?}");
        assert_eq!(found.is_mixed(), !swapped.is_empty(), "{seed}");
        missed += usize::from(swapped.is_empty());
    }
    // One of 1,000 histories has no mixed answer among 109 requests.
    assert!(missed <= 4, "{missed}");
}

#[test]
fn traces_of_other_conversations_count_if_there_are_too_many_for_chance() {
    let with_traces = |share: f64| {
        NoisyServer::new(5).run(&plan(5), &mut |server, place, asked| {
            let other = asked.iter().copied().find(|other| other.conversation != place.conversation)?;
            server.random.chance(share).then(|| server.answer_between(place, other, 0.4, server.noise))
        })
    };
    let many = judged(&with_traces(0.5));
    assert!(many.is_mixed() && many.fitting().next().is_none(), "{many:?}");
    let few = judged(&with_traces(0.03));
    let IsolationOutcome::Undecided { why } = &few.outcome else { panic!("{few:?}") };
    assert!(why.contains("fit no other conversation"), "{why}");
}

#[test]
fn a_server_that_shows_nothing_gives_no_verdict_and_the_reason() {
    let why = |all: &IsolationAnswers, failure: Option<&str>| match judge_answers(SLOTS, all, failure).outcome
    {
        IsolationOutcome::Undecided { why } => why,
        other => panic!("{other:?}"),
    };
    let all = NoisyServer::new(1).run(&plan(1), &mut |_, _, _| None);
    // Without probabilities.
    let mut silent = all.clone();
    silent.truths.values_mut().for_each(|reply| reply.tokens.clear());
    assert!(why(&silent, None).contains("no log probabilities"));
    // With noise as large as the difference between conversations.
    let swapped = |pairs: &[(PromptPlace, BuildReply)]| {
        let mut pairs = pairs.to_vec();
        pairs[0].1 = all.truths[&PromptPlace { conversation: 3, turn: 0 }].clone();
        pairs
    };
    let unsteady = IsolationAnswers { repeated: swapped(&all.repeated), ..all.clone() };
    assert!(why(&unsteady, None).contains("cache_prompt: false"));
    let reused = IsolationAnswers { alone: swapped(&all.alone), ..all.clone() };
    assert!(why(&reused, None).contains("one conversation alone"));
    // With missing answers.
    assert_eq!(why(&all, Some("it ended")), "it ended");
    assert_eq!(why(&IsolationAnswers::default(), Some("it did not start")), "it did not start");
}

#[test]
fn what_is_found_before_a_failure_counts() {
    let mut server = NoisyServer::new(2);
    let mut all = server.run(&plan(2), &mut |_, _, _| None);
    all.together[40].reply = server.answer(all.together[41].place);
    all.together.truncate(60);
    assert!(judge_answers(SLOTS, &all, Some("it ended")).is_mixed());
}

#[test]
fn a_plan_has_more_conversations_than_slots_and_asks_turns_in_order_first() {
    for slots in [1, 2, 4, 16] {
        let plan = IsolationPlan::new(slots, REQUESTS, 7);
        assert_eq!(plan, IsolationPlan::new(slots, REQUESTS, 7));
        assert_ne!(plan, IsolationPlan::new(slots, REQUESTS, 8));
        assert!(plan.request_count() >= REQUESTS && plan.conversations > 2 * slots, "{slots}");
        let mut known: BTreeMap<usize, usize> = BTreeMap::new();
        for (number, round) in plan.rounds.iter().enumerate() {
            assert_eq!(round.concurrent, number % 2 == 1 && slots > 1);
            let conversations: BTreeSet<usize> =
                round.prompts.iter().map(|place| place.conversation).collect();
            assert_eq!(conversations.len(), round.prompts.len(), "a conversation asks once in a round");
            for place in &round.prompts {
                let turns = known.entry(place.conversation).or_default();
                assert!(place.turn <= *turns, "{place:?} has its earlier turns");
                *turns = (*turns).max(place.turn + 1);
            }
        }
        assert_eq!(known.len(), plan.conversations);
        assert!(plan.alone().concat().iter().all(|place| place.conversation == 0));
    }
    assert_eq!(IsolationPlan::new(2, 1, 1).rounds.len(), CONVERSATION_TURNS);
}

#[test]
fn a_switch_helps_only_if_chance_would_have_mixed_an_answer() {
    assert_eq!(judge_cure((20, 109), (0, 109)), IsolationEffect::Stops);
    assert_eq!(judge_cure((20, 109), (1, 109)), IsolationEffect::Nothing);
    assert_eq!(judge_cure((1, 109), (0, 109)), IsolationEffect::Undecided);
    assert_eq!(judge_cure((20, 109), (0, 0)), IsolationEffect::Undecided);
}
