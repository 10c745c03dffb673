//! Judges the baseline: finds the kinds of memory that leak without any switch.

use super::{CureOutcome, CurePlanner};
use crate::trial::WorkloadMemory;
use warden_policies::growth::GrowthVerdict;

impl CurePlanner {
    /// Returns true if a second leg is needed. A suspected leak may exist next to a certain one, and a cure
    /// has to stop both.
    pub(super) fn baseline_is_unclear(&self) -> bool {
        let all = || self.baseline.iter().flat_map(|leg| &leg.tracks).map(|(.., verdict)| *verdict);
        let leaks = all().any(GrowthVerdict::leaks);
        // A second leg would also have too few readings, so repeat a short leg only if no leak is certain.
        all().any(|verdict| verdict == GrowthVerdict::Suspected || (!verdict.is_known() && !leaks))
    }

    /// Returns the kinds of memory that leak, or were suspected of a leak in two legs.
    pub(super) fn find_leaks(&self) -> Vec<WorkloadMemory> {
        let mut tracks: Vec<WorkloadMemory> = Vec::new();
        for (track, ..) in self.baseline.iter().flat_map(|leg| &leg.tracks) {
            let verdicts: Vec<GrowthVerdict> = self
                .baseline
                .iter()
                .filter_map(|leg| leg.of_track(*track).map(|(_, verdict)| verdict))
                .collect();
            let suspect = verdicts.iter().filter(|verdict| verdict.grows()).count();
            let leaks = verdicts.contains(&GrowthVerdict::Leaking) || suspect > 1;
            if leaks && !tracks.contains(track) {
                tracks.push(*track);
            }
        }
        tracks
    }

    /// Returns the outcome if no leak was found: either there is none, or the readings were too few to know.
    pub(super) fn nothing_found(&self) -> CureOutcome {
        if self.baseline.iter().all(|leg| leg.short) {
            let why = "there are too few readings to say whether anything leaks".to_owned();
            return CureOutcome::NotKnown { why };
        }
        CureOutcome::NothingToCure
    }
}
