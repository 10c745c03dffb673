//! Compares a process's answers to fixed prompts with those of its youth, if `policy.answers` allows to act on
//! the result.
//!
//! ```text
//!   first idle moment ── a slot without a conversation? ── asked twice ── baseline
//!   faulty answers in a row ── next idle moment ── asked again ── equal: nothing follows
//!                                                      └ different twice: symptom `altered`
//!   successor of a process with faulty answers ── asked before its gate opens ── different: replacing is off
//! ```
//!
//! The requests have no lease: they are no work, keep no model loaded, and appear in no figure of requests. They
//! end when a request arrives, and a pause of a thousand times their duration follows each comparison.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use warden_policies::GenerationId;
use warden_policies::health::{HealthSymptom, ProbeBaseline};
use warden_policies::lifecycle::BackendPhase;
use warden_policies::recycle::AnswersMode;

use crate::clock;
use crate::lease::queue::LeaseQueue;
use crate::model::ModelTask;
use crate::model::environment::TaskEnvironment;
use crate::model::generation::{LiveGeneration, take_due};
use crate::model::message::HelperReport;
use crate::model::unit::{UnitId, UnitRole};
use crate::process::answer_probe::{ProbeFinding, ask_prompts, find_alteration};
use crate::process::slot_talk::{ReportedSlot, list_slots};
use crate::process::{BackendProcess, hints};
use crate::sync::lock;
use crate::view::event::EventKind;

/// Longest time for which a request that arrives waits before the probe ends.
const ARRIVAL_POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Pause before the next look for an idle moment.
const IDLE_POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Pause before the next look for a free slot: conversations keep theirs for long.
const FULL_POLL_INTERVAL: Duration = Duration::from_secs(60);
/// Pause after a comparison, in multiples of its duration.
const REST_FACTOR: u32 = 1000;
/// Tries without a usable answer after which a process gets no more prompts.
const MAX_UNUSABLE: u32 = 3;
/// Most answered requests of a young process. The answers of an older one may be wrong already.
const MAX_YOUNG_REQUESTS: u64 = 64;

struct AnswerProbe {
    process: Arc<dyn BackendProcess>,
    leases: Arc<LeaseQueue>,
    generation: GenerationId,
    /// Answers of the young process; `None` to get them now.
    baseline: Option<Arc<ProbeBaseline>>,
    /// True if the process has answered no request.
    is_unused: bool,
    /// Slots whose contents were restored.
    restored_slots: Vec<u32>,
    /// Time limit for a prompt.
    timeout: Duration,
}

impl AnswerProbe {
    async fn run(self) -> HelperReport {
        let begun = Instant::now();
        let finding = tokio::select! {
            biased;
            () = self.until_needed() => ProbeFinding::Interrupted,
            finding = self.compare_in_free_slot() => finding,
        };
        HelperReport::AnswersProbed(finding, begun.elapsed())
    }

    /// Resolves when a request arrives, or has come and gone, or the gate closes.
    async fn until_needed(&self) {
        let idle_since = self.leases.idle_since(self.generation);
        let is_free = || {
            self.leases.is_open(self.generation)
                && idle_since.is_some()
                && self.leases.idle_since(self.generation) == idle_since
                && self.leases.waiting() == 0
        };
        while is_free() {
            tokio::time::sleep(ARRIVAL_POLL_INTERVAL).await;
        }
    }

    async fn compare_in_free_slot(&self) -> ProbeFinding {
        match self.choose_slot().await {
            Ok(slot) => self.compare(slot).await.unwrap_or(ProbeFinding::Unusable),
            Err(finding) => finding,
        }
    }

    /// Compares the answers; `None` if the server gives no usable answers.
    async fn compare(&self, slot: Option<u32>) -> Option<ProbeFinding> {
        let process = self.process.as_ref();
        if let Some(baseline) = &self.baseline {
            let altered = find_alteration(process, baseline, slot, self.timeout).await?;
            return Some(altered.map_or(ProbeFinding::Equal, ProbeFinding::Altered));
        }
        let first = ask_prompts(process, slot, self.timeout).await?;
        let second = ask_prompts(process, slot, self.timeout).await?;
        Some(ProbeFinding::Learnt(Arc::new(ProbeBaseline::from_answers(first, &second)?)))
    }

    /// Returns a slot without a conversation; `None` leaves the choice to the server. Only a suspected process
    /// loses a conversation's slot, the shortest one. Conversations leave slots, so a process without a free slot
    /// gets the prompts later.
    async fn choose_slot(&self) -> Result<Option<u32>, ProbeFinding> {
        let is_suspected = self.baseline.is_some();
        let Some(slots) = list_slots(self.process.as_ref(), self.timeout).await else {
            // Each prompt would take the place of another conversation.
            let keeps_conversations = self.is_unused && self.restored_slots.is_empty();
            return if keeps_conversations { Ok(None) } else { Err(ProbeFinding::Unusable) };
        };
        let is_empty = |slot: &ReportedSlot| slot.is_empty && !self.restored_slots.contains(&slot.facts.id);
        let idle = || slots.iter().filter(|slot| !slot.facts.busy);
        let shortest = || idle().filter(|_| is_suspected).min_by_key(|slot| slot.facts.tokens);
        let chosen = idle().rfind(|slot| is_empty(slot)).or_else(shortest);
        chosen.map(|slot| Some(slot.facts.id)).ok_or(ProbeFinding::NoSlot)
    }
}

impl ModelTask {
    /// Asks a process, if it is due and idle.
    pub(crate) fn fire_answer_probe(&mut self, id: UnitId, now: Instant) {
        let is_another = self.units.lives().any(|live| live.health.answers.is_asking);
        let is_over = self.life.end.is_some();
        let is_replacing = !self.replacements.is_empty();
        let Some(unit) = self.units.get_mut(id) else { return };
        let is_serving = unit.role == UnitRole::Current && unit.phase() == BackendPhase::Ready;
        let Some(live) = &mut unit.live else { return };
        if !take_due(&mut live.timers.answers, now)
            || is_over
            || !is_serving
            || !live.wants_answer_probe(&self.env)
        {
            return;
        }
        let Some(process) = live.child.process.clone() else { return };
        let leases = &self.env.leases;
        let least = warden_policies::defaults().warmth.quiet_for;
        let is_quiet =
            leases.waiting() == 0 && leases.idle_since(live.id).is_some_and(|since| since.elapsed() >= least);
        // A helper that evaluates prompts of the previous process needs the idle moments and the empty slots.
        if is_another || is_replacing || !is_quiet || live.warm.is_behind {
            live.timers.answers = Some(clock::after(now, IDLE_POLL_INTERVAL));
            return;
        }
        live.health.answers.is_asking = true;
        let probe = AnswerProbe {
            process,
            leases: Arc::clone(leases),
            generation: live.id,
            baseline: live.health.answers.baseline.clone(),
            is_unused: live.cell.work().requests == 0,
            restored_slots: live.warm.restored_slots.clone(),
            timeout: self.env.spec.lifecycle.probe_timeout,
        };
        self.mail.spawn_helper(live.id, probe.run());
    }

    pub(crate) fn note_answer_probe(&mut self, id: UnitId, finding: ProbeFinding, took: Duration) {
        let Some(live) = self.units.live_mut(id) else { return };
        let generation = live.id;
        let test = &mut live.health.answers;
        test.is_asking = false;
        let least_rest = match finding {
            ProbeFinding::NoSlot => FULL_POLL_INTERVAL,
            _ => IDLE_POLL_INTERVAL,
        };
        match finding {
            ProbeFinding::Learnt(baseline) => {
                test.baseline = Some(Arc::clone(&baseline));
                if let Some(kin) = live.cell.kin.get().map(|kin| kin.made_of)
                    && self.replacements.pace.sound_answers.as_ref().is_none_or(|(known, _)| *known != kin)
                {
                    self.replacements.pace.sound_answers = Some((kin, baseline));
                }
                return;
            }
            ProbeFinding::Altered(symptom) => {
                let build = live.health.build;
                live.note_altered(&self.env, symptom);
                self.replacements.pace.note_faulty_answers(&self.env, generation, build);
                self.life.note_action();
                return self.judge_unit(id);
            }
            ProbeFinding::Unusable => test.unusable += 1,
            // Only a further faulty answer is a reason to ask again.
            ProbeFinding::Equal => lock(&live.cell.outcomes).are_unusual = false,
            ProbeFinding::Interrupted | ProbeFinding::NoSlot => {}
        }
        let rest = took.saturating_mul(REST_FACTOR).max(least_rest);
        test.rests_until = Some(clock::after(Instant::now(), rest));
        live.plan_answer_probe(&self.env);
    }

    /// Handles the answers of a process whose predecessor was replaced for its answers.
    pub(crate) fn note_successor_answers(&mut self, id: UnitId, altered: Option<HealthSymptom>) {
        let (Some(live), Some(symptom)) = (self.units.live_mut(id), altered) else { return };
        let build = live.health.build;
        live.note_altered(&self.env, symptom);
        self.replacements.pace.bar_answers(&self.env, build);
        self.life.note_action();
    }
}

impl LiveGeneration {
    fn note_altered(&mut self, env: &TaskEnvironment, symptom: HealthSymptom) {
        self.health.answers.altered = Some(symptom);
        let (reason, message) = (symptom.reason(), symptom.to_string());
        env.log_event(Some(self.id), EventKind::Unwell { reason, message });
    }

    fn wants_answer_probe(&self, env: &TaskEnvironment) -> bool {
        let test = &self.health.answers;
        let (is_faulty, is_unusual) = {
            let outcomes = lock(&self.cell.outcomes);
            (outcomes.answers.is_faulty(), outcomes.are_unusual)
        };
        // An adopted process may have answered many requests of the previous program.
        let is_young = self.start.adopted.is_none() && self.cell.work().requests <= MAX_YOUNG_REQUESTS;
        let has_reason = if test.baseline.is_some() { is_unusual } else { is_young && !is_faulty };
        env.tests_answers()
            && !test.is_asking
            && test.altered.is_none()
            && test.unusable < MAX_UNUSABLE
            && has_reason
    }

    /// Plans the next question to the process, if there is a reason for one.
    pub(crate) fn plan_answer_probe(&mut self, env: &TaskEnvironment) {
        if self.timers.answers.is_none() && self.wants_answer_probe(env) {
            let soon = clock::after(Instant::now(), warden_policies::defaults().warmth.quiet_for);
            self.timers.answers = Some(self.health.answers.rests_until.map_or(soon, |until| until.max(soon)));
        }
    }
}

impl TaskEnvironment {
    /// True if processes are asked fixed prompts. Adapters that clients load change the answers, and a request
    /// would keep a server from its sleep.
    pub(crate) fn tests_answers(&self) -> bool {
        self.spec.recycle.common.answers == AnswersMode::Replace
            && self.leases.settings.are_untouched()
            && !hints::unloads_when_idle(&self.spec.command)
    }
}
