//! What is written beside a binary, so that years later it is known where it came from.

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};
use warden_patches::Fix;
use warden_patches::mitigation::{BuildFacts, ProvenanceFacts};
use warden_patches::set::life::Standing;

use super::id::BuildId;
use crate::plan::backend::Backend;
use crate::plan::{Plan, option_value};
use crate::toolchain::found::Drivers;
use crate::verify::Verified;

/// Raised when the file's shape changes; readers refuse newer ones.
pub const SCHEMA: u32 = 1;

/// What is kept of a build: `provenance.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Provenance {
    /// Version of this shape.
    pub schema: u32,
    /// The build's name, as its folder.
    pub id: BuildId,
    /// When it was finished, RFC 3339 in UTC.
    pub built_at: String,
    /// What was planned: source, options, compilers.
    pub plan: Plan,
    /// What drove the compilers.
    pub drivers: Drivers,
    /// How long each part took.
    pub timings: Timings,
    /// The binary.
    pub binary: Binary,
    /// What it did to prove itself.
    pub verified: Verified,
    /// The machine that built it.
    pub host: Host,
    /// The fixes that its source was patched with and whose markers were found in the binary, by id. Builds from
    /// before there were patches have none.
    #[serde(default)]
    pub fixes: Vec<String>,
}

impl Provenance {
    /// The fixes that are in the binary, by id. Each is off until its variable is set.
    pub fn fixes(&self) -> &[String] {
        &self.fixes
    }

    /// What the user's own sets that were applied say of their fixes, each with its set's id.
    pub fn own_fixes(&self) -> Vec<(String, Fix)> {
        let applied = self.plan.patches.iter().filter(|set| set.applied());
        applied.flat_map(|set| set.own.iter().map(|fix| (set.set.clone(), fix.clone()))).collect()
    }

    /// What its source shows of the fixes that were judged: needed, superseded, harmful.
    pub fn lives(&self) -> Vec<(String, Standing)> {
        let fixes = self.plan.patches.iter().flat_map(|set| &set.fixes);
        fixes.filter_map(|fix| Some((fix.fix.clone(), fix.life.clone()?))).collect()
    }

    /// What the binary computes on.
    pub const fn backend(&self) -> Backend {
        self.plan.recipe.backend
    }

    /// What mitigations have to know of the build, whose binary is this file.
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
                lives: self.lives(),
                options: self.plan.recipe.cmake.iter().filter_map(option).collect(),
            }),
        }
    }

    /// The value that an option for cmake was built with, by its name, such as `GGML_CUDA_GRAPHS`. `None`: it was not
    /// given, so upstream's default of that revision holds.
    pub fn option(&self, name: &str) -> Option<&str> {
        option_value(&self.plan.recipe.cmake, name)
    }
}

/// Seconds by phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Timings {
    /// Unpacking or copying the source.
    pub unpack: f64,
    /// cmake.
    pub configure: f64,
    /// The compilers.
    pub compile: f64,
    /// The checks.
    pub verify: f64,
}

/// The one file of a build.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Binary {
    /// Bytes.
    pub size: u64,
    /// In hexadecimal digits.
    pub sha256: String,
}

/// Where a build was made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Host {
    /// The machine's name.
    pub name: String,
    /// The kernel's name and release.
    pub kernel: String,
    /// The architecture, such as `x86_64`.
    pub machine: String,
    /// The CPU's name, or empty.
    pub cpu: String,
}

impl Host {
    pub(crate) fn here() -> Self {
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
