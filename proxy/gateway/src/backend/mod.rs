//! The path to a backend: leases, connections, attempts. A request is sent again if it is certain that
//! nothing was executed. After the death of its server, a request is also sent again if it only computes an
//! answer and the client has no part of that answer.

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
