//! Which requests are kept from a model because its server died of them.
//!
//! ```text
//!                    its server died by itself
//!   in flight --------------------------------------> suspect
//!      | its connection broke                          |  |  |
//!      v                                               |  |  +-- tried alone, and its server died ---> refused
//!   doubted -- its server lives, or was stopped --> clear |                                              | for a time,
//!                                                      ^  +-- tried alone, and answered -----+           | or until it
//!                                                      +-------- or not sent for a while ----+-----------+ is released
//! ```
//!
//! A request is known by a [`Fingerprint`], never by what it says. One death proves nothing: whoever was in flight with a
//! poisonous request looks the same. So each suspect is tried alone, and only a death with nobody else in flight
//! refuses it. A death that we caused, or that came from outside, makes no suspects; one for lack of memory makes suspects and
//! refuses nobody, because memory is everybody's.
//!
//! A server goes on for a while with a request whose client has left. So whoever left a moment ago is in flight, too: as a
//! suspect at a death, as company of the one on trial, and as the one on trial itself.
//!
//! This module has no synchronisation of its own: its owner holds it under one lock.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use crate::names::GenerationId;

mod terms;

pub use terms::{Death, Fingerprint, Found, Known, QuarantinePolicy, Standing};

/// Ends of generations that are remembered for connections whose break is noticed late.
const ENDS: usize = 64;

/// How a generation ended, as far as requests are concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// By itself.
    Died,
    /// By this request.
    Felled,
    /// We, or somebody else, stopped it.
    Stopped,
}

#[derive(Clone, Copy, Debug)]
struct Trial {
    request: Fingerprint,
    /// When its client left.
    left: Option<Duration>,
}

/// A request whose client left before its answer was whole.
#[derive(Clone, Copy, Debug)]
struct Left {
    generation: GenerationId,
    request: Fingerprint,
    at: Duration,
}

#[derive(Clone, Debug)]
struct Entry {
    /// Its connections to these generations broke, of which is not known whether they live.
    doubts: Vec<GenerationId>,
    suspect: bool,
    /// When its refusal ends.
    refused_until: Option<Duration>,
    /// When it is forgotten.
    until: Duration,
    deaths: u32,
    refusals: u64,
}

/// What is known about the requests of one model. Times are since an epoch of the caller's choice, never going back.
#[derive(Debug)]
pub struct Quarantine {
    policy: QuarantinePolicy,
    entries: BTreeMap<Fingerprint, Entry>,
    /// Who runs alone on which generation.
    trials: BTreeMap<GenerationId, Trial>,
    /// Oldest first.
    left: VecDeque<Left>,
    ends: VecDeque<(GenerationId, End)>,
    refused: u64,
    refusals: u64,
}

impl Quarantine {
    /// Nothing is known yet.
    pub fn new(policy: QuarantinePolicy) -> Self {
        Self {
            policy,
            entries: BTreeMap::new(),
            trials: BTreeMap::new(),
            left: VecDeque::new(),
            ends: VecDeque::new(),
            refused: 0,
            refusals: 0,
        }
    }

    /// New numbers; what is known already keeps its times. Without any time of refusal everything is forgotten.
    pub fn set(&mut self, policy: QuarantinePolicy) {
        self.policy = policy;
        if !self.is_on() {
            self.entries.clear();
            self.trials.clear();
            self.left.clear();
        }
    }

    /// The numbers.
    pub fn policy(&self) -> &QuarantinePolicy {
        &self.policy
    }

    fn is_on(&self) -> bool {
        !self.policy.refuse_for.is_zero() && self.policy.known > 0
    }

    /// Whether anything at all is known: else every request is clear.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// What is to be done with a request now.
    pub fn standing(&mut self, request: Fingerprint, now: Duration) -> Standing {
        self.forget_old(now);
        match self.entries.get(&request) {
            None => Standing::Clear,
            Some(Entry { refused_until: Some(until), .. }) => {
                Standing::Refused { left: until.saturating_sub(now) }
            }
            Some(_) => Standing::Suspect,
        }
    }

    /// It was refused.
    pub fn note_refusal(&mut self, request: Fingerprint) {
        self.refusals += 1;
        if let Some(entry) = self.entries.get_mut(&request) {
            entry.refusals += 1;
        }
    }

    /// The connection of a request to this generation broke after it was sent whole. True if its server is known to
    /// have died by itself, so that the request is a suspect.
    pub fn broke(&mut self, generation: GenerationId, request: Fingerprint, now: Duration) -> bool {
        if !self.is_on() {
            return false;
        }
        let end = self.ends.iter().find(|(ended, _)| *ended == generation).map(|(_, end)| *end);
        if matches!(end, Some(End::Stopped | End::Felled)) {
            // Felled: whoever did it is known.
            return false;
        }
        let until = now.saturating_add(self.policy.suspect_for);
        let entry = self.entry(request, until, now);
        if end.is_some() {
            entry.suspect = true;
            entry.deaths += 1;
        } else if !entry.doubts.contains(&generation) {
            entry.doubts.push(generation);
        }
        end.is_some()
    }

    /// The client of a request that this generation has whole left before the answer was: the server may be at work on it for
    /// a while. True if that server is known to have died by itself meanwhile, so that the request is a suspect.
    pub fn left(&mut self, generation: GenerationId, request: Fingerprint, now: Duration) -> bool {
        if !self.is_on() {
            return false;
        }
        if self.has_ended(generation) {
            return self.broke(generation, request, now);
        }
        if self.left.len() >= self.policy.known {
            self.left.pop_front();
        }
        self.left.push_back(Left { generation, request, at: now });
        false
    }

    /// How long to wait until nobody else than this request lingers on a generation; `None` if nobody does.
    pub fn lingers(&self, generation: GenerationId, request: Fingerprint, now: Duration) -> Option<Duration> {
        let others = |left: &&Left| left.generation == generation && left.request != request;
        let last = self.left.iter().rev().find(others)?;
        let until = last.at.saturating_add(self.policy.lingers_for);
        (until > now).then(|| until.saturating_sub(now))
    }

    /// The generation answers: connections that broke say nothing.
    pub fn lives(&mut self, generation: GenerationId) {
        for (request, entry) in &mut self.entries {
            let before = entry.doubts.len();
            entry.doubts.retain(|doubted| *doubted != generation);
            // It is over, and has proved nothing: what becomes of the generation later has nothing to do with it.
            if entry.doubts.len() < before
                && self.trials.get(&generation).is_some_and(|trial| trial.request == *request)
            {
                self.trials.remove(&generation);
            }
        }
        self.entries.retain(|_, entry| entry.is_worth_keeping());
    }

    /// Whether it is known what became of a generation whose connections broke.
    pub fn is_settled(&self, generation: GenerationId) -> bool {
        self.has_ended(generation) || self.entries.values().all(|entry| !entry.doubts.contains(&generation))
    }

    /// Whether the generation's process is known to have ended.
    pub fn has_ended(&self, generation: GenerationId) -> bool {
        self.ends.iter().any(|(ended, _)| *ended == generation)
    }

    /// How long a suspect waits to be alone. Twice as long after each further death: if it is to blame, it costs everybody
    /// beside it a death each time, and those who run for long must not save it from its trial for ever.
    pub fn patience(&self, request: Fingerprint) -> Duration {
        const DOUBLINGS: u32 = 5;
        self.policy.alone_wait.saturating_mul(1 << self.further(request).min(DOUBLINGS))
    }

    /// How long a suspect may be alone: longer after further deaths, of which it may be to blame only late; and never as long
    /// as those behind it wait.
    pub fn solitude(&self, request: Fingerprint) -> Duration {
        const DOUBLINGS: u32 = 2;
        self.policy.alone_for.saturating_mul(1 << self.further(request).min(DOUBLINGS))
    }

    /// Deaths that it met after the first.
    fn further(&self, request: Fingerprint) -> u32 {
        self.entries.get(&request).map_or(0, |entry| entry.deaths.saturating_sub(1))
    }

    /// A suspect begins, with nobody else on its generation.
    pub fn begin_trial(&mut self, generation: GenerationId, request: Fingerprint) {
        self.trials.insert(generation, Trial { request, left: None });
    }

    /// Who is on trial there.
    pub fn trial(&self, generation: GenerationId) -> Option<Fingerprint> {
        self.trials.get(&generation).map(|trial| trial.request)
    }

    /// The one on trial is not alone any more, or has ended: nothing follows from what happens next. If its connection broke,
    /// what became of its generation still counts, and for a while if its client left.
    pub fn end_trial(&mut self, generation: GenerationId) {
        let Some(trial) = self.trials.get_mut(&generation) else { return };
        let doubted = |entry: &Entry| entry.doubts.contains(&generation);
        if self.entries.get(&trial.request).is_some_and(doubted) {
            return;
        }
        let own = |left: &&Left| left.generation == generation && left.request == trial.request;
        trial.left = self.left.iter().rev().find(own).map(|left| left.at);
        if trial.left.is_none() {
            self.trials.remove(&generation);
        }
    }

    /// The one on trial was answered, or it was answered in company: nothing is held against it any more.
    pub fn survived(&mut self, generation: GenerationId, request: Fingerprint) {
        if self.trial(generation) == Some(request) {
            self.trials.remove(&generation);
        }
        if self.entries.get(&request).is_some_and(|entry| entry.refused_until.is_none()) {
            self.entries.remove(&request);
        }
    }

    /// The generation's process ended by itself.
    pub fn died(&mut self, generation: GenerationId, death: Death, now: Duration) -> Found {
        let policy = self.policy;
        let lingers = |at: Duration| now.saturating_sub(at) < policy.lingers_for.saturating_add(death.hung);
        let trial = self.trials.remove(&generation);
        let trial = trial.filter(|trial| trial.left.is_none_or(lingers)).map(|trial| trial.request);
        let mut found = Found::default();
        let until = now.saturating_add(policy.suspect_for);
        let all = std::mem::take(&mut self.left);
        let (of_it, others) = all.into_iter().partition(|left| left.generation == generation);
        self.left = others;
        let lingering = of_it.into_iter().filter(|left: &Left| lingers(left.at)).map(|left| left.request);
        // The break of the one on trial may not have been noticed yet.
        for request in trial.into_iter().chain(lingering).filter(|_| self.is_on()).collect::<Vec<_>>() {
            let entry = self.entry(request, until, now);
            if !entry.doubts.contains(&generation) {
                entry.doubts.push(generation);
            }
        }
        for (request, entry) in &mut self.entries {
            if entry.doubts.contains(&generation) {
                entry.doubts.retain(|doubted| *doubted != generation);
                entry.suspect = true;
                entry.until = entry.until.max(until);
                entry.deaths += 1;
                found.suspects.push(*request);
            }
        }
        let alone = death.proves && death.others == 0 && found.suspects.len() == 1;
        found.refused = trial.filter(|request| alone && found.suspects.contains(request));
        if let Some(entry) = found.refused.and_then(|request| self.entries.get_mut(&request)) {
            let until = now.saturating_add(policy.refuse_for);
            (entry.refused_until, entry.until) = (Some(until), until);
            self.refused += 1;
            found.suspects.clear();
        }
        self.end(generation, if found.refused.is_some() { End::Felled } else { End::Died });
        found
    }

    /// The generation's process was stopped by us, or from outside: no request has anything to do with it.
    pub fn stopped(&mut self, generation: GenerationId) {
        self.trials.remove(&generation);
        self.left.retain(|left| left.generation != generation);
        self.lives(generation);
        self.end(generation, End::Stopped);
    }

    /// Whether the generation died of a request that is refused from now on.
    pub fn was_felled(&self, generation: GenerationId) -> bool {
        self.ends.iter().any(|(ended, end)| *ended == generation && *end == End::Felled)
    }

    /// Forgets a request, by its fingerprint or the beginning of it, or all of them; returns how many.
    pub fn release(&mut self, which: Option<&str>) -> usize {
        let before = self.entries.len();
        match which {
            None => self.entries.clear(),
            Some(begin) => self.entries.retain(|request, _| !request.to_string().starts_with(begin)),
        }
        before - self.entries.len()
    }

    /// Those that are refused, then the suspects; in each, whoever is forgotten last comes first.
    pub fn list(&self, now: Duration) -> Vec<Known> {
        let known = self
            .entries
            .iter()
            .filter(|(_, entry)| (entry.suspect || entry.refused_until.is_some()) && entry.until > now);
        let mut all: Vec<Known> = known
            .map(|(fingerprint, entry)| Known {
                fingerprint: *fingerprint,
                refused: entry.refused_until.is_some(),
                left_s: entry.until.saturating_sub(now).as_secs(),
                deaths: entry.deaths,
                refusals: entry.refusals,
            })
            .collect();
        all.sort_by_key(|known| (!known.refused, std::cmp::Reverse(known.left_s), known.fingerprint));
        all
    }

    /// Requests that were ever put under refusal, and refusals so far.
    pub fn counts(&self) -> (u64, u64) {
        (self.refused, self.refusals)
    }

    fn end(&mut self, generation: GenerationId, end: End) {
        if self.ends.len() >= ENDS {
            self.ends.pop_front();
        }
        self.ends.push_back((generation, end));
    }

    fn forget_old(&mut self, now: Duration) {
        self.entries.retain(|_, entry| entry.until > now);
    }

    fn entry(&mut self, request: Fingerprint, until: Duration, now: Duration) -> &mut Entry {
        if !self.entries.contains_key(&request) && self.entries.len() >= self.policy.known {
            self.forget_old(now);
            // A suspect makes room before a request that is known to kill, the oldest first.
            let least =
                self.entries.iter().min_by_key(|(_, entry)| (entry.refused_until.is_some(), entry.until));
            if let Some(request) = least.map(|(request, _)| *request)
                && self.entries.len() >= self.policy.known
            {
                self.entries.remove(&request);
            }
        }
        let entry = self.entries.entry(request).or_insert(Entry {
            doubts: Vec::new(),
            suspect: false,
            refused_until: None,
            until,
            deaths: 0,
            refusals: 0,
        });
        entry.until = entry.until.max(until);
        entry
    }
}

impl Entry {
    fn is_worth_keeping(&self) -> bool {
        self.suspect || !self.doubts.is_empty() || self.refused_until.is_some()
    }
}

#[cfg(test)]
mod tests;
