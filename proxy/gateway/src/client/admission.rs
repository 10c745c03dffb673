//! Limits the number of connections, in total and per client address. An IPv6 network counts as one address.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

use warden_policies::client_network;

use crate::body::budget::{ClientPeer, ClientShare};
use crate::config::GatewayConfig;
use crate::limits::GatewayLimit;
use crate::observe::GatewayGauges;

/// Open connections by address, and their limits.
#[derive(Debug)]
pub(crate) struct ConnectionAdmission {
    gauges: Arc<GatewayGauges>,
    connections: usize,
    connections_per_peer: usize,
    /// Keyed by address or IPv6 network.
    peers: Mutex<HashMap<IpAddr, KnownPeer>>,
}

/// An address with open connections.
#[derive(Debug, Default)]
struct KnownPeer {
    open: usize,
    held: Arc<ClientShare>,
}

/// A connection that is counted in total and for its address.
#[derive(Debug)]
pub(crate) struct AdmittedConnection {
    admission: Arc<ConnectionAdmission>,
    peer: ClientPeer,
}

impl ConnectionAdmission {
    pub(crate) fn new(config: &GatewayConfig, gauges: Arc<GatewayGauges>) -> Arc<Self> {
        let (connections, connections_per_peer) =
            (config.server.connections, config.server.connections_per_peer);
        Arc::new(Self { gauges, connections, connections_per_peer, peers: Mutex::default() })
    }

    /// Counts a connection; `None` if there are too many.
    pub(crate) fn admit(self: &Arc<Self>, ip: IpAddr) -> Option<AdmittedConnection> {
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        let open = &self.gauges.connections;
        let network = client_network(ip);
        let of_peer = peers.get(&network).map_or(0, |known| known.open);
        if open.load(Ordering::Relaxed) >= self.connections {
            self.gauges.limited.note(GatewayLimit::Connections);
            return None;
        }
        if of_peer >= self.connections_per_peer {
            self.gauges.limited.note(GatewayLimit::ConnectionsPerPeer);
            return None;
        }
        open.fetch_add(1, Ordering::Relaxed);
        let known = peers.entry(network).or_default();
        known.open += 1;
        let held = known.held.clone();
        drop(peers);
        Some(AdmittedConnection { admission: self.clone(), peer: ClientPeer { ip, held } })
    }
}

impl AdmittedConnection {
    pub(crate) fn peer(&self) -> &ClientPeer {
        &self.peer
    }
}

impl Drop for AdmittedConnection {
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
        let gauges = Arc::new(GatewayGauges::default());
        let admission = ConnectionAdmission::new(&config, gauges.clone());
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
        assert_eq!(gauges.limited.count(GatewayLimit::ConnectionsPerPeer), 2);
    }
}
