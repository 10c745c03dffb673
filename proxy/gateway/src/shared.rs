//! What all requests share.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use crate::backend::upstream::Upstream;
use crate::body::budget::Budget;
use crate::body::fingerprint::PrintKey;
use crate::config::GatewayConfig;
use crate::live::Control;
use crate::observe::{Gauges, Observer};
use crate::page::Page;
use crate::requests::Requests;

#[derive(Clone)]
pub(crate) struct Shared {
    pub(crate) config: Arc<GatewayConfig>,
    pub(crate) upstream: Arc<Upstream>,
    pub(crate) observer: Arc<dyn Observer>,
    pub(crate) gauges: Arc<Gauges>,
    pub(crate) budget: Budget,
    pub(crate) live: Control,
    /// Those in flight, and those that ended last.
    pub(crate) requests: Requests,
    /// The page for operators.
    pub(crate) page: Option<Arc<dyn Page>>,
    pub(crate) stop: CancellationToken,
    /// A while after `stop`: connections without a request are closed.
    pub(crate) hang_up: CancellationToken,
    /// Another instance has taken our place: a connection that is here has one more request at most.
    pub(crate) retire: CancellationToken,
    /// Seconds since 1970.
    pub(crate) started: u64,
    /// What requests are known by.
    pub(crate) prints: PrintKey,
}
