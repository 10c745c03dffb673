//! What the detector and the policy say, in words: for status, events, logs and replays alike. Values in, text out.

use std::time::Duration;

use crate::growth::{Blame, Fill, Forecast, Interval};
use crate::units::{Amount, MIB, exact, span};
use crate::{ByteSize, Decision, MemoryKind, Reason};

/// Growth per request with its interval, always in MiB, so that figures compare: `+4.42 MiB a request (4.40 to 4.45)`. An
/// end that is not known is `?`.
pub fn slope(slope: &Interval) -> String {
    let mib = |bytes: f64| {
        let mib = bytes / exact(MIB);
        if !mib.is_finite() || mib.abs() >= 1e9 {
            return "?".to_owned();
        }
        if mib == 0.0 || mib.abs() >= 0.1 { format!("{mib:.2}") } else { format!("{mib:.4}") }
    };
    let sign = if slope.value < 0.0 { "" } else { "+" };
    format!("{sign}{} MiB a request ({} to {})", mib(slope.value), mib(slope.low), mib(slope.high))
}

/// Who pays: `each image pays 4.42 MiB (98 % of the growth)`.
pub fn blame(blame: &Blame) -> String {
    match blame {
        Blame::Pays { unit, bytes_per_unit, share } => {
            let (unit, amount) = (unit.noun(), Amount(*bytes_per_unit));
            format!("each {unit} pays {amount:.2} ({:.0} % of the growth)", share * 100.0)
        }
        Blame::Undecided { why } => format!("nothing is blamed: {}", why.trim_end_matches('.')),
    }
}

/// How full the pools are that the server is told to keep.
pub fn fill(fill: &Fill) -> Option<String> {
    (fill.allowed > 0).then(|| {
        let percent = exact(fill.used) / exact(fill.allowed) * 100.0;
        format!("{} of {} that it may keep ({percent:.0} %)", ByteSize(fill.used), ByteSize(fill.allowed))
    })
}

/// What is left until a limit: `in 120 requests (100 to 140), about 35 min (30 min to 42 min)`.
pub fn forecast(forecast: &Forecast) -> String {
    let Forecast { requests, seconds, .. } = forecast;
    let mut text = format!(
        "in {} requests ({} to {})",
        count(requests.value),
        count(requests.low),
        count(requests.high)
    );
    if let Some(seconds) = seconds {
        text.extend([format!(", {} ({} to {})", time(seconds.value), time(seconds.low), time(seconds.high))]);
    }
    text
}

/// A number of requests; what has no end is `any number`.
fn count(number: f64) -> String {
    if number >= 1e9 { "any number".to_owned() } else { format!("{:.0}", number.max(0.0)) }
}

/// A time for people, in its two largest units; beyond a year nobody forecasts.
pub fn time(seconds: f64) -> String {
    if seconds >= 365.0 * 86_400.0 {
        return "over a year".to_owned();
    }
    span(Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or_default())
}

/// A decision in one line: `replace it when quiet (host_soft): host memory passed the soft budget, 2.0 GiB`.
pub fn decision(decision: &Decision) -> Option<String> {
    let why = decision.reason?;
    let limit = decision.limit_bytes.map(|bytes| format!(", {}", ByteSize(bytes))).unwrap_or_default();
    // Reasons about the host name it already.
    let series = decision.series.filter(|series| *series != MemoryKind::Host || why == Reason::Growth);
    let series = series.map(|series| format!("{series}: ")).unwrap_or_default();
    Some(format!("{} ({why}): {series}{}{limit}", decision.action.phrase(), why.phrase()))
}

#[cfg(test)]
mod tests {
    use crate::growth::Unit;

    use super::*;

    const MIB: f64 = exact(super::MIB);

    #[test]
    fn growth_reads_as_a_sentence_with_its_interval() {
        let interval = Interval { value: 4.42 * MIB, low: 4.4 * MIB, high: 4.45 * MIB };
        assert_eq!(slope(&interval), "+4.42 MiB a request (4.40 to 4.45)");
        let falling = Interval { value: -0.02 * MIB, low: -0.5 * MIB, high: 0.0 };
        assert_eq!(slope(&falling), "-0.0200 MiB a request (-0.50 to 0.00)");
        let open = Interval { high: f64::MAX, ..interval };
        assert_eq!(slope(&open), "+4.42 MiB a request (4.40 to ?)");
        let image = Blame::Pays { unit: Unit::Image, bytes_per_unit: 4.42 * MIB, share: 0.976 };
        assert_eq!(blame(&image), "each image pays 4.42 MiB (98 % of the growth)");
        let refused = Blame::Undecided { why: "every request has one image.".to_owned() };
        assert_eq!(blame(&refused), "nothing is blamed: every request has one image");
    }

    #[test]
    fn a_forecast_has_requests_and_where_a_rate_is_known_a_time() {
        let requests = Interval { value: 120.4, low: 100.0, high: f64::MAX };
        let mut left = Forecast { limit: 1, requests, seconds: None };
        assert_eq!(forecast(&left), "in 120 requests (100 to any number)");
        left.seconds = Some(Interval { value: 2100.0, low: 61.0, high: f64::MAX });
        assert_eq!(forecast(&left), "in 120 requests (100 to any number), 35 min (1 min 1 s to over a year)");
        assert_eq!(
            (time(90_061.0), time(59.9), time(7200.0)),
            ("1 d 1 h".into(), "59 s".into(), "2 h".into())
        );
    }

    #[test]
    fn pools_that_are_declared_show_how_full_they_are() {
        assert_eq!(fill(&Fill::default()), None);
        let half = Fill { allowed: 2 << 30, used: 1 << 30 };
        assert_eq!(fill(&half).unwrap(), "1.0 GiB of 2.0 GiB that it may keep (50 %)");
    }
}
