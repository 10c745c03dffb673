//! Client connections: listening, accepting, limits and timeouts.

pub(crate) mod accept;
pub(crate) mod client_io;
pub(crate) mod connection;
pub(crate) mod error;
pub(crate) mod listener;
pub(crate) mod tls;
pub(crate) mod tls_files;

pub(crate) use self::accept::ConnectionAcceptor;
use self::client_io::ClientIo;
pub(crate) use self::error::GatewayError;
pub(crate) use self::listener::GatewayListener;
use self::tls::{ClientStream, HandshakeResult, announces_close, tcp_stream};
use self::tls_files::TlsError;
pub(crate) use self::tls_files::TlsState;
