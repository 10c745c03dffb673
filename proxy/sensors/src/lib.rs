//! Reads numbers about backends, the host and its GPUs: from `/proc`, `/sys`, drivers, and what a backend publishes. It
//! never judges them, and never makes one up: what cannot be read is an error or nothing, not a zero.
//!
//! | module | reads |
//! |---|---|
//! | [`backend_metrics`] | llama-server's own counters, from the text of its `/metrics` |
//! | [`confirm`] | host memory of a process group to the page, to confirm a verdict |
//! | [`mod@effort`] | what a process has computed, read and written |
//! | [`ending`] | whether a process has begun to end |
//! | [`gpu`] | GPUs: VRAM in all and per process group, temperature, faults |
//! | [`host`] | host memory of a process group |
//! | [`mod@listener`] | who listens on a port |
//! | [`pressure`] | the control group of a backend: memory, out-of-memory events, pressure stalls |
//! | [`oom`] | whether the kernel killed for lack of memory |
//! | [`mod@relatives`] | which processes belong to a child, those outside its group included |
//! | [`report`] | the memory report of a patched llama-server |
//! | [`mod@standing`] | whether a process can go on: stopped, or waiting for its pages |
//! | [`totals`] | host memory in all, and what is available; less in a container |

pub mod backend_metrics;
mod cgroup;
pub mod confirm;
pub mod effort;
pub mod ending;
pub mod gpu;
pub mod host;
pub mod listener;
pub mod oom;
pub mod pressure;
pub mod relatives;
pub mod report;
pub mod standing;
pub mod totals;

pub use backend_metrics::BackendMetrics;
pub use confirm::{HostConfirmed, host_confirmed, host_confirmed_of};
pub use effort::effort;
pub use ending::is_ending;
pub use gpu::Gpus;
pub use host::host_memory;
pub use listener::{Listener, has_unix_listener, listener, port_owner};
pub use oom::OomKills;
pub use pressure::{CgroupMemory, cgroup_memory};
pub use relatives::{
    Ancestry, Relative, StartedProcess, children_of, host_memory_of, marked_below, process_tree, relatives,
    user_of,
};
pub use report::Report;
pub use standing::{Standing, standing};
pub use totals::{HostTotals, host_totals};

/// Why a number could not be read.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each message says what its fields are")]
pub enum SensorError {
    /// The process is gone or has become a zombie: it holds no memory that could be read.
    #[error("cannot read the memory of process {pid}: it has ended")]
    Ended { pid: u32 },
    /// `/proc` cannot be read or does not say what is needed.
    #[error("cannot read {what}: {source}; is /proc mounted, and with hidepid off for this user?")]
    Proc { what: String, source: procfs::ProcError },
    /// The kernel does not tell this field.
    #[error("{what} has no field {field}: this kernel is too old (Linux 4.5 has it)")]
    NoField { what: String, field: &'static str },
}
