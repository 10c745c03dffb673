//! Behaviour of a model's llama-server: measurements of the binary, combined with the model's flags. Reads
//! only the cache of measurements of binaries from outside the store.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use warden_builder::verify::{HttpThreads, MeasurementCache, ServerBehaviour, StreamHead};
use warden_policies::ServerFacts;
use warden_policies::server_facts;
use warden_policies::server_flags::FlagList;
use warden_supervisor::ServerCommand;

use crate::arguments;

/// A binary that lacks measurements, usually because llama-warden did not build it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnmeasuredBinary {
    /// Path of the binary.
    pub binary: PathBuf,
    /// Key under which the measurements are cached.
    pub identity: String,
}

/// Known behaviour of a binary.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServerKnowledge {
    /// Measured behaviour; until measured, behaviour taken from `--help`.
    pub measured: ServerBehaviour,
    /// Set if the binary must still be measured.
    pub unmeasured: Option<UnmeasuredBinary>,
    /// See [`ServerFacts::slot_files`].
    pub slot_files: Option<bool>,
    /// Flags listed by the binary; `None` if it lists none.
    pub flags: Option<Arc<FlagList>>,
}

impl ServerKnowledge {
    /// Returns the cached measurements of a binary from outside the store. `version`: output of `--version`.
    pub fn recall_foreign(cache: &Path, binary: &Path, version: &str) -> Self {
        let Some(identity) = MeasurementCache::identity(binary, version) else { return Self::default() };
        let recalled = MeasurementCache::new(cache).read(&identity);
        let measured = recalled.map(|recalled| recalled.measured).unwrap_or_default();
        let is_complete = recalled.is_some_and(|recalled| recalled.is_complete);
        let unmeasured = (!is_complete).then(|| UnmeasuredBinary { binary: binary.to_owned(), identity });
        Self { measured, unmeasured, ..Self::default() }
    }

    /// Returns the behaviour of a build in the store from its provenance. The cached measurements of the
    /// binary complete it if the build was made before `discards_bodies` was measured.
    pub fn from_build(measured: ServerBehaviour, cache: &Path, binary: &Path, version: &str) -> Self {
        if measured.discards_bodies.is_some() {
            return Self { measured, ..Self::default() };
        }
        let since = Self::recall_foreign(cache, binary, version);
        let discards_bodies = since.measured.discards_bodies;
        Self { measured: ServerBehaviour { discards_bodies, ..measured }, ..since }
    }
}

/// Reads from the text of `--help` if a server can listen on a Unix socket: since about b5000, the text of
/// `--host` mentions Unix sockets. Used only until this ability is measured.
pub fn unix_sockets_in(help: &str) -> Option<bool> {
    let help = help.to_ascii_lowercase();
    help.contains("--host").then(|| help.contains("unix socket"))
}

/// Reads from the text of `--help` if a server can save slots to files. False for a fork whose clients may
/// list, rename and remove the files; it is recognised by `--run-time-repack`, which only that fork has.
pub fn slot_files_in(help: &str) -> Option<bool> {
    let listed = |flag: &str| help.split([' ', ',', '\n', '\t']).any(|word| word == flag);
    listed("--help").then(|| listed("--slot-save-path") && !listed("--run-time-repack"))
}

/// Returns the facts about a model's server with this command. `cores`: number of usable processors.
pub fn server_facts(measured: ServerBehaviour, command: &ServerCommand, cores: usize) -> ServerFacts {
    ServerFacts {
        stream_head: match measured.stream_head {
            Some(StreamHead::BeforeFirstToken) => server_facts::StreamHeadTime::BeforeFirstToken,
            Some(StreamHead::AfterFirstToken) => server_facts::StreamHeadTime::AfterFirstToken,
            None => server_facts::StreamHeadTime::Unknown,
        },
        unix_sockets: measured.unix_sockets,
        http_threads: measured.http_threads.map(|threads| match threads {
            HttpThreads::OnDemand => ServerFacts::THREADS_ON_DEMAND,
            HttpThreads::Fixed => fixed_http_threads(command, cores),
        }),
        // The support of slot files is not measured but read from `--help`.
        slot_files: None,
        discards_bodies: measured.discards_bodies,
    }
}

/// Returns the number of HTTP threads of a server with a fixed number: the configured number, else the larger
/// of slots plus two and processors minus one. If the server chooses the slots, they count as one.
fn fixed_http_threads(command: &ServerCommand, cores: usize) -> u32 {
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

    fn command(args: &[&str], env: &[(&str, &str)]) -> ServerCommand {
        ServerCommand {
            args: args.iter().map(|&word| word.to_owned()).collect(),
            env: env.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect(),
            ..ServerCommand::from_binary("/x".into())
        }
    }

    #[test]
    fn what_is_not_measured_is_unknown() {
        assert_eq!(server_facts(ServerBehaviour::default(), &command(&[], &[]), 4), ServerFacts::default());
    }

    #[test]
    fn a_build_from_before_a_question_is_measured_once_more_and_a_newer_one_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let (cache, binary) = (folder.path(), folder.path().join("llama-server"));
        std::fs::write(&binary, "x").unwrap();
        let new = ServerBehaviour { discards_bodies: Some(true), ..ServerBehaviour::default() };
        assert_eq!(ServerKnowledge::from_build(new, cache, &binary, "v").unmeasured, None);
        let old = ServerBehaviour { unix_sockets: Some(true), ..ServerBehaviour::default() };
        let known = ServerKnowledge::from_build(old, cache, &binary, "v");
        assert_eq!(known.measured, old, "unknown until it is measured");
        let identity = known.unmeasured.unwrap().identity;
        let found = ServerBehaviour { discards_bodies: Some(false), ..ServerBehaviour::default() };
        MeasurementCache::new(cache).write(&identity, &binary, found).unwrap();
        let known = ServerKnowledge::from_build(old, cache, &binary, "v");
        assert_eq!(known.measured, ServerBehaviour { discards_bodies: Some(false), ..old });
        assert_eq!(known.unmeasured, None);
        // A failed measurement is not repeated at every start.
        MeasurementCache::new(cache).write(&identity, &binary, ServerBehaviour::default()).unwrap();
        assert_eq!(ServerKnowledge::from_build(old, cache, &binary, "v").unmeasured, None);
    }

    #[test]
    fn threads_are_counted_by_the_flags_of_the_model() {
        let threads = |measured, args: &[&str], env: &[(&str, &str)], cores| {
            let measured = ServerBehaviour { http_threads: Some(measured), ..ServerBehaviour::default() };
            server_facts(measured, &command(args, env), cores).http_threads.unwrap()
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
