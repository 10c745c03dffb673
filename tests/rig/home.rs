//! Home directory for a test, separate from the user's configuration, state and environment.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;
use tokio::process::Command;
use tokio::time::timeout;

use crate::warden::SOON;
use crate::{Context as _, Trouble, binaries};

/// Variables inherited from outside: they tell where programs and compilers are.
const INHERITED: [&str; 4] = ["PATH", "TMPDIR", "LANG", "RUSTUP_HOME"];

/// Directories and environment of a test.
#[derive(Debug)]
pub struct Home {
    directory: TempDir,
    /// Whole environment of the programs that run here.
    pub env: BTreeMap<OsString, OsString>,
}

/// Exit code and output of a command.
#[derive(Debug, Clone)]
pub struct Ran {
    /// Exit code, or -1 after a signal.
    pub code: i32,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl Ran {
    /// Standard output and error together.
    pub fn all(&self) -> String {
        format!("{}{}", self.stdout, self.stderr)
    }
}

impl Home {
    /// Writes a small model at a path in the home, in place of an existing file.
    ///
    /// # Errors
    /// The model cannot be written.
    pub async fn sample_model(&self, path: &str) -> Result<(), Trouble> {
        drop(std::fs::remove_file(self.path().join(path)));
        let ran = self.warden(["sample-model", "-o", path], SOON).await?;
        if ran.code == 0 { Ok(()) } else { Err(Trouble::new(format!("no sample model: {ran:?}"))) }
    }

    /// Writes a model with random weights of a preset of `tests/gpu/sized_model.py`, with changed numbers such as
    /// `layers=8`.
    ///
    /// # Errors
    /// The model cannot be written.
    pub async fn sized_model(&self, preset: &str, path: &Path, numbers: &[&str]) -> Result<(), Trouble> {
        let program = Path::new(env!("CARGO_MANIFEST_DIR")).join("gpu/sized_model.py");
        let mut args = vec![program.as_os_str(), preset.as_ref(), path.as_os_str()];
        args.extend(numbers.iter().map(OsStr::new));
        let ran = self.run(Path::new("python3"), args, SOON * 10).await?;
        if ran.code == 0 { Ok(()) } else { Err(Trouble::new(format!("no model: {ran:?}"))) }
    }

    /// Creates a home. Its path is short, because Unix sockets in it must stay under 108 bytes.
    ///
    /// # Errors
    /// There is no temporary directory.
    pub fn new() -> Result<Self, Trouble> {
        let directory = tempfile::Builder::new().prefix("lw").tempdir()?;
        let mut env: BTreeMap<OsString, OsString> = BTreeMap::new();
        for name in INHERITED {
            if let Some(value) = std::env::var_os(name) {
                env.insert(name.into(), value);
            }
        }
        // Measuring would start a second fake-llama, which would write to the ledger; tests of measuring
        // remove this.
        env.insert("LLAMA_WARDEN_CHILD__MEASURE".into(), "false".into());
        for (name, sub) in [
            ("HOME", "home"),
            ("XDG_CONFIG_HOME", "config"),
            ("XDG_DATA_HOME", "data"),
            ("XDG_STATE_HOME", "state"),
            ("XDG_CACHE_HOME", "cache"),
            ("XDG_RUNTIME_DIR", "run"),
        ] {
            let path = directory.path().join(sub);
            std::fs::create_dir_all(&path)?;
            std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o700))?;
            env.insert(name.into(), path.into());
        }
        Ok(Self { directory, env })
    }

    /// Root of the home.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Creates a home with `model.gguf` and a script that every fake-llama there follows.
    ///
    /// # Errors
    /// As with [`Home::new`]; or a file cannot be written.
    pub fn with_fake(script: &Value) -> Result<Self, Trouble> {
        let mut home = Self::new()?;
        home.file("model.gguf", "GGUF")?;
        let file = home.file("script.json", script.to_string())?;
        home.env.insert("FAKE_LLAMA_SCRIPT".into(), file.into());
        Ok(home)
    }

    /// Writes a file in the home.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn file(&self, name: &str, content: impl AsRef<[u8]>) -> Result<PathBuf, Trouble> {
        let path = self.path().join(name);
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent)?;
        }
        std::fs::write(&path, content).context(path.display())?;
        Ok(path)
    }

    /// Writes a program in the home.
    ///
    /// # Errors
    /// The program cannot be written.
    pub fn program(&self, name: &str, content: impl AsRef<[u8]>) -> Result<PathBuf, Trouble> {
        let path = self.file(name, content)?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755))?;
        Ok(path)
    }

    /// Runs `llama-warden` with `args` to its end.
    ///
    /// # Errors
    /// The program cannot be started, or runs longer than `deadline` and is killed.
    pub async fn warden<S: AsRef<OsStr>>(
        &self,
        args: impl IntoIterator<Item = S>,
        deadline: Duration,
    ) -> Result<Ran, Trouble> {
        self.run(&binaries::llama_warden()?, args, deadline).await
    }

    /// Runs a program to its end.
    ///
    /// # Errors
    /// The same as for [`Self::warden`].
    pub async fn run<S: AsRef<OsStr>>(
        &self,
        program: &Path,
        args: impl IntoIterator<Item = S>,
        deadline: Duration,
    ) -> Result<Ran, Trouble> {
        let mut command = Command::new(program);
        command.args(args).env_clear().envs(&self.env).current_dir(self.path()).kill_on_drop(true);
        command.stdin(std::process::Stdio::null());
        let what = format!("{:?}", command.as_std());
        let output =
            timeout(deadline, command.output()).await.context(format!("{what} ends"))?.context(what)?;
        Ok(Ran {
            code: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        })
    }
}
