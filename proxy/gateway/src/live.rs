//! What the gateway is told and may be told anew while it serves: rules of single models, keys, origins. A request takes
//! the picture of the moment when it begins and keeps it to its end.

use std::collections::HashMap;
use std::sync::Arc;

use arc_swap::ArcSwap;
use warden_policies::ModelName;

/// The picture. [`Default`] is: no rules.
#[derive(Clone, Debug, Default)]
pub struct Live {
    /// What is special about single models; one that is missing has no rules.
    pub models: HashMap<ModelName, Arc<ModelRules>>,
}

/// What is special about one model. [`Default`] is: nothing, its requests pass as they are.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModelRules {}

/// Tells a running gateway. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Control {
    live: Arc<ArcSwap<Live>>,
}

impl Control {
    /// Requests that begin from now on see this.
    pub fn update(&self, live: Live) {
        self.live.store(Arc::new(live));
    }

    /// The picture of this moment.
    #[expect(dead_code, reason = "the first rule will ask")]
    pub(crate) fn now(&self) -> Arc<Live> {
        self.live.load_full()
    }
}
