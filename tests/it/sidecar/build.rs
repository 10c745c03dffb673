//! Compiles the programs of `tests/sidecar` with the sidecars, once for each text.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use sha2::{Digest as _, Sha256};
use tokio::sync::Mutex;
use warden_rig::{Context as _, Trouble, binaries};

/// Eras of ggml's structs, described in `tests/sidecar/shapes.h`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    OneBare,
    One,
    Map,
    Swept,
    Spaces,
    Fork,
    Plain,
}

impl Shape {
    pub(super) const ALL: [Self; 7] =
        [Self::OneBare, Self::One, Self::Map, Self::Swept, Self::Spaces, Self::Fork, Self::Plain];
    pub(super) const WITH_LOCK: [Self; 6] =
        [Self::One, Self::Map, Self::Swept, Self::Spaces, Self::Fork, Self::Plain];
    pub(super) const WITH_MAP: [Self; 4] = [Self::Map, Self::Swept, Self::Spaces, Self::Fork];
    pub(super) const WITH_IDLE_GRAPHS: [Self; 5] =
        [Self::One, Self::Map, Self::Swept, Self::Spaces, Self::Fork];

    fn define(self) -> &'static str {
        match self {
            Self::OneBare => "-DSHAPE=ONE_BARE",
            Self::One => "-DSHAPE=ONE",
            Self::Map => "-DSHAPE=MAP",
            Self::Swept => "-DSHAPE=SWEPT",
            Self::Spaces => "-DSHAPE=SPACES",
            Self::Fork => "-DSHAPE=FORK",
            Self::Plain => "-DSHAPE=PLAIN",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flavour {
    Plain,
    /// With sanitizers for addresses and undefined behaviour.
    Address,
    /// With the sanitizer for races.
    Thread,
    /// The program can forbid new threads.
    NoThreads,
}

impl Flavour {
    /// Flavours in which a shape is tested: sanitizers where they detect the most.
    pub(super) fn of(shape: Shape) -> Vec<Self> {
        match shape {
            Shape::Spaces => vec![Self::Plain, Self::Address, Self::Thread],
            Shape::One | Shape::Fork => vec![Self::Plain, Self::Address],
            _ => vec![Self::Plain],
        }
    }

    fn flags(self) -> &'static [&'static str] {
        match self {
            Self::Plain => &["-O1"],
            Self::Address => &["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
            // The sanitizer ignores the fence of the report's writer; all else there is atomic.
            Self::Thread => &["-O1", "-fsanitize=thread", "-Wno-tsan"],
            Self::NoThreads => &["-O1", "-DLLAMA_WARDEN_TEST_NO_THREADS", "-ldl"],
        }
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map(Path::to_owned).unwrap_or_default()
}

pub(super) fn folder() -> PathBuf {
    root().join("tests/sidecar")
}

fn sets() -> PathBuf {
    root().join("patches")
}

/// Folders with headers for a tree's text: ours, those of the simulated runtime, and those that the sidecar
/// includes.
pub(super) fn tree_includes() -> [PathBuf; 3] {
    [folder(), sets().join("cuda-memory/conformance"), sets().join("cuda-memory")]
}

pub(super) fn compiler() -> std::ffi::OsString {
    std::env::var_os("CXX").unwrap_or_else(|| "c++".into())
}

/// Program of a shape; `None` if the compiler lacks the sanitizer.
pub(super) async fn binary(shape: Shape, flavour: Flavour) -> Result<Option<PathBuf>, Trouble> {
    if !has(flavour)? {
        return Ok(None);
    }
    let flags = [&[shape.define()], flavour.flags()].concat();
    let includes = [
        "tests/sidecar/stub-cuda.h",
        "tests/sidecar/shapes.h",
        "patches/cuda-memory/llama-warden-cuda.cuh",
        "patches/cuda-memory/llama-warden-reclaim.h",
    ];
    program("tests/sidecar/behaviour.cpp", &includes, &flags).await.map(Some)
}

/// Program that returns heap memory; `None` if the compiler lacks the sanitizer.
pub(super) async fn heap(flavour: Flavour) -> Result<Option<PathBuf>, Trouble> {
    if !has(flavour)? {
        return Ok(None);
    }
    let includes = ["patches/server/llama-warden-server.h", "patches/server/llama-warden-reclaim.h"];
    program("tests/sidecar/heap.cpp", &includes, flavour.flags()).await.map(Some)
}

pub(super) async fn server() -> Result<PathBuf, Trouble> {
    let includes = ["patches/server/llama-warden-server.h", "patches/server/llama-warden-reclaim.h"];
    program("tests/sidecar/server.cpp", &includes, &["-O1"]).await
}

/// Program for checkpoints of an era, as `tests/sidecar/checkpoints.cpp` names it; `None` if the compiler lacks
/// the sanitizer.
pub(super) async fn checkpoints(era: &str, flavour: Flavour) -> Result<Option<PathBuf>, Trouble> {
    if !has(flavour)? {
        return Ok(None);
    }
    let includes = [
        "patches/server/conformance/stand-in.h",
        "patches/server/conformance/checkpoints.cpp",
        "patches/server/llama-warden-checkpoints.h",
    ];
    let shape = format!("-DSHAPE={era}");
    let flags = [&[shape.as_str()], flavour.flags()].concat();
    program("tests/sidecar/checkpoints.cpp", &includes, &flags).await.map(Some)
}

async fn program(source: &str, includes: &[&str], flags: &[&str]) -> Result<PathBuf, Trouble> {
    // Parallel compilations would be slower, and might make a program twice.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::const_new(());
    let _turn = ONE_AT_A_TIME.lock().await;

    let mut text = Sha256::new();
    for file in includes.iter().chain([&source]) {
        let path = root().join(file);
        text.update(std::fs::read(&path).context(path.display())?);
    }
    text.update(flags.join(" "));
    text.update(compiler().as_encoded_bytes());
    let store = binaries::store()?.join("sidecar");
    std::fs::create_dir_all(&store)?;
    let name: String = hex::encode(text.finalize()).chars().take(16).collect();
    let done = store.join(&name);
    if done.exists() {
        return Ok(done);
    }
    let making = store.join(format!("{name}.{}", std::process::id()));
    let mut command = Command::new(compiler());
    command.args(["-std=c++17", "-Wall", "-Wextra", "-Werror", "-g", "-pthread"]).current_dir(root());
    command.args(["-Itests/sidecar", "-Ipatches/cuda-memory", "-Ipatches/server", source]);
    command.args(flags).arg("-o").arg(&making);
    let output = command.stdin(Stdio::null()).output().context("the C++ compiler")?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(Trouble::new(format!("{source} {}:\n{said}", flags.join(" "))));
    }
    std::fs::rename(&making, &done)?;
    Ok(done)
}

/// Returns true if the compiler has the sanitizer, and its programs run here. Each process tries a sanitizer once.
fn has(flavour: Flavour) -> Result<bool, Trouble> {
    static ADDRESS: OnceLock<bool> = OnceLock::new();
    static THREAD: OnceLock<bool> = OnceLock::new();
    let known = match flavour {
        Flavour::Plain | Flavour::NoThreads => return Ok(true),
        Flavour::Address => &ADDRESS,
        Flavour::Thread => &THREAD,
    };
    if let Some(has) = known.get() {
        return Ok(*has);
    }
    let has = try_sanitizer(flavour)?;
    Ok(*known.get_or_init(|| has))
}

fn try_sanitizer(flavour: Flavour) -> Result<bool, Trouble> {
    let folder = tempfile::tempdir()?;
    let source = folder.path().join("empty.cpp");
    std::fs::write(&source, "int main() { return 0; }\n")?;
    let program = folder.path().join("empty");
    let quiet = |command: &mut Command| {
        let status = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
        status.is_ok_and(|status| status.success())
    };
    let made = quiet(Command::new(compiler()).args(flavour.flags()).arg(&source).arg("-o").arg(&program));
    Ok(made && quiet(&mut Command::new(&program)))
}
