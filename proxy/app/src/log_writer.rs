//! The way of log lines to standard error: through a thread of its own, so that a reader that stops reading stops no
//! request.
//!
//! ```text
//!   any task --push--> [bounded queue] --> thread --write--> standard error
//!               |  full: counted, and told when there is room again
//! ```

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tracing_subscriber::fmt::MakeWriter;

/// Takes lines and never waits for their reader. Cheap to clone.
#[derive(Clone)]
pub(crate) struct LogWriter(Arc<Shared>);

struct Shared {
    capacity: usize,
    queue: Mutex<Queue>,
    pushed: Condvar,
    written: Condvar,
}

#[derive(Default)]
struct Queue {
    lines: VecDeque<Vec<u8>>,
    lost: u64,
    /// The thread has taken lines that it has not written yet.
    writing: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LogWriter {
    /// Starts the thread, which lives as long as the process. `capacity`: lines that may wait.
    pub(crate) fn start(capacity: usize, mut out: impl Write + Send + 'static) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            capacity: capacity.max(1),
            queue: Mutex::default(),
            pushed: Condvar::new(),
            written: Condvar::new(),
        });
        let taker = shared.clone();
        std::thread::Builder::new().name("log".to_owned()).spawn(move || {
            loop {
                write_next(&taker, &mut out);
            }
        })?;
        Ok(Self(shared))
    }

    /// Waits until everything that was taken so far is written, or until `timeout`.
    pub(crate) fn flush(&self, timeout: Duration) {
        let pending = |queue: &mut Queue| queue.writing || !queue.lines.is_empty();
        drop(self.0.written.wait_timeout_while(self.0.lock(), timeout, pending));
    }
}

fn write_next(shared: &Shared, out: &mut impl Write) {
    let mut queue = shared.lock();
    while queue.lines.is_empty() {
        queue = shared.pushed.wait(queue).unwrap_or_else(PoisonError::into_inner);
    }
    let lines = std::mem::take(&mut queue.lines);
    let lost = std::mem::take(&mut queue.lost);
    queue.writing = true;
    drop(queue);
    // If nobody can read it, there is nobody to tell.
    for line in lines {
        drop(out.write_all(&line));
    }
    if lost > 0 {
        drop(writeln!(out, "{lost} log lines were left out here, because they were not read in time"));
    }
    drop(out.flush());
    shared.lock().writing = false;
    shared.written.notify_all();
}

impl Write for LogWriter {
    /// One call is one line: the formatter hands over whole ones.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut queue = self.0.lock();
        if queue.lines.len() < self.0.capacity {
            queue.lines.push_back(line.to_vec());
            drop(queue);
            self.0.pushed.notify_one();
        } else {
            queue.lost += 1;
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for LogWriter {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, Sender, channel};

    const LONG: Duration = Duration::from_secs(20);

    #[derive(Clone, Default)]
    struct Kept(Arc<Mutex<Vec<u8>>>);

    impl Kept {
        fn text(&self) -> String {
            String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
        }
    }

    impl Write for Kept {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Tells that it was asked to write, and writes when the gate is gone.
    struct Gated {
        kept: Kept,
        asked: Sender<()>,
        gate: Receiver<()>,
    }

    impl Write for Gated {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.asked.send(()).ok();
            self.gate.recv().ok();
            self.kept.write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn lines_arrive_in_order_and_a_flush_waits_for_them() {
        let kept = Kept::default();
        let mut writer = LogWriter::start(1000, kept.clone()).unwrap();
        let mut expected = String::new();
        for line in 0..500 {
            let line = format!("{line}\n");
            writer.write_all(line.as_bytes()).unwrap();
            expected.push_str(&line);
        }
        LogWriter::flush(&writer, LONG);
        assert_eq!(kept.text(), expected);
    }

    #[test]
    fn a_reader_that_does_not_read_stops_nobody_and_is_told_what_it_missed() {
        let kept = Kept::default();
        let ((asked, is_asked), (close, gate)) = (channel(), channel());
        let mut writer = LogWriter::start(2, Gated { kept: kept.clone(), asked, gate }).unwrap();
        writer.write_all(b"1\n").unwrap();
        is_asked.recv_timeout(LONG).unwrap();
        for line in ["2\n", "3\n", "4\n", "5\n"] {
            writer.write_all(line.as_bytes()).unwrap();
        }
        LogWriter::flush(&writer, Duration::ZERO);
        drop(close);
        LogWriter::flush(&writer, LONG);
        let text = kept.text();
        assert!(text.starts_with("1\n2\n3\n2 log lines were left out here"), "{text}");
    }
}
