//! A line without axes, as high as text: for a row of a table, next to its last value.

use std::fmt::{Display, Write as _};

use crate::html::Html;
use crate::number::Px;
use crate::plot::{PlotLevel, reduce_points};

/// Most positions drawn.
const MAX_PLACES: usize = 100;
const WIDTH: f64 = 100.0;
const HEIGHT: f64 = 20.0;

/// Draws values in their order, evenly spaced; `None` is a gap. `told`: the subject, for readers who do not
/// see the line. Empty with fewer than two values.
pub fn spark(values: &[Option<f64>], told: impl Display) -> String {
    let mut stretches = vec![Vec::new()];
    let mut x = 0.0;
    for value in values {
        match value.filter(|value| value.is_finite()) {
            Some(value) => {
                if let Some(stretch) = stretches.last_mut() {
                    stretch.push(PlotLevel::exact(x, value));
                }
            }
            None => stretches.push(Vec::new()),
        }
        x += 1.0;
    }
    let all = || stretches.iter().flatten();
    let (low, high) =
        all().fold((f64::MAX, f64::MIN), |(low, high), level| (low.min(level.value), high.max(level.value)));
    if all().count() < 2 {
        return String::new();
    }
    let across = WIDTH / (x - 1.0_f64).max(1.0);
    let share = |value: f64| if high > low { (value - low) / (high - low) } else { 0.5 };
    let mut d = String::new();
    for stretch in reduce_points(&stretches, MAX_PLACES) {
        // Down and up once where a place has several values, so that no peak is lost.
        let values = stretch.iter().flat_map(|level| {
            let range = (level.low < level.high).then_some([(level.x, level.low), (level.x, level.high)]);
            range.into_iter().flatten().chain([(level.x, level.value)])
        });
        for (index, (x, value)) in values.enumerate() {
            let letter = if index == 0 { 'M' } else { 'L' };
            let y = HEIGHT - 1.0 - share(value) * (HEIGHT - 2.0);
            let _ = write!(d, "{letter}{} {}", Px(x * across), Px(y));
        }
    }
    let mut html = Html::new();
    html.within(
        "svg",
        &[
            ("class", &"spark"),
            ("viewBox", &"0 0 100 20"),
            ("preserveAspectRatio", &"none"),
            ("role", &"img"),
        ],
        |svg| {
            svg.element("title", &[], told);
            svg.shape("path", &[("class", &"curve read"), ("d", &d)]);
        },
    );
    html.into_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spark_goes_from_end_to_end_and_breaks_where_nothing_was_read() {
        let drawn = spark(&[Some(0.0), Some(2.0), None, Some(1.0), Some(f64::NAN)], "m <1>");
        assert!(drawn.contains("d=\"M0 19L25 1M75 10\"") && drawn.contains("m &lt;1&gt;"), "{drawn}");
        assert_eq!(spark(&[Some(1.0), None], ""), "");
        let many: Vec<Option<f64>> = (0..5000).map(|n| Some(if n == 2500 { 9.0 } else { 1.0 })).collect();
        let drawn = spark(&many, "");
        assert!(drawn.len() < 5000 && drawn.contains(" 1L"), "the peak is kept: {drawn}");
    }
}
