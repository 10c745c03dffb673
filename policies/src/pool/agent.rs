//! Answers `HAProxy`'s `agent-check`: one line of words that set a server's state, weight and connection
//! limit (`HAProxy` configuration manual, `agent-check`). Weights are percent of the configured weight.
//!
//! ```text
//!   asked to drain -----------------------> drain                      only bound clients still come
//!   no request can be served or queued ---> ready down #reason
//!   else ---------------------------------> ready up 55% maxconn:8
//!
//!   weight: 10 % with all slots taken, 100 % with all free; below 10 % as the queue fills
//!           x down to a quarter as memory nears a limit: a process about to be replaced gets less work
//! ```

use std::fmt;

use super::{BalancedModel, InstanceFacts, UnreadyReason, readiness};
use crate::units::as_f64;

/// Weight in percent of an instance whose slots are all taken. Above zero: its neighbours may be as busy.
const BUSY_PERCENT: f64 = 10.0;

/// Weight in percent of an instance without a process: a neighbour may have the model loaded.
const COLD_PERCENT: f64 = 25.0;

/// Least factor on the weight of an instance whose memory is forecast to reach a limit.
const LIMIT_SHARE_LEAST: f64 = 0.25;

/// Answer to an agent check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AgentAnswer {
    /// Only clients bound to this instance should send requests.
    Drain,
    /// No request can be served.
    Down(UnreadyReason),
    /// Clients may send new requests.
    Up {
        /// Percent of the configured weight, 1 to 100.
        weight: u8,
        /// Useful number of concurrent requests; `None` if unknown: the balancer keeps the last value.
        connections: Option<u32>,
    },
}

impl fmt::Display for AgentAnswer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Drain => f.write_str("drain"),
            Self::Down(why) => write!(f, "ready down #{}", why.as_str()),
            Self::Up { weight, connections: None } => write!(f, "ready up {weight}%"),
            Self::Up { weight, connections: Some(most) } => write!(f, "ready up {weight}% maxconn:{most}"),
        }
    }
}

/// Computes the answer of an instance. Memory limits further away than `horizon` seconds are ignored.
pub fn agent_answer(facts: &InstanceFacts, horizon: f64) -> AgentAnswer {
    match readiness(facts) {
        Ok(()) => {}
        Err(UnreadyReason::Draining) => return AgentAnswer::Drain,
        // The connection limit is reached: ask for fewer requests, but the instance is alive.
        Err(UnreadyReason::Connections) => return AgentAnswer::Up { weight: 1, connections: None },
        Err(why) => return AgentAnswer::Down(why),
    }
    let sum =
        |of: fn(&BalancedModel) -> u32| facts.models.iter().map(|model| u64::from(of(model))).sum::<u64>();
    let (slots, running, waiting) =
        (sum(|model| model.slots), sum(|model| model.running), sum(|model| model.waiting));
    let depth = sum(|model| model.depth);
    let share = if slots == 0 {
        COLD_PERCENT
    } else {
        let taken = running.min(slots).saturating_add(waiting).min(slots);
        BUSY_PERCENT + (100.0 - BUSY_PERCENT) * (1.0 - as_f64(taken) / as_f64(slots))
    };
    let queue =
        if waiting == 0 || depth == 0 { 1.0 } else { 1.0 - (as_f64(waiting) / as_f64(depth)).min(1.0) };
    let left = facts.models.iter().filter_map(|model| model.limit_in).fold(f64::INFINITY, f64::min);
    let near = if left < horizon && horizon > 0.0 {
        LIMIT_SHARE_LEAST + (1.0 - LIMIT_SHARE_LEAST) * (left.max(0.0) / horizon)
    } else {
        1.0
    };
    // A freed slot is filled from the local queue, so as many requests may wait here as there are slots.
    // Others wait in the balancer, which can send them elsewhere.
    let connections = u32::try_from(slots.saturating_add(slots.min(depth))).ok().filter(|most| *most > 0);
    AgentAnswer::Up { weight: percent(share * queue * near), connections }
}

/// Rounds to whole percent, 1 to 100.
fn percent(share: f64) -> u8 {
    let mut whole = 1;
    // A loop instead of a conversion that could truncate.
    while whole < 100 && f64::from(whole) + 0.5 <= share {
        whole += 1;
    }
    whole
}

#[cfg(test)]
mod tests {
    use super::*;

    const HORIZON: f64 = 900.0;

    fn model(slots: u32, running: u32, waiting: u32) -> BalancedModel {
        BalancedModel { slots, running, waiting, depth: 16, refuses: false, limit_in: None }
    }

    fn said(models: &[BalancedModel]) -> String {
        agent_answer(&InstanceFacts { models: models.to_vec(), ..InstanceFacts::default() }, HORIZON)
            .to_string()
    }

    #[test]
    fn free_slots_give_weight_and_a_queue_takes_it() {
        assert_eq!(said(&[model(4, 0, 0)]), "ready up 100% maxconn:8");
        assert_eq!(said(&[model(4, 2, 0)]), "ready up 55% maxconn:8");
        assert_eq!(said(&[model(4, 4, 0)]), "ready up 10% maxconn:8");
        assert_eq!(said(&[model(4, 4, 8)]), "ready up 5% maxconn:8");
        assert_eq!(said(&[model(4, 4, 15)]), "ready up 1% maxconn:8");
        assert_eq!(said(&[model(4, 0, 0), model(4, 4, 0)]), "ready up 55% maxconn:16");
        assert_eq!(said(&[model(0, 0, 0)]), "ready up 25%", "nothing is loaded");
        assert_eq!(said(&[model(3, 9, 0)]), "ready up 10% maxconn:6", "more than its slots");
    }

    #[test]
    fn who_nears_a_limit_gets_less_before_it_is_replaced() {
        let leaks = |left| BalancedModel { limit_in: Some(left), ..model(4, 0, 0) };
        assert_eq!(said(&[leaks(10_000.0)]), "ready up 100% maxconn:8");
        assert_eq!(said(&[leaks(450.0)]), "ready up 63% maxconn:8");
        assert_eq!(said(&[leaks(0.0)]), "ready up 25% maxconn:8");
        assert_eq!(said(&[leaks(-3.0), model(4, 0, 0)]), "ready up 25% maxconn:16");
        assert_eq!(said(&[leaks(f64::NAN)]), "ready up 100% maxconn:8");
    }

    #[test]
    fn who_leaves_says_so_and_who_cannot_serve_says_why() {
        let facts = |draining, full, models: &[BalancedModel]| InstanceFacts {
            draining,
            full,
            models: models.to_vec(),
        };
        assert_eq!(agent_answer(&facts(true, false, &[model(4, 0, 0)]), HORIZON).to_string(), "drain");
        assert_eq!(agent_answer(&facts(false, true, &[model(4, 0, 0)]), HORIZON).to_string(), "ready up 1%");
        let refuses = BalancedModel { refuses: true, ..model(0, 0, 0) };
        assert_eq!(
            agent_answer(&facts(false, false, &[refuses]), HORIZON).to_string(),
            "ready down #refusing"
        );
        assert_eq!(
            agent_answer(&facts(false, false, &[model(4, 4, 16)]), HORIZON).to_string(),
            "ready down #queues_full"
        );
        assert_eq!(agent_answer(&facts(false, false, &[]), HORIZON).to_string(), "ready down #no_model");
    }

    #[test]
    fn a_weight_is_never_nothing_and_never_more_than_all() {
        for slots in 0..6 {
            for running in 0..8 {
                for waiting in 0..15 {
                    let AgentAnswer::Up { weight, connections } = agent_answer(
                        &InstanceFacts {
                            models: vec![model(slots, running, waiting)],
                            ..InstanceFacts::default()
                        },
                        HORIZON,
                    ) else {
                        panic!("{slots} {running} {waiting}");
                    };
                    assert!((1..=100).contains(&weight) && connections != Some(0));
                }
            }
        }
    }
}
