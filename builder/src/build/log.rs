//! Writes a build's full output to a file, and keeps its end in memory for error messages.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use crate::error::{Result, io_error};

/// Bytes kept of a phase's output. ninja stops at the first failure, so the error is near the end.
const KEPT_OUTPUT_BYTES: usize = 1 << 20;

#[derive(Debug)]
pub(super) struct BuildLog {
    path: PathBuf,
    file: BufWriter<File>,
    phase: String,
}

impl BuildLog {
    pub(super) fn create(path: PathBuf) -> Result<Self> {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(io_error("creating", folder))?;
        }
        let file = File::create(&path).map_err(io_error("creating", &path))?;
        Ok(Self { path, file: BufWriter::new(file), phase: String::new() })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn begin_phase(&mut self, command: &str) {
        self.phase.clear();
        self.write(&format!("$ {command}"));
    }

    pub(super) fn push_line(&mut self, line: &str) {
        self.phase.push_str(line);
        self.phase.push('\n');
        if self.phase.len() > 2 * KEPT_OUTPUT_BYTES {
            let enough = self.phase.len() - KEPT_OUTPUT_BYTES;
            // Cut after a line's end, so that no character is split.
            let cut = self
                .phase
                .bytes()
                .skip(enough)
                .position(|byte| byte == b'\n')
                .map_or(0, |at| enough + at + 1);
            self.phase.drain(..cut);
        }
        self.write(line);
    }

    fn write(&mut self, line: &str) {
        // On a full disk the compilers fail, too, and that failure is reported.
        writeln!(self.file, "{line}").ok();
    }

    pub(super) fn end_phase(&mut self) {
        self.file.flush().ok();
    }

    pub(super) fn output(&self) -> &str {
        &self.phase
    }
}
