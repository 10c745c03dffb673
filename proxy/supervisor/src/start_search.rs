//! Searches for an option that lets a dying server start. Processes run one at a time.
//!
//! ```text
//!     StartSearch ── as configured, or with an option ──> Starter ── result ──> StartSearch ── … ──> finding
//! ```

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use warden_policies::start_search::{SearchStep, StartAttempt, StartFinding, StartSearch, StartSwitch};

use crate::error::{BackendFailure, FailureKind};
use crate::process::failure;
use crate::process::group::ProcessExit;
use crate::solo::{FailedStart, SoloSpec, SoloStarter};

/// Server and options for a search.
#[derive(Clone, Debug)]
pub struct StartSearchRun {
    /// Server with the configured command.
    pub spec: SoloSpec,
    /// Options to try, the cheapest and likeliest first.
    pub switches: Vec<StartSwitch>,
    /// Consecutive deaths with the configured command.
    pub deaths: u32,
    /// Description of the last death, for people.
    pub death: String,
}

impl StartSearchRun {
    /// Searches until a finding, the time limit, or `stop`. Dropping the future kills the process. `watch` is
    /// called before each start with the option, or `None` for the configured command.
    pub async fn run(
        self,
        starter: &SoloStarter,
        watch: &mut (dyn FnMut(Option<&StartSwitch>) + Send),
        stop: &CancellationToken,
    ) -> StartFinding {
        let began = Instant::now();
        let has_gpu = starter.has_gpu();
        let switches = self.switches.into_iter().filter(|switch| has_gpu || !switch.needs_gpu).collect();
        let policy = warden_policies::defaults().start_search;
        let mut search = StartSearch::new(policy, switches, self.deaths, self.death);
        loop {
            let which = match search.next_step(began.elapsed()) {
                SearchStep::Done(finding) => return finding,
                SearchStep::Start(which) => which,
            };
            let switch = which.and_then(|index| search.switch(index));
            watch(switch);
            let mut spec = self.spec.clone();
            if let Some(switch) = switch {
                spec.command.args.extend(switch.args.iter().cloned());
                spec.command.env.extend(switch.env.iter().cloned());
            }
            let left = policy.time.saturating_sub(began.elapsed());
            let over = async {
                tokio::select! {
                    () = tokio::time::sleep(left) => {}
                    () = stop.cancelled() => {}
                }
            };
            let attempt = attempt_start(starter, &spec, over).await;
            if stop.is_cancelled() || began.elapsed() >= policy.time {
                return search.give_up();
            }
            search.observe(which, attempt);
        }
    }
}

async fn attempt_start(
    starter: &SoloStarter,
    spec: &SoloSpec,
    over: impl Future<Output = ()>,
) -> StartAttempt {
    match starter.start_unless(spec, over).await {
        Ok(solo) => {
            solo.stop().await;
            StartAttempt::Ready
        }
        Err(FailedStart { failure, exit }) => match death_at_load(exit, &failure) {
            Some(how) => StartAttempt::Died(how),
            None => StartAttempt::Failed(failure.message),
        },
    }
}

/// Description of a death that an option may avoid: a signal of the process itself, an exit code for such a
/// signal, or a logged crash. `None` for failures with a known cause (memory, a file, a flag).
pub(crate) fn death_at_load(exit: Option<ProcessExit>, failure: &BackendFailure) -> Option<String> {
    /// Exit codes of a shell for SIGILL, SIGTRAP, SIGABRT, SIGBUS, SIGFPE and SIGSEGV.
    const SHELL_SIGNAL_CODES: [i32; 6] = [132, 133, 134, 135, 136, 139];
    let exit = exit.filter(|exit| exit.is_self_inflicted())?;
    let line = failure::crash_line(&failure.lines);
    let died = match exit {
        ProcessExit::Signal(_) => true,
        ProcessExit::Code(code) => SHELL_SIGNAL_CODES.contains(&code) || line.is_some(),
        ProcessExit::Unknown => false,
    };
    let nameless = matches!(failure.kind, FailureKind::Signal | FailureKind::Exit | FailureKind::NotLoaded);
    let line = line.map(|line| format!(", {line}")).unwrap_or_default();
    (died && nameless).then(|| format!("{exit}{line}"))
}

/// True if a failure may be a death for which a search is worthwhile.
pub fn may_be_load_death(failure: &BackendFailure) -> bool {
    failure.kind == FailureKind::Signal || failure::crash_line(&failure.lines).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(kind: FailureKind, lines: &[&str]) -> BackendFailure {
        let lines = lines.iter().map(|&line| line.to_owned()).collect();
        BackendFailure { kind, message: "it ended".to_owned(), lines, failures: 1 }
    }

    #[test]
    fn a_signal_of_its_own_and_a_failed_assertion_are_deaths_and_a_named_failure_is_none() {
        let assert = ["0.1 I load", "ggml.c:1: GGML_ASSERT(n > 1) failed"];
        for (exit, kind, lines, died) in [
            (ProcessExit::Signal(libc::SIGSEGV), FailureKind::Signal, &[][..], true),
            (ProcessExit::Signal(libc::SIGSEGV), FailureKind::NotLoaded, &[], true),
            (ProcessExit::Signal(libc::SIGABRT), FailureKind::Signal, &assert, true),
            (ProcessExit::Code(139), FailureKind::Exit, &[], true),
            (ProcessExit::Code(1), FailureKind::Exit, &assert, true),
            (ProcessExit::Code(1), FailureKind::Exit, &[], false),
            (ProcessExit::Code(1), FailureKind::BadFlag, &[], false),
            (ProcessExit::Signal(libc::SIGABRT), FailureKind::OutOfMemory, &assert, false),
            (ProcessExit::Signal(libc::SIGKILL), FailureKind::Signal, &[], false),
            (ProcessExit::Signal(libc::SIGTERM), FailureKind::Signal, &[], false),
        ] {
            let how = death_at_load(Some(exit), &failure(kind, lines));
            assert_eq!(how.is_some(), died, "{exit} {kind:?} {lines:?}");
        }
        assert_eq!(death_at_load(None, &failure(FailureKind::Timeout, &[])), None);
        let how =
            death_at_load(Some(ProcessExit::Signal(6)), &failure(FailureKind::Signal, &assert)).unwrap();
        assert_eq!(how, "signal 6 (SIGABRT), ggml.c:1: GGML_ASSERT(n > 1) failed");
    }
}
