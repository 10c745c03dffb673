//! Sentences about verdicts and decisions, shared by status, events, logs and replays.

use std::time::Duration;

use crate::growth::{AllowanceFill, GrowthBlame, GrowthForecast, GrowthVerdict, IntervalEstimate};
use crate::units::{ByteAmount, MIB, as_f64, format_span};
use crate::{ByteSize, MemoryKind, Reason, RecycleDecision};

/// Formats growth per request with its interval, always in MiB: `+4.42 MiB a request (4.40 to 4.45)`.
pub fn slope_phrase(slope: &IntervalEstimate) -> String {
    let mib = |bytes: f64| {
        let mib = bytes / as_f64(MIB);
        if !mib.is_finite() || mib.abs() >= 1e9 {
            return "?".to_owned();
        }
        match mib.abs() {
            // Avoids a negative zero.
            0.0..5e-5 => "0.00".to_owned(),
            5e-5..0.1 => format!("{mib:.4}"),
            _ => format!("{mib:.2}"),
        }
    };
    let value = mib(slope.value);
    let sign = if value.starts_with('-') { "" } else { "+" };
    format!("{sign}{value} MiB a request ({} to {})", mib(slope.low), mib(slope.high))
}

/// Formats growth, such as `+4.42 MiB`; never as a negative zero.
pub fn growth_phrase(bytes: f64) -> String {
    let mib = bytes / as_f64(MIB);
    format!("{:+.2} MiB", if mib.abs() < 0.005 { 0.0 } else { mib })
}

/// Explains a verdict in a sentence.
pub const fn verdict_phrase(verdict: GrowthVerdict) -> &'static str {
    match verdict {
        GrowthVerdict::Warming => {
            "Too little work was done to say anything, or the growth of the start is not over yet."
        }
        GrowthVerdict::Steady => "It does not grow with the work that is done.",
        GrowthVerdict::Bounded => "It grows within the declared caches, and ends when those are full.",
        GrowthVerdict::Suspected => "It grows with the work; more work is needed before it is called a leak.",
        GrowthVerdict::Leaking => {
            "It keeps growing with the work, beyond the declared caches, without a sign of an end."
        }
    }
}

/// Formats the cause of growth: `each image pays 4.42 MiB (98 % of the growth)`.
pub fn blame_phrase(blame: &GrowthBlame) -> String {
    match blame {
        GrowthBlame::Pays { unit, bytes_per_unit, share } => {
            let (unit, amount) = (unit.noun(), ByteAmount(*bytes_per_unit));
            format!("each {unit} pays {amount:.2} ({:.0} % of the growth)", share * 100.0)
        }
        GrowthBlame::Undecided { why } => format!("nothing is blamed: {}", why.trim_end_matches('.')),
    }
}

/// Formats the use of the declared caches; `None` without such caches.
pub fn fill_phrase(fill: &AllowanceFill) -> Option<String> {
    (fill.allowed > 0).then(|| {
        let percent = as_f64(fill.used) / as_f64(fill.allowed) * 100.0;
        format!("{} of {} declared ({percent:.0} %)", ByteSize(fill.used), ByteSize(fill.allowed))
    })
}

/// Formats a forecast: `in 120 requests (100 to 140), about 35 min (30 min to 42 min)`.
pub fn forecast_phrase(forecast: &GrowthForecast) -> String {
    let GrowthForecast { requests, seconds, .. } = forecast;
    let mut text = format!(
        "in {} requests ({} to {})",
        count_phrase(requests.value),
        count_phrase(requests.low),
        count_phrase(requests.high)
    );
    if let Some(seconds) = seconds {
        text.extend([format!(
            ", {} ({} to {})",
            time_phrase(seconds.value),
            time_phrase(seconds.low),
            time_phrase(seconds.high)
        )]);
    }
    text
}

/// Formats a number of requests; infinity is `any number`.
fn count_phrase(number: f64) -> String {
    if number >= 1e9 { "any number".to_owned() } else { format!("{:.0}", number.max(0.0)) }
}

/// Formats a time in its two largest units; more than a year is only called `over a year`.
pub fn time_phrase(seconds: f64) -> String {
    if seconds >= 365.0 * 86_400.0 {
        return "over a year".to_owned();
    }
    format_span(Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or_default())
}

/// Formats a decision: `replace it when quiet (host_soft): host memory passed the soft budget, 2.0 GiB`.
pub fn decision_phrase(decision: &RecycleDecision) -> Option<String> {
    let why = decision.reason?;
    let limit = decision.limit_bytes.map(|bytes| format!(", {}", ByteSize(bytes))).unwrap_or_default();
    // Reasons about host memory already name the memory, except for growth.
    let series = decision.series.filter(|series| *series != MemoryKind::Host || why == Reason::Growth);
    let series = series.map(|series| format!("{series}: ")).unwrap_or_default();
    Some(format!("{} ({why}): {series}{}{limit}", decision.action.phrase(), why.phrase()))
}

#[cfg(test)]
mod tests;
