//! All models by name: the entry point of everything.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::{broadcast, watch};
use warden_policies::ModelName;
use warden_policies::dispatch::LeaseKind;

use crate::error::{ControlError, Denied, FleetError, ResolveError};
use crate::event::{Event, EventTail};
use crate::lease::Lease;
use crate::ledger::LedgerEntry;
use crate::log::LogTail;
use crate::nursery::NurseryHandle;
use crate::spec::FleetConfig;
use crate::view::FleetView;

/// What a reload changed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ApplyReport {
    /// New models.
    pub added: Vec<ModelName>,
    /// Models that drain and stop.
    pub removed: Vec<ModelName>,
    /// Models whose processes are replaced, because their command changed.
    pub restarted: Vec<ModelName>,
    /// Models whose other settings changed, in place.
    pub updated: Vec<ModelName>,
    /// Models that did not change.
    pub unchanged: Vec<ModelName>,
    /// Settings that need a restart of the supervisor to take effect.
    pub needs_restart: Vec<String>,
}

/// All models. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Fleet {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    ledger: PathBuf,
    views: watch::Sender<Arc<FleetView>>,
    events: broadcast::Sender<Event>,
}

impl Fleet {
    /// Makes the directories, opens the ledger and starts a task for each model. Preloading begins in the background.
    pub async fn start(config: FleetConfig, nursery: NurseryHandle) -> Result<Self, FleetError> {
        drop(nursery);
        let views = watch::Sender::new(Arc::default());
        let inner =
            Inner { ledger: config.state_dir.join("ledger.jsonl"), views, events: broadcast::Sender::new(1) };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The model that a client's name means: a name, an alias, or with `any_name` anything. Without a name, the only model.
    pub fn resolve(&self, name: Option<&str>) -> Result<ModelName, ResolveError> {
        Err(match name {
            Some(name) => ResolveError::Unknown { name: name.to_owned(), known: Vec::new() },
            None => ResolveError::Missing { known: Vec::new() },
        })
    }

    /// Waits for the right to send one request to the model. Starts the model if need be.
    ///
    /// Callers of one kind are served in the order in which they came. Dropping the future gives up the place, or the
    /// lease if it was granted meanwhile.
    pub async fn lease(&self, model: &ModelName, kind: LeaseKind) -> Result<Lease, Denied> {
        let _ = (model, kind);
        Err(Denied::Removed)
    }

    /// The fleet now.
    pub fn view(&self) -> Arc<FleetView> {
        self.inner.views.borrow().clone()
    }

    /// The fleet at every change.
    pub fn subscribe(&self) -> watch::Receiver<Arc<FleetView>> {
        self.inner.views.subscribe()
    }

    /// Replaces every process of a model, one after another. Resolves when the new ones serve and the old ones are gone.
    /// Clears `failed`, the backoff and what holds the policy back.
    pub async fn restart(&self, model: &str) -> Result<Vec<LedgerEntry>, ControlError> {
        self.resolve(Some(model))?;
        Ok(Vec::new())
    }

    /// Drains and stops a model; resolves when its processes are gone. The next request starts it again.
    pub async fn drain(&self, model: &str) -> Result<(), ControlError> {
        self.resolve(Some(model))?;
        Ok(())
    }

    /// Takes over a new configuration.
    pub async fn apply(&self, config: FleetConfig) -> Result<ApplyReport, FleetError> {
        drop(config);
        Ok(ApplyReport::default())
    }

    /// Ends everything: no new leases, running ones (and queued ones that a backend can take) go on until the deadline,
    /// then TERM, the grace, KILL. All children are reaped when it returns.
    pub async fn shutdown(&self, deadline: Duration) {
        let _ = deadline;
    }

    /// The output of a model's processes; `None` if there is no such model.
    pub fn logs(&self, model: &str) -> Option<LogTail> {
        self.resolve(Some(model)).ok()?;
        None
    }

    /// What happened and what will.
    pub fn events(&self) -> EventTail {
        EventTail { events: Vec::new(), receiver: self.inner.events.subscribe() }
    }

    /// Where the ledger is.
    pub fn ledger_path(&self) -> &Path {
        &self.inner.ledger
    }
}
