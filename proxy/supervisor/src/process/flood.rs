//! Limits how much a child can write into our log.
//!
//! ```text
//!     line ── same as the last one? ── yes ── counted ──────────────────┐
//!              └ no ── limit of this second reached? ── no ── logged    │  each second, and at the end:
//!                        └ yes ── counted, the last ones kept ──────────┴─> notices and the kept lines
//! ```
//!
//! The newest lines of a flood are kept, because a crashing process gives the reason in its last line.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

/// Maximum number of lines of one stream that are logged per second. A server that logs each token of
/// several slots writes a few hundred.
const LINES_PER_SECOND: u32 = 1000;
/// Maximum number of lines that are logged at once after a quiet time. A big model logs about 600 lines
/// while it loads, or 3,000 with verbose logging.
const BURST_LINES: u32 = 5000;
/// Number of last lines of a flood that are kept: enough for a crash with a stack trace.
const FLOOD_LINES_KEPT: usize = 40;
/// Interval between two notices of one stream.
const NOTICE_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum number of bytes that a notice shows of a repeated line.
const REPEAT_SHOWN_BYTES: usize = 200;

/// Rate limit for one output stream of a child.
#[derive(Debug)]
pub(crate) struct FloodGate {
    last: Vec<u8>,
    /// Number of repeats of the last line since the last notice.
    repeats: u64,
    /// Number of lines that may be logged now.
    allowed: u32,
    refilled: Instant,
    left_out: u64,
    newest: VecDeque<Vec<u8>>,
    /// Time of the next notice.
    due: Option<Instant>,
}

impl FloodGate {
    pub(crate) fn new(now: Instant) -> Self {
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

    /// Time at which to call [`Self::write_notices`] next; `None` if there is nothing to report.
    pub(crate) fn next_notice(&self) -> Option<Instant> {
        self.due
    }

    /// Handles the next line. `each` is called with the lines to log.
    pub(crate) fn take_line(&mut self, line: &[u8], now: Instant, each: &mut impl FnMut(String)) {
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

    /// Logs due notices about repeated and omitted lines.
    pub(crate) fn write_notices(&mut self, now: Instant, each: &mut impl FnMut(String)) {
        if self.due.is_none_or(|due| now < due) {
            return;
        }
        self.end_flood(now, each);
        self.end_repeats(now, each);
        self.due = (!self.newest.is_empty()).then(|| now + NOTICE_INTERVAL);
    }

    /// Logs the remaining notices at the end of the stream.
    pub(crate) fn finish(&mut self, now: Instant, each: &mut impl FnMut(String)) {
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
        assert_eq!((taken.len(), gate.next_notice()), (3000, None), "the log of a load comes at once");
    }

    #[test]
    fn a_crash_line_that_is_repeated_is_in_the_notice() {
        let taken = written(10, 1, |_| "CUDA error: an illegal instruction".to_owned());
        assert_eq!(taken[1], "last line repeated 9 times: CUDA error: an illegal instruction");
    }
}
