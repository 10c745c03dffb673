//! Renders units from one template per kind. Pure.

use std::path::Path;
use std::time::Duration;

use sha2::{Digest as _, Sha256};

/// Name of the units, without the suffix of their kind.
pub(super) const UNIT_NAME: &str = "llama-warden";
/// First systemd version with `Type=notify-reload`.
const NOTIFY_RELOAD_VERSION: u32 = 253;
/// First systemd version with growing delays between failed starts.
const RESTART_STEPS_VERSION: u32 = 254;
/// Extra stop time after requests and processes have ended, for the last log lines.
const STOP_MARGIN: Duration = Duration::from_secs(15);
/// Beginning of a unit's first line. The last word of that line is the checksum of the text after it.
const CHECKSUM_LINE_PREFIX: &str = "# Written by `llama-warden service install`. To change it: `systemctl edit llama-warden`, which outlives it. sha256:";

/// Owner of the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ServiceScope {
    /// The machine.
    System,
    /// The logged-in user.
    User,
}

/// Values for the templates.
#[derive(Clone, Debug)]
pub(super) struct UnitValues<'a> {
    pub(super) scope: ServiceScope,
    pub(super) program: &'a Path,
    pub(super) config: &'a Path,
    /// User of the machine's service.
    pub(super) user: &'a str,
    /// Version of systemd, if known.
    pub(super) systemd: Option<u32>,
    /// Time limit for requests to end.
    pub(super) drain: Duration,
    /// Time limit for processes to end.
    pub(super) grace: Duration,
}

/// Renders the service unit.
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
    let (drain, grace, rest) = (seconds(facts.drain), seconds(facts.grace), seconds(STOP_MARGIN));
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

/// Renders the socket unit for comma-separated hosts. `None` if a host is a name, which systemd does not
/// resolve.
pub(super) fn socket_unit(hosts: &str, port: u16) -> Option<String> {
    let line = |host: &str| {
        let host = host.trim().trim_start_matches('[').trim_end_matches(']');
        let host = if host == "localhost" { "127.0.0.1" } else { host };
        Some(format!("ListenStream={}", std::net::SocketAddr::new(host.parse().ok()?, port)))
    };
    let lines: Option<Vec<String>> = hosts.split(',').map(line).collect();
    Some(with_checksum(&fill_template(include_str!("service.socket"), &[("@LISTEN@", &lines?.join("\n"))])))
}

/// Owner of the file at a unit's path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UnitFileState {
    /// No file.
    Nothing,
    /// The wanted text.
    Same,
    /// Written by llama-warden, for another version or configuration.
    Ours,
    /// Written or changed by an operator.
    Theirs,
}

/// Classifies the text of a unit by its checksum.
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

/// Formats a word of a unit's command line: escapes `%` and `$`, and quotes spaces.
fn command_word(path: &Path) -> String {
    let text = path.to_string_lossy().replace('%', "%%").replace('$', "$$");
    let is_plain = |char: char| char.is_ascii_alphanumeric() || "/._-+,:%$@".contains(char);
    if text.chars().all(is_plain) {
        return text;
    }
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
