//! The facts of a moment: what the fleet does, what memory is to spare.

use std::path::Path;

use warden_policies::ModelName;
use warden_policies::lifecycle::Phase;
use warden_policies::loading::Numbers;
use warden_policies::sample::HostMemory;
use warden_supervisor::{BackendView, FleetView, ModelState, ModelView, WorkKind, run_job};

use super::spare::{Facts, Memory, Spare};
use crate::admin::answer::Admin;
use crate::admin::page::holds::Planned;
use crate::admin::page::reports;

/// What a diagnosis that runs has to make room for.
pub(super) fn facts(admin: &Admin) -> Facts {
    of_fleet(&admin.fleet.view())
}

/// All that decides whether one of this model may begin.
pub(super) async fn facts_for(admin: &Admin, kept: &Numbers, model: &ModelName, folder: &Path) -> Facts {
    let fleet = admin.fleet.view();
    let mut facts = of_fleet(&fleet);
    let known = fleet.models.iter().find(|own| own.name == *model);
    let held = known.map(|known| holds(known)).unwrap_or_default();
    let (host, gpus) = admin.told.borrow().plans.get(model.as_str()).map_or((0, 0), Planned::bytes);
    facts.needs = Memory { host: held.host.max(host), gpus: held.gpus.max(gpus) };
    let folder = folder.to_owned();
    // A disk may be slow.
    let read = run_job(WorkKind::StateFiles, move || {
        (warden_sensors::host_totals().ok(), reports::read(&folder).len())
    });
    let (totals, reports) = read.await.unwrap_or_default();
    facts.reports = reports;
    let spare = |free: u64, total: u64, left: u64| free.saturating_sub(total.saturating_sub(left));
    facts.spare.host = totals.map(|host| spare(host.available, host.total, kept.left_of_host(host.total)));
    let gpus = fleet.devices.iter().map(|gpu| {
        let total = gpu.total?;
        let free = gpu.free.or_else(|| gpu.used.map(|used| total.saturating_sub(used)))?;
        Some(spare(free, total, kept.left_of_gpu(total)))
    });
    facts.spare.gpus =
        gpus.collect::<Option<Vec<u64>>>().filter(|all| !all.is_empty()).map(|all| all.iter().sum());
    facts
}

/// What the fleet does.
fn of_fleet(fleet: &FleetView) -> Facts {
    let running = |model: &ModelView| model.backends.iter().map(|backend| backend.in_flight).sum::<u32>();
    let own = || fleet.models.iter().map(|model| &**model).filter(|model| model.remote.is_none());
    let no_process = |model: &&ModelView| model.backends.iter().all(|backend| backend.pid.is_none());
    let coming = |model: &&ModelView| model.state == ModelState::Loading;
    let moves = |model: &&ModelView| {
        matches!(model.state, ModelState::Loading | ModelState::Draining)
            || model
                .backends
                .iter()
                .filter(|backend| backend.pid.is_some())
                .any(|backend| backend.phase != Phase::Ready)
    };
    let name = |model: &ModelView| model.name.to_string();
    Facts {
        requests: own()
            .map(|model| model.waiting + usize::try_from(running(model)).unwrap_or(usize::MAX))
            .sum(),
        waits: own().find(|model| coming(model) && no_process(model)).map(name),
        moves: own().find(moves).map(name),
        canary: !fleet.canaries.is_empty(),
        needs: Memory::default(),
        spare: Spare::default(),
        reports: 0,
    }
}

/// What the largest process of a model holds.
fn holds(model: &ModelView) -> Memory {
    let of = |find: fn(&BackendView) -> u64| model.backends.iter().map(find).max();
    let vram = |backend: &BackendView| backend.memory.vram.iter().map(|vram| vram.bytes).sum::<u64>();
    Memory {
        host: of(|backend| backend.host.map_or(0, HostMemory::charged)).unwrap_or_default(),
        gpus: of(vram).unwrap_or_default(),
    }
}
