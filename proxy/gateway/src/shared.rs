//! State that all requests share.

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
    /// Requests in flight and the last ended ones.
    pub(crate) requests: Requests,
    /// The operators' page.
    pub(crate) page: Option<Arc<dyn Page>>,
    pub(crate) stop: CancellationToken,
    /// Some time after `stop`: connections without a request are closed.
    pub(crate) hang_up: CancellationToken,
    /// Another instance has taken over: each existing connection gets at most one more request.
    pub(crate) retire: CancellationToken,
    /// Start of the gateway in seconds since 1970.
    pub(crate) started: u64,
    /// Key for fingerprints of requests.
    pub(crate) prints: PrintKey,
}
