//! Who may have a connection: in all, and from one address.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

use crate::body::budget::{Peer, Share};
use crate::config::GatewayConfig;
use crate::limits::Limit;
use crate::observe::Gauges;

/// The addresses that connections are open from, and how many there may be.
#[derive(Debug)]
pub(crate) struct Admission {
    gauges: Arc<Gauges>,
    connections: usize,
    connections_per_peer: usize,
    peers: Mutex<HashMap<IpAddr, Known>>,
}

/// An address that connections are open from.
#[derive(Debug, Default)]
struct Known {
    open: usize,
    held: Arc<Share>,
}

/// A connection counted in all and for its peer.
#[derive(Debug)]
pub(crate) struct Admitted {
    admission: Arc<Admission>,
    peer: Peer,
}

impl Admission {
    pub(crate) fn new(config: &GatewayConfig, gauges: Arc<Gauges>) -> Arc<Self> {
        let (connections, connections_per_peer) =
            (config.server.connections, config.server.connections_per_peer);
        Arc::new(Self { gauges, connections, connections_per_peer, peers: Mutex::default() })
    }

    /// Counts a connection; `None` if there are too many.
    pub(crate) fn admit(self: &Arc<Self>, ip: IpAddr) -> Option<Admitted> {
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        let open = &self.gauges.connections;
        let of_peer = peers.get(&ip).map_or(0, |known| known.open);
        if open.load(Ordering::Relaxed) >= self.connections {
            self.gauges.limited.note(Limit::Connections);
            return None;
        }
        if of_peer >= self.connections_per_peer {
            self.gauges.limited.note(Limit::ConnectionsPerPeer);
            return None;
        }
        open.fetch_add(1, Ordering::Relaxed);
        let known = peers.entry(ip).or_default();
        known.open += 1;
        let held = known.held.clone();
        drop(peers);
        Some(Admitted { admission: self.clone(), peer: Peer { ip, held } })
    }
}

impl Admitted {
    /// Whose connection it is.
    pub(crate) fn peer(&self) -> &Peer {
        &self.peer
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        self.admission.gauges.connections.fetch_sub(1, Ordering::Relaxed);
        let mut peers = self.admission.peers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = peers.get_mut(&self.peer.ip) {
            known.open -= 1;
            if known.open == 0 {
                peers.remove(&self.peer.ip);
            }
        }
    }
}
