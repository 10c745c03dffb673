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

impl Address {
    /// Where a process of ours listens.
    pub(crate) fn endpoint(&self) -> Option<&Endpoint> {
        match self {
            Self::Process(endpoint) => Some(endpoint),
            Self::Remote(_) => None,
        }
    }
}

impl From<Endpoint> for Address {
    fn from(endpoint: Endpoint) -> Self {
        Self::Process(endpoint)
    }
}
