//! Quarantine: keeps requests from a model because its server died of them.
//!
//! ```text
//!                    its server died on its own
//!   in flight --------------------------------------> suspect
//!      | its connection broke                          |  |  |
//!      v                                               |  |  +-- tried alone, and its server died ---> refused
//!   doubted -- its server lives, or was stopped --> clear |                                              | for a time,
//!                                                      ^  +-- tried alone, and answered -----+           | or until it
//!                                                      +-------- or not sent for a while ----+-----------+ is released
//! ```
//!
//! A [`RequestFingerprint`] identifies a request without revealing its content. A single death proves
//! nothing, because all requests in flight look equally guilty. So each suspect is tried alone, and is
//! refused only if the server dies again. Deaths caused by llama-warden or from outside make no suspects. A
//! death for lack of memory makes suspects but refuses no request, because all requests share the memory.
//!
//! A server may continue to work on a request whose client has left, so such a request still counts as in
//! flight.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use crate::names::GenerationId;

mod terms;

pub use terms::{
    DeathResult, QuarantinePolicy, QuarantinedRequest, RequestFingerprint, RequestStanding, ServerDeath,
};

/// Number of remembered ends of processes, for broken connections that are noticed late.
const ENDS_KEPT: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GenerationEnd {
    /// The process died by itself.
    Died,
    KilledByRequest,
    /// The process was stopped by llama-warden or from outside.
    Stopped,
}

#[derive(Clone, Copy, Debug)]
struct SuspectTrial {
    request: RequestFingerprint,
    left: Option<Duration>,
}

#[derive(Clone, Copy, Debug)]
struct AbandonedRequest {
    generation: GenerationId,
    request: RequestFingerprint,
    at: Duration,
}

#[derive(Clone, Debug, Default)]
struct QuarantineEntry {
    /// Processes to which connections of this request broke and which may have died.
    doubts: Vec<GenerationId>,
    suspect: bool,
    refused_until: Option<Duration>,
    until: Duration,
    deaths: u32,
    refusals: u64,
}

/// Quarantine of one model's requests. Times count from the caller's epoch and never decrease.
#[derive(Debug)]
pub struct RequestQuarantine {
    policy: QuarantinePolicy,
    entries: BTreeMap<RequestFingerprint, QuarantineEntry>,
    trials: BTreeMap<GenerationId, SuspectTrial>,
    /// Requests whose client has left, oldest first.
    left: VecDeque<AbandonedRequest>,
    ends: VecDeque<(GenerationId, GenerationEnd)>,
    refused: u64,
    refusals: u64,
}

impl RequestQuarantine {
    /// Creates an empty quarantine.
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

    /// Replaces the settings; known requests keep their times. A refusal time of zero forgets everything.
    pub fn set_policy(&mut self, policy: QuarantinePolicy) {
        self.policy = policy;
        if !self.is_on() {
            self.entries.clear();
            self.trials.clear();
            self.left.clear();
        }
    }

    /// Returns the settings.
    pub fn policy(&self) -> &QuarantinePolicy {
        &self.policy
    }

    fn is_on(&self) -> bool {
        !self.policy.refuse_for.is_zero() && self.policy.known > 0
    }

    /// Returns true if the quarantine has no entries, so that every request is clear.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns the treatment of a request.
    pub fn standing(&mut self, request: RequestFingerprint, now: Duration) -> RequestStanding {
        self.forget_old(now);
        match self.entries.get(&request) {
            None => RequestStanding::Clear,
            Some(QuarantineEntry { refused_until: Some(until), .. }) => {
                RequestStanding::Refused { left: until.saturating_sub(now) }
            }
            Some(_) => RequestStanding::Suspect,
        }
    }

    /// Counts a refusal of this request.
    pub fn count_refusal(&mut self, request: RequestFingerprint) {
        self.refusals += 1;
        if let Some(entry) = self.entries.get_mut(&request) {
            entry.refusals += 1;
        }
    }

    /// Records that a completely sent request lost its connection to this process. Returns true if the
    /// request is a suspect, because the process is known to have died by itself.
    pub fn record_break(
        &mut self,
        generation: GenerationId,
        request: RequestFingerprint,
        now: Duration,
    ) -> bool {
        if !self.is_on() {
            return false;
        }
        let end = self.ends.iter().find(|(ended, _)| *ended == generation).map(|(_, end)| *end);
        if matches!(end, Some(GenerationEnd::Stopped | GenerationEnd::KilledByRequest)) {
            // The request responsible for the death is known already.
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

    /// Records that a client left before its answer was complete; the server may continue to work on it.
    /// Returns true if the request is a suspect, because the process is known to have died by itself.
    pub fn record_abandoned(
        &mut self,
        generation: GenerationId,
        request: RequestFingerprint,
        now: Duration,
    ) -> bool {
        if !self.is_on() {
            return false;
        }
        if self.has_ended(generation) {
            return self.record_break(generation, request, now);
        }
        if self.left.len() >= self.policy.known {
            self.left.pop_front();
        }
        self.left.push_back(AbandonedRequest { generation, request, at: now });
        false
    }

    /// Returns the time for which other abandoned requests may still run on a process; `None` if none does.
    pub fn lingering_time(
        &self,
        generation: GenerationId,
        request: RequestFingerprint,
        now: Duration,
    ) -> Option<Duration> {
        let others = |left: &&AbandonedRequest| left.generation == generation && left.request != request;
        let last = self.left.iter().rev().find(others)?;
        let until = last.at.saturating_add(self.policy.lingers_for);
        (until > now).then(|| until.saturating_sub(now))
    }

    /// Records that a process answers, so that its broken connections do not show a death.
    pub fn record_alive(&mut self, generation: GenerationId) {
        for (request, entry) in &mut self.entries {
            let before = entry.doubts.len();
            entry.doubts.retain(|doubted| *doubted != generation);
            // End the trial without a result: a later death is no evidence against the request.
            if entry.doubts.len() < before
                && self.trials.get(&generation).is_some_and(|trial| trial.request == *request)
            {
                self.trials.remove(&generation);
            }
        }
        self.entries.retain(|_, entry| entry.is_worth_keeping());
    }

    /// Returns true if no request has a broken connection to a process that may have died.
    pub fn is_settled(&self, generation: GenerationId) -> bool {
        self.has_ended(generation) || self.entries.values().all(|entry| !entry.doubts.contains(&generation))
    }

    /// Returns true if the process is known to have ended.
    pub fn has_ended(&self, generation: GenerationId) -> bool {
        self.ends.iter().any(|(ended, _)| *ended == generation)
    }

    /// Returns the longest time that a suspect waits to be alone. Doubles with each further death: each costs
    /// all other requests, so running requests must not postpone a trial forever.
    pub fn alone_wait(&self, request: RequestFingerprint) -> Duration {
        const DOUBLINGS: u32 = 5;
        self.policy.alone_wait.saturating_mul(1 << self.further_deaths(request).min(DOUBLINGS))
    }

    /// Returns the time that a suspect may run alone; longer after further deaths, which may happen late.
    pub fn alone_time(&self, request: RequestFingerprint) -> Duration {
        const DOUBLINGS: u32 = 2;
        self.policy.alone_for.saturating_mul(1 << self.further_deaths(request).min(DOUBLINGS))
    }

    fn further_deaths(&self, request: RequestFingerprint) -> u32 {
        self.entries.get(&request).map_or(0, |entry| entry.deaths.saturating_sub(1))
    }

    /// Starts the trial of a request, when no other request runs on the process.
    pub fn begin_trial(&mut self, generation: GenerationId, request: RequestFingerprint) {
        self.trials.insert(generation, SuspectTrial { request, left: None });
    }

    /// Returns the request on trial on this process.
    pub fn trial(&self, generation: GenerationId) -> Option<RequestFingerprint> {
        self.trials.get(&generation).map(|trial| trial.request)
    }

    /// Ends a trial without a result, because the request is no longer alone or has ended. If its connection
    /// broke, a death of the process still counts against it.
    pub fn end_trial(&mut self, generation: GenerationId) {
        let Some(trial) = self.trials.get_mut(&generation) else { return };
        let doubted = |entry: &QuarantineEntry| entry.doubts.contains(&generation);
        if self.entries.get(&trial.request).is_some_and(doubted) {
            return;
        }
        let own = |left: &&AbandonedRequest| left.generation == generation && left.request == trial.request;
        trial.left = self.left.iter().rev().find(own).map(|left| left.at);
        if trial.left.is_none() {
            self.trials.remove(&generation);
        }
    }

    /// Clears a request that was answered, whether on trial or next to other requests.
    pub fn record_survival(&mut self, generation: GenerationId, request: RequestFingerprint) {
        if self.trial(generation) == Some(request) {
            self.trials.remove(&generation);
        }
        if self.entries.get(&request).is_some_and(|entry| entry.refused_until.is_none()) {
            self.entries.remove(&request);
        }
    }

    /// Records that a process ended by itself.
    pub fn record_death(
        &mut self,
        generation: GenerationId,
        death: ServerDeath,
        now: Duration,
    ) -> DeathResult {
        let policy = self.policy;
        let lingers = |at: Duration| now.saturating_sub(at) < policy.lingers_for.saturating_add(death.hung);
        let trial = self.trials.remove(&generation);
        let trial = trial.filter(|trial| trial.left.is_none_or(lingers)).map(|trial| trial.request);
        let mut found = DeathResult::default();
        let until = now.saturating_add(policy.suspect_for);
        let all = std::mem::take(&mut self.left);
        let (of_it, others) = all.into_iter().partition(|left| left.generation == generation);
        self.left = others;
        let lingering =
            of_it.into_iter().filter(|left: &AbandonedRequest| lingers(left.at)).map(|left| left.request);
        // Include the request on trial, whose broken connection may not have been noticed yet.
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
        self.record_end(
            generation,
            if found.refused.is_some() { GenerationEnd::KilledByRequest } else { GenerationEnd::Died },
        );
        found
    }

    /// Records that a process was stopped by llama-warden or from outside, so no request is responsible.
    pub fn record_stop(&mut self, generation: GenerationId) {
        self.trials.remove(&generation);
        self.left.retain(|left| left.generation != generation);
        self.record_alive(generation);
        self.record_end(generation, GenerationEnd::Stopped);
    }

    /// Returns true if the process died of a request that is now refused.
    pub fn was_killed_by_request(&self, generation: GenerationId) -> bool {
        self.ends.iter().any(|(ended, end)| *ended == generation && *end == GenerationEnd::KilledByRequest)
    }

    /// Forgets all requests whose fingerprint begins with `which`, or all if `None`; returns their number.
    pub fn release(&mut self, which: Option<&str>) -> usize {
        let before = self.entries.len();
        match which {
            None => self.entries.clear(),
            Some(begin) => self.entries.retain(|request, _| !request.to_string().starts_with(begin)),
        }
        before - self.entries.len()
    }

    /// Lists refused requests, then suspects; in each group the longest remembered comes first.
    pub fn list(&self, now: Duration) -> Vec<QuarantinedRequest> {
        let known = self
            .entries
            .iter()
            .filter(|(_, entry)| (entry.suspect || entry.refused_until.is_some()) && entry.until > now);
        let mut all: Vec<QuarantinedRequest> = known
            .map(|(fingerprint, entry)| QuarantinedRequest {
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

    /// Returns two totals: requests put under refusal, and refusals of such requests.
    pub fn counts(&self) -> (u64, u64) {
        (self.refused, self.refusals)
    }

    fn record_end(&mut self, generation: GenerationId, end: GenerationEnd) {
        if self.ends.len() >= ENDS_KEPT {
            self.ends.pop_front();
        }
        self.ends.push_back((generation, end));
    }

    fn forget_old(&mut self, now: Duration) {
        self.entries.retain(|_, entry| entry.until > now);
    }

    fn entry(&mut self, request: RequestFingerprint, until: Duration, now: Duration) -> &mut QuarantineEntry {
        if !self.entries.contains_key(&request) && self.entries.len() >= self.policy.known {
            self.forget_old(now);
            // Suspects are dropped before refused requests; in each group, the oldest first.
            let least =
                self.entries.iter().min_by_key(|(_, entry)| (entry.refused_until.is_some(), entry.until));
            if let Some(request) = least.map(|(request, _)| *request)
                && self.entries.len() >= self.policy.known
            {
                self.entries.remove(&request);
            }
        }
        let entry = self.entries.entry(request).or_default();
        entry.until = entry.until.max(until);
        entry
    }
}

impl QuarantineEntry {
    fn is_worth_keeping(&self) -> bool {
        self.suspect || !self.doubts.is_empty() || self.refused_until.is_some()
    }
}

#[cfg(test)]
mod tests;
