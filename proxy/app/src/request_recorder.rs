//! Implements `record_requests = "FILE"`: records requests of a model, without their texts, for
//! `llama-warden diagnose --replay FILE`.
//!
//! ```text
//!   gateway thread ── body ──> [bounded queue] ──> thread: redacts ── line ─┬─> FILE, until it is full
//!                       full: not recorded                                  └─> the latest ones, in memory
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::Duration;

use bytes::Bytes;
use http::Method;
use warden_admin::captures::CaptureStore;
use warden_config::resolve::ResolvedConfig;
use warden_diagnose::Redactor;
use warden_gateway::BodyRecorder;
use warden_policies::{ModelName, QuickMap, defaults};
use warden_supervisor::{WorkKind, open_lines, run_job};

use crate::exit::CommandError;

/// Mode of the file, which only its owner can read, because lengths and times are private, too.
const FILE_MODE: u32 = 0o600;
/// Maximum number of queued requests. The queue gets this long only if the disk hangs.
const MAX_WAITING: usize = 64;
/// Most bytes of waiting bodies, in addition to the gateway's own budget. A single larger body may wait, too.
const MAX_WAITING_BYTES: usize = 32 << 20;

/// Files of recorded requests by path. A file stays open, because another model may use it later.
#[derive(Debug, Default)]
pub(crate) struct RecorderSet {
    files: BTreeMap<PathBuf, Arc<RequestRecorder>>,
    captures: CaptureStore,
}

impl RecorderSet {
    /// Opens the files of a configuration, unless they are already open. Blocks.
    pub(crate) fn open(&mut self, resolved: &ResolvedConfig) -> Result<(), CommandError> {
        let opened = open_all(self.missing_paths(resolved), &self.captures)?;
        self.files.extend(opened);
        Ok(())
    }

    /// Like [`Self::open`], but on another thread and within a time limit, because a disk may hang.
    pub(crate) async fn open_while_serving(&mut self, resolved: &ResolvedConfig) -> Result<(), CommandError> {
        const PATIENCE: Duration = Duration::from_secs(5);
        let missing = self.missing_paths(resolved);
        let captures = self.captures.clone();
        if missing.is_empty() {
            return Ok(());
        }
        let opening = run_job(WorkKind::Configuration, move || open_all(missing, &captures));
        let late = |_| {
            CommandError::failed(
                "the files of `record_requests` could not be opened in time: does their disk hang?",
            )
        };
        let opened = tokio::time::timeout(PATIENCE, opening).await.map_err(late)?;
        self.files.extend(opened.map_err(|error| CommandError::failed(error.to_string()))??);
        Ok(())
    }

    fn missing_paths(&self, resolved: &ResolvedConfig) -> BTreeSet<PathBuf> {
        let named = resolved.models.iter().filter_map(|model| model.record_requests.as_ref());
        named.filter(|path| !self.files.contains_key(*path)).cloned().collect()
    }

    pub(crate) fn captures(&self) -> CaptureStore {
        self.captures.clone()
    }

    pub(crate) fn by_model(&self, resolved: &ResolvedConfig) -> QuickMap<ModelName, Arc<dyn BodyRecorder>> {
        let models = resolved.fleet.models.iter().zip(&resolved.models);
        let open = |path: &PathBuf| Some(Arc::clone(self.files.get(path)?) as Arc<dyn BodyRecorder>);
        models
            .filter_map(|(spec, model)| Some((spec.name.clone(), open(model.record_requests.as_ref()?)?)))
            .collect()
    }
}

fn open_all(
    paths: BTreeSet<PathBuf>,
    captures: &CaptureStore,
) -> Result<Vec<(PathBuf, Arc<RequestRecorder>)>, CommandError> {
    let numbers = &defaults().diagnose;
    let body = numbers.recording_body.0;
    let most = numbers.recording_bytes.0;
    let body = usize::try_from(body).unwrap_or(usize::MAX);
    let mut opened = Vec::new();
    for path in paths {
        let recorder = RequestRecorder::start(&path, body, most, captures.clone()).map_err(|error| {
            CommandError::hinted(
                format!("cannot record requests to {}: {error}", path.display()),
                "name a file in a directory that exists and that we may write to (`record_requests`)",
            )
        })?;
        tracing::info!(path = %path.display(), "recording requests, without what they say");
        opened.push((path, recorder));
    }
    Ok(opened)
}

/// A queued request: id, method, path and body.
type QueuedRequest = (String, Method, String, Vec<Bytes>);

#[derive(Debug)]
pub(crate) struct RequestRecorder {
    path: PathBuf,
    body: usize,
    queue: SyncSender<QueuedRequest>,
    missed: AtomicU64,
    waiting: Arc<AtomicUsize>,
}

impl RequestRecorder {
    /// Opens `path` to append up to `most` bytes of file size. `body`: largest recorded body in bytes.
    pub(crate) fn start(
        path: &Path,
        body: usize,
        most: u64,
        captures: CaptureStore,
    ) -> io::Result<Arc<Self>> {
        let file = open_lines(path, FILE_MODE)?;
        // The mode of an existing file may let everybody read it.
        file.set_permissions(Permissions::from_mode(FILE_MODE))?;
        let left = most.saturating_sub(file.metadata()?.len());
        let (queue, requests) = sync_channel::<QueuedRequest>(MAX_WAITING);
        let redactor = Redactor::new();
        let mut tape = RecordWriter { file, bytes_left: left, path: path.to_owned(), is_over: false };
        let waiting = Arc::new(AtomicUsize::new(0));
        let done = Arc::clone(&waiting);
        std::thread::Builder::new().name("recorder".to_owned()).spawn(move || {
            while let Ok((id, method, target, body)) = requests.recv() {
                let body = body.concat();
                if let Some(line) = redactor.redact_line(method.as_str(), &target, &body) {
                    captures.add(&id, &line);
                    tape.write(line);
                }
                done.fetch_sub(body.len(), Ordering::Relaxed);
            }
        })?;
        Ok(Arc::new(Self { path: path.to_owned(), body, queue, missed: AtomicU64::new(0), waiting }))
    }
}

impl BodyRecorder for RequestRecorder {
    fn limit(&self) -> usize {
        self.body
    }

    fn take(&self, id: &str, method: &Method, path: &str, body: Vec<Bytes>) {
        let bytes = body.iter().map(Bytes::len).sum();
        let before = self.waiting.fetch_add(bytes, Ordering::Relaxed);
        let fits = before == 0 || before.saturating_add(bytes) <= MAX_WAITING_BYTES;
        let sent =
            fits && self.queue.try_send((id.to_owned(), method.clone(), path.to_owned(), body)).is_ok();
        if !sent {
            self.waiting.fetch_sub(bytes, Ordering::Relaxed);
        }
        if !sent && self.missed.fetch_add(1, Ordering::Relaxed) == 0 {
            let path = self.path.display();
            tracing::warn!(%path, "requests are missing in the recording: it cannot keep up");
        }
    }
}

struct RecordWriter {
    file: File,
    bytes_left: u64,
    path: PathBuf,
    /// Nothing more can be written.
    is_over: bool,
}

impl RecordWriter {
    fn write(&mut self, mut line: String) {
        if self.is_over {
            return;
        }
        line.push('\n');
        let path = self.path.display();
        let bytes = u64::try_from(line.len()).unwrap_or(u64::MAX);
        if bytes > self.bytes_left {
            tracing::info!(%path, "the recording of requests has reached its size and ends");
            self.is_over = true;
            return;
        }
        if let Err(error) = self.file.write_all(line.as_bytes()) {
            tracing::warn!(%path, %error, "the recording of requests ends: cannot write to it");
            self.is_over = true;
            return;
        }
        self.bytes_left -= bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_a_line_of_a_killed_instance_becomes_no_part_of_ours_and_keeps_nobody_from_a_replay() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("requests.jsonl");
        let line =
            |n: u32| format!("{{\"method\":\"POST\",\"path\":\"/completion\",\"body\":{{\"n\":{n}}}}}");
        std::fs::write(&path, format!("{}\n{}", line(1), &line(2)[..30])).unwrap();
        let captures = CaptureStore::default();
        let recorder = RequestRecorder::start(&path, 1 << 20, 1 << 20, captures.clone()).unwrap();
        recorder.take("r-1", &Method::POST, "/completion", vec![Bytes::from_static(b"{\"n_predict\":4}")]);
        let is_whole = || {
            let text = std::fs::read_to_string(&path).unwrap();
            text.ends_with('\n') && text.lines().count() == 3
        };
        let began = tokio::time::Instant::now();
        while !is_whole() {
            assert!(began.elapsed().as_secs() < 60, "{}", std::fs::read_to_string(&path).unwrap());
            std::thread::yield_now();
        }
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.starts_with(&format!("{}\n{}\n", line(1), &line(2)[..30])), "{text}");
        let recording = warden_diagnose::RequestRecording::read(&path).unwrap();
        assert_eq!((recording.len(), recording.torn_lines()), (2, 1));
        let capture = captures.find("r-1").unwrap();
        assert!(text.ends_with(&format!("{}\n", capture.line)), "{capture:?}");
    }

    #[test]
    fn what_is_written_is_redacted_private_and_bounded() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("requests.jsonl");
        let file = open_lines(&path, FILE_MODE).unwrap();
        let mut writer = RecordWriter { file, bytes_left: 150, path: path.clone(), is_over: false };
        let redactor = Redactor::new();
        let line = |body: &[u8]| redactor.redact_line("POST", "/completion?key=1", body);
        let body = br#"{"prompt": "a secret", "user": "somebody", "n_predict": 4}"#;
        assert_eq!(line(b"no object"), None, "passed over");
        writer.write(line(body).unwrap());
        assert!(!writer.is_over);
        writer.write(line(body).unwrap());
        assert!(writer.is_over, "full");
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(text.lines().count(), 1, "{text}");
        assert!(!text.contains("secret") && !text.contains("somebody") && !text.contains("key"), "{text}");
        assert!(text.contains("\"n_predict\":4"), "{text}");
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777 & !FILE_MODE, 0);
    }
}
