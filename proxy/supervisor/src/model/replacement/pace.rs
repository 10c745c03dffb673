//! Pace of a model's replacements: the cooldown, the time that a start takes, and idle periods.

use std::sync::Arc;
use std::time::Duration;

use warden_policies::cooldown::{HoldReason, RecycleCooldown};
use warden_policies::health::{self, ProbeBaseline};
use warden_policies::replacement_cost::LullHistory;
use warden_policies::{GenerationId, RecycleDecision};

use crate::model::environment::TaskEnvironment;
use crate::view::event::EventKind;

#[derive(Debug)]
pub(crate) struct RecyclePace {
    pub(crate) cooldown: RecycleCooldown,
    /// Time from the spawn until the process was ready, at the last start.
    pub(crate) load_time: Option<Duration>,
    /// Idle periods that would have sufficed for a replacement.
    pub(crate) lulls: LullHistory,
    /// Answers of the first process to fixed prompts, with the hash of its command and files.
    pub(crate) sound_answers: Option<(u64, Arc<ProbeBaseline>)>,
}

impl RecyclePace {
    pub(crate) fn new(lulls: LullHistory) -> Self {
        Self { cooldown: RecycleCooldown::default(), load_time: None, lulls, sound_answers: None }
    }

    pub(crate) fn note_policy_start(&mut self, env: &TaskEnvironment, decision: &RecycleDecision) {
        let Some(reason) = decision.reason else { return };
        if reason.is_answers() {
            self.cooldown.record_answers_recycle(env.context.now(), env.context.last_generation());
        }
        if let Some(held) = self.cooldown.record_start(env.context.now(), reason, &env.spec.recycle) {
            env.log_event(None, EventKind::PolicyOff { message: held.to_string() });
        }
    }

    /// Records that the answers of a process have become faulty. A second process suggests that restarts do
    /// not help.
    pub(crate) fn note_faulty_answers(
        &mut self,
        env: &TaskEnvironment,
        generation: GenerationId,
        build: Option<u32>,
    ) {
        let now = env.context.now();
        if let Some(held) = self.cooldown.record_faulty_answers(now, generation, &env.spec.recycle) {
            log_answers_off(env, held, build);
        }
    }

    /// Stops replacements because of faulty answers: they do not help.
    pub(crate) fn bar_answers(&mut self, env: &TaskEnvironment, build: Option<u32>) {
        if let Some(held) = self.cooldown.bar_answers() {
            log_answers_off(env, held, build);
        }
    }
}

/// Logs that faulty answers cause no replacement any more, with a known defect of the build.
fn log_answers_off(env: &TaskEnvironment, held: HoldReason, build: Option<u32>) {
    let defect = health::known_answer_defect(build);
    let hint = defect
        .map(|id| format!(". `llama-warden mitigations show {id}` shows a known defect of such builds"));
    let message = format!("{held}{}", hint.unwrap_or_default());
    env.log_event(None, EventKind::PolicyOff { message });
}
