//! The way of log lines to standard error: through a thread of its own, so that a reader that stops reading stops no
//! request.
//!
//! ```text
//!   any task --push--> [bounded queue] --> thread: gathers for a moment --one write--> standard error
//!               |  full: counted, and told when there is room again
//! ```
//!
//! Only the first line after a rest wakes the thread. What comes while it gathers costs no system call, so that a line
//! for each request does not show in what requests cost.

use std::io::{self, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tracing_subscriber::fmt::MakeWriter;

/// How long lines are gathered: nobody who reads a log notices, and thousands of lines go out in one write.
const GATHER: Duration = Duration::from_millis(20);

/// A burst may need more; then the memory goes back.
const KEPT_BYTES: usize = 64 * 1024;

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
    lines: usize,
    bytes: Vec<u8>,
    lost: u64,
    /// The thread waits for the first line.
    rests: bool,
    /// Somebody waits for all of it to be written.
    hurry: bool,
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
            let mut spare = Vec::new();
            loop {
                write_next(&taker, &mut spare, &mut out);
            }
        })?;
        Ok(Self(shared))
    }

    /// Waits until everything that was taken so far is written, or until `timeout`.
    pub(crate) fn flush(&self, timeout: Duration) {
        let mut queue = self.0.lock();
        queue.hurry = true;
        self.0.pushed.notify_one();
        let pending = |queue: &mut Queue| queue.writing || queue.lines > 0;
        drop(self.0.written.wait_timeout_while(queue, timeout, pending));
    }
}

/// Writes what is there, or what comes next. `spare` is the buffer that is filled meanwhile.
fn write_next(shared: &Shared, spare: &mut Vec<u8>, out: &mut impl Write) {
    let mut queue = shared.lock();
    while queue.lines == 0 {
        queue.rests = true;
        queue.hurry = false;
        queue = shared.pushed.wait(queue).unwrap_or_else(PoisonError::into_inner);
    }
    queue.rests = false;
    let gathers = |queue: &mut Queue| !queue.hurry && queue.lines < shared.capacity / 2;
    queue = match shared.pushed.wait_timeout_while(queue, GATHER, gathers) {
        Ok((queue, _)) => queue,
        Err(poisoned) => poisoned.into_inner().0,
    };
    std::mem::swap(&mut queue.bytes, spare);
    queue.lines = 0;
    let lost = std::mem::take(&mut queue.lost);
    queue.writing = true;
    drop(queue);
    // If nobody can read it, there is nobody to tell.
    drop(out.write_all(spare));
    if lost > 0 {
        drop(writeln!(out, "{lost} log lines were left out here, because they were not read in time"));
    }
    drop(out.flush());
    spare.clear();
    spare.shrink_to(KEPT_BYTES);
    shared.lock().writing = false;
    shared.written.notify_all();
}

impl Write for LogWriter {
    /// One call is one line: the formatter hands over whole ones.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut queue = self.0.lock();
        if queue.lines < self.0.capacity {
            queue.bytes.extend_from_slice(line);
            queue.lines += 1;
            // Half of the room is used: it need not gather any longer.
            let wakes = std::mem::take(&mut queue.rests) || queue.lines == self.0.capacity / 2;
            drop(queue);
            if wakes {
                self.0.pushed.notify_one();
            }
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
        LogWriter::flush(&writer, Duration::ZERO);
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
