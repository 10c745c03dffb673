//! `diagnose --wrap 'TOOL …'`: runs the experiment with a tool in front of the server's command
//! (compute-sanitizer, nsys, valgrind, heaptrack).
//!
//! The server's arguments stay unchanged: a script replaces the binary and runs the tool with the binary.
//! Tools write their report after the server has ended by itself. So the script ignores the signal that
//! ends the server; tool and server inherit that setting. llama-server installs its own handler and ends;
//! the tool survives and writes its report. The script also starts the [`keeper`], which kills the
//! processes that the tool leaves behind.

use std::fmt::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use tempfile::TempDir;
use warden_diagnose::ExperimentOutcome;
use warden_diagnose::shell::{quote_word, split_words};
use warden_policies::defaults;
use warden_policies::defaults::Diagnose;
use warden_policies::lifecycle::LifecyclePolicy;
use warden_supervisor::ServerCommand;

use super::keeper;
use crate::exit::CommandError;
use crate::private_temp;

/// A tool in front of a server.
#[derive(Debug)]
pub(super) struct ToolWrapper {
    folder: TempDir,
    words: Vec<String>,
}

impl ToolWrapper {
    /// Splits the tool's command line and checks that the tool is installed.
    pub(super) fn prepare(line: &str) -> Result<Self, CommandError> {
        let usage = |why: &str| {
            CommandError::usage(
                format!("--wrap {line}: {why}"),
                "write it as in a shell: --wrap 'valgrind --leak-check=full'",
            )
        };
        let mut words = split_words(line).ok_or_else(|| usage("a quote is not closed"))?;
        if words.is_empty() {
            return Err(usage("it names no program"));
        }
        let program = find_program(&words[0]).ok_or_else(|| {
            CommandError::hinted(
                format!("--wrap: {} is not installed here", words[0]),
                install_hint(&words[0]),
            )
        })?;
        words[0] = program.to_string_lossy().into_owned();
        let folder = private_temp::private_folder("llama-warden-wrap-");
        let folder =
            folder.map_err(|error| CommandError::failed(format!("--wrap: cannot make a folder: {error}")))?;
        Ok(Self { folder, words })
    }

    /// Replaces the binary of `command` by a script that runs it under the tool.
    pub(super) fn apply(&self, command: &mut ServerCommand) -> Result<(), CommandError> {
        let fail = |what: String| CommandError::failed(format!("--wrap: {what}"));
        let own = std::env::current_exe().map_err(|error| fail(format!("where are we? {error}")))?;
        let mut script = String::from("#!/bin/sh\n# Made by `llama-warden diagnose --wrap`.\ntrap '' TERM\n");
        let (mark, folder) = (keeper::WRAP_MARK_VARIABLE, quote_word(&self.folder.path().to_string_lossy()));
        let _ = writeln!(script, "{mark}={folder}:$$; export {mark}");
        let (own, owner) = (quote_word(&own.to_string_lossy()), std::process::id());
        let _ = write!(script, "{own} keep-wrapped $$ {owner} || exit 1\nexec");
        let words = self.words.iter().map(String::as_str);
        for word in words.chain(std::iter::once(&*command.binary.to_string_lossy())) {
            let _ = write!(script, " {}", quote_word(word));
        }
        script.push_str(" \"$@\"\n");
        let path = self.folder.path().join("llama-server");
        let written = std::fs::write(&path, script)
            .and_then(|()| std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o700)));
        written.map_err(|error| fail(format!("cannot write {}: {error}", path.display())))?;
        command.binary = path;
        Ok(())
    }

    pub(super) fn words(&self) -> &[String] {
        &self.words
    }

    /// Says in which directory the tool runs, so that its output files are found.
    pub(super) fn directory_note(&self, command: &ServerCommand) -> String {
        let here = || std::env::current_dir().unwrap_or_default();
        let folder = command.directory.clone().unwrap_or_else(here);
        format!("{} runs in {}: relative paths in its options lead there", self.words[0], folder.display())
    }

    /// The tool's last lines of each leg: usually its findings, or the path of its report.
    pub(super) fn last_lines(&self, outcome: &ExperimentOutcome) -> Vec<String> {
        let shown = defaults().child.failure_lines;
        let mut told = Vec::new();
        for leg in outcome.legs.iter().filter(|leg| !leg.last_words.is_empty()) {
            told.push(format!("{}: {} and the server said at the end:", leg.finding.workload, self.words[0]));
            let earlier = leg.last_words.len().saturating_sub(shown);
            if earlier > 0 {
                told.push(format!("  ({earlier} lines more before these; give the tool a file to write to)"));
            }
            told.extend(leg.last_words.iter().skip(earlier).map(|line| format!("  {line}")));
        }
        told
    }

    /// Extends the deadlines to the time that server and tool need.
    pub(super) fn extend_deadlines(lifecycle: &mut LifecyclePolicy, numbers: &mut Diagnose) {
        let wrap = &numbers.wrap;
        let (start, report) = (wrap.start, wrap.report);
        lifecycle.start_timeout = lifecycle.start_timeout.max(start);
        lifecycle.stop_grace = lifecycle.stop_grace.max(report);
        numbers.request_limit = numbers.request_limit.max(start);
        numbers.question_limit = numbers.question_limit.max(report);
        numbers.leg_limit = numbers.leg_limit.max(2 * start);
    }
}

/// Finds a program in PATH, like a shell.
fn find_program(name: &str) -> Option<PathBuf> {
    let runs = |path: &Path| {
        path.is_file() && path.metadata().is_ok_and(|facts| facts.permissions().mode() & 0o111 != 0)
    };
    if name.contains('/') {
        return std::path::absolute(name).ok().filter(|path| runs(path));
    }
    std::env::split_paths(&std::env::var_os("PATH")?).map(|folder| folder.join(name)).find(|path| runs(path))
}

/// Says how to install a tool.
fn install_hint(name: &str) -> &'static str {
    match name {
        "compute-sanitizer" => "it comes with the CUDA toolkit: add its `bin` folder to PATH",
        "nsys" => "it comes with NVIDIA Nsight Systems",
        "valgrind" | "heaptrack" => "install the package of that name",
        _ => "check the name, or give its path",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_else_can_look_into_the_folder_of_a_tool() {
        let wrap = ToolWrapper::prepare("true").unwrap();
        assert_eq!(wrap.folder.path().metadata().unwrap().permissions().mode() & 0o777, 0o700);
    }

    #[test]
    fn a_tool_that_is_not_there_is_named_with_where_it_comes_from() {
        let missing = ToolWrapper::prepare("no-such-tool --x").unwrap_err();
        assert!(missing.lines()[0].contains("no-such-tool is not installed"), "{:?}", missing.lines());
        for wrong in ["'open", "  "] {
            assert_eq!(ToolWrapper::prepare(wrong).unwrap_err().code(), 2, "{wrong}");
        }
        assert_eq!(find_program("/no/such"), None);
        assert!(find_program("sh").is_some());
    }

    #[test]
    fn the_servers_arguments_stay_and_only_its_binary_becomes_a_script() {
        let wrap = ToolWrapper::prepare("sh -c 'echo it''s'").unwrap();
        let mut command = ServerCommand {
            args: vec!["-m".into(), "a b".into()],
            ..ServerCommand::from_binary("/opt/llama server".into())
        };
        wrap.apply(&mut command).unwrap();
        let script = std::fs::read_to_string(&command.binary).unwrap();
        assert!(script.ends_with(" -c 'echo its' '/opt/llama server' \"$@\"\n"), "{script}");
        assert_eq!(command.args.len(), 2);
    }
}
