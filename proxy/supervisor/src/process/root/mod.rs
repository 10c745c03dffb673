//! The root: the first instance, which forks for all of its successors.
//!
//! The kernel ties a child's death to the thread that forked it. So the first instance stays: it forks,
//! reaps and signals for the serving one, and its end is the end of all.
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
