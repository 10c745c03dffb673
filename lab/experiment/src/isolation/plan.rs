//! Order of the requests: which conversation asks when, and how many at a time.
//!
//! ```text
//!  round 1   each conversation's first turn, one request after the other
//!  round 2   the next turn of each, as many at a time as the server has slots
//!  round 3   one after the other … alternating; after the last turn, an earlier turn again
//! ```
//!
//! There are more conversations than slots, so each request takes a slot that had another conversation. From
//! the second round on, a new conversation joins in each round. The order within a round is random.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use warden_policies::world::SplitMix;

/// Turns of a conversation.
pub const CONVERSATION_TURNS: usize = 4;
/// Fewest conversations that ask in each round.
const FEWEST_RESIDENTS: usize = 3;

/// Prompt of a request: a conversation up to one of its turns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PromptPlace {
    /// Number of the conversation, from 0.
    pub conversation: usize,
    /// Number of the turn, from 0.
    pub turn: usize,
}

/// Requests of a round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IsolationRound {
    /// True if as many requests as slots run at a time.
    pub concurrent: bool,
    /// Prompts in order.
    pub prompts: Vec<PromptPlace>,
}

/// Order of all requests to the tested process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IsolationPlan {
    /// Number of the server's slots, 1 or more.
    pub slots: usize,
    /// Number of conversations.
    pub conversations: usize,
    /// Rounds in order.
    pub rounds: Vec<IsolationRound>,
}

impl IsolationPlan {
    /// Plans at least `requests` requests to a server with these slots; equal seeds give equal plans.
    pub fn new(slots: usize, requests: usize, seed: u64) -> Self {
        let slots = slots.max(1);
        let residents = (2 * slots + 1).max(FEWEST_RESIDENTS);
        // The first round has no new conversation besides the residents.
        let count = (requests + 1).div_ceil(residents + 1).max(CONVERSATION_TURNS);
        let mut random = SplitMix::new(seed);
        let mut rounds = Vec::new();
        for round in 0..count {
            let mut prompts: Vec<PromptPlace> = (0..residents)
                .map(|conversation| {
                    let turn = if round < CONVERSATION_TURNS {
                        round
                    } else {
                        pick(&mut random, CONVERSATION_TURNS)
                    };
                    PromptPlace { conversation, turn }
                })
                .collect();
            if round > 0 {
                prompts.push(PromptPlace { conversation: residents + round - 1, turn: 0 });
            }
            shuffle(&mut random, &mut prompts);
            rounds.push(IsolationRound { concurrent: round % 2 == 1 && slots > 1, prompts });
        }
        Self { slots, conversations: residents + count - 1, rounds }
    }

    /// Returns the requests of a process that only has the first conversation: each turn once, then on all slots
    /// at a time; then the turns again, backwards.
    pub fn alone(&self) -> Vec<Vec<PromptPlace>> {
        let turns = || (0..CONVERSATION_TURNS).map(|turn| PromptPlace { conversation: 0, turn });
        let forwards = turns().flat_map(|place| [vec![place], vec![place; self.slots]]);
        forwards.chain(turns().rev().map(|place| vec![place; self.slots])).collect()
    }

    /// Returns all prompts that need a right answer, each conversation's turns in order.
    pub fn prompts(&self) -> BTreeSet<PromptPlace> {
        self.rounds.iter().flat_map(|round| round.prompts.iter().copied()).collect()
    }

    /// Returns the number of requests to the tested process.
    pub fn request_count(&self) -> usize {
        self.rounds.iter().map(|round| round.prompts.len()).sum()
    }

    /// Returns the number of requests of a round that run at a time.
    pub const fn width(&self, round: &IsolationRound) -> usize {
        if round.concurrent { self.slots } else { 1 }
    }
}

fn pick(random: &mut SplitMix, count: usize) -> usize {
    let below = random.below(u64::try_from(count).unwrap_or(u64::MAX));
    usize::try_from(below).unwrap_or(0)
}

fn shuffle(random: &mut SplitMix, all: &mut [PromptPlace]) {
    for at in (1..all.len()).rev() {
        all.swap(at, pick(random, at + 1));
    }
}
