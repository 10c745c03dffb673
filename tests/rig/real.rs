//! Real llama-servers, built from the pinned source as a user's would be, with our patches and without, and sample models
//! for them. All are kept in the target directory's `warden-test-store`, so that they are paid for once.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::json;
use tokio::sync::Mutex;
use warden_builder::sample_model::{self, SampleModelOptions, SamplePreset};
use warden_builder::sdist::SdistPin;
use warden_builder::{
    BuildEvent, BuildRequest, BuildSource, ComputeBackend, CpuTarget, EventReporter, MachineNeeds,
};
use warden_patches::{SelectedSets, SetCatalogue, SetSelection};

use crate::optional::SharedMeans;
use crate::process::Kid;
use crate::wait::wait_for;
use crate::warden::address_in;
use crate::{Context as _, Home, Http, Trouble, binaries, wait_until};

/// Takes the place of the patched llama-server that is built from source, for quick runs by hand.
pub const SERVER_VARIABLE: &str = "WARDEN_TEST_LLAMA_SERVER";

/// The same for the one without patches.
pub const PLAIN_VARIABLE: &str = "WARDEN_TEST_LLAMA_SERVER_PLAIN";

/// With these its output is bit-reproducible: after a restart, with other requests beside it, with a cached prompt.
pub const REPRODUCIBLE: [&str; 8] = ["-t", "1", "-fa", "off", "-ctk", "f32", "-ctv", "f32"];

/// A loaded build machine may need it.
const READY: Duration = Duration::from_secs(60);

/// Path of a real llama-server, patched as `llama-warden build` does it by itself. The first call ever takes minutes; it
/// says so.
///
/// # Errors
/// No source, no compiler, or the build fails.
pub async fn llama_server() -> Result<PathBuf, Trouble> {
    static PATH: SharedMeans<PathBuf> = SharedMeans::new();
    either(&PATH, SERVER_VARIABLE, SelectedSets::Default).await.context("a real llama-server for the tests")
}

/// Path of the same llama-server without any patch.
///
/// # Errors
/// As [`llama_server`].
pub async fn llama_server_plain() -> Result<PathBuf, Trouble> {
    static PATH: SharedMeans<PathBuf> = SharedMeans::new();
    either(&PATH, PLAIN_VARIABLE, SelectedSets::None)
        .await
        .context("a llama-server without patches for the tests")
}

async fn either(path: &SharedMeans<PathBuf>, variable: &str, sets: SelectedSets) -> Result<PathBuf, Trouble> {
    // One after the other: nearly all that they compile is the same, so a compiler cache has it for the second.
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
        // The store may be a cache that several machines share.
        arch: CpuTarget::Portable.into(),
        patches: SetSelection { catalogue: SetCatalogue::embedded()?, sets, ..SetSelection::default() },
        // The page takes npm minutes, and no test looks at it.
        options: vec!["LLAMA_BUILD_UI=OFF".to_owned()],
        jobs: None,
        needs: MachineNeeds {
            disk: defaults.min_disk.0,
            memory: defaults.min_memory.0,
            memory_per_job: defaults.memory_per_job.0,
            memory_per_gpu_job: defaults.memory_per_gpu_job.0,
        },
        page_timeout: defaults.page_timeout,
        verify_timeout: defaults.verify_timeout,
    };
    let built = builder.build(&request).await?;
    drop(builder);
    drop(told);
    Ok(built.binary)
}

/// A sample model of this kind, whole at its path whoever else writes it at the same time. It stays the same file as long as it
/// is the same model: a process does not go on where one of another file stopped.
///
/// # Errors
/// It cannot be written.
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

/// A real llama-server without anything in front of it: the undisturbed run that others are compared with.
#[derive(Debug)]
pub struct Undisturbed {
    /// The process.
    pub kid: Kid,
    /// Its Unix socket.
    pub http: Http,
    _home: Home,
}

impl Undisturbed {
    /// Starts one and waits until it is ready.
    ///
    /// # Errors
    /// It does not get ready.
    pub async fn start(preset: SamplePreset, flags: &[&str]) -> Result<Self, Trouble> {
        Self::start_server(&llama_server().await?, preset, flags, &[]).await
    }

    /// Starts this llama-server with these variables (and none of ours besides) and waits until it is ready.
    ///
    /// # Errors
    /// It does not get ready.
    pub async fn start_server(
        server: &Path,
        preset: SamplePreset,
        flags: &[&str],
        variables: &[(&str, &str)],
    ) -> Result<Self, Trouble> {
        Self::start_model(server, &sample_model(preset)?, flags, variables).await
    }

    /// The same with a model of one's own.
    ///
    /// # Errors
    /// It does not get ready.
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

/// As [`Undisturbed`], but where clients that know no Unix sockets reach it.
#[derive(Debug)]
pub struct OnPort {
    /// The process.
    pub kid: Kid,
    /// `http://127.0.0.1:PORT`.
    pub url: String,
    _home: Home,
}

impl OnPort {
    /// Starts one with this model and waits until it is ready.
    ///
    /// # Errors
    /// It does not get ready.
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

/// The lines of a `[models."..."]` table for a real llama-server.
///
/// # Errors
/// There is none, or the sample model cannot be written.
pub async fn model_lines(preset: SamplePreset, flags: &[&str]) -> Result<String, Trouble> {
    model_lines_of(&sample_model(preset)?, flags).await
}

/// The same with a model of one's own.
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
