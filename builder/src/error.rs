//! The error type of this crate. Each message names the failed operation and its object;
//! [`BuilderError::hint`] returns the remedy, if there is one.

use std::io;
use std::path::PathBuf;

use crate::build::failure::mentions_exhaustion;
use crate::kind::ErrorClass;
use crate::plan::backend::ComputeBackend;
use crate::store::id::BuildId;

/// Result type of this crate.
pub type Result<T> = std::result::Result<T, BuilderError>;

/// Errors of this crate.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each message says what its fields are")]
pub enum BuilderError {
    /// The path of a source does not exist.
    #[error("there is no source at {path}")]
    SourceMissing { path: PathBuf },
    /// The file is not in a known archive format.
    #[error("{path} is not an archive that can be read: {why}")]
    NotAnArchive { path: PathBuf, why: String },
    /// A readable source without llama.cpp.
    #[error("there is no llama.cpp in {path}; at its top are: {}", join_names(.top))]
    NoLlamaCpp {
        path: PathBuf,
        /// Names at the top level of the source, so that the user recognizes a wrong file.
        top: Vec<String>,
    },
    /// An archive with an entry or link that leads outside the unpack folder.
    #[error("{path} was not unpacked: its entry `{entry}` {why}")]
    UnsafeArchive { path: PathBuf, entry: String, why: &'static str },
    /// An archive with more bytes or entries than the limit for sources.
    #[error("{path} was not unpacked: it holds more than {limit}")]
    ArchiveTooLarge { path: PathBuf, limit: String },
    /// A folder with more bytes or files than the limit for sources.
    #[error("{path} is no source: what belongs to it is more than {limit}")]
    SourceTooLarge { path: PathBuf, limit: String },
    /// A required program is missing.
    #[error("not found: {program}")]
    MissingProgram {
        /// Usual name or description of the program.
        program: String,
        /// Debian package that contains the program.
        package: &'static str,
    },
    /// An installed program does not work.
    #[error("`{command}` failed while {doing}: {why}")]
    Program { command: String, doing: String, why: String },
    /// Not enough free disk space to build.
    #[error("{path} has {free} MiB free, a build takes {need} MiB")]
    Disk {
        /// Folder that would be written to.
        path: PathBuf,
        /// MiB available to this user.
        free: u64,
        /// MiB needed.
        need: u64,
    },
    /// Less memory is available than a build, or one of its compilers, needs.
    #[error("{available} MiB of memory are available, a build takes {need} MiB")]
    Memory {
        /// MiB available.
        available: u64,
        /// MiB needed.
        need: u64,
    },
    /// A cmake option that cannot be used.
    #[error("the cmake option `{option}` cannot be used: {why}")]
    Option { option: String, why: &'static str },
    /// The toolkit for a GPU backend is incomplete.
    #[error("a build for {backend} cannot be made here: {missing}")]
    Toolkit {
        backend: ComputeBackend,
        /// Missing part, and where it was searched.
        missing: String,
        cure: String,
    },
    /// An unknown backend or architecture, or an impossible combination of both.
    #[error("`{given}` cannot be built for: {why}")]
    Target {
        given: String,
        why: String,
        /// Valid values.
        cure: String,
    },
    /// An error about patch sets.
    #[error(transparent)]
    Patches(warden_patches::PatchError),
    /// The source changed between the plan and the build.
    #[error("{path} changed between the plan and the build")]
    SourceChanged { path: PathBuf },
    /// The binary lacks markers of patches that were applied to its source.
    #[error("the built llama-server lacks {}, although the source was patched", join_names(.fixes))]
    Markers {
        /// Fixes and hooks without their marker in the binary.
        fixes: Vec<String>,
    },
    /// Configuration or compilation failed.
    #[error("{phase} failed:\n{excerpt}\nfull log: {log}")]
    Build {
        /// `configuring` or `compiling`.
        phase: &'static str,
        /// First error, with a few lines.
        excerpt: String,
        log: PathBuf,
        /// The compiler was killed from outside, most likely because memory ran out.
        killed: bool,
        /// Disk or memory ran out, by the output or because the compiler was killed.
        no_room: bool,
    },
    /// The binary failed a check of the verification.
    #[error("the built llama-server failed the check `{check}`: {why}")]
    Verify {
        check: &'static str,
        /// The server's answer, or the last lines of its output.
        why: String,
        /// The server died of an instruction that this CPU lacks.
        illegal_instruction: bool,
    },
    /// The binary crashes or computes wrongly with weights of one format.
    #[error("the built llama-server fails with {weights} weights ({setting}): {why}")]
    Kernel {
        /// Weight format, such as `q4_0`.
        weights: &'static str,
        /// Settings of the failed server.
        setting: &'static str,
        /// Cause of the crash, or deviation of the answers.
        why: String,
        /// Settings with correct answers.
        right: Vec<&'static str>,
        /// Only repacked weights fail: with `--no-repack`, the answers are correct.
        repacked_alone: bool,
    },
    /// A downloaded file has another hash than the pinned one.
    #[error("{path} has the sha256 {found}, expected was {expected}")]
    WrongHash { path: PathBuf, found: String, expected: String },
    /// No build in the store has this id or prefix.
    #[error("there is no build `{id}` in {store}")]
    NoSuchBuild {
        /// The id or prefix, as given.
        id: String,
        store: PathBuf,
    },
    /// Several builds in the store have this prefix.
    #[error("`{prefix}` is the beginning of {} builds: {}", .ids.len(), join_names(.ids))]
    AmbiguousBuild { prefix: String, ids: Vec<BuildId> },
    /// The file that records the build in use has an unknown format.
    #[error("{path} cannot be understood: {why}")]
    DamagedChoices { path: PathBuf, why: String },
    /// No earlier build to roll back to.
    #[error("there is no build to go back to in {store}: none was in use before this one, or it was removed")]
    NoWayBack { store: PathBuf },
    /// The folder of a build is damaged.
    #[error("the build in {path} is damaged: {why}")]
    DamagedBuild { path: PathBuf, why: String },
    /// The folder of a build contains a file that no build of ours has.
    #[error("{path} was not removed: {why}, and no build of ours has that")]
    ForeignInBuild { path: PathBuf, why: String },
    /// An error about a git repository.
    #[error(transparent)]
    Git(#[from] crate::git::fault::GitError),
    /// A file operation failed.
    #[error("{doing} {path}: {source}")]
    Io {
        /// The operation, such as `reading`.
        doing: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    /// The caller cancelled.
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
        let hint = match self {
            Self::SourceMissing { .. } => "give the path of a folder or of a .tar.gz, .tar.xz or .zip file".into(),
            Self::NotAnArchive { .. } => "supported are .tar.gz, .tar.xz and .zip, recognized by content, not by name".into(),
            Self::NoLlamaCpp { .. } => {
                "llama.cpp is recognized by CMakeLists.txt, ggml/ and tools/server or examples/server side by side, \
                 at most four folders deep"
                    .into()
            }
            Self::SourceTooLarge { .. } => {
                "give llama.cpp's own folder, without models and data in it; a clone is given with --git, which takes what \
                 is committed"
                    .into()
            }
            Self::MissingProgram { package, .. } => format!("install it: apt install {package}"),
            Self::Disk { .. } => "free some space, or set XDG_CACHE_HOME and XDG_DATA_HOME to another disk".into(),
            Self::Memory { .. } => "stop something else first, or add swap".into(),
            Self::Build { killed: true, .. } => {
                "the compiler was killed, most likely because memory ran out: try fewer jobs (--jobs 1)".into()
            }
            Self::Build { no_room: true, .. } => {
                "disk or memory ran out, as the log says: free some, or try fewer jobs (--jobs 1)".into()
            }
            Self::Verify { illegal_instruction: true, .. } => {
                "it uses instructions that this CPU does not have: build with --arch portable, or with --arch native \
                 on this very machine"
                    .into()
            }
            Self::Verify { why, .. } if missing_library(why).is_some() => format!(
                "the loader does not find {}: install the package that has it, or name its folder in LD_LIBRARY_PATH",
                missing_library(why).unwrap_or_default()
            ),
            Self::Kernel { repacked_alone: true, .. } => {
                "it computes right with --no-repack, so a kernel for repacked weights is wrong: build with another \
                 compiler (CC and CXX) or another revision"
                    .into()
            }
            Self::Kernel { right, .. } => format!(
                "right with: {}; build with another compiler (CC and CXX) or another revision",
                join_names(right)
            ),
            Self::Toolkit { cure, .. } | Self::Target { cure, .. } => cure.clone(),
            Self::Patches(error) => return error.hint(),
            Self::SourceChanged { .. } => "leave it alone while it is built, and try again".into(),
            Self::Markers { .. } => {
                "the file that was patched is not part of this build: does --backend fit the patch set?".into()
            }
            Self::WrongHash { path, .. } => format!("delete {} and try again", path.display()),
            Self::NoSuchBuild { .. } => "`llama-warden builds list` shows what there is".into(),
            Self::ForeignInBuild { .. } => "look at it, and remove it yourself if nobody needs it".into(),
            Self::DamagedChoices { .. } => "remove it to start over: then the newest build is in use".into(),
            Self::NoWayBack { .. } => "`llama-warden builds list` shows what there is, `builds use ID` takes one".into(),
            Self::AmbiguousBuild { .. } => "give more characters of the id".into(),
            Self::DamagedBuild { .. } => "remove it with `llama-warden builds rm`, then build again".into(),
            Self::Git(fault) => return fault.hint(),
            Self::Io { source, .. } if source.kind() == io::ErrorKind::StorageFull => "the disk is full".into(),
            _ => return None,
        };
        Some(hint)
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

/// The missing library named by the dynamic loader's message.
fn missing_library(why: &str) -> Option<&str> {
    why.split_once("error while loading shared libraries: ")?.1.split(':').next().map(str::trim)
}

/// Joins names, shortened when there are many.
fn join_names<T: std::fmt::Display>(names: &[T]) -> String {
    const SHOWN: usize = 12;
    if names.is_empty() {
        return "nothing".to_owned();
    }
    let text = names.iter().take(SHOWN).map(ToString::to_string).collect::<Vec<_>>().join(", ");
    match names.len().checked_sub(SHOWN) {
        None | Some(0) => text,
        Some(more) => format!("{text} and {more} more"),
    }
}

#[cfg(test)]
#[path = "error_tests.rs"]
mod tests;
