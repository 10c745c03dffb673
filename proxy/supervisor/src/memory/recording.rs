//! Recordings of readings for `policy replay`: one file per generation, bounded, in the format of
//! [`warden_policies::trace`]. Whatever goes wrong with one is told once and stops it; nothing else depends on it.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use warden_policies::sample::Sample;
use warden_policies::{GenerationId, ModelName, trace};

/// Names tried before a directory full of old recordings counts as an error.
const NAMES: u32 = 10_000;

#[derive(Debug)]
pub(crate) struct Recorder {
    path: PathBuf,
    /// `None` once it has stopped.
    file: Option<File>,
    left: u64,
}

impl Recorder {
    /// Begins a recording of at most `limit` bytes in `directory`, which is made if need be. A recording of an earlier
    /// run is never touched: the new one gets a number more in its name.
    pub(crate) fn begin(
        directory: &Path,
        model: &ModelName,
        generation: GenerationId,
        limit: u64,
    ) -> Option<Self> {
        let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(directory);
        let opened = made.and_then(|()| create(directory, model, generation));
        match opened {
            Ok((path, file)) => {
                tracing::info!(%model, %generation, path = %path.display(), "recording");
                Some(Self { path, file: Some(file), left: limit })
            }
            Err(error) => {
                let path = directory.display();
                tracing::warn!(%model, %generation, %path, %error, "no recording: cannot write there");
                None
            }
        }
    }

    pub(crate) fn write(&mut self, sample: &Sample) {
        let Some(file) = &mut self.file else { return };
        let mut line = trace::line(sample);
        line.push('\n');
        let path = self.path.display();
        if line.len() as u64 > self.left {
            tracing::warn!(%path, "the recording has reached its size (`internal.sensors.trace_bytes`) and stops");
            self.file = None;
        } else if let Err(error) = file.write_all(line.as_bytes()) {
            tracing::warn!(%path, %error, "the recording stops: cannot write to it");
            self.file = None;
        } else {
            self.left -= line.len() as u64;
        }
    }
}

fn create(directory: &Path, model: &ModelName, generation: GenerationId) -> io::Result<(PathBuf, File)> {
    let tame = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '-' };
    let name: String = model.as_str().chars().map(tame).collect();
    for number in 1..=NAMES {
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

    use warden_policies::sample::{Edge, Work};

    use super::*;

    fn sample(second: u64) -> Sample {
        Sample {
            at: Duration::from_secs(second),
            edge: Edge::Tick,
            host: None,
            vram: Vec::new(),
            pools: Vec::new(),
            in_flight: 0,
            work: Work::default(),
            largest_prompt: 0,
            reclaims: 0,
        }
    }

    #[test]
    fn a_recording_reads_back_stops_at_its_size_and_spares_older_ones() {
        let directory = tempfile::tempdir().unwrap();
        let traces = directory.path().join("traces");
        let model = ModelName::new("org/m:8b");
        let begin = |limit| Recorder::begin(&traces, &model, GenerationId(3), limit).unwrap();
        let one = trace::line(&sample(1)).len() as u64 + 1;
        let mut first = begin(2 * one);
        for second in 1..=3 {
            first.write(&sample(second));
        }
        let read = |path: &Path| trace::parse(&fs::read_to_string(path).unwrap()).unwrap();
        assert_eq!(read(&first.path), [sample(1), sample(2)]);
        assert!(first.path.ends_with("org-m-8b-g3.jsonl"), "{}", first.path.display());
        let mut second = begin(one);
        second.write(&sample(9));
        assert!(second.path.ends_with("org-m-8b-g3-2.jsonl"), "{}", second.path.display());
        assert_eq!((read(&first.path).len(), read(&second.path)), (2, vec![sample(9)]));
    }

    #[test]
    fn where_nothing_can_be_written_there_is_no_recording_and_no_error() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("file");
        fs::write(&file, "").unwrap();
        assert!(Recorder::begin(&file.join("traces"), &ModelName::new("m"), GenerationId(1), 99).is_none());
    }
}
