//! Memory of earlier processes: growth, best GPU offload, held memory, and results of start searches.
//! The key is a hash of command and files. `growth.json` in the state directory keeps the history for later
//! runs.
//!
//! A diagnosis may write the file while models are served, so each write reads it again under a lock. An
//! unreadable file is renamed with a warning.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use warden_policies::book::MeasuredNeeds;
use warden_policies::book::held::{self, HeldMemory};
use warden_policies::growth::{GrowthVerdict, LeakPrior, SeriesGrowth};
use warden_policies::health::GpuOffload;
use warden_policies::start_search::StartFinding;
use warden_policies::{MemoryKind, ModelName};

use crate::spec::ServerCommand;
use crate::state::{StateKind, StateWriter};
use crate::sync::lock;
use crate::worker_threads::{WorkKind, run_briefly};

const HISTORY_FILE: &str = "growth.json";

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct ProcessHistory {
    key: String,
    /// Name for people who read the file.
    model: ModelName,
    #[serde(default)]
    priors: Vec<LeakPrior>,
    /// Most layers and VRAM on GPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    offload: Option<GpuOffload>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    held: Vec<HeldMemory>,
    /// Option with which a process starts that otherwise dies while loading.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    start: Option<StartFinding>,
}

impl ProcessHistory {
    fn is_empty(&self) -> bool {
        self.priors.is_empty() && self.offload.is_none() && self.held.is_empty() && self.start.is_none()
    }
}

/// Memory of earlier processes with one command.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KnownMemory {
    /// Held memory.
    pub held: Vec<HeldMemory>,
    /// Growth rates of leaking memory.
    pub leaks: Vec<LeakPrior>,
}

#[derive(Clone, Debug, PartialEq)]
enum KnownChange {
    Priors(Vec<LeakPrior>),
    Offload(GpuOffload),
    Held(Vec<HeldMemory>),
    Start(StartFinding),
}

impl KnownChange {
    fn apply(self, known: &mut ProcessHistory) {
        match self {
            Self::Priors(priors) => known.priors = priors,
            Self::Offload(offload) => known.offload = Some(offload),
            Self::Held(held) => known.held = held,
            Self::Start(finding) => known.start = Some(finding),
        }
    }
}

#[derive(Clone, Debug)]
struct PendingChange {
    key: String,
    model: ModelName,
    /// Limit of histories in the file.
    keep: usize,
    change: KnownChange,
}

impl PendingChange {
    fn apply(self, all: &mut Vec<ProcessHistory>) {
        let old = all.iter().position(|known| known.key == self.key).map(|at| all.remove(at));
        let mut one = old.unwrap_or_else(|| ProcessHistory {
            key: self.key,
            model: self.model,
            priors: Vec::new(),
            offload: None,
            held: Vec::new(),
            start: None,
        });
        self.change.apply(&mut one);
        if !one.is_empty() {
            all.push(one);
        }
        let surplus = all.len().saturating_sub(self.keep.max(1));
        all.drain(..surplus);
    }

    /// True if `other` need not be written any more.
    fn replaces(&self, other: &Self) -> bool {
        self.key == other.key && std::mem::discriminant(&self.change) == std::mem::discriminant(&other.change)
    }
}

#[derive(Debug)]
pub(crate) struct LeakHistory {
    kept: Arc<HistoryFile>,
    /// Writer thread for the file. Without one, each change is written at once.
    state: Option<StateWriter>,
}

#[derive(Debug)]
struct HistoryFile {
    path: PathBuf,
    /// Present histories. This lock is never held during disk access.
    memory: Mutex<HistoryState>,
}

#[derive(Debug)]
struct HistoryState {
    /// Known histories, oldest first.
    known: Vec<ProcessHistory>,
    pending: Vec<PendingChange>,
    /// True if a job for the pending changes is queued.
    queued: bool,
}

impl LeakHistory {
    pub(crate) fn open(directory: &Path, state: Option<StateWriter>) -> Self {
        let path = directory.join(HISTORY_FILE);
        let memory = HistoryState { known: read_history(&path), pending: Vec::new(), queued: false };
        Self { kept: Arc::new(HistoryFile { path, memory: Mutex::new(memory) }), state }
    }

    pub(crate) fn leaks_of(&self, key: &str) -> Vec<LeakPrior> {
        self.find(key, |known| known.priors.clone()).unwrap_or_default()
    }

    pub(crate) fn peak_memory(&self, key: &str) -> MeasuredNeeds {
        self.find(key, |known| MeasuredNeeds::from_held(&known.held)).unwrap_or_default()
    }

    fn find<T>(&self, key: &str, of: impl FnOnce(&ProcessHistory) -> T) -> Option<T> {
        lock(&self.kept.memory).known.iter().find(|known| known.key == key).map(of)
    }

    /// Records the growth of an ended process: stores leaks, and drops memory that was judged not to leak.
    pub(crate) fn learn_growth(
        &self,
        key: &str,
        model: &ModelName,
        found: &[LeakPrior],
        growth: &[SeriesGrowth],
        keep: usize,
    ) {
        let judged = |series: MemoryKind| {
            let of = growth.iter().find(|growth| growth.series == series);
            of.is_some_and(|growth| {
                matches!(
                    growth.verdict,
                    GrowthVerdict::Steady | GrowthVerdict::Bounded | GrowthVerdict::Leaking
                )
            })
        };
        let before = self.leaks_of(key);
        let mut priors = before.clone();
        priors.retain(|prior| !judged(prior.series));
        priors.extend_from_slice(found);
        priors.sort_by_key(|prior| prior.series);
        if priors == before {
            return;
        }
        self.apply_change(key, model, keep, KnownChange::Priors(priors));
    }

    pub(crate) fn best_offload(&self, key: &str) -> Option<GpuOffload> {
        self.find(key, |known| known.offload)?
    }

    /// Records a complete GPU offload, if it is the best with this key.
    pub(crate) fn note_offload(&self, key: &str, model: &ModelName, offload: GpuOffload, keep: usize) {
        let before = self.best_offload(key);
        let best = before.map_or(offload, |before| before.max(offload));
        // Smaller differences depend on how full buffers are.
        let grown = |before: GpuOffload| {
            best.layers != before.layers || best.vram > before.vram.map(|held| held + held / 8)
        };
        if !before.is_none_or(grown) {
            return;
        }
        self.apply_change(key, model, keep, KnownChange::Offload(best));
    }

    pub(crate) fn start_finding(&self, key: &str) -> Option<StartFinding> {
        self.find(key, |known| known.start.clone())?
    }

    pub(crate) fn keep_start_finding(
        &self,
        key: &str,
        model: &ModelName,
        finding: StartFinding,
        keep: usize,
    ) {
        self.apply_change(key, model, keep, KnownChange::Start(finding));
    }

    pub(crate) fn note_held(&self, key: &str, model: &ModelName, shown: &[HeldMemory], keep: usize) {
        let before = self.find(key, |known| known.held.clone()).unwrap_or_default();
        let Some(now) = held::merge_held(&before, shown) else { return };
        self.apply_change(key, model, keep, KnownChange::Held(now));
    }

    /// Applies a change in memory at once, and to the file when the disk answers.
    fn apply_change(&self, key: &str, model: &ModelName, keep: usize, change: KnownChange) {
        let news = PendingChange { key: key.to_owned(), model: model.clone(), keep, change };
        let mut memory = lock(&self.kept.memory);
        news.clone().apply(&mut memory.known);
        memory.pending.retain(|older| !news.replaces(older));
        memory.pending.push(news);
        let queued = std::mem::replace(&mut memory.queued, true);
        drop(memory);
        if queued {
            return;
        }
        let kept = Arc::clone(&self.kept);
        let Some(state) = &self.state else {
            if let Err(error) = kept.write_pending() {
                tracing::warn!(path = %self.kept.path.display(), %error, "cannot save the learnt memory of processes");
            }
            return;
        };
        // If the writer drops the job, the next change queues it again.
        if !state.write(StateKind::Growth, 0, move || kept.write_pending()) {
            lock(&self.kept.memory).queued = false;
        }
    }
}

impl HistoryFile {
    /// Applies pending changes to the present file, and keeps the result in memory.
    fn write_pending(&self) -> io::Result<()> {
        let (mut known, pending) = {
            let mut memory = lock(&self.memory);
            // Later changes get another job.
            memory.queued = false;
            (memory.known.clone(), memory.pending.clone())
        };
        let lock_file = self.path.with_extension("lock");
        let beside = fs::File::options().create(true).truncate(false).write(true).open(lock_file)?;
        // Closing the file releases the lock.
        rustix::fs::flock(&beside, rustix::fs::FlockOperation::LockExclusive)?;
        if self.path.exists() {
            known = read_history(&self.path);
        }
        pending.iter().cloned().for_each(|news| news.apply(&mut known));
        write_history(&self.path, &known)?;
        let mut memory = lock(&self.memory);
        let written =
            |news: &PendingChange| pending.iter().any(|old| news.replaces(old) && old.change == news.change);
        memory.pending.retain(|news| !written(news));
        memory.pending.iter().cloned().for_each(|news| news.apply(&mut known));
        memory.known = known;
        Ok(())
    }
}

/// Stores the result of a start search for later processes with this command. Blocks.
///
/// # Errors
/// The state directory cannot be created, or its file cannot be written.
pub fn remember_start(
    state_dir: &Path,
    model: &ModelName,
    command: &ServerCommand,
    finding: StartFinding,
    keep: usize,
) -> io::Result<()> {
    fs::create_dir_all(state_dir)?;
    let kept = LeakHistory::open(state_dir, None).kept;
    lock(&kept.memory).pending.push(PendingChange {
        key: process_key(command),
        model: model.clone(),
        keep,
        change: KnownChange::Start(finding),
    });
    kept.write_pending()
}

/// Memory of earlier processes with this command. An unreadable file counts as empty.
pub fn known_memory(state_dir: &Path, command: &ServerCommand) -> KnownMemory {
    let path = state_dir.join(HISTORY_FILE);
    let key = process_key(command);
    let all: Vec<ProcessHistory> =
        fs::read(path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default();
    let found = all.into_iter().find(|known| known.key == key);
    found.map(|known| KnownMemory { held: known.held, leaks: known.priors }).unwrap_or_default()
}

fn read_history(path: &Path) -> Vec<ProcessHistory> {
    match fs::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes).unwrap_or_else(|error| {
            let aside = path.with_extension("json.broken");
            tracing::warn!(
                path = %path.display(), %error, aside = %aside.display(),
                "slopes of earlier runs cannot be read; they are learnt again"
            );
            // An earlier file of that name was also renamed, or belongs to an operator.
            if !aside.exists() {
                drop(fs::rename(path, aside));
            }
            Vec::new()
        }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        Err(error) => {
            tracing::warn!(path = %path.display(), %error, "slopes of earlier runs cannot be read");
            Vec::new()
        }
    }
}

fn write_history(path: &Path, known: &[ProcessHistory]) -> io::Result<()> {
    let directory = path.parent().unwrap_or_else(|| Path::new("."));
    let mut file = tempfile::NamedTempFile::new_in(directory)?;
    serde_json::to_writer_pretty(&mut file, known)?;
    file.write_all(b"\n")?;
    file.persist(path)?;
    Ok(())
}

/// Key of a process: a hash, because arguments may contain secrets. It covers the command, the variables that
/// affect the server, and the named files by path, size and modification time, but no files that the process
/// writes.
///
/// A file whose disk does not answer in time counts as missing, because the caller must not wait.
pub(crate) fn process_key(command: &ServerCommand) -> String {
    let own = command.clone();
    let whole =
        run_briefly(WorkKind::ModelFiles, DISK_TIMEOUT, move || key_with_disk(&own, std::env::vars_os()));
    whole.unwrap_or_else(|| hash_key(command, std::env::vars_os(), |_| None))
}

/// Time limit for reading facts about files. A working disk answers within milliseconds.
const DISK_TIMEOUT: Duration = Duration::from_secs(1);

/// Prefixes of inherited variables in the key: of the server, drivers, allocator and loader.
const COUNTED_PREFIXES: [&str; 16] = [
    "LLAMA_",
    "GGML_",
    "CUDA_",
    "CUBLAS_",
    "NVIDIA_",
    "NCCL_",
    "HIP_",
    "HSA_",
    "ROCR_",
    "ROCM_",
    "ROCBLAS_",
    "VK_",
    "MALLOC_",
    "GLIBC_TUNABLES",
    "OMP_",
    "LD_",
];
/// Variables that do not affect memory, or differ from run to run.
const IGNORED_VARIABLES: [&str; 6] = [
    "LLAMA_API_KEY",
    "LLAMA_CACHE",
    "LLAMA_WARDEN_REPORT",
    "LLAMA_WARDEN_RECLAIM",
    "LLAMA_WARDEN_CONFIG",
    "LLAMA_WARDEN_ADMIN_SOCKET",
];

/// Flags that name files which the process writes.
const WRITTEN_FILE_FLAGS: [&str; 1] = ["--log-file"];
/// Variables that name files which the process writes.
const WRITTEN_FILE_VARIABLES: [&str; 4] =
    ["LLAMA_LOG_FILE", "LLAMA_ARG_LOG_FILE", "LLAMA_WARDEN_REPORT", "LLAMA_WARDEN_RECLAIM"];

fn key_with_disk(command: &ServerCommand, inherited: impl Iterator<Item = (OsString, OsString)>) -> String {
    let directory = command.directory.as_deref().unwrap_or_else(|| Path::new(""));
    hash_key(command, inherited, |text| {
        let file = fs::metadata(directory.join(text)).ok().filter(fs::Metadata::is_file)?;
        let changed = file.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        Some(format!("{} {:?}", file.len(), changed.map(|time| time.as_secs())))
    })
}

/// `file` returns the identity of an existing file.
fn hash_key(
    command: &ServerCommand,
    inherited: impl Iterator<Item = (OsString, OsString)>,
    file: impl Fn(&str) -> Option<String>,
) -> String {
    let mut hash = Sha256::new();
    let mut add = |text: &str| {
        hash.update(text.as_bytes());
        hash.update([0]);
    };
    let binary = command.binary.to_string_lossy();
    add(&binary);
    command.wrapper.iter().for_each(|word| add(word));
    let mut written = false;
    for text in std::iter::once(&*binary).chain(command.args.iter().map(String::as_str)) {
        add(text);
        // llama-server treats `_` in flags as `-`.
        let was =
            std::mem::replace(&mut written, WRITTEN_FILE_FLAGS.contains(&text.replace('_', "-").as_str()));
        if !was && let Some(file) = file(text) {
            add(&file);
        }
    }
    let own = |name: &str| name.starts_with("LLAMA_WARDEN_") && name.contains("__");
    let counts = |name: &str| {
        COUNTED_PREFIXES.iter().any(|known| name.starts_with(known))
            && !IGNORED_VARIABLES.contains(&name)
            && !own(name)
    };
    let inherited = inherited.filter_map(|(name, value)| {
        let name = name.into_string().ok().filter(|name| counts(name))?;
        Some((name, value.to_string_lossy().into_owned()))
    });
    let mut env: BTreeMap<String, String> = inherited.collect();
    env.extend(command.env.iter().cloned());
    for name in &command.env_remove {
        env.remove(name);
    }
    for (name, value) in env {
        add(&format!("{name}={value}"));
        let read = COUNTED_PREFIXES.iter().any(|known| name.starts_with(known))
            && !WRITTEN_FILE_VARIABLES.contains(&name.as_str());
        if read && let Some(file) = file(&value) {
            add(&file);
        }
    }
    hex::encode(&hash.finalize()[..16])
}

#[cfg(test)]
mod tests {
    use warden_policies::growth::IntervalEstimate;
    use warden_policies::start_search::StartOutcome;

    use super::*;

    fn prior(series: MemoryKind, value: f64) -> LeakPrior {
        LeakPrior { series, slope: IntervalEstimate { value, low: value, high: value }, blame: None }
    }

    fn growth(series: MemoryKind, verdict: GrowthVerdict) -> SeriesGrowth {
        SeriesGrowth { verdict, ..SeriesGrowth::without_readings(series) }
    }

    const VRAM: MemoryKind = MemoryKind::Vram(warden_policies::GpuIndex(0));

    #[test]
    fn leaks_are_remembered_over_runs_and_forgotten_when_they_are_cured() {
        let directory = tempfile::tempdir().unwrap();
        let name = ModelName::new("m");
        let both = [prior(MemoryKind::Host, 4.0), prior(VRAM, 1.0)];
        let leaking =
            [growth(MemoryKind::Host, GrowthVerdict::Leaking), growth(VRAM, GrowthVerdict::Leaking)];
        LeakHistory::open(directory.path(), None).learn_growth("k", &name, &both, &leaking, 9);
        let next = LeakHistory::open(directory.path(), None);
        assert_eq!((next.leaks_of("k"), next.leaks_of("other")), (both.to_vec(), Vec::new()));
        // A short life says nothing about VRAM, but that the host does not leak.
        let short = [growth(MemoryKind::Host, GrowthVerdict::Steady), growth(VRAM, GrowthVerdict::Warming)];
        next.learn_growth("k", &name, &[], &short, 9);
        assert_eq!(LeakHistory::open(directory.path(), None).leaks_of("k"), [both[1].clone()]);
        let cured = [growth(VRAM, GrowthVerdict::Steady)];
        next.learn_growth("k", &name, &[], &cured, 9);
        assert_eq!(LeakHistory::open(directory.path(), None).leaks_of("k"), []);
    }

    #[test]
    fn what_a_diagnosis_found_is_kept_beside_slopes_and_by_runs_that_go_on_meanwhile() {
        let directory = tempfile::tempdir().unwrap();
        let command = ServerCommand {
            args: vec!["-c".to_owned(), "4096".to_owned()],
            ..ServerCommand::from_binary(directory.path().join("llama-server"))
        };
        let (name, key) = (ModelName::new("m"), process_key(&command));
        let serving = LeakHistory::open(directory.path(), None);
        let finding = StartFinding {
            outcome: StartOutcome::NoSwitch,
            deaths: 2,
            death: "signal 11".to_owned(),
            tried: Vec::new(),
        };
        remember_start(directory.path(), &name, &command, finding.clone(), 9).unwrap();
        // A run that began before the diagnosis does not overwrite its result.
        let leaking = [growth(MemoryKind::Host, GrowthVerdict::Leaking)];
        serving.learn_growth(&key, &name, &[prior(MemoryKind::Host, 4.0)], &leaking, 9);
        let next = LeakHistory::open(directory.path(), None);
        assert_eq!((next.start_finding(&key), next.leaks_of(&key).len()), (Some(finding.clone()), 1));
        // A leak that is gone removes nothing else.
        next.learn_growth(&key, &name, &[], &[growth(MemoryKind::Host, GrowthVerdict::Steady)], 9);
        let last = LeakHistory::open(directory.path(), None);
        assert_eq!((last.start_finding(&key), last.leaks_of(&key)), (Some(finding), Vec::new()));
        assert_eq!(last.start_finding("other"), None);
    }

    #[test]
    fn the_oldest_is_forgotten_first() {
        let directory = tempfile::tempdir().unwrap();
        let history = LeakHistory::open(directory.path(), None);
        for key in ["a", "b", "c"] {
            let found = [prior(MemoryKind::Host, 1.0)];
            history.learn_growth(
                key,
                &ModelName::new("m"),
                &found,
                &[growth(MemoryKind::Host, GrowthVerdict::Leaking)],
                2,
            );
        }
        assert_eq!(["a", "b", "c"].map(|key| history.leaks_of(key).len()), [0, 1, 1]);
    }

    #[test]
    fn a_broken_file_is_set_aside_and_nothing_else_happens() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("growth.json"), "{ nonsense").unwrap();
        assert_eq!(LeakHistory::open(directory.path(), None).leaks_of("k"), []);
        let aside = fs::read_to_string(directory.path().join("growth.json.broken")).unwrap();
        assert_eq!(aside, "{ nonsense");
    }

    #[test]
    fn another_argument_or_binary_is_another_process() {
        let directory = tempfile::tempdir().unwrap();
        let binary = directory.path().join("llama-server");
        let command = |arg: &str| ServerCommand {
            args: vec![arg.to_owned()],
            ..ServerCommand::from_binary(binary.clone())
        };
        let absent = process_key(&command("a"));
        fs::write(&binary, "one").unwrap();
        let one = process_key(&command("a"));
        assert!(absent != one && one != process_key(&command("b")) && one == process_key(&command("a")));
        fs::write(&binary, "two, longer").unwrap();
        assert_ne!(one, process_key(&command("a")));
    }

    #[test]
    fn another_model_in_the_old_place_and_variables_that_reach_the_server_make_another_process() {
        let directory = tempfile::tempdir().unwrap();
        let command = |env: &[(&str, &str)], removed: &[&str]| ServerCommand {
            args: vec!["-m".to_owned(), "model.gguf".to_owned()],
            env: env.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect(),
            env_remove: removed.iter().map(|&name| name.to_owned()).collect(),
            directory: Some(directory.path().to_owned()),
            ..ServerCommand::from_binary("/opt/llama-server".into())
        };
        let inherits = |pairs: &[(&str, &str)], removed: &[&str]| {
            let pairs: Vec<_> = pairs.iter().map(|(name, value)| (name.into(), value.into())).collect();
            key_with_disk(&command(&[], removed), pairs.into_iter())
        };
        let absent = inherits(&[], &[]);
        fs::write(directory.path().join("model.gguf"), "one").unwrap();
        let one = inherits(&[], &[]);
        assert_ne!(absent, one);
        fs::write(directory.path().join("model.gguf"), "two, longer").unwrap();
        let two = inherits(&[], &[]);
        assert_ne!(one, two);
        // A mitigation in the environment of the service.
        let cure = ("GGML_CUDA_DISABLE_GRAPHS", "1");
        let cured = inherits(&[cure], &[]);
        assert_ne!(two, cured);
        assert_eq!(inherits(&[cure], &["GGML_CUDA_DISABLE_GRAPHS"]), two);
        assert_eq!(
            key_with_disk(&command(&[cure], &[]), std::iter::empty()),
            cured,
            "wherever it comes from"
        );
        // Files that the process writes itself, and files named by other programs' variables.
        let writes = |text: &str| {
            fs::write(directory.path().join("log"), text).unwrap();
            let mut writes = command(
                &[("LLAMA_ARG_LOG_FILE", "log"), ("LLAMA_WARDEN_REPORT", "log"), ("TRACE_TO", "log")],
                &[],
            );
            writes.args.extend(["--log_file".to_owned(), "log".to_owned()]);
            key_with_disk(&writes, std::iter::empty())
        };
        assert_eq!(writes("a line"), writes("a line and another"));
        // Irrelevant variables.
        let others = [("HOME", "/root"), ("LLAMA_API_KEY", "k"), ("LLAMA_WARDEN_DEFAULTS__PRELOAD", "true")];
        assert_eq!(inherits(&others, &[]), two);
    }
}
