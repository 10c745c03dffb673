//! Content and markup of plots.

use maud::html;

use super::*;

const MIB: f64 = 1024.0 * 1024.0;
/// Thursday, 26 November 2026, 14:03:20 UTC.
const NOW: f64 = 1_795_701_800.0;

fn rising(requests: u32) -> Vec<PlotLevel> {
    (0..requests).map(|n| PlotLevel::exact(f64::from(n + 1), (100.0 + 4.0 * f64::from(n)) * MIB)).collect()
}

/// A plot with every element.
fn whole() -> LinePlot {
    let readings = rising(6);
    LinePlot {
        title: "host memory of <m>".to_owned(),
        curves: vec![PlotCurve { name: "the readings".to_owned(), stretches: vec![readings] }],
        laws: vec![PlotLaw {
            name: "the law: +4.00 MiB a request (3.00 to 5.00)".to_owned(),
            levels: vec![
                PlotLevel { x: 1.0, low: 95.0 * MIB, value: 100.0 * MIB, high: 105.0 * MIB },
                PlotLevel { x: 6.0, low: 112.0 * MIB, value: 120.0 * MIB, high: 128.0 * MIB },
            ],
        }],
        limits: vec![
            PlotLimit { kind: PlotLimitKind::Soft, at: 130.0 * MIB, range: None },
            PlotLimit { kind: PlotLimitKind::Hard, at: 140.0 * MIB, range: None },
            PlotLimit { kind: PlotLimitKind::Hard, at: 1e12, range: None },
        ],
        areas: vec![PlotArea {
            name: "told to keep: 10.0 MiB".to_owned(),
            stretches: vec![vec![
                PlotLevel::between(1.0, 100.0 * MIB, 110.0 * MIB),
                PlotLevel::between(6.0, 100.0 * MIB, 110.0 * MIB),
            ]],
        }],
        forecast: Some(PlotForecast {
            from: (6.0, 120.0 * MIB),
            limit: 140.0 * MIB,
            reached: [10.0, 11.0, 13.0],
        }),
        marks: vec![PlotMark {
            x: 3.0,
            kind: PlotMarkKind::Reclaim,
            why: "asked for </title><script>".to_owned(),
        }],
        ..LinePlot::default()
    }
}

fn drawn(plot: &LinePlot) -> String {
    plot.figure(None).into_string()
}

/// A line for each element.
fn lines(markup: &str) -> String {
    markup.replace("><", ">\n<")
}

#[test]
fn a_plot_has_all_its_layers_and_says_what_they_are() {
    let caption = html! { "host memory: leaking" };
    insta::assert_snapshot!(lines(&whole().figure(Some(caption)).into_string()));
}

#[test]
fn a_plot_breaks_where_nothing_was_read() {
    let stretch = |from: f64, bytes: f64| -> Vec<PlotLevel> {
        (0..3)
            .map(|n| PlotLevel {
                x: from + 60.0 * f64::from(n),
                low: bytes - 30.0 * MIB,
                value: bytes,
                high: bytes + MIB,
            })
            .collect()
    };
    let plot = LinePlot {
        title: "VRAM of GPU 0".to_owned(),
        span: Some((NOW - 3600.0, NOW + 600.0)),
        curves: vec![PlotCurve {
            name: "the readings".to_owned(),
            stretches: vec![
                stretch(NOW - 3000.0, 900.0 * MIB),
                stretch(NOW - 1000.0, 500.0 * MIB),
                vec![PlotLevel::exact(NOW, 520.0 * MIB)],
            ],
        }],
        limits: vec![PlotLimit {
            kind: PlotLimitKind::Soft,
            at: 1000.0 * MIB,
            range: Some((NOW - 3600.0, NOW - 1500.0)),
        }],
        forecast: Some(PlotForecast {
            from: (NOW, 520.0 * MIB),
            limit: 1000.0 * MIB,
            reached: [NOW + 300.0, NOW + 9000.0, f64::MAX],
        }),
        marks: vec![
            PlotMark {
                x: NOW - 1500.0,
                kind: PlotMarkKind::Replacement,
                why: "host memory passed the soft budget".to_owned(),
            },
            PlotMark { x: NOW - 9999.0, kind: PlotMarkKind::Crash, why: "long ago".to_owned() },
        ],
        ..LinePlot::default()
    };
    insta::assert_snapshot!(lines(&drawn(&plot)));
}

#[test]
fn nothing_to_draw_is_said_and_numbers_that_are_none_are_no_trouble() {
    assert!(drawn(&LinePlot::default()).contains("There are no readings in this time."));
    let odd = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, f64::MAX, f64::MIN, 0.0, -1.0, 1e300];
    for a in odd {
        for b in odd {
            let plot = LinePlot {
                span: Some((a, b)),
                curves: vec![PlotCurve {
                    name: String::new(),
                    stretches: vec![vec![
                        PlotLevel::exact(a, b),
                        PlotLevel::exact(b, a),
                        PlotLevel::exact(0.0, 0.0),
                    ]],
                }],
                limits: vec![PlotLimit { kind: PlotLimitKind::Hard, at: a, range: Some((a, b)) }],
                forecast: Some(PlotForecast { from: (a, b), limit: a, reached: [a, b, a] }),
                marks: vec![PlotMark { x: a, kind: PlotMarkKind::Other, why: String::new() }],
                laws: vec![PlotLaw {
                    name: String::new(),
                    levels: vec![PlotLevel::exact(a, b), PlotLevel::exact(b, b)],
                }],
                ..LinePlot::default()
            };
            for plot in [plot.clone(), LinePlot { span: None, ..plot }] {
                let drawn = drawn(&plot);
                assert!(!drawn.contains("NaN") && !drawn.contains("inf"), "{a} {b} {drawn}");
                assert!(drawn.len() < 20_000);
            }
        }
    }
}

#[test]
fn what_is_drawn_stays_small_whatever_was_read() {
    let mut plot = whole();
    plot.curves[0].stretches = vec![rising(200_000)];
    let mark =
        |n: u32| PlotMark { x: f64::from(n), kind: PlotMarkKind::Replacement, why: "again".to_owned() };
    plot.marks = (0..50_000).map(mark).collect();
    let drawn = drawn(&plot);
    assert!(drawn.len() < 120_000, "{}", drawn.len());
    assert_eq!(drawn.matches("<g class=\"mark").count(), mark::MAX_MARKS);
    assert!(
        drawn.contains("49800 earlier ones are not shown") || drawn.contains("earlier ones are not shown")
    );
}

#[test]
fn nothing_that_is_told_leaves_its_place_and_no_attribute_is_refused_by_a_strict_policy() {
    let hostile = "\"><script>alert('1')</script>";
    let mut plot = whole();
    plot.title = hostile.to_owned();
    plot.curves[0].name = hostile.to_owned();
    plot.laws[0].name = hostile.to_owned();
    plot.areas[0].name = hostile.to_owned();
    plot.marks[0].why = hostile.to_owned();
    let drawn = drawn(&plot);
    for banned in ["<script", "style=", " onload", "href=", "url("] {
        assert!(!drawn.contains(banned), "{banned} in {drawn}");
    }
    let mut open: Vec<&str> = Vec::new();
    for tag in drawn.split('<').skip(1).map(|rest| rest.split('>').next().unwrap_or_default()) {
        let name = tag.split(' ').next().unwrap_or_default();
        match name.strip_prefix('/') {
            Some(name) => assert_eq!(open.pop(), Some(name)),
            None if !tag.ends_with('/') => open.push(name),
            None => {}
        }
    }
    assert!(open.is_empty(), "{open:?}");
}

#[test]
fn each_kind_of_mark_has_a_word_and_a_shape_of_its_own() {
    use PlotMarkKind::{Canary, Configuration, Crash, Eviction, Other, Reclaim, Replacement};
    let all = [Replacement, Reclaim, Eviction, Canary, Crash, Configuration, Other];
    let (mut words, mut shapes) = (all.map(PlotMarkKind::word), all.map(PlotMarkKind::path));
    words.sort_unstable();
    shapes.sort_unstable();
    assert!(words.windows(2).all(|two| two[0] != two[1]) && shapes.windows(2).all(|two| two[0] != two[1]));
}

#[test]
fn the_geometry_is_told_so_that_a_script_finds_values_under_a_cursor() {
    let drawn = drawn(&whole());
    let of = |name: &str| -> f64 {
        let rest = drawn.split(&format!(" {name}=\"")).nth(1).unwrap();
        rest.split('"').next().unwrap().parse().unwrap()
    };
    let (left, right) = (of("data-left"), of("data-right"));
    let (from, to) = (of("data-x-from"), of("data-x-to"));
    let path = drawn.split("class=\"curve read\" d=\"").nth(1).unwrap().split('"').next().unwrap();
    let places: Vec<(f64, f64)> = path
        .split(['M', 'L'])
        .skip(1)
        .map(|place| place.split_once(' ').unwrap())
        .map(|(x, y)| (x.parse().unwrap(), y.parse().unwrap()))
        .collect();
    let x = |place: f64| from + (place - left) / (right - left) * (to - from);
    let (top, bottom) = (of("data-top"), of("data-bottom"));
    let y = |place: f64| {
        of("data-y-from") + (bottom - place) / (bottom - top) * (of("data-y-to") - of("data-y-from"))
    };
    for (level, place) in rising(6).iter().zip(places) {
        assert!((x(place.0) - level.x).abs() < 0.01 && (y(place.1) - level.value).abs() < 0.1 * MIB);
    }
}
