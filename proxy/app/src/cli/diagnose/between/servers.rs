//! Builds the servers of a search in a separate store, and removes them when the search has its answer.

use std::fs::File;

use rustix::fs::FlockOperation;
use warden_builder::git::RevisionInfo;
use warden_builder::{BuildRequest, BuildSource, BuilderError, ErrorClass, Provenance};
use warden_config::resolve::binary::BinaryChoice;
use warden_diagnose::between::NoServer;
use warden_experiment::between::{RevisionConclusion, RevisionOutcome as Ended};

use super::{CommitSearch, DiagnoseArgs};
use crate::cli::builds_between;
use crate::cli::diagnose::target::DiagnoseTarget;
use crate::exit::CommandError;
use crate::out;

impl CommitSearch<'_> {
    pub(super) fn request(&self, info: &RevisionInfo) -> BuildRequest {
        let repository = self.repository.clone();
        let shown = self.shown.clone();
        let commit = info.commit.clone();
        BuildRequest { source: BuildSource::Commit { repository, shown, commit }, ..self.plain.clone() }
    }

    pub(super) async fn target(&self, revision: usize) -> Result<DiagnoseTarget, NoServer<CommandError>> {
        let info = &self.line[revision];
        let built = self.builder.build(&self.request(info)).await.map_err(classify_build_error)?;
        if config_file_text(self.args) != self.file {
            return Err(NoServer::Stop(CommandError::hinted(
                "the configuration file changed while the search ran",
                "run the same command again: with other settings it is another search",
            )));
        }
        let chosen = Some(("--between", BinaryChoice::Build(built.id.to_string())));
        let target =
            DiagnoseTarget::find_with_program(self.args, self.machine, chosen, Some(&self.builder.dirs.data))
                .await;
        target.map_err(|failure| {
            NoServer::Stop(CommandError::hinted(
                format!("{} cannot be used as it is configured: {}", info.label, failure.lines().join("; ")),
                "builds of a search are without patches: leave out `mitigations` that need them",
            ))
        })
    }

    pub(super) fn lock_in_use_file(&self) -> Result<File, CommandError> {
        let folder = &self.builder.dirs.data;
        let held = builds_between::lock_in_use_file(folder, FlockOperation::LockShared);
        held.map_err(CommandError::cannot("hold the builds in", folder))
    }

    pub(super) fn builds(&self) -> Vec<Provenance> {
        self.builder.store().list().map(|listing| listing.builds).unwrap_or_default()
    }

    /// Once the search has an answer, removes the builds of all judged commits but the two neighbours of the
    /// change. Keeps builds of earlier searches (`others`), and all builds while another search runs.
    pub(super) fn remove_builds(
        &self,
        conclusion: &RevisionConclusion,
        others: &[Provenance],
        in_use: &File,
    ) {
        let is_told =
            matches!(conclusion.outcome, Ended::Found { .. } | Ended::Among { .. } | Ended::Unsteady { .. });
        if !is_told || rustix::fs::flock(in_use, FlockOperation::NonBlockingLockExclusive).is_err() {
            return;
        }
        let is_done = |commit: &str| {
            let place = self.line.iter().position(|info| info.commit == commit);
            place.is_some_and(|at| {
                let matters = conclusion.bounds.is_some_and(|(healthy, ill)| at == healthy || at == ill);
                !matters && conclusion.judged.iter().any(|judged| judged.revision == at)
            })
        };
        let store = self.builder.store();
        for build in self.builds() {
            if !others.iter().any(|other| other.id == build.id)
                && build.plan.source.revision.commit.as_deref().is_some_and(is_done)
                && let Err(error) = store.remove(&build.id)
            {
                out::error_line(&format!("build {} was not removed: {error}", build.id));
            }
        }
    }
}

/// Errors in the source count against the revision; a full disk or a missing compiler stops the search.
fn classify_build_error(error: BuilderError) -> NoServer<CommandError> {
    match error.kind() {
        ErrorClass::Cancelled => NoServer::Interrupted,
        ErrorClass::Machine => NoServer::Stop(error.into()),
        _ if error.ran_out_of_space() => NoServer::Stop(error.into()),
        _ => NoServer::Unavailable(error.to_string()),
    }
}

pub(super) fn config_file_text(args: &DiagnoseArgs) -> Option<String> {
    args.config.config.as_ref().and_then(|path| std::fs::read_to_string(path).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_revision_is_blamed_for_its_source_alone() {
        let build = |no_room| BuilderError::Build {
            phase: "compiling",
            excerpt: "collect2: error: ld returned 1 exit status".to_owned(),
            log: "/logs/1.log".into(),
            killed: false,
            no_room,
        };
        let io = |source: std::io::ErrorKind| BuilderError::Io {
            doing: "writing",
            path: "/store/x".into(),
            source: source.into(),
        };
        let why = "no answer within 60 s".to_owned();
        let missing = BuilderError::MissingProgram { program: "ninja".to_owned(), package: "ninja-build" };
        for (error, expected) in [
            (BuilderError::Cancelled, "interrupted"),
            (build(true), "stop"),
            (BuilderError::Memory { available: 1, need: 2 }, "stop"),
            (io(std::io::ErrorKind::StorageFull), "stop"),
            (io(std::io::ErrorKind::PermissionDenied), "stop"),
            (missing, "stop"),
            (BuilderError::Verify { check: "health", why, illegal_instruction: false }, "cannot"),
            (build(false), "cannot"),
        ] {
            let text = error.to_string();
            let blamed = match classify_build_error(error) {
                NoServer::Interrupted => "interrupted",
                NoServer::Stop(_) => "stop",
                NoServer::Unavailable(_) => "cannot",
            };
            assert_eq!(blamed, expected, "{text}");
        }
    }
}
