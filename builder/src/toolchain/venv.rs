//! A private Python virtual environment under the cache folder, for programs that come as Python packages.
//!
//! pip runs with the user's index settings (which index, which certificates, which proxy) and with nothing else of theirs:
//! no other `PIP_*` option, no `PYTHON*` variable, no site of the user.

use std::path::{Path, PathBuf};
use std::{fs, io};

use tokio::process::Command;
use tokio_util::sync::CancellationToken;

use super::finish;
use crate::environment::{Environment, without};
use crate::error::{Error, Result, io_error};
use crate::event::{Event, Reporter};
use crate::lock::Lock;
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
/// Written last, so that an environment whose making was cut short is made anew.
const COMPLETE: &str = ".complete";

/// A virtual environment, made or not.
#[derive(Clone, Debug)]
pub(crate) struct Venv {
    folder: PathBuf,
    lock: PathBuf,
}

impl Venv {
    /// That of a name under the cache folder. Makes nothing.
    pub(crate) fn new(cache: &Path, name: &str) -> Self {
        Self {
            folder: cache.join("tools").join(name),
            lock: cache.join("locks").join(format!("tool-{name}.lock")),
        }
    }

    /// One of its programs.
    pub(crate) fn program(&self, name: &str) -> PathBuf {
        self.folder.join("bin").join(name)
    }

    /// Makes it with these packages (arguments of `pip install`), unless that was done before.
    pub(crate) async fn with(
        &self,
        env: &Environment,
        what: &str,
        packages: &[&str],
        reporter: &Reporter,
        cancel: &CancellationToken,
    ) -> Result<()> {
        let wanted = packages.join(" ");
        if self.has(&wanted) {
            return Ok(());
        }
        let _lock = Lock::take(&self.lock, cancel, || ()).await?;
        if self.has(&wanted) {
            return Ok(());
        }
        let from = "PyPI";
        reporter.tell(Event::Obtaining { what: what.to_owned(), from, into: self.folder.clone() });
        match fs::remove_dir_all(&self.folder) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(io_error("removing", &self.folder)(error));
            }
            _ => {}
        }
        self.create(env, cancel).await?;
        let mut install = self.pip(env);
        install.arg("install").args(packages);
        let doing = format!("installing {what} into {}", self.folder.display());
        finish(Path::new("pip install"), &doing, output(install, cancel).await)?;
        let mark = self.folder.join(COMPLETE);
        fs::write(&mark, wanted).map_err(io_error("writing", mark))
    }

    fn has(&self, wanted: &str) -> bool {
        // The interpreter is a link to the system's, which may have been removed since.
        fs::read_to_string(self.folder.join(COMPLETE)).is_ok_and(|mark| mark == wanted)
            && self.program("python3").exists()
    }

    async fn create(&self, env: &Environment, cancel: &CancellationToken) -> Result<()> {
        let python = env.find("python3").ok_or_else(|| Error::MissingProgram {
            program: "python3".into(),
            package: "python3 python3-venv",
        })?;
        if let Some(parent) = self.folder.parent() {
            fs::create_dir_all(parent).map_err(io_error("creating", parent))?;
        }
        let mut command = env.command(&python);
        isolate(&mut command);
        command.args(["-I", "-m", "venv"]).arg(&self.folder);
        let doing = format!("making the virtual environment {}", self.folder.display());
        finish(&python, &doing, output(command, cancel).await).map(drop).map_err(|error| match error {
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
