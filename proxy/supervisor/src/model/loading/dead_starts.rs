//! Processes that died while they loaded, and the search for an option with which they start.

use tokio_util::sync::CancellationToken;
use warden_policies::start_search::StartFinding;

use crate::error::BackendFailure;
use crate::memory::leak_history;
use crate::model::environment::TaskEnvironment;
use crate::process::failure::StartEnd;
use crate::spec::ServerCommand;
use crate::start_search::death_at_load;

#[derive(Debug, Default)]
pub(crate) struct DeadStarts {
    pub(crate) command: Option<ServerCommand>,
    pub(crate) key: String,
    pub(crate) deaths: u32,
    pub(crate) death: String,
    pub(crate) finding: Option<StartFinding>,
    pub(crate) search: Option<(u64, CancellationToken)>,
    pub(crate) searches: u64,
}

impl DeadStarts {
    /// Resets the count after a successful start, or after a failure with a known cause.
    pub(crate) fn forget_deaths(&mut self) {
        self.deaths = 0;
    }

    /// Handles a death before the process was ready, and adds known facts to `failure`. Returns true if the
    /// next start needs a changed configuration.
    pub(crate) fn note_death(
        &mut self,
        env: &TaskEnvironment,
        end: &StartEnd<'_>,
        failure: &mut BackendFailure,
    ) -> bool {
        let exit = if let StartEnd::Exited(exit, _) = end { Some(*exit) } else { None };
        let Some(death) = death_at_load(exit, failure) else {
            self.forget_deaths();
            return false;
        };
        if self.command.as_ref() != Some(&env.spec.command) {
            let key = leak_history::process_key(&env.spec.command);
            *self = DeadStarts {
                command: Some(env.spec.command.clone()),
                finding: env.context.leak_history.start_finding(&key),
                key,
                search: self.search.take(),
                searches: self.searches,
                ..DeadStarts::default()
            };
        }
        self.deaths += 1;
        self.death = death;
        let Some(finding) = self.finding.as_ref().filter(|finding| finding.is_lasting()) else {
            return false;
        };
        failure.message = format!("{}; {}", failure.message, finding.advice());
        finding.switch().is_some_and(|switch| !switch.is_fallback())
    }

    pub(crate) fn is_searching(&self) -> bool {
        self.search.is_some()
    }

    /// Cancels a search. Its process is gone when the result message arrives.
    pub(crate) fn stop_search(&self) {
        if let Some((_, stop)) = &self.search {
            stop.cancel();
        }
    }
}
