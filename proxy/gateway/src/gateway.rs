//! The entry point of the gateway: listens and serves.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use warden_supervisor::Fleet;

use crate::backend::{LeaseProvider, UpstreamContext};
use crate::body::{BodyBudget, FingerprintKey};
use crate::client::{ConnectionAcceptor, GatewayError, GatewayListener, TlsState};
use crate::clock;
use crate::config::GatewayConfig;
use crate::observe::{GatewayGauges, GatewayObserver, RequestRecord};
use crate::page::OperatorPage;
use crate::requests::RequestRegistry;
use crate::shared::{GatewayControl, GatewayShared, StopTokens};
use crate::workers::{self, GatewayPulse, PulseQuestion, WorkerThreads};

/// The data plane.
#[derive(Debug)]
pub struct Gateway;

impl Gateway {
    /// Opens the listening sockets. Clients can connect from now on, but wait until [`BoundGateway::serve`]
    /// runs.
    ///
    /// # Errors
    ///
    /// An address, the certificate, the keys or the list of hosts is unusable.
    pub async fn bind(config: GatewayConfig) -> Result<BoundGateway, GatewayError> {
        Self::bind_or_adopt(config, Vec::new()).await
    }

    /// Like [`Self::bind`], but `sockets` that already listen, if any, replace host and port.
    ///
    /// # Errors
    ///
    /// A passed socket is unusable, or an error of [`Self::bind`].
    pub async fn bind_or_adopt(
        config: GatewayConfig,
        sockets: Vec<std::net::TcpListener>,
    ) -> Result<BoundGateway, GatewayError> {
        let tls = config.tls().map(TlsState::load).transpose()?;
        let listener = if sockets.is_empty() {
            GatewayListener::open(&config.server.host, config.server.port).await?
        } else {
            GatewayListener::adopt(sockets).map_err(GatewayError::Given)?
        };
        BoundGateway::new(config, tls.map(Arc::new), listener)
    }

    /// Like [`Self::bind`], with the listening sockets of another instance ([`BoundGateway::sockets`]), to
    /// which clients continue to connect.
    ///
    /// # Errors
    ///
    /// A passed socket is unusable, or an error of [`Gateway::bind`].
    pub fn inherit(config: GatewayConfig, sockets: Vec<OwnedFd>) -> Result<BoundGateway, GatewayError> {
        let tls = config.tls().map(TlsState::load).transpose()?;
        let listener = GatewayListener::adopt(sockets.into_iter().map(Into::into).collect())
            .map_err(GatewayError::Inherit)?;
        BoundGateway::new(config, tls.map(Arc::new), listener)
    }
}

/// A gateway that listens.
pub struct BoundGateway {
    config: GatewayConfig,
    listener: GatewayListener,
    workers: WorkerThreads,
    gauges: Arc<GatewayGauges>,
    control: GatewayControl,
    requests: RequestRegistry,
    tls: Option<Arc<TlsState>>,
    page: Option<Arc<dyn OperatorPage>>,
    inside: InsideCalls,
    begun: CancellationToken,
}

/// Channels for calls from this process: handles for the callers, receivers for the acceptor.
struct InsideCalls {
    pulse: GatewayPulse,
    questions: UnboundedReceiver<PulseQuestion>,
    inward: InwardConnector,
    connections: UnboundedReceiver<TcpStream>,
}

impl std::fmt::Debug for BoundGateway {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BoundGateway").field("listener", &self.listener).finish_non_exhaustive()
    }
}

impl BoundGateway {
    fn new(
        config: GatewayConfig,
        tls: Option<Arc<TlsState>>,
        listener: GatewayListener,
    ) -> Result<Self, GatewayError> {
        let threads = workers::thread_count(config.server.threads);
        let workers =
            WorkerThreads::start(threads).map_err(|source| GatewayError::Threads { threads, source })?;
        let (pulse, questions) = GatewayPulse::new(workers.probes());
        let (inward, connections) = InwardConnector::new();
        let begun = CancellationToken::new();
        begun.cancel();
        Ok(Self {
            config,
            listener,
            gauges: Arc::default(),
            control: GatewayControl::default(),
            requests: RequestRegistry::new(workers.len()),
            workers,
            tls,
            page: None,
            inside: InsideCalls { pulse, questions, inward, connections },
            begun,
        })
    }

    /// Returns the address of the first host, with the port in use.
    pub fn local_addr(&self) -> SocketAddr {
        self.listener.addresses[0]
    }

    /// Returns the addresses of all hosts.
    pub fn local_addrs(&self) -> &[SocketAddr] {
        &self.listener.addresses
    }

    /// Duplicates the listening sockets for the next instance.
    ///
    /// # Errors
    ///
    /// The process has too many open files.
    pub fn sockets(&self) -> io::Result<Vec<OwnedFd>> {
        self.listener.sockets()
    }

    /// Returns the gauges of current activity.
    pub fn gauges(&self) -> Arc<GatewayGauges> {
        self.gauges.clone()
    }

    /// Returns the handle for changing settings while the gateway serves.
    pub fn control(&self) -> GatewayControl {
        self.control.clone()
    }

    /// Returns the requests in flight and the last ended ones.
    pub fn requests(&self) -> RequestRegistry {
        self.requests.clone()
    }

    /// Returns the handle that checks whether the event loops respond, once the gateway serves.
    pub fn pulse(&self) -> GatewayPulse {
        self.inside.pulse.clone()
    }

    /// Returns the handle for connections from this process, which work once the gateway serves, even before
    /// it accepts clients.
    pub fn inward(&self) -> InwardConnector {
        self.inside.inward.clone()
    }

    /// Accepts clients only after `begun` is cancelled: until then, another instance has the sockets.
    #[must_use]
    pub fn accepting_from(self, begun: CancellationToken) -> Self {
        Self { begun, ..self }
    }

    /// Returns the TLS state, so that the caller can check the certificate files for changes.
    pub fn tls(&self) -> Option<Arc<TlsState>> {
        self.tls.clone()
    }

    /// Adds the operators' page, served while any key may open it.
    #[must_use]
    pub fn with_page(self, page: Arc<dyn OperatorPage>) -> Self {
        Self { page: Some(page), ..self }
    }

    /// Serves until `ends.stop` or `ends.retire` is cancelled, and returns after the last request has ended.
    /// To limit that wait, the caller drops the future, which cuts the running requests.
    pub async fn serve(self, fleet: Fleet, observer: Arc<dyn GatewayObserver>, ends: StopTokens) {
        self.serve_backends(Arc::new(fleet), observer, ends).await;
    }

    pub(crate) async fn serve_backends(
        self,
        backends: Arc<dyn LeaseProvider>,
        observer: Arc<dyn GatewayObserver>,
        ends: StopTokens,
    ) {
        let Self { config, mut listener, workers, gauges, tls, page, begun, .. } = self;
        let InsideCalls { mut questions, connections: mut calls, .. } = self.inside;
        let config = Arc::new(config);
        let hang_up = CancellationToken::new();
        let shared = GatewayShared {
            upstream: Arc::new(UpstreamContext::new(backends, config.clone(), workers.len())),
            budget: BodyBudget::new(gauges.clone(), config.server.buffered_bytes.in_memory()),
            observer,
            gauges,
            live: self.control,
            requests: self.requests,
            page,
            ends: ends.clone(),
            hang_up: hang_up.clone(),
            started: clock::unix_seconds(),
            prints: FingerprintKey::new(),
            config: config.clone(),
        };
        let inside = inward_state(&shared, workers.len());
        let inside = Arc::new(ConnectionAcceptor::new(Arc::new(inside), None));
        let acceptor = Arc::new(ConnectionAcceptor::new(Arc::new(shared), tls));
        let connections = TaskTracker::new();
        // Cut all running requests if this future is dropped.
        let cut = CancellationToken::new();
        let _cut_on_drop = cut.clone().drop_guard();
        let StopTokens { stop, retire } = ends;
        loop {
            let accepted = tokio::select! {
                biased;
                () = stop.cancelled() => break,
                () = retire.cancelled() => break,
                Some(question) = questions.recv() => {
                    // Sending fails only if the caller has gone.
                    let _left = question.send(());
                    continue;
                }
                Some(stream) = calls.recv() => {
                    hand_over(&workers, &inside, &connections, &cut, stream, Ipv4Addr::LOCALHOST.into());
                    continue;
                }
                () = begun.cancelled(), if !begun.is_cancelled() => continue,
                accepted = listener.accept(), if begun.is_cancelled() => accepted,
            };
            match accepted {
                Ok((stream, peer)) => {
                    hand_over(&workers, &acceptor, &connections, &cut, stream, peer.ip().to_canonical());
                }
                Err(error) if is_connection_error(&error) => {}
                Err(error) => {
                    tracing::warn!(%error, "cannot accept connections at the moment");
                    tokio::time::sleep(config.server.accept_pause).await;
                }
            }
        }
        let leaves = stop.is_cancelled() && !retire.is_cancelled() && begun.is_cancelled();
        if leaves {
            for (stream, peer) in listener.close_and_drain() {
                hand_over(&workers, &acceptor, &connections, &cut, stream, peer.ip().to_canonical());
            }
        }
        drop(listener);
        connections.close();
        let hang_up = async {
            stop.cancelled().await;
            tokio::time::sleep(config.server.stopped_keep_alive).await;
            hang_up.cancel();
            connections.wait().await;
        };
        tokio::select! {
            () = connections.wait() => {}
            () = hang_up => {}
        }
    }
}

/// Returns whether an accept error concerns only one connection, whose client has already gone.
fn is_connection_error(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted)
}

fn hand_over(
    workers: &WorkerThreads,
    acceptor: &Arc<ConnectionAcceptor>,
    connections: &TaskTracker,
    cut: &CancellationToken,
    stream: TcpStream,
    peer: IpAddr,
) {
    let stream = match stream.into_std() {
        Ok(stream) => stream,
        Err(error) => return tracing::debug!(%error, "cannot give a connection to a thread"),
    };
    let acceptor = acceptor.clone();
    let cut = cut.clone();
    let connections = connections.clone();
    // A stop must wait for the connection even if the worker has not begun yet.
    let begun = connections.token();
    workers.run_job(move |load| {
        match TcpStream::from_std(stream) {
            Ok(stream) => {
                let accepted = acceptor.accept(stream, peer);
                connections.spawn(async move {
                    let _load = load;
                    tokio::select! {
                        () = accepted.serve_connection() => {}
                        () = cut.cancelled() => {}
                    }
                });
            }
            Err(error) => tracing::debug!(%error, "a thread cannot take a connection"),
        }
        drop(begun);
    });
}

/// Connects to the gateway of this process, without keeping the gateway alive.
#[derive(Clone, Debug)]
pub struct InwardConnector(UnboundedSender<TcpStream>);

impl InwardConnector {
    pub(crate) fn new() -> (Self, UnboundedReceiver<TcpStream>) {
        let (sender, receiver) = unbounded_channel();
        (Self(sender), receiver)
    }

    /// Makes a connection that is served at once. The caller sets the time limit.
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
            // Any program may connect to an open port, so check that this is our own connection.
            if peer == own {
                let ended = |_| io::Error::from(io::ErrorKind::BrokenPipe);
                return self.0.send(theirs).map_err(ended).map(|()| ours);
            }
        }
    }
}

/// Returns the state for connections from this process: without log, counters and list of requests.
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
