//! Runs the user's `git` against a server, with their credentials, proxies and certificates, and without
//! prompts.
//!
//! A call ends at once when it is cancelled, after [`SILENCE_TIMEOUT`] without output, or when the download
//! exceeds its limit. When the call returns, git and all its descendants have ended.

use std::collections::HashSet;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::process::Command;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::fault::GitError;
use super::location::{redact_url, url_credentials};
use crate::environment;
use crate::error::{BuilderError, Result, check_cancelled};
use crate::process::{self, ChildExit};

/// A server without output for this long counts as dead: servers report progress while they count objects.
const SILENCE_TIMEOUT: Duration = Duration::from_secs(60);
const SIZE_CHECK_INTERVAL: Duration = Duration::from_millis(200);
/// Maximum bytes of a list of branches and tags: some thirty times llama.cpp's.
const MAX_LIST_BYTES: usize = 64 << 20;
/// Name of the remote in git's configuration, passed by environment only: a URL may contain a password.
pub(super) const REMOTE_NAME: &str = "llama-warden";
/// Overrides of the user's settings: no hooks, no background tasks, no other repositories.
const GIT_SETTINGS: [&str; 7] = [
    "core.hooksPath=/dev/null",
    "gc.auto=0",
    "maintenance.auto=false",
    "fetch.prune=false",
    "fetch.recurseSubmodules=no",
    // A single pack file, so that the received bytes can be measured.
    "fetch.unpackLimit=1",
    "transfer.unpackLimit=1",
];
/// Variables that select another repository, or mix trace output into the output we parse.
const REMOVED_VARIABLES: [&str; 13] = [
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_COMMON_DIR",
    "GIT_INDEX_FILE",
    "GIT_NAMESPACE",
    "GIT_OBJECT_DIRECTORY",
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_SHALLOW_FILE",
    "GIT_TRACE",
    "GIT_TRACE_CURL",
    "GIT_TRACE_PACKET",
    "GIT_CURL_VERBOSE",
    "LANGUAGE",
];

#[derive(Clone, Copy, Debug)]
pub(super) struct GitServer<'a> {
    pub(super) url: &'a str,
    pub(super) folder: &'a Path,
    pub(super) wanted: &'a str,
}

struct GitOutput {
    alive: Instant,
    bytes: usize,
    complaints: Vec<String>,
}

/// Pack files that appear in a repository during a fetch.
struct ReceivedPacks {
    folder: PathBuf,
    before: HashSet<OsString>,
}

impl GitServer<'_> {
    /// Runs `git` and passes on each line of its output. Fails if `git` fails, if no output comes for too
    /// long, or if more than `most` bytes arrive.
    pub(super) async fn run(
        self,
        arguments: &[&str],
        most: usize,
        cancel: &CancellationToken,
        mut line: impl FnMut(&str),
    ) -> Result<()> {
        let (packs, token) = (ReceivedPacks::watch(self.folder), cancel.child_token());
        let heard = Mutex::new(GitOutput { alive: Instant::now(), bytes: 0, complaints: Vec::new() });
        let hear = || heard.lock().unwrap_or_else(PoisonError::into_inner);
        let mut size = 0;
        let mut stopped: Option<GitError> = None;
        let ended = {
            let running = process::run(self.command(arguments), &token, |text| {
                let mut heard = hear();
                (heard.alive, heard.bytes) = (Instant::now(), heard.bytes + text.len());
                keep_complaint(&mut heard.complaints, text);
                drop(heard);
                line(text);
            });
            tokio::pin!(running);
            loop {
                tokio::select! {
                    ended = &mut running => break ended,
                    () = tokio::time::sleep(SIZE_CHECK_INTERVAL) => {}
                }
                let now = packs.received();
                if now != size {
                    hear().alive = Instant::now();
                    size = now;
                }
                let (alive, bytes) = {
                    let heard = hear();
                    (heard.alive, heard.bytes)
                };
                if size > most || bytes > MAX_LIST_BYTES.max(most) {
                    stopped = stopped.or_else(|| Some(self.too_large(most)));
                    token.cancel();
                } else if alive.elapsed() > SILENCE_TIMEOUT {
                    let why = format!("it said nothing for {} s", SILENCE_TIMEOUT.as_secs());
                    stopped = stopped.or_else(|| Some(self.unreachable(why)));
                    token.cancel();
                }
            }
        };
        check_cancelled(cancel)?;
        if stopped.is_none() && packs.received() > most {
            stopped = Some(self.too_large(most));
        }
        if let Some(fault) = stopped {
            packs.discard();
            return Err(fault.into());
        }
        match ended {
            Ok(ChildExit::Exited(status)) if status.success() => Ok(()),
            Ok(ChildExit::Exited(status)) => Err(self.classify_failure(&hear().complaints, status).into()),
            Ok(ChildExit::Cancelled) => Err(BuilderError::Cancelled),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Err(GitError::NoGit.into()),
            Err(error) => Err(crate::error::io_error("running", "git")(error)),
        }
    }

    fn command(self, arguments: &[&str]) -> Command {
        let mut command = Command::new("git");
        // Name the folder: `safe.bareRepository = explicit` forbids git to discover a bare repository.
        command.arg("--git-dir").arg(self.folder);
        for setting in GIT_SETTINGS {
            command.args(["-c", setting]);
        }
        command.args(arguments);
        for name in REMOVED_VARIABLES {
            command.env_remove(name);
        }
        // No prompts, and untranslated messages, which are parsed below.
        command.envs([
            ("GIT_TERMINAL_PROMPT", "0"),
            ("GIT_ASKPASS", ""),
            ("SSH_ASKPASS", ""),
            ("LC_ALL", "C"),
        ]);
        // Pass the URL in a variable, because every user of the machine can read arguments. `git -c` uses
        // this variable, too, and git before 2.31 supports no other.
        let mut settings = environment::git_settings();
        if !settings.is_empty() {
            settings.push(" ");
        }
        settings.push(format!("'remote.{REMOTE_NAME}.url={}'", self.url.replace('\'', "'\\''")));
        command.env("GIT_CONFIG_PARAMETERS", settings);
        command
    }

    fn too_large(self, most: usize) -> GitError {
        GitError::TooLarge { url: redact_url(self.url), most: most as u64 >> 20 }
    }

    fn unreachable(self, why: String) -> GitError {
        let host = super::GitLocation::Url(self.url.to_owned()).host().to_owned();
        GitError::Unreachable { host, reference: self.wanted.to_owned(), why }
    }

    fn classify_failure(self, complaints: &[String], status: ExitStatus) -> GitError {
        let said = |prefix: &str| complaints.iter().find_map(|line| line.strip_prefix(prefix));
        let why =
            said("fatal: ").or_else(|| said("error: ")).or_else(|| complaints.last().map(String::as_str));
        let why = why.map_or_else(|| format!("git ended with {status}"), |why| self.hide_credentials(why));
        // "unable to access 'https://...': Could not resolve host: ..."
        let why = why.split_once("': ").map_or(why.as_str(), |(_, why)| why).to_owned();
        let any = |words: &[&str]| complaints.iter().any(|line| words.iter().any(|word| line.contains(word)));
        let url = redact_url(self.url);
        if any(&["certificate", "SSL"]) {
            self.unreachable(why)
        } else if any(&REFUSED_MESSAGES) {
            GitError::Refused { url, why }
        } else if any(&UNREACHABLE_MESSAGES) {
            self.unreachable(why)
        } else {
            GitError::Repository { doing: "fetching from", repository: url, why }
        }
    }

    fn hide_credentials(self, text: &str) -> String {
        let text = text.replace(self.url, &redact_url(self.url));
        url_credentials(self.url).map_or(text.clone(), |secret| text.replace(&format!("{secret}@"), ""))
    }
}

const REFUSED_MESSAGES: [&str; 8] = [
    "Authentication failed",
    "could not read Username",
    "could not read Password",
    "terminal prompts disabled",
    "requested URL returned error",
    "not found",
    "access denied",
    "does not appear to be a git repository",
];
const UNREACHABLE_MESSAGES: [&str; 13] = [
    "unable to access",
    "unable to connect",
    "unable to look up",
    "Could not read from remote repository",
    "Connection",
    "early EOF",
    "hung up",
    "disconnect",
    "RPC failed",
    "timed out",
    "read error",
    "Network is",
    "invalid index-pack output",
];

/// Keeps a few shortened lines that may explain a failure; the server may send any number of lines.
fn keep_complaint(complaints: &mut Vec<String>, line: &str) {
    const MOST: usize = 20;
    const LONGEST: usize = 300;
    let progress = line.contains('%') || line.starts_with("remote: ");
    let listed = line.as_bytes().get(40) == Some(&b'\t');
    if complaints.len() < MOST && !progress && !listed && !line.trim().is_empty() {
        complaints.push(line.chars().take(LONGEST).collect());
    }
}

impl ReceivedPacks {
    fn watch(repository: &Path) -> Self {
        let folder = repository.join("objects/pack");
        let before = entries(&folder).map(|entry| entry.file_name()).collect();
        Self { folder, before }
    }

    fn arrived(&self) -> impl Iterator<Item = fs::DirEntry> {
        entries(&self.folder).filter(|entry| !self.before.contains(&entry.file_name()))
    }

    fn received(&self) -> usize {
        let sizes = self.arrived().filter_map(|entry| entry.metadata().ok()).map(|file| file.len());
        usize::try_from(sizes.sum::<u64>()).unwrap_or(usize::MAX)
    }

    fn discard(&self) {
        for entry in self.arrived() {
            if let Err(error) = fs::remove_file(entry.path()) {
                tracing::warn!(file = %entry.path().display(), %error, "cannot remove a fetched file");
            }
        }
    }
}

fn entries(folder: &Path) -> impl Iterator<Item = fs::DirEntry> {
    fs::read_dir(folder).into_iter().flatten().flatten()
}

/// Parses git's progress of a download: `Receiving objects:  45% (450/1000), 3.00 MiB | 1.00 MiB/s`.
pub(super) fn parse_progress(line: &str) -> Option<(u32, u32, &str)> {
    let rest = line.strip_prefix("Receiving objects:")?;
    let (count, rest) = rest.split_once('(')?.1.split_once(')')?;
    let (done, total) = count.split_once('/')?;
    let size = rest.trim_start_matches(", ").split([',', '|']).next().unwrap_or_default().trim();
    Some((done.parse().ok()?, total.parse().ok()?, size))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;

    fn why(url: &str, lines: &[&str]) -> GitError {
        let server = GitServer { url, folder: Path::new("/"), wanted: "`main`" };
        let mut complaints = Vec::new();
        for line in lines {
            keep_complaint(&mut complaints, line);
        }
        server.classify_failure(&complaints, ExitStatus::from_raw(128 << 8))
    }

    #[test]
    fn what_git_says_is_told_apart() {
        let url = "https://me:secret@example.org/a";
        let unreachable = why(
            url,
            &[
                "fatal: unable to access 'https://me:secret@example.org/a/': Could not resolve host: example.org",
            ],
        );
        assert_eq!(
            unreachable.to_string(),
            "example.org could not be asked for `main`: Could not resolve host: example.org"
        );
        let certificate = why(
            url,
            &["fatal: unable to access 'https://x/': SSL certificate problem: self-signed certificate"],
        );
        assert!(certificate.hint().unwrap().contains("http.sslCAInfo"), "{certificate:?}");
        for lines in [
            &["fatal: could not read Username for 'https://example.org': terminal prompts disabled"][..],
            &[
                "remote: Repository not found.",
                "fatal: repository 'https://me:secret@example.org/a/' not found",
            ],
            &["fatal: unable to access 'https://example.org/': The requested URL returned error: 403"],
        ] {
            let fault = why(url, lines);
            assert!(matches!(fault, GitError::Refused { .. }), "{fault:?}");
            assert!(!fault.to_string().contains("secret"), "{fault}");
        }
        for line in ["fatal: early EOF", "fatal: the remote end hung up unexpectedly"] {
            assert!(matches!(why(url, &[line]), GitError::Unreachable { .. }), "{line}");
        }
        assert!(matches!(why(url, &["fatal: not a git repository"]), GitError::Repository { .. }));
        assert!(why(url, &[]).to_string().contains("128"), "{}", why(url, &[]));
    }

    #[test]
    fn a_password_is_no_argument_of_a_program_and_settings_of_the_environment_stay() {
        let server = GitServer { url: "https://me:secret@example.org/a", folder: Path::new("/"), wanted: "" };
        let command = server.command(&["ls-remote", REMOTE_NAME]);
        assert!(!format!("{:?}", command.as_std().get_args().collect::<Vec<_>>()).contains("secret"));
        let settings = command.as_std().get_envs().find(|(name, _)| *name == "GIT_CONFIG_PARAMETERS");
        let settings = settings.and_then(|(_, value)| value).unwrap().to_string_lossy().into_owned();
        assert!(
            settings.ends_with("'remote.llama-warden.url=https://me:secret@example.org/a'"),
            "{settings}"
        );
        assert!(settings.starts_with(&*environment::git_settings().to_string_lossy()), "{settings}");
    }

    #[test]
    fn progress_is_read() {
        let line = "Receiving objects:  45% (450/1000), 3.00 MiB | 1.00 MiB/s";
        assert_eq!(parse_progress(line), Some((450, 1000, "3.00 MiB")));
        assert_eq!(parse_progress("Receiving objects:   0% (0/1000)"), Some((0, 1000, "")));
        assert_eq!(parse_progress("Resolving deltas: 100% (2/2)"), None);
    }
}
