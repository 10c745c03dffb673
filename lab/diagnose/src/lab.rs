//! Everything that legs share: the starter of processes, and the numbers for verdicts.

use warden_experiment::between::JudgingPolicies;
use warden_policies::defaults::{Diagnose, Proof};
use warden_policies::growth::GrowthPolicy;
use warden_supervisor::SoloStarter;

/// Starter and numbers for experiments.
#[derive(Clone, Debug)]
pub struct Lab {
    /// Starts processes.
    pub starter: SoloStarter,
    /// Numbers of the detector.
    pub growth: GrowthPolicy,
    /// Numbers of experiments. Reasons: `defaults.toml`, section `[diagnose]`.
    pub numbers: Diagnose,
    /// Numbers for comparing builds. Reasons: `defaults.toml`, section `[proof]`.
    pub proof: Proof,
}

impl Lab {
    /// A lab with the default numbers.
    pub fn new(starter: SoloStarter, growth: GrowthPolicy) -> Self {
        let defaults = warden_policies::defaults();
        Self { starter, growth, numbers: defaults.diagnose.clone(), proof: defaults.proof.clone() }
    }

    /// The numbers for a search in a line of revisions.
    pub const fn rules(&self) -> JudgingPolicies<'_> {
        JudgingPolicies { cure: &self.numbers.cure, crash: &self.numbers.crash, proof: &self.proof }
    }
}
