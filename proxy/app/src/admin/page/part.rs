//! Small parts of views that several of them have. Values in, markup out.

use std::fmt::Display;
use std::time::Duration;

use warden_pages::Html;
use warden_policies::{ByteSize, MemoryKind};

use super::holds::Holds;

/// A link. The address is one of ours; the text may be anybody's.
pub(crate) fn link(html: &mut Html, address: &str, text: impl Display) {
    html.element("a", &[("href", &address)], text);
}

/// A rate for people: with as many digits as mean something.
pub(crate) fn rate(per_second: f64) -> String {
    match per_second {
        rate if rate < 0.005 => "0".to_owned(),
        rate if rate < 1.0 => format!("{rate:.2}"),
        rate if rate < 10.0 => format!("{rate:.1}"),
        rate => format!("{rate:.0}"),
    }
}

/// A time that somebody waits, for people.
pub(crate) fn seconds(time: Duration) -> String {
    let seconds = time.as_secs_f64();
    match seconds {
        s if s < 0.0995 => format!("{:.0} ms", s * 1e3),
        s if s < 9.95 => format!("{s:.2} s"),
        s if s < 99.5 => format!("{s:.1} s"),
        s => warden_policies::phrases::time(s),
    }
}

/// A moment as it was written (RFC 3339): the element `time`, whose text a script shows in the zone of whoever looks. What is no moment
/// stays as it is.
pub(crate) fn moment(written: &str) -> String {
    match written.parse::<jiff::Timestamp>() {
        Ok(at) => warden_pages::time::time(at.as_second()),
        Err(_) => warden_pages::escape(written),
    }
}

/// What is held of a budget, as a bar and in words.
pub(crate) fn bar_of(html: &mut Html, holds: &Holds) {
    let mut text = format!("{} {}", name(holds.series), ByteSize(holds.held));
    let of = match (holds.hard, holds.soft, holds.total) {
        (Some(hard), ..) => Some(format!(" of {}", ByteSize(hard))),
        (None, Some(soft), _) => Some(format!(" of {}", ByteSize(soft))),
        (None, None, Some(total)) => Some(format!(" of {}, without a budget", ByteSize(total))),
        (None, None, None) => None,
    };
    text.extend(of);
    let parts = [
        ("weights", holds.weights),
        ("cache", holds.cache),
        ("growth", holds.growth),
        ("other", holds.other),
    ];
    let each = parts.iter().filter(|(_, bytes)| *bytes > 0);
    let each: Vec<String> = each.map(|(what, bytes)| format!("{what} {}", ByteSize(*bytes))).collect();
    drawn(html, &format!("{text}: {}", each.join(", ")), &parts, holds.soft, holds.full());
    html.element("div", &[("class", &"holds")], text);
}

/// What of a whole is in use.
pub(crate) fn bar(html: &mut Html, series: MemoryKind, used: u64, total: u64, what: &str) {
    let told = format!("{}: {} of {} {what}", name(series), ByteSize(used), ByteSize(total));
    drawn(html, &told, &[("other", used)], None, total.max(1));
}

fn drawn(html: &mut Html, told: &str, parts: &[(&'static str, u64)], soft: Option<u64>, full: u64) {
    let exact = warden_policies::units::exact;
    let at = |bytes: u64| (exact(bytes) / exact(full)).clamp(0.0, 1.0) * 100.0;
    html.within(
        "svg",
        &[("class", &"bar"), ("viewBox", &"0 0 100 8"), ("preserveAspectRatio", &"none"), ("role", &"img"), ("aria-label", &told)],
        |svg| {
            svg.element("title", &[], told);
            svg.shape("rect", &[("class", &"room"), ("x", &0), ("y", &0), ("width", &100), ("height", &8)]);
            let mut from = 0_u64;
            for (part, bytes) in parts.iter().filter(|(_, bytes)| *bytes > 0) {
                let (start, end) = (at(from), at(from.saturating_add(*bytes)));
                from = from.saturating_add(*bytes);
                let (x, width) = (format!("{start:.2}"), format!("{:.2}", end - start));
                svg.shape(
                    "rect",
                    &[("class", &format_args!("part-{part}")), ("x", &x), ("y", &0), ("width", &width), ("height", &8)],
                );
            }
            if let Some(soft) = soft.filter(|soft| *soft < full) {
                let x = format!("{:.2}", at(soft));
                svg.shape("line", &[("class", &"soft"), ("x1", &x), ("x2", &x), ("y1", &0), ("y2", &8)]);
            }
            if from > full {
                svg.shape("line", &[("class", &"over"), ("x1", &100), ("x2", &100), ("y1", &0), ("y2", &8)]);
            }
        },
    );
}

fn name(series: MemoryKind) -> String {
    match series {
        MemoryKind::Host => "host".to_owned(),
        MemoryKind::Vram(gpu) => format!("GPU {}", gpu.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_as_many_digits_as_mean_something() {
        let rates = [0.0, 0.001, 0.25, 3.14159, 42.42, 1234.5].map(rate);
        assert_eq!(rates, ["0", "0", "0.25", "3.1", "42", "1234"]);
        let times = [0.0123, 0.25, 12.34, 3600.0].map(|s| seconds(Duration::from_secs_f64(s)));
        assert_eq!(times, ["12 ms", "0.25 s", "12.3 s", "1 h"]);
    }

    #[test]
    fn a_moment_is_an_element_that_a_script_can_read_and_anything_else_is_text() {
        let told = moment("2026-11-26T14:03:20.5Z");
        assert_eq!(told, "<time datetime=\"2026-11-26T14:03:20Z\">26 Nov 2026 14:03:20 UTC</time>");
        assert_eq!(moment("<b>"), "&lt;b&gt;");
    }
}
