//! Caches measurements of servers that we did not build, or built before all facts were measured. A binary is
//! identified by its path, inode, size, modification time and version output.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::measured::ServerBehaviour;
use crate::error::{Result, io_error};
use warden_patches::whole::{self, LossTolerance};

/// The folder of cached measurements. Only methods access the disk; they block briefly.
#[derive(Clone, Debug)]
pub struct MeasurementCache {
    folder: PathBuf,
}

#[derive(Serialize, Deserialize)]
struct MeasurementEntry {
    binary: PathBuf,
    measured: ServerBehaviour,
    /// Value of [`FACT_COUNT`] at the time of the measurement.
    #[serde(default)]
    questions: u32,
}

/// Incremented with each additional fact: entries with a lower number lack the newest facts.
const FACT_COUNT: u32 = 1;

/// A cached measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CachedMeasurement {
    /// Measured facts.
    pub measured: ServerBehaviour,
    /// All facts that are measured today were measured.
    pub is_complete: bool,
}

impl MeasurementCache {
    /// The cached measurements under a cache folder.
    pub fn new(cache: &Path) -> Self {
        Self { folder: cache.join("measured") }
    }

    /// Identity of a binary with this `--version` output; `None` if the binary cannot be read.
    pub fn identity(binary: &Path, version: &str) -> Option<String> {
        let path = binary.canonicalize().ok()?;
        let file = fs::metadata(&path).ok()?;
        let numbers = [
            file.dev(),
            file.ino(),
            file.size(),
            file.mtime().cast_unsigned(),
            file.mtime_nsec().cast_unsigned(),
        ];
        let text = format!("{}\0{numbers:?}\0{version}", path.display());
        Some(hex::encode(&Sha256::digest(text)[..16]))
    }

    /// Reads a cached measurement. An unreadable file counts as missing.
    pub fn read(&self, identity: &str) -> Option<CachedMeasurement> {
        let text = fs::read(self.file(identity)).ok()?;
        let MeasurementEntry { measured, questions, .. } = serde_json::from_slice(&text).ok()?;
        Some(CachedMeasurement { measured, is_complete: questions >= FACT_COUNT })
    }

    /// Writes a measurement.
    ///
    /// # Errors
    /// Fails if the file cannot be written.
    pub fn write(&self, identity: &str, binary: &Path, measured: ServerBehaviour) -> Result<()> {
        let file = self.file(identity);
        let write = || {
            let mut text = serde_json::to_vec(&MeasurementEntry {
                binary: binary.to_owned(),
                measured,
                questions: FACT_COUNT,
            })?;
            text.push(b'\n');
            whole::write_atomically(&file, &text, LossTolerance::Replaceable)
        };
        write().map_err(io_error("writing", &file))
    }

    fn file(&self, identity: &str) -> PathBuf {
        self.folder.join(format!("{identity}.json"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_measured_is_remembered_until_the_binary_changes() {
        let folder = tempfile::tempdir().unwrap();
        let binary = folder.path().join("llama-server");
        fs::write(&binary, "one").unwrap();
        let remembered = MeasurementCache::new(folder.path());
        let identity = MeasurementCache::identity(&binary, "version: 1").unwrap();
        assert_eq!(remembered.read(&identity), None);
        let measured = ServerBehaviour { unix_sockets: Some(false), ..ServerBehaviour::default() };
        remembered.write(&identity, &binary, measured).unwrap();
        assert_eq!(remembered.read(&identity), Some(CachedMeasurement { measured, is_complete: true }));
        assert_eq!(MeasurementCache::identity(&binary, "version: 1").as_ref(), Some(&identity));
        assert_ne!(MeasurementCache::identity(&binary, "version: 2").as_ref(), Some(&identity));
        fs::write(&binary, "other").unwrap();
        assert_ne!(MeasurementCache::identity(&binary, "version: 1").as_ref(), Some(&identity));
        assert_eq!(MeasurementCache::identity(&folder.path().join("gone"), ""), None);
    }

    #[test]
    fn what_was_measured_before_a_fact_was_asked_for_is_known_and_not_complete() {
        let folder = tempfile::tempdir().unwrap();
        let remembered = MeasurementCache::new(folder.path());
        fs::create_dir_all(folder.path().join("measured")).unwrap();
        fs::write(remembered.file("x"), r#"{"binary":"/x","measured":{"unix_sockets":true}}"#).unwrap();
        let measured = ServerBehaviour { unix_sockets: Some(true), ..ServerBehaviour::default() };
        assert_eq!(remembered.read("x"), Some(CachedMeasurement { measured, is_complete: false }));
    }

    #[test]
    fn a_file_that_somebody_broke_is_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let remembered = MeasurementCache::new(folder.path());
        fs::create_dir_all(folder.path().join("measured")).unwrap();
        fs::write(remembered.file("x"), "{").unwrap();
        assert_eq!(remembered.read("x"), None);
    }
}
