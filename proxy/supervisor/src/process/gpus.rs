//! Reads the machine's GPUs for all backends. Requests within a short time share one reading, faults that
//! the driver reports only once are kept for all backends, and a hanging driver blocks only one thread.
//!
//! ```text
//!   backend, backend, … ── look ──> fresh enough? ── the last reading
//!                                        └── no ──> blocking thread: read ──> kept, faults added to the list
//! ```

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::time::Instant;
use warden_policies::GpuIndex;
use warden_sensors::GpuSensors;
use warden_sensors::gpu::{DeviceReading, GpuDevice, GpuFault, GpuSnapshot};

use crate::view::DeviceView;
use crate::worker_threads::{WorkKind, run_job};

/// Maximum number of faults kept for backends that have not read them: a dying GPU reports fewer between
/// two samples.
const FAULTS_KEPT: usize = 64;

/// A fault with its sequence number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NumberedFault {
    /// Sequence number, counted from 1.
    pub(crate) number: u64,
    pub(crate) gpu: GpuIndex,
    pub(crate) fault: GpuFault,
}

/// State of all GPUs at one moment.
#[derive(Clone, Debug, Default)]
pub(crate) struct GpuDevices {
    pub(crate) known: Vec<GpuDevice>,
    pub(crate) readings: Vec<DeviceReading>,
    /// Latest faults of all GPUs, oldest first.
    pub(crate) faults: Vec<NumberedFault>,
}

impl GpuDevices {
    pub(crate) fn reading(&self, gpu: GpuIndex) -> Option<&DeviceReading> {
        self.readings.iter().find(|reading| reading.index == gpu)
    }

    /// Sequence number of the last fault; 0 if there was none.
    pub(crate) fn last_fault(&self) -> u64 {
        self.faults.last().map_or(0, |fault| fault.number)
    }

    /// GPUs with their own memory. Unified memory belongs to the host, whose memory is watched anyway.
    pub(crate) fn with_vram(&self) -> impl Iterator<Item = GpuIndex> + '_ {
        let unified = |gpu| self.known.iter().any(|device| device.index == gpu && device.unified);
        self.readings.iter().map(|reading| reading.index).filter(move |gpu| !unified(*gpu))
    }

    /// Environment variable that restricts a process to these GPUs. The variable names them by UUID,
    /// because each library numbers GPUs differently. `None` if these are all GPUs of the machine, or if
    /// one of them has no UUID.
    pub(crate) fn restriction(&self, gpus: &[GpuIndex]) -> Option<(String, String)> {
        let all = self.with_vram().count();
        let name = |gpu: &GpuIndex| self.known.iter().find(|device| device.index == *gpu)?.uuid.clone();
        let names: Option<Vec<String>> = gpus.iter().map(name).collect();
        let names = names.filter(|names| !names.is_empty() && names.len() < all)?;
        Some(("CUDA_VISIBLE_DEVICES".to_owned(), names.join(",")))
    }

    pub(crate) fn views(&self) -> Vec<DeviceView> {
        let name =
            |gpu| self.known.iter().find(|device| device.index == gpu).map(|device| device.name.clone());
        let xid = |gpu| {
            let of = |seen: &&NumberedFault| seen.gpu == gpu;
            self.faults.iter().rev().filter(of).find_map(|seen| match seen.fault {
                GpuFault::Xid(xid) => xid,
                GpuFault::Ecc(_) | GpuFault::Lost => None,
            })
        };
        let view = |reading: &DeviceReading| DeviceView {
            gpu: reading.index,
            name: name(reading.index).unwrap_or_default(),
            total: reading.total,
            used: reading.used,
            free: reading.free,
            temperature: reading.temperature,
            xid: xid(reading.index),
            leak: None,
        };
        self.readings.iter().map(view).collect()
    }
}

#[derive(Debug, Default)]
pub(crate) struct GpuReader {
    gpus: Arc<OnceLock<GpuSensors>>,
    /// True while a thread reads all values from the driver.
    busy: Arc<AtomicBool>,
    /// True while a thread reads only the free memory.
    asks_free: Arc<AtomicBool>,
    turn: tokio::sync::Mutex<()>,
    last: tokio::sync::Mutex<Option<GpuReading>>,
}

#[derive(Clone, Debug)]
struct GpuReading {
    at: Instant,
    snapshot: Arc<GpuSnapshot>,
    devices: Arc<GpuDevices>,
}

impl GpuReader {
    /// Returns a reading that is not older than `age`; `None` if the driver does not answer within `limit`.
    pub(crate) async fn read_within(
        &self,
        age: Duration,
        limit: Duration,
    ) -> Option<(Arc<GpuSnapshot>, Arc<GpuDevices>)> {
        tokio::time::timeout(limit, self.read(age)).await.ok().flatten()
    }

    /// Free memory of each GPU. Does not wait for a full reading, which may take a hundred times as long.
    pub(crate) async fn free_memory(&self, limit: Duration) -> Option<Vec<(GpuIndex, u64)>> {
        let asked = async {
            let _turn = self.turn.lock().await;
            if self.asks_free.swap(true, Ordering::SeqCst) {
                // The thread of an earlier caller, which gave up, still waits for the driver.
                return None;
            }
            let (gpus, asks) = (Arc::clone(&self.gpus), BusyGuard(Arc::clone(&self.asks_free)));
            let asked = run_job(WorkKind::Driver, move || {
                let _asks = asks;
                gpus.get_or_init(open_gpus).free()
            });
            asked.await.ok()
        };
        tokio::time::timeout(limit, asked).await.ok().flatten()
    }

    async fn read(&self, age: Duration) -> Option<(Arc<GpuSnapshot>, Arc<GpuDevices>)> {
        let mut last = self.last.lock().await;
        if let Some(taken) = last.as_ref().filter(|taken| taken.at.elapsed() <= age) {
            return Some((Arc::clone(&taken.snapshot), Arc::clone(&taken.devices)));
        }
        if self.busy.swap(true, Ordering::SeqCst) {
            // The thread of an earlier caller, which gave up, still waits for the driver.
            return None;
        }
        let (gpus, busy) = (Arc::clone(&self.gpus), BusyGuard(Arc::clone(&self.busy)));
        let at = Instant::now();
        let reading = run_job(WorkKind::Driver, move || {
            let _busy = busy;
            let gpus = gpus.get_or_init(open_gpus);
            (gpus.read(), gpus.devices().to_vec())
        });
        let (snapshot, known) = reading.await.ok()?;
        let before = last.as_ref().map(|taken| Arc::clone(&taken.devices)).unwrap_or_default();
        let devices = Arc::new(GpuDevices {
            known,
            readings: snapshot.devices().to_vec(),
            faults: add_faults(&before.faults, snapshot.devices()),
        });
        let taken = GpuReading { at, snapshot: Arc::new(snapshot), devices };
        let answer = (Arc::clone(&taken.snapshot), Arc::clone(&taken.devices));
        *last = Some(taken);
        Some(answer)
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

/// Clears the flag when it is dropped, so also after a panic; then the next thread may read.
struct BusyGuard(Arc<AtomicBool>);

impl Drop for BusyGuard {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
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
        let (first, _) = room.read_within(hour, hour).await.unwrap();
        let (second, _) = room.read_within(hour, hour).await.unwrap();
        assert!(Arc::ptr_eq(&first, &second));
        room.busy.store(true, Ordering::SeqCst);
        assert!(
            room.read_within(Duration::ZERO, hour).await.is_none(),
            "nobody waits for a driver that hangs"
        );
    }
}
