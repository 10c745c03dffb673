//! Settings that may change while the gateway serves: rules of models, keys, origins. A request takes a
//! snapshot when it begins and keeps it to its end.

use std::collections::BTreeMap;
use std::sync::Arc;

use arc_swap::ArcSwap;
use warden_policies::{ModelName, Names, QuickMap};

use crate::access::cors::Cors;
use crate::access::keys::{KeyCounts, KeyHash, Keys};
use crate::body::request_copy::Recorder;
use crate::rules::{ModelRules, Name};

/// The snapshot. [`Default`] has no rules.
#[derive(Clone, Debug)]
pub struct Live {
    /// Rules of models; a missing model has none.
    pub models: QuickMap<ModelName, Arc<ModelRules>>,
    /// Names that resolve to one of several models, or to one with other rules.
    pub by_name: BTreeMap<String, Name>,
    /// Accepted keys; `None`: no key is required, and clients' credentials are passed on.
    pub keys: Option<Keys>,
    /// CORS settings for web pages.
    pub cors: Cors,
    /// Host names under which the gateway is reachable.
    pub names: Names,
    /// Recorders by model; requests of other models are not recorded.
    pub recorders: QuickMap<ModelName, Arc<dyn Recorder>>,
}

impl Default for Live {
    fn default() -> Self {
        Self {
            models: QuickMap::default(),
            by_name: BTreeMap::new(),
            keys: None,
            cors: Cors::default(),
            names: Names::Any,
            recorders: QuickMap::default(),
        }
    }
}

/// Changes the settings of a running gateway. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Control {
    live: Arc<ArcSwap<Live>>,
}

impl Control {
    /// Sets the snapshot for requests that begin from now on. Keys with the same names keep their usage.
    pub fn update(&self, mut live: Live) {
        if let (Some(new), Some(old)) = (&mut live.keys, &self.now().keys) {
            *new = new.after(old);
        }
        self.live.store(Arc::new(live));
    }

    /// Returns the current snapshot.
    pub(crate) fn now(&self) -> Arc<Live> {
        self.live.load_full()
    }

    /// Returns the name of a current key, and whether it opens the operators' page.
    pub fn known_key(&self, hash: &KeyHash) -> Option<(Arc<str>, bool)> {
        let live = self.live.load();
        live.keys.as_ref()?.known(hash).map(|key| (key.name.clone(), key.operator))
    }

    /// Returns the usage of each key since the start.
    pub fn key_counts(&self) -> Vec<KeyCounts> {
        self.live.load().keys.as_ref().map(Keys::counts).unwrap_or_default()
    }
}
