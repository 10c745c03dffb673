//! What room there is, and whether a model fits into it.

use std::collections::BTreeMap;

use super::{Loading, Model, Place, State, Wish};
use crate::ModelName;
use crate::book::{self, Machine, Wanted};

/// Bytes of the host and of each GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Amounts {
    /// Of the host.
    pub host: u64,
    /// Of each GPU; those that are not listed have none.
    pub gpus: Vec<u64>,
}

impl Amounts {
    fn both(&self, other: &Self, of: impl Fn(u64, u64) -> u64) -> Self {
        let count = self.gpus.len().max(other.gpus.len());
        let at = |gpus: &[u64], index: usize| gpus.get(index).copied().unwrap_or(0);
        Self {
            host: of(self.host, other.host),
            gpus: (0..count).map(|index| of(at(&self.gpus, index), at(&other.gpus, index))).collect(),
        }
    }

    pub(super) fn plus(&self, other: &Self) -> Self {
        self.both(other, u64::saturating_add)
    }

    pub(super) fn minus(&self, other: &Self) -> Self {
        self.both(other, u64::saturating_sub)
    }

    pub(super) fn max(&self, other: &Self) -> Self {
        self.both(other, u64::max)
    }

    fn min(&self, other: &Self) -> Self {
        self.both(other, u64::min)
    }
}

/// What is left now, and when those who leave are gone.
struct Ledger {
    now: Amounts,
    soon: Amounts,
}

impl Ledger {
    /// As if `leave` were on their way out, too.
    fn of(
        models: &BTreeMap<ModelName, Model>,
        capacity: &Amounts,
        free: Option<&Amounts>,
        leave: &[&ModelName],
    ) -> Self {
        let known = || models.iter().filter(|(_, model)| model.is_there());
        let goes = |name: &ModelName, model: &Model| model.state == State::Leaves || leave.contains(&name);
        let there = || known().map(|(_, model)| model);
        let stays = || known().filter(|(name, model)| !goes(name, model)).map(|(_, model)| model);
        let leaves = || known().filter(|(name, model)| goes(name, model)).map(|(_, model)| model);
        let all = |models: &mut dyn Iterator<Item = &Model>, of: &dyn Fn(&Model) -> Amounts| {
            models.fold(Amounts::default(), |sum, model| sum.plus(&of(model)))
        };
        let of_file = |model: &Model| Amounts { host: model.mapped, gpus: Vec::new() };
        let promised = |model: &Model| model.promised.plus(&of_file(model));
        let held =
            |model: &Model| model.reading.as_ref().map(|reading| reading.held.clone()).unwrap_or_default();
        // What they were promised and have not taken, which free memory does not show. A mapped file is never shown.
        let owed = |model: &Model| model.promised.minus(&held(model)).plus(&of_file(model));
        let by_promise = |models: &mut dyn Iterator<Item = &Model>| capacity.minus(&all(models, &promised));
        let (mut now, mut soon) = (by_promise(&mut there()), by_promise(&mut stays()));
        if let Some(free) = free {
            let comes = || there().filter(|model| matches!(model.state, State::Comes { .. }));
            // What has gone since they were let in is what they have taken of their promises so far. Where somebody else took it, the start fails
            // for want of memory, which is known then.
            let before = comes().filter_map(|model| model.free_before.as_ref());
            let before = before.fold(Amounts::default(), |most, before| most.max(before));
            let not_taken = all(&mut comes(), &|model| model.promised.clone());
            let taken = before.minus(free).min(&not_taken);
            let serves = || stays().filter(|model| !matches!(model.state, State::Comes { .. }));
            let files = all(&mut comes(), &of_file);
            let owed = all(&mut serves(), &owed).plus(&files).plus(&not_taken.minus(&taken));
            now = now.min(&free.minus(&owed));
            // While one comes, what is free says little about what will be: nobody is driven out for that.
            if comes().next().is_none() {
                let returns = all(&mut leaves(), &held);
                soon = soon.min(&free.plus(&returns).minus(&owed));
            }
        }
        Self { now, soon }
    }
}

impl Loading {
    /// Whether there is room for a model, beside what is kept for others, if `leave` were on their way out.
    pub(super) fn place(&self, wish: &Wish<'_>, leave: &[&ModelName]) -> Place {
        let Wish { name, kept, free } = *wish;
        let Some(model) = self.models.get(name) else { return Place::Nowhere };
        let ledger = Ledger::of(&self.models, &self.capacity, free, leave);
        // Of what is free now the others' part is what they will have to have when all who leave are gone.
        let soon = ledger.soon.minus(kept);
        if let Some((places, promised)) = fit(name, model, &ledger.now.min(&soon)) {
            return Place::Now(places, promised);
        }
        if let Some((_, promised)) = fit(name, model, &soon) {
            return Place::Later(promised);
        }
        // Nobody is there: the book may be wrong, and a server that could run is not kept from trying.
        if !self.models.values().any(Model::is_there) && kept == &Amounts::default() {
            return Place::Now(vec![Vec::new(); replicas(model)], Amounts::default());
        }
        Place::Nowhere
    }
}

fn replicas(model: &Model) -> usize {
    usize::try_from(model.spec.replicas.max(1)).unwrap_or(usize::MAX)
}

/// Places for all processes of a model, and what they are promised.
fn fit(name: &ModelName, model: &Model, room: &Amounts) -> Option<(Vec<Vec<usize>>, Amounts)> {
    let spec = &model.spec;
    let count = replicas(model);
    let Some(needs) = &spec.needs else { return Some((vec![Vec::new(); count], Amounts::default())) };
    // They share one mapped file.
    let host = room.host.checked_sub(needs.mapped)?;
    let wanted: Vec<Wanted> = (0..count)
        .map(|number| Wanted {
            name: format!("{name} {number}"),
            needs: needs.clone(),
            gpus: spec.gpus.clone(),
            may_split: spec.may_split,
        })
        .collect();
    let all: Vec<&Wanted> = wanted.iter().collect();
    let fits = book::fit(&Machine { host, gpus: room.gpus.clone() }, &all).ok()?;
    let mut promised = Amounts { host: needs.host_bytes() * count as u64, gpus: vec![0; room.gpus.len()] };
    let mut places = Vec::with_capacity(count);
    for fit in fits {
        for (gpu, bytes) in &fit.gpus {
            promised.gpus[*gpu] += bytes;
        }
        places.push(fit.gpus.into_iter().map(|(gpu, _)| gpu).collect());
    }
    Some((places, promised))
}
