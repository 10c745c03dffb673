//! The record stored with a binary about its origin.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};
use warden_patches::SetFix;
use warden_patches::mitigation::{BuildFacts, ProvenanceFacts};
use warden_patches::set::life::FixStanding;

use super::BINARY_FILE;
use super::id::BuildId;
use crate::plan::{BuildPlan, ComputeBackend, option_value};
use crate::toolchain::BuildDrivers;
use crate::verify::VerifyResults;

/// Incremented when the file's format changes; readers reject newer ones.
pub const PROVENANCE_SCHEMA: u32 = 1;

/// Content of `provenance.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Provenance {
    /// Version of the format.
    pub schema: u32,
    /// The build's id, which is its folder's name.
    pub id: BuildId,
    /// Time of completion, RFC 3339 in UTC.
    pub built_at: String,
    /// The plan: source, options, compilers.
    pub plan: BuildPlan,
    /// Versions of cmake and ninja.
    pub drivers: BuildDrivers,
    /// Duration of each phase.
    pub timings: BuildTimings,
    /// Size and hash of the binary.
    pub binary: BinaryFacts,
    /// Size and hash of each library next to the binary, by file name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub libraries: BTreeMap<String, BinaryFacts>,
    /// Results of the verification.
    pub verified: VerifyResults,
    /// Machine of the build.
    pub host: BuildHost,
    /// Ids of the fixes whose markers were found in the binary; empty in builds from before patches existed.
    #[serde(default)]
    pub fixes: Vec<String>,
}

impl Provenance {
    /// Ids of the fixes in the binary. Each is off until its variable is set.
    pub fn fixes(&self) -> &[String] {
        &self.fixes
    }

    /// Fixes of the user's own applied sets, each with its set's id.
    pub fn own_fixes(&self) -> Vec<(String, SetFix)> {
        let applied = self.plan.patches.iter().filter(|set| set.is_applied());
        applied.flat_map(|set| set.own.iter().map(|fix| (set.set.clone(), fix.clone()))).collect()
    }

    /// The state of each judged fix in this source: needed, superseded, harmful.
    pub fn fix_states(&self) -> Vec<(String, FixStanding)> {
        let fixes = self.plan.patches.iter().flat_map(|set| &set.fixes);
        fixes.filter_map(|fix| Some((fix.fix.clone(), fix.life.clone()?))).collect()
    }

    /// Names and facts of the binary and its libraries.
    pub fn files(&self) -> impl Iterator<Item = (&str, &BinaryFacts)> {
        let libraries = self.libraries.iter().map(|(name, facts)| (name.as_str(), facts));
        std::iter::once((BINARY_FILE, &self.binary)).chain(libraries)
    }

    /// Bytes of the binary and its libraries.
    pub fn bytes(&self) -> u64 {
        self.files().map(|(_, facts)| facts.size).sum()
    }

    /// Compute backend of the binary.
    pub const fn backend(&self) -> ComputeBackend {
        self.plan.recipe.backend
    }

    /// Facts about the build for mitigations; `binary` is its file.
    pub fn facts(&self, binary: &Path) -> BuildFacts {
        let option = |text: &String| {
            let (name, value) = text.strip_prefix("-D")?.split_once('=')?;
            Some((name.split(':').next().unwrap_or(name).to_owned(), value.to_owned()))
        };
        BuildFacts {
            binary: binary.to_owned(),
            number: self.plan.source.revision.build_number,
            provenance: Some(ProvenanceFacts {
                id: self.id.to_string(),
                backend: self.backend().to_string(),
                fixes: Some(self.fixes().to_vec()),
                own: self.own_fixes(),
                fix_states: self.fix_states(),
                options: self.plan.recipe.cmake.iter().filter_map(option).collect(),
            }),
        }
    }

    /// The value of a cmake option by name; `None` if unset, so that upstream's default applies.
    pub fn option(&self, name: &str) -> Option<&str> {
        option_value(&self.plan.recipe.cmake, name)
    }
}

/// Duration of each phase in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BuildTimings {
    /// Unpacking or copying the source.
    pub unpack: f64,
    /// Running cmake.
    pub configure: f64,
    /// Running the compilers.
    pub compile: f64,
    /// Running the checks.
    pub verify: f64,
}

/// Size and hash of a build's binary, or of one of its libraries.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BinaryFacts {
    /// Size in bytes.
    pub size: u64,
    /// sha256 as hexadecimal digits.
    pub sha256: String,
}

/// Machine of a build.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BuildHost {
    /// Host name.
    pub name: String,
    /// Name and release of the kernel.
    pub kernel: String,
    /// Architecture, such as `x86_64`.
    pub machine: String,
    /// Name of the CPU, or empty.
    pub cpu: String,
}

impl BuildHost {
    pub(crate) fn current() -> Self {
        let system = rustix::system::uname();
        let text = |part: &std::ffi::CStr| part.to_string_lossy().into_owned();
        let info = fs::read_to_string(Path::new("/proc/cpuinfo")).unwrap_or_default();
        let cpu = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
        Self {
            name: text(system.nodename()),
            kernel: format!("{} {}", text(system.sysname()), text(system.release())),
            machine: text(system.machine()),
            cpu: cpu.map(|(_, name)| name.trim().to_owned()).unwrap_or_default(),
        }
    }
}
