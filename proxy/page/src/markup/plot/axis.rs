//! Computes round numbers along an axis: steps of 1, 2 or 5 times a power of ten of a unit, and on a clock
//! whole minutes, hours or days.

use crate::markup::number::group_digits;
use crate::markup::time::UtcMoment;

const MAX_PARTS: f64 = 6.0;

#[derive(Clone, Debug, PartialEq)]
pub(super) struct AxisTick {
    pub(super) at: f64,
    pub(super) label: String,
}

/// Round numbers whose range contains all values.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct AxisTicks {
    pub(super) all: Vec<AxisTick>,
    pub(super) step: f64,
}

/// Steps in seconds.
const CLOCK_STEPS: [f64; 18] = [
    1.0, 5.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 900.0, 1800.0, 3600.0, 7200.0, 10_800.0, 21_600.0,
    43_200.0, 86_400.0, 172_800.0, 432_000.0,
];
const DAY: f64 = 86_400.0;

impl AxisTicks {
    /// Returns the ticks of the vertical axis, in bytes; the first and the last number are its ends.
    pub(super) fn vertical(low: f64, high: f64) -> Self {
        let (unit, name) = byte_unit(low, high);
        // Bytes have no fractions.
        let smallest = if name == " B" { 1.0 } else { 0.0 };
        let step = round_up((high - low) / unit / (MAX_PARTS - 1.0)).max(smallest);
        let first = (low / unit / step).floor();
        let last = (high / unit / step).ceil();
        let digits = decimals(step);
        let all = whole_numbers(first, last.max(first + 1.0)).map(|place| {
            let value = place * step;
            AxisTick { at: value * unit, label: group_digits(value, digits) + name }
        });
        Self { all: all.collect(), step: step * unit }
    }

    /// Returns the ticks of the horizontal axis, all between its ends.
    pub(super) fn horizontal(from: f64, to: f64) -> Self {
        let fits = |step: &&f64| (to - from) / **step <= MAX_PARTS;
        let step = CLOCK_STEPS.iter().find(fits).copied();
        let step = step.unwrap_or_else(|| round_up((to - from) / MAX_PARTS / DAY) * DAY);
        let all = whole_numbers((from / step).ceil(), (to / step).floor());
        let tick = |place: f64| AxisTick { at: place * step, label: clock_label(place * step, step) };
        Self { all: all.map(tick).collect(), step }
    }

    pub(super) fn first(&self) -> f64 {
        self.all.first().map_or(0.0, |tick| tick.at)
    }

    pub(super) fn last(&self) -> f64 {
        self.all.last().map_or(1.0, |tick| tick.at)
    }
}

/// Returns the whole numbers from `first` to `last`, but no more than an axis has room for.
fn whole_numbers(first: f64, last: f64) -> impl Iterator<Item = f64> {
    (0_u8..16).map(move |at| first + f64::from(at)).take_while(move |place| *place <= last)
}

/// Returns the unit of byte labels: the unit of the largest value, if steps are at least a hundredth of it.
fn byte_unit(low: f64, high: f64) -> (f64, &'static str) {
    let units = [(40, " TiB"), (30, " GiB"), (20, " MiB"), (10, " KiB")];
    let step = (high - low) / (MAX_PARTS - 1.0);
    for (power, name) in units {
        let unit = f64::powi(2.0, power);
        if high >= unit && step >= unit / 100.0 {
            return (unit, name);
        }
    }
    (1.0, " B")
}

/// Rounds up to 1, 2 or 5 times a power of ten.
fn round_up(number: f64) -> f64 {
    if number.is_nan() || number <= 0.0 || number > 1e30 {
        return 1.0;
    }
    let power = 10_f64.powf(number.log10().floor());
    let share = number / power;
    // Tolerates rounding errors in the last digits.
    let factor = [1.0, 2.0, 5.0].into_iter().find(|factor| share <= factor * (1.0 + 1e-9)).unwrap_or(10.0);
    factor * power
}

/// Returns the number of decimals that distinguish labels `step` apart.
fn decimals(step: f64) -> usize {
    [1.0, 0.1, 0.01, 0.001, 1e-4].iter().position(|least| step >= least * (1.0 - 1e-9)).unwrap_or(5)
}

/// Returns the label of a moment: the date at midnight, otherwise the time.
fn clock_label(unix: f64, step: f64) -> String {
    #[expect(clippy::cast_possible_truncation, reason = "`as` saturates, and `UtcMoment` takes any number")]
    let moment = UtcMoment::from_unix(unix.round() as i64);
    if step >= DAY || moment.is_midnight() {
        moment.date()
    } else if step < 60.0 {
        moment.clock_with_seconds()
    } else {
        moment.clock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIB: f64 = 1024.0;
    const MIB: f64 = 1024.0 * KIB;
    const GIB: f64 = 1024.0 * MIB;

    fn labels(ticks: &AxisTicks) -> Vec<&str> {
        ticks.all.iter().map(|tick| tick.label.as_str()).collect()
    }

    #[test]
    fn axes_of_bytes_have_round_numbers_that_hold_all_values() {
        for (low, high, found) in [
            (784.0 * KIB, 17.0 * MIB, "0 MiB, 5 MiB, 10 MiB, 15 MiB, 20 MiB"),
            (435.0 * MIB, 1292.0 * MIB, "0.4 GiB, 0.6 GiB, 0.8 GiB, 1.0 GiB, 1.2 GiB, 1.4 GiB"),
            (3.0 * GIB, 5.1 * GIB, "3.0 GiB, 3.5 GiB, 4.0 GiB, 4.5 GiB, 5.0 GiB, 5.5 GiB"),
            (100.0 * GIB, 160.0 * GIB, "100 GiB, 120 GiB, 140 GiB, 160 GiB"),
            (100.0 * GIB, 100.08 * GIB, "100.00 GiB, 100.02 GiB, 100.04 GiB, 100.06 GiB, 100.08 GiB"),
            (
                100.0 * GIB,
                100.0 * GIB + 20.0 * MIB,
                "102,400 MiB, 102,405 MiB, 102,410 MiB, 102,415 MiB, 102,420 MiB",
            ),
            (0.0, 800.0, "0 B, 200 B, 400 B, 600 B, 800 B"),
        ] {
            let ticks = AxisTicks::vertical(low, high);
            assert!(ticks.first() <= low && ticks.last() >= high, "{ticks:?}");
            assert_eq!(labels(&ticks).join(", "), found);
        }
        // For all values there are a few labels, and no two are equal.
        let mut low: f64 = 1.0;
        while low < 1e15 {
            for factor in [1.0003, 1.017, 1.4, 3.7, 250.0] {
                let ticks = AxisTicks::vertical(low, low * factor);
                let count = ticks.all.len();
                assert!((2..=8).contains(&count), "{low} {factor} {:?}", labels(&ticks));
                let (below, above) = (low * (1.0 + 1e-9), low * factor * (1.0 - 1e-9));
                assert!(ticks.first() <= below && ticks.last() >= above, "{low} {factor} {ticks:?}");
                let mut all = labels(&ticks);
                all.dedup();
                assert_eq!(all.len(), count, "{low} {factor} {all:?}");
            }
            low *= 1.7;
        }
    }

    #[test]
    fn a_clock_shows_whole_minutes_hours_and_days() {
        // Thursday, 26 November 2026, 14:03:20.
        let now = 1_795_701_800.0;
        let at = |span: f64| AxisTicks::horizontal(now - span, now);
        assert_eq!(labels(&at(3600.0)), ["13:10", "13:20", "13:30", "13:40", "13:50", "14:00"]);
        assert_eq!(labels(&at(6.0 * 3600.0)), ["09:00", "10:00", "11:00", "12:00", "13:00", "14:00"]);
        assert_eq!(labels(&at(86_400.0)), ["18:00", "26 Nov", "06:00", "12:00"]);
        assert_eq!(labels(&at(7.0 * 86_400.0)), ["21 Nov", "23 Nov", "25 Nov"]);
        assert_eq!(labels(&at(30.0 * 86_400.0)).len(), 6);
        assert_eq!(labels(&at(45.0)), ["14:02:45", "14:03:00", "14:03:15"]);
        assert!((3..=7).contains(&at(400.0 * 86_400.0).all.len()));
    }
}
