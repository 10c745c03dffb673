//! Attributes the growth between floors to a unit of work.
//!
//! ```text
//!  floors ──> differences ──> one robust fit per unit ──> the best unit, if it is clearly the best
//!                        └──> a non-negative fit with each other unit ──> the other unit's share, if it pays any
//! ```
//!
//! A floor read just after images is higher than a floor read after text, because some image memory is still
//! held. Held memory is not growth, but a fit would blame the units that come with images. Therefore held
//! memory is subtracted before fitting.
//!
//! The fits are non-negative least squares by coordinate descent inside Huber's iteratively reweighted least
//! squares. If the load does not separate several units, the module names all of them.
//!
//! Differences show the trigger of growth, which need not be its cause: blocks that requests leak fill the
//! holes that freed image buffers leave, so memory rises at the next image. In the long run, memory follows
//! the cause; therefore `confirm` also checks the levels.

use crate::growth::floors::FloorPoint;
use crate::growth::stats::{self, length_as_f64, median};
use crate::growth::{GrowthBlame, GrowthPolicy, WorkUnit};
use crate::units::as_f64;

/// Least gain in loss by a second unit. If a single unit leaks, a pair of units hardly ever gains so much.
const PAIR_GAIN: f64 = 2.0;
/// All units, in the order in which sentences name them.
const UNIT_ORDER: [WorkUnit; 6] = [
    WorkUnit::Request,
    WorkUnit::Image,
    WorkUnit::Audio,
    WorkUnit::PromptToken,
    WorkUnit::OutputToken,
    WorkUnit::Hour,
];
/// Huber's constant: 95 % efficiency of least squares on normal noise.
const HUBER_CONSTANT: f64 = 1.345;
const REWEIGHT_ROUNDS: usize = 8;
const DESCENT_SWEEPS: usize = 30;
/// A column whose remaining sum of squares is below this share of the original is only rounding error.
const ROUNDING_SHARE: f64 = 1e-9;

#[derive(Clone, Copy)]
struct UnitShare {
    /// Bytes for the mean amount of the unit between two floors.
    each: f64,
    /// Share of the growth, 0 to 1.
    share: f64,
}

#[derive(Clone)]
struct FloorDifferences {
    rise: Vec<f64>,
    /// For each unit that occurs: the unit, its amounts divided by their mean, and the mean.
    columns: Vec<(WorkUnit, Vec<f64>, f64)>,
    /// For each unit, the change of a floor's own step of work from one floor to the next. Memory still held
    /// for that step raises its floor and is not growth.
    around: Vec<Vec<f64>>,
}

impl FloorDifferences {
    fn from_floors(floors: &[FloorPoint]) -> Self {
        let rise = floors.windows(2).map(|two| two[1].level - two[0].level).collect();
        let mut columns = Vec::new();
        let mut around = Vec::new();
        for unit in UNIT_ORDER {
            let between = |two: &[FloorPoint]| match unit {
                WorkUnit::Hour => (two[1].hours - two[0].hours).max(0.0),
                _ => as_f64(unit.count_in(&(two[1].work - two[0].work))),
            };
            let amounts: Vec<f64> = floors.windows(2).map(between).collect();
            let mean = amounts.iter().sum::<f64>() / length_as_f64(amounts.len());
            if mean > 0.0 {
                columns.push((unit, amounts.iter().map(|amount| amount / mean).collect(), mean));
                let fresh = |floor: &FloorPoint| as_f64(unit.count_in(&floor.fresh));
                around.push(floors.windows(2).map(|two| fresh(&two[1]) - fresh(&two[0])).collect());
            }
        }
        Self { rise, columns, around }
    }

    /// Removes from the rise and from all columns the part that is proportional to a column of `around`.
    fn without_held(mut self) -> Self {
        let power = |change: &Vec<f64>| change.iter().map(|c| c * c).sum::<f64>();
        let before: Vec<f64> = self.around.iter().map(power).collect();
        while let Some(change) = self.around.pop() {
            let power = power(&change);
            // If units always occur together, removing one leaves only rounding error of the others.
            if power <= ROUNDING_SHARE * before[self.around.len()] {
                continue;
            }
            let take = |values: &mut Vec<f64>| {
                let along = values.iter().zip(&change).map(|(value, c)| value * c).sum::<f64>() / power;
                values.iter_mut().zip(&change).for_each(|(value, c)| *value -= along * c);
            };
            take(&mut self.rise);
            self.around.iter_mut().for_each(take);
            self.columns.iter_mut().for_each(|(_, amounts, _)| take(amounts));
        }
        self
    }

    /// Returns the table with held work removed if that improves the fit, and the deviation of the residuals.
    fn remove_held_if_better(&self, all: &[usize]) -> (Self, f64) {
        let (betas, scale) = self.fit(all, None);
        let without = self.clone().without_held();
        let (fewer, scale_without) = without.fit(all, None);
        if without.loss(all, &fewer, scale) < self.loss(all, &betas, scale) {
            (without, scale_without)
        } else {
            (self.clone(), scale)
        }
    }

    /// Returns the share of `column` when `other` may cause growth, too; `None` if `other` hardly improves
    /// the fit.
    fn share_with_other(&self, column: usize, other: usize, loss: f64, scale: f64) -> Option<UnitShare> {
        let of = [column, other];
        let (pair, _) = self.fit(&of, Some(scale));
        let better = loss - self.loss(&of, &pair, scale) > PAIR_GAIN;
        let sum: f64 = pair.iter().sum();
        (better && sum > 0.0).then(|| UnitShare { each: pair[0], share: pair[0] / sum })
    }

    fn residuals(&self, of: &[usize], betas: &[f64]) -> Vec<f64> {
        let fitted = |row: usize| -> f64 {
            of.iter().zip(betas).map(|(c, beta)| beta * self.columns[*c].1[row]).sum()
        };
        self.rise.iter().enumerate().map(|(row, rise)| rise - fitted(row)).collect()
    }

    /// Returns how unevenly a unit is spread over requests: the mean distance between the shares of both.
    fn unevenness(&self, unit: WorkUnit) -> f64 {
        let of = |unit| self.columns.iter().find(|column| column.0 == unit).map(|column| &column.1);
        let Some((requests, amounts)) = of(WorkUnit::Request).zip(of(unit)) else { return 0.0 };
        requests.iter().zip(amounts).map(|(a, b)| (a - b).abs()).sum::<f64>()
            / length_as_f64(requests.len().max(1))
    }

    /// Returns true if hours explain the growth clearly better than work, and the request rate varies enough.
    fn hours_fit_better(&self, policy: &GrowthPolicy) -> bool {
        if self.unevenness(WorkUnit::Hour) < policy.blame_uneven {
            return false;
        }
        let all: Vec<usize> = (0..self.columns.len()).collect();
        let (_, scale) = self.fit(&all, None);
        let (mut hour, mut work) = (f64::MAX, f64::MAX);
        for column in all {
            let (betas, _) = self.fit(&[column], Some(scale));
            let loss = self.loss(&[column], &betas, scale);
            let best = if self.columns[column].0 == WorkUnit::Hour { &mut hour } else { &mut work };
            *best = best.min(loss);
        }
        hour + policy.blame_margin < work
    }

    /// Fits some columns robustly, without negative coefficients. `scale`: residual deviation, if known.
    fn fit(&self, of: &[usize], scale: Option<f64>) -> (Vec<f64>, f64) {
        let mut betas = vec![0.0; of.len()];
        let mut weights = vec![1.0; self.rise.len()];
        let mut used = 0.0;
        for _ in 0..REWEIGHT_ROUNDS {
            for _ in 0..DESCENT_SWEEPS {
                let mut moved = 0.0_f64;
                let mut rests = self.residuals(of, &betas);
                for (index, column) in of.iter().enumerate() {
                    let xs = &self.columns[*column].1;
                    let (mut top, mut bottom) = (0.0, 0.0);
                    for ((x, rest), weight) in xs.iter().zip(&rests).zip(&weights) {
                        top += weight * x * (rest + betas[index] * x);
                        bottom += weight * x * x;
                    }
                    let new = if bottom > 0.0 { (top / bottom).max(0.0) } else { 0.0 };
                    let change = new - betas[index];
                    if change != 0.0 {
                        xs.iter().zip(&mut rests).for_each(|(x, rest)| *rest -= change * x);
                        moved = moved.max(change.abs());
                    }
                    betas[index] = new;
                }
                if of.len() == 1 || moved <= 1e-6 * betas.iter().copied().fold(0.0, f64::max) {
                    break;
                }
            }
            let rests = self.residuals(of, &betas);
            used = scale.unwrap_or_else(|| self.scale(&rests));
            if used <= 0.0 {
                break;
            }
            for (weight, rest) in weights.iter_mut().zip(&rests) {
                *weight = (HUBER_CONSTANT * used / rest.abs().max(f64::MIN_POSITIVE)).min(1.0);
            }
        }
        (betas, used)
    }

    /// Estimates the deviation of residuals, with a lower limit because pages and pools are coarse.
    fn scale(&self, rests: &[f64]) -> f64 {
        let of = |values: &[f64]| {
            let mut sizes: Vec<f64> = values.iter().map(|value| value.abs()).collect();
            median(&mut sizes).unwrap_or(0.0) * 1.4826
        };
        let power =
            self.rise.iter().map(|rise| rise * rise).sum::<f64>() / length_as_f64(self.rise.len().max(1));
        of(rests).max(0.01 * power.sqrt())
    }

    fn loss(&self, of: &[usize], betas: &[f64], scale: f64) -> f64 {
        huber_loss(&self.residuals(of, betas), scale)
    }
}

/// Returns Huber's loss in squared deviations. Differences of losses behave like a chi-squared statistic.
fn huber_loss(rests: &[f64], scale: f64) -> f64 {
    let loss = |rest: &f64| {
        let t = (rest / scale).abs();
        if t <= HUBER_CONSTANT { t * t } else { 2.0 * HUBER_CONSTANT * t - HUBER_CONSTANT * HUBER_CONSTANT }
    };
    rests.iter().map(loss).sum()
}

/// Finds the unit of work that explains the growth between these floors, which are given oldest first.
pub(super) fn explain(floors: &[FloorPoint], policy: &GrowthPolicy) -> GrowthBlame {
    let whole = FloorDifferences::from_floors(floors);
    let undecided = |why: &str| GrowthBlame::Undecided { why: why.to_owned() };
    if whole.rise.len() + 1 < policy.blame_floors {
        return undecided("too little work yet to tell its cause");
    }
    let all: Vec<usize> = (0..whole.columns.len()).collect();
    let (table, scale) = whole.remove_held_if_better(&all);
    let mut alone: Vec<(usize, f64, f64)> = Vec::new();
    for column in all.iter().copied() {
        let (betas, _) = table.fit(&[column], Some(scale));
        alone.push((column, betas[0], table.loss(&[column], &betas, scale)));
    }
    let unit_at = |column: usize| table.columns[column].0;
    let by_loss = |a: &&(usize, f64, f64), b: &&(usize, f64, f64)| a.2.total_cmp(&b.2);
    let of_work = alone.iter().filter(|(column, ..)| unit_at(*column) != WorkUnit::Hour);
    let Some(work) = of_work.min_by(by_loss) else { return undecided("no work was done while it grew") };
    let hour = alone.iter().find(|(column, ..)| unit_at(*column) == WorkUnit::Hour);
    let margin = policy.blame_margin;
    let winner = hour.filter(|_| hourly(floors, &whole, policy)).unwrap_or(work);
    let (column, beta, loss) = *winner;
    if beta <= 0.0 {
        return undecided("nothing that was counted explains the growth");
    }
    let rivals: Vec<WorkUnit> = alone
        .iter()
        .filter(|(other, beta, other_loss)| {
            *other != column
                && *beta > 0.0
                && unit_at(*other) != WorkUnit::Hour
                && *other_loss < loss + margin
        })
        .map(|(other, ..)| unit_at(*other))
        .collect();
    if !rivals.is_empty() {
        let shaped = rivals.iter().all(|unit| whole.unevenness(*unit) < policy.blame_uneven)
            && whole.unevenness(unit_at(column)) < policy.blame_uneven;
        return GrowthBlame::Undecided { why: ambiguity_sentence(unit_at(column), &rivals, shaped) };
    }
    let total: f64 = whole.rise.iter().sum();
    let rows = length_as_f64(whole.rise.len());
    let mut pays = UnitShare {
        each: beta,
        share: if total > 0.0 { (beta * rows / total).clamp(0.0, 1.0) } else { 1.0 },
    };
    // With a steady stream of requests, a fit of two units would split the share of the hours.
    if unit_at(column) != WorkUnit::Hour {
        for other in all.into_iter().filter(|other| *other != column) {
            let beside = table.share_with_other(column, other, loss, scale);
            pays = beside.filter(|part| part.share < pays.share).unwrap_or(pays);
        }
    }
    if pays.share < policy.blame_share {
        return undecided("several units of work share the growth, none causes most of it");
    }
    let (unit, _, mean) = &table.columns[column];
    GrowthBlame::Pays { unit: *unit, bytes_per_unit: pays.each / mean, share: pays.share }
}

/// Withdraws a blame on images or audio clips if the levels of the floors do not clearly confirm it.
pub(super) fn confirm(found: GrowthBlame, floors: &[FloorPoint], policy: &GrowthPolicy) -> GrowthBlame {
    match found {
        GrowthBlame::Pays { unit: unit @ (WorkUnit::Image | WorkUnit::Audio), .. }
            if follow_margin(floors, unit).is_none_or(|margin| margin < policy.blame_margin) =>
        {
            GrowthBlame::Undecided { why: trigger_sentence(unit) }
        }
        found => found,
    }
}

/// Returns how much better the levels follow this unit than any other, as a chi-squared statistic.
fn follow_margin(floors: &[FloorPoint], unit: WorkUnit) -> Option<f64> {
    let own = level_rests(floors, unit)?;
    // An exact line has no scatter, so assume a scatter of at least one byte.
    let scale = stats::scatter(&own, &own, 0.0).max(1.0);
    let others = UNIT_ORDER.into_iter().filter(|other| *other != unit && *other != WorkUnit::Hour);
    let losses = others.filter_map(|other| Some(huber_loss(&level_rests(floors, other)?, scale)));
    let gain = losses.min_by(f64::total_cmp)? - huber_loss(&own, scale);
    Some(gain / stats::autoregression_factor(&own, scale))
}

/// Returns the residuals of the levels from their line over a unit; `None` if the unit does not occur.
fn level_rests(floors: &[FloorPoint], unit: WorkUnit) -> Option<Vec<f64>> {
    let (xs, ys): (Vec<f64>, Vec<f64>) = floors.iter().map(|floor| (floor.done(unit), floor.level)).unzip();
    let slope = stats::sen_slope(&xs, &ys)?;
    let rests: Vec<f64> = xs.iter().zip(&ys).map(|(x, y)| y - slope * x).collect();
    let middle = median(&mut rests.clone())?;
    Some(rests.iter().map(|rest| rest - middle).collect())
}

/// Returns true if hours explain the growth between neighbouring and between every fourth floor. Neighbours
/// alone would blame hours at a constant request rate, because a request in flight takes memory before it is
/// counted.
fn hourly(floors: &[FloorPoint], table: &FloorDifferences, policy: &GrowthPolicy) -> bool {
    let fourth: Vec<FloorPoint> = floors.iter().step_by(4).copied().collect();
    table.hours_fit_better(policy) && FloorDifferences::from_floors(&fourth).hours_fit_better(policy)
}

pub(super) fn hours_pay(floors: &[FloorPoint], policy: &GrowthPolicy) -> bool {
    floors.len() >= policy.blame_floors && hourly(floors, &FloorDifferences::from_floors(floors), policy)
}

/// Returns the sentence for units that cannot be separated. `shaped`: all requests bring similar amounts.
fn ambiguity_sentence(winner: WorkUnit, rivals: &[WorkUnit], shaped: bool) -> String {
    let alike: Vec<&str> = UNIT_ORDER
        .iter()
        .filter(|unit| **unit == winner || rivals.contains(unit))
        .map(|unit| plural(*unit))
        .collect();
    let (end, others) = alike.split_last().map_or(("", &[][..]), |(end, others)| (*end, others));
    let list = format!("{} and {end}", others.join(", "));
    if shaped {
        format!(
            "request-shaped load: every request brings much the same work, so {list} cannot be told apart"
        )
    } else {
        format!("the growth is too uneven to tell {list} apart: each of them explains it about as well")
    }
}

/// Returns the sentence for memory that rises at a unit but may be leaked by other work.
fn trigger_sentence(unit: WorkUnit) -> String {
    format!(
        "each request and each {} cannot be told apart in this mix of work: \
         `llama-warden diagnose --workload short-text` tells whether requests without {} leak",
        unit.noun(),
        plural(unit)
    )
}

const fn plural(unit: WorkUnit) -> &'static str {
    match unit {
        WorkUnit::Request => "requests",
        WorkUnit::PromptToken => "prompt tokens",
        WorkUnit::OutputToken => "output tokens",
        WorkUnit::Image => "images",
        WorkUnit::Audio => "audio clips",
        WorkUnit::Hour => "hours",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_that_cannot_be_told_apart_are_all_named() {
        let all =
            [WorkUnit::PromptToken, WorkUnit::OutputToken, WorkUnit::Image, WorkUnit::Audio, WorkUnit::Hour];
        let told = [
            ambiguity_sentence(WorkUnit::Request, &[WorkUnit::Image], true),
            ambiguity_sentence(WorkUnit::Request, &all, false),
            trigger_sentence(WorkUnit::Image),
        ];
        insta::assert_snapshot!(told.join("\n"));
    }
}
