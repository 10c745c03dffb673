//! The file by which a generation is asked to give memory back: made for it, announced, written, read and removed.
//!
//! It lies beside the socket in the private directory, is made before the process and removed after it, and is never cut
//! short or replaced in between. Nobody maps it. A build without the fixes `reclaim-heap` and `reclaim-cuda` does not know
//! the variable; who knows it holds a lock on a block of the file, so that nobody has to be asked to know who would answer.
//!
//! A `LLAMA_WARDEN_RECLAIM` in the model's own environment is its owner's, and nobody else asks there.
//!
//! | file | job |
//! |---|---|
//! | `layout` | bytes to requests and answers |

mod layout;
#[cfg(test)]
mod tests;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::{Flock, FlockOffsetType, FlockType, fcntl_getlk};
use tokio::time::Instant;
use warden_policies::reclaim::{Given, Outcome, Parts};

use layout::{Answer, BLOCK, BLOCKS, Part};

use crate::clock;
use crate::spec::Command;

/// The variable that tells a process where it is asked.
pub(crate) const VARIABLE: &str = "LLAMA_WARDEN_RECLAIM";

/// How often an answer is looked for. The process itself looks four times a second.
const LOOK: Duration = Duration::from_millis(50);

/// Beyond the time that a process may take, for it to see the request and to say that its time is up.
const GRACE: Duration = Duration::from_secs(2);

/// What came of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reclaimed {
    pub(crate) outcome: Outcome,
    /// Of the heap, if it was asked for.
    pub(crate) heap: Option<Outcome>,
    /// Of graphs, pools and cuBLAS, if they were.
    pub(crate) cuda: Option<Outcome>,
    pub(crate) given: Given,
    /// Milliseconds at work, by the process's own count.
    pub(crate) ms: u64,
}

impl Reclaimed {
    /// Nobody could be asked.
    pub(crate) const NOBODY: Self = Self {
        outcome: Outcome::Nobody,
        heap: None,
        cuda: None,
        given: Given { graphs_host: 0, graphs_device: 0, pools: 0, cublas: 0, heap: 0 },
        ms: 0,
    };
}

/// The file of the generation that listens on this socket: equally unique.
pub(crate) fn beside(socket: &Path) -> PathBuf {
    socket.with_extension("reclaim")
}

/// Tells a process where it will be asked, or that nobody will ask it, unless its own environment says something.
pub(crate) fn announce(command: &mut Command, socket: &Path, wanted: bool) {
    if command.env.iter().any(|(name, _)| name == VARIABLE) {
        return;
    }
    if wanted {
        command.env.push((VARIABLE.to_owned(), beside(socket).to_string_lossy().into_owned()));
    } else {
        // Inherited from us, it would be somebody else's.
        command.env_remove.push(VARIABLE.to_owned());
    }
}

/// Removes it.
pub(crate) fn remove(socket: &Path) {
    drop(std::fs::remove_file(beside(socket)));
}

/// Where a process is asked.
#[derive(Debug)]
pub(crate) struct Desk {
    file: File,
}

impl Desk {
    /// Makes the file that a process was told of, before the process. `None` if it was told of none of ours. Blocks for a
    /// small write.
    pub(crate) fn make(command: &Command, socket: &Path) -> Option<Self> {
        let path = beside(socket);
        let told = command.env.iter().rfind(|(name, _)| name == VARIABLE);
        if told.is_none_or(|(_, told)| Path::new(told) != path) {
            return None;
        }
        // Left by a supervisor with our process id that could not clean up.
        drop(std::fs::remove_file(&path));
        let made = || -> io::Result<Self> {
            let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path)?;
            file.write_all_at(&layout::empty(), 0)?;
            Ok(Self { file })
        };
        match made() {
            Ok(desk) => Some(desk),
            Err(error) => {
                // It runs without.
                let path = path.display();
                tracing::warn!(%path, %error, "the process cannot be asked to give memory back");
                drop(std::fs::remove_file(beside(socket)));
                None
            }
        }
    }

    /// The one that a process was told of, which runs already. Blocks for a small call.
    pub(crate) fn reopen(command: &Command, socket: &Path) -> Option<Self> {
        let path = beside(socket);
        let told = command.env.iter().rfind(|(name, _)| name == VARIABLE);
        let told = told.is_some_and(|(_, told)| Path::new(told) == path);
        let file = told.then(|| OpenOptions::new().read(true).write(true).open(&path).ok())?;
        file.map(|file| Self { file })
    }

    /// Who can be asked now. Blocks for some small calls.
    pub(crate) fn parts(&self) -> Parts {
        Parts { heap: !self.answers(Part::Heap).is_empty(), cuda: !self.answers(Part::Cuda).is_empty() }
    }

    /// Asks for everything and waits for the answers: the CUDA part first, as what it lets go of lies on in the heap.
    /// `wait`: how long a process may look for a good moment, each time.
    pub(crate) async fn reclaim(&self, wait: Duration) -> Reclaimed {
        let asked = self.parts();
        let cuda = if asked.cuda { Some(self.ask(Part::Cuda, wait).await) } else { None };
        let heap = if asked.heap { Some(self.ask(Part::Heap, wait).await) } else { None };
        let both = [cuda, heap].into_iter().flatten();
        let outcome = both.clone().map(|(outcome, ..)| outcome).reduce(Outcome::and);
        Reclaimed {
            outcome: outcome.unwrap_or(Outcome::Nobody),
            heap: heap.map(|(outcome, ..)| outcome),
            cuda: cuda.map(|(outcome, ..)| outcome),
            given: both.clone().fold(Given::default(), |sum, (_, given, _)| sum.with(given)),
            ms: both.map(|(.., ms)| ms).fold(0, u64::saturating_add),
        }
    }

    /// One request to one part of each process that is there.
    async fn ask(&self, part: Part, wait: Duration) -> (Outcome, Given, u64) {
        let nothing = (Outcome::NoAnswer, Given::default(), 0);
        let Some(seq) = self.put(part, wait) else { return nothing };
        let until = clock::after(Instant::now(), wait.saturating_add(GRACE));
        loop {
            tokio::time::sleep(LOOK).await;
            let there = self.answers(part);
            // Who came after the request does not answer it, and who has gone cannot.
            let mut open = there.iter().filter(|answer| answer.seq < seq);
            let last = Instant::now() >= until;
            if open.next().is_some() && !last {
                continue;
            }
            let given = there
                .iter()
                .filter(|answer| answer.seq == seq)
                .filter_map(|answer| Some((answer.outcome?, answer.given, u64::from(answer.ms))));
            let late = there.iter().any(|answer| answer.seq < seq).then_some(nothing);
            let sum = given
                .chain(late)
                .reduce(|one, other| (one.0.and(other.0), one.1.with(other.1), one.2.max(other.2)));
            return sum.unwrap_or(nothing);
        }
    }

    /// Writes the request with one write. `None` if that is not possible.
    fn put(&self, part: Part, wait: Duration) -> Option<u64> {
        let mut block = [0; BLOCK];
        self.file.read_exact_at(&mut block, BLOCK as u64).ok()?;
        let seq = layout::asked(&block).unwrap_or(0) + 1;
        let deadline = u32::try_from(wait.as_millis()).unwrap_or(u32::MAX);
        let written = self.file.write_all_at(&layout::request(seq, part.asks(), deadline), BLOCK as u64);
        written
            .inspect_err(|error| tracing::warn!(%error, "a process could not be asked to give memory back"))
            .ok()?;
        Some(seq)
    }

    /// What the processes that are there have said last: those that hold a lock on their block.
    fn answers(&self, part: Part) -> Vec<Answer> {
        let mut blocks = vec![0; BLOCK * BLOCKS];
        let start = part.start();
        if self.file.read_exact_at(&mut blocks, start as u64).is_err() {
            return Vec::new();
        }
        let each = blocks.as_chunks::<BLOCK>().0.iter().enumerate();
        let of = |(index, block): (usize, &[u8; BLOCK])| {
            let answer = layout::answer(block, part)?;
            self.is_held(start + index * BLOCK).then_some(answer)
        };
        each.filter_map(of).collect()
    }

    fn is_held(&self, at: usize) -> bool {
        let lock = Flock {
            start: at as u64,
            length: BLOCK as u64,
            pid: None,
            typ: FlockType::WriteLock,
            offset_type: FlockOffsetType::Set,
        };
        matches!(fcntl_getlk(&self.file, &lock), Ok(Some(_)))
    }
}
