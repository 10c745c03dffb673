//! The rules of other programs. Each knows how much memory there is, and none of its starts fails: better than in real life.

use std::time::Duration;

use super::Trace;
use super::run::{Do, Here, Sight};

/// A rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rival {
    /// At most so many models, however large; the one that was used longest ago leaves. So does llama.cpp's router.
    Count(usize),
    /// As many as memory holds, the one that was used longest ago leaves, and each that was idle for so long. So does Ollama.
    Idle(Duration),
    /// One model at a time: one group in which each excludes all others. So does llama-swap where nothing else is said.
    OneOfAGroup,
}

/// The largest number of models of which any so many fit.
pub(super) fn safe_count(trace: &Trace) -> usize {
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

    /// What it does now.
    pub(super) fn decide(self, now: Duration, trace: &Trace, sights: &[Sight]) -> Vec<Do> {
        let mut orders = Vec::new();
        let mut there: Vec<(usize, Sight)> = sights.iter().copied().enumerate().collect();
        if let Self::Idle(after) = self {
            for (model, sight) in &mut there {
                let idle = sight.waiting == 0 && sight.in_flight == 0;
                if sight.here == Here::Loaded && idle && now.saturating_sub(sight.used) >= after {
                    sight.here = Here::Leaving;
                    orders.push(Do::Unload(*model));
                }
            }
        }
        let mut wanted: Vec<(Duration, usize)> = sights
            .iter()
            .enumerate()
            .filter(|(_, sight)| sight.here == Here::Out)
            .filter_map(|(model, sight)| Some((sight.oldest?, model)))
            .collect();
        wanted.sort();
        // The first of those who wait is served first, so that nobody waits for ever.
        if let Some((_, model)) = wanted.first().copied() {
            loop {
                if self.fits(trace, &there, model, false) {
                    orders.push(Do::Load(model));
                    break;
                }
                if self.fits(trace, &there, model, true) {
                    break;
                }
                let oldest = there
                    .iter_mut()
                    .filter(|(_, sight)| sight.here == Here::Loaded)
                    .min_by_key(|(model, sight)| (sight.used, *model));
                let Some((victim, sight)) = oldest else { break };
                sight.here = Here::Leaving;
                orders.push(Do::Unload(*victim));
            }
        }
        orders
    }

    /// Whether a model fits beside those that are there, or beside those that stay.
    fn fits(self, trace: &Trace, there: &[(usize, Sight)], model: usize, soon: bool) -> bool {
        let counts = |sight: &Sight| match sight.here {
            Here::Out => false,
            Here::Leaving => !soon,
            Here::Loading | Here::Loaded => true,
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
