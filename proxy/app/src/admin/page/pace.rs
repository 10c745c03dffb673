//! From counters to what happens: requests and tokens a second over the last seconds, first tokens over the last minutes.
//! Counters in, rates out; who calls says when it is.

use std::collections::BTreeMap;
use std::time::Duration;

use super::tally::{Counted, quantile, since};

/// Rates are over so much time at least, if we are so old: a moment says nothing.
const LATELY: Duration = Duration::from_secs(10);
/// Samples of that time that are kept: at most one a second.
const KEPT: usize = 16;
/// First tokens are those of one to two such windows: enough for a share of one in a hundred, and soon over.
const WINDOW: Duration = Duration::from_secs(300);

/// What a model does.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Pace {
    /// Requests that ended, a second.
    pub(crate) requests: f64,
    /// Those that failed by our fault, a second.
    pub(crate) failed: f64,
    /// Tokens generated, a second.
    pub(crate) output_tokens: f64,
    /// Prompt tokens, a second.
    pub(crate) prompt_tokens: f64,
    /// Half of the streams had their first token within this.
    pub(crate) first_p50: Option<Duration>,
    /// All but one of a hundred.
    pub(crate) first_p99: Option<Duration>,
}

/// Counters by model.
pub(crate) type All = BTreeMap<String, Counted>;

/// The counters of the last while.
#[derive(Debug, Default)]
pub(crate) struct Paces {
    /// When, since some beginning, and what was counted then; oldest first.
    samples: Vec<(Duration, All)>,
    /// What was counted when the window before began, and when this one did.
    windows: Option<(Duration, All, All)>,
}

impl Paces {
    /// Takes counters in. Of samples less than a second apart the first one stays, but for what is newest.
    pub(crate) fn take(&mut self, at: Duration, now: All) {
        let too_close =
            |older: Duration, newer: Duration| newer.saturating_sub(older) < Duration::from_millis(950);
        if let [.., (before, _), (last, _)] = self.samples.as_slice()
            && too_close(*before, *last)
        {
            self.samples.pop();
        }
        match &mut self.windows {
            None => self.windows = Some((at, All::new(), now.clone())),
            Some((began, old, new)) if at.saturating_sub(*began) >= WINDOW => {
                *began = at;
                *old = std::mem::replace(new, now.clone());
            }
            Some(_) => {}
        }
        self.samples.push((at, now));
        // One that is old enough is needed, and none before it.
        let old = |(when, _): &(Duration, All)| at.saturating_sub(*when) >= LATELY;
        if let Some(last_old) = self.samples.iter().rposition(old) {
            self.samples.drain(..last_old);
        }
        if self.samples.len() > KEPT {
            self.samples.remove(1);
        }
    }

    /// What each model does.
    pub(crate) fn now(&self) -> BTreeMap<String, Pace> {
        let (Some((from, before)), Some((to, last))) = (self.samples.first(), self.samples.last()) else {
            return BTreeMap::new();
        };
        let seconds = to.saturating_sub(*from).as_secs_f64();
        let nothing = Counted::default();
        let one = |(model, counted): (&String, &Counted)| {
            let lately = since(counted, before.get(model).unwrap_or(&nothing));
            let rate = |count: u64| {
                if seconds > 0.0 { warden_policies::units::exact(count) / seconds } else { 0.0 }
            };
            let old = self.windows.as_ref().and_then(|(_, old, _)| old.get(model)).unwrap_or(&nothing);
            let first = since(counted, old).first;
            let pace = Pace {
                requests: rate(lately.requests),
                failed: rate(lately.failed),
                output_tokens: rate(lately.output_tokens),
                prompt_tokens: rate(lately.prompt_tokens),
                first_p50: quantile(&first, 0.5),
                first_p99: quantile(&first, 0.99),
            };
            (model.clone(), pace)
        };
        last.iter().map(one).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(requests: u64) -> All {
        let one = Counted { requests, output_tokens: requests * 10, ..Counted::default() };
        All::from([("m".to_owned(), one)])
    }

    #[test]
    fn rates_are_those_of_the_last_seconds_however_often_it_is_looked() {
        for step in [100, 333, 1000, 5000] {
            let mut paces = Paces::default();
            let mut at = 0;
            while at < 60_000 {
                // Ten a second, and then none.
                paces.take(Duration::from_millis(at), counted((at / 100).min(300)));
                assert!(paces.samples.len() <= KEPT, "{step}: {}", paces.samples.len());
                let pace = paces.now()["m"];
                if (1..=30_000).contains(&at) {
                    assert!((pace.requests - 10.0).abs() < 1.0, "{step} ms, at {at}: {pace:?}");
                    assert!((pace.output_tokens - 100.0).abs() < 10.0, "{step} ms, at {at}: {pace:?}");
                }
                at += step;
            }
            assert!(paces.now()["m"].requests < 1e-9, "{step} ms: it is quiet");
        }
    }

    #[test]
    fn a_model_that_is_new_counts_from_nothing_and_one_that_is_gone_is_forgotten() {
        let mut paces = Paces::default();
        paces.take(Duration::ZERO, All::new());
        paces.take(Duration::from_secs(10), counted(50));
        assert!((paces.now()["m"].requests - 5.0).abs() < 1e-9);
        paces.take(Duration::from_secs(20), All::new());
        assert!(paces.now().is_empty());
    }

    #[test]
    fn first_tokens_of_long_ago_are_forgotten() {
        let mut paces = Paces::default();
        let with = |slow: u32, fast: u32| {
            let mut one = Counted::default();
            (one.first[60], one.first[20]) = (slow, fast);
            All::from([("m".to_owned(), one)])
        };
        paces.take(Duration::ZERO, with(100, 0));
        assert!(paces.now()["m"].first_p50 > Some(Duration::from_secs(1)));
        for minute in 1..30 {
            paces.take(Duration::from_secs(60 * minute), with(100, 10));
        }
        paces.take(Duration::from_secs(1801), with(100, 20));
        assert!(paces.now()["m"].first_p99 < Some(Duration::from_secs(1)), "{:?}", paces.now());
    }
}
