//! Output of the children. A ring per model keeps past lines for listeners.

use std::collections::VecDeque;
use std::sync::Mutex;

use serde::{Deserialize, Serialize};
use tokio::sync::broadcast;
use warden_policies::{GenerationId, ModelName, secrets};

use crate::clock;
use crate::sync::lock;

/// Output stream of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OutputStream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// A line of output.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogLine {
    /// Time of reading, RFC 3339.
    pub at: String,
    /// Model.
    pub model: ModelName,
    /// Generation of the process.
    pub generation: GenerationId,
    /// Output stream.
    pub stream: OutputStream,
    /// Text without the line end, cut to the configured length.
    pub text: String,
}

/// Past lines, and a receiver for new ones.
#[derive(Debug)]
pub struct LogTail {
    /// Lines still kept, oldest first.
    pub lines: Vec<LogLine>,
    /// Receiver for the lines after `lines`, without a gap. A slow listener misses lines and is notified.
    pub receiver: broadcast::Receiver<LogLine>,
}

/// Maximum lag of a listener in lines, which limits its buffer.
pub(crate) const MAX_LISTENER_LAG: usize = 4096;

#[derive(Debug)]
pub(crate) struct LogRing {
    model: ModelName,
    keep: usize,
    lines: Mutex<RingLines>,
}

#[derive(Debug, Default)]
struct RingLines {
    kept: VecDeque<LogLine>,
    /// Lines so far, with those no longer kept.
    total: u64,
    /// Channel to listeners, created for the first one, because its buffer takes 200 KiB.
    sender: Option<broadcast::Sender<LogLine>>,
}

impl LogRing {
    pub(crate) fn new(model: ModelName, keep: usize) -> Self {
        let keep = keep.max(1);
        Self { model, keep, lines: Mutex::default() }
    }

    /// Keeps a line and sends it to listeners. Our own log gets a copy without secrets, because it may be
    /// collected elsewhere.
    pub(crate) fn push(&self, generation: GenerationId, stream: OutputStream, text: String) {
        tracing::info!(target: "llama_server", model = %self.model, %generation, "{}", secrets::redact_text(&text));
        let line = LogLine { at: clock::wall_time(), model: self.model.clone(), generation, stream, text };
        // Send under the lock, so that a new listener neither misses a line nor gets it twice.
        let mut lines = lock(&self.lines);
        if lines.kept.len() >= self.keep {
            lines.kept.pop_front();
        }
        lines.total += 1;
        if let Some(sender) = lines.sender.take_if(|sender| sender.receiver_count() == 0) {
            drop(sender);
        }
        if let Some(sender) = &lines.sender {
            drop(sender.send(line.clone()));
        }
        lines.kept.push_back(line);
    }

    pub(crate) fn tail(&self) -> LogTail {
        let mut lines = lock(&self.lines);
        let sender =
            lines.sender.get_or_insert_with(|| broadcast::Sender::new(self.keep.min(MAX_LISTENER_LAG)));
        let receiver = sender.subscribe();
        LogTail { lines: lines.kept.iter().cloned().collect(), receiver }
    }

    /// Kept output of one process.
    pub(crate) fn lines_of(&self, generation: GenerationId) -> Vec<String> {
        self.lines_since(generation, 0)
    }

    /// Lines of all processes of the model so far.
    pub(crate) fn line_count(&self) -> u64 {
        lock(&self.lines).total
    }

    /// Kept lines of one process after the model's first `heard` lines.
    pub(crate) fn lines_since(&self, generation: GenerationId, heard: u64) -> Vec<String> {
        let lines = lock(&self.lines);
        let gone = lines.total - lines.kept.len() as u64;
        let skip = usize::try_from(heard.saturating_sub(gone)).unwrap_or(usize::MAX);
        let new = lines.kept.iter().skip(skip).filter(|line| line.generation == generation);
        new.map(|line| line.text.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tail_has_the_last_lines_and_then_the_new_ones_without_a_gap() {
        let ring = LogRing::new(ModelName::new("m"), 2);
        for text in ["a", "b", "c"] {
            ring.push(GenerationId(1), OutputStream::Stderr, text.to_owned());
        }
        let mut tail = ring.tail();
        ring.push(GenerationId(2), OutputStream::Stdout, "d".to_owned());
        assert_eq!(tail.lines.iter().map(|line| line.text.as_str()).collect::<Vec<_>>(), ["b", "c"]);
        assert_eq!(tail.receiver.try_recv().unwrap().text, "d");
        assert_eq!(ring.lines_of(GenerationId(1)), ["c"]);
    }
}
