//! The outside world as a model's task sees it: processes, their answers to probes, memory. A trait, so that the task can
//! be tested with scripted processes and a paused clock; [`host::Host`] is the real one.
//!
//! | file | job |
//! |---|---|
//! | `nursery`, `spawn`, `child`, `group` | the main thread forks; a child's output, signals, end and reaping |
//! | `root`, `instance` | the process that forks for those that follow us; the process id that they keep |
//! | `heir` | what a process is to whoever goes on with it |
//! | `kinship`, `server_place`, `server_search`, `watched_process` | what has left a child's group: found, watched, stopped with it |
//! | `control_group` | where the kernel allows it, a group of version 2 for each child, that nothing leaves |
//! | `own_port` | nothing is sent to another program that has come by the child's port |
//! | `host` | this machine: children, probes, readings |
//! | `backend_http`, `backend_slots`, `hints` | how a backend is asked, and what its command says of that |
//! | `endpoint`, `socket_name`, `directories`, `private_dir`, `report_file` | where a process listens and writes |
//! | `regular_file` | files that others name: no pipe is waited for |
//! | `trusted_path` | which paths no other user of the machine can exchange |
//! | `reclaim_file` | how it is asked to give memory back |
//! | `lines`, `discreet`, `failure` | what it said, without secrets, and why it ended |
//! | `needs`, `standstill` | what it needs to start, and whether it moves on |
//! | `settings` | what clients have set in it |
//! | `slot_files`, `slot_talk`, `touch` | how the contents of its slots are taken to the next one |
//! | `gpus`, `population` | the GPUs for all, and how many children there are |

pub(crate) mod backend_http;
pub(crate) mod backend_slots;
pub(crate) mod child;
pub(crate) mod control_group;
pub(crate) mod directories;
pub(crate) mod discreet;
pub(crate) mod endpoint;
pub(crate) mod failure;
pub(crate) mod flood;
pub(crate) mod gpus;
pub(crate) mod group;
pub(crate) mod heir;
pub(crate) mod hints;
pub(crate) mod host;
pub mod instance;
pub(crate) mod kinship;
pub(crate) mod lines;
pub(crate) mod needs;
pub mod nursery;
mod own_port;
pub(crate) mod population;
pub mod private_dir;
pub(crate) mod reclaim_file;
pub mod regular_file;
pub(crate) mod report_file;
pub(crate) mod root;
pub(crate) mod server_place;
pub(crate) mod server_search;
pub(crate) mod settings;
pub(crate) mod slot_files;
pub(crate) mod slot_talk;
pub(crate) mod socket_name;
pub(crate) mod spawn;
pub(crate) mod standstill;
pub(crate) mod touch;
pub mod trusted_path;
pub(crate) mod watched_process;

use std::fmt::Debug;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use warden_policies::health::Slots;
use warden_policies::reclaim::Parts;
use warden_policies::sample::{GpuIndex, HostMemory, Vram, VramSource};
use warden_policies::standstill::Effort;
use warden_sensors::{BackendMetrics, CgroupMemory, HostTotals, Report, Standing};

use crate::error::SpawnError;
use crate::process::endpoint::Endpoint;
use crate::process::failure::OutOfMemory;
use crate::process::gpus::Devices;
use crate::process::group::Exit;
use crate::process::heir::Heir;
use crate::process::needs::Sight;
use crate::process::reclaim_file::Reclaimed;
use crate::process::settings::Setting;
use crate::spec::{Command, SpawnRequest};
use crate::view::Modalities;
use crate::view::log::Stream;

/// Takes each line of a child's output.
pub(crate) type Sink = Arc<dyn Fn(Stream, String) + Send + Sync>;

/// What a probe found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Health {
    Ready,
    /// It answers, and is not ready.
    Loading,
    Lost,
    /// The file of its socket is gone: nobody will ever connect to it again.
    Unreachable,
}

impl Health {
    /// Whether anybody has answered.
    pub(crate) const fn is_answer(self) -> bool {
        matches!(self, Self::Ready | Self::Loading)
    }
}

/// What `/props` tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Props {
    /// Requests that it evaluates at a time.
    pub(crate) slots: Option<u32>,
    /// Context length in tokens.
    pub(crate) n_ctx: Option<u64>,
    /// What it takes beside text.
    pub(crate) modalities: Option<Modalities>,
    /// llama.cpp's build number.
    pub(crate) build: Option<u32>,
    /// It answers questions about its slots.
    pub(crate) tells_slots: bool,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Ask {
    /// Host memory page by page, too: slow.
    pub(crate) confirm: bool,
    /// Readings of the GPUs may be as old as this.
    pub(crate) gpu_age: Duration,
    /// The longest time for a driver and for the backend's own counters.
    pub(crate) limit: Duration,
    /// Its own counters, too, where it tells them.
    pub(crate) metrics: bool,
    /// What it says of its slots, too.
    pub(crate) slots: bool,
}

impl Ask {
    /// For memory alone.
    pub(crate) const fn brief(gpu_age: Duration, limit: Duration) -> Self {
        Self { confirm: false, gpu_age, limit, metrics: false, slots: false }
    }
}

/// What a reading found.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sample {
    /// Host memory of its group; `None` if it cannot be read.
    pub(crate) host: Option<HostMemory>,
    /// The same page by page, if it was asked for and can be read.
    pub(crate) confirmed: Option<u64>,
    /// VRAM of its group, GPU by GPU; those that are not known are not in it.
    pub(crate) vram: Vec<Vram>,
    /// Why VRAM is not known, if it is not.
    pub(crate) no_vram: Option<NoVram>,
    /// Why its server is not measured, in a sentence; `None` if it is.
    pub(crate) unmeasured: Option<String>,
    /// The GPUs; `None` if the driver did not answer.
    pub(crate) devices: Option<Arc<Devices>>,
    pub(crate) totals: Option<HostTotals>,
    /// Its control group; `None` if it has none of version 2.
    pub(crate) group: Option<CgroupMemory>,
    /// Its report of its GPU memory; `None` if there is none.
    pub(crate) report: Option<Report>,
    /// Its own counters; `None` if it was not asked or does not tell them.
    pub(crate) metrics: Option<BackendMetrics>,
    /// What it says of its slots; `None` if it was not asked or does not tell.
    pub(crate) slots: Option<Slots>,
    /// Whether it can go on; `None` if that is not known.
    pub(crate) standing: Option<Standing>,
    /// Who in it can be asked to give memory back; `None` if it was not told where.
    pub(crate) parts: Option<Parts>,
}

impl Sample {
    /// Bytes of VRAM over all GPUs; `None` where one of them is not known, or only estimated.
    pub(crate) fn vram_held(&self) -> Option<u64> {
        let known = self.no_vram.as_ref().is_none_or(|no_vram| no_vram.is_normal);
        let exact = self.vram.iter().all(|vram| vram.source != VramSource::Estimate);
        let held = self.vram.iter().map(|vram| vram.bytes).fold(0, u64::saturating_add);
        (known && exact && self.devices.is_some()).then_some(held)
    }
}

/// Why VRAM is not known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NoVram {
    /// A whole sentence.
    pub(crate) why: String,
    /// It is on no GPU, so there is nothing to know.
    pub(crate) is_normal: bool,
}

/// Bytes of each memory of a machine: all of it, or what anybody could take at one moment. What is not known is not in it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct MachineMemory {
    /// Of the host, or of what our control group may have of it.
    pub(crate) host: Option<u64>,
    /// Of each GPU with memory of its own.
    pub(crate) gpus: Vec<(GpuIndex, u64)>,
}

/// A question beside clients' requests.
#[derive(Clone)]
pub(crate) struct Question {
    /// Its path, with a query.
    pub(crate) path: String,
    /// JSON to be posted; `None`: it is a `GET`.
    pub(crate) body: Option<Bytes>,
}

impl Debug for Question {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // A body may be anybody's text.
        write!(f, "Question({}, {:?} bytes)", self.path, self.body.as_ref().map(Bytes::len))
    }
}

pub(crate) trait Process: Send + Sync + Debug {
    /// The process that we made, and its process group.
    fn pid(&self) -> u32;
    /// The process that serves, where it is known that this is another one.
    fn server_pid(&self) -> u32 {
        self.pid()
    }
    /// SIGTERM to the group.
    fn terminate(&self);
    /// SIGKILL to the group.
    fn kill(&self);
    /// Its end, after all its output went to the sink.
    fn wait(&self) -> BoxFuture<'_, Exit>;
    /// Whether it still runs, as the kernel knows it now.
    fn is_running(&self) -> bool;
    /// One probe, answered within the time given or lost. An answer by somebody else is none.
    fn probe(&self, timeout: Duration) -> BoxFuture<'_, Health>;
    /// Its properties; `None` fields where it does not say.
    fn props(&self, timeout: Duration) -> BoxFuture<'_, Props>;
    /// Sets again what a client had set in another one. What went wrong, in words without anything of it.
    fn set(&self, setting: Setting, timeout: Duration) -> BoxFuture<'_, Result<(), String>>;
    /// Asks it; its status and all of its answer, or `None` if there is none within the time, or a larger one than is read. Who
    /// drops this has left: it goes on for no longer than it does for clients.
    fn ask(&self, question: Question, timeout: Duration) -> BoxFuture<'_, Option<(u16, Bytes)>>;
    /// Whether the kernel has killed somebody for lack of memory since the last reading of this one. Asked when SIGKILL
    /// has ended it.
    fn out_of_memory(&self) -> BoxFuture<'_, OutOfMemory>;
    /// What it holds now.
    fn sample(&self, ask: Ask) -> BoxFuture<'_, Sample>;
    /// What it has computed, read and written so far, with all that belongs to it; `None` if that cannot be read.
    fn effort(&self) -> BoxFuture<'_, Option<Effort>>;
    /// Prepares it for whoever goes on with it: by which number the root knows it, and its files. `None`: it cannot be.
    fn bequeath(&self) -> Option<(u64, Vec<OwnedFd>)> {
        None
    }
    /// By which number it was prepared, if it is a child of ours.
    fn bequeathed(&self) -> Option<u64> {
        None
    }
    /// The instance before us has let it go: it dies with us from now on.
    fn claim(&self) {}
    /// Somebody else goes on with it: its output is read no more, and it is not killed with us.
    fn let_go(&self) {}
    /// Asks it to give back what it hoards. It may look for so long for a good moment for each part.
    fn reclaim(&self, wait: Duration) -> BoxFuture<'_, Reclaimed>;
}

/// Where children come from.
pub(crate) trait World: Send + Sync + Debug {
    /// Creates a child that will listen on `endpoint`. `socket`: its path, or the one that it would have, which its other
    /// files are named after.
    fn spawn(
        &self,
        request: SpawnRequest,
        socket: PathBuf,
        endpoint: Endpoint,
        longest_line: usize,
        sink: Sink,
    ) -> BoxFuture<'_, Result<Arc<dyn Process>, SpawnError>>;
    /// Goes on with a process of the instance before us.
    fn adopt(
        &self,
        heir: Heir,
        _longest_line: usize,
        _sink: Sink,
    ) -> BoxFuture<'_, Result<Arc<dyn Process>, SpawnError>> {
        let binary = heir.record.command.binary;
        Box::pin(async { Err(SpawnError::NurseryGone { binary }) })
    }
    /// Nobody goes on with a child that was prepared for that.
    fn thaw(&self, _child: u64) {}
    /// What a process made of this needs. `running` is one of the same binary.
    fn look(&self, command: Command, running: Option<u32>) -> BoxFuture<'static, Sight>;
    /// Brings the model's files into the page cache, as far as that goes within the limit and memory allows it.
    fn read_ahead(&self, command: Command, limit: Duration) -> BoxFuture<'static, ()>;
    /// Memory that new processes can take, in bytes; `None` if it cannot be read.
    fn available(&self) -> Option<u64>;
    /// What anybody could take now, GPUs included, read within the limit.
    fn free(&self, limit: Duration) -> BoxFuture<'_, MachineMemory>;
    /// What there is, GPUs included, read within the limit.
    fn total(&self, limit: Duration) -> BoxFuture<'_, MachineMemory>;
    /// The variable that lets a process see these GPUs only; `None` if those are all, or one of them cannot be named. Read within the
    /// limit.
    fn only(&self, gpus: Vec<GpuIndex>, limit: Duration) -> BoxFuture<'_, Option<(String, String)>>;
    /// Whether the machine has a GPU, known to a sensor or not.
    fn has_gpu(&self) -> bool;
    /// Local time in minutes of the day.
    fn minute(&self) -> Option<u16>;
}
