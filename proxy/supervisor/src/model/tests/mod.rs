//! The model's task with scripted processes and a paused clock.

mod crash;
mod degrade;
mod end;
mod fleet;
mod growth;
mod handover;
mod health;
mod idle;
mod life;
mod loading;
mod policy;
mod reclaim;
mod reload;
mod replace;
mod report;
mod script;
mod settings;
mod start_search;
mod storm;

use std::path::Path;
use std::time::Duration;

use tokio_util::task::{AbortOnDropHandle, TaskTracker};
use warden_policies::defaults::Recycle;
use warden_policies::recycle::RecyclePolicy;
use warden_policies::{ByteSize, GenerationId, MemoryLimit, ModelName, defaults};

use self::script::Script;
use crate::{
    ControlError, EventKind, Fleet, FleetConfig, Lease, LeaseDenied, LeaseKind, LedgerEntry, ModelSpec,
    ModelState, ReplaceMode, ServerCommand, SharedSpec, WatchConfig,
};

/// A fleet of scripted processes.
struct Rig {
    fleet: Fleet,
    script: Script,
    config: FleetConfig,
    _directory: tempfile::TempDir,
}

impl Rig {
    /// One model `m`, started on demand, with default settings changed by `change`.
    async fn new(change: impl FnOnce(&mut FleetConfig, &Script)) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut config = config(directory.path());
        let script = Script::default();
        change(&mut config, &script);
        let world = std::sync::Arc::new(script.clone());
        let fleet = Fleet::start_in(config.clone(), world).await.unwrap();
        Self { fleet, script, config, _directory: directory }
    }

    async fn lease(&self) -> Result<Lease, LeaseDenied> {
        self.fleet.lease(&ModelName::new("m"), LeaseKind::Slot).await
    }

    /// Spawns a task that waits for a lease. The task has begun when this returns.
    async fn lease_later(&self) -> AbortOnDropHandle<Result<Lease, LeaseDenied>> {
        let fleet = self.fleet.clone();
        let lease = async move { fleet.lease(&ModelName::new("m"), LeaseKind::Slot).await };
        begun(lease).await
    }

    async fn restart_later(&self) -> AbortOnDropHandle<Result<Vec<LedgerEntry>, ControlError>> {
        let fleet = self.fleet.clone();
        begun(async move { fleet.restart("m").await }).await
    }

    async fn apply(&mut self, change: impl FnOnce(&mut FleetConfig)) -> crate::ApplyReport {
        change(&mut self.config);
        self.fleet.apply(self.config.clone()).await.unwrap()
    }

    fn state(&self) -> ModelState {
        self.fleet.view().models[0].state
    }

    /// Waits for a state of the model. The clock is paused, so this takes no real time.
    async fn until(&self, state: ModelState) {
        let reached = async {
            while self.state() != state {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let limit = Duration::from_secs(3600);
        let reached = tokio::time::timeout(limit, reached).await;
        assert!(reached.is_ok(), "not {state:?} but {:#?}\n{:#?}", self.fleet.view(), self.kinds());
    }

    fn events(&self) -> Vec<(Option<GenerationId>, EventKind)> {
        self.fleet.events().events.into_iter().map(|event| (event.generation, event.kind)).collect()
    }

    /// Names of the events so far.
    fn kinds(&self) -> Vec<String> {
        let kind = |kind: EventKind| serde_json::to_value(kind).unwrap()["kind"].as_str().unwrap().to_owned();
        self.events().into_iter().map(|(_, event)| kind(event)).collect()
    }

    fn count(&self, kind: &str) -> usize {
        self.kinds().iter().filter(|known| *known == kind).count()
    }

    /// The ledger file, with everything queued so far.
    fn ledger_text(&self) -> String {
        assert!(self.fleet.state_writer().flush(secs(30)));
        std::fs::read_to_string(self.fleet.ledger_path()).unwrap()
    }

    fn ledger(&self) -> Vec<LedgerEntry> {
        let text = self.ledger_text();
        let replacements = text.lines().filter(|line| !line.starts_with("{\"kind\""));
        replacements.map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// Ends the fleet, writes its state, and checks that nothing is left of it.
    async fn end(self) {
        self.fleet.shutdown(Duration::from_secs(30)).await;
        assert!(self.fleet.state_writer().wait_written(secs(30)).await);
        self.script.assert_all_reaped();
    }
}

async fn begun<T: Send + 'static>(future: impl Future<Output = T> + Send + 'static) -> AbortOnDropHandle<T> {
    let task = AbortOnDropHandle::new(TaskTracker::new().spawn(future));
    // The spawned task needs one turn, the model's task some.
    for _ in 0..8 {
        tokio::task::yield_now().await;
    }
    task
}

async fn pass(time: Duration) {
    tokio::time::sleep(time).await;
}

const fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn spec(name: &str) -> SharedSpec {
    let defaults = defaults();
    let recycle = &defaults.recycle;
    let spec = ModelSpec {
        name: ModelName::new(name),
        aliases: Vec::new(),
        command: ServerCommand {
            args: vec!["-m".to_owned(), format!("{name}.gguf")],
            ..ServerCommand::from_binary("/opt/llama-server".into())
        },
        run: defaults::Model { replace: ReplaceMode::Sequential, ..defaults.model },
        requests: crate::RequestSpec {
            queue: defaults.queue,
            max_in_flight: None,
            admission: crate::AdmissionSpec { mode: recycle.admission, policy: defaults.admission.clone() },
            quarantine: defaults.quarantine,
        },
        ttl: None,
        loading: warden_policies::loading::LoadSpec::default(),
        start: crate::StartSpec { choose_gpus: true, ..crate::StartSpec::default() },
        lifecycle: defaults.lifecycle,
        recycle: RecyclePolicy::new(&Recycle { jitter: 0.0, ..*recycle }),
        oom_score_adj: defaults.child.oom_score_adj,
        canary_of: None,
    };
    SharedSpec::new(spec, warden_policies::ServerFacts::default())
}

fn config(directory: &Path) -> FleetConfig {
    let defaults = defaults();
    FleetConfig {
        remotes: Vec::new(),
        models: vec![spec("m")],
        any_name: false,
        shared: crate::SharedBudgets::default(),
        loading: defaults.loading.clone(),
        growth: defaults.growth.clone(),
        health: defaults.health.clone(),
        canary: defaults.canary,
        runtime_dir: directory.join("run"),
        state_dir: directory.join("state"),
        watch: WatchConfig { sensors: defaults.sensors, child: defaults.child },
    }
}

const MIB: u64 = 1024 * 1024;

#[expect(clippy::unnecessary_wraps, reason = "every budget is optional")]
fn mib(n: u64) -> Option<MemoryLimit> {
    Some(MemoryLimit::Bytes(ByteSize::mib(n)))
}
