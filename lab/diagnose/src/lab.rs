//! Process starter and settings that all legs share.

use warden_experiment::between::JudgingPolicies;
use warden_policies::defaults::{Diagnose, Proof};
use warden_policies::growth::GrowthPolicy;
use warden_supervisor::SoloStarter;

/// Process starter and settings of experiments.
#[derive(Clone, Debug)]
pub struct Lab {
    /// Starts processes.
    pub starter: SoloStarter,
    /// Settings of the leak detector.
    pub growth: GrowthPolicy,
    /// Settings of experiments. `defaults.toml`, section `[diagnose]`, gives the reasons.
    pub numbers: Diagnose,
    /// Settings for comparing builds. `defaults.toml`, section `[proof]`, gives the reasons.
    pub proof: Proof,
}

impl Lab {
    /// Creates a lab with the default settings.
    pub fn new(starter: SoloStarter, growth: GrowthPolicy) -> Self {
        let defaults = warden_policies::defaults();
        Self { starter, growth, numbers: defaults.diagnose.clone(), proof: defaults.proof.clone() }
    }

    /// Returns the policies for a search among revisions.
    pub const fn rules(&self) -> JudgingPolicies<'_> {
        JudgingPolicies { cure: &self.numbers.cure, crash: &self.numbers.crash, proof: &self.proof }
    }
}
