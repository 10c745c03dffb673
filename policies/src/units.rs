//! Sizes with units: `12GiB`, `512M`, `80%`.
//!
//! `K M G T`, without suffix or with `iB`, are powers of 1024, as usual for memory limits; `KB MB GB TB` are
//! powers of 1000. Fractions are allowed (`1.5GiB`).

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A number of bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ByteSize(pub u64);

/// Bytes in a MiB.
pub const MIB: u64 = 1024 * 1024;

impl ByteSize {
    /// Creates a size of `n` MiB.
    pub const fn mib(n: u64) -> Self {
        Self(n * MIB)
    }

    /// Converts to `usize`, saturating, for sizes of buffers in this process.
    pub fn in_memory(self) -> usize {
        usize::try_from(self.0).unwrap_or(usize::MAX)
    }

    /// Rounds 141.3 MiB up to 150 MiB, so that slightly different readings lead to the same advice.
    #[must_use]
    pub fn round_up(self) -> Self {
        let mut unit = 1_u64;
        while self.0 / unit >= 1024 && unit < 1 << 40 {
            unit <<= 10;
        }
        let step = match self.0 / unit {
            0..10 => (unit / 10).max(1),
            10..100 => unit,
            100.. => unit * 10,
        };
        Self(self.0.div_ceil(step).saturating_mul(step))
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        ByteAmount(as_f64(self.0)).fmt(f)
    }
}

/// Formats bytes: `4.4 MiB`; with `{:.2}`, `4.42 MiB`; with `{:+}`, always with a sign.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ByteAmount(pub f64);

impl fmt::Display for ByteAmount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = ["B", "KiB", "MiB", "GiB", "TiB"];
        let (mut value, mut unit) = (self.0, 0);
        while value.abs() >= 1024.0 && unit < units.len() - 1 {
            value /= 1024.0;
            unit += 1;
        }
        let (digits, unit) = (if unit == 0 { 0 } else { f.precision().unwrap_or(1) }, units[unit]);
        // Avoids a negative zero.
        let value = if self.0.abs() < 0.5 { 0.0 } else { value };
        if f.sign_plus() {
            write!(f, "{value:+.digits$} {unit}")
        } else {
            write!(f, "{value:.digits$} {unit}")
        }
    }
}

/// Converts bytes and counts for arithmetic.
#[expect(clippy::cast_precision_loss, reason = "exact up to 2^53, which no memory and no counter reaches")]
pub const fn as_f64(value: u64) -> f64 {
    value as f64
}

/// Truncates to an integer; saturates, and maps negative values and NaN to 0.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "`as` saturates at both ends")]
pub const fn truncate_to_u64(value: f64) -> u64 {
    value as u64
}

/// Multiplies bytes by a factor; saturates, and a negative factor counts as 0.
pub fn scale_bytes(bytes: u64, factor: f64) -> u64 {
    truncate_to_u64(as_f64(bytes) * factor)
}

/// Formats a time in its two largest units: `2 d 3 h`, `11 h 20 min`, `45 s`, `100 ms`.
pub fn format_span(time: Duration) -> String {
    let seconds = time.as_secs();
    let two = |large: u64, unit: &str, small: u64, rest: &str| match small {
        0 => format!("{large} {unit}"),
        _ => format!("{large} {unit} {small} {rest}"),
    };
    match seconds {
        0 if !time.is_zero() => format!("{} ms", time.as_millis().max(1)),
        0..60 => format!("{seconds} s"),
        60..3600 => two(seconds / 60, "min", seconds % 60, "s"),
        3600..86_400 => two(seconds / 3600, "h", seconds % 3600 / 60, "min"),
        _ => two(seconds / 86_400, "d", seconds % 86_400 / 3600, "h"),
    }
}

/// A text that is not a size. The message repeats the text and shows the right form.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{text}` is not a size: write a number and a unit, like `12GiB` or `512MiB`{}",
    if *.percent { ", a share of the memory, like `80%`, or `auto`" } else { "" }
)]
pub struct SizeError {
    text: String,
    percent: bool,
}

impl FromStr for ByteSize {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        parse_bytes(text).map(ByteSize).ok_or_else(|| SizeError { text: text.to_owned(), percent: false })
    }
}

fn parse_bytes(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: f64 = number.parse().ok()?;
    let factor: f64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "k" | "kib" => 1024.0,
        "m" | "mib" => 1024.0 * 1024.0,
        "g" | "gib" => 1024.0 * 1024.0 * 1024.0,
        "t" | "tib" => 1024.0 * 1024.0 * 1024.0 * 1024.0,
        "kb" => 1e3,
        "mb" => 1e6,
        "gb" => 1e9,
        "tb" => 1e12,
        _ => return None,
    };
    let bytes = number * factor;
    (bytes.is_finite() && (0.0..9.2e18).contains(&bytes)).then_some(truncate_to_u64(bytes))
}

impl Serialize for ByteSize {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(self.0)
    }
}

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(SizeVisitor { expected: "a size like `12GiB`", number: |bytes| bytes })
    }
}

struct SizeVisitor<T> {
    /// Expected form, for error messages.
    expected: &'static str,
    number: fn(ByteSize) -> T,
}

impl<T: FromStr<Err = SizeError>> Visitor<'_> for SizeVisitor<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.expected)
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<T, E> {
        Ok((self.number)(ByteSize(value)))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<T, E> {
        let bytes = u64::try_from(value)
            .map_err(|_| E::custom(format!("`{value}` is not a size: it is negative")))?;
        self.visit_u64(bytes)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<T, E> {
        text.parse().map_err(E::custom)
    }
}

/// A budget: bytes, a percentage of a total that only the machine knows (`80%` of host memory), or `auto`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MemoryLimit {
    /// A fixed number of bytes.
    Bytes(ByteSize),
    /// Percentage of the total: above 0, at most 100.
    Percent(f64),
    /// Computed from the settled memory of the backend: [`crate::recycle::RecyclePolicy::budget`].
    Auto,
}

impl MemoryLimit {
    /// Returns the bytes of a fixed limit.
    pub const fn bytes(self) -> Option<ByteSize> {
        match self {
            Self::Bytes(bytes) => Some(bytes),
            Self::Percent(_) | Self::Auto => None,
        }
    }

    /// Returns the limit in bytes for a total; `None` for [`MemoryLimit::Auto`].
    pub fn resolve(self, total: ByteSize) -> Option<ByteSize> {
        match self {
            Self::Bytes(bytes) => Some(bytes),
            Self::Percent(percent) => Some(ByteSize(truncate_to_u64(as_f64(total.0) * percent / 100.0))),
            Self::Auto => None,
        }
    }
}

impl FromStr for MemoryLimit {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        let error = || SizeError { text: text.to_owned(), percent: true };
        if text.trim().eq_ignore_ascii_case("auto") {
            return Ok(Self::Auto);
        }
        match text.trim().strip_suffix('%') {
            Some(number) => {
                let percent: f64 = number.trim().parse().map_err(|_| error())?;
                if percent > 0.0 && percent <= 100.0 { Ok(Self::Percent(percent)) } else { Err(error()) }
            }
            None => parse_bytes(text).map(|b| Self::Bytes(ByteSize(b))).ok_or_else(error),
        }
    }
}

impl fmt::Display for MemoryLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bytes(bytes) => bytes.fmt(f),
            Self::Percent(percent) => write!(f, "{percent}%"),
            Self::Auto => f.write_str("auto"),
        }
    }
}

impl Serialize for MemoryLimit {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Bytes(bytes) => bytes.serialize(serializer),
            Self::Percent(_) | Self::Auto => serializer.collect_str(self),
        }
    }
}

impl<'de> Deserialize<'de> for MemoryLimit {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let expected = "a size like `12GiB`, a share like `80%`, or `auto`";
        deserializer.deserialize_any(SizeVisitor { expected, number: MemoryLimit::Bytes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_as_people_write_them() {
        for (text, bytes) in [
            ("12GiB", 12 * 1024 * MIB),
            ("1G", 1024 * MIB),
            ("512 MiB", 512 * MIB),
            ("1.5k", 1536),
            ("2GB", 2_000_000_000),
            ("0", 0),
            ("77", 77),
        ] {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
    }

    #[test]
    fn advice_is_rounded_up_to_two_digits() {
        for (exact, rounded) in [
            ("141MiB", "150MiB"),
            ("143MiB", "150MiB"),
            ("775MiB", "780MiB"),
            ("12.2GiB", "13GiB"),
            ("0", "0"),
            ("9", "9"),
        ] {
            let (exact, rounded): (ByteSize, ByteSize) = (exact.parse().unwrap(), rounded.parse().unwrap());
            assert_eq!(exact.round_up(), rounded, "{exact}");
        }
        let above = ByteSize(1400 * MIB).round_up();
        assert!(above.0 >= 1400 * MIB && above.0 < 1440 * MIB, "{above}");
    }

    #[test]
    fn what_is_not_a_size_is_named_and_the_form_is_shown() {
        for text in ["12 GB of ram", "", "GiB", "-1GiB", "1e400", "1.2.3G", "80%"] {
            let error = text.parse::<ByteSize>().expect_err(text).to_string();
            assert!(error.contains(&format!("`{text}`")) && error.contains("12GiB"), "{error}");
        }
        let error = "12 GB of ram".parse::<MemoryLimit>().unwrap_err().to_string();
        assert!(error.contains("80%"), "{error}");
        for text in ["0%", "101%", "x%", "NaN%"] {
            text.parse::<MemoryLimit>().expect_err(text);
        }
    }

    #[test]
    fn a_share_resolves_against_the_total() {
        let limit: MemoryLimit = "80%".parse().unwrap();
        assert_eq!(limit.resolve(ByteSize(1000)), Some(ByteSize(800)));
        assert_eq!("1G".parse::<MemoryLimit>().unwrap().resolve(ByteSize(5)), Some(ByteSize(1024 * MIB)));
    }

    #[test]
    fn auto_is_a_limit_that_no_total_tells_and_survives_writing() {
        let limit: MemoryLimit = "auto".parse().unwrap();
        assert_eq!((limit, limit.resolve(ByteSize(1000))), (MemoryLimit::Auto, None));
        for text in ["\"auto\"", "\"80%\"", "12"] {
            let limit: MemoryLimit = serde_json::from_str(text).unwrap();
            assert_eq!(serde_json::to_string(&limit).unwrap(), text);
        }
    }

    #[test]
    fn sizes_print_with_a_binary_unit() {
        assert_eq!(ByteSize(12 * 1024 * MIB).to_string(), "12.0 GiB");
        assert_eq!(ByteSize(900).to_string(), "900 B");
        assert_eq!(
            format!("{:.2} {:+} {}", ByteAmount(4.5e6), ByteAmount(2048.0), ByteAmount(-0.4)),
            "4.29 MiB +2.0 KiB 0 B"
        );
        assert_eq!(format!("{} {:+}", ByteAmount(-2048.0), ByteAmount(-900.0)), "-2.0 KiB -900 B");
    }

    #[test]
    fn a_time_is_told_in_its_two_largest_units() {
        let told = |seconds: f64| format_span(Duration::from_secs_f64(seconds));
        for (seconds, text) in [
            (0.0, "0 s"),
            (0.1, "100 ms"),
            (59.9, "59 s"),
            (120.0, "2 min"),
            (135.0, "2 min 15 s"),
            (3600.0, "1 h"),
            (40_800.0, "11 h 20 min"),
            (183_600.0, "2 d 3 h"),
        ] {
            assert_eq!(told(seconds), text);
        }
    }
}
