//! The entry point of the gateway: listens and serves.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use tokio::net::TcpStream;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use warden_supervisor::Fleet;

use crate::backend::backends::LeaseProvider;
use crate::backend::upstream::UpstreamContext;
use crate::body::budget::BodyBudget;
use crate::body::fingerprint::FingerprintKey;
use crate::client::accept::ConnectionAcceptor;
use crate::client::error::GatewayError;
use crate::client::listener::GatewayListener;
use crate::client::tls_files::TlsState;
use crate::clock;
use crate::config::GatewayConfig;
use crate::inward::{self, InwardConnector};
use crate::live::GatewayControl;
use crate::observe::{GatewayGauges, GatewayObserver};
use crate::page::OperatorPage;
use crate::pulse::{GatewayPulse, PulseQuestion};
use crate::requests::RequestRegistry;
use crate::shared::GatewayShared;
use crate::workers::{self, WorkerThreads};

/// The data plane, which serves clients.
#[derive(Debug)]
pub struct Gateway;

impl Gateway {
    /// Opens the listening sockets. Clients can connect from now on, and are served once [`BoundGateway::serve`]
    /// runs.
    ///
    /// # Errors
    ///
    /// An address cannot be listened on, or the certificate, the keys or the list of hosts is unusable.
    pub async fn bind(config: GatewayConfig) -> Result<BoundGateway, GatewayError> {
        Self::bind_or_adopt(config, Vec::new()).await
    }

    /// Like [`Self::bind`], but uses `sockets` that already listen instead of host and port. Opens its own
    /// sockets if `sockets` is empty.
    ///
    /// # Errors
    ///
    /// A passed socket is unusable, or an error of [`Self::bind`].
    pub async fn bind_or_adopt(
        config: GatewayConfig,
        sockets: Vec<std::net::TcpListener>,
    ) -> Result<BoundGateway, GatewayError> {
        let tls = config.tls().map(|files| TlsState::load(files, config.server.h2)).transpose()?;
        let listener = if sockets.is_empty() {
            GatewayListener::open(&config.server.host, config.server.port).await?
        } else {
            GatewayListener::adopt(sockets).map_err(GatewayError::Given)?
        };
        BoundGateway::new(config, tls.map(Arc::new), listener)
    }

    /// Like [`Self::bind`], with the listening sockets of another instance ([`BoundGateway::sockets`]), to which
    /// clients continue to connect.
    ///
    /// # Errors
    ///
    /// A passed socket is unusable, or an error of [`Gateway::bind`].
    pub fn inherit(config: GatewayConfig, sockets: Vec<OwnedFd>) -> Result<BoundGateway, GatewayError> {
        let tls = config.tls().map(|files| TlsState::load(files, config.server.h2)).transpose()?;
        let listener = GatewayListener::adopt(sockets.into_iter().map(Into::into).collect())
            .map_err(GatewayError::Inherit)?;
        BoundGateway::new(config, tls.map(Arc::new), listener)
    }
}

/// Tokens whose cancellation ends a gateway.
#[derive(Clone, Debug, Default)]
pub struct StopTokens {
    /// Stops the gateway: it still accepts connections made before the stop, answers requests sent before
    /// the stop, closes idle connections, and lets running requests finish.
    pub stop: CancellationToken,
    /// Retires the gateway, because another instance has its listening sockets: it accepts no more
    /// connections. Each existing connection gets an answer to one more request, or is closed after a long
    /// idle time.
    pub retire: CancellationToken,
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
    pulse: GatewayPulse,
    asked: UnboundedReceiver<PulseQuestion>,
    inward: InwardConnector,
    from_inside: UnboundedReceiver<TcpStream>,
    begun: CancellationToken,
}

impl std::fmt::Debug for BoundGateway {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bound").field("listener", &self.listener).finish_non_exhaustive()
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
        let (gauges, control) = (Arc::default(), GatewayControl::default());
        let requests = RequestRegistry::new(workers.len());
        let (pulse, asked) = GatewayPulse::new(workers.probes());
        let (inward, from_inside) = InwardConnector::new();
        let begun = CancellationToken::new();
        begun.cancel();
        let page = None;
        Ok(Self {
            config,
            listener,
            workers,
            gauges,
            control,
            requests,
            tls,
            page,
            pulse,
            asked,
            inward,
            from_inside,
            begun,
        })
    }

    /// Returns the address of the first host, with the port in use.
    pub fn local_addr(&self) -> SocketAddr {
        self.listener.addresses()[0]
    }

    /// Returns the addresses of all hosts.
    pub fn local_addrs(&self) -> &[SocketAddr] {
        self.listener.addresses()
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

    /// Returns the handle that checks whether the gateway's event loops respond; usable once the gateway
    /// serves.
    pub fn pulse(&self) -> GatewayPulse {
        self.pulse.clone()
    }

    /// Returns the handle for connecting to the gateway from this process; usable once the gateway serves,
    /// even before it accepts clients.
    pub fn inward(&self) -> InwardConnector {
        self.inward.clone()
    }

    /// Accepts clients only once `begun` is cancelled: until then the sockets belong to another instance.
    #[must_use]
    pub fn accepting_from(self, begun: CancellationToken) -> Self {
        Self { begun, ..self }
    }

    /// Returns the TLS state, if TLS is used, so that the caller can check the certificate files for changes.
    pub fn tls(&self) -> Option<Arc<TlsState>> {
        self.tls.clone()
    }

    /// Adds the operators' page. The page is served while any key has the right to open it.
    #[must_use]
    pub fn with_page(self, page: Arc<dyn OperatorPage>) -> Self {
        Self { page: Some(page), ..self }
    }

    /// Serves until `ends.stop` or `ends.retire` is cancelled (see [`StopTokens`]), and returns when the last
    /// request has ended. The caller limits that wait by dropping the future, which cuts the running
    /// requests.
    pub async fn serve(self, fleet: Fleet, observer: Arc<dyn GatewayObserver>, ends: StopTokens) {
        self.serve_backends(Arc::new(fleet), observer, ends).await;
    }

    pub(crate) async fn serve_backends(
        self,
        backends: Arc<dyn LeaseProvider>,
        observer: Arc<dyn GatewayObserver>,
        ends: StopTokens,
    ) {
        let StopTokens { stop, retire } = ends;
        let hang_up = CancellationToken::new();
        let (workers, mut listener, mut asked) = (self.workers, self.listener, self.asked);
        let (begun, mut from_inside) = (self.begun, self.from_inside);
        let config = Arc::new(self.config);
        let shared = GatewayShared {
            upstream: Arc::new(UpstreamContext::new(backends, config.clone(), workers.len())),
            budget: BodyBudget::new(self.gauges.clone(), config.server.buffered_bytes.in_memory()),
            config,
            observer,
            gauges: self.gauges,
            live: self.control,
            requests: self.requests,
            page: self.page,
            stop: stop.clone(),
            hang_up: hang_up.clone(),
            retire: retire.clone(),
            started: clock::unix_seconds(),
            prints: FingerprintKey::new(),
        };
        let (pause, grace) = (shared.config.server.accept_pause, shared.config.server.stopped_keep_alive);
        let inside = inward::inward_state(&shared, workers.len());
        let inside = Arc::new(ConnectionAcceptor::new(Arc::new(inside), None));
        let acceptor = Arc::new(ConnectionAcceptor::new(Arc::new(shared), self.tls));
        let connections = TaskTracker::new();
        // If this future is dropped, cut all running requests.
        let cut = CancellationToken::new();
        let _cut_on_drop = cut.clone().drop_guard();
        loop {
            let accepted = tokio::select! {
                biased;
                () = stop.cancelled() => break,
                () = retire.cancelled() => break,
                Some(question) = asked.recv() => {
                    // Sending fails if the caller has gone, which does not matter.
                    let _left = question.send(());
                    continue;
                }
                Some(stream) = from_inside.recv() => {
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
                    tokio::time::sleep(pause).await;
                }
            }
        }
        let leaves = stop.is_cancelled() && !retire.is_cancelled() && begun.is_cancelled();
        for (stream, peer) in if leaves { listener.close_and_drain() } else { Vec::new() } {
            hand_over(&workers, &acceptor, &connections, &cut, stream, peer.ip().to_canonical());
        }
        drop(listener);
        connections.close();
        let hang_up = async {
            stop.cancelled().await;
            tokio::time::sleep(grace).await;
            hang_up.cancel();
            connections.wait().await;
        };
        tokio::select! {
            () = connections.wait() => {}
            () = hang_up => {}
        }
    }
}

/// Returns whether an accept error concerns one connection only, because its client has already gone.
fn is_connection_error(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted)
}

/// Passes a connection to one of the worker threads.
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
    let (acceptor, cut, connections) = (acceptor.clone(), cut.clone(), connections.clone());
    // Count the connection from now on, so that a stop waits for it even if the worker has not begun yet.
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
