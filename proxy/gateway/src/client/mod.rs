//! Client connections: listening, accepting, limits and timeouts. Each request is passed to
//! [`crate::exchange`].

pub(crate) mod accept;
pub(crate) mod admission;
pub(crate) mod client_io;
pub(crate) mod connection;
pub(crate) mod error;
pub(crate) mod h2;
pub(crate) mod listener;
pub(crate) mod tls;
pub(crate) mod tls_files;
