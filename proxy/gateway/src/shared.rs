//! State that all requests share, and the settings that may change while the gateway serves: rules of models,
//! keys, allowed origins. A request uses the settings from its beginning until its end.

use std::collections::BTreeMap;
use std::sync::Arc;

use arc_swap::ArcSwap;
use tokio_util::sync::CancellationToken;
use warden_policies::{HostNames, ModelName, QuickMap};

use crate::access::{ApiKeys, CorsConfig, KeyCounts, KeyHash};
use crate::backend::UpstreamContext;
use crate::body::{BodyBudget, FingerprintKey};
use crate::config::GatewayConfig;
use crate::observe::{GatewayGauges, GatewayObserver};
use crate::page::OperatorPage;
use crate::requests::RequestRegistry;
use crate::rules::{ModelRules, VirtualName};

/// Tokens whose cancellation ends a gateway.
#[derive(Clone, Debug, Default)]
pub struct StopTokens {
    /// Stops the gateway: serves connections and requests made before the stop, closes idle connections, and
    /// lets running requests finish.
    pub stop: CancellationToken,
    /// Retires the gateway, because another instance has its listening sockets: accepts no more connections.
    /// Each connection gets an answer to one more request, or is closed after a long idle time.
    pub retire: CancellationToken,
}

#[derive(Clone)]
pub(crate) struct GatewayShared {
    pub(crate) config: Arc<GatewayConfig>,
    pub(crate) upstream: Arc<UpstreamContext>,
    pub(crate) observer: Arc<dyn GatewayObserver>,
    pub(crate) gauges: Arc<GatewayGauges>,
    pub(crate) budget: BodyBudget,
    pub(crate) live: GatewayControl,
    pub(crate) requests: RequestRegistry,
    pub(crate) page: Option<Arc<dyn OperatorPage>>,
    pub(crate) ends: StopTokens,
    /// Cancelled some time after `stop`: then connections without a request are closed.
    pub(crate) hang_up: CancellationToken,
    /// Start of the gateway in seconds since 1970.
    pub(crate) started: u64,
    pub(crate) prints: FingerprintKey,
}

/// A snapshot of the settings; [`Default`] has no rules.
#[derive(Clone, Debug)]
pub struct LiveConfig {
    /// Rules of models; a model without an entry has no rules.
    pub models: QuickMap<ModelName, Arc<ModelRules>>,
    /// Names that resolve to one of several models, or to a model with rules other than the model's.
    pub by_name: BTreeMap<String, VirtualName>,
    /// Accepted keys; `None`: no key is required, and clients' credentials are passed on.
    pub keys: Option<ApiKeys>,
    /// CORS settings for web pages.
    pub cors: CorsConfig,
    /// Host names under which the gateway is reachable.
    pub names: HostNames,
}

impl Default for LiveConfig {
    fn default() -> Self {
        Self {
            models: QuickMap::default(),
            by_name: BTreeMap::new(),
            keys: None,
            cors: CorsConfig::default(),
            names: HostNames::Any,
        }
    }
}

/// Changes the settings of a running gateway.
#[derive(Clone, Debug, Default)]
pub struct GatewayControl {
    live: Arc<ArcSwap<LiveConfig>>,
}

impl GatewayControl {
    /// Sets the snapshot for new requests. Keys with the same names keep their usage.
    pub fn update(&self, mut live: LiveConfig) {
        if let (Some(new), Some(old)) = (&mut live.keys, &self.current().keys) {
            *new = new.with_usage_of(old);
        }
        self.live.store(Arc::new(live));
    }

    pub(crate) fn current(&self) -> Arc<LiveConfig> {
        self.live.load_full()
    }

    /// Returns the name of the key with this hash, and whether it opens the operators' page.
    pub fn known_key(&self, hash: &KeyHash) -> Option<(Arc<str>, bool)> {
        let live = self.live.load();
        live.keys.as_ref()?.find_spec(hash).map(|key| (key.name.clone(), key.operator))
    }

    /// Returns the usage of each key since the start.
    pub fn key_counts(&self) -> Vec<KeyCounts> {
        self.live.load().keys.as_ref().map(ApiKeys::counts).unwrap_or_default()
    }
}
