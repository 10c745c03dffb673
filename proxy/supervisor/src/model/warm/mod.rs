//! Carries conversations over from the old process of a planned replacement to the new one.
//!
//! ```text
//!     sequential   old: drained -- pack -- TERM
//!                  new: ready -- unpack -- gate opens -- behind: the other prompts, when idle
//!     overlap      old: serves ------------- pack --+-- drains
//!                  new:        ready ---------------+-- unpack, the other prompts -- gate opens -- behind
//! ```
//!
//! | file | job |
//! |---|---|
//! | `pack` | saves slots of the old process to files |
//! | `unpack` | restores files into slots of the new one, and proves their use |
//! | `behind` | evaluates prompts after the gate has opened |
//! | `steps` | the task's actions |
//! | `away` | keeps state while a model is unloaded |
//! | `stored` | keeps conversations on disk, beyond the exit of the program |
//!
//! The decisions are in [`warden_policies::warmth`].

mod away;
mod behind;
pub(super) mod pack;
mod steps;
pub(crate) mod stored;
pub(super) mod unpack;

pub(super) use self::away::KeptState;
