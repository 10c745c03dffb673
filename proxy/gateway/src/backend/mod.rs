//! The path to a backend: leases, connections, attempts. A request is sent again with proof that nothing
//! was executed. A request is also sent once more after its server died, if it only computes an answer of
//! which the client has nothing.

pub(crate) mod again;
pub(crate) mod attempts;
pub(crate) mod backends;
pub(crate) mod checkpoint;
pub(crate) mod conn_waker;
pub(crate) mod line_limits;
pub(crate) mod message;
pub(crate) mod pool;
pub(crate) mod request_body;
mod tried;
pub(crate) mod unread_body;
pub(crate) mod upstream;
pub(crate) mod upstream_conn;
