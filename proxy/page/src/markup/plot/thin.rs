//! Reduces points to those that can be distinguished: all readings in one small interval of the axis become
//! one point, whose range includes all of theirs.

use super::PlotLevel;
use warden_policies::units::{as_f64, truncate_to_u64};

/// Most points drawn of one curve, more than a screen can show.
pub(super) const MAX_POINTS: usize = 1000;

/// Reduces stretches of readings to at most `most` points together. Each of `most` equal intervals keeps its
/// last reading, with the minimum and maximum of all its readings as the range. Drops gaps narrower than an
/// interval, and values that are no numbers.
pub(super) fn reduce_points(stretches: &[Vec<PlotLevel>], most: usize) -> Vec<Vec<PlotLevel>> {
    let all = || stretches.iter().flatten().filter(|level| level.is_known());
    let most = most.max(1);
    if all().count() <= most {
        let kept =
            stretches.iter().map(|stretch| stretch.iter().copied().filter(PlotLevel::is_known).collect());
        return kept.filter(|stretch: &Vec<PlotLevel>| !stretch.is_empty()).collect();
    }
    let first = all().map(|level| level.x).fold(f64::MAX, f64::min);
    let last = all().map(|level| level.x).fold(f64::MIN, f64::max);
    let places = u64::try_from(most).unwrap_or(u64::MAX);
    let place = |x: f64| {
        let share = if last > first { (x - first) / (last - first) } else { 0.0 };
        truncate_to_u64(share * as_f64(places)).min(places - 1)
    };
    let mut thinned: Vec<Vec<PlotLevel>> = Vec::new();
    // Interval and stretch of the last point.
    let mut before: Option<(u64, usize)> = None;
    for (number, stretch) in stretches.iter().enumerate() {
        for level in stretch.iter().filter(|level| level.is_known()) {
            let here = place(level.x);
            let same_place = before.is_some_and(|(place, _)| place >= here);
            let same_stretch = before.is_some_and(|(_, of)| of == number);
            match thinned.last_mut() {
                Some(points) if same_place => {
                    if let Some(point) = points.last_mut() {
                        *point = PlotLevel {
                            x: level.x.max(point.x),
                            low: point.low.min(level.low),
                            value: level.value,
                            high: point.high.max(level.high),
                        };
                    }
                }
                Some(points) if same_stretch => points.push(*level),
                _ => thinned.push(vec![*level]),
            }
            before = Some((before.map_or(here, |(place, _)| place.max(here)), number));
        }
    }
    thinned
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Deterministic pseudo-random numbers.
    fn noise(n: u64) -> f64 {
        as_f64(n.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407) >> 40)
    }

    #[test]
    fn extremes_and_the_last_reading_are_kept_whatever_is_left_out() {
        for (count, most) in [(10, 1000), (1000, 1000), (1001, 1000), (50_000, 1000), (50_000, 7), (3, 1)] {
            let stretch: Vec<PlotLevel> = (0..count).map(|n| PlotLevel::exact(as_f64(n), noise(n))).collect();
            let thinned = reduce_points(std::slice::from_ref(&stretch), most);
            let points: Vec<PlotLevel> = thinned.concat();
            assert!(points.len() <= most, "{count} {most}");
            let low = |of: &[PlotLevel]| of.iter().map(|level| level.low).fold(f64::MAX, f64::min);
            let high = |of: &[PlotLevel]| of.iter().map(|level| level.high).fold(f64::MIN, f64::max);
            assert!(low(&points) <= low(&stretch) && high(&points) >= high(&stretch));
            let (end, last) = (points.last().unwrap(), stretch.last().unwrap());
            assert_eq!((end.x, end.value), (last.x, last.value));
            assert!(points.windows(2).all(|two| two[0].x < two[1].x));
            assert!(
                points
                    .iter()
                    .all(|point| stretch.iter().any(|level| level.value.to_bits() == point.value.to_bits()))
            );
        }
    }

    #[test]
    fn gaps_stay_and_so_many_that_nobody_sees_them_do_not() {
        let stretch = |from: u64| -> Vec<PlotLevel> {
            (from..from + 400).map(|n| PlotLevel::exact(as_f64(n), 1.0)).collect()
        };
        assert_eq!(reduce_points(&[stretch(0), stretch(1000), stretch(2000)], 100).len(), 3);
        let short: Vec<Vec<PlotLevel>> =
            (0..9000).map(|n| vec![PlotLevel::exact(as_f64(n), noise(n))]).collect();
        let thinned = reduce_points(&short, 50);
        assert!(thinned.concat().len() <= 50);
    }

    #[test]
    fn what_is_no_number_or_goes_back_is_no_trouble() {
        let odd = vec![
            PlotLevel::exact(f64::NAN, 1.0),
            PlotLevel::exact(5.0, f64::INFINITY),
            PlotLevel::exact(3.0, 1.0),
            PlotLevel::exact(1.0, 2.0),
            PlotLevel::exact(9.0, 3.0),
        ];
        assert_eq!(reduce_points(std::slice::from_ref(&odd), 10).concat().len(), 3);
        assert!(reduce_points(&[odd], 2).concat().len() <= 2);
        assert!(reduce_points(&[], 10).is_empty() && reduce_points(&[vec![]], 0).is_empty());
    }
}
