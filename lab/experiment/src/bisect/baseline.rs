//! What the server does without any switch: whether that is clear, and which of its memories leak.

use super::{Outcome, Planner};
use crate::trial::Track;
use warden_policies::growth::Verdict;

impl Planner {
    /// The first leg alone does not say whether anything leaks, or what does: what is merely suspected may be a second leak,
    /// also beside one that is clear, and a cure has to stop both.
    pub(super) fn unclear(&self) -> bool {
        let all = || self.baseline.iter().flat_map(|leg| &leg.tracks).map(|(.., verdict)| *verdict);
        let leaks = all().any(Verdict::leaks);
        // Too few readings are as few the next time: worth a second leg only where nothing else is known.
        all().any(|verdict| verdict == Verdict::Suspected || (!verdict.is_known() && !leaks))
    }

    /// Memories that leak, or were suspected in two legs.
    pub(super) fn find_leaks(&self) -> Vec<Track> {
        let mut tracks: Vec<Track> = Vec::new();
        for (track, ..) in self.baseline.iter().flat_map(|leg| &leg.tracks) {
            let verdicts: Vec<Verdict> = self
                .baseline
                .iter()
                .filter_map(|leg| leg.of_track(*track).map(|(_, verdict)| verdict))
                .collect();
            let suspect = verdicts.iter().filter(|verdict| verdict.grows()).count();
            let leaks = verdicts.contains(&Verdict::Leaking) || suspect > 1;
            if leaks && !tracks.contains(track) {
                tracks.push(*track);
            }
        }
        tracks
    }

    /// What follows where nothing leaks: it is known, or it is not.
    pub(super) fn nothing_found(&self) -> Outcome {
        if self.baseline.iter().all(|leg| leg.short) {
            let why = "there are too few readings to say whether anything leaks".to_owned();
            return Outcome::NotKnown { why };
        }
        Outcome::NothingToCure
    }
}
