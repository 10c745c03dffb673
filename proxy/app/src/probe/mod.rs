//! What others may ask of an instance that is one of several: whether it lives, whether it takes requests, its metrics, and `HAProxy`'s
//! line. Nothing can be done here, no key is asked for, and nothing is told that is anybody's secret.
//!
//! ```text
//!   control threads                              a thread of its own
//!   ┌ look, four times a second ──> Board ──────> /livez  /readyz  agent-check     never waits for anybody
//!   └ metrics, when wanted ───────> Board ──────> /metrics    waits a little for fresh ones, else takes the last
//! ```
//!
//! | module | job |
//! |---|---|
//! | [`board`] | what was seen last; read without a wait |
//! | [`facts`] | the fleet's picture as `warden_policies::pool` wants it; pure |
//! | [`keeper`] | looks, and makes metrics |
//! | [`http`] | the three routes |
//! | [`listen`] | the thread, its listeners, and how many may be connected |
//! | [`pace`] | how long answers take, by our own clock |

pub(crate) mod board;
pub(crate) mod facts;
mod http;
pub(crate) mod keeper;
pub(crate) mod listen;
pub(crate) mod pace;
