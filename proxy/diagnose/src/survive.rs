//! Runs what a [`Search`] asks for: fresh processes with switches and without, until it is known which ones stop a crash.
//!
//! ```text
//!   Search ── Arm ──> spec of the arm ──> one leg of the workload that crashes ──> died, or did it all ──> Search ── … ──> Conclusion
//! ```

use tokio_util::sync::CancellationToken;
use warden_policies::experiment::bisect::Arm;
use warden_policies::experiment::crash::Crash;
use warden_policies::experiment::survive::{Conclusion, Search, Seen, Step};
use warden_policies::experiment::{Ended, Finding};
use warden_supervisor::SoloSpec;

use crate::error::DiagnoseError;
use crate::lab::Lab;
use crate::leg::{Leg, run_leg};

pub use crate::cure::Trying;

/// Which switches to try against which crash.
pub struct Survival<'a> {
    /// The work under which the server dies, and the server without any of them.
    pub leg: Leg,
    /// How many switches there are, the likeliest first.
    pub switches: usize,
    /// Pairs that cannot be used together.
    pub clashes: Vec<[usize; 2]>,
    /// The server with some of them; why it cannot be had, if it cannot.
    pub with: &'a (dyn Fn(&Arm) -> Result<SoloSpec, String> + Sync),
}

impl std::fmt::Debug for Survival<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Survival")
            .field("leg", &self.leg)
            .field("switches", &self.switches)
            .finish_non_exhaustive()
    }
}

impl Survival<'_> {
    /// Runs it. `crash`: what is known of it. Cancel `stop` for an early end: what is known by then is the conclusion.
    ///
    /// # Errors
    /// Nothing that a server could be blamed for.
    pub async fn run(
        &self,
        lab: &Lab,
        crash: &Crash,
        watch: &mut (dyn FnMut(Trying<'_>) + Send),
        stop: &CancellationToken,
    ) -> Result<Conclusion, DiagnoseError> {
        let mut search = Search::new(&lab.numbers.crash, self.switches, self.clashes.clone(), &crash.runs);
        loop {
            let arm = match search.next() {
                Step::Done(conclusion) => return Ok(conclusion),
                Step::Run(arm) => arm,
            };
            if stop.is_cancelled() {
                return Ok(search.interrupt());
            }
            let (done, of) = search.progress();
            watch(Trying::Next { arm: &arm, done, of });
            let spec = match (self.with)(&arm) {
                Ok(spec) => spec,
                Err(why) => {
                    search.observe(&arm, Seen::Nothing(why));
                    continue;
                }
            };
            // To its end: a survivor counts by its requests.
            let leg = Leg { spec, early: false, ..self.leg.clone() };
            match run_leg(lab, &leg, &mut |progress| watch(Trying::Leg(progress)), stop).await {
                Ok(result) if result.finding.ended == Ended::Interrupted => return Ok(search.interrupt()),
                Ok(result) => search.observe(&arm, seen(&result.finding)),
                Err(DiagnoseError::Interrupted) => return Ok(search.interrupt()),
                Err(DiagnoseError::Start(failure)) => {
                    search.observe(&arm, Seen::Nothing(format!("it did not start: {}", failure.message)));
                }
                Err(error @ DiagnoseError::CannotDo { .. }) => {
                    search.observe(&arm, Seen::Nothing(error.to_string()));
                }
                Err(error) => return Err(error),
            }
        }
    }
}

/// What a leg says of a crash.
fn seen(finding: &Finding) -> Seen {
    let Some(run) = finding.survived() else {
        let why = match &finding.ended {
            Ended::Killed { why } | Ended::Failed { why } | Ended::OutOfMemory { why } => why.clone(),
            _ => "the leg was cut short".to_owned(),
        };
        return Seen::Nothing(why);
    };
    let memory = finding.series.iter().map(|found| (found.series, found.verdict)).collect();
    Seen::Run { run, speed: finding.speed.tokens_per_second, memory }
}
