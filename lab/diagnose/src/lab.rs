//! What all legs share: where processes come from, and by which numbers they are judged.

use warden_experiment::between::Rules;
use warden_policies::defaults::{Diagnose, Proof};
use warden_policies::growth::GrowthPolicy;
use warden_supervisor::Starter;

/// See the module.
#[derive(Clone, Debug)]
pub struct Lab {
    /// Where processes come from.
    pub starter: Starter,
    /// The numbers of the detector.
    pub growth: GrowthPolicy,
    /// The numbers of experiments. Reasons: `defaults.toml`, section `[diagnose]`.
    pub numbers: Diagnose,
    /// When a build may take the place of another. Reasons: `defaults.toml`, section `[proof]`.
    pub proof: Proof,
}

impl Lab {
    /// With the numbers of the product.
    pub fn new(starter: Starter, growth: GrowthPolicy) -> Self {
        let defaults = warden_policies::defaults();
        Self { starter, growth, numbers: defaults.diagnose.clone(), proof: defaults.proof.clone() }
    }

    /// Those for revisions of a line.
    pub const fn rules(&self) -> Rules<'_> {
        Rules { cure: &self.numbers.cure, crash: &self.numbers.crash, proof: &self.proof }
    }
}
