//! What HTTP demands of somebody between a client and a server, and what is read and written for it: heads, fields, targets,
//! events. It knows nothing of models.

pub(crate) mod cancelling;
pub(crate) mod conn_state;
pub(crate) mod fault;
pub(crate) mod headers;
pub(crate) mod prefix;
pub(crate) mod query;
pub(crate) mod raw_head;
pub(crate) mod sse;
pub(crate) mod wire;

/// hyper works with no smaller buffer.
pub(crate) const LEAST_BUFFER: usize = 8192;
