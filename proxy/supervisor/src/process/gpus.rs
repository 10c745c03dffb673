//! Reads the machine's GPUs for all backends, with one reading for requests within a short time. Keeps faults
//! that the driver reports only once. A hanging driver blocks only one thread.
//!
//! ```text
//!   backend, backend, … ── look ──> fresh enough? ── the last reading
//!                                        └── no ──> blocking thread: read ──> kept, faults added to the list
//! ```

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::time::Instant;
use warden_policies::GpuIndex;
use warden_sensors::GpuSensors;
use warden_sensors::gpu::{DeviceReading, GpuDevice, GpuFault, GpuSnapshot};

use crate::view::DeviceView;
use crate::worker_threads::{WorkKind, run_job};

/// Limit of faults kept for other backends. A dying GPU reports fewer between two samples.
const FAULTS_KEPT: usize = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NumberedFault {
    pub(crate) number: u64,
    pub(crate) gpu: GpuIndex,
    pub(crate) fault: GpuFault,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct GpuDevices {
    pub(crate) known: Vec<GpuDevice>,
    pub(crate) readings: Vec<DeviceReading>,
    pub(crate) faults: Vec<NumberedFault>,
}

impl GpuDevices {
    pub(crate) fn reading(&self, gpu: GpuIndex) -> Option<&DeviceReading> {
        self.readings.iter().find(|reading| reading.index == gpu)
    }

    /// 0 if there was no fault.
    pub(crate) fn last_fault(&self) -> u64 {
        self.faults.last().map_or(0, |fault| fault.number)
    }

    fn device(&self, gpu: GpuIndex) -> Option<&GpuDevice> {
        self.known.iter().find(|device| device.index == gpu)
    }

    /// GPUs with their own memory. Unified memory counts as host memory.
    pub(crate) fn with_vram(&self) -> impl Iterator<Item = GpuIndex> + '_ {
        let all = self.readings.iter().map(|reading| reading.index);
        all.filter(move |gpu| self.device(*gpu).is_none_or(|device| !device.unified))
    }

    /// Environment variable that restricts a process to these GPUs, by UUID because each library numbers
    /// GPUs differently. `None` if these are all GPUs, or if one of them has no UUID.
    pub(crate) fn restriction(&self, gpus: &[GpuIndex]) -> Option<(String, String)> {
        let names: Option<Vec<String>> = gpus.iter().map(|gpu| self.device(*gpu)?.uuid.clone()).collect();
        let names = names.filter(|names| !names.is_empty() && names.len() < self.with_vram().count())?;
        Some(("CUDA_VISIBLE_DEVICES".to_owned(), names.join(",")))
    }

    pub(crate) fn views(&self) -> Vec<DeviceView> {
        let view = |reading: &DeviceReading| DeviceView {
            gpu: reading.index,
            name: self.device(reading.index).map(|device| device.name.clone()).unwrap_or_default(),
            total: reading.total,
            used: reading.used,
            free: reading.free,
            temperature: reading.temperature,
            xid: self.last_xid(reading.index),
            leak: None,
        };
        self.readings.iter().map(view).collect()
    }

    fn last_xid(&self, gpu: GpuIndex) -> Option<u64> {
        self.faults.iter().rev().filter(|seen| seen.gpu == gpu).find_map(|seen| match seen.fault {
            GpuFault::Xid(xid) => xid,
            GpuFault::Ecc(_) | GpuFault::Lost => None,
        })
    }
}

#[derive(Debug, Default)]
pub(crate) struct GpuReader {
    gpus: Arc<OnceLock<GpuSensors>>,
    busy: Arc<AtomicBool>,
    asks_free: Arc<AtomicBool>,
    turn: tokio::sync::Mutex<()>,
    last: tokio::sync::Mutex<Option<GpuReading>>,
}

#[derive(Clone, Debug)]
pub(crate) struct GpuReading {
    at: Instant,
    pub(crate) snapshot: Arc<GpuSnapshot>,
    pub(crate) devices: Arc<GpuDevices>,
}

impl GpuReader {
    /// Returns `None` if the driver does not answer within `limit`.
    pub(crate) async fn read_within(&self, age: Duration, limit: Duration) -> Option<GpuReading> {
        tokio::time::timeout(limit, self.read(age)).await.ok().flatten()
    }

    /// Reads the free memory only: a full reading may take a hundred times as long.
    pub(crate) async fn free_memory(&self, limit: Duration) -> Option<Vec<(GpuIndex, u64)>> {
        let asked = async {
            let _turn = self.turn.lock().await;
            self.run_alone(&self.asks_free, GpuSensors::free).await
        };
        tokio::time::timeout(limit, asked).await.ok().flatten()
    }

    async fn read(&self, age: Duration) -> Option<GpuReading> {
        let mut last = self.last.lock().await;
        if last.as_ref().is_none_or(|taken| taken.at.elapsed() > age) {
            let at = Instant::now();
            let read = |gpus: &GpuSensors| (gpus.read(), gpus.devices().to_vec());
            let (snapshot, known) = self.run_alone(&self.busy, read).await?;
            let before = last.as_ref().map(|taken| taken.devices.faults.as_slice()).unwrap_or_default();
            let devices = GpuDevices {
                known,
                readings: snapshot.devices().to_vec(),
                faults: add_faults(before, snapshot.devices()),
            };
            *last = Some(GpuReading { at, snapshot: Arc::new(snapshot), devices: Arc::new(devices) });
        }
        last.clone()
    }

    /// Runs a job on a thread for drivers. `None` while the thread of an earlier caller waits for the driver.
    async fn run_alone<T: Send + 'static>(
        &self,
        busy: &Arc<AtomicBool>,
        job: impl FnOnce(&GpuSensors) -> T + Send + 'static,
    ) -> Option<T> {
        if busy.swap(true, Ordering::SeqCst) {
            return None;
        }
        let (gpus, busy) = (Arc::clone(&self.gpus), BusyGuard(Arc::clone(busy)));
        let run = run_job(WorkKind::Driver, move || {
            let _busy = busy;
            job(gpus.get_or_init(open_gpus))
        });
        run.await.ok()
    }
}

fn open_gpus() -> GpuSensors {
    let gpus = GpuSensors::open();
    for device in gpus.devices() {
        tracing::info!(gpu = device.index.0, name = device.name, "a GPU");
    }
    for note in gpus.notes() {
        tracing::info!("{note}");
    }
    gpus
}

fn add_faults(before: &[NumberedFault], readings: &[DeviceReading]) -> Vec<NumberedFault> {
    let mut faults = before.to_vec();
    for reading in readings {
        for fault in reading.faults.iter().flatten() {
            let number = faults.last().map_or(0, |seen| seen.number) + 1;
            faults.push(NumberedFault { number, gpu: reading.index, fault: *fault });
        }
    }
    faults.split_off(faults.len().saturating_sub(FAULTS_KEPT))
}

/// Clears the flag when dropped, also after a panic.
struct BusyGuard(Arc<AtomicBool>);

impl Drop for BusyGuard {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

/// Counts children: an estimate of a child's VRAM is valid only while no other child lives.
#[derive(Debug, Default)]
pub(crate) struct ChildPopulation {
    alive: AtomicU64,
    born: AtomicU64,
}

#[derive(Debug)]
pub(crate) struct ChildBirth {
    population: Arc<ChildPopulation>,
    first: bool,
    number: u64,
}

impl ChildBirth {
    pub(crate) fn new(population: &Arc<ChildPopulation>) -> Self {
        let first = population.alive.fetch_add(1, Ordering::SeqCst) == 0;
        let number = population.born.fetch_add(1, Ordering::SeqCst) + 1;
        Self { population: Arc::clone(population), first, number }
    }

    pub(crate) fn is_alone(&self) -> bool {
        self.first && self.population.born.load(Ordering::SeqCst) == self.number
    }
}

impl Drop for ChildBirth {
    fn drop(&mut self) {
        self.population.alive.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(gpu: u32, faults: &[GpuFault]) -> DeviceReading {
        DeviceReading { index: GpuIndex(gpu), faults: Some(faults.to_vec()), ..DeviceReading::default() }
    }

    #[test]
    fn faults_are_numbered_and_the_latest_are_kept() {
        let first = add_faults(&[], &[reading(0, &[GpuFault::Xid(Some(31))]), reading(1, &[])]);
        let second = add_faults(&first, &[reading(1, &[GpuFault::Lost])]);
        let numbers: Vec<_> = second.iter().map(|seen| (seen.number, seen.gpu.0)).collect();
        assert_eq!(numbers, [(1, 0), (2, 1)]);
        let storm = add_faults(&second, &[reading(0, &[GpuFault::Ecc(1); 100])]);
        assert_eq!((storm.len(), storm.last().map(|seen| seen.number)), (FAULTS_KEPT, Some(102)));
        let devices = GpuDevices { readings: vec![reading(0, &[])], faults: first, ..GpuDevices::default() };
        assert_eq!(devices.views()[0].xid, Some(31));
    }

    #[tokio::test]
    async fn one_reading_serves_whoever_asks_within_a_moment() {
        let room = GpuReader::default();
        let hour = Duration::from_secs(3600);
        let first = room.read_within(hour, hour).await.unwrap();
        let second = room.read_within(hour, hour).await.unwrap();
        assert!(Arc::ptr_eq(&first.snapshot, &second.snapshot));
        room.busy.store(true, Ordering::SeqCst);
        assert!(
            room.read_within(Duration::ZERO, hour).await.is_none(),
            "nobody waits for a driver that hangs"
        );
    }

    #[test]
    fn a_child_is_alone_if_nobody_was_there_and_nobody_has_come_since() {
        let population = Arc::default();
        let first = ChildBirth::new(&population);
        assert!(first.is_alone());
        let second = ChildBirth::new(&population);
        assert!(!first.is_alone() && !second.is_alone());
        drop(first);
        drop(second);
        assert!(ChildBirth::new(&population).is_alone());
    }
}
