//! Reload: applies a configuration to the set of models, and starts the tasks of new models.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use warden_policies::defaults;
use warden_policies::quarantine::QuarantinePolicy;
use warden_policies::{ModelName, QuickMap, ServerFacts};

use super::canary::with_canaries;
use super::roster::{self, ModelHandle, ModelRoster};
use super::{Fleet, FleetInner};
use crate::error::{FleetError, LeaseDenied};
use crate::lease::queue::{LeaseQueue, QueueRefusal};
use crate::model::{ControlMessage, ModelTask};
use crate::process::directories;
use crate::remote::RemoteTask;
use crate::spec::{CanarySpec, CommonConfig, FleetConfig, RemoteSpec, SharedSpec, WatchConfig};
use crate::sync::lock;
use crate::view::event::{ApplyReport, EventKind};
use crate::view::log::LogRing;

#[derive(Debug)]
pub(super) struct RosterChange {
    /// Present configuration, with canaries as models.
    pub(super) config: FleetConfig,
    /// Present configuration without canaries.
    pub(super) configured: FleetConfig,
    pub(super) canaries: BTreeMap<ModelName, CanarySpec>,
    /// Removed models that may still have processes.
    pub(super) leaving: Vec<Arc<ModelHandle>>,
}

impl RosterChange {
    /// `empty`: configuration without models.
    pub(super) fn new(empty: FleetConfig) -> Self {
        Self { config: empty.clone(), configured: empty, canaries: BTreeMap::new(), leaving: Vec::new() }
    }
}

impl Fleet {
    /// Applies a new configuration, and replaces processes only if their command changed. `known`: changes
    /// outside of the fleet, for the report.
    ///
    /// # Errors
    ///
    /// A name or alias is used twice, a socket path would be too long, or the fleet is shutting down.
    /// Nothing has changed then.
    pub async fn apply_with(
        &self,
        config: FleetConfig,
        known: ApplyReport,
    ) -> Result<ApplyReport, FleetError> {
        let config = with_absolute_paths(config);
        check_config(&config)?;
        let inner = Arc::clone(&self.inner);
        // A separate task applies the whole configuration even if the caller leaves.
        let task = self.inner.tasks.spawn(async move {
            let mut report = inner.take_over(config).await?;
            // For users, a model has also changed if only settings outside of the fleet did.
            report.updated.extend(report.unchanged.extract_if(.., |name| known.updated.contains(name)));
            report.changed.extend(known.changed);
            report.needs_restart.extend(known.needs_restart);
            let applied = EventKind::ConfigApplied { report: report.clone() };
            inner.context.records.journal.record(None, None, applied);
            Ok(report)
        });
        task.await.unwrap_or(Err(FleetError::ShuttingDown))
    }

    /// Stores measured facts about a model's binary, without a replacement. Does nothing if the model was
    /// removed or runs another binary.
    pub async fn learn_facts(&self, model: &ModelName, binary: &Path, facts: ServerFacts) {
        let mut change = self.inner.change.lock().await;
        let RosterChange { config, configured, .. } = &mut *change;
        let runs_it = |spec: &&mut SharedSpec| spec.name == *model && spec.command.binary == binary;
        for spec in config.models.iter_mut().chain(&mut configured.models).filter(runs_it) {
            spec.facts = facts;
        }
        // Leases on processes of removed models may still be held.
        let roster = self.inner.roster.load_full();
        for handle in roster.handles().chain(roster.canaries()).chain(&change.leaving) {
            if handle.leases.name() == model {
                handle.send(ControlMessage::LearnFacts(binary.to_owned(), facts));
            }
        }
    }
}

impl FleetInner {
    pub(super) async fn take_over(&self, config: FleetConfig) -> Result<ApplyReport, FleetError> {
        let mut change = self.change.lock().await;
        if self.ending.load(Ordering::SeqCst) {
            return Err(FleetError::ShuttingDown);
        }
        self.keep_canaries(&mut change, &config);
        self.canaries.retain_configured(&config);
        // This large future is rarely run, so box it to keep the caller's future small.
        Ok(Box::pin(self.put_in_place(&mut change, config)).await)
    }

    /// Adds, changes and removes models according to a configuration and the present canaries.
    pub(super) async fn put_in_place(
        &self,
        change: &mut RosterChange,
        configured: FleetConfig,
    ) -> ApplyReport {
        let config = with_canaries(&configured, &change.canaries);
        let mut report =
            ApplyReport { needs_restart: restart_needs(&change.config, &config), ..ApplyReport::default() };
        *lock(&self.context.common) = CommonConfig::from(&config);
        let old = self.roster.load_full();
        let shown = roster::configured_names(&config).map(|(name, _)| name.clone()).collect();
        let tried = config.models.iter().filter(|spec| spec.canary_of.is_some());
        self.context.records.publisher.set_order(shown, tried.map(|spec| spec.name.clone()).collect());
        // At the first start no step below waits for a model, so the pause is short.
        let is_first = old.handles().next().is_none();
        if is_first {
            self.context.records.publisher.set_paused(true);
        }
        // Removed models should free their memory for new ones early.
        let gone = self.begin_removal(&old, &config);
        let mut handles = Vec::with_capacity(config.models.len() + config.remotes.len());
        let mut canaries = QuickMap::default();
        for spec in &config.models {
            let known = old.get(&spec.name).filter(|handle| !handle.is_remote).cloned();
            let handle = known.unwrap_or_else(|| self.launch_model(spec, config.watch, !gone.is_empty()));
            if spec.canary_of.is_some() {
                // The report lists only configured models.
                let mut unlisted = ApplyReport::default();
                handle.apply_change(&change.config, spec, config.watch, &mut unlisted).await;
                canaries.insert(spec.name.clone(), handle);
            } else {
                handle.apply_change(&change.config, spec, config.watch, &mut report).await;
                handles.push(handle);
            }
        }
        for spec in &config.remotes {
            let known = old.get(&spec.name).filter(|handle| handle.is_remote).cloned();
            let handle = known.unwrap_or_else(|| self.launch_remote(spec));
            let list = match change.config.remote(&spec.name) {
                None => &mut report.added,
                Some(before) if before == spec => &mut report.unchanged,
                Some(_) if handle.point_remote(spec).await => &mut report.restarted,
                Some(_) => &mut report.updated,
            };
            list.push(spec.name.clone());
            handles.push(handle);
        }
        if is_first {
            self.context.records.publisher.set_paused(false);
        }
        // Store the new models first: clients of removed models must get "unknown model".
        self.roster.store(Arc::new(ModelRoster::new(&config, handles, canaries)));
        for handle in gone {
            // Refuse here and not in the model's task: no request may be accepted after this call.
            handle.leases.set_refusal(Some(QueueRefusal::Removed));
            handle.leases.refuse_waiting(&LeaseDenied::Removed);
            if old.canary(handle.leases.name().as_str()).is_none() {
                report.removed.push(handle.leases.name().clone());
            }
            change.leaving.push(handle);
        }
        change.leaving.retain(|handle| !handle.is_gone());
        // Keep settings that need a restart, so that the next reload reports them again.
        let (runtime_dir, state_dir) = (change.config.runtime_dir.clone(), change.config.state_dir.clone());
        change.config = FleetConfig { runtime_dir, state_dir, ..config };
        change.configured = configured;
        report
    }

    /// Begins to remove models that a configuration lacks, and returns them.
    fn begin_removal(&self, old: &ModelRoster, config: &FleetConfig) -> Vec<Arc<ModelHandle>> {
        let all = old.handles().chain(old.canaries());
        let gone: Vec<_> = all.filter(|handle| !handle.stays_in(config)).cloned().collect();
        for handle in &gone {
            if !handle.is_remote {
                self.context.leaving.fetch_add(1, Ordering::SeqCst);
            }
            handle.send(ControlMessage::Remove);
        }
        gone
    }

    /// `after_others`: the first process waits for the end of removed models.
    fn launch_model(&self, spec: &SharedSpec, watch: WatchConfig, after_others: bool) -> Arc<ModelHandle> {
        let leases = self.new_queue(&spec.name, &spec.requests.queue);
        leases.change_admission(|admit| {
            admit.set_policy(spec.requests.admission.mode, spec.requests.admission.policy.clone());
        });
        leases.ward.set_policy(spec.requests.quarantine);
        leases.is_canary.store(spec.canary_of.is_some(), Ordering::Relaxed);
        let logs = Arc::new(LogRing::new(spec.name.clone(), watch.child.log_lines));
        let will = lock(&self.will).as_mut().and_then(|will| will.take_model(spec.name.as_str()));
        let (context, queue, log) = (Arc::clone(&self.context), Arc::clone(&leases), Arc::clone(&logs));
        let (mut model, sender) = ModelTask::new(context, queue, log, spec.clone(), watch, will);
        if after_others {
            model.wait_for_room();
        }
        self.tasks.spawn(Box::new(model).run());
        Arc::new(ModelHandle { leases, logs, sender, is_remote: false })
    }

    fn launch_remote(&self, spec: &RemoteSpec) -> Arc<ModelHandle> {
        let leases = self.new_queue(&spec.name, &spec.queue);
        // A remote model has no process that a request could kill.
        leases.ward.set_policy(QuarantinePolicy { refuse_for: Duration::ZERO, ..defaults().quarantine });
        // A remote endpoint has no output to log.
        let logs = Arc::new(LogRing::new(spec.name.clone(), 0));
        let (remote, sender) = RemoteTask::new(Arc::clone(&self.context), Arc::clone(&leases), spec.clone());
        self.tasks.spawn(Box::new(remote).run());
        Arc::new(ModelHandle { leases, logs, sender, is_remote: true })
    }

    fn new_queue(&self, model: &ModelName, limits: &defaults::Queue) -> Arc<LeaseQueue> {
        let journal = Arc::clone(&self.context.records.journal);
        Arc::new(LeaseQueue::new(model.clone(), journal, limits.depth, limits.wait))
    }
}

fn restart_needs(before: &FleetConfig, now: &FleetConfig) -> Vec<String> {
    let (kept_before, kept_now) = (before.watch.child, now.watch.child);
    let settings = [
        ("runtime_dir", before.runtime_dir != now.runtime_dir),
        ("state_dir", before.state_dir != now.state_dir),
        ("events_kept", kept_before.events_kept != kept_now.events_kept),
        ("log_lines", kept_before.log_lines != kept_now.log_lines),
    ];
    settings.into_iter().filter(|(_, changed)| *changed).map(|(name, _)| name.to_owned()).collect()
}

/// Children have other working directories, so the path of the runtime directory has to be absolute.
pub(super) fn with_absolute_paths(mut config: FleetConfig) -> FleetConfig {
    if let Ok(path) = std::path::absolute(&config.runtime_dir) {
        config.runtime_dir = path;
    }
    config
}

/// Checks a configuration without access to the machine.
pub(super) fn check_config(config: &FleetConfig) -> Result<(), FleetError> {
    if let Some(spec) = config.models.iter().find(|spec| spec.run.replicas == 0) {
        return Err(FleetError::NoReplicas(spec.name.clone()));
    }
    roster::check_names(config)?;
    directories::check_sockets(config)
}
