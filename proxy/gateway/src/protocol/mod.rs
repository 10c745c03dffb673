//! Duties of an HTTP intermediary, and the code to read and write heads, fields, targets and events. It
//! knows nothing about models.

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
