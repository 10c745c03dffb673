//! Where a generation takes requests.

use std::sync::Arc;

use crate::origin::Origin;
use crate::process::endpoint::Endpoint;

/// Where a generation takes requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A process of ours listens there.
    Process(Endpoint),
    /// Somebody else's endpoint.
    Remote(Arc<Origin>),
}

impl From<Endpoint> for Address {
    fn from(endpoint: Endpoint) -> Self {
        Self::Process(endpoint)
    }
}
