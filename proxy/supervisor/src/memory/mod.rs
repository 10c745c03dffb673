//! Memory: what one generation holds, what all of them hold together, and what is remembered of those before them.
//!
//! | file | job |
//! |---|---|
//! | `tracker` | what the readings of one generation add up to |
//! | `declared_memory` | what a process is told to keep, and what it reports of that |
//! | `fleet_memory` | what all generations hold; what comes back when one has ended |
//! | `leak_history` | growth, prices, GPU layers and memory of earlier processes, by what they were made of |
//! | `loading` | which models are loaded |
//! | `recording` | readings in a file, for `policy replay` |

pub(crate) mod declared_memory;
pub(crate) mod fleet_memory;
pub(crate) mod leak_history;
pub(crate) mod loading;
pub(crate) mod recording;
pub(crate) mod tracker;
