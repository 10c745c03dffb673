//! Address to which a generation's requests are sent.

use std::sync::Arc;

use crate::origin::Origin;
use crate::process::endpoint::Endpoint;

/// Address to which a generation's requests are sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A local process.
    Process(Endpoint),
    /// A remote endpoint.
    Remote(Arc<Origin>),
}

impl Address {
    /// Address of a local process.
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
