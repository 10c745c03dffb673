//! Reads numbers about backends, the host and its GPUs: from `/proc`, `/sys`, drivers, and backends' reports.
//! An unreadable value is an error or absent, never zero.
//!
//! | module | reads |
//! |---|---|
//! | [`backend_metrics`] | llama-server's own counters, from the text of its `/metrics` |
//! | [`confirm`] | exact host memory of a process group, to confirm a verdict |
//! | [`activity`] | CPU time and I/O of a process; whether it can run, or has begun to end |
//! | [`gpu`] | GPUs: VRAM in total and per process group, temperature, faults |
//! | [`host`] | host memory of a process group |
//! | [`mod@listener`] | the process that listens on a port |
//! | [`pressure`] | the control group of a backend: memory, out-of-memory events, pressure stalls |
//! | [`oom`] | whether the kernel killed a process for lack of memory |
//! | [`mod@relatives`] | the processes that belong to a child, including those outside its group |
//! | [`report`] | the memory report of a patched llama-server |
//! | [`totals`] | host memory in total and available; less in a container |

pub mod activity;
pub mod backend_metrics;
mod cgroup;
pub mod confirm;
mod error;
mod files;
pub mod gpu;
pub mod host;
pub mod listener;
pub mod oom;
pub mod pressure;
pub mod relatives;
pub mod report;
pub mod totals;

pub use activity::{ProcessRunState, effort, is_ending, process_run_state};
pub use backend_metrics::BackendMetrics;
pub use confirm::{HostConfirmed, host_confirmed, host_confirmed_of};
pub use error::SensorError;
pub use gpu::GpuSensors;
pub use host::{host_memory, host_memory_of};
pub use listener::{PortListener, has_unix_listener, port_listener, port_owner};
pub use oom::OomKills;
pub use pressure::{CgroupMemory, cgroup_memory};
pub use relatives::{
    ChildAncestry, RelatedProcess, StartedProcess, children_of, marked_below, process_tree, relatives,
    user_of,
};
pub use report::CudaReport;
pub use totals::{HostTotals, host_totals};
