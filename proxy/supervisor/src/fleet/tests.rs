//! Short forms of the fleet's functions, for tests.

use std::sync::Arc;

use warden_policies::ModelName;
use warden_policies::dispatch::LeaseKind;

use super::{Fleet, FleetInner};
use crate::error::{ControlError, FleetError, LeaseDenied};
use crate::lease::Lease;
use crate::lease::queue::ask::PromptFacts;
use crate::process::ProcessWorld;
use crate::spec::FleetConfig;
use crate::view::entry::ReclaimEntry;
use crate::view::event::ApplyReport;
use crate::view::ledger::LedgerEntry;

impl Fleet {
    pub(crate) async fn start_in(
        config: FleetConfig,
        world: Arc<dyn ProcessWorld>,
    ) -> Result<Self, FleetError> {
        Ok(Self { inner: FleetInner::start(config, world, None).await? })
    }

    pub(crate) async fn lease(&self, model: &ModelName, kind: LeaseKind) -> Result<Lease, LeaseDenied> {
        self.lease_for(model, kind, PromptFacts::default()).await
    }

    pub(crate) async fn apply(&self, config: FleetConfig) -> Result<ApplyReport, FleetError> {
        self.apply_with(config, ApplyReport::default()).await
    }

    pub(crate) async fn restart(&self, model: &str) -> Result<Vec<LedgerEntry>, ControlError> {
        self.restart_by(model, None).await
    }

    pub(crate) async fn drain(&self, model: &str) -> Result<(), ControlError> {
        self.drain_by(model, None).await
    }

    pub(crate) async fn reclaim(&self, model: &str) -> Result<Vec<ReclaimEntry>, ControlError> {
        self.reclaim_by(model, None).await
    }
}
