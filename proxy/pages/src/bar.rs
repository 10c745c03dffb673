//! Shows the use of a budget as a bar and in words.

use std::fmt::Display;

use warden_policies::ByteSize;
use warden_policies::units::as_f64;

use crate::html::Html;
use crate::number::Px;

/// Part of the memory held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BarPart {
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
    /// Returns the word for the part, shown next to the bar.
    pub const fn word(self) -> &'static str {
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
pub struct UsageBar {
    /// Subject: `host memory of m`.
    pub title: String,
    /// Bytes of each part; empty parts are left out.
    pub parts: Vec<(BarPart, u64)>,
    /// Limit in bytes: the hard budget, or the machine's total; `None` without a limit.
    pub limit: Option<u64>,
    /// Bytes above which the process is replaced at a quiet moment.
    pub soft: Option<u64>,
}

const WIDTH: f64 = 200.0;
const HEIGHT: f64 = 12.0;

impl UsageBar {
    /// Returns the bytes held, of all parts together.
    pub fn held_bytes(&self) -> u64 {
        self.parts.iter().fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
    }

    /// Returns the limit to mention in words: the soft budget if there is one, as in `status`.
    fn soft_or_limit(&self) -> Option<u64> {
        self.soft.or(self.limit)
    }

    /// Returns `12.3 GiB of 16.0 GiB`, and the hard budget if it differs.
    pub fn held_text(&self) -> String {
        let held = ByteSize(self.held_bytes());
        let whole =
            self.soft_or_limit().map_or_else(String::new, |allowed| format!(" of {}", ByteSize(allowed)));
        let hard = self.limit.filter(|limit| self.soft.is_some_and(|soft| soft != *limit));
        let hard = hard.map_or_else(String::new, |hard| format!(" (hard {})", ByteSize(hard)));
        format!("{held}{whole}{hard}")
    }

    /// Returns `12.3 GiB of 16.0 GiB: weights 8.0 GiB, growth 4.3 GiB`, for readers who do not see the bar.
    pub fn describe(&self) -> String {
        let whole = self.held_text();
        let parts: Vec<String> = self
            .nonempty_parts()
            .map(|(held, bytes)| format!("{} {}", held.word(), ByteSize(bytes)))
            .collect();
        let parts = if parts.is_empty() { String::new() } else { format!(": {}", parts.join(", ")) };
        let free = self
            .soft_or_limit()
            .and_then(|limit| limit.checked_sub(self.held_bytes()))
            .filter(|free| *free > 0);
        let free = free.map_or_else(String::new, |free| format!(", free {}", ByteSize(free)));
        let over = self
            .soft_or_limit()
            .and_then(|limit| self.held_bytes().checked_sub(limit))
            .filter(|over| *over > 0);
        let over = over.map_or_else(String::new, |over| format!(", {} too much", ByteSize(over)));
        format!("{whole}{parts}{free}{over}")
    }

    fn nonempty_parts(&self) -> impl Iterator<Item = (BarPart, u64)> {
        self.parts.iter().copied().filter(|(_, bytes)| *bytes > 0)
    }

    /// Returns the bar without words. If more than the limit is held, the bar is longer, and a line in it
    /// marks the limit.
    pub fn svg(&self) -> String {
        let all = self.held_bytes().max(self.limit.unwrap_or(0)).max(self.soft.unwrap_or(0)).max(1);
        let place = |bytes: u64| as_f64(bytes) / as_f64(all) * WIDTH;
        let mut html = Html::new();
        let view = format!("0 0 {WIDTH} {HEIGHT}");
        html.within(
            "svg",
            &[("class", &"bar"), ("viewBox", &view), ("preserveAspectRatio", &"none"), ("role", &"img")],
            |svg| {
                svg.element("title", &[], format_args!("{}: {}", self.title, self.describe()));
                let room: [(&'static str, &dyn Display); 5] =
                    [("class", &"room"), ("x", &0), ("y", &0), ("width", &WIDTH), ("height", &HEIGHT)];
                svg.shape("rect", &room);
                let mut from = 0;
                for (held, bytes) in self.nonempty_parts() {
                    let (x, end) = (place(from), place(from.saturating_add(bytes)));
                    from = from.saturating_add(bytes);
                    let class = held.class();
                    let (x, width) = (Px(x), Px(end - x));
                    svg.shape(
                        "rect",
                        &[("class", &class), ("x", &x), ("y", &0), ("width", &width), ("height", &HEIGHT)],
                    );
                    // A line between parts, so that they do not differ by colour only.
                    vertical_line(svg, "edge", end);
                }
                if let Some(soft) = self.soft {
                    vertical_line(svg, "soft", place(soft));
                }
                if let Some(limit) = self.limit.filter(|limit| *limit < self.held_bytes()) {
                    vertical_line(svg, "over", place(limit));
                }
            },
        );
        html.into_string()
    }

    /// Returns the bar with the words below it.
    pub fn html(&self) -> String {
        let mut html = Html::new();
        html.raw(&self.svg());
        html.element("span", &[("class", &"holds")], self.held_text());
        html.into_string()
    }
}

fn vertical_line(svg: &mut Html, class: &str, x: f64) {
    let x = Px(x.clamp(0.0, WIDTH));
    svg.shape("line", &[("class", &class), ("x1", &x), ("x2", &x), ("y1", &0), ("y2", &HEIGHT)]);
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
        insta::assert_snapshot!(bar.html().replace("><", ">\n<"));
        (bar.limit, bar.soft) = (Some(10 * GIB), None);
        assert_eq!(bar.describe(), "12.0 GiB of 10.0 GiB: weights 8.0 GiB, growth 4.0 GiB, 2.0 GiB too much");
        assert!(bar.svg().contains("class=\"over\""));
        let empty = UsageBar { title: String::new(), parts: Vec::new(), limit: None, soft: None };
        assert_eq!(empty.describe(), "0 B");
        let huge = UsageBar { parts: vec![(BarPart::Other, u64::MAX), (BarPart::Other, u64::MAX)], ..empty };
        assert!(!huge.svg().contains("NaN") && !huge.svg().contains("inf"));
    }
}
