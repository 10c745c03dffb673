//! The builder: its folders and environment, and the requests that it takes.

use std::path::PathBuf;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use warden_patches::SetSelection;

use crate::environment::BuildEnvironment;
use crate::error::Result;
use crate::event::EventReporter;
use crate::git;
use crate::machine::MachineNeeds;
use crate::plan::{ArchChoice, BackendChoice};
use crate::process::{RunPriority, run_blocking};
use crate::source::BuildSource;
use crate::store::{BuildId, BuildStore, Provenance};

/// Folders of the builder. No other program uses them; they are created when needed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BuilderDirs {
    /// Replaceable files: sources, tools, work folders, logs.
    pub cache: PathBuf,
    /// Persistent files: the store.
    pub data: PathBuf,
}

/// A request for a build.
#[derive(Clone, Debug)]
pub struct BuildRequest {
    /// Location of the source.
    pub source: BuildSource,
    /// Compute backend of the binary.
    pub backend: BackendChoice,
    /// CPU and GPU architectures that the binary must run on.
    pub arch: ArchChoice,
    /// Patch sets to apply.
    pub patches: SetSelection,
    /// Additional cmake options, as `NAME=VALUE` or `-DNAME=VALUE`.
    pub options: Vec<String>,
    /// Parallel compilers; `None`: as many as cores and memory allow.
    pub jobs: Option<usize>,
    /// Requirements on the machine.
    pub needs: MachineNeeds,
    /// Time limit for npm to make the web page; after that, the build continues without a page.
    pub page_timeout: Duration,
    /// Time limit for each start and each answer of the new server.
    pub verify_timeout: Duration,
    /// Priority of the compilers.
    pub priority: RunPriority,
}

/// A build that is in the store.
#[derive(Clone, Debug)]
pub struct StoredBuild {
    /// The build's id.
    pub id: BuildId,
    /// Path of the llama-server.
    pub binary: PathBuf,
    /// The store had the build already.
    pub hit: bool,
    /// The build's provenance.
    pub provenance: Provenance,
}

/// Builds llama-server. Cheap to create; holds no resources between calls.
#[derive(Clone, Debug)]
pub struct Builder {
    /// Folders for cache and store.
    pub dirs: BuilderDirs,
    /// Search path for programs, and environment variables.
    pub env: BuildEnvironment,
    /// Bytes of memory available without swapping; `None` if unknown: memory then limits nothing.
    pub memory: fn() -> Option<u64>,
    /// Receiver of progress events.
    pub reporter: EventReporter,
    /// Cancels the running work: before the call returns, all children have ended and all work folders are
    /// removed.
    pub cancel: CancellationToken,
}

impl Builder {
    /// The store that receives the builds, with the ones installed next to this program.
    pub fn store(&self) -> BuildStore {
        BuildStore::with_bundled(&self.dirs.data)
    }

    /// Returns a commit as a source, fetched if necessary.
    ///
    /// # Errors
    /// Fails if the commit does not exist, or is not on this machine and cannot be fetched.
    pub async fn git(&self, request: &git::CommitRequest) -> Result<BuildSource> {
        let git::ObtainedCommit { repository, commit } = self.repository(request).await?;
        let (shown, repository) = (repository.shown().to_owned(), repository.path().to_owned());
        Ok(BuildSource::Commit { repository, shown, commit })
    }

    /// Returns the repository with a commit, for ranges and single files; fetched if necessary.
    ///
    /// # Errors
    /// Fails if the commit does not exist, or is not on this machine and cannot be fetched.
    pub async fn repository(&self, request: &git::CommitRequest) -> Result<git::ObtainedCommit> {
        git::obtain(request, &self.dirs.cache, &self.reporter, &self.cancel).await
    }

    /// Runs blocking work on another thread. The token given to `work` is cancelled when the builder is
    /// cancelled, or when the caller drops the future.
    pub(crate) async fn run_blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(CancellationToken) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let token = self.cancel.child_token();
        let _guard = token.clone().drop_guard();
        run_blocking(move || work(token)).await
    }
}
