//! The root: the process that forks for all of its successors.
//!
//! The kernel ties a child's death to the thread that forked it. So the first instance stays, whoever serves: it forks, reaps
//! and signals for the one that does, and its end is the end of all.
//!
//! ```text
//!   first instance: serves ── hand-over ──> only the root: forks, reaps, signals
//!                                              │ wire: ask, answer, files
//!   its successor:            starts ───────> serves ── hand-over ──> drains, ends
//!                                                                       │
//!   the one after:                               starts ──────────────> serves
//! ```
//!
//! | file | job |
//! |---|---|
//! | `wire` | messages with files |
//! | `ask` | what is asked and answered |
//! | `family` | the root's side: who lives, who serves |
//! | `orders` | who of them hears what the root is told |
//! | `desk` | answers one successor |
//! | `client` | the successor's side |

pub(crate) mod ask;
pub(crate) mod client;
pub(crate) mod desk;
pub(crate) mod family;
pub(crate) mod orders;
pub mod wire;
