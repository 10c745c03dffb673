//! Maps addresses to clients, for limits and counts per client.

// Address types only: this module opens no connection.
use core::net::{IpAddr, Ipv6Addr};

/// Returns the network that counts as one client: an IPv4 address, or an IPv6 /64, which one customer
/// controls.
pub fn client_network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            let [a, b, c, d, ..] = address.segments();
            IpAddr::V6(Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0))
        }
        v4 @ IpAddr::V4(_) => v4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_of_version_6_counts_as_one_and_each_address_of_version_4() {
        let network = |address: &str| client_network(address.parse().unwrap()).to_string();
        for (address, counts_as) in [
            ("2001:db8:0:1::1", "2001:db8:0:1::"),
            ("2001:db8:0:1:ffff:ffff:ffff:ffff", "2001:db8:0:1::"),
            ("2001:db8:0:2::1", "2001:db8:0:2::"),
            ("10.0.0.1", "10.0.0.1"),
            ("::ffff:10.0.0.1", "10.0.0.1"),
            ("::1", "::"),
        ] {
            assert_eq!(network(address), counts_as, "{address}");
        }
    }
}
