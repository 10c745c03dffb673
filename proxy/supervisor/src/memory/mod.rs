//! Memory of one generation, of all generations together, and of earlier processes.
//!
//! | file | job |
//! |---|---|
//! | `tracker` | readings of one generation |
//! | `declared_memory` | memory that a process keeps on purpose |
//! | `fleet_memory` | memory of all generations; memory that comes back after an exit |
//! | `leak_history` | growth, prices, GPU layers and memory of earlier processes, by command and files |
//! | `loading` | decides which models are loaded |
//! | `recording` | readings in a file, for `policy replay` |

pub(crate) mod declared_memory;
pub(crate) mod fleet_memory;
pub(crate) mod leak_history;
pub(crate) mod loading;
pub(crate) mod recording;
pub(crate) mod tracker;
