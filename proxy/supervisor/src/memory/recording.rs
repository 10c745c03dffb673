//! Recordings of memory readings for `policy replay`: one bounded file per generation, in the format of
//! [`warden_policies::trace`]. An error ends the recording and affects nothing else.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use warden_policies::sample::BackendSample;
use warden_policies::{GenerationId, ModelName, trace};

use crate::process::directories::file_safe_name;
use crate::state::{StateKind, StateWriter};
use crate::sync::lock;

/// Number of file names to try. More old recordings in a directory are an error.
const NAME_ATTEMPTS: u32 = 10_000;

/// Recording of one generation. The writer thread of the state directory writes its file.
#[derive(Debug)]
pub(crate) struct SampleRecorder {
    state: StateWriter,
    tape: Arc<RecordingState>,
}

#[derive(Debug)]
struct RecordingState {
    over: AtomicBool,
    /// Open file; only the writer thread locks it.
    file: Mutex<Option<RecordingFile>>,
}

#[derive(Debug)]
struct RecordingFile {
    path: PathBuf,
    file: File,
    left: u64,
}

impl SampleRecorder {
    /// Starts a recording of at most `limit` bytes. Its number is new, so recordings of earlier runs stay.
    pub(crate) fn begin(
        state: &StateWriter,
        directory: &Path,
        model: &ModelName,
        generation: GenerationId,
        limit: u64,
    ) -> Self {
        let recorder = Self {
            state: state.clone(),
            tape: Arc::new(RecordingState { over: AtomicBool::new(false), file: Mutex::default() }),
        };
        let directory = directory.to_owned();
        let model = model.clone();
        recorder.queue_job(0, move |tape| {
            let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&directory);
            let opened = made.and_then(|()| create_file(&directory, &model, generation));
            match opened {
                Ok((path, file)) => {
                    tracing::info!(%model, %generation, path = %path.display(), "recording");
                    *tape = Some(RecordingFile { path, file, left: limit });
                }
                Err(error) => {
                    let path = directory.display();
                    tracing::warn!(%model, %generation, %path, %error, "not recording: cannot create the file");
                }
            }
        });
        recorder
    }

    pub(crate) fn write(&self, sample: &BackendSample) {
        let mut line = trace::format_line(sample);
        line.push('\n');
        self.queue_job(line.len(), move |tape| {
            let Some(RecordingFile { path, file, left }) = tape else { return };
            let path = path.display();
            if line.len() as u64 > *left {
                tracing::warn!(%path, "the recording has reached its size (`internal.sensors.trace_bytes`) and stops");
                *tape = None;
            } else if let Err(error) = file.write_all(line.as_bytes()) {
                tracing::warn!(%path, %error, "the recording stops: cannot write to it");
                *tape = None;
            } else {
                *left -= line.len() as u64;
            }
        });
    }

    /// Queues a job for the writer thread.
    fn queue_job(&self, bytes: usize, job: impl FnOnce(&mut Option<RecordingFile>) + Send + 'static) {
        if self.tape.over.load(Ordering::Relaxed) {
            return;
        }
        let tape = Arc::clone(&self.tape);
        let given = self.state.write(StateKind::Recordings, bytes, move || {
            let mut file = lock(&tape.file);
            job(&mut file);
            tape.over.fetch_or(file.is_none(), Ordering::Relaxed);
            Ok(())
        });
        if !given {
            // A recording with a gap would be replayed wrongly.
            self.tape.over.store(true, Ordering::Relaxed);
            tracing::warn!("a recording stops: the state directory does not answer");
        }
    }
}

fn create_file(directory: &Path, model: &ModelName, generation: GenerationId) -> io::Result<(PathBuf, File)> {
    let name = file_safe_name(model.as_str(), usize::MAX);
    for number in 1..=NAME_ATTEMPTS {
        let more = if number == 1 { String::new() } else { format!("-{number}") };
        let path = directory.join(format!("{name}-{generation}{more}.jsonl"));
        match File::options().write(true).create_new(true).open(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            opened => return Ok((path, opened?)),
        }
    }
    Err(io::Error::new(io::ErrorKind::AlreadyExists, "too many recordings of this name: remove some"))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use warden_policies::sample::{SampleEdge, WorkDone};

    use super::*;

    fn sample(second: u64) -> BackendSample {
        BackendSample {
            at: Duration::from_secs(second),
            edge: SampleEdge::Tick,
            host: None,
            vram: Vec::new(),
            pools: Vec::new(),
            in_flight: 0,
            work: WorkDone::default(),
            largest_prompt: 0,
            reclaims: 0,
        }
    }

    const LONG: Duration = Duration::from_secs(20);

    #[test]
    fn a_recording_reads_back_stops_at_its_size_and_spares_older_ones() {
        let directory = tempfile::tempdir().unwrap();
        let traces = directory.path().join("traces");
        let (model, state) = (ModelName::new("org/m:8b"), StateWriter::start().unwrap());
        let begin = |limit| SampleRecorder::begin(&state, &traces, &model, GenerationId(3), limit);
        let one = trace::format_line(&sample(1)).len() as u64 + 1;
        let first = begin(2 * one);
        for second in 1..=3 {
            first.write(&sample(second));
        }
        assert!(state.flush(LONG) && first.tape.over.load(Ordering::Relaxed));
        let read = |name| trace::parse_recording(&fs::read_to_string(traces.join(name)).unwrap()).unwrap();
        assert_eq!(read("org-m-8b-g3.jsonl"), [sample(1), sample(2)]);
        let second = begin(one);
        second.write(&sample(9));
        assert!(state.flush(LONG));
        assert_eq!((read("org-m-8b-g3.jsonl").len(), read("org-m-8b-g3-2.jsonl")), (2, vec![sample(9)]));
    }

    #[test]
    fn where_nothing_can_be_written_there_is_no_recording_and_no_error() {
        let directory = tempfile::tempdir().unwrap();
        let (file, state) = (directory.path().join("file"), StateWriter::start().unwrap());
        fs::write(&file, "").unwrap();
        let none =
            SampleRecorder::begin(&state, &file.join("traces"), &ModelName::new("m"), GenerationId(1), 99);
        none.write(&sample(1));
        assert!(state.flush(LONG) && none.tape.over.load(Ordering::Relaxed));
    }
}
