//! Measures llama-servers that llama-warden did not build, and builds for which a fact is unknown, once
//! each, while their models start. A measurement runs a second process with a tiny model, on the CPU, for
//! some seconds. This process is a child like any other, so it ends with the program. Results are cached
//! and passed to running models. A failure is no error: the fact stays unknown.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use warden_builder::verify::{
    MeasurementCache, ServerAddress, ServerBehaviour, measure, measuring_flags, measuring_model,
};
use warden_config::resolve::ResolvedConfig;
use warden_config::resolve::server_facts::{self, UnmeasuredBinary};
use warden_policies::lifecycle::LifecyclePolicy;
use warden_supervisor::nursery::NurseryHandle;
use warden_supervisor::spec::{ServerCommand, SharedSpec, SocketMode};
use warden_supervisor::{Fleet, ListenAddress, SoloProcess, SoloSpec, SoloStarter, WorkKind, run_job};

use crate::private_temp;

/// Variables that hide GPUs: the tiny model needs no GPU, and the GPUs' memory may be full.
const GPU_VISIBILITY_VARS: [&str; 3] =
    ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"];
const FLAG_VAR_PREFIXES: [&str; 2] = ["LLAMA_", "GGML_"];

pub(super) struct MeasureJob {
    unmeasured: Vec<UnmeasuredBinary>,
    models: Vec<SharedSpec>,
    watch: warden_supervisor::WatchConfig,
    cache: std::path::PathBuf,
    limit: Duration,
    nursery: NurseryHandle,
}

impl MeasureJob {
    /// Creates the job; `None` if all facts are known, or measuring is switched off.
    pub(super) fn new(resolved: &ResolvedConfig, nursery: NurseryHandle) -> Option<Self> {
        let wanted = resolved.settings.child.measure && !resolved.unmeasured.is_empty();
        wanted.then(|| Self {
            unmeasured: resolved.unmeasured.clone(),
            models: resolved.fleet.models.clone(),
            watch: resolved.fleet.watch,
            cache: resolved.dirs.cache.clone(),
            limit: resolved.settings.child.measure_timeout,
            nursery,
        })
    }

    pub(super) async fn run(self, fleet: Fleet, stop: CancellationToken) {
        for one in &self.unmeasured {
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                () = self.measure_program(one, &fleet) => {}
            }
        }
    }

    async fn measure_program(&self, one: &UnmeasuredBinary, fleet: &Fleet) {
        let binary = one.binary.as_path();
        let shown = binary.display();
        let using = || self.models.iter().filter(|spec| spec.command.binary == binary);
        let Some(first) = using().next() else { return };
        let measured = match self.measure_with(first).await {
            Ok(measured) if measured != ServerBehaviour::default() => measured,
            Ok(_) => {
                tracing::info!(binary = %shown, "how it behaves cannot be measured: it did not start with the \
                                                 sample model");
                return;
            }
            Err(error) => {
                tracing::info!(binary = %shown, "how it behaves cannot be measured: {error}");
                return;
            }
        };
        tracing::info!(binary = %shown, "measured: {measured}");
        let remembered = MeasurementCache::new(&self.cache);
        if let Err(error) = remembered.write(&one.identity, binary, measured) {
            tracing::warn!("what was measured is not remembered, and will be measured again: {error}");
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        for spec in using() {
            let facts = server_facts::server_facts(measured, &spec.command, cores).fill_from(spec.facts);
            fleet.learn_facts(&spec.name, binary, facts).await;
        }
    }

    async fn measure_with(
        &self,
        spec: &SharedSpec,
    ) -> Result<ServerBehaviour, Box<dyn std::error::Error + Send + Sync>> {
        let folder = private_temp::private_folder("lw-measure-")?;
        let model = folder.path().join("sample.gguf");
        // 14 MB, on a disk that may be slow: not on a thread that serves.
        let path = model.clone();
        run_job(WorkKind::ModelFiles, move || measuring_model(&path)).await??;
        let lifecycle = LifecyclePolicy { start_timeout: self.limit, ..spec.lifecycle };
        let starter =
            SoloStarter::new(self.nursery.clone(), &folder.path().join("run"), &lifecycle, self.watch)?;
        for socket in [SocketMode::Unix, SocketMode::Tcp] {
            let spec = SoloSpec {
                command: measuring_command(&spec.command, &model),
                oom_score_adj: spec.oom_score_adj,
                socket,
                facts: spec.facts,
            };
            let Ok(solo) = starter.start(&spec).await else { continue };
            let measured = measure(&connection_to(&solo), self.limit).await;
            solo.stop().await;
            return Ok(measured);
        }
        Ok(ServerBehaviour::default())
    }
}

fn connection_to(solo: &SoloProcess) -> ServerAddress {
    match solo.endpoint() {
        ListenAddress::Unix(socket) => ServerAddress::Unix(socket.clone()),
        ListenAddress::Tcp(address) => ServerAddress::Port(address.port()),
    }
}

/// Returns the command with the same binary and environment (the binary may need `LD_LIBRARY_PATH`), but
/// without the model's flags and GPUs.
fn measuring_command(own: &ServerCommand, model: &Path) -> ServerCommand {
    let is_flag = |name: &str| FLAG_VAR_PREFIXES.iter().any(|prefix| name.starts_with(prefix));
    let mut env: BTreeMap<String, String> =
        own.env.iter().filter(|(name, _)| !is_flag(name)).cloned().collect();
    env.extend(GPU_VISIBILITY_VARS.map(|name| (name.to_owned(), "-1".to_owned())));
    let inherited =
        std::env::vars_os().filter_map(|(name, _)| name.into_string().ok()).filter(|name| is_flag(name));
    let flags = measuring_flags(model).into_iter();
    ServerCommand {
        wrapper: own.wrapper.clone(),
        binary: own.binary.clone(),
        args: flags.map(|word| word.to_string_lossy().into_owned()).collect(),
        env: env.into_iter().collect(),
        env_remove: own.env_remove.iter().cloned().chain(inherited).collect(),
        directory: None,
        kind: own.kind.clone(),
    }
}
