//! Probes of an instance that is one of several: liveness, readiness, metrics, and `HAProxy`'s agent check.
//! Read only, without a key, and without anything secret.
//!
//! ```text
//!   control threads                              a thread of its own
//!   ┌ facts, four times a second ──> Board ─────> /livez  /readyz  agent-check     never waits
//!   └ metrics, when wanted ────────> Board ─────> /metrics    waits shortly, else takes the last ones
//! ```
//!
//! | module | job |
//! |---|---|
//! | [`board`] | latest facts and metrics; read without a wait |
//! | [`facts`] | facts for `warden_policies::pool` from the fleet's view; pure |
//! | [`keeper`] | updates facts and metrics |
//! | [`http`] | the three routes |
//! | [`listen`] | the thread, its listeners, its limit of connections |
//! | [`pace`] | time that answers take by our own clock |

pub(crate) mod board;
pub(crate) mod facts;
mod http;
pub(crate) mod keeper;
pub(crate) mod listen;
pub(crate) mod pace;
