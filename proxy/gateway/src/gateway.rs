//! Listening and serving: the entry point.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use warden_supervisor::Fleet;

use crate::backends::Backends;
use crate::budget::{Budget, Share};
use crate::clock;
use crate::config::GatewayConfig;
use crate::doors::Doors;
use crate::fingerprint::PrintKey;
use crate::front::{self, Front};
use crate::limits::Limit;
use crate::live::Control;
use crate::observe::{Gauges, Observer};
use crate::pool::{Pool, PoolLimits};
use crate::tls_files::{Tls, TlsError};
use crate::workers::{self, Load, Workers};

/// Why the gateway cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum GatewayError {
    /// The host name means nothing.
    #[error(
        "cannot listen on {host}:{port}: the host name does not resolve ({source}); use an address of this machine, like 127.0.0.1, or 0.0.0.0 for all of them"
    )]
    Resolve {
        /// The host.
        host: String,
        /// The port.
        port: u16,
        /// Why.
        source: io::Error,
    },
    /// Somebody else listens there.
    #[error(
        "cannot listen on {address}: another program already does; stop it (`ss -ltnp sport = :{}` shows it) or choose another port with --port", address.port()
    )]
    InUse {
        /// The address.
        address: SocketAddr,
    },
    /// The address is not this machine's.
    #[error(
        "cannot listen on {address}: it is not an address of this machine; choose another with --host (`ip addr` lists them)"
    )]
    NotOurs {
        /// The address.
        address: SocketAddr,
    },
    /// The port needs rights.
    #[error(
        "cannot listen on {address}: not permitted; ports below 1024 need CAP_NET_BIND_SERVICE, choose a higher one with --port"
    )]
    NotPermitted {
        /// The address.
        address: SocketAddr,
    },
    /// Certificate or key cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// Anything else.
    #[error("cannot listen on {address}: {source}; choose another address with --host and --port")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// No threads to serve with.
    #[error("cannot start {threads} threads to serve with: {source}; set fewer with `server.threads`")]
    Threads {
        /// How many.
        threads: usize,
        /// Why.
        source: io::Error,
    },
}

/// hyper works with no smaller buffer.
pub(crate) const LEAST_BUFFER: usize = 8192;

/// The data plane.
#[derive(Debug)]
pub struct Gateway;

impl Gateway {
    /// Opens the listening sockets. Clients can connect from now on, and are served when [`Bound::serve`] runs.
    ///
    /// # Errors
    ///
    /// An address cannot be listened on, or the certificate, the keys or the list of hosts cannot be used.
    pub async fn bind(config: GatewayConfig) -> Result<Bound, GatewayError> {
        let front = Front::new(&config)?;
        let doors = Doors::open(&config.host, config.port).await?;
        Bound::new(config, front, doors)
    }
}

/// A gateway that listens.
#[derive(Debug)]
pub struct Bound {
    config: GatewayConfig,
    doors: Doors,
    workers: Workers,
    gauges: Arc<Gauges>,
    control: Control,
    front: Front,
}

/// What all requests share.
pub(crate) struct Shared {
    pub(crate) front: Front,
    pub(crate) config: GatewayConfig,
    pub(crate) backends: Arc<dyn Backends>,
    pub(crate) observer: Arc<dyn Observer>,
    pub(crate) gauges: Arc<Gauges>,
    pub(crate) budget: Budget,
    pub(crate) live: Control,
    pub(crate) stop: CancellationToken,
    /// Seconds since 1970.
    pub(crate) started: u64,
    threads: usize,
    /// What requests are known by.
    pub(crate) prints: PrintKey,
    pub(crate) upstream: TaskTracker,
    peers: Mutex<HashMap<IpAddr, Known>>,
}

/// A client by its address.
#[derive(Clone, Debug)]
pub(crate) struct Peer {
    pub(crate) ip: IpAddr,
    /// What is held of the bodies that come from there.
    pub(crate) held: Arc<Share>,
}

/// An address that connections are open from.
#[derive(Debug, Default)]
struct Known {
    open: usize,
    held: Arc<Share>,
}

impl Shared {
    /// The connections to one generation.
    pub(crate) fn new_pool(&self) -> Pool {
        let limits = PoolLimits {
            connect: self.config.connect_timeout,
            idle: self.config.idle_timeout,
            kept: self.config.idle_connections,
            kept_unknown: self.config.idle_connections_unknown,
            head: self.config.header_bytes.max(LEAST_BUFFER),
        };
        Pool::new(self.threads, limits, self.upstream.clone())
    }
}

impl Bound {
    fn new(config: GatewayConfig, front: Front, doors: Doors) -> Result<Self, GatewayError> {
        let threads = workers::threads(config.threads);
        let workers = Workers::start(threads).map_err(|source| GatewayError::Threads { threads, source })?;
        let (gauges, control) = (Arc::default(), Control::default());
        Ok(Self { config, doors, workers, gauges, control, front })
    }

    /// The address of the first host, with the port that was chosen.
    pub fn local_addr(&self) -> SocketAddr {
        self.doors.addresses()[0]
    }

    /// The addresses of all hosts.
    pub fn local_addrs(&self) -> &[SocketAddr] {
        self.doors.addresses()
    }

    /// What is going on now.
    pub fn gauges(&self) -> Arc<Gauges> {
        self.gauges.clone()
    }

    /// Tells it what may change while it serves.
    pub fn control(&self) -> Control {
        self.control.clone()
    }

    /// The certificate, if clients speak TLS: to look from time to time whether its files have changed.
    pub fn tls(&self) -> Option<Arc<Tls>> {
        self.front.tls.clone()
    }

    /// Serves until `stop` is cancelled. Then it accepts nobody any more, closes idle connections, lets running requests
    /// finish, and returns when the last one has. The caller bounds that wait by dropping the future, which cuts what
    /// still runs.
    pub async fn serve(self, fleet: Fleet, observer: Arc<dyn Observer>, stop: CancellationToken) {
        self.serve_backends(Arc::new(fleet), observer, stop).await;
    }

    pub(crate) async fn serve_backends(
        self,
        backends: Arc<dyn Backends>,
        observer: Arc<dyn Observer>,
        stop: CancellationToken,
    ) {
        let shared = Arc::new(Shared {
            front: self.front,
            budget: Budget::new(self.gauges.clone(), self.config.buffered_bytes),
            backends,
            observer,
            gauges: self.gauges,
            live: self.control,
            stop: stop.clone(),
            started: clock::unix_seconds(),
            threads: self.workers.len(),
            prints: PrintKey::new(),
            upstream: TaskTracker::new(),
            peers: Mutex::default(),
            config: self.config,
        });
        let (workers, mut doors) = (self.workers, self.doors);
        let connections = TaskTracker::new();
        // Dropped with this future: then everything that still runs is cut.
        let cut = CancellationToken::new();
        let _cut_on_drop = cut.clone().drop_guard();
        loop {
            let accepted = tokio::select! {
                biased;
                () = stop.cancelled() => break,
                accepted = doors.accept() => accepted,
            };
            match accepted {
                Ok((stream, peer)) => {
                    hand_over(&workers, &shared, &connections, &cut, stream, peer.ip().to_canonical());
                }
                Err(error) if is_of_one_connection(&error) => {}
                Err(error) => {
                    tracing::warn!(%error, "cannot accept connections at the moment");
                    tokio::time::sleep(shared.config.accept_pause).await;
                }
            }
        }
        drop(doors);
        connections.close();
        connections.wait().await;
    }
}

/// The client was gone before it was accepted; others are not affected.
fn is_of_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted)
}

/// Gives a connection to one of the threads.
fn hand_over(
    workers: &Workers,
    shared: &Arc<Shared>,
    connections: &TaskTracker,
    cut: &CancellationToken,
    stream: TcpStream,
    peer: IpAddr,
) {
    let stream = match stream.into_std() {
        Ok(stream) => stream,
        Err(error) => return tracing::debug!(%error, "cannot give a connection to a thread"),
    };
    let (shared, cut, connections) = (shared.clone(), cut.clone(), connections.clone());
    // Counted from now on: a stop that comes before the thread has begun waits for it.
    let begun = connections.token();
    workers.begin(move |load| {
        match TcpStream::from_std(stream) {
            Ok(stream) => accept(&shared, &connections, &cut, stream, peer, load),
            Err(error) => tracing::debug!(%error, "a thread cannot take a connection"),
        }
        drop(begun);
    });
}

fn accept(
    shared: &Arc<Shared>,
    connections: &TaskTracker,
    cut: &CancellationToken,
    stream: TcpStream,
    peer: IpAddr,
    load: Load,
) {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "cannot set TCP_NODELAY");
    }
    let admitted = Admitted::try_new(shared, peer);
    let held = admitted.as_ref().map(|admitted| admitted.held.clone()).unwrap_or_default();
    let peer = Peer { ip: peer, held };
    let (shared, cut) = (shared.clone(), cut.clone());
    connections.spawn(async move {
        let _load = load;
        let serving = front::serve(shared, peer, stream, admitted.is_some());
        tokio::select! {
            () = serving => {}
            () = cut.cancelled() => {}
        }
    });
}

/// A connection counted in all and for its peer.
struct Admitted {
    shared: Arc<Shared>,
    peer: IpAddr,
    held: Arc<Share>,
}

impl Admitted {
    fn try_new(shared: &Arc<Shared>, peer: IpAddr) -> Option<Self> {
        let config = &shared.config;
        let mut peers = shared.peers.lock().unwrap_or_else(PoisonError::into_inner);
        let open = &shared.gauges.connections;
        let of_peer = peers.get(&peer).map_or(0, |known| known.open);
        if open.load(Ordering::Relaxed) >= config.connections {
            shared.gauges.limited.note(Limit::Connections);
            return None;
        }
        if of_peer >= config.connections_per_peer {
            shared.gauges.limited.note(Limit::ConnectionsPerPeer);
            return None;
        }
        open.fetch_add(1, Ordering::Relaxed);
        let known = peers.entry(peer).or_default();
        known.open += 1;
        let held = known.held.clone();
        drop(peers);
        Some(Self { shared: shared.clone(), peer, held })
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        self.shared.gauges.connections.fetch_sub(1, Ordering::Relaxed);
        let mut peers = self.shared.peers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = peers.get_mut(&self.peer) {
            known.open -= 1;
            if known.open == 0 {
                peers.remove(&self.peer);
            }
        }
    }
}
