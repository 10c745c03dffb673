//! Runs the processes of a proof: one of the old build, one of the new one, the same requests to both,
//! round by round.
//!
//! ```text
//!   Rounds ── Next::Visit ──> a fresh process ── start, memory ── questions ── pace ── the longest prompt ──> Visit ──> Rounds ── … ──> Proof
//!   then, if requested: the search between two revisions (`between`), with the builds as its ends ──> growth, crashes
//! ```
//!
//! A build that does not start, dies, or does not answer ends the proof: every build has to answer these
//! requests.

mod lengths;
mod questions;
mod routes;
pub(crate) mod visit;

use std::sync::OnceLock;

use tokio_util::sync::CancellationToken;
use warden_experiment::between::{Aim, Ask, Conclusion, Search};
use warden_experiment::proof::{Faces, Growth, Next, Proof, Rounds, Side};
use warden_supervisor::SoloSpec;

pub use self::lengths::Lengths;
use self::visit::Wanted;
pub use self::visit::{Sent, requests};
use crate::between::{RevisionLine, SearchEvent, ServerFuture};
use crate::error::DiagnoseError;
use crate::experiment::Experiment;
use crate::lab::Lab;

/// Two builds with the same model and work.
#[derive(Clone, Debug)]
pub struct Pair {
    /// The server of the build in use.
    pub old: SoloSpec,
    /// The same server with the new build.
    pub new: SoloSpec,
    /// All flags of both, from their help; `None` if one prints none.
    pub flags: Option<(Vec<String>, Vec<String>)>,
    /// Flags that both are started with, as spelled in the help.
    pub used: Vec<String>,
    /// Paths that both are checked for.
    pub paths: Vec<String>,
    /// The workloads under which growth and crashes of both are searched; without workloads there is no
    /// search.
    pub work: Experiment,
}

/// Progress of a proof.
#[derive(Debug)]
pub enum Proving<'a> {
    /// A process of this build follows, in this round.
    Next(Side, usize),
    /// The search for growth and crashes runs from here on.
    Searching(&'a SearchEvent<'a>),
}

impl Pair {
    /// Runs the proof to its end. Cancelling `stop` ends it early, with the results so far.
    ///
    /// # Errors
    /// Only errors that are not a build's fault.
    pub async fn prove(
        &self,
        lab: &Lab,
        watch: &mut (dyn FnMut(Proving<'_>) + Send),
        stop: &CancellationToken,
    ) -> Result<Proof, DiagnoseError> {
        let mut rounds = Rounds::new(&lab.proof);
        let mut paths = Routes::default();
        let mut lengths = None;
        while let Next::Visit { side, asks } = rounds.next() {
            if stop.is_cancelled() {
                break;
            }
            watch(Proving::Next(side, rounds.count() + 1));
            let (spec, known) = match side {
                Side::Old => (&self.old, &mut paths.old),
                Side::New => (&self.new, &mut paths.new),
            };
            let paths = (known.is_none()).then_some(self.paths.as_slice());
            let wanted = Wanted { answers: asks, pace: true, longest: true, paths, lengths };
            let visiting = visit::run(lab, spec, wanted);
            let seen = tokio::select! {
                biased;
                () = stop.cancelled() => break,
                seen = visiting => seen?,
            };
            match seen {
                Ok(visited) => {
                    lengths = Some(visited.lengths);
                    if let Some(routes) = visited.routes {
                        *known = Some(routes);
                    }
                    rounds.observe(side, visited.visit);
                }
                Err(why) => rounds.failed(side, why),
            }
        }
        let faces = self.faces(paths);
        let is_wanted = !self.work.workloads.is_empty() && !stop.is_cancelled();
        let growth = if is_wanted && rounds.are_whole() {
            Some(Growth::of(self.search(lab, watch, stop).await?))
        } else {
            None
        };
        let mut proof = Proof::of(&rounds, faces, growth);
        proof.interrupted |= stop.is_cancelled();
        Ok(proof)
    }

    fn faces(&self, routes: Routes) -> Faces {
        let empty = (Vec::new(), Vec::new());
        let flags = self.flags.as_ref().unwrap_or(&empty);
        let routes = routes.old.zip(routes.new).unwrap_or_default();
        Faces::of((&flags.0, &flags.1), (&routes.0, &routes.1), &self.used)
    }

    /// Searches growth and crashes of both, as the two revisions of a line.
    async fn search(
        &self,
        lab: &Lab,
        watch: &mut (dyn FnMut(Proving<'_>) + Send),
        stop: &CancellationToken,
    ) -> Result<Conclusion, DiagnoseError> {
        let server = |revision: usize| -> ServerFuture<'_, DiagnoseError> {
            let spec = if revision == 0 { &self.old } else { &self.new };
            Box::pin(async move { Ok(spec.clone()) })
        };
        let lengths = OnceLock::new();
        let base = self.work.clone();
        let line = RevisionLine { base, last: 1, newer_only: true, lengths: &lengths, server: &server };
        let search = Search::new(lab.rules(), Aim::Growth, 1);
        let mut show = |event: SearchEvent<'_>| watch(Proving::Searching(&event));
        Box::pin(line.run(lab, search, &mut show, stop)).await
    }
}

/// Paths that each build serves.
#[derive(Debug, Default)]
struct Routes {
    old: Option<Vec<String>>,
    new: Option<Vec<String>>,
}

/// The build that a process of the search belongs to.
pub const fn side(ask: Ask) -> Side {
    if ask.revision == 0 { Side::Old } else { Side::New }
}
