//! What `HAProxy`'s `agent-check` is answered: one line of words that set state, weight and number of connections of a server
//! (`HAProxy` configuration manual, `agent-check`). Weights are percent of the weight that its configuration gives the server.
//!
//! ```text
//!   told to leave ------------------> drain                      who is bound to it still comes, nobody else
//!   nothing can be served or queued -> ready down #why
//!   else ---------------------------> ready up 55% maxconn:8
//!
//!   weight: 10 % with all slots taken, 100 % with all free; below 10 % as the queue fills
//!           x up to a quarter as memory comes near a limit: a process that is about to be replaced gets less before
//! ```

use std::fmt;

use super::{Facts, ModelFacts, Unready, readiness};
use crate::units::exact;

/// Percent that an instance keeps whose slots are all taken and whose queue is empty: it must go on getting some, because its
/// neighbours may be as busy.
const BUSY: f64 = 10.0;

/// Percent where no process takes requests yet: the first one would wait for a load, and a neighbour may have the model.
const COLD: f64 = 25.0;

/// The least share of its weight that a forecast leaves.
const NEAR: f64 = 0.25;

/// The line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Line {
    /// No new requests but those that are bound to it.
    Drain,
    /// Nobody can be served.
    Down(Unready),
    /// Requests may come.
    Up {
        /// Percent of the configured weight, 1 to 100.
        weight: u8,
        /// Requests at a time that are of use; more had better wait in front. `None`: not known, it stays what it was.
        connections: Option<u32>,
    },
}

/// As it is sent, without its end.
impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Drain => f.write_str("drain"),
            Self::Down(why) => write!(f, "ready down #{}", why.as_str()),
            Self::Up { weight, connections: None } => write!(f, "ready up {weight}%"),
            Self::Up { weight, connections: Some(most) } => write!(f, "ready up {weight}% maxconn:{most}"),
        }
    }
}

/// What is said of an instance. `horizon`: a limit that is further away than so many seconds is no reason for anything.
pub fn line(facts: &Facts, horizon: f64) -> Line {
    match readiness(facts) {
        Ok(()) => {}
        Err(Unready::Draining) => return Line::Drain,
        // More connections than it takes: fewer should come, but it is alive.
        Err(Unready::Connections) => return Line::Up { weight: 1, connections: None },
        Err(why) => return Line::Down(why),
    }
    let sum = |of: fn(&ModelFacts) -> u32| facts.models.iter().map(|model| u64::from(of(model))).sum::<u64>();
    let (slots, running, waiting) =
        (sum(|model| model.slots), sum(|model| model.running), sum(|model| model.waiting));
    let depth = sum(|model| model.depth);
    let share = if slots == 0 {
        COLD
    } else {
        let taken = running.min(slots).saturating_add(waiting).min(slots);
        BUSY + (100.0 - BUSY) * (1.0 - exact(taken) / exact(slots))
    };
    let queue = if waiting == 0 || depth == 0 { 1.0 } else { 1.0 - (exact(waiting) / exact(depth)).min(1.0) };
    let left = facts.models.iter().filter_map(|model| model.limit_in).fold(f64::INFINITY, f64::min);
    let near =
        if left < horizon && horizon > 0.0 { NEAR + (1.0 - NEAR) * (left.max(0.0) / horizon) } else { 1.0 };
    // A slot that comes free is filled by who waits here, so as many may wait as there are slots; further ones wait in front, from
    // where they can still go elsewhere.
    let connections = u32::try_from(slots.saturating_add(slots.min(depth))).ok().filter(|most| *most > 0);
    Line::Up { weight: percent(share * queue * near), connections }
}

/// Whole percent, 1 to 100.
fn percent(share: f64) -> u8 {
    let mut whole = 1;
    // A hundred steps instead of a conversion that could cut.
    while whole < 100 && f64::from(whole) + 0.5 <= share {
        whole += 1;
    }
    whole
}

#[cfg(test)]
mod tests {
    use super::*;

    const HORIZON: f64 = 900.0;

    fn model(slots: u32, running: u32, waiting: u32) -> ModelFacts {
        ModelFacts { slots, running, waiting, depth: 16, refuses: false, limit_in: None }
    }

    fn said(models: &[ModelFacts]) -> String {
        line(&Facts { models: models.to_vec(), ..Facts::default() }, HORIZON).to_string()
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
        let leaks = |left| ModelFacts { limit_in: Some(left), ..model(4, 0, 0) };
        assert_eq!(said(&[leaks(10_000.0)]), "ready up 100% maxconn:8");
        assert_eq!(said(&[leaks(450.0)]), "ready up 63% maxconn:8");
        assert_eq!(said(&[leaks(0.0)]), "ready up 25% maxconn:8");
        assert_eq!(said(&[leaks(-3.0), model(4, 0, 0)]), "ready up 25% maxconn:16");
        assert_eq!(said(&[leaks(f64::NAN)]), "ready up 100% maxconn:8");
    }

    #[test]
    fn who_leaves_says_so_and_who_cannot_serve_says_why() {
        let facts = |draining, full, models: &[ModelFacts]| Facts { draining, full, models: models.to_vec() };
        assert_eq!(line(&facts(true, false, &[model(4, 0, 0)]), HORIZON).to_string(), "drain");
        assert_eq!(line(&facts(false, true, &[model(4, 0, 0)]), HORIZON).to_string(), "ready up 1%");
        let refuses = ModelFacts { refuses: true, ..model(0, 0, 0) };
        assert_eq!(line(&facts(false, false, &[refuses]), HORIZON).to_string(), "ready down #refusing");
        assert_eq!(
            line(&facts(false, false, &[model(4, 4, 16)]), HORIZON).to_string(),
            "ready down #queues_full"
        );
        assert_eq!(line(&facts(false, false, &[]), HORIZON).to_string(), "ready down #no_model");
    }

    #[test]
    fn a_weight_is_never_nothing_and_never_more_than_all() {
        for slots in 0..6 {
            for running in 0..8 {
                for waiting in 0..15 {
                    let Line::Up { weight, connections } = line(
                        &Facts { models: vec![model(slots, running, waiting)], ..Facts::default() },
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
