//! What is known of how a model's llama-server behaves: what was measured of the binary, and what the model's flags make of
//! it. Pure but for what is remembered of binaries that we did not build.

use std::path::{Path, PathBuf};

use warden_builder::verify::{HttpThreads, Measured, Remembered, StreamHead};
use warden_policies::ServerFacts;
use warden_policies::server_facts;
use warden_supervisor::Command;

use crate::config::arguments;

/// A binary that we did not build and that nothing was measured of yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Unmeasured {
    pub(crate) binary: PathBuf,
    /// What it is remembered by.
    pub(crate) identity: String,
}

/// What is known of one binary.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Known {
    /// What was measured, or what it says of itself.
    pub(crate) measured: Measured,
    /// Set if it is to be measured.
    pub(crate) unmeasured: Option<Unmeasured>,
    /// See [`ServerFacts::slot_files`].
    pub(crate) slot_files: Option<bool>,
}

impl Known {
    /// What is remembered of a binary that somebody else built. `version`: what it says to `--version`.
    pub(crate) fn remembered(cache: &Path, binary: &Path, version: &str) -> Self {
        let Some(identity) = Remembered::identity(binary, version) else { return Self::default() };
        if let Some(measured) = Remembered::new(cache).read(&identity) {
            return Self { measured, ..Self::default() };
        }
        let unmeasured = Some(Unmeasured { binary: binary.to_owned(), identity });
        Self { unmeasured, ..Self::default() }
    }
}

/// Whether a server can listen on a Unix socket, by what it says to `--help`: since about b5000 `--host` says so. Only for the
/// time until it is measured.
pub(crate) fn unix_sockets_in(help: &str) -> Option<bool> {
    let help = help.to_ascii_lowercase();
    help.contains("--host").then(|| help.contains("unix socket"))
}

/// Whether a server can be told where to save slots, by what it says to `--help`. One fork lists what is there to every client, and
/// lets them rename and remove it: it is known by a flag that nobody else has.
pub(crate) fn slot_files_in(help: &str) -> Option<bool> {
    let listed = |flag: &str| help.split([' ', ',', '\n', '\t']).any(|word| word == flag);
    listed("--help").then(|| listed("--slot-save-path") && !listed("--run-time-repack"))
}

/// The facts of a model that is started so. `cores`: processors that it may use.
pub(crate) fn of(measured: Measured, command: &Command, cores: usize) -> ServerFacts {
    ServerFacts {
        stream_head: match measured.stream_head {
            Some(StreamHead::BeforeFirstToken) => server_facts::StreamHead::BeforeFirstToken,
            Some(StreamHead::AfterFirstToken) => server_facts::StreamHead::AfterFirstToken,
            None => server_facts::StreamHead::Unknown,
        },
        unix_sockets: measured.unix_sockets,
        http_threads: measured.http_threads.map(|threads| match threads {
            HttpThreads::OnDemand => ServerFacts::THREADS_ON_DEMAND,
            HttpThreads::Fixed => fixed(command, cores),
        }),
        // Nobody measures that.
        slot_files: None,
    }
}

/// How many threads a server with a fixed number has: what it is told, else by the rule that all of them have in common, two
/// more than slots and no fewer than one less than processors. Slots that are chosen by the server count as one.
fn fixed(command: &Command, cores: usize) -> u32 {
    let variable = |name: &str| {
        let set = command.env.iter().rev().find(|(own, _)| own == name).map(|(_, value)| value.as_str());
        set.and_then(|value| value.parse::<u32>().ok())
    };
    let told = arguments::http_threads(&command.args).or_else(|| variable("LLAMA_ARG_THREADS_HTTP"));
    if let Some(told) = told.filter(|told| *told > 0) {
        return told;
    }
    let slots = arguments::slots(&command.args).or_else(|| variable("LLAMA_ARG_N_PARALLEL")).unwrap_or(1);
    let cores = u32::try_from(cores).unwrap_or(1);
    slots.saturating_add(2).max(cores.saturating_sub(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(args: &[&str], env: &[(&str, &str)]) -> Command {
        Command {
            binary: "/x".into(),
            args: args.iter().map(|&word| word.to_owned()).collect(),
            env: env.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect(),
            env_remove: Vec::new(),
            directory: None,
        }
    }

    #[test]
    fn what_is_not_measured_is_unknown() {
        assert_eq!(of(Measured::default(), &command(&[], &[]), 4), ServerFacts::default());
    }

    #[test]
    fn threads_are_counted_by_the_flags_of_the_model() {
        let threads = |measured, args: &[&str], env: &[(&str, &str)], cores| {
            let measured = Measured { http_threads: Some(measured), ..Measured::default() };
            of(measured, &command(args, env), cores).http_threads.unwrap()
        };
        assert_eq!(threads(HttpThreads::OnDemand, &[], &[], 2), ServerFacts::THREADS_ON_DEMAND);
        assert_eq!(threads(HttpThreads::Fixed, &[], &[], 2), 3);
        assert_eq!(threads(HttpThreads::Fixed, &["-np", "8"], &[], 2), 10);
        assert_eq!(threads(HttpThreads::Fixed, &["-np", "-1"], &[], 64), 63);
        assert_eq!(threads(HttpThreads::Fixed, &["--threads_http", "5"], &[], 64), 5);
        assert_eq!(
            threads(HttpThreads::Fixed, &["--threads-http", "-1"], &[("LLAMA_ARG_THREADS_HTTP", "7")], 2),
            7
        );
    }

    #[test]
    fn a_server_says_itself_whether_it_saves_slots() {
        assert_eq!(slot_files_in("--help\n--slot-save-path PATH  path to save slots"), Some(true));
        assert_eq!(slot_files_in("--help\n-rtr, --run-time-repack\n--slot-save-path PATH"), Some(false));
        assert_eq!(slot_files_in("-h, --help\n--slots"), Some(false));
        assert_eq!(slot_files_in("error: unknown flag"), None);
    }

    #[test]
    fn a_server_says_itself_whether_it_knows_unix_sockets() {
        let new =
            "--host HOST   ip address to listen, or bind to an UNIX socket if the address ends with .sock";
        assert_eq!(unix_sockets_in(new), Some(true));
        assert_eq!(unix_sockets_in("--host HOST   ip address to listen (default: 127.0.0.1)"), Some(false));
        assert_eq!(unix_sockets_in("usage: ask somebody"), None);
    }
}
