//! Requests and tokens per second, from counters that begin anew with each process. Pure.
//!
//! A process that is seen for the first time with its model counts from there; one that comes later has done all of its work since.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use warden_policies::units::exact;

use super::picture::{Done, Row};

/// Rates are those of the last seconds: a single one would jump with each request.
const WINDOW: Duration = Duration::from_secs(5);
/// Pictures that are kept for it, however often they come.
const KEPT: usize = 64;

/// What a model does each second.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Rate {
    /// Requests that ended.
    pub(super) requests: f64,
    /// Tokens that they had generated.
    pub(super) tokens: f64,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Rates {
    models: HashMap<String, Counter>,
}

#[derive(Clone, Debug, Default)]
struct Counter {
    last: Vec<Done>,
    requests: u64,
    tokens: u64,
    /// When, requests and tokens by then; oldest first.
    kept: VecDeque<(Duration, u64, u64)>,
}

impl Rates {
    /// Takes in a picture. Models that are not in it are forgotten.
    pub(super) fn see(&mut self, at: Duration, rows: &[Row]) {
        let mut before = std::mem::take(&mut self.models);
        for row in rows {
            let counter = match before.remove(&row.name) {
                Some(mut counter) => {
                    counter.add(&row.work);
                    counter
                }
                None => Counter { last: row.work.clone(), ..Counter::default() },
            };
            self.models.insert(row.name.clone(), counter.at(at));
        }
    }

    /// `None` until there are two pictures.
    pub(super) fn of(&self, model: &str) -> Option<Rate> {
        let kept = &self.models.get(model)?.kept;
        let ((then, requests, tokens), (now, more, most)) = (*kept.front()?, *kept.back()?);
        let seconds = now.saturating_sub(then).as_secs_f64();
        (seconds > 0.0).then(|| Rate {
            requests: exact(more - requests) / seconds,
            tokens: exact(most - tokens) / seconds,
        })
    }

    /// Counters of another instance have nothing to do with these.
    pub(super) fn forget(&mut self) {
        self.models.clear();
    }
}

impl Counter {
    fn add(&mut self, work: &[Done]) {
        for now in work {
            let same = |one: &&Done| (one.replica, one.generation) == (now.replica, now.generation);
            let (requests, tokens) =
                self.last.iter().find(same).map_or((0, 0), |one| (one.requests, one.tokens));
            self.requests = self.requests.saturating_add(now.requests.saturating_sub(requests));
            self.tokens = self.tokens.saturating_add(now.tokens.saturating_sub(tokens));
        }
        self.last = work.to_vec();
    }

    fn at(mut self, at: Duration) -> Self {
        self.kept.push_back((at, self.requests, self.tokens));
        let too_old = |kept: &VecDeque<(Duration, u64, u64)>| {
            kept.len() > KEPT || kept.get(1).is_some_and(|(then, ..)| *then + WINDOW <= at)
        };
        while self.kept.len() > 2 && too_old(&self.kept) {
            self.kept.pop_front();
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Generation, requests and tokens of a process.
    type Work = (u64, u64, u64);

    fn row(work: &[Work]) -> Row {
        let done = |&(generation, requests, tokens): &Work| Done {
            replica: 0,
            generation: Some(generation),
            requests,
            tokens,
        };
        Row { name: "m".to_owned(), work: work.iter().map(done).collect(), ..Row::default() }
    }

    fn seen(pictures: &[(u64, &[Work])]) -> Option<Rate> {
        let mut rates = Rates::default();
        for (second, work) in pictures {
            rates.see(Duration::from_secs(*second), &[row(work)]);
        }
        rates.of("m")
    }

    #[test]
    fn a_rate_is_what_was_done_between_pictures_whoever_did_it() {
        assert_eq!(seen(&[(0, &[(1, 100, 900)])]), None, "one picture says nothing");
        let two = seen(&[(0, &[(1, 100, 900)]), (2, &[(1, 104, 920)])]);
        assert_eq!(two, Some(Rate { requests: 2.0, tokens: 10.0 }));
        // The next process begins at 0, and all that it has done is new.
        let next = seen(&[(0, &[(1, 100, 900)]), (1, &[(1, 101, 910), (2, 1, 5)]), (2, &[(2, 3, 9)])]);
        assert_eq!(next, Some(Rate { requests: 2.0, tokens: 9.5 }));
    }

    #[test]
    fn only_the_last_seconds_count_and_counters_that_fall_do_no_harm() {
        let pictures: Vec<(u64, [Work; 1])> = (0..100).map(|second| (second, [(1, second * 3, 0)])).collect();
        let pictures: Vec<(u64, &[Work])> =
            pictures.iter().map(|(second, work)| (*second, work.as_slice())).collect();
        assert_eq!(seen(&pictures), Some(Rate { requests: 3.0, tokens: 0.0 }));
        let rate = seen(&[(0, &[(1, 100, 0)]), (20, &[(1, 7, 0)]), (40, &[(1, 27, 0)])]);
        assert_eq!(rate, Some(Rate { requests: 1.0, tokens: 0.0 }));
    }

    #[test]
    fn a_model_that_is_gone_is_forgotten() {
        let mut rates = Rates::default();
        rates.see(Duration::ZERO, &[row(&[(1, 1, 1)])]);
        rates.see(Duration::from_secs(1), &[]);
        assert_eq!((rates.models.len(), rates.of("m")), (0, None));
    }
}
