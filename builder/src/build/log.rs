//! The full output of one build, in a file, and its end in memory for the error message.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use crate::error::{Result, io_error};

/// Bytes of a phase's output that are kept at least for finding its first error. ninja stops at the first failure,
/// so what matters is near the end; a whole build without warnings says some 30 KB.
const KEPT: usize = 1 << 20;

/// A log that is written while it grows.
#[derive(Debug)]
pub(super) struct Log {
    path: PathBuf,
    file: BufWriter<File>,
    /// Output of the running phase.
    phase: String,
}

impl Log {
    /// Begins a new log, in place of an older one.
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

    /// Begins the output of a phase with the command that makes it.
    pub(super) fn begin(&mut self, command: &str) {
        self.phase.clear();
        self.write(&format!("$ {command}"));
    }

    /// Adds a line of output.
    pub(super) fn line(&mut self, line: &str) {
        self.phase.push_str(line);
        self.phase.push('\n');
        if self.phase.len() > 2 * KEPT {
            let enough = self.phase.len() - KEPT;
            // After a line's end, so that no character is cut.
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
        // A full disk stops the compilers, and then that is told.
        writeln!(self.file, "{line}").ok();
    }

    /// Ends the output of a phase: all of it is in the file.
    pub(super) fn end(&mut self) {
        self.file.flush().ok();
    }

    /// The part of the phase's output that may explain a failure.
    pub(super) fn output(&self) -> &str {
        &self.phase
    }
}
