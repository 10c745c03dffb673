//! Everything that can go wrong here, as one type. Each message says what was being done to which thing; the cure,
//! where there is one, is in [`Error::hint`].

use std::io;
use std::path::PathBuf;

use crate::build::failure::wants_room;
use crate::kind::Kind;
use crate::plan::backend::Backend;
use crate::store::id::BuildId;

/// The result of everything in this crate that can fail.
pub type Result<T> = std::result::Result<T, Error>;

/// Why something was not done.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "each message says what its fields are")]
pub enum Error {
    /// The path of a source leads nowhere.
    #[error("there is no source at {path}")]
    SourceMissing { path: PathBuf },
    /// A file that is none of the known archives.
    #[error("{path} is not an archive that can be read: {why}")]
    NotAnArchive { path: PathBuf, why: String },
    /// A readable source in which there is no llama.cpp.
    #[error("there is no llama.cpp in {path}; at its top are: {}", list(.top))]
    NoLlamaCpp {
        path: PathBuf,
        /// Names at its top level, so that a wrong file is recognised at once.
        top: Vec<String>,
    },
    /// An archive that would write, or point, outside of the folder it is unpacked into.
    #[error("{path} was not unpacked: its entry `{entry}` {why}")]
    UnsafeArchive { path: PathBuf, entry: String, why: &'static str },
    /// More bytes or entries than a source has.
    #[error("{path} was not unpacked: it holds more than {limit}")]
    ArchiveTooLarge { path: PathBuf, limit: String },
    /// A folder with more bytes or files than a source has.
    #[error("{path} is no source: what belongs to it is more than {limit}")]
    SourceTooLarge { path: PathBuf, limit: String },
    /// A program that has to be there is not.
    #[error("not found: {program}")]
    MissingProgram {
        /// Its usual name, or what it is.
        program: String,
        /// The Debian package that has it.
        package: &'static str,
    },
    /// A program that is there does not work.
    #[error("`{command}` failed while {doing}: {why}")]
    Program { command: String, doing: String, why: String },
    /// Not enough room to build.
    #[error("{path} has {free} MiB free, a build takes {need} MiB")]
    Disk {
        /// The folder that would be written to.
        path: PathBuf,
        /// MiB available to this user.
        free: u64,
        /// MiB needed.
        need: u64,
    },
    /// Not enough memory for even one compiler.
    #[error("{available} MiB of memory are available, a build takes {need} MiB")]
    Memory {
        /// MiB available.
        available: u64,
        /// MiB needed.
        need: u64,
    },
    /// A cmake option that cannot be honoured.
    #[error("the cmake option `{option}` cannot be used: {why}")]
    Option { option: String, why: &'static str },
    /// What makes code for a GPU is not whole.
    #[error("a build for {backend} cannot be made here: {missing}")]
    Toolkit {
        backend: Backend,
        /// What is missing, and where it was looked for.
        missing: String,
        /// The cure.
        cure: String,
    },
    /// A backend or an architecture that does not exist, or not together.
    #[error("`{given}` cannot be built for: {why}")]
    Target {
        given: String,
        why: String,
        /// What there is.
        cure: String,
    },
    /// Something about patch sets.
    #[error(transparent)]
    Patches(warden_patches::Error),
    /// The source is not any more what was planned with.
    #[error("{path} changed between the plan and the build")]
    SourceChanged { path: PathBuf },
    /// The binary lacks what the patches put into its source.
    #[error("the built llama-server lacks {}, although the source was patched", list(.fixes))]
    Markers {
        /// The fixes and hooks whose marker is not in it.
        fixes: Vec<String>,
    },
    /// The configuration or the compilation failed.
    #[error("{phase} failed:\n{excerpt}\nfull log: {log}")]
    Build {
        /// `configuring` or `compiling`.
        phase: &'static str,
        /// The first error, with a few lines.
        excerpt: String,
        log: PathBuf,
        /// Whether the compiler was killed from outside, most likely for memory.
        killed: bool,
        /// Whether disk or memory ran out: its output says so, or the compiler was killed.
        no_room: bool,
    },
    /// The binary does not do what a llama-server does.
    #[error("the built llama-server failed the check `{check}`: {why}")]
    Verify {
        check: &'static str,
        /// The answer, or the process's last lines.
        why: String,
        /// Whether it died of an instruction that this CPU does not have.
        illegal_instruction: bool,
    },
    /// The binary dies or computes wrongly with weights of a form.
    #[error("the built llama-server fails with {weights} weights ({setting}): {why}")]
    Kernel {
        /// The form, such as `q4_0`.
        weights: &'static str,
        /// What it was started with.
        setting: &'static str,
        /// How it died, or how far its answers are from right.
        why: String,
        /// The settings with which it computes right.
        right: Vec<&'static str>,
        /// Whether it fails with repacked weights and is right with `--no-repack`.
        repacked_alone: bool,
    },
    /// The pinned archive is not the one that arrived.
    #[error("{path} has the sha256 {found}, expected was {expected}")]
    WrongHash { path: PathBuf, found: String, expected: String },
    /// No build in the store has this id.
    #[error("there is no build `{id}` in {store}")]
    NoSuchBuild {
        /// The id or prefix, as given.
        id: String,
        store: PathBuf,
    },
    /// More than one build in the store has this prefix.
    #[error("`{prefix}` is the beginning of {} builds: {}", .ids.len(), list(.ids))]
    AmbiguousBuild { prefix: String, ids: Vec<BuildId> },
    /// The file that says which build is in use is none of ours.
    #[error("{path} cannot be understood: {why}")]
    DamagedChoices { path: PathBuf, why: String },
    /// Nothing was in use before the build that is.
    #[error("there is no build to go back to in {store}: none was in use before this one, or it was removed")]
    NoWayBack { store: PathBuf },
    /// A build's folder cannot be used.
    #[error("the build in {path} is damaged: {why}")]
    DamagedBuild { path: PathBuf, why: String },
    /// In a build's folder is what no build of ours has.
    #[error("{path} was not removed: {why}, and no build of ours has that")]
    ForeignInBuild { path: PathBuf, why: String },
    /// Something about a repository.
    #[error(transparent)]
    Git(#[from] crate::git::fault::Fault),
    /// A file operation failed.
    #[error("{doing} {path}: {source}")]
    Io {
        /// What was being done, such as `reading`.
        doing: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    /// The caller cancelled.
    #[error("cancelled")]
    Cancelled,
}

impl From<warden_patches::Error> for Error {
    /// What a tree of ours said comes back as it was.
    fn from(error: warden_patches::Error) -> Self {
        match error {
            warden_patches::Error::Tree(own) => match own.downcast() {
                Ok(own) => *own,
                Err(other) => Self::Patches(warden_patches::Error::Tree(other)),
            },
            warden_patches::Error::Io { doing, path, source } => Self::Io { doing, path, source },
            other => Self::Patches(other),
        }
    }
}

impl From<Error> for warden_patches::Error {
    fn from(error: Error) -> Self {
        Self::Tree(Box::new(error))
    }
}

impl Error {
    /// Whose turn it is: an edge maps this to its exit code.
    pub const fn kind(&self) -> Kind {
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
            | Self::ForeignInBuild { .. } => Kind::Input,
            Self::MissingProgram { .. }
            | Self::Program { .. }
            | Self::Toolkit { .. }
            | Self::SourceChanged { .. }
            | Self::Disk { .. }
            | Self::Memory { .. }
            | Self::WrongHash { .. }
            | Self::Io { .. } => Kind::Machine,
            Self::Build { .. }
            | Self::Markers { .. }
            | Self::Verify { .. }
            | Self::Kernel { .. }
            | Self::DamagedBuild { .. } => Kind::Build,
            Self::Patches(error) => match error.kind() {
                warden_patches::Kind::Input => Kind::Input,
                warden_patches::Kind::Machine => Kind::Machine,
                warden_patches::Kind::Refused => Kind::Refused,
            },
            Self::Git(fault) => fault.kind(),
            Self::Cancelled => Kind::Cancelled,
        }
    }

    /// Whether disk or memory ran out, so that a later try may succeed.
    pub fn had_no_room(&self) -> bool {
        match self {
            Self::Disk { .. } | Self::Memory { .. } => true,
            Self::Build { no_room, .. } => *no_room,
            Self::Program { why, .. } => wants_room(why),
            Self::Io { source, .. } => {
                use io::ErrorKind::{OutOfMemory, QuotaExceeded, StorageFull};
                matches!(source.kind(), StorageFull | QuotaExceeded | OutOfMemory)
            }
            _ => false,
        }
    }

    /// What the reader can do about it, as one sentence.
    pub fn hint(&self) -> Option<String> {
        let hint = match self {
            Self::SourceMissing { .. } => "give the path of a folder or of a .tar.gz, .tar.xz or .zip file".into(),
            Self::NotAnArchive { .. } => "known are .tar.gz, .tar.xz and .zip, told by content, not by name".into(),
            Self::NoLlamaCpp { .. } => {
                "llama.cpp is told by CMakeLists.txt, ggml/ and tools/server or examples/server side by side, \
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
                list(right)
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
            Self::DamagedChoices { .. } => "remove it to begin anew: then the newest build is in use".into(),
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

/// Shorthand for wrapping an `io::Error`: `fs::read(path).map_err(io_error("reading", path))`.
pub(crate) fn io_error(doing: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Error {
    let path = path.into();
    move |source| Error::Io { doing, path, source }
}

/// The library that a program's loader says it cannot find.
fn missing_library(why: &str) -> Option<&str> {
    why.split_once("error while loading shared libraries: ")?.1.split(':').next().map(str::trim)
}

/// Some names, shortened when there are many.
fn list<T: std::fmt::Display>(names: &[T]) -> String {
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
