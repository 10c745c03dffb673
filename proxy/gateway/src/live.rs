//! What may change while the gateway serves: rules of single models, keys, origins. A request takes
//! the picture of the moment when it begins and keeps it to its end.

use std::collections::BTreeMap;
use std::sync::Arc;

use arc_swap::ArcSwap;
use warden_policies::{ModelName, Names, QuickMap};

use crate::access::cors::Cors;
use crate::access::keys::{KeyCounts, KeyHash, Keys};
use crate::body::request_copy::Recorder;
use crate::rules::{ModelRules, Name};

/// The picture. [`Default`] is: no rules.
#[derive(Clone, Debug)]
pub struct Live {
    /// What is special about single models; one that is missing has no rules.
    pub models: QuickMap<ModelName, Arc<ModelRules>>,
    /// Names that mean one of several models, or one with other rules.
    pub by_name: BTreeMap<String, Name>,
    /// The keys that are asked for; `None`: none is, and what clients send passes on.
    pub keys: Option<Keys>,
    /// Which web pages may call.
    pub cors: Cors,
    /// By which host names we may be reached.
    pub names: Names,
    /// Who records the requests of a model; without one nothing is recorded.
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

/// Tells a running gateway. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Control {
    live: Arc<ArcSwap<Live>>,
}

impl Control {
    /// Requests that begin from now on see this. Keys of the same names go on with what they have used.
    pub fn update(&self, mut live: Live) {
        if let (Some(new), Some(old)) = (&mut live.keys, &self.now().keys) {
            *new = new.after(old);
        }
        self.live.store(Arc::new(live));
    }

    /// The picture of this moment.
    pub(crate) fn now(&self) -> Arc<Live> {
        self.live.load_full()
    }

    /// The name of a key that there is now, and whether it opens the page for operators.
    pub fn known_key(&self, hash: &KeyHash) -> Option<(Arc<str>, bool)> {
        let live = self.live.load();
        live.keys.as_ref()?.known(hash).map(|key| (key.name.clone(), key.operator))
    }

    /// What each key has used since the start.
    pub fn key_counts(&self) -> Vec<KeyCounts> {
        self.live.load().keys.as_ref().map(Keys::counts).unwrap_or_default()
    }
}
