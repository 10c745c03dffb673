//! Where the programs under test are, built when they are not: same target directory and profile as the running test.
//!
//! `fake-llama` belongs to this package, so cargo has built it before an integration test runs. `llama-warden` is
//! another package's binary, which cargo does not do for us; one call of cargo per process, a no-op when fresh.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use tokio::sync::Mutex;
use tokio_util::sync::CancellationToken;
use warden_builder::{BuildEnvironment, Builder, BuilderDirs, EventReporter};

pub use crate::real::llama_server;
use crate::{Context as _, Trouble};

/// Takes the place of the built `llama-warden`.
pub const WARDEN_VARIABLE: &str = "WARDEN_TEST_LLAMA_WARDEN";

/// Path of `llama-warden`.
///
/// # Errors
/// It cannot be built.
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
/// It cannot be built.
pub fn fake_llama() -> Result<PathBuf, Trouble> {
    let beside = profile_directory()?.join("fake-llama");
    if beside.exists() { Ok(beside) } else { build("warden-tests", "fake-llama") }
}

/// Path of `mock-llama`, the upstream of benchmarks.
///
/// # Errors
/// It cannot be built.
pub fn mock_llama() -> Result<PathBuf, Trouble> {
    let beside = profile_directory()?.join("mock-llama");
    if beside.exists() { Ok(beside) } else { build("warden-tests", "mock-llama") }
}

/// Path of `leaky`, which allocates as it is told.
///
/// # Errors
/// It cannot be built.
pub fn leaky() -> Result<PathBuf, Trouble> {
    let beside = profile_directory()?.join("leaky");
    if beside.exists() { Ok(beside) } else { build("warden-tests", "leaky") }
}

/// Path of `raw-llama`.
///
/// # Errors
/// It cannot be built.
pub fn raw_llama() -> Result<PathBuf, Trouble> {
    let beside = profile_directory()?.join("raw-llama");
    if beside.exists() { Ok(beside) } else { build("warden-tests", "raw-llama") }
}

/// The directory of this build's profile, for example `target/debug`.
///
/// # Errors
/// This program is not where cargo puts tests.
pub fn profile_directory() -> Result<PathBuf, Trouble> {
    let exe = std::env::current_exe()?;
    // target/debug/deps/it-0123456789abcdef
    let deps = exe.parent().filter(|parent| parent.ends_with("deps")).context("not run by cargo")?;
    Ok(deps.parent().context("not run by cargo")?.to_owned())
}

/// Where things that are dear to make are kept between runs: `warden-test-store` in the target directory.
///
/// # Errors
/// It cannot be created.
pub fn store() -> Result<PathBuf, Trouble> {
    let profile = profile_directory()?;
    let store = profile.parent().context("no target directory")?.join("warden-test-store");
    std::fs::create_dir_all(&store).context(store.display())?;
    Ok(store)
}

/// Held while pip may run: it is not made for several of itself in one environment.
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
    // The directory of the profile `dev` is called `debug`; all others have their own name.
    let name = profile.file_name().and_then(|name| name.to_str()).unwrap_or("debug");
    let name = if name == "debug" { "dev" } else { name };
    let mut cargo = Command::new(env!("CARGO"));
    // What cargo says to the test that it runs: build scripts (ring's does) would take it for a change, and everything
    // above them would be compiled again, for this build and then for the next.
    for (variable, _) in std::env::vars_os().filter(|(name, _)| is_of_a_package(&name.to_string_lossy())) {
        cargo.env_remove(variable);
    }
    if name == "dev" && package == "llama-warden" {
        // As the whole test command makes it, with the same features of what it is made of: then there is nothing to do. By itself it
        // would be compiled once more, with all that it is made of.
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

/// Whether cargo sets this variable for each package anew.
fn is_of_a_package(variable: &str) -> bool {
    ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_", "CARGO_CRATE_", "CARGO_PRIMARY_"]
        .iter()
        .any(|beginning| variable.starts_with(beginning))
}

/// A program that somebody named on a command line. A relative path may begin where they are, or in the workspace.
///
/// # Errors
/// There is no such file; all places are named.
pub fn given(path: &Path) -> Result<PathBuf, Trouble> {
    found(path, &starts())
}

/// Where a relative path may begin: cargo starts benches in the folder of their package, and leaves the caller's own only in
/// `PWD`.
fn starts() -> Vec<PathBuf> {
    let caller = std::env::var_os("PWD").map(PathBuf::from);
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).parent().map(Path::to_owned);
    caller.into_iter().chain(std::env::current_dir()).chain(workspace).collect()
}

/// The file that is meant: the first of these that is there, as an absolute path.
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
