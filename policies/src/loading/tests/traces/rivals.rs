//! Rules of other programs. Unlike in practice, each rule knows all memory sizes, and every start succeeds.

use std::time::Duration;

use super::RequestTrace;
use super::run::{LoadingRule, ModelOrder, ModelPlace, ModelSight};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rival {
    /// Loads at most this many models of any size; unloads the least recently used (llama.cpp's router).
    Count(usize),
    /// Loads as many as fit; unloads the least recently used, and any after an idle time (Ollama).
    Idle(Duration),
    /// Loads one model at a time: one group in which each excludes all others (llama-swap's default).
    OneOfAGroup,
}

pub(super) struct RivalRule<'a> {
    pub(super) rival: Rival,
    pub(super) trace: &'a RequestTrace,
}

impl LoadingRule for RivalRule<'_> {
    fn decide(&mut self, now: Duration, sights: &[ModelSight]) -> Vec<ModelOrder> {
        self.rival.decide(now, self.trace, sights)
    }

    /// Idle times end without an event, so the rule must be called regularly.
    fn idle_interval(&self) -> Option<Duration> {
        Some(Duration::from_secs(10))
    }
}

/// Returns the largest number of models that fit in any combination.
pub(super) fn safe_count(trace: &RequestTrace) -> usize {
    let mut sizes: Vec<u64> = trace.models.iter().map(|model| model.bytes).collect();
    sizes.sort_unstable_by(|a, b| b.cmp(a));
    let mut sum = 0;
    let fit = sizes.iter().take_while(|bytes| {
        sum += **bytes;
        sum <= trace.memory
    });
    fit.count().max(1)
}

impl Rival {
    pub(super) fn name(self) -> String {
        match self {
            Self::Count(count) => format!("{count} at a time, oldest leaves"),
            Self::Idle(after) => format!("memory, oldest leaves, idle {} s", after.as_secs()),
            Self::OneOfAGroup => "one at a time".to_owned(),
        }
    }

    fn decide(self, now: Duration, trace: &RequestTrace, sights: &[ModelSight]) -> Vec<ModelOrder> {
        let mut orders = Vec::new();
        let mut there: Vec<(usize, ModelSight)> = sights.iter().copied().enumerate().collect();
        if let Self::Idle(after) = self {
            for (model, sight) in &mut there {
                let idle = sight.waiting == 0 && sight.in_flight == 0;
                if sight.here == ModelPlace::Loaded && idle && now.saturating_sub(sight.used) >= after {
                    sight.here = ModelPlace::Leaving;
                    orders.push(ModelOrder::Unload(*model));
                }
            }
        }
        let mut wanted: Vec<(Duration, usize)> = sights
            .iter()
            .enumerate()
            .filter(|(_, sight)| sight.here == ModelPlace::Out)
            .filter_map(|(model, sight)| Some((sight.oldest?, model)))
            .collect();
        wanted.sort();
        // Serve the first waiting model first, so that none waits forever.
        if let Some((_, model)) = wanted.first().copied() {
            loop {
                if self.fits(trace, &there, model, false) {
                    orders.push(ModelOrder::Load(model));
                    break;
                }
                if self.fits(trace, &there, model, true) {
                    break;
                }
                let oldest = there
                    .iter_mut()
                    .filter(|(_, sight)| sight.here == ModelPlace::Loaded)
                    .min_by_key(|(model, sight)| (sight.used, *model));
                let Some((victim, sight)) = oldest else { break };
                sight.here = ModelPlace::Leaving;
                orders.push(ModelOrder::Unload(*victim));
            }
        }
        orders
    }

    /// Returns true if a model fits next to the loaded ones; `soon`: once models being unloaded are gone.
    fn fits(self, trace: &RequestTrace, there: &[(usize, ModelSight)], model: usize, soon: bool) -> bool {
        let counts = |sight: &ModelSight| match sight.here {
            ModelPlace::Out => false,
            ModelPlace::Leaving => !soon,
            ModelPlace::Loading | ModelPlace::Loaded => true,
        };
        let others = || there.iter().filter(|(_, sight)| counts(sight));
        match self {
            Self::Count(count) => others().count() < count,
            Self::OneOfAGroup => others().count() < 1,
            Self::Idle(_) => {
                let held: u64 = others().map(|(other, _)| trace.models[*other].bytes).sum();
                held + trace.models[model].bytes <= trace.memory
            }
        }
    }
}
