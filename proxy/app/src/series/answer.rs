//! The answer to `GET /series`. The page draws the same values, so programs and people see the same.

use serde::{Deserialize, Serialize};
use warden_policies::growth::{AllowanceFill, GrowthLine, GrowthVerdict};
use warden_policies::rollup::{ReadingBucket, RollupContext};
use warden_policies::{MemoryKind, Reason, phrases};
use warden_supervisor::{BackendView, FleetView};

use super::ask::SeriesQuery;
use super::marks::SeriesMark;
use super::store::{FoundSeries, SeriesSpan, SeriesStore, SeriesStoreError, unix_seconds};
use crate::growth_text;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct SeriesList {
    pub(crate) now: u64,
    /// Text that says where the series are stored.
    pub(crate) place: String,
    pub(crate) series: Vec<SeriesSpan>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct MemoryData {
    pub(crate) model: String,
    /// Current time in seconds since 1970, the unit of all times here except those of marks.
    pub(crate) now: u64,
    pub(crate) from: u64,
    pub(crate) to: u64,
    /// Name of the range (`6h`), if the range always ends at the current time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) range: Option<String>,
    /// Text that says where the series are stored.
    pub(crate) place: String,
    /// The model's series, replica by replica.
    pub(crate) series: Vec<SeriesData>,
    pub(crate) marks: Vec<SeriesMark>,
}

/// Recorded series: one kind of memory of one replica.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct SeriesData {
    pub(crate) replica: u32,
    pub(crate) memory: MemoryKind,
    /// Seconds from point to point.
    pub(crate) seconds: u64,
    pub(crate) points: Vec<SeriesPoint>,
    /// Current values; absent if no process runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) present: Option<SeriesStatus>,
}

/// The readings within a span of time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct SeriesPoint {
    /// Start of the span.
    pub(crate) at: u64,
    pub(crate) count: u64,
    pub(crate) min: u64,
    pub(crate) mean: u64,
    pub(crate) max: u64,
    pub(crate) last: u64,
    /// The readings cover the whole span.
    pub(crate) whole: bool,
    /// Verdict, budgets and other lines at that time.
    #[serde(flatten)]
    pub(crate) lines: RollupContext,
}

/// Current values of one kind of memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct SeriesStatus {
    pub(crate) generation: u64,
    pub(crate) bytes: u64,
    pub(crate) verdict: GrowthVerdict,
    pub(crate) means: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) law: Option<GrowthLine>,
    /// Growth, in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) slope: Option<String>,
    /// Unit of work that the growth follows, in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) blame: Option<String>,
    /// Declared caches, and how full they are.
    pub(crate) fill: AllowanceFill,
    /// Fill level of declared caches, in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) kept: Option<String>,
    /// Declared caches, pool by pool, in words.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) allowance: Vec<String>,
    /// Budgets in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) soft: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) hard: Option<u64>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) forecasts: Vec<LimitForecast>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) next: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct LimitForecast {
    /// Reason of a replacement at this limit.
    pub(crate) reason: Reason,
    pub(crate) limit: u64,
    /// Earliest, likely and latest moment; absent without a known rate of requests, or beyond a thousand
    /// years.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) early: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) at: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) late: Option<u64>,
    pub(crate) words: String,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum NoSeriesError {
    /// The model is unknown, and nothing is recorded of it.
    #[error("no series are kept of a model `{0}`: `GET /series` lists what there is")]
    Unknown(String),
    #[error(transparent)]
    Store(#[from] SeriesStoreError),
}

pub(crate) async fn list_series(store: &SeriesStore) -> Result<SeriesList, SeriesStoreError> {
    let series = store.spans().await?;
    Ok(SeriesList { now: unix_seconds(), place: store.storage_place(), series })
}

/// Returns the recorded memory of a model, with its current values from `view`.
pub(crate) async fn memory_of_model(
    store: &SeriesStore,
    view: &FleetView,
    model: &str,
    ask: &SeriesQuery,
) -> Result<MemoryData, NoSeriesError> {
    let now = unix_seconds();
    let range = ask.range(now);
    let found = store.find(model, range, now).await?;
    let own: Vec<&BackendView> = view
        .models
        .iter()
        .chain(&view.canaries)
        .filter(|own| own.name.as_str() == model)
        .flat_map(|own| &own.backends)
        .collect();
    let marks = store.marks(model, range.from.saturating_mul(1000), range.to.saturating_mul(1000));
    let known = view.models.iter().chain(&view.canaries).any(|own| own.name.as_str() == model);
    if found.is_empty() && marks.is_empty() && !known {
        return Err(NoSeriesError::Unknown(model.to_owned()));
    }
    let series = found.into_iter().map(|found| series_data(found, &own, now)).collect();
    let name = match ask.when {
        super::ask::SeriesRange::Last(name, _) => Some(name.to_owned()),
        super::ask::SeriesRange::Between(..) => None,
    };
    Ok(MemoryData {
        model: model.to_owned(),
        now,
        from: range.from,
        to: range.to,
        range: name,
        place: store.storage_place(),
        series,
        marks,
    })
}

fn series_data(found: FoundSeries, own: &[&BackendView], now: u64) -> SeriesData {
    let FoundSeries { key, width, buckets } = found;
    let last = buckets.last().map_or(0, |bucket| bucket.lines.generation);
    // Use the process whose readings are the last in the plot, or else the newest process.
    let of_replica = || own.iter().filter(|backend| backend.replica == key.replica);
    let backend = of_replica()
        .find(|backend| backend.generation.is_some_and(|own| own.0 == last))
        .or_else(|| of_replica().next_back());
    SeriesData {
        replica: key.replica,
        memory: key.memory,
        seconds: buckets.first().map_or(width, |bucket| bucket.seconds),
        points: buckets.iter().map(series_point).collect(),
        present: backend.and_then(|backend| current_status(backend, key.memory, now)),
    }
}

fn series_point(bucket: &ReadingBucket) -> SeriesPoint {
    SeriesPoint {
        at: bucket.start,
        count: bucket.count,
        min: bucket.min,
        mean: bucket.mean_bytes(),
        max: bucket.max,
        last: bucket.last,
        whole: bucket.is_whole(),
        lines: bucket.lines,
    }
}

fn current_status(backend: &BackendView, memory: MemoryKind, now: u64) -> Option<SeriesStatus> {
    let bytes = backend.held(memory)?;
    let known = backend.memory.growth.iter().find(|growth| growth.series == memory).cloned();
    let own = known.unwrap_or_else(|| warden_policies::growth::SeriesGrowth::without_readings(memory));
    let budget =
        backend.memory.budgets.iter().find(|budget| budget.series == memory).map(|budget| budget.budget);
    let forecasts = backend.memory.forecasts.iter().filter(|one| one.series == memory).map(|one| {
        // A moment beyond a thousand years is left out.
        let at = |seconds: f64| {
            (seconds < 3.2e10).then(|| now.saturating_add(warden_policies::units::truncate_to_u64(seconds)))
        };
        let seconds = one.forecast.seconds;
        LimitForecast {
            reason: one.reason,
            limit: one.forecast.limit,
            early: seconds.and_then(|seconds| at(seconds.low)),
            at: seconds.and_then(|seconds| at(seconds.value)),
            late: seconds.and_then(|seconds| at(seconds.high)),
            words: phrases::forecast_phrase(&one.forecast),
        }
    });
    let concerns =
        |next: &&warden_supervisor::PolicyView| next.decision.series.is_none_or(|series| series == memory);
    Some(SeriesStatus {
        generation: backend.generation.map_or(0, |generation| generation.0),
        bytes,
        verdict: own.verdict,
        means: warden_pages::words::explain_verdict(own.verdict).to_owned(),
        law: own.law,
        slope: own.slope.as_ref().map(phrases::slope_phrase),
        blame: own.blame.as_ref().map(phrases::blame_phrase),
        fill: own.fill,
        kept: phrases::fill_phrase(&own.fill),
        allowance: if memory == MemoryKind::Host { backend.memory.allowance.clone() } else { Vec::new() },
        soft: budget.and_then(|budget| budget.soft),
        hard: budget.and_then(|budget| budget.hard),
        forecasts: forecasts.collect(),
        next: backend.next.as_ref().filter(concerns).and_then(growth_text::next_action),
    })
}
