//! Limits the number of connections: in total, and per address, where an IPv6 network counts as one address.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

use warden_policies::client_network;

use crate::body::budget::{Peer, Share};
use crate::config::GatewayConfig;
use crate::limits::Limit;
use crate::observe::Gauges;

/// Open connections by address, and their limits.
#[derive(Debug)]
pub(crate) struct Admission {
    gauges: Arc<Gauges>,
    connections: usize,
    connections_per_peer: usize,
    /// Keyed by address or IPv6 network.
    peers: Mutex<HashMap<IpAddr, Known>>,
}

/// An address with open connections.
#[derive(Debug, Default)]
struct Known {
    open: usize,
    held: Arc<Share>,
}

/// A connection that is counted in total and for its address.
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
        let network = client_network(ip);
        let of_peer = peers.get(&network).map_or(0, |known| known.open);
        if open.load(Ordering::Relaxed) >= self.connections {
            self.gauges.limited.note(Limit::Connections);
            return None;
        }
        if of_peer >= self.connections_per_peer {
            self.gauges.limited.note(Limit::ConnectionsPerPeer);
            return None;
        }
        open.fetch_add(1, Ordering::Relaxed);
        let known = peers.entry(network).or_default();
        known.open += 1;
        let held = known.held.clone();
        drop(peers);
        Some(Admitted { admission: self.clone(), peer: Peer { ip, held } })
    }
}

impl Admitted {
    pub(crate) fn peer(&self) -> &Peer {
        &self.peer
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        self.admission.gauges.connections.fetch_sub(1, Ordering::Relaxed);
        let mut peers = self.admission.peers.lock().unwrap_or_else(PoisonError::into_inner);
        let network = client_network(self.peer.ip);
        if let Some(known) = peers.get_mut(&network) {
            known.open -= 1;
            if known.open == 0 {
                peers.remove(&network);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use warden_policies::defaults;

    use super::*;

    #[test]
    fn a_network_of_version_6_is_one_client_and_a_mapped_address_is_that_of_version_4() {
        let mut config = GatewayConfig::new(&defaults().server, &defaults().upstream);
        config.server.connections_per_peer = 2;
        let gauges = Arc::new(Gauges::default());
        let admission = Admission::new(&config, gauges.clone());
        let admit = |address: &str| admission.admit(address.parse().unwrap());
        let (one, two) = (admit("2001:db8:0:1::1").unwrap(), admit("2001:db8:0:1:ffff::2").unwrap());
        assert!(Arc::ptr_eq(&one.peer().held, &two.peer().held), "one share of what is held");
        assert_eq!(two.peer().ip.to_string(), "2001:db8:0:1:ffff::2", "shown as it is");
        assert!(admit("2001:db8:0:1::3").is_none(), "the same network");
        assert!(admit("2001:db8:0:2::1").is_some(), "another one");
        let _both = (admit("10.0.0.1").unwrap(), admit("::ffff:10.0.0.1").unwrap());
        assert!(admit("10.0.0.1").is_none());
        assert!(admit("10.0.0.2").is_some(), "addresses of version 4 count each");
        drop(one);
        assert!(admit("2001:db8:0:1::3").is_some());
        assert_eq!(gauges.limited.count(Limit::ConnectionsPerPeer), 2);
    }
}
