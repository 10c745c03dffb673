//! State that all requests share.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use crate::backend::upstream::UpstreamContext;
use crate::body::budget::BodyBudget;
use crate::body::fingerprint::FingerprintKey;
use crate::config::GatewayConfig;
use crate::live::GatewayControl;
use crate::observe::{GatewayGauges, GatewayObserver};
use crate::page::OperatorPage;
use crate::requests::RequestRegistry;

#[derive(Clone)]
pub(crate) struct GatewayShared {
    pub(crate) config: Arc<GatewayConfig>,
    pub(crate) upstream: Arc<UpstreamContext>,
    pub(crate) observer: Arc<dyn GatewayObserver>,
    pub(crate) gauges: Arc<GatewayGauges>,
    pub(crate) budget: BodyBudget,
    pub(crate) live: GatewayControl,
    /// Requests in flight and the last ended ones.
    pub(crate) requests: RequestRegistry,
    /// The operators' page.
    pub(crate) page: Option<Arc<dyn OperatorPage>>,
    pub(crate) stop: CancellationToken,
    /// Cancelled some time after `stop`: connections without a request are then closed.
    pub(crate) hang_up: CancellationToken,
    /// Cancelled when another instance has taken over: each existing connection then gets at most one more
    /// request.
    pub(crate) retire: CancellationToken,
    /// Start of the gateway in seconds since 1970.
    pub(crate) started: u64,
    /// Key for fingerprints of requests.
    pub(crate) prints: FingerprintKey,
}
