//! Starts a model with its fallback arguments if the model does not fit into memory, until the model is
//! unloaded or gets another configuration.

use warden_policies::book::MemoryNeeds;

use super::ModelTask;
use super::loading::LoadState;
use crate::error::FailureKind;
use crate::spec::{FallbackSpec, ModelSpec, ServerCommand, SharedSpec};
use crate::view::event::EventKind;

/// Consecutive starts without enough memory before the fallback arguments are used. After the first such
/// start, other models make more room.
const SHORT_STARTS: u32 = 2;

/// Configured command and memory needs, kept while the fallback arguments are in use.
#[derive(Debug)]
pub(super) struct ConfiguredCommand {
    command: ServerCommand,
    needs: Option<MemoryNeeds>,
}

impl ModelTask {
    /// Uses the fallback arguments from the next start on, if there are any and the model has no process.
    /// Returns true if they were not in use before and now are.
    pub(super) fn fall_back(&mut self, because: &str) -> bool {
        let any = self.units.iter().any(|unit| unit.live.is_some());
        let Some(FallbackSpec { args, needs }) = self.spec.fallback.clone() else { return false };
        if self.configured_command.is_some() || any {
            return false;
        }
        let message = format!("started with {} added, because {because}", args.join(" "));
        let command = self.spec.command.clone();
        self.spec.command.args.extend(args);
        let needs = std::mem::replace(&mut self.spec.loading.needs, needs);
        self.configured_command = Some(ConfiguredCommand { command, needs });
        self.log_event(None, EventKind::FallsBack { message });
        self.apply_loading();
        if matches!(self.load_state, LoadState::Granted { .. }) {
            // Return the room: it was granted for the larger configuration.
            self.give_room_back();
        }
        self.retry_failed();
        true
    }

    /// Uses the fallback arguments, because processes taken over from the previous instance run with them.
    pub(super) fn inherit_fallback(&mut self) {
        let Some(FallbackSpec { args, needs }) = self.spec.fallback.clone() else { return };
        let command = self.spec.command.clone();
        self.spec.command.args.extend(args);
        let needs = std::mem::replace(&mut self.spec.loading.needs, needs);
        self.configured_command = Some(ConfiguredCommand { command, needs });
        self.apply_loading();
    }

    /// Uses the fallback arguments if starts lacked memory although other models had made room.
    pub(super) fn settle_fallback(&mut self) {
        let short = self.units.iter().find_map(|unit| {
            let failure = unit.failure.as_ref()?;
            let is_short = failure.kind == FailureKind::OutOfMemory && unit.start_failures >= SHORT_STARTS;
            is_short.then(|| failure.message.clone())
        });
        if let Some(message) = short {
            self.fall_back(&message);
        }
    }

    /// Returns to the configured command, because there may be more room at the next start.
    pub(super) fn restore_configured(&mut self) {
        if let Some(ConfiguredCommand { command, needs }) = self.configured_command.take() {
            self.spec.command = command;
            self.spec.loading.needs = needs;
        }
    }

    /// Keeps the fallback in use when new settings have the same command and fallback arguments.
    pub(super) fn keep_fallback(&mut self, mut spec: SharedSpec) -> SharedSpec {
        let whole = self.configured_command.take().filter(|whole| spec.command == whole.command);
        let args = |spec: &ModelSpec| spec.fallback.as_ref().map(|fallback| fallback.args.clone());
        if let Some(whole) = whole.filter(|_| args(&spec) == args(&self.spec)) {
            spec.command = self.spec.command.clone();
            let less = spec.fallback.as_ref().and_then(|fallback| fallback.needs.clone());
            let needs = std::mem::replace(&mut spec.loading.needs, less);
            self.configured_command = Some(ConfiguredCommand { needs, ..whole });
        }
        spec
    }
}
