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
use std::sync::Mutex;
use std::time::UNIX_EPOCH;

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use warden_policies::book::Measured;
use warden_policies::book::held::{self, Held};
use warden_policies::experiment::headroom::Learnt;
use warden_policies::growth::{Growth, Prior, Verdict};
use warden_policies::health::Offload;
use warden_policies::start_search::StartFinding;
use warden_policies::{MemoryKind, ModelName};

use crate::spec::Command;
use crate::sync::lock;

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
    measured: Learnt,
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

#[derive(Debug)]
pub(crate) struct LeakHistory {
    path: PathBuf,
    /// Oldest first.
    known: Mutex<Vec<Known>>,
}

impl LeakHistory {
    /// Reads the file in `directory`, if there is one.
    pub(crate) fn open(directory: &Path) -> Self {
        let path = directory.join(FILE);
        let known = read(&path);
        Self { path, known: Mutex::new(known) }
    }

    /// What is known of such a process.
    pub(crate) fn of(&self, key: &str) -> Vec<Prior> {
        self.get(key, |known| known.priors.clone()).unwrap_or_default()
    }

    /// What a diagnosis measured of such a process.
    pub(crate) fn measured(&self, key: &str) -> Learnt {
        self.get(key, |known| known.measured.clone()).unwrap_or_default()
    }

    /// The most that such processes held.
    pub(crate) fn most(&self, key: &str) -> Measured {
        self.get(key, |known| Measured::of(&known.held, &known.measured.worst)).unwrap_or_default()
    }

    fn get<T>(&self, key: &str, of: impl FnOnce(&Known) -> T) -> Option<T> {
        lock(&self.known).iter().find(|known| known.key == key).map(of)
    }

    /// Takes the end of such a process in: what leaked is remembered, what was judged and did not is forgotten, what was
    /// not judged stays as it was. Writes the file if that changes anything; blocks for that.
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
        if let Err(error) = self.change(key, model, keep, |known| known.priors = priors) {
            tracing::warn!(path = %self.path.display(), %error, "what was learnt of growth is not kept");
        }
    }

    /// What the best process of this kind had on GPUs.
    pub(crate) fn offload(&self, key: &str) -> Option<Offload> {
        self.get(key, |known| known.offload)?
    }

    /// Such a process had this on GPUs, and nothing was missing. Writes the file if it is the first or the best; blocks for
    /// that.
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
        if let Err(error) = self.change(key, model, keep, |known| known.offload = Some(best)) {
            tracing::warn!(path = %self.path.display(), %error, "what it had on GPUs is not kept");
        }
    }

    /// What a search found of starts of such a process.
    pub(crate) fn start_finding(&self, key: &str) -> Option<StartFinding> {
        self.get(key, |known| known.start.clone())?
    }

    /// A search found this of starts of such a process. Writes the file; blocks for that.
    pub(crate) fn keep_start_finding(
        &self,
        key: &str,
        model: &ModelName,
        finding: StartFinding,
        keep: usize,
    ) {
        if let Err(error) = self.change(key, model, keep, |known| known.start = Some(finding)) {
            tracing::warn!(path = %self.path.display(), %error, "what was found of its start is not kept");
        }
    }

    /// Such a process held this. Writes the file if that is news; blocks for that.
    pub(crate) fn held(&self, key: &str, model: &ModelName, shown: &[Held], keep: usize) {
        let before = self.get(key, |known| known.held.clone()).unwrap_or_default();
        let Some(now) = held::take(&before, shown) else { return };
        if let Err(error) = self.change(key, model, keep, |known| known.held = now) {
            tracing::warn!(path = %self.path.display(), %error, "what it held is not kept");
        }
    }

    /// Takes in what a diagnosis measured of such a process. Blocks.
    fn take(&self, key: &str, model: &ModelName, measured: Learnt, keep: usize) -> io::Result<()> {
        self.change(key, model, keep, |known| known.measured = measured)
    }

    /// Changes what is known of one kind of process, in the file as it is now.
    fn change(
        &self,
        key: &str,
        model: &ModelName,
        keep: usize,
        change: impl FnOnce(&mut Known),
    ) -> io::Result<()> {
        let mut known = lock(&self.known);
        let lock_file = self.path.with_extension("lock");
        let beside = fs::File::options().create(true).truncate(false).write(true).open(lock_file)?;
        // Let go of when the file is closed.
        rustix::fs::flock(&beside, rustix::fs::FlockOperation::LockExclusive)?;
        if self.path.exists() {
            *known = read(&self.path);
        }
        let old = known.iter().position(|known| known.key == key).map(|at| known.remove(at));
        let mut one = old.unwrap_or_else(|| Known {
            key: key.to_owned(),
            model: model.clone(),
            priors: Vec::new(),
            measured: Learnt::default(),
            offload: None,
            held: Vec::new(),
            start: None,
        });
        change(&mut one);
        if !one.is_empty() {
            known.push(one);
        }
        let surplus = known.len().saturating_sub(keep.max(1));
        known.drain(..surplus);
        write(&self.path, &known)
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
    measured: Learnt,
    keep: usize,
) -> io::Result<()> {
    fs::create_dir_all(state_dir)?;
    LeakHistory::open(state_dir).take(&key(command), model, measured, keep)
}

/// Keeps what a search found of starts with this command, for the next start that dies. Blocks.
///
/// # Errors
/// The state directory cannot be made.
pub fn remember_start(
    state_dir: &Path,
    model: &ModelName,
    command: &Command,
    finding: StartFinding,
    keep: usize,
) -> io::Result<()> {
    fs::create_dir_all(state_dir)?;
    LeakHistory::open(state_dir).keep_start_finding(&key(command), model, finding, keep);
    Ok(())
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
pub(crate) fn key(command: &Command) -> String {
    key_in(command, std::env::vars_os())
}

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
    let mut hash = Sha256::new();
    let mut add = |text: &str| {
        hash.update(text.as_bytes());
        hash.update([0]);
    };
    let directory = command.directory.as_deref().unwrap_or_else(|| Path::new(""));
    let file = |text: &str| {
        let file = fs::metadata(directory.join(text)).ok().filter(fs::Metadata::is_file)?;
        let changed = file.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        Some(format!("{} {:?}", file.len(), changed.map(|time| time.as_secs())))
    };
    let binary = command.binary.to_string_lossy();
    add(&binary);
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
        LeakHistory::open(directory.path()).learn("k", &name, &both, &leaking, 9);
        let next = LeakHistory::open(directory.path());
        assert_eq!((next.of("k"), next.of("other")), (both.to_vec(), Vec::new()));
        // A short life says nothing of VRAM, and that the host does not leak.
        let short = [growth(MemoryKind::Host, Verdict::Steady), growth(VRAM, Verdict::Warming)];
        next.learn("k", &name, &[], &short, 9);
        assert_eq!(LeakHistory::open(directory.path()).of("k"), [both[1].clone()]);
        let cured = [growth(VRAM, Verdict::Steady)];
        next.learn("k", &name, &[], &cured, 9);
        assert_eq!(LeakHistory::open(directory.path()).of("k"), []);
    }

    #[test]
    fn what_a_diagnosis_measured_is_kept_beside_slopes_and_by_runs_that_go_on_meanwhile() {
        let directory = tempfile::tempdir().unwrap();
        let command = Command {
            binary: directory.path().join("llama-server"),
            args: vec!["-c".to_owned(), "4096".to_owned()],
            env: Vec::new(),
            env_remove: Vec::new(),
            directory: None,
        };
        let (name, key) = (ModelName::new("m"), key(&command));
        let serving = LeakHistory::open(directory.path());
        let price = Price { series: VRAM, bytes_per_token: 8192.0, evidence: 5 };
        let measured = Learnt { prices: vec![price], worst: vec![(VRAM, 1 << 30)] };
        remember(directory.path(), &name, &command, measured.clone(), 9).unwrap();
        // The run that began before the diagnosis does not overwrite it.
        let leaking = [growth(MemoryKind::Host, Verdict::Leaking)];
        serving.learn(&key, &name, &[prior(MemoryKind::Host, 4.0)], &leaking, 9);
        let next = LeakHistory::open(directory.path());
        assert_eq!((next.measured(&key), next.of(&key).len()), (measured.clone(), 1));
        assert_eq!(measured.worst(VRAM), Some(1 << 30));
        // A leak that is gone takes nothing else with it.
        next.learn(&key, &name, &[], &[growth(MemoryKind::Host, Verdict::Steady)], 9);
        let last = LeakHistory::open(directory.path());
        assert_eq!((last.measured(&key), last.of(&key)), (measured, Vec::new()));
        assert_eq!(last.measured("other"), Learnt::default());
    }

    #[test]
    fn the_oldest_is_forgotten_first() {
        let directory = tempfile::tempdir().unwrap();
        let history = LeakHistory::open(directory.path());
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
        assert_eq!(LeakHistory::open(directory.path()).of("k"), []);
        let aside = fs::read_to_string(directory.path().join("growth.json.broken")).unwrap();
        assert_eq!(aside, "{ nonsense");
    }

    #[test]
    fn another_argument_or_binary_is_another_process() {
        let directory = tempfile::tempdir().unwrap();
        let binary = directory.path().join("llama-server");
        let command = |arg: &str| Command {
            binary: binary.clone(),
            args: vec![arg.to_owned()],
            env: Vec::new(),
            env_remove: Vec::new(),
            directory: None,
        };
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
            binary: "/opt/llama-server".into(),
            args: vec!["-m".to_owned(), "model.gguf".to_owned()],
            env: env.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect(),
            env_remove: removed.iter().map(|&name| name.to_owned()).collect(),
            directory: Some(directory.path().to_owned()),
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
