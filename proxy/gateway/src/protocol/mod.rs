//! Duties of an HTTP intermediary, and the code that reads and writes heads, fields, targets and events.
//! Nothing here knows about models.

pub(crate) mod cancelling;
pub(crate) mod conn_state;
pub(crate) mod fault;
pub(crate) mod headers;
pub(crate) mod prefix;
pub(crate) mod query;
pub(crate) mod raw_head;
pub(crate) mod sse;
pub(crate) mod wire;

/// Smallest buffer that hyper accepts, in bytes.
pub(crate) const LEAST_BUFFER: usize = 8192;
