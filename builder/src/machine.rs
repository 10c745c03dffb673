//! Checks free disk, cores and memory before work begins.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use crate::error::{BuilderError, Result, io_error};
use crate::plan::ComputeBackend;

/// Requirements of a build on the machine, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MachineNeeds {
    /// Free disk space needed in each of two folders: the cache folder and the store.
    pub disk: u64,
    /// Minimum available memory for a build to begin.
    pub memory: u64,
    /// Peak memory of one CPU compiler; limits the number of jobs.
    pub memory_per_job: u64,
    /// Peak memory of one CUDA or HIP compiler.
    pub memory_per_gpu_job: u64,
}

impl MachineNeeds {
    pub(crate) const fn per_job(self, backend: ComputeBackend) -> u64 {
        match backend {
            ComputeBackend::Cuda | ComputeBackend::Hip => self.memory_per_gpu_job,
            ComputeBackend::Cpu | ComputeBackend::Vulkan => self.memory_per_job,
        }
    }
}

/// Fails if disk or memory do not suffice for a build. `memory`: available bytes, if known. Folders need
/// not exist.
pub(crate) fn check_resources(
    needs: MachineNeeds,
    backend: ComputeBackend,
    memory: Option<u64>,
    folders: &[&Path],
) -> Result<()> {
    for folder in folders {
        let free = free_disk(folder)?;
        if free < needs.disk {
            return Err(BuilderError::Disk {
                path: folder.to_path_buf(),
                free: free >> 20,
                need: needs.disk >> 20,
            });
        }
    }
    let need = needs.memory.max(needs.per_job(backend));
    match memory {
        Some(available) if available < need => {
            Err(BuilderError::Memory { available: available >> 20, need: need >> 20 })
        }
        _ => Ok(()),
    }
}

fn cores() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// Runs `work` on each core; the workers share the indices below `count`. Returns all results in index order.
pub(crate) fn run_on_all_cores<T: Send>(
    count: usize,
    work: impl Fn(&mut dyn Iterator<Item = usize>) -> Result<Vec<(usize, T)>> + Sync,
) -> Result<Vec<T>> {
    let next = AtomicUsize::new(0);
    let run = || {
        work(&mut std::iter::from_fn(|| {
            let index = next.fetch_add(1, Ordering::Relaxed);
            (index < count).then_some(index)
        }))
    };
    #[expect(clippy::disallowed_methods, reason = "in a command, which serves nobody")]
    let parts: Vec<_> = thread::scope(|scope| {
        let workers: Vec<_> = (0..cores().min(count.max(1))).map(|_| scope.spawn(run)).collect();
        workers.into_iter().map(|worker| worker.join().unwrap_or(Err(BuilderError::Cancelled))).collect()
    });
    let mut all = Vec::with_capacity(count);
    for part in parts {
        all.extend(part?);
    }
    all.sort_by_key(|(index, _)| *index);
    Ok(all.into_iter().map(|(_, result)| result).collect())
}

pub(crate) fn compiler_jobs(
    wanted: Option<usize>,
    needs: MachineNeeds,
    backend: ComputeBackend,
    memory: Option<u64>,
) -> (usize, String) {
    choose_jobs(wanted, cores(), memory, needs.per_job(backend))
}

fn choose_jobs(wanted: Option<usize>, cores: usize, memory: Option<u64>, per_job: u64) -> (usize, String) {
    if let Some(wanted) = wanted.filter(|wanted| *wanted > 0) {
        return (wanted, format!("{wanted} jobs"));
    }
    let fitting =
        memory.and_then(|memory| memory.checked_div(per_job)).and_then(|jobs| usize::try_from(jobs).ok());
    match fitting.map(|jobs| jobs.max(1)) {
        Some(jobs) if jobs < cores => {
            let why = format!("more do not fit into the available memory, at {} MiB each", per_job >> 20);
            (jobs, format!("{jobs} jobs for {cores} cores: {why}"))
        }
        _ => (cores, format!("{cores} jobs, one for each core")),
    }
}

/// Bytes available to this user on the file system of a folder, which need not exist.
fn free_disk(folder: &Path) -> Result<u64> {
    let existing = folder.ancestors().find(|ancestor| ancestor.exists()).unwrap_or(Path::new("/"));
    let stat = rustix::fs::statvfs(existing)
        .map_err(|error| io_error("measuring the disk of", existing)(error.into()))?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    const NOTHING: MachineNeeds =
        MachineNeeds { disk: 0, memory: 0, memory_per_job: 1, memory_per_gpu_job: 1 };

    #[test]
    fn jobs_are_bounded_by_cores_and_by_memory() {
        assert_eq!(choose_jobs(None, 8, Some(64 * GIB), GIB).0, 8);
        assert_eq!(choose_jobs(None, 8, Some(3 * GIB), GIB).0, 3);
        assert_eq!(choose_jobs(None, 8, Some(GIB / 2), GIB).0, 1);
        assert_eq!(choose_jobs(None, 8, None, GIB).0, 8);
        assert_eq!(choose_jobs(None, 8, Some(GIB), 0).0, 8);
    }

    #[test]
    fn a_wish_for_jobs_is_granted() {
        assert_eq!(choose_jobs(Some(32), 8, Some(GIB), GIB).0, 32);
        assert_eq!(choose_jobs(Some(0), 8, Some(64 * GIB), GIB).0, 8);
    }

    #[test]
    fn a_full_disk_is_told_before_work_begins_also_for_folders_to_come() {
        let folder = tempfile::tempdir().unwrap();
        let later = folder.path().join("not/yet");
        let needs = MachineNeeds { disk: u64::MAX, ..NOTHING };
        assert!(matches!(
            check_resources(needs, ComputeBackend::Cpu, Some(GIB), &[&later]),
            Err(BuilderError::Disk { .. })
        ));
        check_resources(MachineNeeds { disk: 1, ..needs }, ComputeBackend::Cpu, Some(GIB), &[&later])
            .unwrap();
    }

    #[test]
    fn too_little_memory_is_told_before_work_begins() {
        let needs = MachineNeeds { memory: u64::MAX, ..NOTHING };
        assert!(matches!(
            check_resources(needs, ComputeBackend::Cpu, Some(GIB), &[]),
            Err(BuilderError::Memory { .. })
        ));
        check_resources(needs, ComputeBackend::Cpu, None, &[]).unwrap();
    }

    #[test]
    fn a_compiler_for_gpus_must_fit_where_one_for_cpus_would() {
        let needs = MachineNeeds { memory_per_gpu_job: u64::MAX, ..NOTHING };
        check_resources(needs, ComputeBackend::Vulkan, Some(GIB), &[]).unwrap();
        for backend in [ComputeBackend::Cuda, ComputeBackend::Hip] {
            assert!(matches!(
                check_resources(needs, backend, Some(GIB), &[]),
                Err(BuilderError::Memory { .. })
            ));
            assert_eq!(compiler_jobs(None, needs, backend, Some(GIB)).0, 1);
        }
    }
}
