//! A model that does not fit into memory as it is configured is started with its fallback arguments, until it is unloaded or configured
//! otherwise.

use warden_policies::book::Needs;

use super::Model;
use super::loading::Stand;
use crate::error::FailureKind;
use crate::spec::{Command, Fallback, ModelSpec, SharedSpec};
use crate::view::event::EventKind;

/// Starts in a row that found too little memory, after which it is enough: after the first one others make more room.
const SHORT_STARTS: u32 = 2;

/// What is configured, while the fallback is in its place.
#[derive(Debug)]
pub(super) struct Whole {
    command: Command,
    needs: Option<Needs>,
}

impl Model {
    /// Takes the fallback arguments from the next start on, if there are any and nothing of the model is there. Returns whether it does.
    pub(super) fn fall_back(&mut self, because: &str) -> bool {
        let any = self.units.iter().any(|unit| unit.live.is_some());
        let Some(Fallback { args, needs }) = self.spec.fallback.clone() else { return false };
        if self.whole.is_some() || any {
            return false;
        }
        let message = format!("started with {} added, because {because}", args.join(" "));
        let command = self.spec.command.clone();
        self.spec.command.args.extend(args);
        let needs = std::mem::replace(&mut self.spec.loading.needs, needs);
        self.whole = Some(Whole { command, needs });
        self.tell(None, EventKind::FallsBack { message });
        self.apply_loading();
        if matches!(self.stand, Stand::In { .. }) {
            // That room was for more.
            self.give_room_back();
        }
        self.start_the_failed();
        true
    }

    /// The instance before us had taken the fallback arguments, and the processes that it left have them.
    pub(super) fn be_less(&mut self) {
        let Some(Fallback { args, needs }) = self.spec.fallback.clone() else { return };
        let command = self.spec.command.clone();
        self.spec.command.args.extend(args);
        let needs = std::mem::replace(&mut self.spec.loading.needs, needs);
        self.whole = Some(Whole { command, needs });
        self.apply_loading();
    }

    /// Starts found too little memory, although others made room.
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

    /// The next start is as configured: there may be more room by then.
    pub(super) fn take_whole(&mut self) {
        if let Some(Whole { command, needs }) = self.whole.take() {
            self.spec.command = command;
            self.spec.loading.needs = needs;
        }
    }

    /// Other settings: one that is what it was stays with its fallback arguments.
    pub(super) fn keep_fallback(&mut self, mut spec: SharedSpec) -> SharedSpec {
        let whole = self.whole.take().filter(|whole| spec.command == whole.command);
        let args = |spec: &ModelSpec| spec.fallback.as_ref().map(|fallback| fallback.args.clone());
        if let Some(whole) = whole.filter(|_| args(&spec) == args(&self.spec)) {
            spec.command = self.spec.command.clone();
            let less = spec.fallback.as_ref().and_then(|fallback| fallback.needs.clone());
            let needs = std::mem::replace(&mut spec.loading.needs, less);
            self.whole = Some(Whole { needs, ..whole });
        }
        spec
    }
}
