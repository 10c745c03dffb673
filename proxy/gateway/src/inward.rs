//! Connections that we make to ourselves: they are served like those of clients, without TLS, whoever has the listening sockets.
//!
//! So it is seen that a request is answered before anybody's depends on it. Nobody else can come in this way: what is served is the other
//! end of a connection that was made here.

use std::io;
use std::net::Ipv4Addr;
use std::sync::Arc;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::observe::{Observer, Record};
use crate::requests::Requests;
use crate::shared::Shared;

/// Makes us a client of our own data plane. Cheap to clone, and keeps nothing alive.
#[derive(Clone, Debug)]
pub struct Inward(UnboundedSender<TcpStream>);

impl Inward {
    pub(crate) fn new() -> (Self, UnboundedReceiver<TcpStream>) {
        let (sender, receiver) = unbounded_channel();
        (Self(sender), receiver)
    }

    /// A connection that is served from now on. What bounds the time is the caller's.
    ///
    /// # Errors
    ///
    /// There is no loopback here, there are too many open files, or the data plane has ended.
    pub async fn connect(&self) -> io::Result<TcpStream> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        let ours = TcpStream::connect(listener.local_addr()?).await?;
        let own = ours.local_addr()?;
        loop {
            let (theirs, peer) = listener.accept().await?;
            // Anybody on this machine may connect to an open port: who is not us is not served.
            if peer == own {
                let ended = |_| io::Error::from(io::ErrorKind::BrokenPipe);
                return self.0.send(theirs).map_err(ended).map(|()| ours);
            }
        }
    }
}

/// What such a connection shares with all others: everything, but it is in no log, no count and no list of requests.
pub(crate) fn shared(all: &Shared, workers: usize) -> Shared {
    Shared { observer: Arc::new(Nobody), requests: Requests::new(workers), ..all.clone() }
}

struct Nobody;

impl Observer for Nobody {
    fn request_done(&self, _record: &Record) {}
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[tokio::test]
    async fn both_ends_are_ours_and_the_end_of_who_serves_is_told() {
        let (inward, mut served) = Inward::new();
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
