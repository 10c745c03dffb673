//! Runs the processes of a proof: in each round, one of the old build and one of the new build get the same
//! requests.
//!
//! ```text
//!   ProofRounds ── BuildProofStep ──> a fresh process ── start, memory ── questions ── pace ── longest
//!   prompt
//!               ──> BuildVisit ──> ProofRounds ── … ──> BuildProof
//!   then, if requested: the search between two revisions (`between`), with the builds as its ends ──> growth, crashes
//! ```
//!
//! A build that does not start, dies, or does not answer ends the proof: both builds must answer these
//! requests.

pub(crate) mod questions;
pub(crate) mod visit;

use std::sync::OnceLock;

use tokio_util::sync::CancellationToken;
use warden_experiment::between::{ProcessOrder, RevisionAim, RevisionConclusion, RevisionSearch};
use warden_experiment::proof::{
    BuildGrowth, BuildProof, BuildProofStep, BuildSide, InterfaceComparison, ProofRounds,
};
use warden_supervisor::SoloSpec;

use self::visit::VisitTasks;
pub use self::visit::{PublishedRequest, TextLengths, published_requests};
use crate::between::{RevisionLine, SearchEvent, ServerFuture};
use crate::error::DiagnoseError;
use crate::experiment::Experiment;
use crate::lab::Lab;

/// Two builds with the same model and work.
#[derive(Clone, Debug)]
pub struct ComparedBuilds {
    /// Server of the build in use.
    pub old: SoloSpec,
    /// Server of the new build, with the model and flags of `old`.
    pub new: SoloSpec,
    /// All flags of both builds, from their help; `None` if one build prints no flags.
    pub flags: Option<(Vec<String>, Vec<String>)>,
    /// Flags of the command of both builds, as spelled in the help.
    pub used: Vec<String>,
    /// URL paths that are looked for in both builds.
    pub paths: Vec<String>,
    /// Workloads for the search for growth and crashes; without workloads there is no search.
    pub work: Experiment,
}

/// Progress of a proof.
#[derive(Debug)]
pub enum ProofProgress<'a> {
    /// A process of this build starts in this round.
    Next(BuildSide, usize),
    /// Progress of the search for growth and crashes.
    Searching(&'a SearchEvent<'a>),
}

impl ComparedBuilds {
    /// Cancelling `stop` ends the proof early, with the results so far.
    ///
    /// # Errors
    /// Only errors that are not a build's fault.
    pub async fn prove(
        &self,
        lab: &Lab,
        watch: &mut (dyn FnMut(ProofProgress<'_>) + Send),
        stop: &CancellationToken,
    ) -> Result<BuildProof, DiagnoseError> {
        let mut rounds = ProofRounds::new(&lab.proof);
        let mut paths = BuildRoutes::default();
        let mut lengths = None;
        while let BuildProofStep::Visit { side, asks } = rounds.next() {
            if stop.is_cancelled() {
                break;
            }
            watch(ProofProgress::Next(side, rounds.count() + 1));
            let (spec, known) = match side {
                BuildSide::Old => (&self.old, &mut paths.old),
                BuildSide::New => (&self.new, &mut paths.new),
            };
            let paths = (known.is_none()).then_some(self.paths.as_slice());
            let wanted = VisitTasks { answers: asks, pace: true, longest: true, paths, lengths };
            let Some(seen) = stop.run_until_cancelled(visit::run_visit(lab, spec, wanted)).await else {
                break;
            };
            match seen? {
                Ok(visited) => {
                    lengths = Some(visited.lengths);
                    if let Some(routes) = visited.routes {
                        *known = Some(routes);
                    }
                    rounds.observe(side, visited.visit);
                }
                Err(why) => rounds.record_failure(side, why),
            }
        }
        let faces = self.interface_facts(paths);
        let is_wanted = !self.work.workloads.is_empty() && !stop.is_cancelled();
        let growth = if is_wanted && rounds.is_complete() {
            Some(BuildGrowth::from_conclusion(self.search(lab, watch, stop).await?))
        } else {
            None
        };
        let mut proof = BuildProof::from_rounds(&rounds, faces, growth);
        proof.interrupted |= stop.is_cancelled();
        Ok(proof)
    }

    fn interface_facts(&self, routes: BuildRoutes) -> InterfaceComparison {
        let empty = (Vec::new(), Vec::new());
        let flags = self.flags.as_ref().unwrap_or(&empty);
        let routes = routes.old.zip(routes.new).unwrap_or_default();
        InterfaceComparison::compare((&flags.0, &flags.1), (&routes.0, &routes.1), &self.used)
    }

    /// Searches for growth and crashes, with the two builds as revisions.
    async fn search(
        &self,
        lab: &Lab,
        watch: &mut (dyn FnMut(ProofProgress<'_>) + Send),
        stop: &CancellationToken,
    ) -> Result<RevisionConclusion, DiagnoseError> {
        let server = |revision: usize| -> ServerFuture<'_, DiagnoseError> {
            let spec = if revision == 0 { &self.old } else { &self.new };
            Box::pin(async move { Ok(spec.clone()) })
        };
        let lengths = OnceLock::new();
        let base = self.work.clone();
        let line = RevisionLine { base, last: 1, newer_only: true, lengths: &lengths, server: &server };
        let search = RevisionSearch::new(lab.rules(), RevisionAim::Growth, 1);
        let mut show = |event: SearchEvent<'_>| watch(ProofProgress::Searching(&event));
        Box::pin(line.run(lab, search, &mut show, stop)).await
    }
}

#[derive(Debug, Default)]
struct BuildRoutes {
    old: Option<Vec<String>>,
    new: Option<Vec<String>>,
}

/// Returns the build that a process of the search belongs to.
pub const fn build_side(ask: ProcessOrder) -> BuildSide {
    if ask.revision == 0 { BuildSide::Old } else { BuildSide::New }
}
