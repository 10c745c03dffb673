//! Compares the visible interface of two builds: flags and routes.

use serde::{Deserialize, Serialize};

use super::ProofRuling;

/// Flags and routes that were removed or added.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InterfaceComparison {
    /// Flags that only the old build has.
    pub flags_gone: Vec<String>,
    /// Flags missing in the new build that the present command uses.
    pub flags_missed: Vec<String>,
    /// Flags that only the new build has.
    pub flags_new: Vec<String>,
    /// Routes that only the old build has.
    pub routes_gone: Vec<String>,
    /// Routes that only the new build has.
    pub routes_new: Vec<String>,
}

impl InterfaceComparison {
    /// Compares flags and routes, each given as (old, new), in any order. `used`: flags of the present
    /// command.
    pub fn compare(flags: (&[String], &[String]), routes: (&[String], &[String]), used: &[String]) -> Self {
        let without = |these: &[String], those: &[String]| -> Vec<String> {
            let mut rest: Vec<String> = these.iter().filter(|one| !those.contains(one)).cloned().collect();
            rest.sort();
            rest.dedup();
            rest
        };
        let flags_gone = without(flags.0, flags.1);
        Self {
            flags_missed: flags_gone.iter().filter(|flag| used.contains(flag)).cloned().collect(),
            flags_gone,
            flags_new: without(flags.1, flags.0),
            routes_gone: without(routes.0, routes.1),
            routes_new: without(routes.1, routes.0),
        }
    }

    /// Returns `Worse` if a route or a used flag is missing in the new build; other missing flags are only
    /// reported.
    pub fn ruling(&self) -> ProofRuling {
        if self.flags_missed.is_empty() && self.routes_gone.is_empty() {
            ProofRuling::Same
        } else {
            ProofRuling::Worse
        }
    }
}
