//! What all models of a fleet share: the outside world, the journal, the ledger, the picture, the generation counter, who
//! may replace a process now, and what is known of all their processes together.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::Instant;
use warden_policies::growth::GrowthPolicy;
use warden_policies::health::HealthPolicy;
use warden_policies::share::{Arbiter, Reach, Turn, TurnId};
use warden_policies::{GenerationId, GpuIndex, ModelName, Series};

use crate::census::Census;
use crate::event::Journal;
use crate::ledger::Ledger;
use crate::priors::Priors;
use crate::process::World;
use crate::publish::Publisher;
use crate::spec::{FleetConfig, SharedBudgets};
use crate::sync::lock;

/// The longest path of a Unix socket on Linux: `sun_path` has 108 bytes, and one ends the text.
pub(crate) const SOCKET_PATH_LIMIT: usize = 107;

/// See the module.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) world: Arc<dyn World>,
    pub(crate) journal: Arc<Journal>,
    pub(crate) ledger: Ledger,
    pub(crate) publisher: Publisher,
    pub(crate) runtime_dir: PathBuf,
    /// Where recordings go.
    pub(crate) traces: PathBuf,
    pub(crate) census: Census,
    pub(crate) priors: Priors,
    /// What all models share of the configuration.
    pub(crate) common: Mutex<Common>,
    /// Memory that did not come back when a process had ended, in words, by GPU.
    pub(crate) leaks: Mutex<BTreeMap<GpuIndex, String>>,
    arbiter: Mutex<Arbiter>,
    pub(crate) epoch: Instant,
    generations: AtomicU64,
    /// Models that were removed and still have processes.
    pub(crate) leaving: AtomicUsize,
}

/// What all models share of the configuration.
#[derive(Clone, Debug)]
pub(crate) struct Common {
    pub(crate) shared: SharedBudgets,
    pub(crate) growth: GrowthPolicy,
    pub(crate) health: HealthPolicy,
}

impl From<&FleetConfig> for Common {
    fn from(config: &FleetConfig) -> Self {
        Self { shared: config.shared, growth: config.growth.clone(), health: config.health.clone() }
    }
}

/// The right to replace a process now. Dropping it lets the next one go.
#[derive(Debug)]
pub(crate) struct Permit {
    context: Arc<Context>,
    turn: TurnId,
}

impl Drop for Permit {
    fn drop(&mut self) {
        lock(&self.context.arbiter).release(self.turn);
    }
}

impl Context {
    pub(crate) fn new(
        world: Arc<dyn World>,
        journal: Arc<Journal>,
        ledger: Ledger,
        config: &FleetConfig,
    ) -> Self {
        Self {
            world,
            journal,
            ledger,
            publisher: Publisher::default(),
            runtime_dir: config.runtime_dir.clone(),
            traces: config.state_dir.join("traces"),
            census: Census::default(),
            priors: Priors::open(&config.state_dir),
            common: Mutex::new(Common::from(config)),
            leaks: Mutex::default(),
            arbiter: Mutex::new(Arbiter::new()),
            epoch: Instant::now(),
            generations: AtomicU64::new(0),
            leaving: AtomicUsize::new(0),
        }
    }

    /// The right to replace a replica that uses these GPUs; `None` while another replacement of the model or on one of
    /// the GPUs is under way.
    pub(crate) fn permit(
        self: &Arc<Self>,
        model: &ModelName,
        replica: u32,
        gpus: &[GpuIndex],
        reach: Reach,
    ) -> Option<Permit> {
        match lock(&self.arbiter).request(model, replica, gpus, reach) {
            Turn::Granted(turn) => Some(Permit { context: Arc::clone(self), turn }),
            Turn::Wait { .. } => None,
        }
    }

    /// The right to replace a replica at once, whoever is at it. Others wait for its end.
    pub(crate) fn claim(self: &Arc<Self>, model: &ModelName, replica: u32, gpus: &[GpuIndex]) -> Permit {
        let turn = lock(&self.arbiter).claim(model, replica, gpus);
        Permit { context: Arc::clone(self), turn }
    }

    /// Whether a backend may be ended because this memory is almost gone: one at a time.
    pub(crate) fn may_end(&self, series: Series) -> bool {
        lock(&self.arbiter).may_end(series, self.now(), warden_policies::defaults().levels.kill_pause)
    }

    /// Time since the fleet started: the clock of all policies.
    pub(crate) fn now(&self) -> Duration {
        self.epoch.elapsed()
    }

    pub(crate) fn next_generation(&self) -> GenerationId {
        GenerationId(self.generations.fetch_add(1, Ordering::Relaxed) + 1)
    }

    /// The last generation made: every later one has a greater number.
    pub(crate) fn last_generation(&self) -> GenerationId {
        GenerationId(self.generations.load(Ordering::Relaxed))
    }

    pub(crate) fn socket(&self, model: &ModelName, generation: GenerationId) -> PathBuf {
        socket(&self.runtime_dir, model, generation)
    }
}

/// The socket of a generation: a name that no other process ever had, because llama-server cannot listen on a socket file
/// that exists. Our process id keeps runs apart that end without cleaning up.
pub(crate) fn socket(directory: &Path, model: &ModelName, generation: GenerationId) -> PathBuf {
    const SHORT: usize = 12;
    let last = model.as_str().rsplit('/').next().unwrap_or_default();
    let tame = |c: char| if c.is_ascii_alphanumeric() || c == '.' || c == '_' { c } else { '-' };
    let short: String = last.chars().take(SHORT).map(tame).collect();
    directory.join(format!("{short}-{}-{generation}.sock", std::process::id()))
}

/// The process id in the name of a socket that [`socket`] made, or of the memory report beside it.
pub(crate) fn maker(file_name: &str) -> Option<u32> {
    // A further process of a generation puts its id behind the name of the report.
    let numbered = file_name.rsplit_once('.').filter(|(_, end)| end.parse::<u32>().is_ok());
    let file_name =
        numbered.map(|(name, _)| name).filter(|name| name.ends_with(".report")).unwrap_or(file_name);
    let stem = file_name.strip_suffix(".sock").or_else(|| file_name.strip_suffix(".report"))?;
    let mut parts = stem.rsplit('-');
    parts.next()?.strip_prefix('g')?.parse::<u64>().ok()?;
    parts.next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_name_is_short_tame_and_tells_its_maker() {
        let path = socket(Path::new("/run/w"), &ModelName::new("org/Some Long-Model.gguf"), GenerationId(12));
        let name = path.file_name().unwrap().to_str().unwrap();
        assert_eq!(name, format!("Some-Long-Mo-{}-g12.sock", std::process::id()));
        assert_eq!(maker(name), Some(std::process::id()));
        let report = crate::report::beside(&path);
        let report = report.file_name().unwrap().to_str().unwrap();
        assert_eq!(report, format!("Some-Long-Mo-{}-g12.report", std::process::id()));
        assert_eq!(maker(report), Some(std::process::id()));
        assert_eq!(maker(&format!("{report}.4711")), Some(std::process::id()));
        assert_eq!(maker("a-1-g2.sock.4711"), None);
        assert_eq!(maker("else.sock"), None);
        assert_eq!(maker("a-1-g2.txt"), None);
    }
}
