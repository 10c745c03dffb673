//! Who fits together on a machine, and where. Pure.

use super::Needs;

/// A machine, as far as its memory goes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Machine {
    /// Bytes of the host that models may have.
    pub host: u64,
    /// Bytes of each GPU that models may have.
    pub gpus: Vec<u64>,
}

/// A model that wants a place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Its name.
    pub name: String,
    /// What it needs.
    pub needs: Needs,
    /// The GPUs that it may be on; empty: any.
    pub gpus: Vec<usize>,
    /// It may be spread over several GPUs.
    pub may_split: bool,
}

/// Where a model is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fit {
    /// Its name.
    pub name: String,
    /// The GPUs, with bytes on each.
    pub gpus: Vec<(usize, u64)>,
}

/// Why models do not fit together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Misfit {
    /// The host is too small.
    Host {
        /// All of them need so much.
        needed: u64,
        /// There is so much.
        there: u64,
    },
    /// No GPU that it may be on has room for this one.
    Gpu {
        /// Whose place is missing.
        name: String,
        /// It needs so much, on as few GPUs as can be.
        needed: u64,
        /// The most that is left, on those GPUs together where it may be spread, else on one.
        left: u64,
    },
}

/// Places for all of them at once. The largest is placed first, on one GPU where that does, else spread over as few as do it. Those who
/// may be on one GPU only keep it.
///
/// # Errors
/// They do not fit.
pub fn fit(machine: &Machine, wanted: &[&Wanted]) -> Result<Vec<Fit>, Misfit> {
    // What is mapped can be taken back by the kernel, for the price of reading it again at each token: it has to be there.
    let needed = wanted.iter().map(|one| one.needs.host_bytes() + one.needs.mapped).sum();
    if needed > machine.host {
        return Err(Misfit::Host { needed, there: machine.host });
    }
    let mut order: Vec<&Wanted> = wanted.to_vec();
    // Who has fewer places to choose from first; of these, the largest.
    let choices = |one: &Wanted| if one.gpus.is_empty() { machine.gpus.len() } else { one.gpus.len() };
    order.sort_by_key(|one| (choices(one), std::cmp::Reverse(one.needs.gpu_bytes(1)), one.name.clone()));
    let mut free = machine.gpus.clone();
    let mut placed = vec![None; order.len()];
    let mut worst = None;
    if place(&order, 0, &mut free, &mut placed, &mut worst) {
        return Ok(placed.into_iter().flatten().collect());
    }
    Err(worst.unwrap_or(Misfit::Host { needed, there: machine.host }))
}

/// Finds places for all models from number `at` on. Where there is none, `worst` has the first model that found no room.
fn place(
    order: &[&Wanted],
    at: usize,
    free: &mut Vec<u64>,
    placed: &mut [Option<Fit>],
    worst: &mut Option<Misfit>,
) -> bool {
    let Some(one) = order.get(at) else { return true };
    if !one.needs.uses_gpu() {
        placed[at] = Some(Fit { name: one.name.clone(), gpus: Vec::new() });
        return place(order, at + 1, free, placed, worst);
    }
    let allowed: Vec<usize> =
        (0..free.len()).filter(|gpu| one.gpus.is_empty() || one.gpus.contains(gpu)).collect();
    let whole = one.needs.gpu_bytes(1);
    // The tightest place first; equal ones need not be tried twice.
    let mut single: Vec<usize> = allowed.iter().copied().filter(|gpu| free[*gpu] >= whole).collect();
    single.sort_by_key(|gpu| free[*gpu]);
    single.dedup_by_key(|gpu| free[*gpu]);
    for gpu in single {
        free[gpu] -= whole;
        placed[at] = Some(Fit { name: one.name.clone(), gpus: vec![(gpu, whole)] });
        if place(order, at + 1, free, placed, worst) {
            return true;
        }
        free[gpu] += whole;
    }
    let fits_alone = allowed.iter().any(|gpu| free[*gpu] >= whole);
    if one.may_split && !fits_alone {
        let mut by_room = allowed.clone();
        by_room.sort_by_key(|gpu| std::cmp::Reverse(free[*gpu]));
        for count in 2..=by_room.len() {
            let group = &by_room[..count];
            let Some(shares) = shares(one, group, free) else { continue };
            for (gpu, bytes) in &shares {
                free[*gpu] -= bytes;
            }
            placed[at] = Some(Fit { name: one.name.clone(), gpus: shares.clone() });
            if place(order, at + 1, free, placed, worst) {
                return true;
            }
            for (gpu, bytes) in &shares {
                free[*gpu] += bytes;
            }
            break;
        }
    }
    placed[at] = None;
    worst.get_or_insert_with(|| {
        let room = allowed.iter().map(|gpu| free[*gpu]);
        let left = if one.may_split { room.sum() } else { room.max().unwrap_or(0) };
        Misfit::Gpu { name: one.name.clone(), needed: whole, left }
    });
    false
}

/// Shares of one model on these GPUs, in proportion to their room, if that is enough.
fn shares(one: &Wanted, group: &[usize], free: &[u64]) -> Option<Vec<(usize, u64)>> {
    let count = group.len() as u64;
    let own = one.needs.own_of_each_gpu();
    let spread = one.needs.gpu_bytes(count).saturating_sub(own * count);
    let room: Vec<u64> = group.iter().map(|gpu| free[*gpu].saturating_sub(own)).collect();
    let all: u64 = room.iter().sum();
    if all < spread || room.contains(&0) {
        return None;
    }
    let share = |room: u64| u64::try_from(u128::from(spread) * u128::from(room) / u128::from(all) + 1).ok();
    let mut shares = Vec::with_capacity(group.len());
    for (gpu, room) in group.iter().zip(room) {
        shares.push((*gpu, own + share(room)?.min(room)));
    }
    Some(shares)
}
