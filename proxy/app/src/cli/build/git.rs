//! Flags that choose a commit of a repository, shared by all commands that take source.

use clap::Args;
use warden_builder::git::{CommitRequest, GitSource};
use warden_policies::defaults::Build;

use crate::exit::CommandError;

#[derive(Clone, Debug, Default, Args)]
pub(crate) struct GitArgs {
    /// Git repository: a URL, a folder (read in place), or a name from `[build.sources]`, such as
    /// `ik_llama.cpp`.
    #[arg(long, value_name = "URL|PATH|NAME")]
    git: Option<String>,
    /// Tag, branch or commit of the repository. Default: the configured one, else the repository's default
    /// branch.
    #[arg(long = "ref", value_name = "TAG|BRANCH|SHA")]
    reference: Option<String>,
    /// Never uses the network for the repository: takes what was fetched before.
    #[arg(long)]
    offline: bool,
}

impl GitArgs {
    /// Returns whether `--ref` names a tag, a branch or a commit.
    pub(crate) const fn names_commit(&self) -> bool {
        self.reference.is_some()
    }

    /// Creates the request for the commit; without `--git`, for the configured default source. `history`
    /// fetches the preceding commits, too.
    pub(crate) fn repository_request(
        &self,
        numbers: &Build,
        history: bool,
    ) -> Result<CommitRequest, CommandError> {
        let named = GitSource::parse(self.git.as_deref().unwrap_or(&numbers.source), &numbers.sources)?;
        let reference = self.reference.clone().or(named.reference);
        Ok(CommitRequest { location: named.location, reference, offline: self.offline, history })
    }
}

#[cfg(test)]
mod tests {
    use warden_builder::git::GitLocation;
    use warden_policies::defaults::defaults;

    use super::*;

    fn request(git: Option<&str>, reference: Option<&str>) -> Result<CommitRequest, CommandError> {
        let own = |text: Option<&str>| text.map(str::to_owned);
        GitArgs { git: own(git), reference: own(reference), offline: false }
            .repository_request(&defaults().build, false)
    }

    #[test]
    fn without_a_word_it_is_upstream_at_a_whole_commit() {
        let request = request(None, None).unwrap();
        assert_eq!(request.location.host(), "github.com");
        assert_eq!(request.reference.map(|commit| commit.len()), Some(40));
    }

    #[test]
    fn what_is_asked_for_wins_over_the_configuration() {
        let asked = request(Some("ik_llama.cpp"), Some("main")).unwrap();
        assert!(asked.location.to_string().ends_with("/ik_llama.cpp"));
        assert_eq!(asked.reference.as_deref(), Some("main"));
        let path = request(Some("/srv/a"), None).unwrap();
        assert_eq!((path.location, path.reference), (GitLocation::Path("/srv/a".into()), None));
    }

    #[test]
    fn every_name_of_the_defaults_can_be_used_and_a_wrong_one_tells_them() {
        for name in defaults().build.sources.keys() {
            let location = request(Some(name), None).unwrap().location;
            assert!(matches!(location, GitLocation::Url(_)), "{name}");
        }
        let Err(CommandError::Usage { hint, .. }) = request(Some("ssh://x/y"), None) else {
            unreachable!("ssh is not understood")
        };
        assert!(hint.contains("ik_llama.cpp, llama.cpp, turboquant"), "{hint}");
    }
}
