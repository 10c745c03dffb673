//! Writes files of the state directory, on one thread while the program serves.
//!
//! ```text
//!     tasks, control threads ── StateWriter ──> bounded queue ──> thread `state` ──> ledger, events, …
//!                                  └── full: dropped, counted, shown in status and metrics
//! ```
//!
//! A disk may hang for minutes, or for ever. Then only this thread waits, and entries stay in the queue as
//! long as it has room.

pub(crate) mod line_file;

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::sync::lock;

/// Limit of waiting entries: enough for some hours of a fleet with few events.
const MAX_WAITING_ENTRIES: usize = 4096;
const MAX_WAITING_BYTES: usize = 8 << 20;
/// A disk that is silent for longer is reported as hanging. A working disk answers in milliseconds.
const DISK_SILENCE_LIMIT: Duration = Duration::from_secs(5);

/// Kind of stored data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum StateKind {
    /// Record of replacements, reclaims, pins and canaries: `ledger.jsonl`.
    Ledger,
    /// Log of events: `events.jsonl`.
    Events,
    /// Recorded memory readings for `policy replay`: `traces/`.
    Recordings,
    /// Memory history of earlier processes: `growth.json`.
    Growth,
    /// Memory figures over time: `series/`.
    Series,
}

impl StateKind {
    /// All kinds.
    pub const ALL: [Self; 5] = [Self::Ledger, Self::Events, Self::Recordings, Self::Growth, Self::Series];

    /// Name in status and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ledger => "ledger",
            Self::Events => "events",
            Self::Recordings => "recordings",
            Self::Growth => "growth",
            Self::Series => "series",
        }
    }
}

/// State of the writer, for status and metrics.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StateView {
    /// Number of entries waiting to be written.
    pub waiting: usize,
    /// Lost entries by kind: dropped while the disk did not answer, or not written because of an error.
    pub lost: BTreeMap<String, u64>,
    /// Present write errors by kind.
    pub failing: BTreeMap<String, String>,
    /// Seconds without an answer of the disk, if unusually long.
    pub silent_seconds: Option<f64>,
}

impl StateView {
    /// Sentence about a problem with the state directory.
    pub fn problem(&self) -> Option<String> {
        let lost: u64 = self.lost.values().sum();
        let missing = if lost > 0 { format!("; {lost} entries are missing") } else { String::new() };
        if let Some(seconds) = self.silent_seconds {
            return Some(format!("the state directory has not answered for {seconds:.0} s{missing}"));
        }
        if let Some((kind, why)) = self.failing.iter().next() {
            return Some(format!("{kind} cannot be written to the state directory: {why}{missing}"));
        }
        (lost > 0).then(|| format!("{lost} entries are missing in the state directory"))
    }
}

/// Queues data for writing without waiting for the disk. The writer thread ends after the last clone is
/// dropped and all entries are written.
#[derive(Clone, Debug)]
pub struct StateWriter {
    entries: mpsc::Sender<WriteEntry>,
    capacity: usize,
    state: Arc<Mutex<WriterState>>,
}

#[derive(Debug, Default)]
struct WriterState {
    waiting: usize,
    waiting_bytes: usize,
    /// Moment at which the present write began.
    since: Option<Instant>,
    /// True if the slow present write was logged.
    told: bool,
    lost: BTreeMap<StateKind, u64>,
    failing: BTreeMap<StateKind, String>,
}

type WriteJob = Box<dyn FnOnce() -> io::Result<()> + Send>;

enum WriteEntry {
    Write {
        kind: StateKind,
        bytes: usize,
        job: WriteJob,
    },
    /// Function to call when all earlier entries are written.
    Mark(Box<dyn FnOnce() + Send>),
}

fn write_entries(entries: &mpsc::Receiver<WriteEntry>, state: &Mutex<WriterState>) {
    for entry in entries {
        let mut now = lock(state);
        now.waiting = now.waiting.saturating_sub(1);
        match entry {
            WriteEntry::Write { kind, bytes, job } => {
                now.waiting_bytes = now.waiting_bytes.saturating_sub(bytes);
                now.since = Some(Instant::now());
                drop(now);
                note_written(state, kind, job());
            }
            WriteEntry::Mark(reached) => {
                drop(now);
                reached();
            }
        }
    }
}

fn note_written(state: &Mutex<WriterState>, kind: StateKind, done: io::Result<()>) {
    let mut state = lock(state);
    let took = state.since.take().map(|since| since.elapsed()).unwrap_or_default();
    let was_silent = std::mem::take(&mut state.told);
    let (failed_before, now) = match done {
        Ok(()) => (state.failing.remove(&kind), None),
        Err(error) => {
            *state.lost.entry(kind).or_default() += 1;
            (state.failing.insert(kind, error.to_string()), Some(error))
        }
    };
    let missing: u64 = state.lost.values().sum();
    drop(state);
    let kind = kind.as_str();
    if was_silent {
        tracing::warn!(seconds = took.as_secs(), missing, "the state directory answers again");
    }
    match (failed_before, now) {
        (None, Some(error)) => {
            tracing::error!(%kind, %error, 
                "cannot write to the state directory; actions stay in effect, and serving continues");
        }
        (Some(_), None) => tracing::info!(%kind, missing, "the state directory can be written again"),
        _ => {}
    }
}

impl StateWriter {
    /// Starts the writer thread.
    ///
    /// # Errors
    ///
    /// The system cannot start a thread.
    pub fn start() -> io::Result<Self> {
        Self::with_capacity(MAX_WAITING_ENTRIES)
    }

    fn with_capacity(capacity: usize) -> io::Result<Self> {
        let (sender, entries) = mpsc::channel();
        let state: Arc<Mutex<WriterState>> = Arc::default();
        let shown = Arc::clone(&state);
        std::thread::Builder::new()
            .name("state".to_owned())
            .spawn(move || write_entries(&entries, &shown))?;
        Ok(Self { entries: sender, capacity, state })
    }

    /// Queues a write. `bytes`: approximate memory of the entry. Returns false if too much is waiting and the
    /// entry is dropped.
    pub fn write(
        &self,
        kind: StateKind,
        bytes: usize,
        job: impl FnOnce() -> io::Result<()> + Send + 'static,
    ) -> bool {
        let mut state = lock(&self.state);
        let is_silent = state.since.is_some_and(|since| since.elapsed() > DISK_SILENCE_LIMIT);
        let tells = is_silent && !std::mem::replace(&mut state.told, true);
        let fits =
            state.waiting < self.capacity && state.waiting_bytes.saturating_add(bytes) <= MAX_WAITING_BYTES;
        if fits {
            state.waiting_bytes += bytes;
            self.queue_entry(&mut state, WriteEntry::Write { kind, bytes, job: Box::new(job) });
        } else {
            *state.lost.entry(kind).or_default() += 1;
        }
        drop(state);
        if tells {
            tracing::error!(
                seconds = DISK_SILENCE_LIMIT.as_secs(),
                "the state directory does not answer: does its disk hang? Serving continues; writes are queued, and \
                 dropped when the queue is full"
            );
        }
        fits
    }

    fn add_mark(&self, reached: impl FnOnce() + Send + 'static) {
        self.queue_entry(&mut lock(&self.state), WriteEntry::Mark(Box::new(reached)));
    }

    /// Counts and queues an entry under one lock, which keeps the order.
    fn queue_entry(&self, state: &mut WriterState, entry: WriteEntry) {
        state.waiting += 1;
        // If a job has panicked, no thread receives the entry.
        let _unwritten = self.entries.send(entry);
    }

    /// Waits until all queued entries are written or have failed. Returns false at the time limit.
    pub async fn wait_written(&self, limit: Duration) -> bool {
        #[cfg(test)]
        let held = crate::worker_threads::hold_clock();
        let (reply, reached) = oneshot::channel();
        self.add_mark(move || {
            let _left = reply.send(());
            // A paused test clock would otherwise advance to the limit at once.
            #[cfg(test)]
            drop(held);
        });
        matches!(tokio::time::timeout(limit, reached).await, Ok(Ok(())))
    }

    /// Like [`Self::wait_written`], but blocks the thread.
    pub fn flush(&self, limit: Duration) -> bool {
        let (reply, reached) = mpsc::sync_channel(1);
        self.add_mark(move || {
            let _left = reply.send(());
        });
        reached.recv_timeout(limit).is_ok()
    }

    /// State of the writer, for status and metrics.
    pub fn view(&self) -> StateView {
        let state = lock(&self.state);
        let silent = state.since.map(|since| since.elapsed()).filter(|silent| *silent > DISK_SILENCE_LIMIT);
        let name = |kind: &StateKind| kind.as_str().to_owned();
        StateView {
            waiting: state.waiting,
            lost: state.lost.iter().map(|(kind, lost)| (name(kind), *lost)).collect(),
            failing: state.failing.iter().map(|(kind, why)| (name(kind), why.clone())).collect(),
            silent_seconds: silent.map(|silent| silent.as_secs_f64()),
        }
    }
}

/// True if a start may continue: a full disk may have room again by the first write.
pub fn is_tolerable(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
        || error.raw_os_error() == Some(libc::EIO)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    #[test]
    fn a_disk_that_hangs_stops_nobody_and_what_does_not_fit_is_counted_by_kind() {
        let writer = StateWriter::with_capacity(3).unwrap();
        let (release, hangs) = mpsc::channel::<()>();
        let (began, begins) = mpsc::channel();
        assert!(writer.write(StateKind::Ledger, 1, move || {
            began.send(()).unwrap();
            let _released = hangs.recv_timeout(LONG);
            Ok(())
        }));
        begins.recv_timeout(LONG).unwrap();
        let written = Arc::new(Mutex::new(Vec::new()));
        let put = |number: u32| {
            let written = written.clone();
            move || {
                lock(&written).push(number);
                Ok(())
            }
        };
        let fits: Vec<bool> = (0..5).map(|number| writer.write(StateKind::Events, 1, put(number))).collect();
        assert_eq!(fits, [true, true, true, false, false]);
        assert!(!writer.write(StateKind::Ledger, 1, put(9)) && !writer.flush(Duration::ZERO));
        let view = writer.view();
        // Marks of waiters that timed out are in the queue, too.
        assert_eq!((view.waiting, view.lost["events"], view.lost["ledger"]), (4, 2, 1));
        assert!(view.problem().unwrap().contains("3 entries are missing"), "{view:?}");
        drop(release);
        assert!(writer.flush(LONG));
        assert_eq!(*lock(&written), [0, 1, 2]);
        assert!(writer.write(StateKind::Events, 1, put(7)) && writer.flush(LONG));
        assert!(
            !writer.write(StateKind::Events, MAX_WAITING_BYTES + 1, put(8)),
            "larger than all that may wait"
        );
    }

    #[test]
    fn what_fails_is_counted_and_shown_until_it_succeeds() {
        let writer = StateWriter::start().unwrap();
        writer.write(StateKind::Ledger, 1, || Err(io::ErrorKind::StorageFull.into()));
        assert!(writer.flush(LONG));
        let view = writer.view();
        assert_eq!((view.lost["ledger"], view.failing.len(), view.silent_seconds), (1, 1, None));
        assert!(view.problem().unwrap().starts_with("ledger cannot be written"), "{view:?}");
        writer.write(StateKind::Ledger, 1, || Ok(()));
        assert!(writer.flush(LONG));
        assert_eq!((writer.view().lost["ledger"], writer.view().failing.len()), (1, 0));
    }

    #[tokio::test]
    async fn all_that_was_given_is_written_though_the_last_handle_is_gone() {
        let writer = StateWriter::start().unwrap();
        let (reply, written) = oneshot::channel();
        writer.write(StateKind::Growth, 1, move || reply.send(()).map_err(|()| io::ErrorKind::Other.into()));
        assert!(writer.wait_written(LONG).await);
        let (reply, last) = oneshot::channel();
        writer.write(StateKind::Growth, 1, move || reply.send(()).map_err(|()| io::ErrorKind::Other.into()));
        drop(writer);
        written.await.unwrap();
        last.await.unwrap();
    }
}
