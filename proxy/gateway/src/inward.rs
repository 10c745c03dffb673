//! Connections from this process to its own gateway. They are served like a client's, without TLS, even while
//! another instance owns the listening sockets.
//!
//! A test request over such a connection shows that requests are answered, before any client depends on it.
//! No other program can use this path: the gateway serves only the other end of a connection that this
//! module made itself.

use std::io;
use std::net::Ipv4Addr;
use std::sync::Arc;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::observe::{GatewayObserver, RequestRecord};
use crate::requests::RequestRegistry;
use crate::shared::GatewayShared;

/// Connects to the gateway of this process. Cheap to clone; does not keep the gateway alive.
#[derive(Clone, Debug)]
pub struct InwardConnector(UnboundedSender<TcpStream>);

impl InwardConnector {
    pub(crate) fn new() -> (Self, UnboundedReceiver<TcpStream>) {
        let (sender, receiver) = unbounded_channel();
        (Self(sender), receiver)
    }

    /// Makes a connection that is served from now on. The caller sets the time limit.
    ///
    /// # Errors
    ///
    /// There is no loopback interface, the process has too many open files, or the gateway has ended.
    pub async fn connect(&self) -> io::Result<TcpStream> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let ours = TcpStream::connect(listener.local_addr()?).await?;
        let own = ours.local_addr()?;
        loop {
            let (theirs, peer) = listener.accept().await?;
            // Any program on this machine may connect to an open port, so check that the connection is the
            // one above.
            if peer == own {
                let ended = |_| io::Error::from(io::ErrorKind::BrokenPipe);
                return self.0.send(theirs).map_err(ended).map(|()| ours);
            }
        }
    }
}

/// Returns the state for such connections: the common state, but without log, counters and list of requests.
pub(crate) fn inward_state(all: &GatewayShared, workers: usize) -> GatewayShared {
    GatewayShared { observer: Arc::new(NullObserver), requests: RequestRegistry::new(workers), ..all.clone() }
}

struct NullObserver;

impl GatewayObserver for NullObserver {
    fn request_done(&self, _record: &RequestRecord) {}
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[tokio::test]
    async fn both_ends_are_ours_and_the_end_of_who_serves_is_told() {
        let (inward, mut served) = InwardConnector::new();
        let mut ours = inward.connect().await.unwrap();
        let mut theirs = served.recv().await.unwrap();
        ours.write_all(b"word").await.unwrap();
        let mut read = [0; 4];
        theirs.read_exact(&mut read).await.unwrap();
        assert_eq!(&read, b"word");
        drop(served);
        assert_eq!(inward.connect().await.unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    }
}
