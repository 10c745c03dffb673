//! Plots one kind of memory of a leg: readings, fitted line with its band, caches, budgets and events.

use warden_experiment::{FittedLine, GrowthEnd, LegEnd, LegReading, SeriesFinding};
use warden_pages::plot::{
    CurveKind, LinePlot, PlotArea, PlotCurve, PlotLaw, PlotLevel, PlotLimit, PlotLimitKind, PlotMark,
    PlotMarkKind,
};
use warden_policies::recycle::MemoryBudget;
use warden_policies::units::as_f64;
use warden_policies::{BackendSample, ByteSize, MemoryKind, phrases, secrets};

use super::table::leg_name;
use super::{DiagnoseReport, LegReport};

pub(super) fn memory_plot(report: &DiagnoseReport, leg: &LegReport, found: &SeriesFinding) -> LinePlot {
    let series = found.series;
    let budget = report.budgets.iter().find(|one| one.series == series).map(|one| one.budget);
    LinePlot {
        title: format!("{} under {}", warden_pages::words::memory_name(series), leg_name(&leg.finding)),
        curves: reading_curves(&leg.readings, series),
        laws: law_line(leg, found).into_iter().collect(),
        limits: budget_limits(budget.unwrap_or_default()),
        areas: declared_area(leg, found).into_iter().collect(),
        marks: event_marks(leg, found),
        ..LinePlot::default()
    }
}

fn reading_curves(readings: &[LegReading], series: MemoryKind) -> Vec<PlotCurve> {
    let levels = |of: &dyn Fn(&BackendSample) -> Option<u64>| -> Vec<PlotLevel> {
        let level = |reading: &LegReading| {
            Some(PlotLevel::exact(as_f64(reading.sample.work.requests), as_f64(of(&reading.sample)?)))
        };
        readings.iter().filter_map(level).collect()
    };
    let all = levels(&|sample| sample.charged(series));
    let rest = levels(&|sample| Some(sample.charged(series)?.saturating_sub(sample.pooled(series)?)));
    let pooled = readings.iter().any(|reading| reading.sample.pooled(series).is_some_and(|pool| pool > 0));
    let curve =
        |kind, name: &str, stretch| PlotCurve { kind, name: name.to_owned(), stretches: vec![stretch] };
    let mut curves = vec![curve(CurveKind::Readings, "readings between requests", all)];
    if pooled {
        curves.push(curve(CurveKind::WithoutKept, "without what it keeps on purpose", rest));
    }
    curves
}

fn law_line(leg: &LegReport, found: &SeriesFinding) -> Option<PlotLaw> {
    let slope = found.per_request?;
    let line = FittedLine::through_readings(found.series, &leg.readings, slope)?;
    let level = |x: f64| {
        let at = line.value_at(x);
        PlotLevel { x, low: at.low, value: at.value, high: at.high }
    };
    // The band is narrowest in the middle.
    let levels = vec![level(line.from), level(f64::midpoint(line.from, line.to)), level(line.to)];
    Some(PlotLaw { name: format!("the law: {}", phrases::slope_phrase(&slope)), levels })
}

fn budget_limits(budget: MemoryBudget) -> Vec<PlotLimit> {
    let limit = |kind, bytes: Option<u64>| Some(PlotLimit::new(kind, as_f64(bytes?)));
    [limit(PlotLimitKind::Soft, budget.soft), limit(PlotLimitKind::Hard, budget.hard)]
        .into_iter()
        .flatten()
        .collect()
}

/// Returns the caches that the server may fill and that are not measured, drawn above the first reading.
fn declared_area(leg: &LegReport, found: &SeriesFinding) -> Option<PlotArea> {
    let most = leg.readings.iter().map(|reading| reading.allowed).max().filter(|most| *most > 0)?;
    let foot = as_f64(found.first);
    let level = |reading: &LegReading| {
        PlotLevel::between(as_f64(reading.sample.work.requests), foot, foot + as_f64(reading.allowed))
    };
    (found.series == MemoryKind::Host).then(|| PlotArea {
        name: format!("declared, told to keep: up to {}", ByteSize(most)),
        stretches: vec![leg.readings.iter().map(level).collect()],
    })
}

fn event_marks(leg: &LegReport, found: &SeriesFinding) -> Vec<PlotMark> {
    let mut marks = Vec::new();
    // The server's last log lines may contain an API key.
    let mut mark = |requests: u64, kind, why: String| {
        marks.push(PlotMark { x: as_f64(requests), kind, why: secrets::redact_text(&why) });
    };
    if let Some(first) = leg.readings.first() {
        let why =
            format!("a fresh process, ready after {:.1} s, has had its warm-up", leg.ready_after_seconds);
        mark(first.sample.work.requests, PlotMarkKind::Start, why);
    }
    for two in leg.readings.windows(2) {
        let times = two[1].sample.reclaims.saturating_sub(two[0].sample.reclaims);
        if times > 0 {
            mark(two[1].sample.work.requests, PlotMarkKind::Reclaim, "memory was asked back".to_owned());
        }
    }
    let begin = leg.readings.first().map_or(0, |reading| reading.sample.work.requests);
    if let GrowthEnd::Yes { at_request } = found.settles
        && at_request > begin
    {
        mark(at_request, PlotMarkKind::Other, "from here on it grew no more".to_owned());
    }
    let last = leg.finding.requests;
    let other = |why: &str| Some((last, PlotMarkKind::Other, why.to_owned()));
    let end = match (&leg.finding.crash, &leg.finding.ended) {
        (Some(crash), _) => Some((crash.at_request, PlotMarkKind::Crash, crash.why.clone())),
        (None, LegEnd::Crashed { why } | LegEnd::Killed { why }) => {
            Some((last, PlotMarkKind::Crash, why.clone()))
        }
        (None, LegEnd::Failed { why } | LegEnd::OutOfMemory { why }) => other(why),
        (None, LegEnd::Early) => other("ended: the rest would change nothing"),
        (None, LegEnd::OutOfTime) => other("ended: the time for a leg was over"),
        (None, LegEnd::Interrupted) => other("interrupted"),
        (None, LegEnd::Complete) => None,
    };
    if let Some((requests, kind, why)) = end {
        mark(requests, kind, why);
    }
    // A crash lies one request beyond the last reading, where the plot ends.
    let end = leg.readings.last().map_or(0, |reading| reading.sample.work.requests);
    for mark in &mut marks {
        mark.x = mark.x.min(as_f64(end));
    }
    marks
}
