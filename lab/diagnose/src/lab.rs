//! Everything that legs share: the starter of processes, and the numbers for verdicts.

use warden_experiment::between::Rules;
use warden_policies::defaults::{Diagnose, Proof};
use warden_policies::growth::GrowthPolicy;
use warden_supervisor::Starter;

/// Starter and numbers for experiments.
#[derive(Clone, Debug)]
pub struct Lab {
    /// Starts processes.
    pub starter: Starter,
    /// Numbers of the detector.
    pub growth: GrowthPolicy,
    /// Numbers of experiments. Reasons: `defaults.toml`, section `[diagnose]`.
    pub numbers: Diagnose,
    /// Numbers for comparing builds. Reasons: `defaults.toml`, section `[proof]`.
    pub proof: Proof,
}

impl Lab {
    /// A lab with the default numbers.
    pub fn new(starter: Starter, growth: GrowthPolicy) -> Self {
        let defaults = warden_policies::defaults();
        Self { starter, growth, numbers: defaults.diagnose.clone(), proof: defaults.proof.clone() }
    }

    /// The numbers for a search in a line of revisions.
    pub const fn rules(&self) -> Rules<'_> {
        Rules { cure: &self.numbers.cure, crash: &self.numbers.crash, proof: &self.proof }
    }
}
