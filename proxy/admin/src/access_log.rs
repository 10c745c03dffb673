//! The access log, one line for each request: part of llama-warden's log, or a separate file. The lines
//! have names, numbers and addresses; never a prompt, an answer or a key.
//!
//! ```text
//!   log.access = ""       record -> tracing, target `access` -> standard error   (filtered by `log.level`)
//!   log.access = "FILE"   record -> line -> [bounded queue] -> thread -> FILE    (not filtered)
//! ```
//!
//! SIGHUP reopens the file, which may have been renamed. Lines that cannot be written (a full disk) are
//! counted, reported once in llama-warden's log, and shown in `status` and metrics.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use warden_gateway::RequestRecord;
use warden_policies::defaults::Log;
use warden_supervisor::open_lines;
use warden_supervisor::sync::lock;

use crate::access_line;
use crate::clock;
use crate::error::AdminError;
use crate::log_writer::{LogWriter, WriteTrouble};

/// File mode: not world-readable, because the lines contain addresses of clients.
const FILE_MODE: u32 = 0o640;
/// Time limit for the last writes before the process ends, longer than any working disk needs.
const FLUSH_LIMIT: Duration = Duration::from_secs(1);

/// Cheap to clone.
#[derive(Clone)]
pub struct AccessLog(Option<Arc<AccessFile>>);

struct AccessFile {
    path: PathBuf,
    json: bool,
    file: SharedFile,
    writer: LogWriter,
}

#[derive(Clone)]
struct SharedFile(Arc<Mutex<File>>);

impl Write for SharedFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        lock(&self.0).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        lock(&self.0).flush()
    }
}

fn open_file(path: &Path) -> io::Result<File> {
    open_lines(path, FILE_MODE)
}

/// State of the access log, as `status` shows it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AccessLogView {
    /// Path of the file.
    pub path: PathBuf,
    /// Number of lines that are missing in the file.
    pub lost: u64,
    /// Error if the file cannot be written at the moment.
    pub failing: Option<String>,
}

impl AccessLog {
    /// Opens the separate file, if one is configured.
    ///
    /// # Errors
    /// The file cannot be opened.
    pub fn start(path: Option<&Path>, log: &Log) -> Result<Self, AdminError> {
        let Some(path) = path else { return Ok(Self(None)) };
        let failed = |error: io::Error| {
            AdminError::hinted(
                format!("cannot open the access log {}: {error}", path.display()),
                "name a file in a directory that exists and that we may write to (`log.access`)",
            )
        };
        let file = SharedFile(Arc::new(Mutex::new(open_file(path).map_err(failed)?)));
        let shown = path.to_owned();
        let tell = move |trouble: WriteTrouble<'_>| {
            let path = shown.display();
            match trouble {
                WriteTrouble::Began(error) => {
                    tracing::error!(
                        "the access log {path} cannot be written: {error}; its lines are counted until it can"
                    );
                }
                WriteTrouble::Ended(lost) => {
                    tracing::warn!("the access log {path} is written again; {lost} lines are missing in it");
                }
            }
        };
        let writer = LogWriter::start(log.buffered_lines, file.clone(), tell).map_err(failed)?;
        Ok(Self(Some(Arc::new(AccessFile {
            path: path.to_owned(),
            json: log.format == "json",
            file,
            writer,
        }))))
    }

    #[cfg(test)]
    pub(crate) fn none() -> Self {
        Self(None)
    }

    pub(crate) fn lost(&self) -> u64 {
        self.0.as_ref().map_or(0, |own| own.writer.lost())
    }

    /// Returns the state of the log; `None` without a separate file.
    pub(crate) fn view(&self) -> Option<AccessLogView> {
        let own = self.0.as_ref()?;
        Some(AccessLogView { path: own.path.clone(), lost: own.writer.lost(), failing: own.writer.failing() })
    }

    /// Reopens the file. After a failure, the file opened before stays in use.
    pub fn reopen(&self) {
        let Some(own) = &self.0 else { return };
        own.writer.flush(FLUSH_LIMIT);
        match open_file(&own.path) {
            Ok(file) => *lock(&own.file.0) = file,
            Err(error) => {
                tracing::error!(%error, path = %own.path.display(), "cannot reopen the access log; the old file \
                    stays in use");
            }
        }
    }

    /// Waits until all lines are written, within a limit.
    pub fn flush(&self) {
        if let Some(own) = &self.0 {
            own.writer.flush(FLUSH_LIMIT);
        }
    }

    /// Writes the line of a request that has ended.
    pub fn write(&self, record: &RequestRecord) {
        match &self.0 {
            None => access_line::log_request(record),
            Some(own) => {
                let line = access_line::format_line(record, &clock::now_exact(), own.json);
                // Cannot fail: the queue takes the line, or counts the line as lost.
                drop(own.writer.clone().write_all(&line));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access_line::tests::record;

    #[test]
    fn a_file_of_its_own_is_private_and_opened_anew_after_a_rename() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("access.log");
        let log = warden_policies::defaults().log.clone();
        let access = AccessLog::start(Some(&path), &log).unwrap();
        access.write(&record());
        access.flush();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777 & !FILE_MODE, 0);
        let renamed = dir.path().join("access.log.1");
        std::fs::rename(&path, &renamed).unwrap();
        access.reopen();
        access.write(&record());
        access.write(&record());
        access.flush();
        let lines = |path: &Path| std::fs::read_to_string(path).unwrap().lines().count();
        assert_eq!((lines(&renamed), lines(&path)), (1, 2));
        // The half line of a killed instance becomes a line of its own.
        std::fs::write(&path, "whole\nha").unwrap();
        let access = AccessLog::start(Some(&path), &log).unwrap();
        access.write(&record());
        access.flush();
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.starts_with("whole\nha\n") && lines(&path) == 3 && text.ends_with('\n'), "{text}");
        let nowhere = dir.path().join("no/access.log");
        let error = AccessLog::start(Some(&nowhere), &log).map(drop).unwrap_err();
        assert!(error.to_string().contains("no/access.log"), "{error}");
    }
}
