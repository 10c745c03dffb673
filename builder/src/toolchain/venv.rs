//! A private Python virtual environment under the cache folder, for programs that come as Python packages.
//!
//! pip runs with the user's index settings (which index, which certificates, which proxy) and with nothing else of
//! theirs: no other `PIP_*` option, no `PYTHON*` variable, no site of the user.

use std::path::{Path, PathBuf};
use std::{fs, io};

use tokio::process::Command;
use tokio_util::sync::CancellationToken;

use super::asking::finish;
use crate::environment::{Environment, without};
use crate::error::{Error, Result, io_error};
use crate::event::{Event, Reporter};
use crate::lock::Lock;
use crate::owned;
use crate::process::output;

/// Settings of pip that say where packages come from; all others are kept from it.
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
/// What the one environment holds: cmake and ninja, and what llama-cpp-python's source package asks for before it
/// tells its metadata (that wants cmake 3.21, too). Ready-made packages only: compiling cmake takes ten minutes.
const PACKAGES: [&str; 6] =
    ["--only-binary", ":all:", "cmake>=3.21", "ninja>=1.10", "scikit-build-core>=0.9.2", "pathspec"];
/// The same in words.
const CONTENT: &str = "cmake, ninja and a Python build backend";
/// Written last, so that an environment whose making was cut short is made anew.
const COMPLETE: &str = ".complete";

/// A virtual environment, made or not.
#[derive(Clone, Debug)]
pub(crate) struct Venv {
    folder: PathBuf,
    lock: PathBuf,
}

impl Venv {
    /// The one under a cache folder. Makes nothing.
    pub(crate) fn new(cache: &Path) -> Self {
        Self { folder: cache.join("tools"), lock: cache.join("locks").join("tools.lock") }
    }

    pub(crate) fn program(&self, name: &str) -> PathBuf {
        self.folder.join("bin").join(name)
    }

    /// Makes it, unless that was done before.
    pub(crate) async fn ready(
        &self,
        env: &Environment,
        reporter: &Reporter,
        cancel: &CancellationToken,
    ) -> Result<()> {
        if self.is_ready() {
            return Ok(());
        }
        let _lock = Lock::take(&self.lock, cancel, || ()).await?;
        if self.is_ready() {
            return Ok(());
        }
        let python = env.find("python3").ok_or_else(|| Error::MissingProgram {
            program: "python3".into(),
            package: "python3 python3-venv",
        })?;
        reporter.tell(Event::Obtaining { what: CONTENT.into(), from: "PyPI", into: self.folder.clone() });
        self.clear().map_err(io_error("removing", &self.folder))?;
        owned::create(&self.folder).map_err(io_error("creating", &self.folder))?;
        self.create(&python, env, cancel).await?;
        let mut install = self.pip(env);
        install.arg("install").args(PACKAGES);
        let doing = format!("installing {CONTENT} into {}", self.folder.display());
        finish(Path::new("pip install"), &doing, output(install, cancel).await)?;
        let mark = self.folder.join(COMPLETE);
        fs::write(&mark, PACKAGES.join(" ")).map_err(io_error("writing", mark))
    }

    fn is_ready(&self) -> bool {
        // The interpreter is a link to the system's, which may have been removed since.
        fs::read_to_string(self.folder.join(COMPLETE)).is_ok_and(|mark| mark == PACKAGES.join(" "))
            && self.program("python3").exists()
    }

    /// Removes an older one.
    fn clear(&self) -> io::Result<()> {
        // Versions before this one left no other mark than this, in one that is whole.
        if fs::read_to_string(self.folder.join(COMPLETE)).is_ok_and(|mark| mark.contains(PACKAGES[1])) {
            fs::write(self.folder.join(owned::MARK), "")?;
        }
        owned::remove(&self.folder)
    }

    async fn create(&self, python: &Path, env: &Environment, cancel: &CancellationToken) -> Result<()> {
        let mut command = env.command(python);
        isolate(&mut command);
        command.args(["-I", "-m", "venv"]).arg(&self.folder);
        let doing = format!("making the virtual environment {}", self.folder.display());
        finish(python, &doing, output(command, cancel).await).map(drop).map_err(|error| match error {
            // Debian splits the module: `venv` is there, what it needs is not.
            Error::Program { why, .. }
                if why.contains("ensurepip") || why.contains("No module named venv") =>
            {
                Error::MissingProgram { program: "Python's venv module".into(), package: "python3-venv" }
            }
            other => other,
        })
    }

    /// pip of this environment, undisturbed.
    pub(crate) fn pip(&self, env: &Environment) -> Command {
        let mut command = env.command(&self.program("python3"));
        isolate(&mut command);
        command.args(["-I", "-m", "pip", "--disable-pip-version-check", "--no-input", "--no-color", "-q"]);
        // A configuration file may say `user = true`, which a virtual environment refuses.
        command.env("PIP_USER", "0").env("PIP_REQUIRE_VIRTUALENV", "0");
        command
    }
}

/// Removes from a command what would make Python or pip behave differently for this user.
fn isolate(command: &mut Command) {
    without(command, |name| {
        let foreign_pip = name.starts_with("PIP_") && !INDEX_SETTINGS.contains(&name);
        foreign_pip || name.starts_with("PYTHON") || name == "VIRTUAL_ENV"
    });
}
