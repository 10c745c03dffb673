//! The state from which the page is made: the admin state, and what all viewers share.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;
use warden_admin::state::AdminState;

use crate::hub::PageHub;

/// State of the page of one instance. Cheap to clone; clones share their viewers.
#[derive(Clone)]
pub struct PageState {
    pub(crate) admin: AdminState,
    pub(crate) hub: Arc<PageHub>,
}

impl PageState {
    /// Creates the state, without viewers.
    pub fn new(admin: AdminState) -> Self {
        Self { admin, hub: Arc::default() }
    }

    /// Returns the same state, whose streams end with another token.
    #[must_use]
    pub fn stopped_by(&self, stop: CancellationToken) -> Self {
        let admin = AdminState { stop, ..self.admin.clone() };
        Self { admin, hub: self.hub.clone() }
    }
}
