//! The view *Memory* of an example that leaks.

use serde_json::{Value, json};

use warden_policies::units::as_f64;

use super::*;

/// An arbitrary moment.
const NOW: u64 = 1_790_000_000;
const MIB: u64 = 1 << 20;

/// A model that leaks, is replaced, and leaks again.
fn leaking() -> MemoryData {
    let (from, seconds) = (NOW - 6 * 3600, 60);
    let point = |n: u64| {
        let generation = if n < 200 { 3 } else { 4 };
        let since = if n < 200 { n } else { n - 200 };
        let mean = (900 + since * 8) * MIB + (n * 7919) % (6 * MIB);
        let law = (since > 40).then(|| json!({"level": (903 + since * 8) * MIB, "low": (895 + since * 8) * MIB, "high": (911 + since * 8) * MIB}));
        json!({
            "at": from + n * seconds, "count": 12, "min": mean - 3 * MIB, "mean": mean, "max": mean + 9 * MIB, "last": mean, "whole": true,
            "generation": generation, "verdict": "leaking", "law": law, "kept": [905 * MIB, 1417 * MIB], "soft": 2600 * MIB, "hard": 3072 * MIB,
        })
    };
    // Half an hour without a reading.
    let points: Vec<Value> = (0..360).filter(|n| !(100..130).contains(n)).map(point).collect();
    let mark = |n: u64, kind: &str, words: &str| json!({"at": (from + n * 60) * 1000, "model": "org/m <b>", "replica": 0, "kind": kind, "words": words});
    let data = json!({
        "model": "org/m <b>", "now": NOW, "from": from, "to": NOW + 1, "range": "6h", "place": "in /var/lib/llama-warden/series",
        "series": [{
            "replica": 0, "memory": "host", "seconds": seconds, "points": points,
            "present": {
                "generation": 4, "bytes": 2180 * MIB, "verdict": "leaking", "means": warden_policies::phrases::verdict_phrase(warden_policies::growth::GrowthVerdict::Leaking),
                "slope": "+4.42 MiB a request (4.40 to 4.45)", "blame": "each image pays 4.42 MiB (98 % of the growth)",
                "fill": {"allowed": 512 * MIB, "used": 512 * MIB}, "kept": "512.0 MiB of 512.0 MiB declared (100 %)",
                "allowance": ["prompt cache: 512.0 MiB (`--cache-ram 512`)"], "soft": 2600 * MIB, "hard": 3072 * MIB,
                "forecasts": [{"reason": "host_soft", "limit": 2600 * MIB, "early": NOW + 2400, "at": NOW + 3000, "late": NOW + 4200, "words": "in 95 requests (90 to 100), 50 min (40 min to 1 h 10 min)"}],
                "next": "replace it when quiet (growth): memory leaks and would reach a limit before long",
            },
        }, {
            "replica": 0, "memory": "vram0", "seconds": seconds,
            "points": (0..360).map(|n: u64| json!({"at": from + n * seconds, "count": 12, "min": 9000 * MIB, "mean": 9000 * MIB, "max": 9002 * MIB,
                "last": 9000 * MIB, "whole": true, "generation": 4, "verdict": "steady"})).collect::<Vec<_>>(),
        }],
        "marks": [
            mark(60, "reclaimed", "asked to give memory back (host_soft): 120.0 MiB given back; that is not enough"),
            mark(200, "replaced", "replaced (growth): host memory leaks <script>alert(1)</script>; 2.4 GiB before, 900.0 MiB after"),
            mark(280, "configured", "configuration applied: its settings changed, in place"),
        ],
    });
    serde_json::from_value(data).unwrap()
}

/// `WARDEN_LOOK=FOLDER` keeps the file for inspection.
#[test]
fn a_leak_is_seen_with_all_that_is_known_of_it() {
    let data = leaking();
    let html = memory_view(&data).into_string();
    for wanted in [
        "leaking",
        "each image pays 4.42 MiB",
        "+4.42 MiB a request",
        "the soft budget",
        "declared",
        "forecast",
        "50 min",
        "2.4 GiB before",
        "Memory of org/m &lt;b&gt;",
        "VRAM of GPU 0",
        "data-x-from=",
        "prompt cache",
    ] {
        assert!(html.contains(wanted), "{wanted} is missing: {html}");
    }
    assert!(!html.contains("<script") && !html.contains("<b>") && !html.contains(" style="), "{html}");
    let file = memory_file(&data);
    assert!(file.starts_with("<!doctype html>") && file.contains("<style>") && !file.contains("/page/"));
    assert!(!file.contains("http:") && !file.contains("src="), "it asks for nothing");
    assert_eq!(memory_file_name(&data), "memory-org-m--b--2026-09-21T141321Z.html");
    if let Some(folder) = std::env::var_os("WARDEN_LOOK") {
        std::fs::write(std::path::Path::new(&folder).join("memory.html"), &file).unwrap();
        let around = style::self_contained("Memory", &memory_view(&data));
        std::fs::write(std::path::Path::new(&folder).join("view.html"), around).unwrap();
    }
}

#[test]
fn each_range_is_a_link_that_can_be_sent() {
    let mut data = leaking();
    let html = memory_view(&data).into_string();
    let model = "model=org%2Fm%20%3Cb%3E";
    for link in [
        format!("href=\"/page/memory?{model}&amp;range=30d\""),
        format!("href=\"/page/memory?{model}&amp;range=6h\" aria-current=\"true\"><strong>6 hours"),
        format!("href=\"/page/memory?{model}&amp;from={}&amp;to={}\"", data.from, data.to),
        format!("href=\"/page/memory.html?{model}&amp;range=6h&amp;file=1\""),
    ] {
        assert!(html.contains(&link), "{link} is missing: {}", &html[..3000]);
    }
    assert!(!html.contains(">later<"));
    (data.range, data.from, data.to) = (None, NOW - 7200, NOW - 3600);
    let html = memory_view(&data).into_string();
    assert!(html.contains(">later<") && html.contains("&amp;file=1\">as a file"), "{}", &html[..3000]);
}

#[test]
fn a_replacement_and_a_gap_part_the_line_and_each_process_has_a_law() {
    let data = leaking();
    let drawn = series_plot(&data, &data.series[0], "host memory");
    assert_eq!(drawn.curves[0].stretches.len(), 3, "a gap, and a replacement");
    assert_eq!(drawn.laws.iter().filter(|law| !law.name.is_empty()).count(), 1);
    assert_eq!(drawn.marks.len(), 3);
    assert_eq!(drawn.limits.len(), 2);
    assert_eq!(drawn.limits[0].range, None, "it never changed");
    let (from, to) = drawn.span.unwrap();
    assert!(from < as_f64(NOW - 20_000) && to > as_f64(NOW + 3000), "the forecast has room");
    assert_eq!(
        series_plot(&data, &data.series[1], "VRAM").span,
        Some((from, to)),
        "one moment is at one place"
    );
}

#[test]
fn a_budget_that_changed_is_drawn_as_long_as_it_held() {
    let mut data = leaking();
    for (point, number) in data.series[0].points.iter_mut().zip(0..) {
        // Budgets that differ by less than a KiB count as equal.
        point.lines.soft = Some(if number < 100 { 2000 * MIB } else { 2600 * MIB + number % 3 });
        point.lines.hard = None;
    }
    let limits = series_plot(&data, &data.series[0], "host memory").limits;
    assert_eq!(limits.len(), 2, "{limits:?}");
    assert!(limits[0].range.unwrap().1 <= limits[1].range.unwrap().0);
}

#[test]
fn without_readings_it_says_so_and_what_was_done_is_listed() {
    let mut data = leaking();
    data.series.clear();
    let html = memory_view(&data).into_string();
    assert!(html.contains("There are no readings") && html.contains("replaced (growth)"), "{html}");
    let mut data = leaking();
    data.series[0].points.clear();
    data.series[0].present = None;
    assert!(memory_view(&data).into_string().contains("There are no readings in this time."));
}

#[test]
fn of_a_stretch_of_the_past_nothing_is_foretold() {
    let mut data = leaking();
    let law = |data: &MemoryData| memory_view(data).into_string().matches("the law: ").count();
    let now = law(&data);
    data.now = data.to + 86_400;
    assert!(now > 0 && law(&data) == 0, "{now} of the process that runs now");
}

#[test]
fn a_thousand_models_are_listed_and_a_month_of_points_stays_small() {
    let one =
        |n: usize| json!({"model": format!("m{n}"), "replica": 0, "memory": "host", "from": 5, "to": 9});
    let listed: SeriesList = serde_json::from_value(
        json!({"now": 9, "place": "here", "series": (0..1000).map(one).collect::<Vec<_>>()}),
    )
    .unwrap();
    let html = listing_view(&listed, &FleetView::default()).into_string();
    assert_eq!(html.matches("<tr role=\"row\" class=\"row\"").count(), 1000);
    assert!(html.len() < 450_000, "{}", html.len());
    let data = leaking();
    assert!(memory_view(&data).into_string().len() < 150_000, "{}", memory_view(&data).into_string().len());
}

#[test]
fn a_cache_of_gigabytes_does_not_flatten_what_was_read() {
    let mut data = leaking();
    for point in &mut data.series[0].points {
        point.lines.kept = Some((900 * MIB, 9000 * MIB));
    }
    let plot = series_plot(&data, &data.series[0], "host memory");
    let high = plot.areas[0].stretches.iter().flatten().map(|level| level.high).fold(0.0, f64::max);
    assert!(high < as_f64(5000 * MIB), "{high}");
    assert!(plot.areas[0].name.contains("8.8 GiB, beyond the plot"), "{}", plot.areas[0].name);
}
