//! State of an instance for load balancers: readiness, load, and use of the context.

pub mod agent;

use std::fmt;

use crate::named::named_enum;

/// Facts about one model for load balancing.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct BalancedModel {
    /// Number of slots of processes that take requests.
    pub slots: u32,
    /// Number of requests that occupy a slot.
    pub running: u32,
    /// Number of requests that wait for a slot.
    pub waiting: u32,
    /// Most requests that may wait for a slot.
    pub depth: u32,
    /// Requests are refused at once, because no process of the model can start.
    pub refuses: bool,
    /// Seconds until the first of the model's processes reaches a memory limit; `None` without a forecast.
    pub limit_in: Option<f64>,
}

impl BalancedModel {
    /// Returns true if one more request would be served or queued.
    pub const fn takes_requests(&self) -> bool {
        !self.refuses && (self.running < self.slots || self.waiting < self.depth)
    }
}

/// State of an instance at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct InstanceFacts {
    /// An operator or SIGTERM has asked the instance to drain.
    pub draining: bool,
    /// The connection limit is reached.
    pub full: bool,
    /// Models of the instance.
    pub models: Vec<BalancedModel>,
}

named_enum! {
    /// Reason for which no new request should be sent to an instance.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum UnreadyReason {
        /// An operator or SIGTERM has asked the instance to drain; requests that still arrive are served.
        Draining = "draining",
        /// No model is configured.
        NoModel = "no_model",
        /// No model can start.
        Refusing = "refusing",
        /// All slots and queues are full.
        Full = "queues_full",
        /// The connection limit is reached.
        Connections = "connections_full",
        /// The last check of the instance is too old, or none was made yet.
        Unknown = "unknown",
    }
}

impl fmt::Display for UnreadyReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Draining => "it is leaving the pool, and still serves requests that arrive",
            Self::NoModel => "no model is configured",
            Self::Refusing => "no model starts: `llama-warden status` says why",
            Self::Full => "all slots are taken, and all queues are full",
            Self::Connections => "there are as many connections as `server.connections` allows",
            Self::Unknown => "the state of the models is not known at the moment",
        })
    }
}

/// Checks if new requests should be sent to this instance.
///
/// # Errors
/// Reason for which no new request should be sent.
pub fn readiness(facts: &InstanceFacts) -> Result<(), UnreadyReason> {
    if facts.draining {
        return Err(UnreadyReason::Draining);
    }
    if facts.models.is_empty() {
        return Err(UnreadyReason::NoModel);
    }
    if facts.full {
        return Err(UnreadyReason::Connections);
    }
    if facts.models.iter().any(BalancedModel::takes_requests) {
        return Ok(());
    }
    let all_refuse = facts.models.iter().all(|model| model.refuses);
    Err(if all_refuse { UnreadyReason::Refusing } else { UnreadyReason::Full })
}

/// Returns the share of the slots' context in use, 0 to 1; 0 without slots.
pub fn context_fill(tokens: u64, capacity: u64) -> f64 {
    if capacity == 0 {
        return 0.0;
    }
    (crate::units::as_f64(tokens) / crate::units::as_f64(capacity)).clamp(0.0, 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDLE: BalancedModel =
        BalancedModel { slots: 4, running: 0, waiting: 0, depth: 8, refuses: false, limit_in: None };

    fn of(models: &[BalancedModel]) -> InstanceFacts {
        InstanceFacts { models: models.to_vec(), ..InstanceFacts::default() }
    }

    #[test]
    fn it_is_ready_while_any_model_serves_or_lets_wait() {
        let full = BalancedModel { running: 4, waiting: 8, ..IDLE };
        let refuses = BalancedModel { slots: 0, refuses: true, ..IDLE };
        let unloaded = BalancedModel { slots: 0, ..IDLE };
        let no_queue = BalancedModel { depth: 0, ..IDLE };
        for models in [&[IDLE][..], &[full, unloaded], &[refuses, IDLE], &[no_queue]] {
            assert_eq!(readiness(&of(models)), Ok(()), "{models:?}");
        }
        for (models, why) in [
            (&[][..], UnreadyReason::NoModel),
            (&[refuses, refuses], UnreadyReason::Refusing),
            (&[full, refuses], UnreadyReason::Full),
            (&[BalancedModel { slots: 0, depth: 0, ..IDLE }], UnreadyReason::Full),
        ] {
            assert_eq!(readiness(&of(models)), Err(why), "{models:?}");
        }
        assert_eq!(readiness(&InstanceFacts { full: true, ..of(&[IDLE]) }), Err(UnreadyReason::Connections));
        assert_eq!(readiness(&InstanceFacts { draining: true, ..of(&[IDLE]) }), Err(UnreadyReason::Draining));
    }

    #[test]
    fn the_share_of_context_in_use_is_a_share() {
        assert_eq!(
            (context_fill(0, 0), context_fill(7, 0), context_fill(25, 100), context_fill(300, 100)),
            (0.0, 0.0, 0.25, 1.0)
        );
    }
}
