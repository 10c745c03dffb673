//! Roster: maps names to models. A roster is immutable; a reload makes a new one.

use std::collections::HashMap;
use std::sync::Arc;

use tokio::sync::oneshot;
use warden_policies::{ModelName, QuickMap};

use crate::error::{ControlError, FleetError, ResolveError};
use crate::lease::queue::LeaseQueue;
use crate::model::message::TaskOutbox;
use crate::model::{ControlMessage, TaskMessage};
use crate::spec::{FleetConfig, RemoteSpec, SharedSpec, WatchConfig};
use crate::view::event::ApplyReport;
use crate::view::log::LogRing;

#[derive(Debug)]
pub(super) struct ModelHandle {
    pub(super) leases: Arc<LeaseQueue>,
    pub(super) logs: Arc<LogRing>,
    pub(super) sender: TaskOutbox,
    pub(super) is_remote: bool,
}

impl ModelHandle {
    pub(super) fn send(&self, control: ControlMessage) {
        // Sending fails only if the task has ended, and then needs no message.
        self.sender.send(TaskMessage::Control(control));
    }

    pub(super) fn is_gone(&self) -> bool {
        self.sender.is_closed()
    }

    /// True if the configuration has this model too. Local and remote models with the same name differ.
    pub(super) fn stays_in(&self, config: &FleetConfig) -> bool {
        let name = self.leases.name();
        if self.is_remote { config.remote(name).is_some() } else { config.model(name).is_some() }
    }

    pub(super) async fn point_remote(&self, spec: &RemoteSpec) -> bool {
        let (reply, answer) = oneshot::channel();
        self.send(ControlMessage::PointRemote(Box::new(spec.clone()), reply));
        answer.await.unwrap_or(false)
    }

    async fn apply(&self, spec: &SharedSpec, watch: WatchConfig) -> bool {
        let (reply, answer) = oneshot::channel();
        self.send(ControlMessage::Apply(spec.clone(), Box::new(watch), reply));
        answer.await.unwrap_or(false)
    }

    /// Applies settings that differ from those in `before`, and adds the result to the report.
    pub(super) async fn apply_change(
        &self,
        before: &FleetConfig,
        spec: &SharedSpec,
        watch: WatchConfig,
        report: &mut ApplyReport,
    ) {
        let list = match before.model(&spec.name) {
            None => &mut report.added,
            Some(known) if known == spec => {
                if watch != before.watch {
                    self.apply(spec, watch).await;
                }
                &mut report.unchanged
            }
            Some(_) if self.apply(spec, watch).await => &mut report.restarted,
            Some(_) => &mut report.updated,
        };
        list.push(spec.name.clone());
    }

    pub(super) async fn command<T>(
        &self,
        control: impl FnOnce(oneshot::Sender<Result<T, ControlError>>) -> ControlMessage,
    ) -> Result<T, ControlError> {
        let (reply, answer) = oneshot::channel();
        self.send(control(reply));
        answer.await.unwrap_or(Err(ControlError::ShuttingDown))
    }
}

#[derive(Debug, Default)]
pub(super) struct ModelRoster {
    handles: Vec<Arc<ModelHandle>>,
    by_name: QuickMap<String, usize>,
    /// Canaries by their own names, which clients cannot use.
    canaries: QuickMap<ModelName, Arc<ModelHandle>>,
    any_name: bool,
}

impl ModelRoster {
    /// `handles`: models of the configuration in its order, without canaries.
    pub(super) fn new(
        config: &FleetConfig,
        handles: Vec<Arc<ModelHandle>>,
        canaries: QuickMap<ModelName, Arc<ModelHandle>>,
    ) -> Self {
        let by_name = configured_names(config).enumerate().flat_map(|(index, (name, aliases))| {
            let names = std::iter::once(name.as_str()).chain(aliases.iter().map(String::as_str));
            names.map(move |name| (name.to_owned(), index))
        });
        Self { by_name: by_name.collect(), handles, canaries, any_name: config.any_name }
    }

    pub(super) fn resolve(&self, name: Option<&str>) -> Result<ModelName, ResolveError> {
        let named = name.and_then(|name| self.by_name.get(name)).and_then(|index| self.handles.get(*index));
        let found = match self.handles.as_slice() {
            [only] if name.is_none() || self.any_name => Some(only),
            _ => named,
        };
        found.map(|handle| handle.leases.name().clone()).ok_or_else(|| match name {
            Some(name) => ResolveError::Unknown { name: name.to_owned(), known: self.all_names() },
            None => ResolveError::Missing { known: self.own_names() },
        })
    }

    /// Names without aliases, in configured order.
    pub(super) fn own_names(&self) -> Vec<String> {
        self.handles.iter().map(|handle| handle.leases.name().to_string()).collect()
    }

    /// Names in configured order, each followed by its aliases. Computed for each refusal, because a stored
    /// list would take memory in each of a thousand models.
    fn all_names(&self) -> Vec<String> {
        let own = |index: usize| self.handles.get(index).map(|handle| handle.leases.name().as_str());
        let mut names: Vec<(usize, bool, &String)> =
            self.by_name.iter().map(|(name, index)| (*index, own(*index) != Some(name), name)).collect();
        names.sort_unstable();
        names.into_iter().map(|(.., name)| name.clone()).collect()
    }

    pub(super) fn takes_any_name(&self) -> bool {
        self.any_name && self.handles.len() == 1
    }

    /// Finds a model by its own name, not by an alias.
    pub(super) fn get(&self, name: &ModelName) -> Option<&Arc<ModelHandle>> {
        let Some(index) = self.by_name.get(name.as_str()) else { return self.canaries.get(name) };
        self.handles.get(*index).filter(|handle| handle.leases.name() == name)
    }

    pub(super) fn canary(&self, name: &str) -> Option<&Arc<ModelHandle>> {
        self.canaries.iter().find(|(own, _)| own.as_str() == name).map(|(_, handle)| handle)
    }

    pub(super) fn canaries(&self) -> impl Iterator<Item = &Arc<ModelHandle>> {
        self.canaries.values()
    }

    pub(super) fn handles(&self) -> impl Iterator<Item = &Arc<ModelHandle>> {
        self.handles.iter()
    }
}

/// Checks that no two models share a name or alias.
pub(super) fn check_names(config: &FleetConfig) -> Result<(), FleetError> {
    let mut seen: HashMap<&str, &ModelName> = HashMap::new();
    let canaries = config.models.iter().filter(|spec| spec.canary_of.is_some());
    for (own, aliases) in configured_names(config).chain(canaries.map(|spec| (&spec.name, &spec.aliases))) {
        for name in std::iter::once(own.as_str()).chain(aliases.iter().map(String::as_str)) {
            match seen.insert(name, own) {
                // A model may repeat its own name among its aliases.
                Some(first) if first != own || (name == own.as_str() && is_twice(config, name)) => {
                    let (name, first) = (name.to_owned(), first.clone());
                    return Err(FleetError::DuplicateName { name, first, second: own.clone() });
                }
                _ => {}
            }
        }
    }
    Ok(())
}

fn is_twice(config: &FleetConfig, name: &str) -> bool {
    configured_names(config).filter(|(own, _)| own.as_str() == name).count() > 1
}

/// Names and aliases that clients can request, in listed order.
pub(super) fn configured_names(config: &FleetConfig) -> impl Iterator<Item = (&ModelName, &Vec<String>)> {
    let models = config.models.iter().filter(|spec| spec.canary_of.is_none());
    let models = models.map(|spec| (&spec.name, &spec.aliases));
    models.chain(config.remotes.iter().map(|spec| (&spec.name, &spec.aliases)))
}
