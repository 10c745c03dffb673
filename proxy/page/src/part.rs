//! Small parts shared by several views. Turns values into markup.

use std::fmt::Display;
use std::time::Duration;

use maud::{Markup, html};
use warden_admin::memory_use::MemoryUse;
use warden_admin::query::address_with_query;
use warden_policies::MemoryKind;

use crate::markup::bar::{BarPart, UsageBar};

/// Returns whether a text contains all of `words`, ignoring case.
pub(crate) fn has_words(words: &str, text: &str) -> bool {
    let text = text.to_lowercase();
    words.split_whitespace().all(|word| text.contains(&word.to_lowercase()))
}

/// Returns a link. The address must be one of the page; the text may come from anywhere.
pub(crate) fn page_link(address: &str, text: impl Display) -> Markup {
    html! {
        a href=(address) { (text) }
    }
}

pub(crate) fn model_link(view: &str, model: &str) -> Markup {
    page_link(&address_with_query(view, &[("model", model)]), model)
}

pub(crate) fn search_field(words: &str, placeholder: Option<&str>) -> Markup {
    html! {
        input id="filter" name="q" type="search" value=(words) autocomplete="off" placeholder=[placeholder];
    }
}

pub(crate) fn rate_text(per_second: f64) -> String {
    match per_second {
        rate if rate < 0.005 => "0".to_owned(),
        rate if rate < 1.0 => format!("{rate:.2}"),
        rate if rate < 10.0 => format!("{rate:.1}"),
        rate => format!("{rate:.0}"),
    }
}

pub(crate) fn seconds_text(time: Duration) -> String {
    let seconds = time.as_secs_f64();
    match seconds {
        s if s < 0.0995 => format!("{:.0} ms", s * 1e3),
        s if s < 9.95 => format!("{s:.2} s"),
        s if s < 99.5 => format!("{s:.1} s"),
        s => warden_policies::phrases::time_phrase(s),
    }
}

/// Returns a moment (RFC 3339) as a `time` element, whose text a script converts to the viewer's time zone.
/// Text that is no moment is returned as text.
pub(crate) fn moment_element(written: &str) -> Markup {
    if let Ok(at) = written.parse::<jiff::Timestamp>() {
        crate::markup::time::time_element(at.as_second())
    } else {
        html! { (written) }
    }
}

/// Returns a sentence: text between backticks becomes code, and a number is never separated from its unit.
pub(crate) fn sentence(text: &str) -> Markup {
    html! {
        @for (index, piece) in text.split('`').enumerate() {
            @if index % 2 == 0 {
                (join_units(piece))
            } @else {
                code { (piece) }
            }
        }
    }
}

/// Joins each size with its unit by a no-break space: `320 MiB` never spans two lines.
fn join_units(text: &str) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut words = text.split(' ');
    let mut whole = words.next().unwrap_or_default().to_owned();
    for word in words {
        let unit = word.split(|letter: char| !letter.is_alphanumeric()).next().unwrap_or_default();
        let joins = UNITS.contains(&unit) && whole.ends_with(|last: char| last.is_ascii_digit());
        whole.push(if joins { '\u{a0}' } else { ' ' });
        whole.push_str(word);
    }
    whole
}

pub(crate) fn memory_bar(of: &str, holds: &MemoryUse) -> Markup {
    let without = if holds.soft.or(holds.hard).is_none() { ", without a budget" } else { "" };
    let limit = holds.hard.or(holds.soft).or(holds.total);
    let memory = memory_name(holds.series);
    let bar = UsageBar {
        title: format!("{memory} of {of}{without}"),
        parts: vec![
            (BarPart::Weights, holds.weights),
            (BarPart::Cache, holds.cache),
            (BarPart::Other, holds.other),
            (BarPart::Growth, holds.growth),
        ],
        limit,
        soft: holds.soft.filter(|soft| Some(*soft) != limit),
    };
    html! {
        (bar.svg())
        div class="holds" { (join_units(&format!("{memory} {}{without}", bar.held_text()))) }
    }
}

pub(crate) fn usage_bar(series: MemoryKind, used: u64, total: u64) -> Markup {
    let title = format!("{} in use", memory_name(series));
    UsageBar { title, parts: vec![(BarPart::Other, used)], limit: Some(total), soft: None }.svg()
}

fn memory_name(series: MemoryKind) -> String {
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
        let rates = [0.0, 0.001, 0.25, 3.4123, 42.42, 1234.5].map(rate_text);
        assert_eq!(rates, ["0", "0", "0.25", "3.4", "42", "1234"]);
        let times = [0.0123, 0.25, 12.34, 3600.0].map(|s| seconds_text(Duration::from_secs_f64(s)));
        assert_eq!(times, ["12 ms", "0.25 s", "12.3 s", "1 h"]);
    }

    #[test]
    fn a_sentence_has_code_for_backticks_and_no_line_end_in_a_size() {
        let told = "set <code>server.port</code> &lt;1\u{a0}GiB; 12 BC, 5\u{a0}B";
        assert_eq!(sentence("set `server.port` <1 GiB; 12 BC, 5 B").into_string(), told);
    }

    #[test]
    fn a_moment_is_an_element_that_a_script_can_read_and_anything_else_is_text() {
        let told = moment_element("2026-11-26T14:03:20.5Z").into_string();
        assert_eq!(told, "<time datetime=\"2026-11-26T14:03:20Z\">26 Nov 2026 14:03:20 UTC</time>");
        assert_eq!(moment_element("<b>").into_string(), "&lt;b&gt;");
    }

    #[test]
    fn words_are_found_in_any_order_and_case() {
        assert!(has_words("", "anything") && has_words(" B  a ", "xAyb"));
        assert!(!has_words("a c", "ab"));
    }
}
