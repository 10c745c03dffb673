//! What is kept of an experiment: for programs as JSON, for people as one page with plots.
//!
//! Arguments and variables that look like secrets are left out, so that a report can be shown to others.

mod between;
mod crash;
mod cure;
mod curves;
mod discreet;
mod folder;
mod headroom;
mod html;
mod markdown;
mod proof;
mod reproduce;
mod setup;
mod summary;
mod table;

use serde::{Deserialize, Serialize};
use warden_experiment::{Finding, Reading};
use warden_policies::recycle::Budget;
use warden_policies::{MemoryKind, secrets};
use warden_supervisor::{Command, DeviceView};

pub use self::between::{BetweenReport, Revision};
pub use self::crash::SurvivalReport;
pub use self::cure::{Added, CureReport, NotTried, Switch};
pub use self::folder::{Folder, foreign_in};
pub use self::headroom::{Foretold, HeadroomReport};
pub use self::proof::ProofReport;
pub use self::table::{notes, refusal, rows};
use crate::experiment::{Outcome, Skipped};
use crate::leg::Refused;
use crate::shell::quoted;

/// What the experiment was about.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct About {
    /// Version of llama-warden.
    pub warden: String,
    /// When it began, RFC 3339.
    pub began: String,
    /// The model's name in the configuration, or what names it on the command line.
    pub model: String,
    /// The llama-server.
    pub binary: String,
    /// What it says to `--version`, or the id of its build.
    pub server: String,
    /// Its arguments.
    pub args: Vec<String>,
    /// Variables that are set for it, beyond our own environment.
    pub env: Vec<(String, String)>,
    /// Variables of our own environment that it inherits, as far as they are about llama.cpp, a GPU or the C library.
    #[serde(default)]
    pub inherited: Vec<(String, String)>,
    /// The tool that it ran under, as one would type it: memory is that of both.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub under: Option<String>,
    /// The machine and its software, a line each.
    #[serde(default)]
    pub system: Vec<(String, String)>,
}

/// How names of variables begin that decide what a llama-server does.
const INHERITED: [&str; 16] = [
    "LLAMA_",
    "GGML_",
    "CUDA_",
    "NVIDIA_TF32_",
    "HIP_",
    "ROCR_",
    "HSA_",
    "VK_",
    "SYCL_",
    "ONEAPI_",
    "MTMD_",
    "MALLOC_",
    "OMP_",
    "GLIBC_TUNABLES",
    "LD_PRELOAD",
    "LD_LIBRARY_PATH",
];
/// Ours, which mean nothing to a plain llama-server.
const OURS: &str = "LLAMA_WARDEN_";

impl About {
    /// Fills in a command, without its secrets.
    #[must_use]
    pub fn with_command(mut self, command: &Command) -> Self {
        // Without another name a model has that of its address.
        self.model = secrets::addresses(&self.model);
        self.binary = command.binary.display().to_string();
        if !command.wrapper.is_empty() {
            self = self.with_tool(&command.wrapper);
        }
        self.args = secrets::arguments(&command.args);
        self.env = command.env.iter().map(|(name, value)| secrets::variable(name, value)).collect();
        self
    }

    /// Fills in the words of a tool that was put before the command, without their secrets.
    #[must_use]
    pub fn with_tool(mut self, words: &[String]) -> Self {
        let words = secrets::tool(words);
        let all = self.under.take().into_iter().chain(words.iter().map(|word| quoted(word)));
        self.under = Some(all.collect::<Vec<_>>().join(" "));
        self
    }

    /// Fills in what the command inherits of these variables, without secrets.
    #[must_use]
    pub fn with_inherited(mut self, variables: &[(String, String)], command: &Command) -> Self {
        let counts = |name: &str| {
            let other = command.env_remove.iter().chain(command.env.iter().map(|(name, _)| name));
            INHERITED.iter().any(|start| name.starts_with(start))
                && !name.starts_with(OURS)
                && !other.into_iter().any(|known| known == name)
        };
        let own = variables.iter().filter(|(name, _)| counts(name));
        self.inherited = own.map(|(name, value)| secrets::variable(name, value)).collect();
        self.inherited.sort();
        self
    }

    /// The command line as one would type it.
    pub(crate) fn command_line(&self) -> String {
        let env =
            self.inherited.iter().chain(&self.env).map(|(name, value)| format!("{name}={}", quoted(value)));
        let words = std::iter::once(&self.binary).chain(&self.args).map(|word| quoted(word));
        env.chain(self.under.clone()).chain(words).collect::<Vec<_>>().join(" ")
    }
}

/// One leg.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LegReport {
    /// What it found.
    #[serde(flatten)]
    pub finding: Finding,
    /// Seconds from the spawn until it was ready.
    pub ready_after_seconds: f64,
    /// What the server is told to keep, in sentences.
    pub may_keep: Vec<String>,
    /// Why VRAM is not known, if it should be.
    pub vram_unknown: Option<String>,
    /// Requests that the server refused, if it did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub refused: Option<Refused>,
    /// All readings.
    pub readings: Vec<Reading>,
}

/// The budget of one memory, as it would be for a server like those of the experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SeriesBudget {
    /// Which memory.
    pub series: MemoryKind,
    /// In bytes.
    #[serde(flatten)]
    pub budget: Budget,
}

/// An experiment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// What it was about.
    pub about: About,
    /// Whether any leg found a leak.
    pub leaks: bool,
    /// Whether the server crashed in any leg.
    #[serde(default)]
    pub crashed: bool,
    /// Somebody asked for an end before all legs were run.
    pub interrupted: bool,
    /// The legs.
    pub legs: Vec<LegReport>,
    /// Workloads that were not run, and why.
    pub skipped: Vec<Skipped>,
    /// The GPUs.
    pub devices: Vec<DeviceView>,
    /// Budgets that are configured for the model.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub budgets: Vec<SeriesBudget>,
    /// Which switches stop the growth, if that was asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cure: Option<CureReport>,
    /// Which switches stop each crash, if that was asked.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub survival: Vec<SurvivalReport>,
    /// Which revision brought it, if that was asked; the rest is about the revision that has it, next to one that does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub between: Option<BetweenReport>,
    /// What the largest prompts take, if that was asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub headroom: Option<HeadroomReport>,
    /// What the call sites did, leg by leg, if that was asked: for programs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub trace: Vec<serde_json::Value>,
    /// Why legs are missing there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub untraced: Option<String>,
    /// The same in words, a line each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub attribution: Vec<String>,
}

impl Report {
    /// Of an experiment that is over.
    pub fn new(about: About, outcome: &Outcome) -> Self {
        let leg = |leg: &crate::LegResult| LegReport {
            finding: leg.finding.clone(),
            ready_after_seconds: leg.ready_after.as_secs_f64(),
            may_keep: leg.allowance.clone(),
            vram_unknown: leg.vram_unknown.clone(),
            refused: leg.refused.clone(),
            readings: leg.readings.clone(),
        };
        Self {
            about,
            leaks: outcome.leaks(),
            crashed: outcome.crashed(),
            interrupted: outcome.interrupted,
            legs: outcome.legs.iter().map(leg).collect(),
            skipped: outcome.skipped.clone(),
            devices: outcome.legs.last().map(|leg| leg.devices.clone()).unwrap_or_default(),
            budgets: Vec::new(),
            cure: None,
            survival: Vec::new(),
            between: None,
            headroom: None,
            trace: Vec::new(),
            untraced: None,
            attribution: Vec::new(),
        }
    }

    /// What there is to say beside the table, a line each.
    pub fn notes(&self) -> Vec<String> {
        let findings: Vec<&Finding> = self.legs.iter().map(|leg| &leg.finding).collect();
        let refused = self.legs.iter().filter_map(|leg| Some(refusal(&leg.finding, leg.refused.as_ref()?)));
        let unknown = self.vram_unknown().map(|why| format!("VRAM is not known: {why}"));
        let all = notes(&findings).into_iter().chain(refused).chain(unknown);
        // A server may quote a key in its errors.
        all.map(|note| secrets::text(&note)).collect()
    }

    /// Why VRAM is not known of a leg, if it should be.
    fn vram_unknown(&self) -> Option<&str> {
        self.legs.iter().find_map(|leg| leg.vram_unknown.as_deref())
    }

    /// One page that needs nothing else: no script, no font, no network.
    pub fn html(&self) -> String {
        html::page(&self.discreet())
    }
}

#[cfg(test)]
mod pages_tests;
#[cfg(test)]
mod tests;
