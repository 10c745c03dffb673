//! The error type of this crate. Messages name the operation; [`BuilderError::hint`] gives the remedy.

use std::io;
use std::path::PathBuf;

use tokio_util::sync::CancellationToken;

use crate::build::failure::mentions_exhaustion;
use crate::plan::ComputeBackend;
use crate::store::BuildId;

/// Result type of this crate.
pub type Result<T> = std::result::Result<T, BuilderError>;

/// Class of a [`BuilderError`], by who has to act.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorClass {
    /// The caller's arguments are wrong.
    Input,
    /// The machine lacks a program, disk space, memory or a permission.
    Machine,
    /// The source did not become a working llama-server.
    Build,
    /// A patch set is not known to be right for this source, so it is not applied.
    Refused,
    /// The caller cancelled.
    Cancelled,
}

/// Errors of this crate.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each message says what its fields are")]
pub enum BuilderError {
    #[error("there is no source at {path}")]
    SourceMissing { path: PathBuf },
    #[error("{path} is not an archive that can be read: {why}")]
    NotAnArchive { path: PathBuf, why: String },
    #[error("there is no llama.cpp in {path}; at its top are: {}", join_names(.top))]
    NoLlamaCpp {
        path: PathBuf,
        /// Names at the top level of the source, so that the user recognizes a wrong file.
        top: Vec<String>,
    },
    #[error("{path} was not unpacked: its entry `{entry}` {why}")]
    UnsafeArchive { path: PathBuf, entry: String, why: &'static str },
    #[error("{path} was not unpacked: it holds more than {limit}")]
    ArchiveTooLarge { path: PathBuf, limit: String },
    #[error("{path} is no source: what belongs to it is more than {limit}")]
    SourceTooLarge { path: PathBuf, limit: String },
    #[error("not found: {program}")]
    MissingProgram {
        program: String,
        /// Debian package that contains the program.
        package: &'static str,
    },
    #[error("`{command}` failed while {doing}: {why}")]
    Program { command: String, doing: String, why: String },
    #[error("{path} has {free} MiB free, a build takes {need} MiB")]
    Disk {
        path: PathBuf,
        /// MiB available to this user.
        free: u64,
        /// MiB needed.
        need: u64,
    },
    #[error("{available} MiB of memory are available, a build takes {need} MiB")]
    Memory {
        /// MiB available.
        available: u64,
        /// MiB needed.
        need: u64,
    },
    #[error("the cmake option `{option}` cannot be used: {why}")]
    Option { option: String, why: &'static str },
    #[error("a build for {backend} cannot be made here: {missing}")]
    Toolkit {
        backend: ComputeBackend,
        /// Missing part, and where it was searched.
        missing: String,
        cure: String,
    },
    #[error("`{given}` cannot be built for: {why}")]
    Target {
        given: String,
        why: String,
        /// Remedy, such as a list of valid values.
        cure: String,
    },
    #[error(transparent)]
    Patches(warden_patches::PatchError),
    #[error("{path} changed between the plan and the build")]
    SourceChanged { path: PathBuf },
    #[error("the built llama-server lacks {}, although the source was patched", join_names(.fixes))]
    Markers {
        /// Fixes and hooks without their marker in the binary.
        fixes: Vec<String>,
    },
    #[error("{phase} failed:\n{excerpt}\nfull log: {log}")]
    Build {
        /// `configuring` or `compiling`.
        phase: &'static str,
        excerpt: String,
        log: PathBuf,
        /// The compiler was killed from outside, most likely because memory ran out.
        killed: bool,
        /// Disk or memory ran out, by the output or because the compiler was killed.
        no_room: bool,
    },
    #[error("the built llama-server failed the check `{check}`: {why}")]
    Verify {
        check: &'static str,
        /// The server's answer, or the last lines of its output.
        why: String,
        /// The server died of an instruction that this CPU lacks.
        illegal_instruction: bool,
    },
    #[error("the built llama-server fails with {weights} weights ({setting}): {why}")]
    Kernel {
        weights: &'static str,
        setting: &'static str,
        /// Cause of the crash, or deviation of the answers.
        why: String,
        /// Settings with correct answers.
        right: Vec<&'static str>,
        /// Only repacked weights fail: with `--no-repack`, the answers are correct.
        repacked_alone: bool,
    },
    #[error("{path} has the sha256 {found}, expected was {expected}")]
    WrongHash { path: PathBuf, found: String, expected: String },
    #[error("build `{id}` was installed with llama-warden, in {folder}")]
    BundledBuild { id: String, folder: PathBuf },
    #[error("there is no build `{id}` in {store}")]
    NoSuchBuild {
        /// The id or prefix, as given.
        id: String,
        store: PathBuf,
    },
    #[error("`{prefix}` is the beginning of {} builds: {}", .ids.len(), join_names(.ids))]
    AmbiguousBuild { prefix: String, ids: Vec<BuildId> },
    #[error("{path} cannot be understood: {why}")]
    DamagedChoices { path: PathBuf, why: String },
    #[error("there is no build to go back to in {store}: none was in use before this one, or it was removed")]
    NoWayBack { store: PathBuf },
    #[error("the build in {path} is damaged: {why}")]
    DamagedBuild { path: PathBuf, why: String },
    #[error("{path} was not removed: {why}, and no build of ours has that")]
    ForeignInBuild { path: PathBuf, why: String },
    #[error(transparent)]
    Git(#[from] crate::git::fault::GitError),
    #[error("{doing} {path}: {source}")]
    Io {
        /// The operation, such as `reading`.
        doing: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error("cancelled")]
    Cancelled,
}

impl From<warden_patches::PatchError> for BuilderError {
    /// Unwraps a [`BuilderError`] that was passed through the patches crate.
    fn from(error: warden_patches::PatchError) -> Self {
        match error {
            warden_patches::PatchError::Tree(own) => match own.downcast() {
                Ok(own) => *own,
                Err(other) => Self::Patches(warden_patches::PatchError::Tree(other)),
            },
            warden_patches::PatchError::Io { doing, path, source } => Self::Io { doing, path, source },
            other => Self::Patches(other),
        }
    }
}

impl From<BuilderError> for warden_patches::PatchError {
    fn from(error: BuilderError) -> Self {
        Self::Tree(Box::new(error))
    }
}

impl BuilderError {
    /// Class of the error by who has to act; callers map it to an exit code.
    pub const fn kind(&self) -> ErrorClass {
        match self {
            Self::SourceMissing { .. }
            | Self::NotAnArchive { .. }
            | Self::NoLlamaCpp { .. }
            | Self::UnsafeArchive { .. }
            | Self::ArchiveTooLarge { .. }
            | Self::SourceTooLarge { .. }
            | Self::Option { .. }
            | Self::Target { .. }
            | Self::BundledBuild { .. }
            | Self::NoSuchBuild { .. }
            | Self::AmbiguousBuild { .. }
            | Self::DamagedChoices { .. }
            | Self::NoWayBack { .. }
            | Self::ForeignInBuild { .. } => ErrorClass::Input,
            Self::MissingProgram { .. }
            | Self::Program { .. }
            | Self::Toolkit { .. }
            | Self::SourceChanged { .. }
            | Self::Disk { .. }
            | Self::Memory { .. }
            | Self::WrongHash { .. }
            | Self::Io { .. } => ErrorClass::Machine,
            Self::Build { .. }
            | Self::Markers { .. }
            | Self::Verify { .. }
            | Self::Kernel { .. }
            | Self::DamagedBuild { .. } => ErrorClass::Build,
            Self::Patches(error) => match error.kind() {
                warden_patches::PatchErrorClass::Input => ErrorClass::Input,
                warden_patches::PatchErrorClass::Machine => ErrorClass::Machine,
                warden_patches::PatchErrorClass::Refused => ErrorClass::Refused,
            },
            Self::Git(fault) => fault.kind(),
            Self::Cancelled => ErrorClass::Cancelled,
        }
    }

    /// Returns true if disk or memory ran out, so that a later attempt may succeed.
    pub fn ran_out_of_space(&self) -> bool {
        match self {
            Self::Disk { .. } | Self::Memory { .. } => true,
            Self::Build { no_room, .. } => *no_room,
            Self::Program { why, .. } => mentions_exhaustion(why),
            Self::Io { source, .. } => {
                use io::ErrorKind::{OutOfMemory, QuotaExceeded, StorageFull};
                matches!(source.kind(), StorageFull | QuotaExceeded | OutOfMemory)
            }
            _ => false,
        }
    }

    /// The remedy for the user, as one sentence.
    pub fn hint(&self) -> Option<String> {
        Some(match self {
            Self::MissingProgram { package, .. } => format!("install it: apt install {package}"),
            Self::Verify { why, illegal_instruction: false, .. } => format!(
                "the loader does not find {}: install the package that has it, or name its folder in \
                 LD_LIBRARY_PATH",
                missing_library(why)?
            ),
            Self::Kernel { right, repacked_alone: false, .. } => format!(
                "right with: {}; build with another compiler (CC and CXX) or another revision",
                join_names(right)
            ),
            Self::Toolkit { cure, .. } | Self::Target { cure, .. } => cure.clone(),
            Self::WrongHash { path, .. } => format!("delete {} and try again", path.display()),
            Self::Patches(error) => return error.hint(),
            Self::Git(fault) => return fault.hint(),
            _ => return self.fixed_hint().map(str::to_owned),
        })
    }

    fn fixed_hint(&self) -> Option<&'static str> {
        Some(match self {
            Self::SourceMissing { .. } => "give the path of a folder or of a .tar.gz, .tar.xz or .zip file",
            Self::NotAnArchive { .. } => {
                "supported are .tar.gz, .tar.xz and .zip, recognized by content, not by name"
            }
            Self::NoLlamaCpp { .. } => {
                "llama.cpp is recognized by CMakeLists.txt, ggml/ and tools/server or examples/server side by \
                 side, at most four folders deep"
            }
            Self::SourceTooLarge { .. } => {
                "give llama.cpp's own folder, without models and data in it; a clone is given with --git, which \
                 takes what is committed"
            }
            Self::Disk { .. } => "free some space, or set XDG_CACHE_HOME and XDG_DATA_HOME to another disk",
            Self::Memory { .. } => "stop something else first, or add swap",
            Self::Build { killed: true, .. } => {
                "the compiler was killed, most likely because memory ran out: try fewer jobs (--jobs 1)"
            }
            Self::Build { no_room: true, .. } => {
                "disk or memory ran out, as the log says: free some, or try fewer jobs (--jobs 1)"
            }
            Self::Verify { illegal_instruction: true, .. } => {
                "it uses instructions that this CPU does not have: build with --arch portable, or with --arch \
                 native on this very machine"
            }
            Self::Kernel { repacked_alone: true, .. } => {
                "it computes right with --no-repack, so a kernel for repacked weights is wrong: build with \
                 another compiler (CC and CXX) or another revision"
            }
            Self::SourceChanged { .. } => "leave it alone while it is built, and try again",
            Self::Markers { .. } => {
                "the file that was patched is not part of this build: does --backend fit the patch set?"
            }
            Self::BundledBuild { .. } => {
                "the package manager that installed it removes it, such as `pip uninstall`"
            }
            Self::NoSuchBuild { .. } => "`llama-warden builds list` shows what there is",
            Self::ForeignInBuild { .. } => "look at it, and remove it yourself if nobody needs it",
            Self::DamagedChoices { .. } => "remove it to start over: then the newest build is in use",
            Self::NoWayBack { .. } => {
                "`llama-warden builds list` shows what there is, `builds use ID` takes one"
            }
            Self::AmbiguousBuild { .. } => "give more characters of the id",
            Self::DamagedBuild { .. } => "remove it with `llama-warden builds rm`, then build again",
            Self::Io { source, .. } if source.kind() == io::ErrorKind::StorageFull => "the disk is full",
            _ => return None,
        })
    }
}

/// Wraps an `io::Error`: `fs::read(path).map_err(io_error("reading", path))`.
pub(crate) fn io_error(
    doing: &'static str,
    path: impl Into<PathBuf>,
) -> impl FnOnce(io::Error) -> BuilderError {
    let path = path.into();
    move |source| BuilderError::Io { doing, path, source }
}

pub(crate) fn program_error(command: &str, doing: &str, why: impl Into<String>) -> BuilderError {
    BuilderError::Program { command: command.to_owned(), doing: doing.to_owned(), why: why.into() }
}

pub(crate) fn check_cancelled(cancel: &CancellationToken) -> Result<()> {
    if cancel.is_cancelled() { Err(BuilderError::Cancelled) } else { Ok(()) }
}

/// The missing library named by the dynamic loader's message.
fn missing_library(why: &str) -> Option<&str> {
    why.split_once("error while loading shared libraries: ")?.1.split(':').next().map(str::trim)
}

fn join_names<T: std::fmt::Display>(names: &[T]) -> String {
    if names.is_empty() { "nothing".to_owned() } else { list_names(names, 12) }
}

pub(crate) fn list_names<T: std::fmt::Display>(names: &[T], shown: usize) -> String {
    let text = names.iter().take(shown).map(ToString::to_string).collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(shown) {
        0 => text,
        more => format!("{text} and {more} more"),
    }
}

#[cfg(test)]
#[path = "error_tests.rs"]
mod tests;
