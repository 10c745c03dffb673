//! Shows the use of a budget as a bar and in words.

use std::cmp::Ordering;
use std::fmt::Write as _;

use maud::{Markup, html};
use warden_policies::ByteSize;
use warden_policies::units::as_f64;

use crate::markup::number::Px;

/// Part of the memory held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BarPart {
    /// The model's weights.
    Weights,
    /// KV cache and declared caches.
    Cache,
    /// Growth beyond weights and caches.
    Growth,
    /// All other memory.
    Other,
}

impl BarPart {
    const fn word(self) -> &'static str {
        match self {
            Self::Weights => "weights",
            Self::Cache => "KV and caches",
            Self::Growth => "growth",
            Self::Other => "other",
        }
    }

    const fn class(self) -> &'static str {
        match self {
            Self::Weights => "part-weights",
            Self::Cache => "part-cache",
            Self::Growth => "part-growth",
            Self::Other => "part-other",
        }
    }
}

/// Use of a budget.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct UsageBar {
    /// Subject: `host memory of m`.
    pub(crate) title: String,
    /// Bytes of each part; empty parts are left out.
    pub(crate) parts: Vec<(BarPart, u64)>,
    /// Limit in bytes: the hard budget, or the machine's total; `None` without a limit.
    pub(crate) limit: Option<u64>,
    /// Bytes above which the process is replaced at a quiet moment.
    pub(crate) soft: Option<u64>,
}

const WIDTH: f64 = 200.0;
const HEIGHT: f64 = 12.0;

impl UsageBar {
    fn held_bytes(&self) -> u64 {
        self.parts.iter().fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
    }

    /// Returns the limit to mention in words: the soft budget if there is one, as in `status`.
    fn soft_or_limit(&self) -> Option<u64> {
        self.soft.or(self.limit)
    }

    /// Returns `12.3 GiB of 16.0 GiB`, and the hard budget if it differs.
    pub(crate) fn held_text(&self) -> String {
        let mut text = ByteSize(self.held_bytes()).to_string();
        if let Some(allowed) = self.soft_or_limit() {
            let _infallible = write!(text, " of {}", ByteSize(allowed));
        }
        if let (Some(soft), Some(hard)) = (self.soft, self.limit)
            && soft != hard
        {
            let _infallible = write!(text, " (hard {})", ByteSize(hard));
        }
        text
    }

    /// Returns `12.3 GiB of 16.0 GiB: weights 8.0 GiB, growth 4.3 GiB`, for readers who do not see the bar.
    fn describe(&self) -> String {
        let mut text = self.held_text();
        for (number, (part, bytes)) in self.nonempty_parts().enumerate() {
            let before = if number == 0 { ":" } else { "," };
            let _infallible = write!(text, "{before} {} {}", part.word(), ByteSize(bytes));
        }
        if let Some(limit) = self.soft_or_limit() {
            let held = self.held_bytes();
            let difference = ByteSize(limit.abs_diff(held));
            let _infallible = match held.cmp(&limit) {
                Ordering::Less => write!(text, ", free {difference}"),
                Ordering::Equal => Ok(()),
                Ordering::Greater => write!(text, ", {difference} too much"),
            };
        }
        text
    }

    fn nonempty_parts(&self) -> impl Iterator<Item = (BarPart, u64)> {
        self.parts.iter().copied().filter(|(_, bytes)| *bytes > 0)
    }

    /// Returns the bar without words. If the parts exceed the limit, a line in the bar marks the limit.
    pub(crate) fn svg(&self) -> Markup {
        let held = self.held_bytes();
        let all = held.max(self.limit.unwrap_or(0)).max(self.soft.unwrap_or(0)).max(1);
        let place = |bytes: u64| as_f64(bytes) / as_f64(all) * WIDTH;
        let mut end = 0_u64;
        let parts: Vec<(&str, f64, f64)> = self
            .nonempty_parts()
            .map(|(part, bytes)| {
                let start = end;
                end = end.saturating_add(bytes);
                (part.class(), place(start), place(end))
            })
            .collect();
        let passed = self.limit.filter(|limit| *limit < held);
        html! {
            svg class="bar" viewBox={ "0 0 " (WIDTH) " " (HEIGHT) } preserveAspectRatio="none" role="img" {
                title { (self.title) ": " (self.describe()) }
                rect class="room" x="0" y="0" width=(WIDTH) height=(HEIGHT) {}
                @for (class, start, end) in parts {
                    rect class=(class) x=(Px(start)) y="0" width=(Px(end - start)) height=(HEIGHT) {}
                    // A line between parts, so that they do not differ by colour only.
                    (vertical_line("edge", end))
                }
                @if let Some(soft) = self.soft {
                    (vertical_line("soft", place(soft)))
                }
                @if let Some(limit) = passed {
                    (vertical_line("over", place(limit)))
                }
            }
        }
    }
}

fn vertical_line(class: &str, x: f64) -> Markup {
    let x = Px(x.clamp(0.0, WIDTH));
    html! {
        line class=(class) x1=(x) x2=(x) y1="0" y2=(HEIGHT) {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn a_bar_says_what_is_held_of_what() {
        let mut bar = UsageBar {
            title: "host memory of <m>".to_owned(),
            parts: vec![(BarPart::Weights, 8 * GIB), (BarPart::Cache, 0), (BarPart::Growth, 4 * GIB)],
            limit: Some(16 * GIB),
            soft: Some(14 * GIB),
        };
        let words = "12.0 GiB of 14.0 GiB (hard 16.0 GiB): weights 8.0 GiB, growth 4.0 GiB, free 2.0 GiB";
        assert_eq!(bar.describe(), words);
        insta::assert_snapshot!(bar.svg().into_string().replace("><", ">\n<"));
        assert_eq!(bar.held_text(), "12.0 GiB of 14.0 GiB (hard 16.0 GiB)");
        (bar.limit, bar.soft) = (Some(10 * GIB), None);
        assert_eq!(bar.describe(), "12.0 GiB of 10.0 GiB: weights 8.0 GiB, growth 4.0 GiB, 2.0 GiB too much");
        assert!(bar.svg().into_string().contains("class=\"over\""));
        let empty = UsageBar { title: String::new(), parts: Vec::new(), limit: None, soft: None };
        assert_eq!(empty.describe(), "0 B");
        let huge = UsageBar { parts: vec![(BarPart::Other, u64::MAX), (BarPart::Other, u64::MAX)], ..empty };
        let drawn = huge.svg().into_string();
        assert!(!drawn.contains("NaN") && !drawn.contains("inf"));
    }
}
