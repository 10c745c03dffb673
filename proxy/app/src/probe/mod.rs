//! Probes of one instance among several: liveness, readiness, metrics, and `HAProxy`'s agent check. Probes
//! only read, need no key, and reveal nothing secret.
//!
//! ```text
//!   control threads                                   the probe thread
//!   ┌ facts, four times a second ──> ProbeBoard ─────> /livez  /readyz  agent-check   never wait
//!   └ metrics, when wanted ────────> ProbeBoard ─────> /metrics    waits briefly, else returns the last metrics
//! ```

pub(crate) mod board;
pub(crate) mod facts;
mod http;
pub(crate) mod keeper;
pub(crate) mod listen;
pub(crate) mod pace;
pub(crate) mod watchdog;
