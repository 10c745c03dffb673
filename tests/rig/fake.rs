//! Runs a `fake-llama` without a proxy: for tests of fake-llama itself, and for undisturbed runs to compare
//! with.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use hyper::StatusCode;
use serde_json::Value;
use tempfile::TempDir;

use crate::process::Kid;
use crate::{Http, Ledger, Trouble, binaries, wait_until};

/// A busy build machine may need this time.
const READY: Duration = Duration::from_secs(20);

/// Running fake-llama, on a Unix socket and a TCP port.
pub struct Fake {
    /// Process of fake-llama.
    pub kid: Kid,
    /// Client of its Unix socket.
    pub http: Http,
    /// Ledger of its executions.
    pub ledger: Ledger,
    directory: TempDir,
}

impl Fake {
    /// Starts fake-llama and waits until it is ready. `script` has fields of fake-llama's script.
    ///
    /// # Errors
    /// fake-llama does not become ready.
    pub async fn start(script: &Value, flags: &[&str]) -> Result<Self, Trouble> {
        let fake = Self::launch(script, flags)?;
        wait_until("fake-llama is ready", READY, async || {
            fake.http.get("/health").await.is_ok_and(|answer| answer.status == StatusCode::OK)
        })
        .await?;
        Ok(fake)
    }

    /// Starts fake-llama without waiting.
    ///
    /// # Errors
    /// fake-llama cannot be started.
    pub fn launch(script: &Value, flags: &[&str]) -> Result<Self, Trouble> {
        Self::launch_in(tempfile::tempdir()?, script, flags)
    }

    /// Starts fake-llama in this directory, with the socket `fake.sock` and the ledger `ledger.jsonl`.
    ///
    /// # Errors
    /// fake-llama cannot be started.
    pub fn launch_in(directory: TempDir, script: &Value, flags: &[&str]) -> Result<Self, Trouble> {
        let (socket, model) = (directory.path().join("fake.sock"), directory.path().join("model.gguf"));
        let (ledger, file) = (directory.path().join("ledger.jsonl"), directory.path().join("script.json"));
        std::fs::write(&model, "GGUF")?;
        std::fs::write(&file, script.to_string())?;
        let hosts = format!("127.0.0.1,{}", socket.display());
        let mut args: Vec<OsString> = vec!["-m".into(), model.into(), "--host".into(), hosts.into()];
        args.extend(["--port", "0", "-np", "2", "--metrics"].map(OsString::from));
        args.extend(flags.iter().map(OsString::from));
        let env: BTreeMap<OsString, OsString> = BTreeMap::from([
            ("FAKE_LLAMA_SCRIPT".into(), file.into()),
            ("FAKE_LLAMA_LEDGER".into(), ledger.clone().into()),
        ]);
        let log = directory.path().join("log");
        let kid = Kid::start(&binaries::fake_llama()?, &args, &env, directory.path(), log)?;
        Ok(Self { kid, http: Http::Unix(socket), ledger: Ledger::at(&ledger), directory })
    }

    /// Directory of the socket and the ledger.
    pub fn directory(&self) -> PathBuf {
        self.directory.path().to_owned()
    }

    /// Answer to `/fake/state`.
    ///
    /// # Errors
    /// fake-llama does not answer.
    pub async fn state(&self) -> Result<Value, Trouble> {
        self.http.get("/fake/state").await?.json()
    }

    /// Waits until this number of slots is busy.
    ///
    /// # Errors
    /// The slots are not busy within `deadline`.
    pub async fn until_busy(&self, slots: u64, deadline: Duration) -> Result<(), Trouble> {
        wait_until(&format!("{slots} busy slots"), deadline, async || {
            self.state().await.is_ok_and(|state| state["busy"] == slots)
        })
        .await
    }
}
