//! An upgrade: another program replaces this one, with its listening sockets, its llama-servers and their
//! recorded state.
//!
//! ```text
//!   old: serves ───────────── freeze ── will ──────────── ready? ── let go ── go ──> one more request each
//!                               │         │                 │                │       reports until it is idle
//!   new:        starts, reads,  │         │                 │                v
//!               hello ──────────┘         └─ adopts, probes ┘            accepts, decides
//! ```
//!
//! Until `go` the old program can continue as before, and does so if the new one fails, hangs or dies.
//! `warden_supervisor::process::root` explains which program forks and therefore has to stay.
//!
//! | file | job |
//! |---|---|
//! | `talk` | messages between the two programs |
//! | `program` | checks whether a file may replace this program |
//! | `old`, `new` | the two sides of an upgrade |
//! | `inquiry` | self-test of the new program |
//! | `retired` | remaining work of the old program |
//! | `ending` | the schedule of the old program at a stop |

pub(super) mod ending;
pub(super) mod inquiry;
pub(super) mod new;
pub(super) mod old;
pub(super) mod program;
pub(super) mod retired;
pub(super) mod talk;
