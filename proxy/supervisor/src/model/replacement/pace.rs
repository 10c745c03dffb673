//! Pace of a model's replacements: the cooldown, the time that a start takes, and idle periods.

use std::time::Duration;

use warden_policies::RecycleDecision;
use warden_policies::cooldown::RecycleCooldown;
use warden_policies::replacement_cost::LullHistory;

use crate::model::environment::TaskEnvironment;
use crate::view::event::EventKind;

#[derive(Debug)]
pub(crate) struct RecyclePace {
    pub(crate) cooldown: RecycleCooldown,
    /// Time from the spawn until the process was ready, at the last start.
    pub(crate) load_time: Option<Duration>,
    /// Idle periods that would have sufficed for a replacement.
    pub(crate) lulls: LullHistory,
}

impl RecyclePace {
    pub(crate) fn new(lulls: LullHistory) -> Self {
        Self { cooldown: RecycleCooldown::default(), load_time: None, lulls }
    }

    pub(crate) fn note_policy_start(&mut self, env: &TaskEnvironment, decision: &RecycleDecision) {
        let Some(reason) = decision.reason else { return };
        if let Some(held) = self.cooldown.record_start(env.context.now(), reason, &env.spec.recycle) {
            env.log_event(None, EventKind::PolicyOff { message: held.to_string() });
        }
    }
}
