//! The task that decides which models are loaded. It owns [`Loading`], reads what the machine has, and carries words; the decisions
//! are all there.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use warden_policies::loading::{Amounts, Loading, Order, Seen, Who};
use warden_policies::units::scale;
use warden_policies::{ByteSize, GpuIndex, MemoryLimit};

use super::{Listener, LoadingDesk, Rules, Told, Word};
use crate::clock;
use crate::lease::queue::Leases;
use crate::process::{FreeMemory, TotalMemory, World};
use crate::sync::lock;
use crate::view::event::{EventKind, Journal};

/// Where somebody wants to be loaded for whom nobody waits.
const IDLE_LOOK: Duration = Duration::from_secs(1);

/// A model.
struct Member {
    leases: Arc<Leases>,
    listener: Listener,
    /// With which number it has asked last.
    asked: u64,
}

/// The task.
pub(crate) struct Loader {
    world: Arc<dyn World>,
    journal: Arc<Journal>,
    desk: Arc<LoadingDesk>,
    inbox: mpsc::UnboundedReceiver<(Who, Told)>,
    members: BTreeMap<Who, Member>,
    loading: Loading,
    /// Those of whom it was told that they wait.
    waits_told: BTreeSet<Who>,
    /// What the machine has.
    total: TotalMemory,
    /// Drivers and the kernel have this long to answer.
    limit: Duration,
    epoch: Instant,
}

impl Loader {
    pub(crate) fn new(
        world: Arc<dyn World>,
        journal: Arc<Journal>,
        desk: Arc<LoadingDesk>,
        inbox: mpsc::UnboundedReceiver<(Who, Told)>,
        limit: Duration,
    ) -> Self {
        let loading = Loading::new(lock(&desk.rules).numbers.clone());
        let (members, waits_told, epoch) = (BTreeMap::new(), BTreeSet::new(), Instant::now());
        let total = TotalMemory::default();
        Self { world, journal, desk, inbox, members, loading, waits_told, total, limit, epoch }
    }

    /// Runs until everything ends.
    pub(crate) async fn run(mut self, end: CancellationToken) {
        loop {
            let numbers = lock(&self.desk.rules).numbers.clone();
            let members = &self.members;
            let seen = |who: &Who| members.get(who).map_or_else(Seen::default, |member| member.leases.seen());
            let hurried = self.loading.is_hurried(seen);
            let pause = match (hurried, self.loading.is_moving()) {
                (true, _) => numbers.look,
                (false, true) => IDLE_LOOK,
                (false, false) => numbers.noted,
            };
            self.loading.set_numbers(numbers);
            tokio::select! {
                () = end.cancelled() => return,
                told = self.inbox.recv() => match told {
                    Some((who, told)) => self.take(who, told),
                    // Cannot be: the desk is ours, too.
                    None => return,
                },
                () = tokio::time::sleep_until(clock::again(Instant::now(), pause)) => {}
            }
            while let Ok((who, told)) = self.inbox.try_recv() {
                self.take(who, told);
            }
            self.decide().await;
            *lock(&self.desk.promised) = self.loading.owed();
        }
    }

    fn take(&mut self, who: Who, told: Told) {
        let (loading, now) = (&mut self.loading, self.epoch.elapsed());
        tracing::trace!(model = %who.name, ?told, "loading");
        match told {
            Told::Joins { leases, listener } => {
                self.members.insert(who, Member { leases, listener, asked: 0 });
            }
            Told::Wants { spec, urgent, number } => {
                if let Some(member) = self.members.get_mut(&who) {
                    member.asked = number;
                }
                loading.set(&who, *spec);
                loading.wants(&who, urgent);
            }
            Told::Is(spec) => loading.set(&who, *spec),
            Told::Loaded => loading.loaded(&who, now),
            Told::Read(reading) => loading.read(&who, reading),
            Told::Leaves => loading.leaves(&who),
            Told::Short => loading.short(&who, now),
            Told::Gone => {
                loading.gone(&who);
                self.waits_told.remove(&who);
            }
            Told::Removed => {
                loading.forget(&who);
                self.members.remove(&who);
                self.waits_told.remove(&who);
            }
        }
    }

    async fn decide(&mut self) {
        let now = self.epoch.elapsed();
        let members = &self.members;
        let seen = |who: &Who| members.get(who).map_or_else(Seen::default, |member| member.leases.seen());
        if !self.loading.is_moving() {
            self.loading.note(now, |who| seen(who).asked);
            return;
        }
        let now_there = self.world.total(self.limit).await;
        // A driver that does not answer for a moment has taken no GPU away.
        if now_there.gpus.len() >= self.total.gpus.len() {
            self.total = now_there;
        }
        let total = self.total.clone();
        let free = self.world.free(self.limit).await;
        let capacity = capacity(&total, &lock(&self.desk.rules));
        let free = amounts(&free, &capacity);
        self.loading.set_capacity(capacity);
        for order in self.loading.next(now, Some(&free), seen) {
            let (who, word) = match order {
                Order::Load { model, places } => {
                    self.waits_told.remove(&model);
                    let asked = members.get(&model).map_or(0, |member| member.asked);
                    (model, Word::Load(places, asked))
                }
                Order::Unload { model, makes_room_for } => (model, Word::Unload(makes_room_for)),
            };
            if let Some(member) = members.get(&who) {
                (member.listener)(word);
            }
        }
        for (who, needed, left) in self.loading.waiting() {
            if self.waits_told.insert(who.clone()) {
                let message = words(needed.as_ref(), &left);
                self.journal.tell(Some(&who.name), None, EventKind::WaitsForRoom { message });
            }
        }
    }
}

/// What models may have of a machine.
fn capacity(total: &TotalMemory, rules: &Rules) -> Amounts {
    let Rules { numbers, shared } = rules;
    let host = total.host.map_or(u64::MAX, |total| scale(total, 1.0 - numbers.host_kept));
    let host = shared.host_soft.map_or(host, |budget| host.min(budget.0));
    let budget = |total: u64| match shared.vram_soft? {
        MemoryLimit::Bytes(bytes) => Some(bytes.0),
        limit => limit.resolve(ByteSize(total)).map(|bytes| bytes.0),
    };
    let of = |total: u64| {
        let usual = scale(total, 1.0 - numbers.gpu_kept);
        budget(total).map_or(usual, |budget| usual.min(budget))
    };
    Amounts { host, gpus: by_index(total.gpus.iter().map(|(gpu, total)| (*gpu, of(*total)))) }
}

/// What anybody could take; where that is not known, all of it.
fn amounts(free: &FreeMemory, capacity: &Amounts) -> Amounts {
    let mut gpus = capacity.gpus.clone();
    for (gpu, bytes) in &free.gpus {
        let index = usize::try_from(gpu.0).unwrap_or(usize::MAX);
        if let Some(known) = gpus.get_mut(index) {
            *known = *bytes;
        }
    }
    Amounts { host: free.host.unwrap_or(u64::MAX), gpus }
}

/// By the number of the GPU. One that has no memory of its own has none.
fn by_index(gpus: impl Iterator<Item = (GpuIndex, u64)>) -> Vec<u64> {
    let mut all = Vec::new();
    for (gpu, bytes) in gpus {
        let index = usize::try_from(gpu.0).unwrap_or(0);
        all.resize(all.len().max(index + 1), 0);
        all[index] = bytes;
    }
    all
}

/// What a model that waits needs, and what is left, for people.
fn words(needed: Option<&Amounts>, left: &Amounts) -> String {
    let Some(needed) = needed else { return "others are loaded that exclude it".to_owned() };
    let of = |amounts: &Amounts| {
        let gpus: Vec<String> = amounts.gpus.iter().map(|bytes| ByteSize(*bytes).to_string()).collect();
        match (amounts.host, gpus.is_empty()) {
            (u64::MAX, true) => "an unknown amount of the host".to_owned(),
            (host, true) => format!("{} of the host", ByteSize(host)),
            (u64::MAX, false) => format!("{} of GPU memory", gpus.join(" and ")),
            (host, false) => {
                format!("{} of the host and {} of GPU memory", ByteSize(host), gpus.join(" and "))
            }
        }
    };
    format!("it needs {}; of what models may have, {} are left", of(needed), of(left))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::SharedBudgets;

    const GIB: u64 = 1 << 30;

    #[test]
    fn models_may_have_what_the_system_leaves_and_budgets_allow() {
        let total = TotalMemory { host: Some(64 * GIB), gpus: vec![(GpuIndex(1), 32 * GIB)] };
        let mut rules =
            Rules { numbers: warden_policies::defaults().loading.clone(), shared: SharedBudgets::default() };
        rules.numbers.gpu_kept = 0.25;
        assert_eq!(capacity(&total, &rules), Amounts { host: 60 * GIB, gpus: vec![0, 24 * GIB] });
        rules.shared.host_soft = Some(ByteSize(8 * GIB));
        rules.shared.vram_soft = Some(MemoryLimit::Percent(50.0));
        let less = capacity(&total, &rules);
        assert_eq!(less, Amounts { host: 8 * GIB, gpus: vec![0, 16 * GIB] });
        let free = FreeMemory { host: None, gpus: vec![(GpuIndex(1), 3 * GIB)] };
        assert_eq!(amounts(&free, &less), Amounts { host: u64::MAX, gpus: vec![0, 3 * GIB] });
        assert_eq!(capacity(&TotalMemory::default(), &rules).host, 8 * GIB);
    }

    #[test]
    fn who_waits_is_told_with_numbers() {
        let left = Amounts { host: GIB, gpus: vec![2 * GIB, 0] };
        let needed = Amounts { host: 0, gpus: vec![20 * GIB] };
        assert_eq!(
            words(Some(&needed), &left),
            "it needs 0 B of the host and 20.0 GiB of GPU memory; of what models may have, 1.0 GiB of the host and 2.0 GiB \
             and 0 B of GPU memory are left"
        );
        assert_eq!(words(None, &left), "others are loaded that exclude it");
    }
}
