//! Scripted processes on tokio's clock.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use tokio::sync::Notify;
use tokio::time::Instant;
use warden_policies::GpuIndex;
use warden_policies::health::SlotActivity;
use warden_policies::reclaim::{ReclaimOutcome, ReclaimParts, ReclaimedBytes};
use warden_policies::sample::{HostMemory, VramReading, VramSource};
use warden_policies::standstill::ProcessActivity;
use warden_sensors::gpu::{DeviceReading, GpuFault};
use warden_sensors::{BackendMetrics, CudaReport, HostTotals, ProcessRunState};

use crate::error::{FailureKind, SpawnError};
use crate::process::endpoint::ListenAddress;
use crate::process::failure::OomEvidence;
use crate::process::gpus::{GpuDevices, NumberedFault};
use crate::process::group::ProcessExit;
use crate::process::needs::{MissingNeed, NeedsCheck};
use crate::process::reclaim_file::ReclaimResult;
use crate::process::settings::ClientSetting;
use crate::process::{
    BackendProcess, BackendRequest, LineSink, MachineMemory, NoVram, ProbeResult, ProcessSample,
    ProcessWorld, SampleOptions, ServerAnswers, ServerProps,
};
use crate::spec::ServerCommand;
use crate::spec::SpawnRequest;
use crate::sync::lock;
use crate::view::log::OutputStream;

/// Behaviour of one process.
#[derive(Clone, Debug)]
pub(super) struct Role {
    pub(super) spawn_takes: Duration,
    pub(super) cannot_spawn: bool,
    pub(super) ready_after: Duration,
    pub(super) dies: Option<(Duration, ProcessExit)>,
    pub(super) says: Vec<String>,
    /// Time from SIGTERM to the end; `None` ignores SIGTERM.
    pub(super) term_takes: Option<Duration>,
    pub(super) slots: Option<u32>,
    pub(super) anon: u64,
    /// VRAM on the first GPU; `None` without a GPU.
    pub(super) vram: Option<u64>,
    /// Initial slots; `None` if slots are not reported.
    pub(super) work: Option<SlotActivity>,
    pub(super) refuses: bool,
    /// Time after the spawn in which the process shows activity.
    pub(super) moves_for: Duration,
}

impl Default for Role {
    fn default() -> Self {
        Self {
            spawn_takes: Duration::from_millis(1),
            cannot_spawn: false,
            ready_after: Duration::from_millis(100),
            dies: None,
            says: Vec::new(),
            term_takes: Some(Duration::from_millis(50)),
            slots: Some(2),
            anon: 100 * super::MIB,
            vram: None,
            work: None,
            refuses: false,
            moves_for: Duration::MAX,
        }
    }
}

impl Role {
    /// A process that ends soon after its start, with this output.
    pub(super) fn failing(exit: ProcessExit, says: &str) -> Self {
        Self {
            dies: Some((Duration::from_millis(20), exit)),
            says: vec![says.to_owned()],
            ready_after: Duration::from_secs(9999),
            ..Self::default()
        }
    }
}

/// A world whose processes take their roles from a list, and behave well without one.
#[derive(Clone, Debug, Default)]
pub(super) struct Script {
    inner: Arc<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    roles: Mutex<VecDeque<Role>>,
    /// Role of processes that have none in the list.
    usual: Mutex<Option<Role>>,
    children: Mutex<Vec<Arc<Actor>>>,
    available: AtomicU64,
    gpu: AtomicBool,
    minute: AtomicU32,
    memory: Mutex<Option<u64>>,
    /// Memory of each GPU that a sensor reads, in bytes.
    gpus: Mutex<Vec<u64>>,
    /// Bytes of the first GPU that no process holds.
    lost: AtomicU64,
    faults: Mutex<Vec<NumberedFault>>,
    vram_unknown: Mutex<Option<String>>,
    sight: Mutex<NeedsCheck>,
}

impl Script {
    pub(super) fn next(&self, role: Role) {
        self.all([role]);
    }

    pub(super) fn all(&self, roles: impl IntoIterator<Item = Role>) {
        lock(&self.inner.roles).extend(roles);
    }

    pub(super) fn set_usual(&self, role: Role) {
        *lock(&self.inner.usual) = Some(role);
    }

    /// Makes all later processes behave well.
    pub(super) fn clear(&self) {
        lock(&self.inner.roles).clear();
    }

    pub(super) fn set_available(&self, bytes: u64) {
        self.inner.available.store(bytes, Ordering::SeqCst);
    }

    pub(super) fn set_gpu(&self) {
        self.inner.gpu.store(true, Ordering::SeqCst);
    }

    /// Adds GPUs of these sizes, which a sensor reads.
    pub(super) fn set_gpus(&self, bytes: &[u64]) {
        *lock(&self.inner.gpus) = bytes.to_vec();
        self.set_gpu();
    }

    pub(super) fn set_minute(&self, minute: u32) {
        self.inner.minute.store(minute, Ordering::SeqCst);
    }

    /// Takes bytes of the first GPU away from all processes.
    pub(super) fn lose(&self, bytes: u64) {
        self.inner.lost.store(bytes, Ordering::SeqCst);
    }

    /// Reports a fault of the first GPU.
    pub(super) fn fault(&self, fault: GpuFault) {
        let mut faults = lock(&self.inner.faults);
        let number = faults.len() as u64 + 1;
        faults.push(NumberedFault { number, gpu: GpuIndex(0), fault });
    }

    /// Hides the VRAM of processes.
    pub(super) fn hide_vram(&self, why: &str) {
        *lock(&self.inner.vram_unknown) = Some(why.to_owned());
    }

    pub(super) fn set_files(&self, name: &str, missing: Option<&str>) {
        let missing =
            missing.map(|what| MissingNeed { kind: FailureKind::BadModel, message: what.to_owned() });
        *lock(&self.inner.sight) = NeedsCheck { stamps: vec![(name.into(), None)], missing, kin: None };
    }

    /// Processes so far, in order.
    pub(super) fn children(&self) -> Vec<Arc<Actor>> {
        lock(&self.inner.children).clone()
    }

    pub(super) fn last(&self) -> Arc<Actor> {
        self.children().pop().unwrap()
    }

    pub(super) fn alive(&self) -> usize {
        self.children().iter().filter(|child| !child.reaped.load(Ordering::SeqCst)).count()
    }

    pub(super) fn assert_all_reaped(&self) {
        for child in self.children() {
            assert!(child.reaped.load(Ordering::SeqCst), "process {} is left: {child:?}", child.pid);
        }
    }
}

impl Inner {
    fn devices(&self) -> GpuDevices {
        let children = lock(&self.children);
        let alive = children.iter().filter(|child| !child.is_dead());
        let held: u64 = alive.map(|child| child.vram.load(Ordering::SeqCst)).sum();
        let lost = self.lost.load(Ordering::SeqCst);
        let reading = |(index, total): (usize, &u64)| {
            let used = if index == 0 { held + lost } else { 0 };
            DeviceReading {
                index: GpuIndex(u32::try_from(index).unwrap()),
                total: Some(*total),
                used: Some(used),
                free: Some(total.saturating_sub(used)),
                ..DeviceReading::default()
            }
        };
        let readings = lock(&self.gpus).iter().enumerate().map(reading).collect();
        GpuDevices { known: Vec::new(), readings, faults: lock(&self.faults).clone() }
    }
}

impl ProcessWorld for Script {
    fn spawn(
        &self,
        request: SpawnRequest,
        socket: PathBuf,
        _endpoint: ListenAddress,
        _longest: usize,
        sink: LineSink,
    ) -> BoxFuture<'_, Result<Arc<dyn BackendProcess>, SpawnError>> {
        Box::pin(async move {
            let vram = (!lock(&self.inner.gpus).is_empty()).then_some(1 << 30);
            let usual = || lock(&self.inner.usual).clone().unwrap_or(Role { vram, ..Role::default() });
            let next = lock(&self.inner.roles).pop_front();
            let role = next.unwrap_or_else(usual);
            tokio::time::sleep(role.spawn_takes).await;
            if role.cannot_spawn {
                let source = std::io::Error::from_raw_os_error(libc::ENOENT);
                return Err(SpawnError::Exec { binary: request.command.binary, source });
            }
            for line in &role.says {
                sink(OutputStream::Stderr, line.clone());
            }
            let mut children = lock(&self.inner.children);
            let pid = 1000 + u32::try_from(children.len()).unwrap();
            let child = Arc::new(Actor::new(pid, role, request, socket, sink, Arc::clone(&self.inner)));
            children.push(Arc::clone(&child));
            Ok(child as Arc<dyn BackendProcess>)
        })
    }

    fn read_ahead(&self, _command: ServerCommand, _limit: Duration) -> BoxFuture<'static, ()> {
        Box::pin(async {})
    }

    fn check_needs(&self, _command: ServerCommand, _running: Option<u32>) -> BoxFuture<'static, NeedsCheck> {
        let sight = lock(&self.inner.sight).clone();
        Box::pin(async { sight })
    }

    fn available_memory(&self) -> Option<u64> {
        Some(self.inner.available.load(Ordering::SeqCst))
    }

    fn free_memory(&self, _limit: Duration) -> BoxFuture<'_, MachineMemory> {
        Box::pin(async {
            let devices = self.inner.devices();
            let free = devices.readings.iter().map(|reading| (reading.index, reading.free.unwrap()));
            MachineMemory { host: None, gpus: free.collect() }
        })
    }

    fn total_memory(&self, _limit: Duration) -> BoxFuture<'_, MachineMemory> {
        Box::pin(async {
            let devices = self.inner.devices();
            let total = devices.readings.iter().map(|reading| (reading.index, reading.total.unwrap()));
            MachineMemory { host: *lock(&self.inner.memory), gpus: total.collect() }
        })
    }

    fn gpu_restriction(
        &self,
        gpus: Vec<GpuIndex>,
        _limit: Duration,
    ) -> BoxFuture<'_, Option<(String, String)>> {
        let names: Vec<String> = gpus.iter().map(|gpu| gpu.0.to_string()).collect();
        Box::pin(async move { Some(("GPUS".to_owned(), names.join(","))) })
    }

    fn has_gpu(&self) -> bool {
        self.inner.gpu.load(Ordering::SeqCst)
    }

    fn minute_of_day(&self) -> Option<u16> {
        u16::try_from(self.inner.minute.load(Ordering::SeqCst)).ok()
    }
}

/// A scripted process.
pub(super) struct Actor {
    world: Arc<Inner>,
    sink: LineSink,
    pub(super) vram: AtomicU64,
    decodes: Mutex<Option<u64>>,
    /// False while the server's loop hangs.
    tells_slots: AtomicBool,
    work: Mutex<Option<SlotActivity>>,
    standing: Mutex<ProcessRunState>,
    metrics_asked: AtomicU32,
    /// Settings that were applied to the process again.
    pub(super) set: Mutex<Vec<String>>,
    /// Host memory read page by page, if different.
    exact: Mutex<Option<u64>>,
    confirms: AtomicU32,
    /// Readings that have begun.
    readings: AtomicU32,
    reading_takes: Mutex<Duration>,
    pub(super) pid: u32,
    pub(super) request: SpawnRequest,
    pub(super) socket: PathBuf,
    role: Role,
    born: Instant,
    death: Mutex<Option<(Instant, ProcessExit)>>,
    sooner: Notify,
    pub(super) terms: AtomicU32,
    told_to_end: Mutex<Option<Instant>>,
    pub(super) kills: AtomicU32,
    pub(super) reaped: AtomicBool,
    deaf: AtomicBool,
    anon: AtomicU64,
    report: Mutex<Option<CudaReport>>,
    /// Reaction to a reclaim request; without one, no part can be asked.
    gives: Mutex<Option<Gives>>,
    asked_back: AtomicU32,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Gives {
    pub(super) takes: Duration,
    pub(super) outcome: ReclaimOutcome,
    /// Host memory afterwards.
    pub(super) anon: u64,
    /// VRAM afterwards.
    pub(super) vram: Option<u64>,
}

impl Actor {
    fn new(
        pid: u32,
        role: Role,
        request: SpawnRequest,
        socket: PathBuf,
        sink: LineSink,
        world: Arc<Inner>,
    ) -> Self {
        let born = Instant::now();
        Self {
            world,
            sink,
            vram: AtomicU64::new(role.vram.unwrap_or(0)),
            decodes: Mutex::default(),
            tells_slots: AtomicBool::new(role.work.is_some()),
            work: Mutex::new(role.work),
            standing: Mutex::default(),
            metrics_asked: AtomicU32::new(0),
            set: Mutex::default(),
            exact: Mutex::default(),
            confirms: AtomicU32::new(0),
            readings: AtomicU32::new(0),
            reading_takes: Mutex::new(Duration::ZERO),
            pid,
            request,
            socket,
            born,
            death: Mutex::new(role.dies.map(|(after, exit)| (born + after, exit))),
            sooner: Notify::new(),
            terms: AtomicU32::new(0),
            told_to_end: Mutex::default(),
            kills: AtomicU32::new(0),
            reaped: AtomicBool::new(false),
            deaf: AtomicBool::new(false),
            anon: AtomicU64::new(role.anon),
            report: Mutex::default(),
            gives: Mutex::default(),
            asked_back: AtomicU32::new(0),
            role,
        }
    }

    pub(super) fn dies_after(&self, after: Duration, exit: ProcessExit) {
        let at = Instant::now() + after;
        let mut death = lock(&self.death);
        if death.is_none_or(|(known, _)| at < known) {
            *death = Some((at, exit));
        }
        drop(death);
        self.sooner.notify_one();
    }

    pub(super) fn crash(&self) {
        self.dies_after(Duration::ZERO, ProcessExit::Signal(11));
    }

    pub(super) fn set_deaf(&self, deaf: bool) {
        self.deaf.store(deaf, Ordering::SeqCst);
    }

    pub(super) fn set_anon(&self, bytes: u64) {
        self.anon.store(bytes, Ordering::SeqCst);
    }

    pub(super) fn anon(&self) -> u64 {
        self.anon.load(Ordering::SeqCst)
    }

    /// Number of page-by-page readings.
    pub(super) fn readings(&self) -> u32 {
        self.readings.load(Ordering::SeqCst)
    }

    /// Delays the next readings by `time`; they show the state at their begin.
    pub(super) fn set_reading_takes(&self, time: Duration) {
        *lock(&self.reading_takes) = time;
    }

    pub(super) fn confirms(&self) -> u32 {
        self.confirms.load(Ordering::SeqCst)
    }

    pub(super) fn set_vram(&self, bytes: u64) {
        self.vram.store(bytes, Ordering::SeqCst);
    }

    pub(super) fn set_exact(&self, bytes: u64) {
        *lock(&self.exact) = Some(bytes);
    }

    pub(super) fn set_decodes(&self, decodes: u64) {
        *lock(&self.decodes) = Some(decodes);
    }

    /// `None`: the server's loop hangs.
    pub(super) fn set_work(&self, slots: Option<SlotActivity>) {
        self.tells_slots.store(true, Ordering::Relaxed);
        *lock(&self.work) = slots;
    }

    /// Sets the process's state in the kernel.
    pub(super) fn set_standing(&self, standing: ProcessRunState) {
        *lock(&self.standing) = standing;
    }

    pub(super) fn metrics_asked(&self) -> u32 {
        self.metrics_asked.load(Ordering::SeqCst)
    }

    pub(super) fn say(&self, line: &str) {
        (self.sink)(OutputStream::Stderr, line.to_owned());
    }

    pub(super) fn set_gives(&self, gives: Option<Gives>) {
        *lock(&self.gives) = gives;
    }

    pub(super) fn asked_back(&self) -> u32 {
        self.asked_back.load(Ordering::SeqCst)
    }

    pub(super) fn set_report(&self, report: Option<CudaReport>) {
        *lock(&self.report) = report;
    }

    /// True if the process was asked to end before this moment.
    pub(super) fn was_to_end(&self, moment: Instant) -> bool {
        lock(&self.told_to_end).is_some_and(|told| told < moment)
    }

    fn is_dead(&self) -> bool {
        lock(&self.death).is_some_and(|(at, _)| at <= Instant::now())
    }
}

impl std::fmt::Debug for Actor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (pid, role) = (self.pid, &self.role);
        write!(f, "Actor({pid}, {role:?}, death {:?})", lock(&self.death))
    }
}

impl BackendProcess for Actor {
    fn pid(&self) -> u32 {
        self.pid
    }

    fn terminate(&self) {
        self.terms.fetch_add(1, Ordering::SeqCst);
        lock(&self.told_to_end).get_or_insert_with(Instant::now);
        if let Some(after) = self.role.term_takes {
            self.dies_after(after, ProcessExit::Code(0));
        }
    }

    fn kill(&self) {
        self.kills.fetch_add(1, Ordering::SeqCst);
        lock(&self.told_to_end).get_or_insert_with(Instant::now);
        self.dies_after(Duration::ZERO, ProcessExit::Signal(9));
    }

    fn wait(&self) -> BoxFuture<'_, ProcessExit> {
        Box::pin(async {
            loop {
                let death = *lock(&self.death);
                match death {
                    Some((at, exit)) if at <= Instant::now() => {
                        self.reaped.store(true, Ordering::SeqCst);
                        return exit;
                    }
                    Some((at, _)) => {
                        tokio::select! {
                            () = tokio::time::sleep_until(at) => {}
                            () = self.sooner.notified() => {}
                        }
                    }
                    None => self.sooner.notified().await,
                }
            }
        })
    }

    fn is_running(&self) -> bool {
        !self.is_dead()
    }

    fn probe(&self, timeout: Duration) -> BoxFuture<'_, ProbeResult> {
        Box::pin(async move {
            if self.deaf.load(Ordering::SeqCst) {
                tokio::time::sleep(timeout).await;
                return ProbeResult::Lost;
            }
            if self.is_dead() {
                return ProbeResult::Lost;
            }
            if self.born.elapsed() >= self.role.ready_after {
                ProbeResult::Ready
            } else {
                ProbeResult::Loading
            }
        })
    }

    fn read_props(&self, _timeout: Duration) -> BoxFuture<'_, ServerProps> {
        Box::pin(async {
            let tells_slots = self.tells_slots.load(Ordering::Relaxed);
            ServerProps {
                slots: self.role.slots,
                n_ctx: Some(4096),
                modalities: None,
                build: None,
                reports_slots: tells_slots,
            }
        })
    }

    fn apply_setting(&self, setting: ClientSetting, _timeout: Duration) -> BoxFuture<'_, Result<(), String>> {
        Box::pin(async move {
            lock(&self.set).push(setting.path);
            if self.role.refuses { Err("it answered 400".to_owned()) } else { Ok(()) }
        })
    }

    fn send_request(
        &self,
        question: BackendRequest,
        _timeout: Duration,
    ) -> BoxFuture<'_, Option<(u16, Bytes)>> {
        drop(question);
        Box::pin(async { None })
    }

    fn oom_evidence(&self) -> BoxFuture<'_, OomEvidence> {
        Box::pin(async { OomEvidence::Unknown })
    }

    fn sample(&self, ask: SampleOptions) -> BoxFuture<'_, ProcessSample> {
        Box::pin(async move {
            if self.is_dead() {
                return ProcessSample::default();
            }
            let anon = self.anon.load(Ordering::SeqCst);
            if ask.by_page {
                self.confirms.fetch_add(1, Ordering::SeqCst);
            }
            let unknown = lock(&self.world.vram_unknown).clone();
            let devices = self.world.devices();
            let uses = self.role.vram.is_some() && !devices.readings.is_empty() && unknown.is_none();
            let bytes = self.vram.load(Ordering::SeqCst);
            let vram = VramReading { gpu: GpuIndex(0), bytes, source: VramSource::Process };
            let available = self.world.available.load(Ordering::SeqCst);
            let decodes = *lock(&self.decodes);
            if ask.metrics {
                self.metrics_asked.fetch_add(1, Ordering::SeqCst);
            }
            self.readings.fetch_add(1, Ordering::SeqCst);
            let sample = ProcessSample {
                host: Some(HostMemory { anon, swap: 0, rss: anon }),
                confirmed: ask.by_page.then(|| lock(&self.exact).unwrap_or(anon)),
                vram: if uses { vec![vram] } else { Vec::new() },
                no_vram: unknown.map(|why| NoVram { why, is_normal: false }),
                unmeasured: None,
                devices: Some(Arc::new(devices)),
                group: None,
                // A world without configured memory counts as large.
                totals: (available > 0).then_some(HostTotals { total: 1 << 40, available }),
                report: lock(&self.report).clone(),
                answers: ServerAnswers {
                    metrics: decodes.filter(|_| ask.metrics).map(|decodes| BackendMetrics {
                        decodes: Some(decodes),
                        ..BackendMetrics::default()
                    }),
                    slots: lock(&self.work).filter(|_| ask.slots),
                },
                standing: Some(*lock(&self.standing)),
                parts: lock(&self.gives).map(|_| ReclaimParts { heap: true, cuda: true }),
            };
            let takes = *lock(&self.reading_takes);
            if !takes.is_zero() {
                tokio::time::sleep(takes).await;
            }
            sample
        })
    }

    fn read_effort(&self) -> BoxFuture<'_, Option<ProcessActivity>> {
        let moved = self.born.elapsed().min(self.role.moves_for).as_secs();
        Box::pin(async move { Some(ProcessActivity { output: moved, ..ProcessActivity::default() }) })
    }

    fn reclaim(&self, wait: Duration) -> BoxFuture<'_, ReclaimResult> {
        Box::pin(async move {
            self.asked_back.fetch_add(1, Ordering::SeqCst);
            let Some(gives) = *lock(&self.gives) else { return ReclaimResult::NONE_ASKED };
            if gives.outcome == ReclaimOutcome::NoAnswer {
                tokio::time::sleep(wait).await;
                return ReclaimResult { outcome: gives.outcome, ..ReclaimResult::NONE_ASKED };
            }
            tokio::time::sleep(gives.takes).await;
            let heap = self.anon().saturating_sub(gives.anon);
            self.set_anon(gives.anon);
            if let Some(vram) = gives.vram {
                self.vram.store(vram, Ordering::SeqCst);
            }
            ReclaimResult {
                outcome: gives.outcome,
                heap: Some(gives.outcome),
                given: ReclaimedBytes { heap, ..ReclaimedBytes::default() },
                ms: 7,
                ..ReclaimResult::NONE_ASKED
            }
        })
    }
}
