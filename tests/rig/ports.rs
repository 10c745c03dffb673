//! Ports for programs that need a given port.
//!
//! The kernel soon gives a port that was closed to another socket, such as a connection of another test.
//! Therefore these ports lie below the kernel's range, begin at a random place, and are given once by each
//! process.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU16, Ordering};

use crate::Trouble;

/// Usual beginning of the kernel's own range.
const USUAL: u16 = 32_768;
/// Number of ports below that range to choose from.
const ROOM: u16 = 12_000;

/// Returns a free port of 127.0.0.1.
///
/// # Errors
/// All ports are taken.
pub fn free() -> Result<u16, Trouble> {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let first = system_range().saturating_sub(ROOM).max(1024);
    // Processes that start at the same time begin at different ports.
    let start = u16::try_from(std::process::id().wrapping_mul(7919) % u32::from(ROOM))?;
    for _ in 0..ROOM {
        let nth = NEXT.fetch_add(1, Ordering::Relaxed);
        let port = first + (start.wrapping_add(nth)) % ROOM;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return Ok(port);
        }
    }
    Err(Trouble::new(format!("no port from {first} on is free")))
}

/// Returns the first port of the kernel's own range.
fn system_range() -> u16 {
    let text = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    text.split_whitespace().next().and_then(|first| first.parse().ok()).unwrap_or(USUAL)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_given_once_and_never_one_that_the_system_gives() {
        let ports: Vec<u16> = (0..50).map(|_| free().unwrap()).collect();
        let different: std::collections::BTreeSet<u16> = ports.iter().copied().collect();
        assert_eq!(different.len(), ports.len(), "{ports:?}");
        let theirs = system_range();
        assert!(ports.iter().all(|port| *port < theirs || theirs < ROOM), "{ports:?} {theirs}");
    }
}
