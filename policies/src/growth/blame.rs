//! Who pays: which unit of work explains the growth from floor to floor.
//!
//! ```text
//!  floors ──> differences ──> one robust fit for each unit alone ──> the best, if it is clearly the best
//!                        └──> with each other unit, none below zero ──> whether that one pays a part
//! ```
//!
//! A floor that was read just after images is higher than one after text, because something of them is still held. That is
//! no growth, and would be put down to whatever comes with images; so it is taken out of everything before.
//!
//! The fits are non-negative least squares by coordinate descent inside Huber's iteratively reweighted least squares.
//! Units that the load does not tell apart are named, never guessed between.

use crate::growth::floors::Point;
use crate::growth::stats::{median, size};
use crate::growth::{Blame, GrowthPolicy, Unit};
use crate::sample::Work;
use crate::units::exact;

/// Another unit takes its share if both explain so much more: where one alone leaks, both hardly ever do.
const PAIR_GAIN: f64 = 2.0;
/// The units, in the order in which they are named.
const UNITS: [Unit; 6] =
    [Unit::Request, Unit::Image, Unit::Audio, Unit::PromptToken, Unit::OutputToken, Unit::Hour];
/// Huber's constant: 95 % as good as least squares on normal noise.
const HUBER: f64 = 1.345;
const REWEIGHTS: usize = 8;
const SWEEPS: usize = 30;
/// A share of a column's power that is nothing but rounding.
const ROUNDING: f64 = 1e-9;

/// What a unit pays.
#[derive(Clone, Copy)]
struct Part {
    /// Bytes for a row's mean amount of it.
    each: f64,
    /// Share of the growth, 0 to 1.
    share: f64,
}

/// Differences between floors that follow each other.
#[derive(Clone)]
struct Table {
    rise: Vec<f64>,
    /// Units that occur, with their amounts divided by their mean, and that mean.
    columns: Vec<(Unit, Vec<f64>, f64)>,
    /// How the work in which a floor was read differs from that of the floor before, for each unit: what is still held of it
    /// makes a floor higher and is no growth.
    around: Vec<Vec<f64>>,
}

impl Table {
    fn of(floors: &[Point]) -> Self {
        let pairs = || floors.windows(2).map(|two| (two[1].work - two[0].work, two));
        let rise = pairs().map(|(_, two)| two[1].level - two[0].level).collect();
        let mut columns = Vec::new();
        let mut around = Vec::new();
        for unit in UNITS {
            let amounts: Vec<f64> = pairs()
                .map(|(work, two)| match unit {
                    Unit::Hour => (two[1].hours - two[0].hours).max(0.0),
                    _ => amount(&work, unit),
                })
                .collect();
            let mean = amounts.iter().sum::<f64>() / size(amounts.len());
            if mean > 0.0 {
                columns.push((unit, amounts.iter().map(|amount| amount / mean).collect(), mean));
                let held = |two: &[Point]| amount(&two[1].fresh, unit) - amount(&two[0].fresh, unit);
                around.push(floors.windows(2).map(held).collect());
            }
        }
        Self { rise, columns, around }
    }

    /// Takes out of the rise and of all columns what follows `around`.
    fn without_held(mut self) -> Self {
        let power = |change: &Vec<f64>| change.iter().map(|c| c * c).sum::<f64>();
        let before: Vec<f64> = self.around.iter().map(power).collect();
        while let Some(change) = self.around.pop() {
            let power = power(&change);
            // Units that come together leave nothing of each other but rounding.
            if power <= ROUNDING * before[self.around.len()] {
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

    /// Without what is held of work, where that explains anything (a GPU's pools never shrink, so it holds nothing that
    /// others do not), and the deviation of what no work explains.
    fn clearest(&self, all: &[usize]) -> (Self, f64) {
        let (betas, scale) = self.fit(all, None);
        let without = self.clone().without_held();
        let (fewer, scale_without) = without.fit(all, None);
        if without.loss(all, &fewer, scale) < self.loss(all, &betas, scale) {
            (without, scale_without)
        } else {
            (self.clone(), scale)
        }
    }

    /// What is left for a unit where another one pays beside it; `None` if the two explain the growth hardly better than it
    /// does alone, with this loss.
    fn beside(&self, column: usize, other: usize, loss: f64, scale: f64) -> Option<Part> {
        let of = [column, other];
        let (pair, _) = self.fit(&of, Some(scale));
        let better = loss - self.loss(&of, &pair, scale) > PAIR_GAIN;
        let sum: f64 = pair.iter().sum();
        (better && sum > 0.0).then(|| Part { each: pair[0], share: pair[0] / sum })
    }

    fn rests(&self, of: &[usize], betas: &[f64]) -> Vec<f64> {
        let fitted = |row: usize| -> f64 {
            of.iter().zip(betas).map(|(c, beta)| beta * self.columns[*c].1[row]).sum()
        };
        self.rise.iter().enumerate().map(|(row, rise)| rise - fitted(row)).collect()
    }

    /// How much the amount of a unit in a request varies: the mean distance between shares of the requests and of it.
    fn uneven(&self, unit: Unit) -> f64 {
        let of = |unit| self.columns.iter().find(|column| column.0 == unit).map(|column| &column.1);
        let Some((requests, amounts)) = of(Unit::Request).zip(of(unit)) else { return 0.0 };
        requests.iter().zip(amounts).map(|(a, b)| (a - b).abs()).sum::<f64>() / size(requests.len().max(1))
    }

    /// Hours explain the growth clearly better than all work, and the rate of requests varies enough to say so.
    fn hourly(&self, policy: &GrowthPolicy) -> bool {
        if self.uneven(Unit::Hour) < policy.blame_uneven {
            return false;
        }
        let all: Vec<usize> = (0..self.columns.len()).collect();
        let (_, scale) = self.fit(&all, None);
        let (mut hour, mut work) = (f64::MAX, f64::MAX);
        for column in all {
            let (betas, _) = self.fit(&[column], Some(scale));
            let loss = self.loss(&[column], &betas, scale);
            let best = if self.columns[column].0 == Unit::Hour { &mut hour } else { &mut work };
            *best = best.min(loss);
        }
        hour + policy.blame_margin < work
    }

    /// Robust non-negative fit of some columns. `scale`: deviation of the rests, measured anew each time if `None`.
    fn fit(&self, of: &[usize], scale: Option<f64>) -> (Vec<f64>, f64) {
        let mut betas = vec![0.0; of.len()];
        let mut weights = vec![1.0; self.rise.len()];
        let mut used = 0.0;
        for _ in 0..REWEIGHTS {
            for _ in 0..SWEEPS {
                let mut moved = 0.0_f64;
                let mut rests = self.rests(of, &betas);
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
            let rests = self.rests(of, &betas);
            used = scale.unwrap_or_else(|| self.scale(&rests));
            if used <= 0.0 {
                break;
            }
            for (weight, rest) in weights.iter_mut().zip(&rests) {
                *weight = (HUBER * used / rest.abs().max(f64::MIN_POSITIVE)).min(1.0);
            }
        }
        (betas, used)
    }

    /// Deviation of rests, never quite zero: whole pages and pool steps are coarser than that anyway.
    fn scale(&self, rests: &[f64]) -> f64 {
        let of = |values: &[f64]| {
            let mut sizes: Vec<f64> = values.iter().map(|value| value.abs()).collect();
            median(&mut sizes).unwrap_or(0.0) * 1.4826
        };
        let power = self.rise.iter().map(|rise| rise * rise).sum::<f64>() / size(self.rise.len().max(1));
        of(rests).max(0.01 * power.sqrt())
    }

    /// Huber's loss in squared deviations: differences of it behave like a chi-squared statistic.
    fn loss(&self, of: &[usize], betas: &[f64], scale: f64) -> f64 {
        let loss = |rest: f64| {
            let t = (rest / scale).abs();
            if t <= HUBER { t * t } else { 2.0 * HUBER * t - HUBER * HUBER }
        };
        self.rests(of, betas).into_iter().map(loss).sum()
    }
}

fn amount(work: &Work, unit: Unit) -> f64 {
    match unit {
        Unit::Request => exact(work.requests),
        Unit::PromptToken => exact(work.prompt_tokens),
        Unit::OutputToken => exact(work.output_tokens),
        Unit::Image => exact(work.images),
        Unit::Audio => exact(work.audio),
        Unit::Hour => 0.0,
    }
}

/// Which unit of work pays for the growth between these floors, oldest first.
pub(super) fn blame(floors: &[Point], policy: &GrowthPolicy) -> Blame {
    let whole = Table::of(floors);
    let undecided = |why: &str| Blame::Undecided { why: why.to_owned() };
    if whole.rise.len() + 1 < policy.blame_floors {
        return undecided("too little work yet to tell who pays");
    }
    let all: Vec<usize> = (0..whole.columns.len()).collect();
    let (table, scale) = whole.clearest(&all);
    let mut alone: Vec<(usize, f64, f64)> = Vec::new();
    for column in all.iter().copied() {
        let (betas, _) = table.fit(&[column], Some(scale));
        alone.push((column, betas[0], table.loss(&[column], &betas, scale)));
    }
    let unit_at = |column: usize| table.columns[column].0;
    let by_loss = |a: &&(usize, f64, f64), b: &&(usize, f64, f64)| a.2.total_cmp(&b.2);
    let of_work = alone.iter().filter(|(column, ..)| unit_at(*column) != Unit::Hour);
    let Some(work) = of_work.min_by(by_loss) else { return undecided("no work was done while it grew") };
    let hour = alone.iter().find(|(column, ..)| unit_at(*column) == Unit::Hour);
    let margin = policy.blame_margin;
    let winner = hour.filter(|_| hourly(floors, &whole, policy)).unwrap_or(work);
    let (column, beta, loss) = *winner;
    if beta <= 0.0 {
        return undecided("nothing that was counted explains the growth");
    }
    let rivals: Vec<Unit> = alone
        .iter()
        .filter(|(other, beta, other_loss)| {
            *other != column && *beta > 0.0 && unit_at(*other) != Unit::Hour && *other_loss < loss + margin
        })
        .map(|(other, ..)| unit_at(*other))
        .collect();
    if !rivals.is_empty() {
        let shaped = rivals.iter().all(|unit| whole.uneven(*unit) < policy.blame_uneven)
            && whole.uneven(unit_at(column)) < policy.blame_uneven;
        return Blame::Undecided { why: alike(unit_at(column), &rivals, shaped) };
    }
    let total: f64 = whole.rise.iter().sum();
    let rows = size(whole.rise.len());
    let mut pays =
        Part { each: beta, share: if total > 0.0 { (beta * rows / total).clamp(0.0, 1.0) } else { 1.0 } };
    // Hours are beyond doubt here: with a steady stream of requests beside them, the fit of two splits what is theirs.
    if unit_at(column) != Unit::Hour {
        for other in all.into_iter().filter(|other| *other != column) {
            let beside = table.beside(column, other, loss, scale);
            pays = beside.filter(|part| part.share < pays.share).unwrap_or(pays);
        }
    }
    if pays.share < policy.blame_share {
        return undecided("several units of work pay together, none of them most of it");
    }
    let (unit, _, mean) = &table.columns[column];
    Blame::Pays { unit: *unit, bytes_per_unit: pays.each / mean, share: pays.share }
}

/// Whether hours pay, from floor to floor and also from every fourth to every fourth. Requests that come at a constant
/// rate make hours look guilty, even more so as a request in flight takes memory before it is counted: over longer
/// stretches that is nothing, and what is left of the difference is the rate.
fn hourly(floors: &[Point], table: &Table, policy: &GrowthPolicy) -> bool {
    let fourth: Vec<Point> = floors.iter().step_by(4).copied().collect();
    table.hourly(policy) && Table::of(&fourth).hourly(policy)
}

/// Whether hours pay for the growth between these floors, beyond doubt.
pub(super) fn time_pays(floors: &[Point], policy: &GrowthPolicy) -> bool {
    floors.len() >= policy.blame_floors && hourly(floors, &Table::of(floors), policy)
}

/// The sentence for units that cannot be told apart. `shaped`: every request brings much the same of each.
fn alike(winner: Unit, rivals: &[Unit], shaped: bool) -> String {
    let alike: Vec<&str> = UNITS
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

const fn plural(unit: Unit) -> &'static str {
    match unit {
        Unit::Request => "requests",
        Unit::PromptToken => "prompt tokens",
        Unit::OutputToken => "output tokens",
        Unit::Image => "images",
        Unit::Audio => "audio clips",
        Unit::Hour => "hours",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_that_cannot_be_told_apart_are_all_named() {
        let all = [Unit::PromptToken, Unit::OutputToken, Unit::Image, Unit::Audio, Unit::Hour];
        let told = [alike(Unit::Request, &[Unit::Image], true), alike(Unit::Request, &all, false)];
        insta::assert_snapshot!(told.join("\n"));
    }
}
