//! Probes of one instance among several: liveness, readiness, metrics, and `HAProxy`'s agent check. Probes
//! only read, need no key, and reveal nothing secret.
//!
//! ```text
//!   control threads                                   the probe thread
//!   ┌ facts, four times a second ──> ProbeBoard ─────> /livez  /readyz  agent-check   never wait
//!   └ metrics, when wanted ────────> ProbeBoard ─────> /metrics    waits briefly, else returns the last metrics
//! ```

pub mod board;
mod http;
pub mod keeper;
pub mod listen;
pub mod watchdog;
