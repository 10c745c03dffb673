//! Probes of an instance that is one of several: liveness, readiness, metrics, and `HAProxy`'s agent check.
//! They only read, need no key, and reveal nothing secret.
//!
//! ```text
//!   control threads                                   the probe thread
//!   ┌ facts, four times a second ──> ProbeBoard ─────> /livez  /readyz  agent-check   never wait
//!   └ metrics, when wanted ────────> ProbeBoard ─────> /metrics    waits briefly, else returns the last metrics
//! ```
//!
//! | module | job |
//! |---|---|
//! | [`board`] | latest facts and metrics; read without a wait |
//! | [`facts`] | facts for `warden_policies::pool` from the fleet's view; pure |
//! | [`keeper`] | updates facts and metrics |
//! | [`http`] | the three routes |
//! | [`listen`] | the thread, its listeners, and the limit of its connections |
//! | [`pace`] | measures how long answers take, by the program's own clock |
//! | [`watchdog`] | asks all event loops whether they respond |

pub(crate) mod board;
pub(crate) mod facts;
mod http;
pub(crate) mod keeper;
pub(crate) mod listen;
pub(crate) mod pace;
pub(crate) mod watchdog;
