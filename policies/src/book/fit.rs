//! Assigns models to the GPUs and the host memory of a machine; does no I/O.

use super::MemoryNeeds;

/// Memory of a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MachineCapacity {
    /// Bytes of the host available to models.
    pub host: u64,
    /// Bytes of each GPU available to models.
    pub gpus: Vec<u64>,
}

/// A model to be placed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacementRequest {
    /// Name of the model.
    pub name: String,
    /// Memory needs of the model.
    pub needs: MemoryNeeds,
    /// GPUs that the model may use; if empty, the model may use any GPU.
    pub gpus: Vec<usize>,
    /// The model may be split over several GPUs.
    pub may_split: bool,
}

/// GPUs assigned to a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelFit {
    /// Name of the model.
    pub name: String,
    /// GPUs with the model's bytes on each; empty for a model without GPU memory.
    pub gpus: Vec<(usize, u64)>,
}

/// Reason why models do not fit together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FitError {
    /// The host has too little memory.
    Host {
        /// Bytes that all models need together.
        needed: u64,
        /// Bytes available.
        there: u64,
    },
    /// No allowed GPU has room for a model.
    Gpu {
        /// Name of the model.
        name: String,
        /// Bytes needed when the model uses as few GPUs as possible.
        needed: u64,
        /// Most bytes free: on all allowed GPUs together if the model may be split, else on a single GPU.
        left: u64,
    },
}

/// Assigns all models at once, those with the fewest allowed GPUs first, then the largest. A model is split
/// only if no single GPU has room, over as few GPUs as suffice.
///
/// # Errors
/// The models do not fit.
pub fn fit_models(
    machine: &MachineCapacity,
    wanted: &[&PlacementRequest],
) -> Result<Vec<ModelFit>, FitError> {
    // The kernel can reclaim mapped pages, but each token would read them again: they must fit, too.
    let needed = wanted.iter().map(|one| one.needs.host_bytes() + one.needs.mapped).sum();
    if needed > machine.host {
        return Err(FitError::Host { needed, there: machine.host });
    }
    let mut order: Vec<&PlacementRequest> = wanted.to_vec();
    let choices =
        |one: &PlacementRequest| if one.gpus.is_empty() { machine.gpus.len() } else { one.gpus.len() };
    order.sort_by_key(|one| (choices(one), std::cmp::Reverse(one.needs.gpu_bytes(1)), one.name.clone()));
    let mut free = machine.gpus.clone();
    let mut placed = vec![None; order.len()];
    let mut worst = None;
    if place_from(&order, 0, &mut free, &mut placed, &mut worst) {
        return Ok(placed.into_iter().flatten().collect());
    }
    Err(worst.unwrap_or(FitError::Host { needed, there: machine.host }))
}

/// Assigns the models from index `at` on. If that fails, `worst` holds the first model without room.
fn place_from(
    order: &[&PlacementRequest],
    at: usize,
    free: &mut Vec<u64>,
    placed: &mut [Option<ModelFit>],
    worst: &mut Option<FitError>,
) -> bool {
    let Some(one) = order.get(at) else { return true };
    if !one.needs.uses_gpu() {
        placed[at] = Some(ModelFit { name: one.name.clone(), gpus: Vec::new() });
        return place_from(order, at + 1, free, placed, worst);
    }
    let allowed: Vec<usize> =
        (0..free.len()).filter(|gpu| one.gpus.is_empty() || one.gpus.contains(gpu)).collect();
    let whole = one.needs.gpu_bytes(1);
    // Try the GPU with the least sufficient room first; GPUs with equal room need no second try.
    let mut single: Vec<usize> = allowed.iter().copied().filter(|gpu| free[*gpu] >= whole).collect();
    single.sort_by_key(|gpu| free[*gpu]);
    single.dedup_by_key(|gpu| free[*gpu]);
    for gpu in single {
        free[gpu] -= whole;
        placed[at] = Some(ModelFit { name: one.name.clone(), gpus: vec![(gpu, whole)] });
        if place_from(order, at + 1, free, placed, worst) {
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
            let Some(shares) = split_shares(one, group, free) else { continue };
            for (gpu, bytes) in &shares {
                free[*gpu] -= bytes;
            }
            placed[at] = Some(ModelFit { name: one.name.clone(), gpus: shares.clone() });
            if place_from(order, at + 1, free, placed, worst) {
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
        FitError::Gpu { name: one.name.clone(), needed: whole, left }
    });
    false
}

/// Splits a model over these GPUs in proportion to their free memory; `None` if the model does not fit.
fn split_shares(one: &PlacementRequest, group: &[usize], free: &[u64]) -> Option<Vec<(usize, u64)>> {
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
