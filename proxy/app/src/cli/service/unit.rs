//! Renders, writes and removes units. Changes an operator's file only with `--force`, and then keeps a copy.

use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use sha2::{Digest as _, Sha256};

use crate::exit::CommandError;

pub(super) const UNIT_NAME: &str = "llama-warden";
/// First systemd version with `Type=notify-reload`.
const NOTIFY_RELOAD_VERSION: u32 = 253;
/// First systemd version with growing delays between failed starts.
const RESTART_STEPS_VERSION: u32 = 254;
/// Extra stop time for the last log lines, after requests and processes have ended.
const STOP_MARGIN: Duration = Duration::from_secs(15);
/// Beginning of a unit's first line, which ends in the checksum of the following text.
const CHECKSUM_LINE_PREFIX: &str = "# Written by `llama-warden service install`. To change it: `systemctl \
     edit llama-warden`, which outlives it. sha256:";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ServiceScope {
    System,
    User,
}

#[derive(Clone, Debug)]
pub(super) struct UnitValues<'a> {
    pub(super) scope: ServiceScope,
    pub(super) program: &'a Path,
    pub(super) config: &'a Path,
    pub(super) user: &'a str,
    pub(super) systemd: Option<u32>,
    pub(super) drain: Duration,
    pub(super) grace: Duration,
}

pub(super) fn service_unit(facts: &UnitValues<'_>) -> String {
    let (kind, reload) = if facts.systemd.is_some_and(|version| version >= NOTIFY_RELOAD_VERSION) {
        ("Type=notify-reload", "# HUP goes to us alone: llama-server processes have nothing to reload.")
    } else {
        (
            "Type=notify",
            "# To us alone: llama-server processes have nothing to reload.\nExecReload=/bin/kill -HUP $MAINPID",
        )
    };
    let restart = if facts.systemd.is_some_and(|version| version >= RESTART_STEPS_VERSION) {
        "RestartSec=1\nRestartSteps=5\nRestartMaxDelaySec=30"
    } else {
        "RestartSec=2"
    };
    let seconds = |time: Duration| time.as_secs() + u64::from(time.subsec_nanos() > 0);
    let drain = seconds(facts.drain);
    let grace = seconds(facts.grace);
    let rest = seconds(STOP_MARGIN);
    let sum = format!(
        "server.shutdown_deadline ({drain} s), lifecycle.stop_grace ({grace} s), and {rest} s for the rest."
    );
    let template = match facts.scope {
        ServiceScope::System => include_str!("system.service"),
        ServiceScope::User => include_str!("user.service"),
    };
    let stop = drain.saturating_add(grace).saturating_add(rest).to_string();
    with_checksum(&fill_template(
        template,
        &[
            ("@TYPE@", kind),
            ("@RELOAD@", reload),
            ("@RESTART@", restart),
            ("@PROGRAM@", &command_word(facts.program)),
            ("@CONFIG@", &command_word(facts.config)),
            ("@USER@", facts.user),
            ("@STOP_SUM@", &sum),
            ("@STOP@", &stop),
        ],
    ))
}

/// `hosts` is a comma-separated list. Returns `None` if a host is a name, which systemd does not resolve.
pub(super) fn socket_unit(hosts: &str, port: u16) -> Option<String> {
    let line = |host: &str| {
        let host = host.trim().trim_start_matches('[').trim_end_matches(']');
        let host = if host == "localhost" { "127.0.0.1" } else { host };
        Some(format!("ListenStream={}", std::net::SocketAddr::new(host.parse().ok()?, port)))
    };
    let lines: Option<Vec<String>> = hosts.split(',').map(line).collect();
    Some(with_checksum(&fill_template(include_str!("service.socket"), &[("@LISTEN@", &lines?.join("\n"))])))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UnitFileState {
    Nothing,
    Same,
    /// llama-warden wrote the file, for another version or configuration.
    Ours,
    Theirs,
}

pub(super) fn classify_unit(there: Option<&str>, wanted: &str) -> UnitFileState {
    let Some(there) = there else { return UnitFileState::Nothing };
    if there == wanted {
        return UnitFileState::Same;
    }
    let ours = there.split_once('\n').is_some_and(|(first, rest)| {
        first.strip_prefix(CHECKSUM_LINE_PREFIX).is_some_and(|sum| sum.trim() == checksum(rest))
    });
    if ours { UnitFileState::Ours } else { UnitFileState::Theirs }
}

fn with_checksum(text: &str) -> String {
    format!("{CHECKSUM_LINE_PREFIX}{}\n{text}", checksum(text))
}

fn checksum(text: &str) -> String {
    hex::encode(Sha256::digest(text.as_bytes()))
}

fn fill_template(template: &str, values: &[(&str, &str)]) -> String {
    values.iter().fold(template.to_owned(), |text, (name, value)| text.replace(name, value))
}

/// Escapes `%` and `$`, and quotes a path with spaces.
fn command_word(path: &Path) -> String {
    let text = path.to_string_lossy().replace('%', "%%").replace('$', "$$");
    let is_plain = |char: char| char.is_ascii_alphanumeric() || "/._-+,:%$@".contains(char);
    if text.chars().all(is_plain) {
        return text;
    }
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}

const MAX_COPIES: u32 = 1000;

#[derive(Debug, PartialEq, Eq)]
pub(super) enum UnitFileChange {
    Written,
    /// Replaced an older unit of llama-warden.
    Renewed,
    Unchanged,
    /// Replaced an operator's file; this path has the copy.
    Kept(PathBuf),
}

pub(super) fn write_unit(path: &Path, text: &str, force: bool) -> Result<UnitFileChange, CommandError> {
    let done = match inspect_file(path, text)? {
        UnitFileState::Nothing => UnitFileChange::Written,
        UnitFileState::Same => return Ok(UnitFileChange::Unchanged),
        UnitFileState::Ours => UnitFileChange::Renewed,
        UnitFileState::Theirs if force => UnitFileChange::Kept(keep_copy(path)?),
        UnitFileState::Theirs => return Err(foreign_file(path, "writes ours and keeps a copy of it")),
    };
    write_atomically(path, text).map_err(|error| cannot("write", path, &error))?;
    Ok(done)
}

/// Returns `None` if there is no unit. Refuses to remove an operator's file without `force`.
pub(super) fn remove_unit(path: &Path, force: bool) -> Result<Option<UnitFileChange>, CommandError> {
    match inspect_file(path, "")? {
        UnitFileState::Nothing => return Ok(None),
        UnitFileState::Theirs if force => {
            return keep_copy(path).map(|copy| Some(UnitFileChange::Kept(copy)));
        }
        UnitFileState::Theirs => return Err(foreign_file(path, "takes it away and keeps a copy of it")),
        UnitFileState::Same | UnitFileState::Ours => {}
    }
    std::fs::remove_file(path).map_err(|error| cannot("remove", path, &error))?;
    Ok(Some(UnitFileChange::Written))
}

fn foreign_file(path: &Path, forced: &str) -> CommandError {
    CommandError::hinted(
        format!("{} is not as we wrote it", path.display()),
        format!("`--force` {forced}; changes outlive all this in a drop-in: `systemctl edit llama-warden`"),
    )
}

fn cannot(what: &str, path: &Path, error: &io::Error) -> CommandError {
    let hint = if error.kind() == io::ErrorKind::PermissionDenied { "as root, or with `--user`" } else { "" };
    CommandError::hinted(format!("cannot {what} {}: {error}", path.display()), hint)
}

fn inspect_file(path: &Path, wanted: &str) -> Result<UnitFileState, CommandError> {
    // A symbolic link is an operator's: a link to /dev/null, for example, masks a unit.
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(UnitFileState::Nothing),
        Err(error) => Err(cannot("look at", path, &error)),
        Ok(facts) if !facts.is_file() => Ok(UnitFileState::Theirs),
        Ok(_) => {
            let text = std::fs::read(path).map_err(|error| cannot("read", path, &error))?;
            Ok(classify_unit(Some(&String::from_utf8_lossy(&text)), wanted))
        }
    }
}

/// systemd ignores the new name.
fn keep_copy(path: &Path) -> Result<PathBuf, CommandError> {
    let named = |number: u32| {
        let mut name = path.as_os_str().to_owned();
        name.push(if number == 1 { ".old".to_owned() } else { format!(".old-{number}") });
        PathBuf::from(name)
    };
    let free = (1..MAX_COPIES).map(named).find(|copy| std::fs::symlink_metadata(copy).is_err());
    let copy = free.ok_or_else(|| {
        CommandError::failed(format!("there are {MAX_COPIES} copies of {} already", path.display()))
    })?;
    std::fs::rename(path, &copy).map_err(|error| cannot("keep a copy of", path, &error))?;
    Ok(copy)
}

fn write_atomically(path: &Path, text: &str) -> io::Result<()> {
    let folder = path.parent().unwrap_or_else(|| Path::new("/"));
    std::fs::create_dir_all(folder)?;
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    file.write_all(text.as_bytes())?;
    file.as_file().set_permissions(std::fs::Permissions::from_mode(0o644))?;
    file.as_file().sync_all()?;
    file.persist(path).map(drop).map_err(|failed| failed.error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::service::unit::socket_unit;

    fn facts(scope: ServiceScope, systemd: Option<u32>) -> UnitValues<'static> {
        let (drain, grace) = (Duration::from_secs(30), Duration::from_millis(9500));
        let (program, config) =
            (Path::new("/usr/bin/llama-warden"), Path::new("/etc/llama-warden/warden.toml"));
        UnitValues { scope, program, config, user: "llama-warden", systemd, drain, grace }
    }

    #[test]
    fn units_are_what_is_written_down_here() {
        insta::assert_snapshot!("system", service_unit(&facts(ServiceScope::System, Some(252))));
        insta::assert_snapshot!("user", service_unit(&facts(ServiceScope::User, Some(255))));
        insta::assert_snapshot!("socket", socket_unit("localhost, [::1]", 8080).unwrap());
        assert_eq!(socket_unit("models.example", 8080), None);
    }

    #[test]
    fn nothing_is_left_to_fill_in_and_each_number_is_that_of_the_configuration() {
        for scope in [ServiceScope::System, ServiceScope::User] {
            for systemd in [None, Some(252), Some(253)] {
                let text = service_unit(&facts(scope, systemd));
                assert!(
                    !text.contains('@')
                        || !text.lines().any(|line| line.contains("@T") || line.contains("@P")),
                    "{text}"
                );
                assert!(text.contains("TimeoutStopSec=55\n"), "{text}");
                // With `notify-reload` systemd sends HUP itself; a second one would reload twice.
                assert_ne!(text.contains("notify-reload"), text.contains("ExecReload"), "{text}");
            }
        }
        let long = UnitValues { drain: Duration::from_secs(600), ..facts(ServiceScope::System, None) };
        assert!(service_unit(&long).contains("TimeoutStopSec=625\n"));
    }

    #[test]
    fn what_we_wrote_is_known_by_its_checksum_and_one_letter_makes_it_somebodys() {
        let (old, new) = (
            service_unit(&facts(ServiceScope::User, Some(252))),
            service_unit(&facts(ServiceScope::User, Some(255))),
        );
        assert_eq!(classify_unit(None, &new), UnitFileState::Nothing);
        assert_eq!(classify_unit(Some(&new), &new), UnitFileState::Same);
        assert_eq!(classify_unit(Some(&old), &new), UnitFileState::Ours);
        for theirs in [
            old.replace("RestartSec=2", "RestartSec=9"),
            "[Service]\n".into(),
            String::new(),
            old[..200].into(),
        ] {
            assert_eq!(classify_unit(Some(&theirs), &new), UnitFileState::Theirs, "{theirs}");
        }
    }

    #[test]
    fn paths_are_words_whatever_is_in_them() {
        let words = ["/a/b", "/a b", "/100%", "/$x", "/a\"b\\c"].map(|path| command_word(Path::new(path)));
        assert_eq!(words, ["/a/b", "\"/a b\"", "/100%%", "/$$x", "\"/a\\\"b\\\\c\""]);
    }

    #[test]
    fn what_somebody_changed_stays_or_is_kept_and_ours_comes_and_goes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("systemd/user/llama-warden.socket");
        let [old, new] = [8080, 9090].map(|port| socket_unit("127.0.0.1", port).unwrap());
        assert_eq!(write_unit(&path, &old, false).unwrap(), UnitFileChange::Written);
        assert_eq!(write_unit(&path, &old, false).unwrap(), UnitFileChange::Unchanged);
        assert_eq!(write_unit(&path, &new, false).unwrap(), UnitFileChange::Renewed);
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o644);
        let changed = new.replace("Backlog=4096", "Backlog=1");
        for copy in ["llama-warden.socket.old", "llama-warden.socket.old-2"] {
            std::fs::write(&path, &changed).unwrap();
            for refused in [write_unit(&path, &new, false).map(drop), remove_unit(&path, false).map(drop)] {
                let told = refused.unwrap_err().lines().join("\n");
                assert!(told.contains("--force") && told.contains("llama-warden.socket is not"), "{told}");
            }
            assert_eq!(std::fs::read_to_string(&path).unwrap(), changed);
            let copy = path.with_file_name(copy);
            assert_eq!(write_unit(&path, &new, true).unwrap(), UnitFileChange::Kept(copy.clone()));
            assert_eq!(std::fs::read_to_string(copy).unwrap(), changed);
        }
        assert_eq!(remove_unit(&path, false).unwrap(), Some(UnitFileChange::Written));
        assert_eq!(remove_unit(&path, false).unwrap(), None);
        std::os::unix::fs::symlink("/dev/null", &path).unwrap();
        assert!(write_unit(&path, &new, false).is_err(), "somebody has masked it");
    }
}
