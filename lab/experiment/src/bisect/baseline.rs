//! Judges the baseline: which memories leak without any switch, and if that is certain.

use super::{CureOutcome, CurePlanner};
use crate::trial::WorkloadMemory;
use warden_policies::growth::GrowthVerdict;

impl CurePlanner {
    /// Returns true if the first leg leaves a question open. A suspected memory may be a second leak next
    /// to a certain one, and a cure has to stop both.
    pub(super) fn baseline_is_unclear(&self) -> bool {
        let all = || self.baseline.iter().flat_map(|leg| &leg.tracks).map(|(.., verdict)| *verdict);
        let leaks = all().any(GrowthVerdict::leaks);
        // Too few readings will be too few again; a second leg helps only if nothing leaks for certain.
        all().any(|verdict| verdict == GrowthVerdict::Suspected || (!verdict.is_known() && !leaks))
    }

    /// Returns the memories that leak, or were suspected in two legs.
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

    /// Returns the outcome if no leak was found: there is none, or it is unknown.
    pub(super) fn nothing_found(&self) -> CureOutcome {
        if self.baseline.iter().all(|leg| leg.short) {
            let why = "there are too few readings to say whether anything leaks".to_owned();
            return CureOutcome::NotKnown { why };
        }
        CureOutcome::NothingToCure
    }
}
