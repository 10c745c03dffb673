//! State shared by all connections: script, slots, counters, and switches that are set once (ready, stopping,
//! refusing, wedged).

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::Value;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio_util::task::TaskTracker;

use crate::args::Args;
use crate::cache::Cache;
use crate::leak::Leak;
use crate::ledger::Ledger;
use crate::report::Report;
use crate::script::{Fault, OnTerm, Script};
use crate::slots::Slots;
use crate::vram::Vram;
use warden_rig::words::Key;

/// Switch that is set once, and that tasks can wait for.
#[derive(Debug)]
pub(crate) struct Latch(watch::Sender<bool>);

impl Default for Latch {
    fn default() -> Self {
        Self(watch::Sender::new(false))
    }
}

impl Latch {
    pub(crate) fn set(&self) {
        self.0.send_replace(true);
    }

    pub(crate) fn is_set(&self) -> bool {
        *self.0.borrow()
    }

    pub(crate) async fn wait(&self) {
        // The sender lives in `self`, so waiting cannot fail.
        let mut turned = self.0.subscribe();
        let _ignored = turned.wait_for(|set| *set).await;
    }
}

#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) args: Args,
    pub(crate) ledger: Ledger,
    pub(crate) leak: Leak,
    pub(crate) cache: Cache,
    pub(crate) held: Slots,
    pub(crate) report: Report,
    pub(crate) vram: Vram,
    pub(crate) tasks: TaskTracker,
    pub(crate) ready: Latch,
    /// Set by SIGTERM: nothing more is generated or sent.
    pub(crate) stopping: Latch,
    /// The listening sockets must be closed.
    pub(crate) refusing: Latch,
    /// Working requests get no more bytes.
    pub(crate) wedged: Latch,
    /// The computing loop hangs.
    pub(crate) stalled: Latch,
    /// Every computation fails.
    pub(crate) poisoned: Latch,
    pub(crate) babbles: Latch,
    pub(crate) mute: Latch,
    pub(crate) nullified: Latch,
    pub(crate) altered: Latch,
    pub(crate) wedged_health: Latch,
    pub(crate) prompt_tokens: AtomicU64,
    pub(crate) largest_prompt: AtomicU64,
    pub(crate) predicted_tokens: AtomicU64,
    /// Last body of each settings route.
    set: Mutex<BTreeMap<String, Value>>,
    script: Mutex<Arc<Script>>,
    arrivals: AtomicU64,
    permits: Arc<Semaphore>,
    slots: Mutex<Vec<Option<u64>>>,
    /// Last request of each slot.
    answered: Mutex<Vec<Option<Answered>>>,
    waiting: AtomicU64,
}

/// Request whose prompt a slot had.
#[derive(Debug, Clone)]
pub(crate) struct Answered {
    pub(crate) key: Key,
    /// Beginning of the prompt, by which conversations differ.
    pub(crate) opening: String,
}

impl Engine {
    pub(crate) fn new(args: Args, script: Script, ledger: Ledger) -> Self {
        let slots = args.slots as usize;
        let cache = Cache::new(args.cache_ram);
        Self {
            args,
            ledger,
            leak: Leak::default(),
            cache,
            held: Slots::new(slots),
            report: Report::default(),
            vram: Vram::default(),
            tasks: TaskTracker::new(),
            ready: Latch::default(),
            stopping: Latch::default(),
            refusing: Latch::default(),
            wedged: Latch::default(),
            stalled: Latch::default(),
            poisoned: Latch::default(),
            babbles: Latch::default(),
            mute: Latch::default(),
            nullified: Latch::default(),
            altered: Latch::default(),
            wedged_health: Latch::default(),
            prompt_tokens: AtomicU64::new(0),
            largest_prompt: AtomicU64::new(0),
            predicted_tokens: AtomicU64::new(0),
            set: Mutex::default(),
            script: Mutex::new(Arc::new(script)),
            arrivals: AtomicU64::new(0),
            permits: Arc::new(Semaphore::new(slots)),
            slots: Mutex::new(vec![None; slots]),
            answered: Mutex::new(vec![None; slots]),
            waiting: AtomicU64::new(0),
        }
    }

    pub(crate) fn set(&self, path: &str, value: Value) {
        self.set.lock().unwrap_or_else(PoisonError::into_inner).insert(path.to_owned(), value);
    }

    pub(crate) fn is_set(&self, path: &str) -> Option<Value> {
        self.set.lock().unwrap_or_else(PoisonError::into_inner).get(path).cloned()
    }

    pub(crate) fn script(&self) -> Arc<Script> {
        Arc::clone(&self.script.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn set_script(&self, script: Script) {
        *self.script.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(script);
    }

    /// Returns the ordinal of a new working request, from 1.
    pub(crate) fn arrive(&self) -> u64 {
        self.arrivals.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Number of working requests so far.
    pub(crate) fn arrivals(&self) -> u64 {
        self.arrivals.load(Ordering::Relaxed)
    }

    pub(crate) fn waiting(&self) -> u64 {
        self.waiting.load(Ordering::Relaxed)
    }

    pub(crate) fn slots(&self) -> Vec<Option<u64>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits for a slot, first come first served. The client has no byte of an answer until then.
    pub(crate) async fn slot(self: &Arc<Self>, ordinal: u64, prompt: &[u32], asked: Option<usize>) -> Slot {
        let waiting = Waiting::new(self);
        let permit = Arc::clone(&self.permits).acquire_owned().await;
        drop(waiting);
        if self.stopping.is_set() {
            self.hang().await;
        }
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let free: Vec<usize> = (0..slots.len()).filter(|index| slots[*index].is_none()).collect();
        let first = free.first().copied().unwrap_or(0);
        let index = if prompt.is_empty() { first } else { self.held.choose(&free, prompt, asked) };
        slots[index] = Some(ordinal);
        Slot { engine: Arc::clone(self), index, _permit: permit.ok() }
    }

    /// Returns the meaning to answer in a slot: that of the request, or of the slot's request before if the script
    /// mixes them.
    pub(crate) fn meaning(&self, ordinal: u64, slot: usize, reuses: bool, now: Answered) -> Key {
        let mut all = self.answered.lock().unwrap_or_else(PoisonError::into_inner);
        let (key, opening) = (now.key, now.opening.clone());
        let before = all[slot].replace(now);
        let mixes = self.script().mixes;
        let is_due = reuses && mixes > 0 && ordinal.is_multiple_of(mixes);
        before.filter(|before| is_due && before.opening != opening).map_or(key, |before| before.key)
    }

    /// Never returns: the client sees a hanging process.
    pub(crate) async fn hang(&self) {
        std::future::pending::<()>().await;
    }

    /// Returns the fault for this request; marks a fault that happens once as done.
    pub(crate) fn fault_for(&self, ordinal: u64, body: &[u8]) -> Option<Fault> {
        let script = self.script();
        let hits = |fault: &&Fault| {
            fault.at.is_none_or(|at| at == ordinal)
                && fault.from.is_none_or(|from| ordinal >= from)
                && fault.body_has.as_ref().is_none_or(|text| contains(body, text.as_bytes()))
                && fault.once.as_ref().is_none_or(|path| std::fs::File::create_new(path).is_ok())
        };
        script.faults.iter().find(hits).cloned()
    }

    pub(crate) fn ignores_term(&self) -> bool {
        self.script().on_term == OnTerm::Ignore
    }
}

fn contains(haystack: &[u8], needle: &[u8]) -> bool {
    needle.is_empty() || haystack.windows(needle.len()).any(|window| window == needle)
}

struct Waiting<'a>(&'a Engine);

impl<'a> Waiting<'a> {
    fn new(engine: &'a Engine) -> Self {
        engine.waiting.fetch_add(1, Ordering::Relaxed);
        Self(engine)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Busy slot, freed on drop.
#[derive(Debug)]
pub(crate) struct Slot {
    engine: Arc<Engine>,
    pub(crate) index: usize,
    _permit: Option<OwnedSemaphorePermit>,
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.engine.slots.lock().unwrap_or_else(PoisonError::into_inner)[self.index] = None;
    }
}
