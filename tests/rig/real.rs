//! Real llama-servers, built from the pinned source with and without patches, and sample models for them. The
//! target directory's `warden-test-store` keeps them.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::json;
use tokio::sync::Mutex;
use warden_builder::sample_model::{self, SampleModelOptions, SamplePreset};
use warden_builder::sdist::SdistPin;
use warden_builder::{
    BuildEvent, BuildRequest, BuildSource, ComputeBackend, CpuTarget, EventReporter, MachineNeeds,
    RunPriority,
};
use warden_patches::{SelectedSets, SetCatalogue, SetSelection};

use crate::optional::SharedMeans;
use crate::process::Kid;
use crate::wait::wait_for;
use crate::warden::address_in;
use crate::{Context as _, Home, Http, Trouble, binaries, wait_until};

/// Build option of the tests' llama-server: no test needs the web page, for which npm takes minutes.
pub const NO_PAGE: &str = "LLAMA_BUILD_UI=OFF";

/// Variable with the path of a patched llama-server to test instead of the built one.
pub const SERVER_VARIABLE: &str = "WARDEN_TEST_LLAMA_SERVER";

/// Variable with the path of a llama-server without patches to test instead of the built one.
pub const PLAIN_VARIABLE: &str = "WARDEN_TEST_LLAMA_SERVER_PLAIN";

/// Flags for bit-reproducible output: after a restart, with concurrent requests, with a cached prompt.
pub const REPRODUCIBLE: [&str; 8] = ["-t", "1", "-fa", "off", "-ctk", "f32", "-ctv", "f32"];

/// A busy build machine may need this time.
const READY: Duration = Duration::from_secs(60);

/// Path of a real llama-server, with the patches that `llama-warden build` applies. The first build takes
/// minutes.
///
/// # Errors
/// There is no source or no compiler, or the build fails.
pub async fn llama_server() -> Result<PathBuf, Trouble> {
    static PATH: SharedMeans<PathBuf> = SharedMeans::new();
    either(&PATH, SERVER_VARIABLE, SelectedSets::Default).await.context("a real llama-server for the tests")
}

/// Path of the same llama-server without patches.
///
/// # Errors
/// The same as for [`llama_server`].
pub async fn llama_server_plain() -> Result<PathBuf, Trouble> {
    static PATH: SharedMeans<PathBuf> = SharedMeans::new();
    either(&PATH, PLAIN_VARIABLE, SelectedSets::None)
        .await
        .context("a llama-server without patches for the tests")
}

async fn either(path: &SharedMeans<PathBuf>, variable: &str, sets: SelectedSets) -> Result<PathBuf, Trouble> {
    // Build one after the other: a compiler cache then has most of the second build.
    static TURN: Mutex<()> = Mutex::const_new(());
    if let Some(path) = std::env::var_os(variable) {
        return Ok(PathBuf::from(path));
    }
    path.get(async || {
        let _turn = TURN.lock().await;
        build(sets).await
    })
    .await
}

async fn build(sets: SelectedSets) -> Result<PathBuf, Trouble> {
    let (reporter, mut events) = EventReporter::channel();
    let builder = binaries::store_builder(reporter)?;
    let told = tokio::task::JoinSet::from_iter([async move {
        let mut last = String::new();
        while let Some(event) = events.recv().await {
            if matches!(event, BuildEvent::Phase(_) | BuildEvent::Obtaining { .. } | BuildEvent::Waiting(_)) {
                say(&format!("building llama-server for the tests: {event:?}"));
            }
            last = format!("{event:?}");
        }
        last
    }]);
    let defaults = &warden_policies::defaults().build;
    let pin = SdistPin { version: defaults.sdist_version.clone(), sha256: defaults.sdist_sha256.clone() };
    let archive = builder.sdist(&pin).await?;
    let request = BuildRequest {
        source: BuildSource::at(&archive)?,
        backend: ComputeBackend::Cpu.into(),
        // Several machines may share the store.
        arch: CpuTarget::Portable.into(),
        patches: SetSelection { catalogue: SetCatalogue::embedded()?, sets, ..SetSelection::default() },
        options: vec![NO_PAGE.to_owned()],
        jobs: None,
        needs: MachineNeeds {
            disk: defaults.min_disk.0,
            memory: defaults.min_memory.0,
            memory_per_job: defaults.memory_per_job.0,
            memory_per_gpu_job: defaults.memory_per_gpu_job.0,
        },
        page_timeout: defaults.page_timeout,
        verify_timeout: defaults.verify_timeout,
        priority: RunPriority::Inherited,
    };
    let built = builder.build(&request).await?;
    drop(builder);
    drop(told);
    Ok(built.binary)
}

/// Path of a sample model of this kind. The file is written atomically, and not again while it stays the same
/// model, because a process continues another's work only with the same file.
///
/// # Errors
/// The model cannot be written.
pub fn sample_model(preset: SamplePreset) -> Result<PathBuf, Trouble> {
    static TURN: std::sync::Mutex<()> = std::sync::Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let path = binaries::store()?.join(format!("{}.gguf", preset.name()));
    let new = path.with_extension(format!("{}.gguf", std::process::id()));
    sample_model::write(&new, &SampleModelOptions { preset, ..SampleModelOptions::default() })
        .context(new.display())?;
    let is_same = std::fs::read(&path).ok() == Some(std::fs::read(&new).context(new.display())?);
    let kept = if is_same { std::fs::remove_file(&new) } else { std::fs::rename(&new, &path) };
    kept.context(path.display())?;
    Ok(path)
}

/// Real llama-server without a proxy: the undisturbed run to compare with.
#[derive(Debug)]
pub struct Undisturbed {
    /// Process of llama-server.
    pub kid: Kid,
    /// Client of its Unix socket.
    pub http: Http,
    _home: Home,
}

impl Undisturbed {
    /// Starts llama-server and waits until it is ready.
    ///
    /// # Errors
    /// llama-server does not become ready.
    pub async fn start(preset: SamplePreset, flags: &[&str]) -> Result<Self, Trouble> {
        Self::start_server(&llama_server().await?, preset, flags, &[]).await
    }

    /// Starts this llama-server with only these variables and waits until it is ready.
    ///
    /// # Errors
    /// llama-server does not become ready.
    pub async fn start_server(
        server: &Path,
        preset: SamplePreset,
        flags: &[&str],
        variables: &[(&str, &str)],
    ) -> Result<Self, Trouble> {
        Self::start_model(server, &sample_model(preset)?, flags, variables).await
    }

    /// Starts this llama-server with this model and waits until it is ready.
    ///
    /// # Errors
    /// llama-server does not become ready.
    pub async fn start_model(
        server: &Path,
        model: &Path,
        flags: &[&str],
        variables: &[(&str, &str)],
    ) -> Result<Self, Trouble> {
        let mut home = Home::new()?;
        home.env.extend(variables.iter().map(|(name, value)| (name.into(), value.into())));
        let socket = home.path().join("real.sock");
        let mut args: Vec<std::ffi::OsString> = vec!["-m".into(), model.into()];
        args.extend(["--host".into(), socket.clone().into()]);
        args.extend(flags.iter().map(std::ffi::OsString::from));
        let log = home.path().join("log");
        let kid = Kid::start(server, &args, &home.env, home.path(), log)?;
        let http = Http::Unix(socket);
        wait_until("the undisturbed llama-server is ready", READY, async || {
            http.get("/health").await.is_ok_and(|answer| answer.status.is_success())
        })
        .await?;
        Ok(Self { kid, http, _home: home })
    }
}

/// Like [`Undisturbed`], but on a TCP port, for clients without Unix sockets.
#[derive(Debug)]
pub struct OnPort {
    /// Process of llama-server.
    pub kid: Kid,
    /// `http://127.0.0.1:PORT`.
    pub url: String,
    _home: Home,
}

impl OnPort {
    /// Starts llama-server with this model and waits until it is ready.
    ///
    /// # Errors
    /// llama-server does not become ready.
    pub async fn start(model: &Path, flags: &[String]) -> Result<Self, Trouble> {
        let home = Home::new()?;
        let mut args: Vec<std::ffi::OsString> = vec!["-m".into(), model.into()];
        args.extend(["--host", "127.0.0.1", "--port", "0"].map(std::ffi::OsString::from));
        args.extend(flags.iter().map(std::ffi::OsString::from));
        let log = home.path().join("log");
        let mut kid = Kid::start(&llama_server().await?, &args, &home.env, home.path(), log)?;
        let address = wait_for("llama-server says where it listens", READY, async || {
            address_in(&kid.output()).filter(|address| address.port() != 0)
        })
        .await?;
        if let Some(ended) = kid.ended() {
            return Err(Trouble::new(format!("llama-server has ended ({ended}):\n{}", kid.output())));
        }
        let http = Http::Tcp(address);
        wait_until("llama-server is ready", READY, async || {
            http.get("/health").await.is_ok_and(|answer| answer.status.is_success())
        })
        .await?;
        Ok(Self { kid, url: format!("http://{address}"), _home: home })
    }
}

/// Returns the lines of a `[models."..."]` table for a real llama-server.
///
/// # Errors
/// There is no llama-server, or the sample model cannot be written.
pub async fn model_lines(preset: SamplePreset, flags: &[&str]) -> Result<String, Trouble> {
    model_lines_of(&sample_model(preset)?, flags).await
}

/// Returns such lines for this model.
///
/// # Errors
/// There is no llama-server.
pub async fn model_lines_of(model: &Path, flags: &[&str]) -> Result<String, Trouble> {
    Ok(format!(
        "binary = '{}'\nmodel = '{}'\nargs = {}\npreload = true\n",
        llama_server().await?.display(),
        model.display(),
        json!(flags)
    ))
}

#[expect(clippy::print_stderr, reason = "minutes without a word look like a hang")]
fn say(line: &str) {
    eprintln!("{line}");
}
