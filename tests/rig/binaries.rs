//! Finds the programs under test, and builds them if needed, in the running test's target directory and
//! profile.
//!
//! Cargo builds `fake-llama` before an integration test runs, because both belong to this package.
//! `llama-warden` belongs to another package, so each process calls cargo once; the call does nothing if the
//! build is fresh.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use tokio::sync::Mutex;
use tokio_util::sync::CancellationToken;
use warden_builder::{BuildEnvironment, Builder, BuilderDirs, EventReporter};

pub use crate::real::llama_server;
use crate::{Context as _, Trouble};

/// Variable with the path of a `llama-warden` to test instead of the built one.
pub const WARDEN_VARIABLE: &str = "WARDEN_TEST_LLAMA_WARDEN";

/// Path of `llama-warden`.
///
/// # Errors
/// The build fails.
pub fn llama_warden() -> Result<PathBuf, Trouble> {
    static PATH: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    if let Some(path) = std::env::var_os(WARDEN_VARIABLE) {
        return Ok(PathBuf::from(path));
    }
    let built = PATH.get_or_init(|| build("llama-warden", "llama-warden").map_err(|wrong| wrong.to_string()));
    built.clone().map_err(Trouble::new)
}

/// Path of `fake-llama`.
///
/// # Errors
/// The build fails.
pub fn fake_llama() -> Result<PathBuf, Trouble> {
    let beside = profile_directory()?.join("fake-llama");
    if beside.exists() { Ok(beside) } else { build("warden-tests", "fake-llama") }
}

/// Path of `mock-llama`, the upstream of benchmarks.
///
/// # Errors
/// The build fails.
pub fn mock_llama() -> Result<PathBuf, Trouble> {
    let beside = profile_directory()?.join("mock-llama");
    if beside.exists() { Ok(beside) } else { build("warden-tests", "mock-llama") }
}

/// Path of `leaky`, which allocates as its arguments say.
///
/// # Errors
/// The build fails.
pub fn leaky() -> Result<PathBuf, Trouble> {
    let beside = profile_directory()?.join("leaky");
    if beside.exists() { Ok(beside) } else { build("warden-tests", "leaky") }
}

/// Path of `raw-llama`.
///
/// # Errors
/// The build fails.
pub fn raw_llama() -> Result<PathBuf, Trouble> {
    let beside = profile_directory()?.join("raw-llama");
    if beside.exists() { Ok(beside) } else { build("warden-tests", "raw-llama") }
}

/// Directory of this build's profile, for example `target/debug`.
///
/// # Errors
/// Cargo did not put this program where tests are.
pub fn profile_directory() -> Result<PathBuf, Trouble> {
    let exe = std::env::current_exe()?;
    let deps = exe.parent().filter(|parent| parent.ends_with("deps")).context("not run by cargo")?;
    Ok(deps.parent().context("not run by cargo")?.to_owned())
}

/// Folder for files that are expensive to make and are kept between runs: `warden-test-store` in the target
/// directory.
///
/// # Errors
/// The folder cannot be created.
pub fn store() -> Result<PathBuf, Trouble> {
    let profile = profile_directory()?;
    let store = profile.parent().context("no target directory")?.join("warden-test-store");
    std::fs::create_dir_all(&store).context(store.display())?;
    Ok(store)
}

/// Lock for running pip, which does not support several instances in one environment.
pub(crate) static PIP: Mutex<()> = Mutex::const_new(());

/// The product's builder, with its cache and its builds in the [`store`].
///
/// # Errors
/// The store cannot be created.
pub fn store_builder(reporter: EventReporter) -> Result<Builder, Trouble> {
    let store = store()?;
    Ok(Builder {
        dirs: BuilderDirs { cache: store.join("cache"), data: store.join("data") },
        env: BuildEnvironment::from_process(),
        memory: || None,
        reporter,
        cancel: CancellationToken::new(),
    })
}

fn build(package: &str, binary: &str) -> Result<PathBuf, Trouble> {
    let profile = profile_directory()?;
    let target = profile.parent().context("no target directory")?;
    // The profile `dev` has the directory `debug`; all others have a directory of their own name.
    let name = profile.file_name().and_then(|name| name.to_str()).unwrap_or("debug");
    let name = if name == "debug" { "dev" } else { name };
    let mut cargo = Command::new(env!("CARGO"));
    // Build scripts (such as ring's) would take cargo's variables for a change, and cargo would compile
    // everything that depends on them again, now and in the next build.
    for (variable, _) in std::env::vars_os().filter(|(name, _)| is_of_a_package(&name.to_string_lossy())) {
        cargo.env_remove(variable);
    }
    if name == "dev" && package == "llama-warden" {
        // Build with the features of the whole test command, so that nothing is left to compile.
        cargo.args(["test", "--quiet", "--workspace", "--no-run", "--test", "program"]);
    } else {
        cargo.args(["build", "--quiet", "--profile", name, "--package", package, "--bin", binary]);
    }
    let output = cargo
        .env("CARGO_TARGET_DIR", target)
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")))
        .stdin(Stdio::null())
        .output()
        .context("cargo build")?;
    if output.status.success() {
        return Ok(profile.join(binary));
    }
    Err(Trouble::new(format!("cargo build of {binary}:\n{}", String::from_utf8_lossy(&output.stderr))))
}

/// Returns true for variables that cargo sets for each package.
fn is_of_a_package(variable: &str) -> bool {
    ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_", "CARGO_CRATE_", "CARGO_PRIMARY_"]
        .iter()
        .any(|beginning| variable.starts_with(beginning))
}

/// Finds a program named on a command line; a relative path may begin in the caller's folder or in the
/// workspace.
///
/// # Errors
/// There is no such file.
pub fn given(path: &Path) -> Result<PathBuf, Trouble> {
    found(path, &starts())
}

/// Folders in which a relative path may begin. Cargo starts benches in the folder of their package, and
/// leaves the caller's folder only in `PWD`.
fn starts() -> Vec<PathBuf> {
    let caller = std::env::var_os("PWD").map(PathBuf::from);
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).parent().map(Path::to_owned);
    caller.into_iter().chain(std::env::current_dir()).chain(workspace).collect()
}

/// Returns the absolute path of the first file that exists.
fn found(path: &Path, starts: &[PathBuf]) -> Result<PathBuf, Trouble> {
    // Joining an absolute path gives that path.
    let all: Vec<PathBuf> = starts.iter().map(|start| start.join(path)).collect();
    if let Some(file) = all.iter().find(|file| file.is_file()) {
        return Ok(file.canonicalize()?);
    }
    let mut tried: Vec<String> = all.iter().map(|file| file.display().to_string()).collect();
    tried.dedup();
    Err(Trouble::new(format!("{}: there is no file {}", path.display(), tried.join(", nor "))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_relative_binary_is_found_from_where_the_caller_is_and_from_the_workspace() {
        let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let starts = dirs.each_ref().map(|dir| dir.path().to_owned());
        let path = Path::new("target/release/llama-warden");
        let told = found(path, &starts).unwrap_err().to_string();
        assert!(starts.iter().all(|start| told.contains(&start.join(path).display().to_string())), "{told}");
        let file = starts[1].join(path);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(&file, "").unwrap();
        let file = file.canonicalize().unwrap();
        assert_eq!(found(path, &starts).unwrap(), file);
        assert_eq!(found(&file, &starts).unwrap(), file);
    }
}
