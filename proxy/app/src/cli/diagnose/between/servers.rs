//! The servers of a search: built from its commits where they are not there, in a store of its own, and removed when nobody needs them.

use std::fs::File;

use rustix::fs::FlockOperation;
use warden_builder::git::RevisionInfo;
use warden_builder::{Request, Source};
use warden_diagnose::between::{Needed, NoServer};
use warden_policies::experiment::between::{Conclusion, Outcome as Ended};

use super::{Between, DiagnoseArgs, lock};
use crate::cli::builds_between;
use crate::cli::diagnose::target::Target;
use crate::config::resolve::binary::Choice;
use crate::exit::Failure;
use crate::out;

impl Between<'_> {
    pub(super) fn request(&self, info: &RevisionInfo) -> Request {
        let (repository, shown, commit) = (self.repository.clone(), self.shown.clone(), info.commit.clone());
        Request { source: Source::Commit { repository, shown, commit }, ..self.plain.clone() }
    }

    /// The server of a revision, built if it is not there.
    pub(super) async fn target(&self, needed: &Needed) -> Result<Target, NoServer> {
        let Some(info) = self.line.get(needed.revision) else {
            return Err(NoServer::Cannot("there is no such revision".to_owned()));
        };
        let id = self.build(needed).await?;
        if text_of(self.args) != self.file {
            return self.stop_for(Failure::hinted(
                "the configuration file changed while the search ran",
                "run the same command again: with other settings it is another search",
            ));
        }
        let chosen = Some(("--between", Choice::Build(id.to_string())));
        match Target::with(self.args, self.machine, chosen, Some(&self.builder.dirs.data)).await {
            Ok(target) => Ok(target),
            Err(failure) => self.stop_for(Failure::hinted(
                format!("{} cannot be used as it is configured: {}", info.label, failure.lines().join("; ")),
                "builds of a search are without patches: leave out `mitigations` that need them",
            )),
        }
    }

    /// Ends the search for something that no revision is to be blamed for; what it was told stays.
    pub(super) fn stop_for<T>(&self, failure: Failure) -> Result<T, NoServer> {
        *lock(&self.trouble) = Some(failure);
        Err(NoServer::Interrupted)
    }

    /// A file that all who search here hold.
    pub(super) fn in_use(&self) -> Result<File, Failure> {
        let folder = &self.builder.dirs.data;
        let held = builds_between::in_use(folder, FlockOperation::LockShared);
        held.map_err(|error| {
            Failure::failed(format!("cannot hold the builds in {}: {error}", folder.display()))
        })
    }

    /// Removes the builds that nobody needs any more: those that were made for this search, but the two that matter. One that can go on with
    /// more readings keeps all, and so does one beside which others go on.
    pub(super) fn tidy(&self, conclusion: &Conclusion, made: &[String], in_use: &File) {
        let is_told =
            matches!(conclusion.outcome, Ended::Found { .. } | Ended::Among { .. } | Ended::Unsteady { .. });
        if !is_told || rustix::fs::flock(in_use, FlockOperation::NonBlockingLockExclusive).is_err() {
            return;
        }
        let place = |commit: &str| self.line.iter().position(|info| info.commit == commit);
        let matters = |at: usize| conclusion.bounds.is_some_and(|(healthy, ill)| at == healthy || at == ill);
        let store = self.builder.store();
        let all = store.list().map(|listing| listing.builds).unwrap_or_default();
        for build in all.iter().filter(|build| made.iter().any(|id| id == build.id.as_str())) {
            let at = build.plan.source.revision.commit.as_deref().and_then(place);
            if !at.is_some_and(matters)
                && let Err(error) = store.remove(&build.id)
            {
                out::error_line(&format!("build {} was not removed: {error}", build.id));
            }
        }
    }
}

/// The configuration file as it is now.
pub(super) fn text_of(args: &DiagnoseArgs) -> Option<String> {
    args.config.config.as_ref().and_then(|path| std::fs::read_to_string(path).ok())
}
