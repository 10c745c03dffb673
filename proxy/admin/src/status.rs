//! The answer to `GET /status`, as the admin routes send it and the command line reads it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use warden_patches::mitigation::LeakAdvice;
use warden_supervisor::{FleetView, SharedSpec, StateView};

use crate::access_log::AccessLogView;
use crate::memory_use::BudgetsByModel;

/// The answer to `GET /status`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct AdminStatus {
    /// Facts about the instance.
    pub instance: InstanceInfo,
    /// Budgets by model; models without a budget are left out.
    #[serde(default)]
    pub budgets: BudgetsByModel,
    /// Advice on models whose memory grows; models without advice are left out.
    #[serde(default)]
    pub advice: BTreeMap<String, Vec<AdviceView>>,
    /// Mitigations by model, as written in the configuration; a mitigation from a user-defined set names the
    /// set. Models without mitigations are left out.
    #[serde(default)]
    pub mitigations: BTreeMap<String, Vec<String>>,
    /// Programs by model: of the next process first, then of running ones. Absent from older versions.
    #[serde(default)]
    pub binaries: Option<BinariesByModel>,
    /// Models for which the configuration names a certain build or program.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub bound: Vec<String>,
    /// The access log, if it is a separate file.
    #[serde(default)]
    pub access_log: Option<AccessLogView>,
    /// State of the writer of the state directory.
    #[serde(default)]
    pub state: StateView,
    /// All models.
    pub fleet: FleetView,
}

impl AdminStatus {
    /// Returns the program that the next process of a model runs.
    pub fn next_binary(&self, model: &str) -> Option<&Path> {
        self.binaries.as_ref()?.get(model)?.first().map(PathBuf::as_path)
    }
}

/// Programs by model.
pub type BinariesByModel = BTreeMap<String, Vec<PathBuf>>;

/// Returns the program that the next process of each model runs.
pub fn next_binaries(models: &[SharedSpec]) -> BinariesByModel {
    let one = |model: &SharedSpec| (model.name.as_str().to_owned(), vec![model.command.binary.clone()]);
    models.iter().map(one).collect()
}

/// A known leak that a model's growth resembles, and its mitigations.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AdviceView {
    /// Name of the leak.
    pub leak: String,
    /// Confidence that the leak is this one, 0 to 1.
    pub confidence: f64,
    /// Mitigations to try, best first.
    pub mitigations: Vec<String>,
    /// The advice, as a sentence.
    pub text: String,
}

impl From<&LeakAdvice> for AdviceView {
    fn from(advice: &LeakAdvice) -> Self {
        Self {
            leak: advice.leak.clone(),
            confidence: advice.confidence,
            mitigations: advice.mitigations.clone(),
            text: advice.sentence(),
        }
    }
}

/// Facts about an instance.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InstanceInfo {
    /// Process id.
    pub pid: u32,
    /// Version of llama-warden.
    pub version: String,
    /// Public address, with the port that was bound.
    pub address: String,
    /// Path of the admin socket.
    pub admin_socket: String,
    /// Start time, RFC 3339.
    pub started_at: String,
    /// Path of the ledger.
    pub ledger: String,
    /// Folder of the store of builds.
    #[serde(default)]
    pub data_dir: String,
    /// Anonymous memory of llama-warden in bytes (`RssAnon`), where it can be read.
    #[serde(default)]
    pub memory_anon: Option<u64>,
}

/// Adds the programs of running processes: after a reload, the program of the next process may differ.
pub(crate) fn with_running_binaries(mut binaries: BinariesByModel, fleet: &FleetView) -> BinariesByModel {
    for model in fleet.models.iter().chain(&fleet.canaries) {
        let all = binaries.entry(model.name.as_str().to_owned()).or_default();
        for pid in model.backends.iter().filter_map(|backend| backend.pid) {
            match std::fs::read_link(format!("/proc/{pid}/exe")) {
                Ok(program) if !all.contains(&program) => all.push(program),
                _ => {}
            }
        }
    }
    binaries
}
