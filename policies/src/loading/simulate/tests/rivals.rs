//! The rules of other programs. Each knows the memory size, and none of its starts fails: better than in
//! practice.

use std::time::Duration;

use super::RequestTrace;
use crate::loading::simulate::run::{LoadingRule, ModelOrder, ModelPlace, ModelSight};

/// A loading rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rival {
    /// At most this many models of any size; the least recently used is unloaded. llama.cpp's router does
    /// this.
    Count(usize),
    /// As many as memory holds; the least recently used is unloaded, and each after an idle time. Ollama
    /// does this.
    Idle(Duration),
    /// One model at a time: one group in which each excludes all others. llama-swap does this by default.
    OneOfAGroup,
}

/// State of a rule.
pub(super) struct RivalRule<'a> {
    pub(super) rival: Rival,
    pub(super) trace: &'a RequestTrace,
}

impl LoadingRule for RivalRule<'_> {
    fn decide(&mut self, now: Duration, sights: &[ModelSight]) -> Vec<ModelOrder> {
        self.rival.decide(now, self.trace, sights)
    }

    /// Idle times end without events.
    fn idle_interval(&self) -> Option<Duration> {
        Some(Duration::from_secs(10))
    }
}

/// Returns the largest number of models of which any selection fits.
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
        // The first waiting model is served first, so that none waits forever.
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

    /// Returns true if a model fits next to the loaded ones, or next to those that stay.
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
