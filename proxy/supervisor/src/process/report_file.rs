//! The file to which a process writes its memory report: name, reading and removal.
//!
//! Each generation has its own file next to its socket, so the PID in the report does not matter (a container
//! has other PIDs). The file is removed before the start and after the end.
//!
//! `LLAMA_WARDEN_REPORT` in the model's own environment names an operator's file, which is read but never
//! removed. Replicas and generations share it, so only reports of the generation's own processes count.

use std::path::{Path, PathBuf};

use warden_sensors::CudaReport;
use warden_sensors::report::{self, REPORT_VARIABLE};

use crate::spec::ServerCommand;

/// Report file of the generation with this socket.
pub(crate) fn report_path(socket: &Path) -> PathBuf {
    socket.with_extension("report")
}

/// Sets the variable to our file, or removes it if not `wanted`. The model's own value stays.
pub(crate) fn announce_report(command: &mut ServerCommand, socket: &Path, wanted: bool) {
    command.announce_file(REPORT_VARIABLE, wanted.then(|| report_path(socket)));
}

/// Removes our report file, and those of further processes of the generation.
pub(crate) fn remove_reports(socket: &Path) {
    let own = report_path(socket);
    for path in report::sibling_reports(&own).into_iter().chain([own]) {
        drop(std::fs::remove_file(path));
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ReportSource {
    path: PathBuf,
    /// True if only this process writes the file, so that the PID in a report need not be checked.
    exclusive: bool,
}

impl ReportSource {
    /// Returns `None` if the process writes no report.
    pub(crate) fn from_command(command: &ServerCommand, socket: &Path) -> Option<Self> {
        if command.env_remove.iter().any(|name| name == REPORT_VARIABLE) {
            return None;
        }
        let (_, path) =
            command.env.iter().rfind(|(name, path)| name == REPORT_VARIABLE && !path.is_empty())?;
        let path = command.resolve_path(path);
        Some(Self { exclusive: path == report_path(socket), path })
    }

    /// Reads and combines the reports of the leader, its group and `outside`: a router of models and its
    /// servers may all write one. Blocks for some small reads.
    pub(crate) fn read(&self, leader: u32, outside: &[u32]) -> Option<CudaReport> {
        let is_ours = |report: &CudaReport| report.is_from(leader) || outside.contains(&report.pid);
        let named = report::read_report(&self.path).filter(|report| self.exclusive || is_ours(report));
        let others = report::sibling_reports(&self.path);
        let others = others.iter().filter_map(|path| report::read_report(path)).filter(is_ours);
        named.into_iter().chain(others).reduce(CudaReport::with)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(env: &[(&str, &str)]) -> ServerCommand {
        ServerCommand {
            env: env.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect(),
            ..ServerCommand::from_binary("/opt/llama-server".into())
        }
    }

    fn announced(env: &[(&str, &str)], wanted: bool) -> (ServerCommand, Option<ReportSource>) {
        let socket = Path::new("/run/w/m.gguf-7-g1.sock");
        let mut command = command(env);
        announce_report(&mut command, socket, wanted);
        let source = ReportSource::from_command(&command, socket);
        (command, source)
    }

    /// Writes a report without contexts, by process `pid`.
    fn write(path: &Path, pid: u32) {
        let mut bytes = b"LWREPT1\0".to_vec();
        for number in [1, 256, 62, pid] {
            bytes.extend(number.to_ne_bytes());
        }
        bytes.resize(16_384, 0);
        std::fs::write(path, bytes).unwrap();
    }

    #[test]
    fn a_generation_is_told_a_file_of_its_own_unless_nobody_wants_it() {
        let (command, source) = announced(&[], true);
        let path = "/run/w/m.gguf-7-g1.report";
        assert_eq!(command.env, [(REPORT_VARIABLE.to_owned(), path.to_owned())]);
        assert_eq!(source, Some(ReportSource { path: path.into(), exclusive: true }));
        let (command, source) = announced(&[], false);
        assert_eq!((command.env, command.env_remove), (Vec::new(), vec![REPORT_VARIABLE.to_owned()]));
        assert_eq!(source, None);
    }

    #[test]
    fn the_models_own_variable_comes_first_and_an_empty_one_switches_it_off() {
        for wanted in [true, false] {
            let (command, source) = announced(&[(REPORT_VARIABLE, "/tmp/mine")], wanted);
            assert_eq!(command.env, [(REPORT_VARIABLE.to_owned(), "/tmp/mine".to_owned())]);
            assert_eq!(source, Some(ReportSource { path: "/tmp/mine".into(), exclusive: false }));
            let (command, source) = announced(&[(REPORT_VARIABLE, "")], wanted);
            assert_eq!((command.env.len(), command.env_remove.len(), source), (1, 0, None));
        }
    }

    #[test]
    fn a_shared_file_counts_only_for_its_writer_and_a_file_of_its_own_for_any() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("m-7-g1.sock");
        let own = ReportSource { path: report_path(&socket), exclusive: true };
        assert_eq!(own.read(1, &[]), None, "not written yet");
        write(&own.path, 4242);
        // As a process in a PID namespace of its own does.
        assert_eq!(own.read(std::process::id(), &[]).map(|report| report.pid), Some(4242));
        let shared = ReportSource { exclusive: false, ..own };
        assert_eq!(shared.read(std::process::id(), &[]), None);
        write(&shared.path, std::process::id());
        assert!(shared.read(std::process::id(), &[]).is_some());
        remove_reports(&socket);
        assert!(!shared.path.exists());
    }

    #[test]
    fn further_processes_of_a_generation_add_to_its_report_and_their_files_go_with_it() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("m-7-g1.sock");
        let own = ReportSource { path: report_path(&socket), exclusive: true };
        let me = std::process::id();
        let further = |pid: u32| directory.path().join(format!("m-7-g1.report.{pid}"));
        write(&further(me), me);
        assert_eq!(
            own.read(me, &[]).map(|report| report.pid),
            Some(me),
            "the first one has not computed yet"
        );
        write(&own.path, 4242);
        let both = own.read(me, &[]).unwrap();
        assert_eq!(both.pid, 4242);
        // Reports of a dead or foreign process are ignored.
        write(&further(4_999_999), 4_999_999);
        assert_eq!(own.read(me, &[]), Some(both));
        let foreign = directory.path().join("m-7-g1.report.txt");
        std::fs::write(&foreign, "").unwrap();
        remove_reports(&socket);
        assert!(
            !own.path.exists() && !further(me).exists() && !further(4_999_999).exists() && foreign.exists()
        );
    }

    #[test]
    fn a_relative_path_is_relative_to_where_the_process_runs() {
        let mut command = command(&[(REPORT_VARIABLE, "mine.report")]);
        command.directory = Some("/srv/m".into());
        let source = ReportSource::from_command(&command, Path::new("/run/w/m-7-g1.sock")).unwrap();
        assert_eq!(source.path, Path::new("/srv/m/mine.report"));
    }
}
