//! What is remembered of earlier processes, by what they were made of: slopes of series that leaked, what a diagnosis
//! measured of the largest prompts, what the best of them had on GPUs, and what they held. Kept in `growth.json` in the state
//! directory, so that the next generation, and the next run, begin as known leakers and with known prices.
//!
//! The file is replaced whole, under a lock, after it was read again: a diagnosis may write it while models are served. One
//! that cannot be read is set aside and warned of, never a reason not to start.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use warden_policies::book::Measured;
use warden_policies::book::held::{self, Held};
use warden_policies::growth::{Growth, Prior, Verdict};
use warden_policies::health::Offload;
use warden_policies::measured_needs::MeasuredNeeds;
use warden_policies::start_search::StartFinding;
use warden_policies::{MemoryKind, ModelName};

use crate::spec::Command;
use crate::state::{StateKind, StateWriter};
use crate::sync::lock;
use crate::worker_threads::{WorkKind, run_briefly};

/// The name of the file.
const FILE: &str = "growth.json";

/// One kind of process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Known {
    key: String,
    /// For people: keys tell nothing.
    model: ModelName,
    #[serde(default)]
    priors: Vec<Prior>,
    #[serde(flatten)]
    measured: MeasuredNeeds,
    /// What the best of them had on GPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    offload: Option<Offload>,
    /// What they held.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    held: Vec<Held>,
    /// What starts it, where it dies while it loads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    start: Option<StartFinding>,
}

impl Known {
    fn is_empty(&self) -> bool {
        self.priors.is_empty()
            && self.measured.is_empty()
            && self.offload.is_none()
            && self.held.is_empty()
            && self.start.is_none()
    }
}

/// What is known of the memory of processes with one command, from those that ran.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KnownMemory {
    /// What they were seen to hold.
    pub held: Vec<Held>,
    /// The most that they hold with the largest prompts, as an experiment measured it.
    pub worst: Vec<(MemoryKind, u64)>,
    /// How they leak.
    pub leaks: Vec<Prior>,
}

/// What is news of one kind of process.
#[derive(Clone, Debug, PartialEq)]
enum KnownChange {
    Priors(Vec<Prior>),
    Measured(MeasuredNeeds),
    Offload(Offload),
    Held(Vec<Held>),
    Start(StartFinding),
}

impl KnownChange {
    fn apply(self, known: &mut Known) {
        match self {
            Self::Priors(priors) => known.priors = priors,
            Self::Measured(measured) => known.measured = measured,
            Self::Offload(offload) => known.offload = Some(offload),
            Self::Held(held) => known.held = held,
            Self::Start(finding) => known.start = Some(finding),
        }
    }
}

/// News that are not in the file yet.
#[derive(Clone, Debug)]
struct Pending {
    key: String,
    model: ModelName,
    /// Kinds of processes that are kept.
    keep: usize,
    change: KnownChange,
}

impl Pending {
    fn apply(self, all: &mut Vec<Known>) {
        let old = all.iter().position(|known| known.key == self.key).map(|at| all.remove(at));
        let mut one = old.unwrap_or_else(|| Known {
            key: self.key,
            model: self.model,
            priors: Vec::new(),
            measured: MeasuredNeeds::default(),
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

    /// Whether `self` makes what `other` says old.
    fn replaces(&self, other: &Self) -> bool {
        self.key == other.key && std::mem::discriminant(&self.change) == std::mem::discriminant(&other.change)
    }
}

#[derive(Debug)]
pub(crate) struct LeakHistory {
    kept: Arc<Kept>,
    /// Who writes the file; without it each change is written at once.
    state: Option<StateWriter>,
}

#[derive(Debug)]
struct Kept {
    path: PathBuf,
    /// Nobody waits for a disk under it.
    memory: Mutex<Memory>,
}

#[derive(Debug)]
struct Memory {
    /// Oldest first.
    known: Vec<Known>,
    pending: Vec<Pending>,
    /// Somebody is about to write what is pending.
    queued: bool,
}

impl LeakHistory {
    /// Reads the file in `directory`, if there is one.
    pub(crate) fn open(directory: &Path, state: Option<StateWriter>) -> Self {
        let path = directory.join(FILE);
        let memory = Memory { known: read(&path), pending: Vec::new(), queued: false };
        Self { kept: Arc::new(Kept { path, memory: Mutex::new(memory) }), state }
    }

    /// What is known of such a process.
    pub(crate) fn of(&self, key: &str) -> Vec<Prior> {
        self.get(key, |known| known.priors.clone()).unwrap_or_default()
    }

    /// What a diagnosis measured of such a process.
    pub(crate) fn measured(&self, key: &str) -> MeasuredNeeds {
        self.get(key, |known| known.measured.clone()).unwrap_or_default()
    }

    /// The most that such processes held.
    pub(crate) fn most(&self, key: &str) -> Measured {
        self.get(key, |known| Measured::of(&known.held, &known.measured.worst)).unwrap_or_default()
    }

    fn get<T>(&self, key: &str, of: impl FnOnce(&Known) -> T) -> Option<T> {
        lock(&self.kept.memory).known.iter().find(|known| known.key == key).map(of)
    }

    /// Takes the end of such a process in: what leaked is remembered, what was judged and did not is forgotten, what was
    /// not judged stays as it was. Has the file written if that changes anything.
    pub(crate) fn learn(
        &self,
        key: &str,
        model: &ModelName,
        found: &[Prior],
        growth: &[Growth],
        keep: usize,
    ) {
        let judged = |series: MemoryKind| {
            let of = growth.iter().find(|growth| growth.series == series);
            of.is_some_and(|growth| {
                matches!(growth.verdict, Verdict::Steady | Verdict::Bounded | Verdict::Leaking)
            })
        };
        let before = self.of(key);
        let mut priors = before.clone();
        priors.retain(|prior| !judged(prior.series));
        priors.extend_from_slice(found);
        priors.sort_by_key(|prior| prior.series);
        if priors == before {
            return;
        }
        self.change(key, model, keep, KnownChange::Priors(priors));
    }

    /// What the best process of this kind had on GPUs.
    pub(crate) fn offload(&self, key: &str) -> Option<Offload> {
        self.get(key, |known| known.offload)?
    }

    /// Such a process had this on GPUs, and nothing was missing. Has the file written if it is the first or the best.
    pub(crate) fn had(&self, key: &str, model: &ModelName, offload: Offload, keep: usize) {
        let before = self.offload(key);
        let best = before.map_or(offload, |before| before.best(offload));
        // What differs by less is how full the buffers were.
        let grown = |before: Offload| {
            best.layers != before.layers || best.vram > before.vram.map(|held| held + held / 8)
        };
        if !before.is_none_or(grown) {
            return;
        }
        self.change(key, model, keep, KnownChange::Offload(best));
    }

    /// What a search found of starts of such a process.
    pub(crate) fn start_finding(&self, key: &str) -> Option<StartFinding> {
        self.get(key, |known| known.start.clone())?
    }

    /// A search found this of starts of such a process. Has the file written.
    pub(crate) fn keep_start_finding(
        &self,
        key: &str,
        model: &ModelName,
        finding: StartFinding,
        keep: usize,
    ) {
        self.change(key, model, keep, KnownChange::Start(finding));
    }

    /// Such a process held this. Has the file written if that is news.
    pub(crate) fn held(&self, key: &str, model: &ModelName, shown: &[Held], keep: usize) {
        let before = self.get(key, |known| known.held.clone()).unwrap_or_default();
        let Some(now) = held::take(&before, shown) else { return };
        self.change(key, model, keep, KnownChange::Held(now));
    }

    /// Changes what is known of one kind of process: here at once, in the file when its disk answers.
    fn change(&self, key: &str, model: &ModelName, keep: usize, change: KnownChange) {
        let news = Pending { key: key.to_owned(), model: model.clone(), keep, change };
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
                tracing::warn!(path = %self.kept.path.display(), %error, "what was learnt of processes is not kept");
            }
            return;
        };
        // One that is left out is tried again with the next change: nothing of it is lost as long as we run.
        if !state.write(StateKind::Growth, 0, move || kept.write_pending()) {
            lock(&self.kept.memory).queued = false;
        }
    }
}

impl Kept {
    /// Writes what is pending into the file as it is now, and takes in what others have written there.
    fn write_pending(&self) -> io::Result<()> {
        let (mut known, pending) = {
            let mut memory = lock(&self.memory);
            // Later news are written by the job that comes with them.
            memory.queued = false;
            (memory.known.clone(), memory.pending.clone())
        };
        let lock_file = self.path.with_extension("lock");
        let beside = fs::File::options().create(true).truncate(false).write(true).open(lock_file)?;
        // Let go of when the file is closed.
        rustix::fs::flock(&beside, rustix::fs::FlockOperation::LockExclusive)?;
        if self.path.exists() {
            known = read(&self.path);
        }
        pending.iter().cloned().for_each(|news| news.apply(&mut known));
        write(&self.path, &known)?;
        let mut memory = lock(&self.memory);
        let written =
            |news: &Pending| pending.iter().any(|old| news.replaces(old) && old.change == news.change);
        memory.pending.retain(|news| !written(news));
        memory.pending.iter().cloned().for_each(|news| news.apply(&mut known));
        memory.known = known;
        Ok(())
    }
}

/// Keeps what a diagnosis measured of processes with this command, for the next one that serves. Blocks.
///
/// # Errors
/// The state directory cannot be made, or the file in it cannot be written.
pub fn remember(
    state_dir: &Path,
    model: &ModelName,
    command: &Command,
    measured: MeasuredNeeds,
    keep: usize,
) -> io::Result<()> {
    write_change(state_dir, model, command, KnownChange::Measured(measured), keep)
}

/// Keeps what a search found of starts with this command, for the next start that dies. Blocks.
///
/// # Errors
/// The state directory cannot be made, or the file in it cannot be written.
pub fn remember_start(
    state_dir: &Path,
    model: &ModelName,
    command: &Command,
    finding: StartFinding,
    keep: usize,
) -> io::Result<()> {
    write_change(state_dir, model, command, KnownChange::Start(finding), keep)
}

/// Writes one change to the file in the state directory, as a program that is no instance.
fn write_change(
    state_dir: &Path,
    model: &ModelName,
    command: &Command,
    change: KnownChange,
    keep: usize,
) -> io::Result<()> {
    fs::create_dir_all(state_dir)?;
    let kept = LeakHistory::open(state_dir, None).kept;
    lock(&kept.memory).pending.push(Pending { key: key(command), model: model.clone(), keep, change });
    kept.write_pending()
}

/// What is known of the memory of processes with this command. Reads the file in the state directory and changes nothing: one that
/// cannot be read, or does not exist, knows nothing.
pub fn known_memory(state_dir: &Path, command: &Command) -> KnownMemory {
    let (path, key) = (state_dir.join(FILE), key(command));
    let all: Vec<Known> =
        fs::read(path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default();
    let found = all.into_iter().find(|known| known.key == key);
    found
        .map(|known| KnownMemory { held: known.held, worst: known.measured.worst, leaks: known.priors })
        .unwrap_or_default()
}

/// The file as it is; empty if there is none.
fn read(path: &Path) -> Vec<Known> {
    match fs::read(path) {
        Ok(bytes) => serde_json::from_slice(&bytes).unwrap_or_else(|error| {
            let aside = path.with_extension("json.broken");
            tracing::warn!(
                path = %path.display(), %error, aside = %aside.display(),
                "slopes of earlier runs cannot be read; they are learnt anew"
            );
            // What was put aside before, or is somebody's, is not replaced.
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

fn write(path: &Path, known: &[Known]) -> io::Result<()> {
    let directory = path.parent().unwrap_or_else(|| Path::new("."));
    let mut file = tempfile::NamedTempFile::new_in(directory)?;
    serde_json::to_writer_pretty(&mut file, known)?;
    file.write_all(b"\n")?;
    file.persist(path)?;
    Ok(())
}

/// Names what a process is made of: the binary and the files that its arguments and variables name, as models and adapters
/// (path, size and time of change, so that a new build or model in an old place is another one; not those that it writes), its arguments, and the
/// variables that it gets and that reach the server, its libraries or its driver. A hash, because arguments may hold keys.
///
/// Where the disk of a file does not answer, the file counts as one that is not there: the caller is a task that
/// others wait for.
pub(crate) fn key(command: &Command) -> String {
    let own = command.clone();
    let whole = run_briefly(WorkKind::ModelFiles, DISK_ANSWERS, move || key_in(&own, std::env::vars_os()));
    whole.unwrap_or_else(|| key_of(command, std::env::vars_os(), |_| None))
}

/// A disk that works answers within milliseconds; the threads of a machine that is busy may take longer.
const DISK_ANSWERS: Duration = Duration::from_secs(1);

/// The beginnings of the names of inherited variables that count: of the server and ggml, of drivers and their libraries, of
/// the allocator and the loader.
const COUNT: [&str; 16] = [
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
/// What is in them has no part in what memory does, or differs from run to run.
const COUNT_NOT: [&str; 6] = [
    "LLAMA_API_KEY",
    "LLAMA_CACHE",
    "LLAMA_WARDEN_REPORT",
    "LLAMA_WARDEN_RECLAIM",
    "LLAMA_WARDEN_CONFIG",
    "LLAMA_WARDEN_ADMIN_SOCKET",
];

/// Files that the process writes itself: they differ with each start, and would make each one another kind of process.
const WRITTEN_BY_FLAG: [&str; 1] = ["--log-file"];
/// The same by variables. What a variable names that is not the server's own is no part of it either.
const WRITTEN: [&str; 4] =
    ["LLAMA_LOG_FILE", "LLAMA_ARG_LOG_FILE", "LLAMA_WARDEN_REPORT", "LLAMA_WARDEN_RECLAIM"];

fn key_in(command: &Command, inherited: impl Iterator<Item = (OsString, OsString)>) -> String {
    let directory = command.directory.as_deref().unwrap_or_else(|| Path::new(""));
    key_of(command, inherited, |text| {
        let file = fs::metadata(directory.join(text)).ok().filter(fs::Metadata::is_file)?;
        let changed = file.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        Some(format!("{} {:?}", file.len(), changed.map(|time| time.as_secs())))
    })
}

/// `file`: what is known of the file of a name, if there is one.
fn key_of(
    command: &Command,
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
        // llama-server takes `_` for `-` in the names of its flags.
        let was = std::mem::replace(&mut written, WRITTEN_BY_FLAG.contains(&text.replace('_', "-").as_str()));
        if let Some(file) = file(text).filter(|_| !was) {
            add(&file);
        }
    }
    let own = |name: &str| name.starts_with("LLAMA_WARDEN_") && name.contains("__");
    let counts = |name: &str| {
        COUNT.iter().any(|known| name.starts_with(known)) && !COUNT_NOT.contains(&name) && !own(name)
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
        let read = COUNT.iter().any(|known| name.starts_with(known)) && !WRITTEN.contains(&name.as_str());
        if let Some(file) = file(&value).filter(|_| read) {
            add(&file);
        }
    }
    hex::encode(&hash.finalize()[..16])
}

#[cfg(test)]
mod tests {
    use warden_policies::admission::Price;
    use warden_policies::growth::Interval;

    use super::*;

    fn prior(series: MemoryKind, value: f64) -> Prior {
        Prior { series, slope: Interval { value, low: value, high: value }, blame: None }
    }

    fn growth(series: MemoryKind, verdict: Verdict) -> Growth {
        Growth { verdict, ..Growth::of(series) }
    }

    const VRAM: MemoryKind = MemoryKind::Vram(warden_policies::GpuIndex(0));

    #[test]
    fn leaks_are_remembered_over_runs_and_forgotten_when_they_are_cured() {
        let directory = tempfile::tempdir().unwrap();
        let name = ModelName::new("m");
        let both = [prior(MemoryKind::Host, 4.0), prior(VRAM, 1.0)];
        let leaking = [growth(MemoryKind::Host, Verdict::Leaking), growth(VRAM, Verdict::Leaking)];
        LeakHistory::open(directory.path(), None).learn("k", &name, &both, &leaking, 9);
        let next = LeakHistory::open(directory.path(), None);
        assert_eq!((next.of("k"), next.of("other")), (both.to_vec(), Vec::new()));
        // A short life says nothing of VRAM, and that the host does not leak.
        let short = [growth(MemoryKind::Host, Verdict::Steady), growth(VRAM, Verdict::Warming)];
        next.learn("k", &name, &[], &short, 9);
        assert_eq!(LeakHistory::open(directory.path(), None).of("k"), [both[1].clone()]);
        let cured = [growth(VRAM, Verdict::Steady)];
        next.learn("k", &name, &[], &cured, 9);
        assert_eq!(LeakHistory::open(directory.path(), None).of("k"), []);
    }

    #[test]
    fn what_a_diagnosis_measured_is_kept_beside_slopes_and_by_runs_that_go_on_meanwhile() {
        let directory = tempfile::tempdir().unwrap();
        let command = Command {
            args: vec!["-c".to_owned(), "4096".to_owned()],
            ..Command::bare(directory.path().join("llama-server"))
        };
        let (name, key) = (ModelName::new("m"), key(&command));
        let serving = LeakHistory::open(directory.path(), None);
        let price = Price { series: VRAM, bytes_per_token: 8192.0, evidence: 5 };
        let measured = MeasuredNeeds { prices: vec![price], worst: vec![(VRAM, 1 << 30)] };
        remember(directory.path(), &name, &command, measured.clone(), 9).unwrap();
        // The run that began before the diagnosis does not overwrite it.
        let leaking = [growth(MemoryKind::Host, Verdict::Leaking)];
        serving.learn(&key, &name, &[prior(MemoryKind::Host, 4.0)], &leaking, 9);
        let next = LeakHistory::open(directory.path(), None);
        assert_eq!((next.measured(&key), next.of(&key).len()), (measured.clone(), 1));
        assert_eq!(measured.worst(VRAM), Some(1 << 30));
        // A leak that is gone takes nothing else with it.
        next.learn(&key, &name, &[], &[growth(MemoryKind::Host, Verdict::Steady)], 9);
        let last = LeakHistory::open(directory.path(), None);
        assert_eq!((last.measured(&key), last.of(&key)), (measured, Vec::new()));
        assert_eq!(last.measured("other"), MeasuredNeeds::default());
    }

    #[test]
    fn the_oldest_is_forgotten_first() {
        let directory = tempfile::tempdir().unwrap();
        let history = LeakHistory::open(directory.path(), None);
        for key in ["a", "b", "c"] {
            let found = [prior(MemoryKind::Host, 1.0)];
            history.learn(
                key,
                &ModelName::new("m"),
                &found,
                &[growth(MemoryKind::Host, Verdict::Leaking)],
                2,
            );
        }
        assert_eq!(["a", "b", "c"].map(|key| history.of(key).len()), [0, 1, 1]);
    }

    #[test]
    fn a_broken_file_is_set_aside_and_nothing_else_happens() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("growth.json"), "{ nonsense").unwrap();
        assert_eq!(LeakHistory::open(directory.path(), None).of("k"), []);
        let aside = fs::read_to_string(directory.path().join("growth.json.broken")).unwrap();
        assert_eq!(aside, "{ nonsense");
    }

    #[test]
    fn another_argument_or_binary_is_another_process() {
        let directory = tempfile::tempdir().unwrap();
        let binary = directory.path().join("llama-server");
        let command = |arg: &str| Command { args: vec![arg.to_owned()], ..Command::bare(binary.clone()) };
        let absent = key(&command("a"));
        fs::write(&binary, "one").unwrap();
        let one = key(&command("a"));
        assert!(absent != one && one != key(&command("b")) && one == key(&command("a")));
        fs::write(&binary, "two, longer").unwrap();
        assert_ne!(one, key(&command("a")));
    }

    #[test]
    fn another_model_in_the_old_place_and_variables_that_reach_the_server_make_another_process() {
        let directory = tempfile::tempdir().unwrap();
        let command = |env: &[(&str, &str)], removed: &[&str]| Command {
            args: vec!["-m".to_owned(), "model.gguf".to_owned()],
            env: env.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect(),
            env_remove: removed.iter().map(|&name| name.to_owned()).collect(),
            directory: Some(directory.path().to_owned()),
            ..Command::bare("/opt/llama-server".into())
        };
        let inherits = |pairs: &[(&str, &str)], removed: &[&str]| {
            let pairs: Vec<_> = pairs.iter().map(|(name, value)| (name.into(), value.into())).collect();
            key_in(&command(&[], removed), pairs.into_iter())
        };
        let absent = inherits(&[], &[]);
        fs::write(directory.path().join("model.gguf"), "one").unwrap();
        let one = inherits(&[], &[]);
        assert_ne!(absent, one);
        fs::write(directory.path().join("model.gguf"), "two, longer").unwrap();
        let two = inherits(&[], &[]);
        assert_ne!(one, two);
        // A cure in the environment of the service.
        let cure = ("GGML_CUDA_DISABLE_GRAPHS", "1");
        let cured = inherits(&[cure], &[]);
        assert_ne!(two, cured);
        assert_eq!(inherits(&[cure], &["GGML_CUDA_DISABLE_GRAPHS"]), two);
        assert_eq!(key_in(&command(&[cure], &[]), std::iter::empty()), cured, "wherever it comes from");
        // What it writes itself, and files of variables that are not the server's.
        let writes = |text: &str| {
            fs::write(directory.path().join("log"), text).unwrap();
            let mut writes = command(
                &[("LLAMA_ARG_LOG_FILE", "log"), ("LLAMA_WARDEN_REPORT", "log"), ("TRACE_TO", "log")],
                &[],
            );
            writes.args.extend(["--log_file".to_owned(), "log".to_owned()]);
            key_in(&writes, std::iter::empty())
        };
        assert_eq!(writes("a line"), writes("a line and another"));
        // What has nothing to do with it.
        let others = [("HOME", "/root"), ("LLAMA_API_KEY", "k"), ("LLAMA_WARDEN_DEFAULTS__PRELOAD", "true")];
        assert_eq!(inherits(&others, &[]), two);
    }
}
