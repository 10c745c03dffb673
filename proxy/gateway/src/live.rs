//! Settings that may change while the gateway serves: rules of models, keys, allowed origins. A request
//! takes a snapshot when it begins and uses it until it ends.

use std::collections::BTreeMap;
use std::sync::Arc;

use arc_swap::ArcSwap;
use warden_policies::{HostNames, ModelName, QuickMap};

use crate::access::cors::CorsConfig;
use crate::access::keys::{ApiKeys, KeyCounts, KeyHash};
use crate::body::request_copy::BodyRecorder;
use crate::rules::{ModelRules, VirtualName};

/// A snapshot of the settings. [`Default`] has no rules.
#[derive(Clone, Debug)]
pub struct LiveConfig {
    /// Rules of models; a model without an entry has no rules.
    pub models: QuickMap<ModelName, Arc<ModelRules>>,
    /// Names that resolve to one of several models, or to a model with other rules than its own.
    pub by_name: BTreeMap<String, VirtualName>,
    /// Accepted keys; `None`: no key is required, and clients' credentials are passed on.
    pub keys: Option<ApiKeys>,
    /// CORS settings for web pages.
    pub cors: CorsConfig,
    /// Host names under which the gateway is reachable.
    pub names: HostNames,
    /// Recorders by model; requests of other models are not recorded.
    pub recorders: QuickMap<ModelName, Arc<dyn BodyRecorder>>,
}

impl Default for LiveConfig {
    fn default() -> Self {
        Self {
            models: QuickMap::default(),
            by_name: BTreeMap::new(),
            keys: None,
            cors: CorsConfig::default(),
            names: HostNames::Any,
            recorders: QuickMap::default(),
        }
    }
}

/// Changes the settings of a running gateway. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct GatewayControl {
    live: Arc<ArcSwap<LiveConfig>>,
}

impl GatewayControl {
    /// Sets the snapshot for requests that begin from now on. Keys with the same names keep their usage.
    pub fn update(&self, mut live: LiveConfig) {
        if let (Some(new), Some(old)) = (&mut live.keys, &self.current().keys) {
            *new = new.with_usage_of(old);
        }
        self.live.store(Arc::new(live));
    }

    /// Returns the current snapshot.
    pub(crate) fn current(&self) -> Arc<LiveConfig> {
        self.live.load_full()
    }

    /// Returns the name of the key with this hash, and whether it opens the operators' page; `None` if
    /// unknown.
    pub fn known_key(&self, hash: &KeyHash) -> Option<(Arc<str>, bool)> {
        let live = self.live.load();
        live.keys.as_ref()?.find_spec(hash).map(|key| (key.name.clone(), key.operator))
    }

    /// Returns the usage of each key since the start.
    pub fn key_counts(&self) -> Vec<KeyCounts> {
        self.live.load().keys.as_ref().map(ApiKeys::counts).unwrap_or_default()
    }
}
