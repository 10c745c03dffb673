//! Error rates of the detector, with Wilson's 95 % intervals, on leaks and harmless growth of known size
//! added to recordings of real servers.
//!
//! `WARDEN_TRUTH_SEEDS=40` runs more seeds of each kind than usual.

#![expect(clippy::print_stdout, reason = "the tables are what one reads after a change to the detector")]

use std::collections::BTreeMap;

use warden_policies::defaults;
use warden_policies::growth::{GrowthMonitor, GrowthVerdict};

use healthy::Healthy;
use leaks::{Base, HOST, Leaking};
use recorded::RecordedLoad;
use seen::Seen;
use table::{Row, rate};

mod healthy;
mod leaks;
mod mixed;
mod recorded;
mod seen;
mod table;

/// Recordings, read once for all tests.
struct Bases(BTreeMap<Base, RecordedLoad>);

impl Bases {
    fn read() -> Self {
        let short = || RecordedLoad::read("h200-b8827-mixed2-nographs", 0.0);
        let long = || RecordedLoad::read("h200-b8827-mixed-long-nographs", 0.0);
        Self(BTreeMap::from([
            (Base::Mixed, short()),
            (Base::MixedLong, long()),
            (Base::Shuffled, short().shuffled()),
            (Base::ShuffledLong, long().shuffled()),
            (Base::Busy, long().busier(5)),
            (Base::Text, RecordedLoad::read("h200-b8827-text-llama", 0.0)),
            (Base::Conversations, RecordedLoad::read("h200-b8827-conversations", 0.0)),
            (Base::Images, RecordedLoad::read("b8827-gemma4-image-nographs", 0.0)),
            (Base::StillMixed, RecordedLoad::read("h200-b11549-gemma4-mixed", 0.0)),
        ]))
    }
}

fn seeds() -> u64 {
    let given = std::env::var("WARDEN_TRUTH_SEEDS").ok().and_then(|text| text.parse().ok());
    given.unwrap_or(8)
}

fn rows(of: impl Fn(&Leaking) -> bool) -> Vec<Row> {
    let bases = Bases::read();
    let mut rows = Vec::new();
    println!("{}", Row::HEAD);
    for kind in leaks::all().into_iter().filter(of) {
        let load = &bases.0[&kind.base];
        let runs = (0..seeds()).map(|seed| Seen::of(load, &kind, seed)).collect();
        let row = Row { kind, runs };
        row.print();
        rows.push(row);
    }
    rows
}

/// Limits of error rates. All rates are printed before the first failure.
#[derive(Default)]
struct Bounds {
    broken: Vec<String>,
}

impl Bounds {
    /// Requires that `hits` is at most this share of `all`.
    fn at_most(&mut self, share: f64, what: &str, (hits, all): (usize, usize)) {
        println!("{what}: {}", rate(hits, all));
        if real(hits) > share * real(all) {
            self.broken.push(format!("{what}: {}, more than {share}", rate(hits, all)));
        }
    }

    #[track_caller]
    fn hold(self) {
        assert!(self.broken.is_empty(), "{}", self.broken.join("\n"));
    }
}

fn real(number: usize) -> f64 {
    recorded::real(number as u64)
}

#[test]
fn leaks_of_known_size_are_found_and_nobody_is_wrongly_blamed() {
    let rows = rows(|_| true);
    let all = rows.iter().map(|row| row.runs.len()).sum::<usize>();
    let runs = |what: fn(&Row) -> usize| (rows.iter().map(what).sum::<usize>(), all);
    let forecasts = |of: fn(&&Row) -> bool, what: fn(&Row) -> (usize, usize)| {
        rows.iter().filter(of).map(what).fold((0, 0), |sum, of| (sum.0 + of.0, sum.1 + of.1))
    };
    let late = |row: &&Row| row.kind.name.starts_with("from request 2,000 on");
    let mut bounds = Bounds::default();
    bounds.at_most(0.03, "missed", runs(Row::missed));
    bounds.at_most(0.01, "called harmless after that", runs(Row::fell_back));
    bounds.at_most(0.01, "wrong blame at the first verdict", runs(Row::wrong_first));
    bounds.at_most(0.05, "wrong blame at some time where one unit pays", runs(Row::wrong_of_one));
    bounds.at_most(0.72, "no right blame at the end", runs(Row::unsaid));
    bounds.at_most(0.01, "forecasts of late leaks that are too long by half", forecasts(late, Row::too_long));
    bounds.at_most(0.10, "forecasts whose interval misses the truth", forecasts(|_| true, Row::astray));
    bounds.hold();
}

/// Returns two flags: a memory was called leaking; a memory was called suspected or leaking.
fn alarms(load: &RecordedLoad, kind: &Healthy, seed: u64) -> (bool, bool) {
    let mut monitor = GrowthMonitor::new(&defaults().growth);
    monitor.set_allowance(HOST, kind.declared);
    let mut worst = GrowthVerdict::Warming;
    for sample in load.run(seed, kind.requests, (kind.course)(seed)) {
        monitor.observe(&sample);
        worst = monitor.growth().iter().map(|growth| growth.verdict).fold(worst, GrowthVerdict::max);
    }
    (worst == GrowthVerdict::Leaking, worst >= GrowthVerdict::Suspected)
}

#[test]
fn harmless_growth_of_known_size_is_not_called_a_leak() {
    let bases = Bases::read();
    println!("| no leak | called leaking | suspected or leaking |\n|---|---|---|");
    let (mut called, mut all) = (0, 0);
    for kind in healthy::all() {
        let load = &bases.0[&kind.base];
        // Heaps that settle by several hundred MiB are the hardest case.
        let seeds = if kind.name.starts_with("settles") { 3 * seeds() } else { seeds() };
        let runs: Vec<(bool, bool)> = (0..seeds).map(|seed| alarms(load, &kind, seed)).collect();
        let leaking = runs.iter().filter(|run| run.0).count();
        let suspected = runs.iter().filter(|run| run.1).count();
        println!("| {} | {} | {} |", kind.name, rate(leaking, runs.len()), rate(suspected, runs.len()));
        called += leaking;
        all += runs.len();
    }
    let mut bounds = Bounds::default();
    bounds.at_most(0.002, "called leaking", (called, all));
    bounds.hold();
}
