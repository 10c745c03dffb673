//! The right to send one request to one generation of one model.

use std::any::Any;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use warden_policies::dispatch::LeaseKind;
use warden_policies::{GenerationId, ModelName, Work};

/// Where a generation listens.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Endpoint {
    /// A Unix socket.
    Unix(PathBuf),
}

/// The right to send one request to one generation. Dropping it gives it back, so it belongs into whatever ends with the
/// exchange: the response body.
#[derive(Debug)]
pub struct Lease {
    pub(crate) model: ModelName,
    pub(crate) generation: GenerationId,
    pub(crate) kind: LeaseKind,
    pub(crate) endpoint: Endpoint,
    pub(crate) queued_for: Duration,
}

impl Lease {
    /// The model.
    pub fn model(&self) -> &ModelName {
        &self.model
    }

    /// The generation.
    pub fn generation(&self) -> GenerationId {
        self.generation
    }

    /// What it is for.
    pub fn kind(&self) -> LeaseKind {
        self.kind
    }

    /// Where to send the request.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// How long the caller waited for it.
    pub fn queued_for(&self) -> Duration {
        self.queued_for
    }

    /// Adds work that this request caused, as the answer told it. May be called more than once.
    pub fn add_work(&self, work: Work) {
        let _ = work;
    }

    /// Bytes came from the backend: it lives, whatever its probes say.
    pub fn note_progress(&self) {}

    /// One value per generation and type, made at the first call and dropped with the generation: the gateway's pool of
    /// connections. `init` runs under a lock and must not block or take a lease.
    pub fn attachment<T: Any + Send + Sync>(&self, init: impl FnOnce() -> T) -> Arc<T> {
        Arc::new(init())
    }

    /// Resolves when the generation is told to end although this lease is held: the drain deadline has passed, or the
    /// process is killed. A request cut then has no better end to wait for.
    pub async fn revoked(&self) {
        std::future::pending::<()>().await;
    }
}
