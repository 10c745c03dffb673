//! Reads the configuration again on a separate thread. If a disk hangs, only that thread waits; signals and
//! orders are still handled.

use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use warden_config::machine::HostMachine;
use warden_config::resolve::ResolvedConfig;
use warden_supervisor::{PendingWork, WorkError, WorkKind, run_job};

use super::ConfigSource;
use crate::exit::CommandError;

/// Slower reads are logged. Files take milliseconds, the version of a llama-server some seconds.
const SLOW_READ_LIMIT: Duration = Duration::from_secs(30);
/// Longest wait for log files to be reopened; only a hanging disk takes longer.
const REOPEN_LIMIT: Duration = Duration::from_secs(2);

/// Reads the configuration, one read at a time.
pub(super) struct ConfigReader {
    plan: ConfigSource,
    machine: HostMachine,
    under_way: Option<ReadInProgress>,
    /// Another read must follow: the read in progress may have begun before the last change.
    read_again: bool,
    /// Cancelled when the result is not needed any more.
    cancel: CancellationToken,
    patience: Duration,
}

struct ReadInProgress {
    task: PendingWork<Option<Result<ResolvedConfig, CommandError>>>,
    since: Instant,
    late_reported: bool,
}

pub(super) enum ReadResult {
    Done(Box<Result<ResolvedConfig, CommandError>>),
    /// The read is still in progress after this time.
    Late(Duration),
}

impl ConfigReader {
    pub(super) fn new(plan: &ConfigSource, machine: &HostMachine) -> Self {
        let plan = plan.clone();
        let machine = machine.clone();
        let cancel = CancellationToken::new();
        Self { plan, machine, under_way: None, read_again: false, cancel, patience: SLOW_READ_LIMIT }
    }

    /// Starts a read; if one is in progress, another follows it. The read also waits until logs are reopened.
    pub(super) fn request_read(&mut self, logs: oneshot::Receiver<()>) {
        if let Some(under_way) = &mut self.under_way {
            self.read_again = true;
            // A slow read is reported for this request, too.
            (under_way.since, under_way.late_reported) = (Instant::now(), false);
            return;
        }
        self.start(Some(logs));
    }

    fn start(&mut self, logs: Option<oneshot::Receiver<()>>) {
        let plan = self.plan.clone();
        let machine = self.machine.clone();
        let ends = self.cancel.clone();
        let reads = async move {
            let read = plan.resolve(&machine).await;
            if let Some(logs) = logs {
                // The configuration is used even if the logs are late.
                let _opened = timeout(REOPEN_LIMIT, logs).await;
            }
            read
        };
        let here = Handle::current();
        // Use a separate thread, because a read from a disk cannot be cancelled.
        let task = run_job(WorkKind::Configuration, move || here.block_on(ends.run_until_cancelled(reads)));
        self.under_way = Some(ReadInProgress { task, since: Instant::now(), late_reported: false });
    }

    pub(super) fn is_under_way(&self) -> bool {
        self.under_way.is_some()
    }

    /// Resolves with the result, and once before that if a read takes long. Cancel-safe.
    pub(super) async fn read(&mut self) -> ReadResult {
        let Some(under_way) = &mut self.under_way else { return std::future::pending().await };
        let done = tokio::select! {
            done = &mut under_way.task => done,
            () = sleep_until(under_way.since + self.patience), if !under_way.late_reported => {
                under_way.late_reported = true;
                return ReadResult::Late(self.patience);
            }
        };
        self.under_way = None;
        if std::mem::take(&mut self.read_again) {
            self.start(None);
        }
        let ended = || Err(CommandError::failed("reading it was given up"));
        let refused = |error: WorkError| Err(CommandError::failed(format!("it cannot be read now: {error}")));
        ReadResult::Done(Box::new(done.map_or_else(refused, |read| read.unwrap_or_else(ended))))
    }
}

impl Drop for ConfigReader {
    fn drop(&mut self) {
        // End the read in progress, and with it a llama-server that was asked for its version.
        self.cancel.cancel();
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write as _;

    use super::*;
    use crate::cli::shared::ConfigArgs;

    #[tokio::test]
    async fn each_who_asks_while_a_disk_hangs_hears_so_and_all_is_read_once_more_afterwards() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("warden.toml");
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        let config = ConfigArgs { config: Some(path.clone()), set: Vec::new() };
        let plan = ConfigSource { config, flags: Vec::new(), any_name: false };
        let mut reading = ConfigReader::new(&plan, &HostMachine::read());
        let opened = || oneshot::channel().1;
        reading.patience = Duration::from_millis(20);
        for _ in 0..3 {
            reading.request_read(opened());
            assert!(matches!(reading.read().await, ReadResult::Late(_)) && reading.is_under_way());
        }
        reading.patience = SLOW_READ_LIMIT;
        // The pipe has a reader, so it can be opened.
        let mut disk = File::options().write(true).open(&path).unwrap();
        std::fs::rename(&path, dir.path().join("fifo")).unwrap();
        std::fs::write(&path, "later = 1\n").unwrap();
        disk.write_all(b"nonsense = 1\n").unwrap();
        drop(disk);
        for word in ["nonsense", "later"] {
            let ReadResult::Done(read) = reading.read().await else { panic!("it was told already") };
            let told = format!("{:?}", read.unwrap_err());
            assert!(told.contains(word), "{told}");
        }
        assert!(!reading.is_under_way());
    }
}
