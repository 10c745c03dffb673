//! Reads a child's output line by line, and limits how much of it is logged.
//!
//! ```text
//!     line ── same as the last one? ── yes ── counted ──────────────────┐
//!              └ no ── limit of this second reached? ── no ── logged    │  each second, and at the end:
//!                        └ yes ── counted, the last ones kept ──────────┴─> notices and the kept lines
//! ```
//!
//! The newest lines of a flood are kept, because a crashing process gives the reason in its last line.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::net::unix::pipe;
use tokio::time::{Duration, Instant, sleep_until};
use tokio_util::sync::CancellationToken;

/// Bytes per read. A pipe holds 64 KiB; smaller pieces only cost more calls.
const CHUNK_BYTES: usize = 8 * 1024;
/// Limit per stream and [`SLICE_TIME`], 16 MB a second: a flood must not delay other models.
const SLICE_BYTES: usize = 800 * 1024;
const SLICE_TIME: Duration = Duration::from_millis(50);

/// Log limit per stream. A server that logs each token of several slots writes a few hundred lines.
const LINES_PER_SECOND: u32 = 1000;
/// Log limit after a quiet time. A big model logs about 600 lines while it loads, or 3,000 with verbose
/// logging.
const BURST_LINES: u32 = 5000;
/// Last lines of a flood to keep: enough for a crash with a stack trace.
const FLOOD_LINES_KEPT: usize = 40;
const NOTICE_INTERVAL: Duration = Duration::from_secs(1);
const REPEAT_SHOWN_BYTES: usize = 200;

/// Reads a stream until it ends or `over` is cancelled. Adds the number of bytes to `said`. At the
/// cancellation, bytes after the last line end count as a line.
///
/// A line ends with LF, CR LF or CR (progress bars). Bytes beyond `longest` and blank lines are dropped,
/// and invalid UTF-8 is replaced.
pub(crate) async fn follow_lines(
    from: Arc<pipe::Receiver>,
    longest: usize,
    over: CancellationToken,
    said: &AtomicU64,
    mut each: impl FnMut(String),
) {
    let mut chunk = vec![0; CHUNK_BYTES];
    let mut line = Vec::new();
    let mut gate = FloodGate::new(Instant::now());
    let (mut slice, mut of_slice) = (Instant::now(), 0);
    loop {
        let due = gate.due;
        tokio::select! {
            biased;
            () = over.cancelled() => break,
            () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                gate.write_notices(Instant::now(), &mut each);
                continue;
            }
            ready = from.readable() => if ready.is_err() { break },
        }
        match from.try_read(&mut chunk) {
            Ok(0) => break,
            Ok(count) => {
                said.fetch_add(count as u64, Ordering::Relaxed);
                let now = Instant::now();
                take_lines(&mut line, &chunk[..count], longest, &mut |text| {
                    gate.take_line(text, now, &mut each);
                });
                if now.saturating_duration_since(slice) >= SLICE_TIME {
                    (slice, of_slice) = (now, 0);
                }
                of_slice += count;
                if of_slice >= SLICE_BYTES {
                    tokio::select! {
                        () = over.cancelled() => break,
                        () = sleep_until(slice + SLICE_TIME) => {}
                    }
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                tracing::debug!(%error, "cannot read a child's output");
                break;
            }
        }
    }
    let now = Instant::now();
    finish_line(&mut line, &mut |text| gate.take_line(text, now, &mut each));
    gate.finish(now, &mut each);
}

fn take_lines(line: &mut Vec<u8>, mut rest: &[u8], longest: usize, each: &mut impl FnMut(&[u8])) {
    while let Some(end) = rest.iter().position(|byte| matches!(byte, b'\n' | b'\r')) {
        push_bytes(line, &rest[..end], longest);
        finish_line(line, each);
        rest = &rest[end + 1..];
    }
    push_bytes(line, rest, longest);
}

fn push_bytes(line: &mut Vec<u8>, bytes: &[u8], longest: usize) {
    let room = longest.saturating_sub(line.len());
    line.extend_from_slice(&bytes[..bytes.len().min(room)]);
}

fn finish_line(line: &mut Vec<u8>, each: &mut impl FnMut(&[u8])) {
    let text = line.trim_ascii_end();
    if !text.is_empty() {
        each(text);
    }
    line.clear();
}

/// Rate limit for one output stream of a child.
#[derive(Debug)]
struct FloodGate {
    last: Vec<u8>,
    repeats: u64,
    allowed: u32,
    refilled: Instant,
    left_out: u64,
    newest: VecDeque<Vec<u8>>,
    /// Time of the next notices.
    due: Option<Instant>,
}

impl FloodGate {
    fn new(now: Instant) -> Self {
        Self {
            last: Vec::new(),
            repeats: 0,
            allowed: BURST_LINES,
            refilled: now,
            left_out: 0,
            newest: VecDeque::new(),
            due: None,
        }
    }

    /// Handles a line, and calls `each` with the lines to log.
    fn take_line(&mut self, line: &[u8], now: Instant, each: &mut impl FnMut(String)) {
        if line == self.last.as_slice() {
            self.repeats += 1;
            self.due.get_or_insert(now + NOTICE_INTERVAL);
            return;
        }
        self.end_repeats(now, each);
        self.last.clear();
        self.last.extend_from_slice(line);
        self.pass_line(line, now, each);
    }

    fn write_notices(&mut self, now: Instant, each: &mut impl FnMut(String)) {
        if self.due.is_none_or(|due| now < due) {
            return;
        }
        self.end_flood(now, each);
        self.end_repeats(now, each);
        self.due = (!self.newest.is_empty()).then(|| now + NOTICE_INTERVAL);
    }

    fn finish(&mut self, now: Instant, each: &mut impl FnMut(String)) {
        self.end_flood(now, each);
        self.end_repeats(now, each);
        self.end_flood(now, each);
        self.due = None;
    }

    fn pass_line(&mut self, line: &[u8], now: Instant, each: &mut impl FnMut(String)) {
        if self.newest.is_empty() {
            self.refill(now);
            if self.allowed > 0 {
                self.allowed -= 1;
                each(text(line));
                return;
            }
        }
        if self.newest.len() == FLOOD_LINES_KEPT {
            self.newest.pop_front();
            self.left_out += 1;
        }
        self.newest.push_back(line.to_vec());
        self.due.get_or_insert(now + NOTICE_INTERVAL);
    }

    fn refill(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.refilled).as_millis();
        let more = u32::try_from(passed.saturating_mul(LINES_PER_SECOND.into()) / 1000).unwrap_or(u32::MAX);
        if more > 0 {
            self.allowed = self.allowed.saturating_add(more).min(BURST_LINES);
            self.refilled = now;
        }
    }

    fn end_flood(&mut self, now: Instant, each: &mut impl FnMut(String)) {
        if self.left_out > 0 {
            each(format!(
                "{} lines left out: it writes more than {LINES_PER_SECOND} lines a second; the newest ones follow",
                self.left_out
            ));
            self.left_out = 0;
        }
        for line in self.newest.drain(..) {
            each(text(&line));
        }
        self.refill(now);
    }

    fn end_repeats(&mut self, now: Instant, each: &mut impl FnMut(String)) {
        match std::mem::take(&mut self.repeats) {
            0 => {}
            1 => {
                let line = self.last.clone();
                self.pass_line(&line, now, each);
            }
            repeats => {
                let shown = text(&self.last[..self.last.len().min(REPEAT_SHOWN_BYTES)]);
                let notice = format!("last line repeated {repeats} times: {shown}");
                self.pass_line(notice.as_bytes(), now, each);
            }
        }
    }
}

fn text(line: &[u8]) -> String {
    String::from_utf8_lossy(line).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[expect(clippy::disallowed_methods, reason = "tests stop where the system has no thread to give")]
    async fn lines(text: &[u8], longest: usize) -> Vec<String> {
        let mut lines = Vec::new();
        let (reader, mut writer) = io::pipe().unwrap();
        let reader = Arc::new(pipe::Receiver::from_owned_fd(reader.into()).unwrap());
        let text = text.to_vec();
        let writing = tokio::task::spawn_blocking(move || io::Write::write_all(&mut writer, &text));
        follow_lines(reader, longest, CancellationToken::new(), &AtomicU64::new(0), |line| lines.push(line))
            .await;
        writing.await.unwrap().unwrap();
        lines
    }

    #[tokio::test]
    async fn lines_end_with_lf_crlf_or_cr_and_the_last_one_with_the_stream() {
        assert_eq!(lines(b"a\nb\r\n\n 10%\r 20%\rend", 99).await, ["a", "b", " 10%", " 20%", "end"]);
    }

    #[tokio::test]
    async fn a_flood_is_folded_and_all_of_it_is_read() {
        let text = "the same\n".repeat(500_000) + "the end";
        let lines = lines(text.as_bytes(), 99).await;
        assert!(lines.len() < 20, "{}", lines.len());
        assert_eq!(lines.last().unwrap(), "the end");
    }

    #[tokio::test]
    async fn long_lines_are_cut_and_dirty_bytes_replaced() {
        let mut text = vec![b'x'; 100_000];
        text.extend_from_slice(b"\nshort \xff\n");
        assert_eq!(lines(&text, 10).await, ["xxxxxxxxxx", "short \u{fffd}"]);
    }

    /// Writes lines at a rate for some seconds, and returns the logged ones.
    fn written(a_second: u64, seconds: u64, line: impl Fn(u64) -> String) -> Vec<String> {
        let start = Instant::now();
        let mut gate = FloodGate::new(start);
        let mut taken = Vec::new();
        for n in 0..a_second * seconds {
            let now = start + Duration::from_micros(n * 1_000_000 / a_second);
            gate.write_notices(now, &mut |line| taken.push(line));
            gate.take_line(line(n).as_bytes(), now, &mut |line| taken.push(line));
        }
        gate.finish(start + Duration::from_secs(seconds), &mut |line| taken.push(line));
        taken
    }

    #[test]
    fn a_line_that_is_repeated_for_ever_costs_one_line_a_second_and_its_count_is_said() {
        let taken = written(200_000, 4, |_| "the same".to_owned());
        assert_eq!(taken[0], "the same");
        assert!(taken.len() <= 6, "{taken:?}");
        let counted = |line: &String| {
            let rest = line.strip_prefix("last line repeated ")?;
            rest.split(' ').next()?.parse::<u64>().ok()
        };
        assert_eq!(taken.iter().filter_map(counted).sum::<u64>(), 200_000 * 4 - 1, "{taken:?}");
    }

    #[test]
    fn different_lines_are_bounded_what_is_left_out_is_counted_and_the_last_line_is_kept() {
        let taken = written(100_000, 4, |n| format!("line {n}"));
        assert!(taken.len() < 5000 + 4 * 1100, "{}", taken.len());
        assert_eq!(taken.last().unwrap(), "line 399999");
        let out = |line: &String| line.split_once(" lines left out")?.0.parse::<u64>().ok();
        let left_out: u64 = taken.iter().filter_map(out).sum();
        let lines: Vec<u64> =
            taken.iter().filter_map(|line| line.strip_prefix("line ")?.parse().ok()).collect();
        assert_eq!(left_out + lines.len() as u64, 400_000);
        assert!(lines.is_sorted(), "the order stays");
    }

    #[test]
    fn what_an_ordinary_server_writes_is_taken_whole() {
        let verbose = written(900, 10, |n| format!("line {}", n / 2));
        assert_eq!(verbose.len(), 9000, "a line that comes twice is not folded");
        let start = Instant::now();
        let (mut gate, mut taken) = (FloodGate::new(start), Vec::new());
        for n in 0..3000 {
            gate.take_line(format!("load {n}").as_bytes(), start, &mut |line| taken.push(line));
        }
        assert_eq!((taken.len(), gate.due), (3000, None), "the log of a load comes at once");
    }

    #[test]
    fn a_crash_line_that_is_repeated_is_in_the_notice() {
        let taken = written(10, 1, |_| "CUDA error: an illegal instruction".to_owned());
        assert_eq!(taken[1], "last line repeated 9 times: CUDA error: an illegal instruction");
    }
}
