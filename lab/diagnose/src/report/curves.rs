//! Plots one memory of a leg: readings, the fitted law with its band, declared caches, budgets, and events.

use warden_experiment::{Ended, Line, Reading, SeriesFinding, Settles};
use warden_pages::plot::{
    Area, AreaKind, Curve, CurveKind, Law, Level, Limit, LimitKind, Mark, MarkKind, Plot,
};
use warden_policies::recycle::Budget;
use warden_policies::units::exact;
use warden_policies::{ByteSize, MemoryKind, Sample, phrases, secrets};

use super::table::name;
use super::{LegReport, Report};

/// The plot of one memory of a leg.
pub(super) fn plot(report: &Report, leg: &LegReport, found: &SeriesFinding) -> Plot {
    let series = found.series;
    let budget = report.budgets.iter().find(|one| one.series == series).map(|one| one.budget);
    Plot {
        title: format!("{} under {}", warden_pages::words::memory(series), name(&leg.finding)),
        curves: curves(&leg.readings, series),
        laws: law(leg, found).into_iter().collect(),
        limits: limits(budget.unwrap_or_default()),
        areas: declared(leg, found).into_iter().collect(),
        marks: marks(leg, found),
        ..Plot::default()
    }
}

fn curves(readings: &[Reading], series: MemoryKind) -> Vec<Curve> {
    let levels = |of: &dyn Fn(&Sample) -> Option<u64>| -> Vec<Level> {
        let level = |reading: &Reading| {
            Some(Level::exact(exact(reading.sample.work.requests), exact(of(&reading.sample)?)))
        };
        readings.iter().filter_map(level).collect()
    };
    let all = levels(&|sample| sample.charged(series));
    let rest = levels(&|sample| Some(sample.charged(series)?.saturating_sub(sample.pooled(series)?)));
    let pooled = readings.iter().any(|reading| reading.sample.pooled(series).is_some_and(|pool| pool > 0));
    let curve = |kind, name: &str, stretch| Curve { kind, name: name.to_owned(), stretches: vec![stretch] };
    let mut curves = vec![curve(CurveKind::Readings, "readings between requests", all)];
    if pooled {
        curves.push(curve(CurveKind::WithoutKept, "without what it keeps on purpose", rest));
    }
    curves
}

fn law(leg: &LegReport, found: &SeriesFinding) -> Option<Law> {
    let slope = found.per_request?;
    let line = Line::through(found.series, &leg.readings, slope)?;
    let level = |x: f64| {
        let at = line.at(x);
        Level { x, low: at.low, value: at.value, high: at.high }
    };
    // The band is narrowest in the middle.
    let levels = vec![level(line.from), level(f64::midpoint(line.from, line.to)), level(line.to)];
    Some(Law { name: format!("the law: {}", phrases::slope(&slope)), levels })
}

fn limits(budget: Budget) -> Vec<Limit> {
    let limit = |kind, bytes: Option<u64>| Some(Limit::new(kind, exact(bytes?)));
    [limit(LimitKind::Soft, budget.soft), limit(LimitKind::Hard, budget.hard)].into_iter().flatten().collect()
}

/// Declared caches that are not measured, drawn above the first reading.
fn declared(leg: &LegReport, found: &SeriesFinding) -> Option<Area> {
    let most = leg.readings.iter().map(|reading| reading.allowed).max().filter(|most| *most > 0)?;
    let foot = exact(found.first);
    let level = |reading: &Reading| {
        Level::between(exact(reading.sample.work.requests), foot, foot + exact(reading.allowed))
    };
    (found.series == MemoryKind::Host).then(|| Area {
        kind: AreaKind::Declared,
        name: format!("declared, told to keep: up to {}", ByteSize(most)),
        stretches: vec![leg.readings.iter().map(level).collect()],
    })
}

/// Events of a leg that concern this memory.
fn marks(leg: &LegReport, found: &SeriesFinding) -> Vec<Mark> {
    let mut marks = Vec::new();
    // The last words of a server may quote a key.
    let mut mark = |requests: u64, kind, why: String| {
        marks.push(Mark { x: exact(requests), kind, why: secrets::text(&why) });
    };
    if let Some(first) = leg.readings.first() {
        let why =
            format!("a fresh process, ready after {:.1} s, has had its warm-up", leg.ready_after_seconds);
        mark(first.sample.work.requests, MarkKind::Start, why);
    }
    for two in leg.readings.windows(2) {
        let times = two[1].sample.reclaims.saturating_sub(two[0].sample.reclaims);
        if times > 0 {
            mark(two[1].sample.work.requests, MarkKind::Reclaim, "memory was asked back".to_owned());
        }
    }
    let begin = leg.readings.first().map_or(0, |reading| reading.sample.work.requests);
    if let Settles::Yes { at_request } = found.settles
        && at_request > begin
    {
        mark(at_request, MarkKind::Other, "from here on it grew no more".to_owned());
    }
    let last = leg.finding.requests;
    let other = |why: &str| Some((last, MarkKind::Other, why.to_owned()));
    let end = match (&leg.finding.crash, &leg.finding.ended) {
        (Some(crash), _) => Some((crash.at_request, MarkKind::Crash, crash.why.clone())),
        (None, Ended::Crashed { why } | Ended::Killed { why }) => Some((last, MarkKind::Crash, why.clone())),
        (None, Ended::Failed { why } | Ended::OutOfMemory { why }) => other(why),
        (None, Ended::Early) => other("ended: the rest would change nothing"),
        (None, Ended::OutOfTime) => other("ended: the time for a leg was over"),
        (None, Ended::Interrupted) => other("interrupted"),
        (None, Ended::Complete) => None,
    };
    if let Some((requests, kind, why)) = end {
        mark(requests, kind, why);
    }
    // A crash during a request lies one request beyond the last reading, where the plot has ended.
    let end = leg.readings.last().map_or(0, |reading| reading.sample.work.requests);
    for mark in &mut marks {
        mark.x = mark.x.min(exact(end));
    }
    marks
}
