//! Formats numbers in drawings: as short as possible without visible rounding.

use std::fmt::{self, Display, Formatter};

/// A coordinate or length in a drawing, to a tenth of its unit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Px(pub(crate) f64);

impl Display for Px {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        // Limit the value to far outside of any drawing, because SVG has no infinity.
        let tenths = (self.0.clamp(-1e5, 1e5) * 10.0).round();
        let tenths = if tenths.is_nan() { 0.0 } else { tenths };
        // Adding 0.0 turns a negative zero into zero.
        let value = tenths / 10.0 + 0.0;
        if value.fract().abs() < 1e-9 { write!(f, "{value:.0}") } else { write!(f, "{value:.1}") }
    }
}

/// A value on an axis, for programs: no exponent, at most six decimals, no trailing zeros.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct AxisValue(pub(crate) f64);

impl Display for AxisValue {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let text = format!("{:.6}", if self.0.is_finite() { self.0.clamp(-1e18, 1e18) } else { 0.0 });
        let text = text.trim_end_matches('0').trim_end_matches('.');
        f.write_str(if text == "-0" { "0" } else { text })
    }
}

/// Formats a number with commas between thousands.
pub(crate) fn group_digits(number: f64, digits: usize) -> String {
    let plain = format!("{:.digits$}", number.abs());
    let (whole, rest) = plain.split_at(plain.find('.').unwrap_or(plain.len()));
    let mut text = String::with_capacity(plain.len() + 4);
    if number < 0.0 && plain.bytes().any(|digit| (b'1'..=b'9').contains(&digit)) {
        text.push('-');
    }
    for (index, digit) in whole.chars().enumerate() {
        if index > 0 && (whole.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text.push_str(rest);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short_and_never_more_than_a_drawing_holds() {
        let px = |value| Px(value).to_string();
        assert_eq!(
            [px(1.0), px(1.26), px(-0.04), px(f64::MAX), px(f64::NAN)],
            ["1", "1.3", "0", "100000", "0"]
        );
        let value = |value| AxisValue(value).to_string();
        assert_eq!(
            [value(1_764_187_200.0), value(0.25), value(-0.0), value(f64::INFINITY)],
            ["1764187200", "0.25", "0", "0"]
        );
        assert_eq!(
            [
                group_digits(1_234_567.0, 0),
                group_digits(999.0, 0),
                group_digits(1234.5, 2),
                group_digits(-1000.0, 0),
                group_digits(-0.1, 0)
            ],
            ["1,234,567", "999", "1,234.50", "-1,000", "0"]
        );
    }
}
