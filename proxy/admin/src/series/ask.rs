//! Parses a query for series: `model=NAME&range=6h`, or `model=NAME&from=UNIX&to=UNIX`, and `points=N`. Pure.

use warden_policies::rollup::{PointRange, SeriesPolicy};

use crate::query::QueryPairs;

/// Named ranges, with their length in seconds.
pub const RANGES: [(&str, u64); 5] =
    [("1h", 3600), ("6h", 6 * 3600), ("1d", 86_400), ("7d", 7 * 86_400), ("30d", 30 * 86_400)];

/// In seconds.
const MIN_RANGE: u64 = 60;

/// Requested range of time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeriesRange {
    /// A range of [`RANGES`]: its name, and its length in seconds. Always ends at the current time.
    Last(&'static str, u64),
    /// Start and end in seconds since 1970.
    Between(u64, u64),
}

/// A parsed query.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeriesQuery {
    /// `None` requests the list of models.
    pub model: Option<String>,
    /// Range of time.
    pub when: SeriesRange,
    /// Most points of each series.
    pub points: usize,
}

impl SeriesQuery {
    /// Ignores unknown parameters, which other programs may have added. The error is a sentence with the
    /// valid form.
    ///
    /// # Errors
    /// A value is invalid.
    pub fn from_query(query: Option<&str>, policy: &SeriesPolicy) -> Result<Self, String> {
        let asked = QueryPairs::strict(query)?;
        let get = |name: &str| asked.get(name);
        let number = |name: &str| match get(name) {
            None => Ok(None),
            Some(text) => text.parse::<u64>().map(Some).map_err(|_| {
                format!("`{name}={text}` is no whole number: times are in seconds since 1970 (`date +%s`)")
            }),
        };
        let when = match (number("from")?, number("to")?) {
            (None, None) => range_named(get("range").unwrap_or("1h"))?,
            (Some(from), Some(to)) if to >= from.saturating_add(MIN_RANGE) && to < 1 << 40 => {
                SeriesRange::Between(from, to)
            }
            (Some(from), Some(to)) => {
                return Err(format!(
                    "from {from} to {to} is no range: `to` comes at least {MIN_RANGE} s after `from`"
                ));
            }
            _ => return Err("`from` and `to` come together; `range=6h` is the last six hours".to_owned()),
        };
        let points = number("points")?.and_then(|points| usize::try_from(points).ok());
        let points = points.unwrap_or(policy.points).clamp(2, policy.points_most.max(2));
        Ok(Self { model: get("model").map(str::to_owned), when, points })
    }

    /// Returns the range in absolute times.
    pub(crate) const fn range(&self, now: u64) -> PointRange {
        let (from, to) = match self.when {
            // Include readings of the current second.
            SeriesRange::Last(_, seconds) => (now.saturating_sub(seconds), now.saturating_add(1)),
            SeriesRange::Between(from, to) => (from, to),
        };
        PointRange { from, to, points: self.points }
    }
}

fn range_named(name: &str) -> Result<SeriesRange, String> {
    let known = RANGES.iter().find(|(known, _)| *known == name);
    known.map(|(name, seconds)| SeriesRange::Last(name, *seconds)).ok_or_else(|| {
        let names = RANGES.map(|(name, _)| name).join(", ");
        format!(
            "`range={name}` is none of {names}; other stretches are `from=` and `to=` in seconds since 1970"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(query: &str) -> Result<SeriesQuery, String> {
        SeriesQuery::from_query(Some(query), &warden_policies::defaults().series)
    }

    #[test]
    fn a_range_is_the_last_so_many_hours_or_from_a_moment_to_another() {
        let hour = ask("model=org%2Fa%2Bb+c&x").unwrap();
        assert_eq!(
            (hour.model.as_deref(), hour.when, hour.points),
            (Some("org/a+b c"), SeriesRange::Last("1h", 3600), 400)
        );
        assert_eq!(hour.range(10_000), PointRange { from: 6400, to: 10_001, points: 400 });
        let fixed = ask("from=1000&to=2000&points=99999&range=6h").unwrap();
        assert_eq!(
            (fixed.model.clone(), fixed.range(5)),
            (None, PointRange { from: 1000, to: 2000, points: 1000 })
        );
        assert_eq!(ask("range=30d&points=0").unwrap().range(0).points, 2);
    }

    #[test]
    fn what_cannot_be_meant_is_told_with_the_right_form() {
        let told: Vec<String> = [
            "range=2h",
            "from=1",
            "from=5&to=4",
            "from=yesterday&to=4",
            "from=1&to=18446744073709551615",
            "points=-1",
            "model=%zz",
        ]
        .into_iter()
        .map(|query| format!("{query}: {}", ask(query).unwrap_err()))
        .collect();
        insta::assert_snapshot!(told.join("\n"));
    }
}
