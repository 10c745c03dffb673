//! Another program goes on in our place: with our listening sockets, our llama-servers and what is known of them.
//!
//! ```text
//!   old: serves ───────────── freeze ── will ──────────── ready? ── let go ── go ──> one request more for each connection
//!                               │         │                 │                │       counts until nothing runs here
//!   new:        starts, reads,  │         │                 │                v
//!               hello ──────────┘         └─ adopts, probes ┘            accepts, decides
//! ```
//!
//! Until `go` the old one needs nothing to go on as before, and does so if the new one fails, hangs or dies. Who forks, and so has to stay, is
//! told in `warden_supervisor::process::root`.
//!
//! | file | job |
//! |---|---|
//! | `talk` | what the two say to each other |
//! | `order` | who may ask for it, and how it is answered |
//! | `program` | whether a file may take our place |
//! | `old`, `new` | either side |
//! | `inquiry` | whether the new one answers |
//! | `retired` | what is left to do for the old one |
//! | `ending` | when it does what at a stop |

pub(super) mod ending;
pub(super) mod inquiry;
pub(super) mod new;
pub(super) mod old;
pub(crate) mod order;
pub(super) mod program;
pub(super) mod retired;
pub(super) mod talk;
