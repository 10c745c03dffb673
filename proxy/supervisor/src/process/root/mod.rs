//! The root: the first instance of the program, which forks all processes for its successors.
//!
//! The kernel ends a child when the thread that forked it ends. So the first instance stays after a
//! handover: it forks, reaps and signals for the serving instance, and all processes end when it ends.
//!
//! ```text
//!     first instance: serves ── handover ──> only the root: forks, reaps, signals
//!                                 │ wire: request, answer, files
//!     its successor:   starts ────┴──> serves ── handover ──> drains, ends
//!                                                   │
//!     the next one:                    starts ──────┴───────> serves
//! ```
//!
//! | file | job |
//! |---|---|
//! | `wire` | messages with files |
//! | `ask` | requests and answers |
//! | `family` | the root's children, and which of them serves |
//! | `orders` | which instances get an order of the root |
//! | `desk` | answers one successor |
//! | `client` | the successor's connection |

pub(crate) mod ask;
pub(crate) mod client;
pub(crate) mod desk;
pub(crate) mod family;
pub(crate) mod orders;
pub mod wire;
