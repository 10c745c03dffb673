//! Detects a stalled start: the process logs nothing, writes and reads nothing, and computes nothing.
//!
//! Loading from a network takes an hour but always shows activity; a process that waits for a lock or a dead
//! disk shows none. Answers to our probes, and the periodic memory report, do not count as activity.

use std::time::Duration;

/// Activity of a process group since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessActivity {
    /// CPU time used.
    pub cpu: Duration,
    /// Bytes read from files and disks, including mapped files.
    pub read: u64,
    /// Bytes written to files and pipes.
    pub written: u64,
    /// Bytes of log output.
    pub output: u64,
}

/// Least share of a CPU that counts as activity: answering probes takes a tenth of this.
const BUSY_SHARE: f64 = 0.05;
/// Least bytes that count as activity: reading its own state or writing its memory report takes less.
const IO_STEP: u64 = 1 << 20;

impl ProcessActivity {
    fn has_moved_since(self, before: Self, time: Duration) -> bool {
        self.output > before.output
            || self.written.saturating_sub(before.written) >= IO_STEP
            || self.read.saturating_sub(before.read) >= IO_STEP
            || self.cpu.saturating_sub(before.cpu) >= time.mul_f64(BUSY_SHARE)
    }
}

/// Watches one start.
#[derive(Clone, Copy, Debug)]
pub struct StandstillWatch {
    limit: Duration,
    last: ProcessActivity,
    looked: Duration,
    moved: Duration,
}

impl StandstillWatch {
    /// Creates a watch. `limit`: longest allowed time without activity.
    pub fn new(limit: Duration) -> Self {
        let [looked, moved] = [Duration::ZERO; 2];
        Self { limit, last: ProcessActivity::default(), looked, moved }
    }

    /// Returns the time until the next reading.
    pub fn pause(&self) -> Duration {
        self.limit / 4
    }

    /// Adds a reading made `at` after the start; returns true once there was no activity for the limit. A
    /// failed reading (`None`) counts as activity.
    pub fn is_stalled(&mut self, at: Duration, effort: Option<ProcessActivity>) -> bool {
        let moved = effort.is_none_or(|now| now.has_moved_since(self.last, at.saturating_sub(self.looked)));
        self.last = effort.unwrap_or(self.last);
        self.looked = at;
        if moved {
            self.moved = at;
        }
        at.saturating_sub(self.moved) >= self.limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    /// Returns the minute, of ten, in which a stall is reported; `effort` returns the activity so far.
    fn found(effort: impl Fn(u32) -> Option<ProcessActivity>) -> Option<u32> {
        let mut watch = StandstillWatch::new(MINUTE * 4);
        assert_eq!(watch.pause(), MINUTE);
        (1..=10).find(|&minute| watch.is_stalled(MINUTE * minute, effort(minute)))
    }

    #[test]
    fn one_that_reads_writes_or_computes_moves_and_one_that_answers_probes_does_not() {
        let started =
            ProcessActivity { cpu: Duration::from_secs(5), read: 1 << 30, written: 2000, output: 900 };
        let stuck = |minute: u32| ProcessActivity {
            cpu: started.cpu + Duration::from_millis(300) * minute,
            written: started.written + 60 * 1024 * u64::from(minute),
            ..started
        };
        assert_eq!(found(|minute| Some(stuck(minute))), Some(5), "four minutes after the first");
        assert_eq!(found(|_| Some(ProcessActivity::default())), Some(4), "it never did anything");
        let reads = |minute: u32| ProcessActivity { read: u64::from(minute) * IO_STEP, ..stuck(minute) };
        assert_eq!(found(|minute| Some(reads(minute))), None);
        let says = |minute: u32| ProcessActivity { output: u64::from(minute), ..ProcessActivity::default() };
        assert_eq!(found(|minute| Some(says(minute))), None, "a point is progress");
        let computes = |minute: u32| ProcessActivity {
            cpu: Duration::from_secs(3) * minute,
            ..ProcessActivity::default()
        };
        assert_eq!(found(|minute| Some(computes(minute))), None);
    }

    #[test]
    fn what_cannot_be_read_proves_nothing_and_a_step_now_and_then_is_enough() {
        assert_eq!(found(|_| None), None);
        assert_eq!(found(|minute| (minute % 3 == 0).then(ProcessActivity::default)), None);
        let steps =
            |minute: u32| ProcessActivity { output: u64::from(minute / 3), ..ProcessActivity::default() };
        assert_eq!(found(|minute| Some(steps(minute))), None);
        let ends =
            |minute: u32| ProcessActivity { output: u64::from(minute.min(4)), ..ProcessActivity::default() };
        assert_eq!(found(|minute| Some(ends(minute))), Some(8));
    }
}
