//! Address to which a generation's requests are sent.

use std::sync::Arc;

use crate::origin::RemoteOrigin;
use crate::process::endpoint::ListenAddress;

/// Address to which a generation's requests are sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaseAddress {
    /// A local process.
    Process(ListenAddress),
    /// A remote endpoint.
    Remote(Arc<RemoteOrigin>),
}

impl LeaseAddress {
    /// Address of a local process; `None` for a remote endpoint.
    pub(crate) fn endpoint(&self) -> Option<&ListenAddress> {
        match self {
            Self::Process(endpoint) => Some(endpoint),
            Self::Remote(_) => None,
        }
    }
}

impl From<ListenAddress> for LeaseAddress {
    fn from(endpoint: ListenAddress) -> Self {
        Self::Process(endpoint)
    }
}
