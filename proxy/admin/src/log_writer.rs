//! Writes log lines to standard error or a file on a separate thread, so that a reader that stops reading
//! delays no request.
//!
//! ```text
//!   any task --push--> [bounded queue] --> thread: gathers lines for a moment --one write--> standard error
//!               |  queue full: lines are counted as lost, and reported when there is room again
//! ```
//!
//! Only the first line after a pause wakes the thread. Further lines cost no system call, so that a line
//! for each request does not slow requests. Lines that cannot be written (a full disk) are counted, and the
//! owner is notified when that begins and when it ends.

use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;
use tracing_subscriber::fmt::MakeWriter;
use warden_supervisor::sync::lock;

/// Time to gather lines: too short for a reader to notice, enough to write thousands of lines at once.
const GATHER_TIME: Duration = Duration::from_millis(20);

/// Least time between two reports of failed writes, because a disk may fill up again and again.
const REPORT_INTERVAL: Duration = Duration::from_secs(60);

/// Size to which the buffer is reduced after a burst.
const KEPT_BUFFER_BYTES: usize = 64 * 1024;

/// Queues lines and never waits for their reader. Cheap to clone.
#[derive(Clone)]
pub struct LogWriter(Arc<LogWriterShared>);

/// Change of the state of the output.
pub enum WriteTrouble<'a> {
    /// Lines cannot be written any more.
    Began(&'a io::Error),
    /// Lines are written again. Holds the total number of lines lost so far.
    Ended(u64),
}

struct LogWriterShared {
    capacity: usize,
    /// Number of lost lines, which were not queued or not written.
    lost: AtomicU64,
    /// Error if lines cannot be written at the moment.
    failing: Mutex<Option<String>>,
    queue: Mutex<LineQueue>,
    pushed: Condvar,
    written: Condvar,
}

#[derive(Default)]
struct LineQueue {
    lines: usize,
    bytes: Vec<u8>,
    lost: u64,
    /// The thread waits for the first line.
    is_idle: bool,
    flush_requested: bool,
    /// The thread has taken lines that it has not written yet.
    writing: bool,
}

impl LogWriterShared {
    fn lock(&self) -> MutexGuard<'_, LineQueue> {
        lock(&self.queue)
    }
}

impl LogWriter {
    /// Starts the thread, which lives as long as the process. `capacity`: most lines that may wait.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(
        capacity: usize,
        out: impl Write + Send + 'static,
        tell: impl FnMut(WriteTrouble<'_>) + Send + 'static,
    ) -> io::Result<Self> {
        let shared = Arc::new(LogWriterShared {
            capacity: capacity.max(1),
            lost: AtomicU64::new(0),
            failing: Mutex::default(),
            queue: Mutex::default(),
            pushed: Condvar::new(),
            written: Condvar::new(),
        });
        let taker = shared.clone();
        std::thread::Builder::new().name("log".to_owned()).spawn(move || {
            let mut spare = Vec::new();
            let mut end = LogSink { out, tell, torn: false, last_report: None };
            loop {
                write_next(&taker, &mut spare, &mut end);
            }
        })?;
        Ok(Self(shared))
    }

    /// Returns the number of lost lines.
    pub fn lost(&self) -> u64 {
        self.0.lost.load(Ordering::Relaxed)
    }

    pub(crate) fn failing(&self) -> Option<String> {
        lock(&self.0.failing).clone()
    }

    /// Waits until all lines queued so far are written, but at most for `timeout`.
    pub fn flush(&self, timeout: Duration) {
        let mut queue = self.0.lock();
        queue.flush_requested = true;
        self.0.pushed.notify_one();
        let pending = |queue: &mut LineQueue| queue.writing || queue.lines > 0;
        drop(self.0.written.wait_timeout_while(queue, timeout, pending));
    }
}

struct LogSink<W, T> {
    out: W,
    tell: T,
    /// The last line was written only in part.
    torn: bool,
    last_report: Option<Instant>,
}

impl<W: Write, T: FnMut(WriteTrouble<'_>)> LogSink<W, T> {
    fn write(&mut self, shared: &LogWriterShared, lines: &[u8]) {
        let mut done = 0;
        let written = self.write_lines(lines, &mut done);
        let mut failing = lock(&shared.failing);
        match written {
            Ok(()) => {
                if failing.take().is_some() {
                    drop(failing);
                    (self.tell)(WriteTrouble::Ended(shared.lost.load(Ordering::Relaxed)));
                }
            }
            Err(error) => {
                let missing = lines[done..].split(|&byte| byte == b'\n').count() - 1;
                shared.lost.fetch_add(missing as u64, Ordering::Relaxed);
                self.torn |= done > 0 && lines[done - 1] != b'\n';
                let first = failing.replace(error.to_string()).is_none();
                drop(failing);
                if first && self.last_report.is_none_or(|told| told.elapsed() > REPORT_INTERVAL) {
                    self.last_report = Some(Instant::now());
                    (self.tell)(WriteTrouble::Began(&error));
                }
            }
        }
    }

    /// Writes all lines. If that fails, `done` is the number of bytes written.
    fn write_lines(&mut self, lines: &[u8], done: &mut usize) -> io::Result<()> {
        if self.torn {
            // End the half line, so that the next line is not joined to it.
            self.out.write_all(b"\n")?;
            self.torn = false;
        }
        while *done < lines.len() {
            match self.out.write(&lines[*done..]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(bytes) => *done += bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.out.flush()
    }
}

/// Writes the queued lines, or waits for some. `spare` is the empty buffer that the queue gets in exchange.
fn write_next<W: Write, T: FnMut(WriteTrouble<'_>)>(
    shared: &LogWriterShared,
    spare: &mut Vec<u8>,
    end: &mut LogSink<W, T>,
) {
    let mut queue = shared.lock();
    while queue.lines == 0 {
        queue.is_idle = true;
        queue.flush_requested = false;
        queue = shared.pushed.wait(queue).unwrap_or_else(PoisonError::into_inner);
    }
    queue.is_idle = false;
    let gathers = |queue: &mut LineQueue| !queue.flush_requested && queue.lines < shared.capacity / 2;
    queue = match shared.pushed.wait_timeout_while(queue, GATHER_TIME, gathers) {
        Ok((queue, _)) => queue,
        Err(poisoned) => poisoned.into_inner().0,
    };
    std::mem::swap(&mut queue.bytes, spare);
    queue.lines = 0;
    let lost = std::mem::take(&mut queue.lost);
    queue.writing = true;
    drop(queue);
    if lost > 0 {
        let note = format!("{lost} log lines were left out here, because they were not read in time\n");
        spare.extend_from_slice(note.as_bytes());
    }
    end.write(shared, spare);
    spare.clear();
    spare.shrink_to(KEPT_BUFFER_BYTES);
    shared.lock().writing = false;
    shared.written.notify_all();
}

impl Write for LogWriter {
    /// Queues one line: the formatter writes a whole line with each call.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut queue = self.0.lock();
        if queue.lines < self.0.capacity {
            queue.bytes.extend_from_slice(line);
            queue.lines += 1;
            // If the queue is half full, wake the thread even while it gathers.
            let wakes = std::mem::take(&mut queue.is_idle) || queue.lines == self.0.capacity / 2;
            drop(queue);
            if wakes {
                self.0.pushed.notify_one();
            }
        } else {
            queue.lost += 1;
            self.0.lost.fetch_add(1, Ordering::Relaxed);
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

    /// Reports each write, and blocks until the gate is dropped.
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
        let mut writer = LogWriter::start(1000, kept.clone(), |_| ()).unwrap();
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
        let mut writer = LogWriter::start(2, Gated { kept: kept.clone(), asked, gate }, |_| ()).unwrap();
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
        assert_eq!(writer.lost(), 2);
    }

    /// A disk with this number of bytes left.
    #[derive(Clone)]
    struct Disk(Kept, Arc<Mutex<usize>>);

    impl Write for Disk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let mut left = self.1.lock().unwrap();
            let fits = bytes.len().min(*left);
            if fits == 0 && !bytes.is_empty() {
                return Err(io::ErrorKind::StorageFull.into());
            }
            *left -= fits;
            self.0.write(&bytes[..fits])
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_full_disk_is_told_once_counted_and_tears_no_later_line() {
        let (kept, left) = (Kept::default(), Arc::new(Mutex::new(7)));
        let told = Arc::new(Mutex::new(Vec::new()));
        let heard = told.clone();
        let tell = move |trouble: WriteTrouble<'_>| {
            heard.lock().unwrap().push(match trouble {
                WriteTrouble::Began(error) => error.kind().to_string(),
                WriteTrouble::Ended(lost) => format!("ended, {lost} lost"),
            });
        };
        let mut writer = LogWriter::start(100, Disk(kept.clone(), left.clone()), tell).unwrap();
        // Five bytes a line: the second one is torn.
        for line in ["one1\n", "two2\n", "thr3\n"] {
            writer.write_all(line.as_bytes()).unwrap();
            LogWriter::flush(&writer, LONG);
        }
        assert_eq!((writer.lost(), writer.failing().is_some()), (2, true));
        *left.lock().unwrap() = 1000;
        writer.write_all(b"for4\n").unwrap();
        LogWriter::flush(&writer, LONG);
        assert_eq!(kept.text(), "one1\ntw\nfor4\n");
        assert_eq!((writer.lost(), writer.failing()), (2, None));
        assert_eq!(*told.lock().unwrap(), ["no storage space", "ended, 2 lost"]);
    }
}
