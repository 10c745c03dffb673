//! The answer to `GET /series`, with the same values as the page's plot.

use serde::{Deserialize, Serialize};
use warden_policies::growth::{AllowanceFill, GrowthLine, GrowthVerdict};
use warden_policies::rollup::{ReadingBucket, RollupContext};
use warden_policies::{MemoryKind, Reason, phrases};
use warden_supervisor::{BackendView, FleetView};

use super::ask::SeriesQuery;
use super::marks::SeriesMark;
use super::store::{FoundSeries, SeriesSpan, SeriesStore, SeriesStoreError, unix_seconds};
use crate::growth_text;

/// The answer without a model: the recorded series.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SeriesList {
    /// Current time in seconds since 1970.
    pub now: u64,
    /// Sentence that says where the series are stored.
    pub place: String,
    /// The series, with the time that each covers.
    pub series: Vec<SeriesSpan>,
}

/// The answer for a model: its recorded memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MemoryData {
    /// Name of the model.
    pub model: String,
    /// In seconds since 1970, like all times here except those of marks.
    pub now: u64,
    /// Start of the range.
    pub from: u64,
    /// End of the range.
    pub to: u64,
    /// Name of a range that ends at the current time, such as `6h`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub range: Option<String>,
    /// Sentence that says where the series are stored.
    pub place: String,
    /// Ordered by replica.
    pub series: Vec<SeriesData>,
    /// Actions and events within the range.
    pub marks: Vec<SeriesMark>,
}

/// Recorded readings of one kind of memory of one replica.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SeriesData {
    /// Number of the replica.
    pub replica: u32,
    /// Kind of memory.
    pub memory: MemoryKind,
    /// Time between points, in seconds.
    pub seconds: u64,
    /// The readings, oldest first.
    pub points: Vec<SeriesPoint>,
    /// Absent if no process runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub present: Option<SeriesStatus>,
}

/// Summary of the readings within a span of time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SeriesPoint {
    /// Start of the span.
    pub at: u64,
    /// Number of readings.
    pub count: u64,
    /// Least reading in bytes.
    pub min: u64,
    /// Mean of the readings in bytes.
    pub mean: u64,
    /// Largest reading in bytes.
    pub max: u64,
    /// Last reading in bytes.
    pub last: u64,
    /// The readings cover the whole span.
    pub whole: bool,
    /// Verdict, budgets and other lines of the plot at that time.
    #[serde(flatten)]
    pub lines: RollupContext,
}

/// Facts about the running process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SeriesStatus {
    /// Number of the process.
    pub generation: u64,
    /// Bytes held now.
    pub bytes: u64,
    /// Verdict on the growth.
    pub verdict: GrowthVerdict,
    /// Meaning of the verdict, in words.
    pub means: String,
    /// The detector's line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub law: Option<GrowthLine>,
    /// Growth, as text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slope: Option<String>,
    /// Unit of work that causes the growth, as text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blame: Option<String>,
    /// Size and fill level of declared caches.
    pub fill: AllowanceFill,
    /// Fill level of declared caches, as text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept: Option<String>,
    /// Declared caches by pool, as text.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub allowance: Vec<String>,
    /// Budgets in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub soft: Option<u64>,
    /// Hard budget in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hard: Option<u64>,
    /// When the growth reaches limits.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub forecasts: Vec<LimitForecast>,
    /// Next action, as text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// When the growth reaches a limit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LimitForecast {
    /// Reason for a replacement at this limit.
    pub reason: Reason,
    /// The limit in bytes.
    pub limit: u64,
    /// Earliest, likely and latest time. Absent if the rate of requests is unknown, or beyond a thousand
    /// years.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub early: Option<u64>,
    /// Likely time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<u64>,
    /// Latest time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub late: Option<u64>,
    /// The forecast, as text.
    pub words: String,
}

/// Error: there is no series to show.
#[derive(Debug, thiserror::Error)]
pub enum NoSeriesError {
    /// No such model is configured or recorded.
    #[error("no series are kept of a model `{0}`: `GET /series` lists what there is")]
    Unknown(String),
    /// The disk does not answer, or cannot be read.
    #[error(transparent)]
    Store(#[from] SeriesStoreError),
}

/// Lists the recorded series.
///
/// # Errors
/// The disk does not answer.
pub async fn list_series(store: &SeriesStore) -> Result<SeriesList, SeriesStoreError> {
    let series = store.spans().await?;
    Ok(SeriesList { now: unix_seconds(), place: store.storage_place(), series })
}

/// Adds current values from `view` to the recorded memory.
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
    // Prefer the process of the last readings in the plot, else the newest process.
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
        // About a thousand years: omit later times.
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
        means: phrases::verdict_phrase(own.verdict).to_owned(),
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
