//! Task that loads and unloads models. [`LoadingState`] makes the decisions, and the task sends the orders to
//! the models' tasks.

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use warden_policies::loading::{
    LoadRefusal, LoaderOrder, LoadingState, MemoryAmounts, MissingRoom, ModelActivity, ModelId,
};
use warden_policies::{ByteSize, MemoryKind, ModelName};

use super::{LoaderInbox, LoadingDesk, LoadingListener, LoadingOrder, LoadingReport};
use crate::clock;
use crate::lease::queue::LeaseQueue;
use crate::process::{MachineMemory, ProcessWorld};
use crate::spec::CommonConfig;
use crate::sync::lock;
use crate::view::event::{EventJournal, EventKind};

/// Interval for checking free memory while models without a waiting request wait for room.
const IDLE_LOOK_INTERVAL: Duration = Duration::from_secs(1);

struct LoaderMember {
    leases: Arc<LeaseQueue>,
    listener: LoadingListener,
    /// Number of the model's last request for room or question.
    wish_number: u64,
    question_number: u64,
    is_wait_logged: bool,
    is_informed_never: bool,
    is_never_logged: bool,
}

pub(crate) struct ModelLoader {
    world: Arc<dyn ProcessWorld>,
    journal: Arc<EventJournal>,
    desk: Arc<LoadingDesk>,
    common: Arc<Mutex<CommonConfig>>,
    inbox: LoaderInbox,
    members: BTreeMap<ModelId, LoaderMember>,
    loading: LoadingState,
    /// Free memory at the last reading; `None` before the first.
    free: Option<MemoryAmounts>,
    /// Time of the last publication; `None` if an event has outdated it.
    published_at: Option<Instant>,
    total: MachineMemory,
    limit: Duration,
    epoch: Instant,
}

impl ModelLoader {
    pub(crate) fn new(
        world: Arc<dyn ProcessWorld>,
        journal: Arc<EventJournal>,
        desk: Arc<LoadingDesk>,
        common: Arc<Mutex<CommonConfig>>,
        inbox: LoaderInbox,
        limit: Duration,
    ) -> Self {
        let loading = LoadingState::new(lock(&common).loading.clone());
        Self {
            world,
            journal,
            desk,
            common,
            inbox,
            members: BTreeMap::new(),
            loading,
            free: None,
            published_at: None,
            total: MachineMemory::default(),
            limit,
            epoch: Instant::now(),
        }
    }

    /// Runs until shutdown. After a panic, the loop starts again with the same state: otherwise no model
    /// could be loaded.
    pub(crate) async fn run(mut self, end: CancellationToken) {
        while AssertUnwindSafe(self.run_loop(&end)).catch_unwind().await.is_err() {
            tracing::error!(
                "the task that decides which models are loaded ended in an internal error: restarting it"
            );
            tokio::time::sleep(IDLE_LOOK_INTERVAL).await;
        }
    }

    async fn run_loop(&mut self, end: &CancellationToken) {
        loop {
            let numbers = lock(&self.common).loading.clone();
            let pause = if self.loading.models.expects_orders_soon(model_states(&self.members)) {
                if self.loading.awaits_memory() { numbers.look_closely } else { numbers.look }
            } else if self.loading.models.has_waiters() {
                IDLE_LOOK_INTERVAL
            } else {
                numbers.noted
            };
            self.loading.numbers = numbers;
            let due = clock::after_pause(Instant::now(), pause);
            loop {
                tokio::select! {
                    () = end.cancelled() => return,
                    Some(question) = self.inbox.beats.recv() => {
                        // Sending fails if the watchdog no longer waits. Continue the pause until `due`.
                        let _left = question.send(());
                        continue;
                    }
                    told = self.inbox.reports.recv() => match told {
                        Some((who, told)) => self.take_report(who, told),
                        // Unreachable: this task holds a sender too.
                        None => return,
                    },
                    () = tokio::time::sleep_until(due) => {}
                }
                break;
            }
            while let Ok((who, told)) = self.inbox.reports.try_recv() {
                self.take_report(who, told);
            }
            self.decide().await;
            *lock(&self.desk.promised) = self.loading.models.owed();
            *lock(&self.desk.company) =
                self.loading.models.held_companions(model_states(&self.members)).into_iter().collect();
            self.publish_room().await;
        }
    }

    /// Publishes which models have room, after each event and from time to time. The gateway uses this to
    /// choose among several models of a name in `[names]`.
    async fn publish_room(&mut self) {
        if self.published_at.is_some_and(|at| at.elapsed() < IDLE_LOOK_INTERVAL) {
            return;
        }
        if !self.loading.models.has_waiters() {
            let capacity = capacity(&self.total, &lock(&self.common));
            self.free = Some(free_amounts(&self.world.free_memory(self.limit).await, &capacity));
        }
        // Before the first load, memory is not read and all models count as having room.
        let free = if self.total == MachineMemory::default() { None } else { self.free.as_ref() };
        *lock(&self.desk.roomy) = self.loading.models_with_room(free);
        *lock(&self.desk.refused) = self.loading.refused_models();
        self.published_at = Some(Instant::now());
    }

    fn take_report(&mut self, who: ModelId, told: LoadingReport) {
        // Readings are frequent, so publish their effect within a second.
        if !matches!(told, LoadingReport::Measured(_)) {
            self.published_at = None;
        }
        let now = self.epoch.elapsed();
        let loading = &mut self.loading;
        tracing::trace!(model = %who.name, ?told, "loading");
        if let LoadingReport::Joined { leases, listener } = told {
            self.members.insert(who, LoaderMember::new(leases, listener));
            return;
        }
        // Unreachable: each model joins first.
        let Some(member) = self.members.get_mut(&who) else { return };
        match told {
            LoadingReport::Joined { .. } => {}
            LoadingReport::Wanted { spec, urgent, number } => {
                member.wish_number = number;
                member.is_informed_never = false;
                loading.models.set_spec(&who, *spec);
                loading.models.enqueue(&who, urgent);
            }
            LoadingReport::SettingsChanged(spec) => {
                member.is_informed_never = false;
                member.is_never_logged = false;
                loading.models.set_spec(&who, *spec);
            }
            LoadingReport::ReplacementPlanned(number) => {
                member.question_number = number;
                loading.models.request_renewal(&who, now);
            }
            LoadingReport::ReplacementDropped => loading.renewal_failed(&who),
            LoadingReport::Inherited(places) => loading.record_inherited(&who, places, now),
            LoadingReport::Loaded => loading.record_loaded(&who, now),
            LoadingReport::Measured(reading) => loading.record_reading(&who, reading),
            LoadingReport::Leaving => loading.record_leaving(&who),
            LoadingReport::Reclaimed => loading.models.reclaim_ended(&who),
            LoadingReport::StartShort => loading.raise_needs(&who, now),
            LoadingReport::Unloaded => {
                member.is_wait_logged = false;
                loading.record_gone(&who);
            }
            LoadingReport::Removed => {
                loading.forget(&who);
                self.members.remove(&who);
            }
        }
    }

    async fn decide(&mut self) {
        let now = self.epoch.elapsed();
        if !self.loading.models.has_waiters() {
            let states = model_states(&self.members);
            self.loading.models.record_requests(now, |who| states(who).requests);
            return;
        }
        let total = self.world.total_memory(self.limit).await;
        // A driver that does not answer for a moment must not look like a lost GPU.
        if total.gpus.len() >= self.total.gpus.len() {
            self.total = total;
        }
        let free = self.world.free_memory(self.limit).await;
        let capacity = capacity(&self.total, &lock(&self.common));
        let free = free_amounts(&free, &capacity);
        tracing::trace!(?free, "looked for room");
        self.loading.capacity = capacity;
        let orders = self.loading.next_orders(now, Some(&free), model_states(&self.members));
        self.free = Some(free);
        if !orders.is_empty() {
            self.published_at = None;
        }
        for order in orders {
            self.send_order(order);
        }
        let hopeless = self.loading.hopeless_models();
        for (who, never) in &hopeless {
            self.note_hopeless(who, never);
        }
        for (who, lacks) in self.loading.waiting(self.free.as_ref()) {
            if !hopeless.iter().any(|(other, _)| *other == who) {
                self.log_waiting(&who, &lacks);
            }
        }
    }

    fn send_order(&mut self, order: LoaderOrder) {
        let (LoaderOrder::Load { model, .. }
        | LoaderOrder::Unload { model, .. }
        | LoaderOrder::Reclaim { model }
        | LoaderOrder::Renew { model, .. }
        | LoaderOrder::Restart { model, .. }
        | LoaderOrder::CallCompanion { model }) = &order;
        let Some(member) = self.members.get_mut(model) else { return };
        let question = member.question_number;
        let order = match order {
            LoaderOrder::Load { places, .. } => {
                member.is_wait_logged = false;
                member.is_never_logged = false;
                LoadingOrder::Load(places, member.wish_number)
            }
            LoaderOrder::Unload { replaced_by, .. } => LoadingOrder::Unload(replaced_by),
            LoaderOrder::Reclaim { .. } => LoadingOrder::ReclaimMemory,
            LoaderOrder::Renew { places, beside, .. } => LoadingOrder::Stay { places, beside, question },
            LoaderOrder::Restart { lacks, .. } => {
                LoadingOrder::Reload { why: shortage_words(&lacks), question }
            }
            LoaderOrder::CallCompanion { .. } => LoadingOrder::LoadAlong,
        };
        (member.listener)(order);
    }

    /// Logs that a model can never be loaded. Informs the model once, and again whenever requests wait.
    fn note_hopeless(&mut self, who: &ModelId, never: &LoadRefusal) {
        let Some(member) = self.members.get_mut(who) else { return };
        if !std::mem::replace(&mut member.is_never_logged, true) {
            let message = never_words(never);
            self.journal.record(Some(&who.name), None, EventKind::WaitsForRoom { message });
        }
        let was_informed = std::mem::replace(&mut member.is_informed_never, true);
        if !was_informed || member.leases.loader_view().waiting > 0 {
            let by_room = matches!(never, LoadRefusal::Room { .. });
            (member.listener)(LoadingOrder::NeverLoad { why: never_words(never), by_room });
        }
    }

    fn log_waiting(&mut self, who: &ModelId, lacks: &MissingRoom) {
        let Some(member) = self.members.get_mut(who) else { return };
        if std::mem::replace(&mut member.is_wait_logged, true) {
            return;
        }
        if lacks.needed.as_ref().is_some_and(|needed| needed.host > lacks.left.host) {
            for member in self.members.values() {
                (member.listener)(LoadingOrder::DropKeptState);
            }
        }
        let message = shortage_words(lacks);
        self.journal.record(Some(&who.name), None, EventKind::WaitsForRoom { message });
    }
}

impl LoaderMember {
    fn new(leases: Arc<LeaseQueue>, listener: LoadingListener) -> Self {
        Self {
            leases,
            listener,
            wish_number: 0,
            question_number: 0,
            is_wait_logged: false,
            is_informed_never: false,
            is_never_logged: false,
        }
    }
}

fn model_states(members: &BTreeMap<ModelId, LoaderMember>) -> impl Fn(&ModelId) -> ModelActivity + Copy + '_ {
    move |who| members.get(who).map_or_else(ModelActivity::default, |member| member.leases.loader_view())
}

/// Memory that models may use; 0 for a GPU without its own memory.
fn capacity(total: &MachineMemory, common: &CommonConfig) -> MemoryAmounts {
    let CommonConfig { loading, shared, .. } = common;
    let host = total.host.map_or(u64::MAX, |total| loading.left_of_host(total));
    let host = shared.host_soft.map_or(host, |budget| host.min(budget.0));
    let mut capacity = MemoryAmounts { host, gpus: Vec::new() };
    for (gpu, total) in &total.gpus {
        let budget = shared.vram_soft.and_then(|budget| budget.resolve(ByteSize(*total)));
        let left = loading.left_of_gpu(*total);
        capacity.add(MemoryKind::Vram(*gpu), budget.map_or(left, |budget| left.min(budget.0)));
    }
    capacity
}

/// Free memory. All memory of an unknown amount counts as free.
fn free_amounts(free: &MachineMemory, capacity: &MemoryAmounts) -> MemoryAmounts {
    let mut all = MemoryAmounts { host: free.host.unwrap_or(u64::MAX), gpus: Vec::new() };
    for (index, most) in (0..).zip(&capacity.gpus) {
        let known = free.gpus.iter().find(|(gpu, _)| gpu.0 == index).map(|(_, bytes)| *bytes);
        all.gpus.push(known.unwrap_or(*most));
    }
    all
}

/// Sentence about the needed and the available memory.
fn shortage_words(lacks: &MissingRoom) -> String {
    let MissingRoom { needed, left, excluded: company } = lacks;
    let is_short = |needed: &&MemoryAmounts| needed.exceeds(left) != (false, false);
    if let Some(needed) = needed.as_ref().filter(is_short) {
        format!(
            "it needs {}; of what models may have, {} are left",
            amounts_words(needed),
            amounts_words(left)
        )
    } else if *company {
        "models that exclude it are loaded, or as many as `loading.max_loaded` allows".to_owned()
    } else {
        "the memory left is not free yet, or is on GPUs that it may not use".to_owned()
    }
}

fn amounts_words(amounts: &MemoryAmounts) -> String {
    let gpus: Vec<String> = amounts.gpus.iter().map(|bytes| ByteSize(*bytes).to_string()).collect();
    match (amounts.host, gpus.is_empty()) {
        (u64::MAX, true) => "an unknown amount of the host".to_owned(),
        (host, true) => format!("{} of the host", ByteSize(host)),
        (u64::MAX, false) => format!("{} of GPU memory", gpus.join(" and ")),
        (host, false) => format!("{} of the host and {} of GPU memory", ByteSize(host), gpus.join(" and ")),
    }
}

/// Sentence about the reason why a model can never be loaded, with advice.
fn never_words(never: &LoadRefusal) -> String {
    let list = |models: &[ModelName]| {
        let models: Vec<String> = models.iter().map(|model| format!("`{model}`")).collect();
        models.join(", ")
    };
    match never {
        LoadRefusal::Excluded(pinned) => {
            format!("{} (`pin`) exclude it by `groups`, and are never unloaded", list(pinned))
        }
        LoadRefusal::Count { pinned, most } => format!(
            "{most} models may be loaded (`loading.max_loaded`), and as many are never unloaded (`pin`): {}",
            list(pinned)
        ),
        LoadRefusal::Room { needed, left, pinned } if pinned.is_empty() => {
            format!("it needs {}, and models may have {}", amounts_words(needed), amounts_words(left))
        }
        LoadRefusal::Room { needed, left, pinned } => format!(
            "it needs {}, and models that are never unloaded (`pin`: {}) leave {}",
            amounts_words(needed),
            list(pinned),
            amounts_words(left)
        ),
    }
}

#[cfg(test)]
mod tests {
    use warden_policies::{GpuIndex, MemoryLimit, defaults};

    use super::*;
    use crate::spec::SharedBudgets;

    const GIB: u64 = 1 << 30;

    #[test]
    fn models_may_have_what_the_system_leaves_and_budgets_allow() {
        let total = MachineMemory { host: Some(64 * GIB), gpus: vec![(GpuIndex(1), 32 * GIB)] };
        let mut rules = CommonConfig {
            shared: SharedBudgets::default(),
            loading: defaults().loading.clone(),
            growth: defaults().growth.clone(),
            health: defaults().health.clone(),
        };
        rules.loading.gpu_kept = 0.25;
        assert_eq!(capacity(&total, &rules), MemoryAmounts { host: 60 * GIB, gpus: vec![0, 24 * GIB] });
        rules.shared.host_soft = Some(ByteSize(8 * GIB));
        rules.shared.vram_soft = Some(MemoryLimit::Percent(50.0));
        let less = capacity(&total, &rules);
        assert_eq!(less, MemoryAmounts { host: 8 * GIB, gpus: vec![0, 16 * GIB] });
        let free = MachineMemory { host: None, gpus: vec![(GpuIndex(1), 3 * GIB)] };
        assert_eq!(free_amounts(&free, &less), MemoryAmounts { host: u64::MAX, gpus: vec![0, 3 * GIB] });
        assert_eq!(capacity(&MachineMemory::default(), &rules).host, 8 * GIB);
    }

    #[test]
    fn who_waits_is_told_with_numbers() {
        let left = MemoryAmounts { host: GIB, gpus: vec![2 * GIB, 0] };
        let needed = MemoryAmounts { host: 0, gpus: vec![20 * GIB] };
        let lacks = |needed: Option<&MemoryAmounts>, company| MissingRoom {
            needed: needed.cloned(),
            left: left.clone(),
            excluded: company,
        };
        assert_eq!(
            shortage_words(&lacks(Some(&needed), true)),
            "it needs 0 B of the host and 20.0 GiB of GPU memory; of what models may have, 1.0 GiB of the host and 2.0 GiB \
             and 0 B of GPU memory are left"
        );
        let excluded = "models that exclude it are loaded, or as many as `loading.max_loaded` allows";
        assert_eq!(shortage_words(&lacks(None, true)), excluded);
        let little = MemoryAmounts { host: 0, gpus: vec![GIB] };
        assert_eq!(shortage_words(&lacks(Some(&little), true)), excluded, "memory is not what it waits for");
        assert!(shortage_words(&lacks(Some(&little), false)).starts_with("the memory left"));
    }
}
