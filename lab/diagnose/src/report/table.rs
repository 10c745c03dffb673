//! Formats the table for terminal and page, and its notes.

use warden_experiment::{GrowthEnd, LegEnd, LegFinding, SeriesFinding};
use warden_policies::MemoryKind;
use warden_policies::growth::{GrowthBlame, GrowthVerdict, IntervalEstimate};
use warden_policies::phrases::growth_phrase;
use warden_policies::units;

use super::crash::{crash_lines as told, repeat_text};
use crate::experiment::SkippedWorkload;
use crate::leg::RefusedRequests;

pub(super) const MIB: f64 = units::as_f64(units::MIB);

pub(super) const TABLE_HEAD: [&str; 9] = [
    "WORKLOAD",
    "REQUESTS",
    "MEMORY",
    "A REQUEST",
    "A PROMPT TOKEN",
    "AN OUTPUT TOKEN",
    "STABILIZES",
    "VERDICT",
    "BLAME",
];

/// Returns the cells; the first row is the head.
pub fn table_rows(legs: &[&LegFinding], skipped: &[SkippedWorkload]) -> Vec<Vec<String>> {
    let mut rows = vec![TABLE_HEAD.map(str::to_owned).to_vec()];
    for leg in legs {
        if leg.series.is_empty() && leg.crash.is_none() {
            rows.push(vec![leg_name(leg), leg.requests.to_string(), end_note(&leg.ended)]);
        }
        for (index, found) in leg.series.iter().enumerate() {
            let first = |text: String| if index == 0 { text } else { String::new() };
            rows.push(vec![
                first(leg_name(leg)),
                first(leg.requests.to_string()),
                found.series.to_string(),
                found.per_request.as_ref().map_or_else(|| "?".to_owned(), per_request),
                per_token(found, found.per_prompt_token),
                per_token(found, found.per_output_token),
                settles_cell(found.settles),
                verdict_cell(found).to_owned(),
                blame_cell(found),
            ]);
        }
        if let Some(crash) = &leg.crash {
            let first = |text: String| if leg.series.is_empty() { text } else { String::new() };
            let said = format!("crashed at request {}, {}", crash.at_request, repeat_text(crash));
            rows.push(vec![first(leg_name(leg)), first(leg.requests.to_string()), said]);
        }
    }
    for one in skipped {
        rows.push(vec![one.workload.to_string(), "-".to_owned(), format!("not run: {}", one.why)]);
    }
    rows
}

/// Returns the workload's name, with a remark if the leg ran without the prompt cache.
pub(super) fn leg_name(leg: &LegFinding) -> String {
    if leg.control { format!("{} (no cache)", leg.workload) } else { leg.workload.to_string() }
}

/// Formats growth per request: `+4.42 MiB`, or `0` if the interval contains zero.
fn per_request(slope: &IntervalEstimate) -> String {
    if is_zero_slope(slope) {
        return "0".to_owned();
    }
    growth_phrase(slope.value)
}

fn is_zero_slope(slope: &IntervalEstimate) -> bool {
    slope.low <= 0.0 && slope.high >= 0.0
}

/// Formats growth per token, if the growth per request is not zero and has not stopped.
fn per_token(found: &SeriesFinding, bytes: Option<f64>) -> String {
    match bytes {
        None => "-".to_owned(),
        Some(_) if matches!(found.settles, GrowthEnd::Yes { .. }) => "0".to_owned(),
        Some(_) if found.per_request.as_ref().is_some_and(is_zero_slope) => "0".to_owned(),
        Some(bytes) if bytes.abs() >= 1024.0 => format!("{:+.1} KiB", bytes / 1024.0),
        Some(bytes) => format!("{bytes:+.0} B"),
    }
}

/// Returns the verdict, or `?` after too few readings.
pub(super) fn verdict_cell(found: &SeriesFinding) -> &'static str {
    if found.is_too_short() && !found.verdict.grows() { "?" } else { found.verdict.as_str() }
}

fn settles_cell(settles: GrowthEnd) -> String {
    match settles {
        GrowthEnd::Yes { at_request: 0..=1 } => "yes".to_owned(),
        GrowthEnd::Yes { at_request } => format!("after {at_request}"),
        GrowthEnd::No => "no".to_owned(),
        GrowthEnd::Unknown => "?".to_owned(),
    }
}

fn blame_cell(found: &SeriesFinding) -> String {
    match &found.blame {
        Some(GrowthBlame::Pays { unit, bytes_per_unit, .. }) => {
            let amount = match *bytes_per_unit {
                bytes if bytes >= 0.1 * MIB => format!("{:.2} MiB", bytes / MIB),
                bytes => format!("{:.1} KiB", bytes / 1024.0),
            };
            format!("each {} {amount}", unit.noun())
        }
        Some(GrowthBlame::Undecided { .. }) => "undecided".to_owned(),
        None => String::new(),
    }
}

fn end_note(ended: &LegEnd) -> String {
    match ended {
        // The report has a section for crashes.
        LegEnd::Complete | LegEnd::Early | LegEnd::Crashed { .. } => String::new(),
        LegEnd::OutOfTime => "ended: the time for a leg was over".to_owned(),
        LegEnd::OutOfMemory { why } => format!("ended: {why}"),
        LegEnd::Interrupted => "interrupted".to_owned(),
        LegEnd::Killed { why } => format!("ended: the server was killed from outside: {why}"),
        LegEnd::Failed { why } => format!("the server failed: {why}"),
    }
}

/// Returns notes on the legs, a line each.
pub fn leg_notes(legs: &[&LegFinding]) -> Vec<String> {
    let mut lines = Vec::new();
    for leg in legs {
        lines.extend(leg.crash.iter().flat_map(|crash| told(leg, crash)));
        let said = end_note(&leg.ended);
        if !said.is_empty() {
            lines.push(format!("{}: {said}", leg_name(leg)));
        }
        for found in &leg.series {
            // A leg that crashed cannot be run longer.
            let cut = leg.crash.is_some() && found.is_too_short();
            if found.verdict.leaks()
                && let Some(follows) = found.graphs
            {
                lines.push(format!(
                    "{} {}: it rises with captured graphs, which the memory report counts: {:.2} more a \
                     request, {:.0} KiB each \
                     (correlation {:.2})",
                    leg_name(leg),
                    found.series,
                    follows.per_request,
                    follows.bytes_each / 1024.0,
                    follows.correlation
                ));
            }
            if !cut && let Some(note) = series_note(found, leg.enough) {
                lines.push(format!("{} {}: {note}", leg_name(leg), found.series));
            }
        }
    }
    lines
}

/// Returns a note on refused requests of a leg.
pub fn refusal_note(leg: &LegFinding, refused: &RefusedRequests) -> String {
    let RefusedRequests { requests, why } = refused;
    format!(
        "{}: the server refused {requests} of its requests, and they are not counted; the last: {why}",
        leg_name(leg)
    )
}

fn series_note(found: &SeriesFinding, enough: u64) -> Option<String> {
    if found.is_too_short() {
        return Some(format!("too few readings for a verdict: give `--requests {enough}` or more"));
    }
    let slope = found.per_request?;
    let pooled = found.pooled_per_request.filter(|pooled| *pooled >= 0.1 * slope.value.max(1.0));
    match (found.verdict, found.settles) {
        (GrowthVerdict::Steady | GrowthVerdict::Suspected, GrowthEnd::No) if slope.value >= found.sees => {
            Some(
                "it grows, too unevenly or not long enough to be called a leak: give `--requests` a larger \
                  number"
                    .to_owned(),
            )
        }
        (GrowthVerdict::Steady | GrowthVerdict::Suspected, GrowthEnd::No) => Some(format!(
            "it grows to the end, and too slowly for so few requests: a leak is told from {:.2} MiB a request on; give \
             `--requests` a larger number",
            found.sees / MIB
        )),
        (GrowthVerdict::Bounded, GrowthEnd::Unknown | GrowthEnd::No) => {
            let fills = match pooled {
                Some(pooled) if pooled >= slope.value => {
                    "all of its growth goes into what the server keeps on purpose, which is not full yet"
                        .to_owned()
                }
                Some(pooled) => format!(
                    "{:.2} MiB of {:.2} MiB a request go into what the server keeps on purpose, which is not full yet",
                    pooled / MIB,
                    slope.value / MIB
                ),
                None => {
                    "it grows within what the server is told to keep, whose size its log does not tell; the \
                     row without the \
                     prompt cache says what is left"
                        .to_owned()
                }
            };
            let cache = found.series == MemoryKind::Host;
            Some(if cache {
                format!(
                    "{fills}. To bound the prompt cache, give the server `--cache-ram 512` \
                                     (MiB)"
                )
            } else {
                fills
            })
        }
        (GrowthVerdict::Leaking | GrowthVerdict::Suspected, _) => match &found.blame {
            Some(GrowthBlame::Undecided { why }) => {
                Some(format!("nothing is blamed: {}", why.trim_end_matches('.')))
            }
            _ => None,
        },
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_nothing_for_a_request_is_nothing_for_its_tokens() {
        let found = |low: f64| SeriesFinding {
            series: MemoryKind::Host,
            verdict: GrowthVerdict::Steady,
            per_request: Some(IntervalEstimate { value: 2048.0, low, high: 4096.0 }),
            pooled_per_request: None,
            per_prompt_token: Some(30.0),
            per_output_token: None,
            per_image: None,
            settles: GrowthEnd::Unknown,
            blame: None,
            first: 0,
            last: 0,
            peak: 0,
            sees: 1.0,
            graphs: None,
        };
        let cells = |found: SeriesFinding| {
            (per_request(&found.per_request.unwrap()), per_token(&found, found.per_prompt_token))
        };
        assert_eq!(cells(found(-1.0)), ("0".to_owned(), "0".to_owned()));
        let short = SeriesFinding { verdict: GrowthVerdict::Warming, per_request: None, ..found(1.0) };
        assert!(series_note(&short, 64).is_some_and(|note| note.contains("give `--requests 64`")));
        assert_eq!(
            (verdict_cell(&short), verdict_cell(&SeriesFinding { sees: f64::MAX, ..found(1.0) })),
            ("?", "?")
        );
        assert_eq!(verdict_cell(&found(1.0)), "steady");
        let cache = SeriesFinding { verdict: GrowthVerdict::Bounded, ..found(1.0) };
        assert!(series_note(&cache, 64).is_some_and(|note| note.contains("`--cache-ram 512`")));
        assert_eq!(cells(found(1.0)), ("+0.00 MiB".to_owned(), "+30 B".to_owned()));
    }
}
