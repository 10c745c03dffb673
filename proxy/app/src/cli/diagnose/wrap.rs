//! `diagnose --wrap 'TOOL …'`: runs the experiment with a tool in front of the server's command
//! (compute-sanitizer, nsys, valgrind, heaptrack).
//!
//! A script replaces the server's binary and runs the tool with the binary; the arguments stay unchanged.
//! Tools write their report only after the server has ended. So the script ignores SIGTERM, and tool and
//! server inherit that setting. llama-server installs its own handler and ends; the tool survives and writes
//! its report.
//!
//! The script also starts the keeper. This separate process kills all processes that the tool leaves behind,
//! even if the experiment is killed. Without the keeper, only the tool's first process and its process group
//! would end. But a tool's shell script may run the server as its child, and a profiler may leave an agent in
//! another session.
//!
//! Every process that the tool starts inherits the mark in its environment. The keeper misses a process that
//! clears its environment.

use std::fmt::Write as _;
use std::io::Read as _;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use clap::Args;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, getpid, pidfd_open, pidfd_send_signal};
use tempfile::TempDir;
use tokio::time::Instant;
use warden_builder::BuildEnvironment;
use warden_diagnose::ExperimentOutcome;
use warden_diagnose::shell::{quote_word, split_words};
use warden_policies::defaults;
use warden_policies::defaults::Diagnose;
use warden_policies::lifecycle::LifecyclePolicy;
use warden_supervisor::ServerCommand;

use crate::exit::CommandError;
use crate::{out, private_temp};

#[derive(Debug)]
pub(super) struct ToolWrapper {
    folder: TempDir,
    words: Vec<String>,
}

impl ToolWrapper {
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
        let program = BuildEnvironment::from_process().find(&words[0]).ok_or_else(|| {
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

    pub(super) fn apply(&self, command: &mut ServerCommand) -> Result<(), CommandError> {
        let fail = |what: String| CommandError::failed(format!("--wrap: {what}"));
        let own = std::env::current_exe().map_err(|error| fail(format!("where are we? {error}")))?;
        let mut script = String::from("#!/bin/sh\n# Made by `llama-warden diagnose --wrap`.\ntrap '' TERM\n");
        let mark = WRAP_MARK_VARIABLE;
        let folder = quote_word(&self.folder.path().to_string_lossy());
        let _ = writeln!(script, "{mark}={folder}:$$; export {mark}");
        let own = quote_word(&own.to_string_lossy());
        let owner = std::process::id();
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

    pub(super) fn directory_note(&self, command: &ServerCommand) -> String {
        let here = || std::env::current_dir().unwrap_or_default();
        let folder = command.directory.clone().unwrap_or_else(here);
        format!("{} runs in {}: relative paths in its options lead there", self.words[0], folder.display())
    }

    /// Returns the tool's last lines of each workload, which usually contain its findings or the path of its
    /// report.
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

    pub(super) fn extend_deadlines(lifecycle: &mut LifecyclePolicy, numbers: &mut Diagnose) {
        let wrap = &numbers.wrap;
        let start = wrap.start;
        let report = wrap.report;
        lifecycle.start_timeout = lifecycle.start_timeout.max(start);
        lifecycle.stop_grace = lifecycle.stop_grace.max(report);
        numbers.request_limit = numbers.request_limit.max(start);
        numbers.question_limit = numbers.question_limit.max(report);
        numbers.leg_limit = numbers.leg_limit.max(2 * start);
    }
}

fn install_hint(name: &str) -> &'static str {
    match name {
        "compute-sanitizer" => "it comes with the CUDA toolkit: add its `bin` folder to PATH",
        "nsys" => "it comes with NVIDIA Nsight Systems",
        "valgrind" | "heaptrack" => "install the package of that name",
        _ => "check the name, or give its path",
    }
}

/// Marks every process of one run of a tool.
const WRAP_MARK_VARIABLE: &str = "LLAMA_WARDEN_WRAPPED";

/// Arguments of the keeper, which the script starts; users do not run this command.
#[derive(Debug, Args)]
pub(crate) struct KeeperArgs {
    /// PID that becomes the tool.
    tool: i32,
    /// PID of the experiment.
    owner: i32,
    /// Runs as the keeper; without it, starts a keeper and waits until it is ready.
    #[arg(long)]
    stay: bool,
}

pub(crate) fn keep_wrapped(args: &KeeperArgs) -> Result<(), CommandError> {
    let mark = std::env::var(WRAP_MARK_VARIABLE)
        .map_err(|_| CommandError::usage(format!("{WRAP_MARK_VARIABLE} is not set"), "use --wrap"))?;
    if args.stay { keep_until_end(args, &mark) } else { start_keeper(args) }
}

/// A process group of its own protects the keeper from signals to the tool's and the experiment's groups.
fn start_keeper(args: &KeeperArgs) -> Result<(), CommandError> {
    let failed =
        |what: &str, error: &std::io::Error| CommandError::failed(format!("--wrap: {what}: {error}"));
    let mut keeper = Command::new("/proc/self/exe")
        .args(["keep-wrapped", "--stay", &args.tool.to_string(), &args.owner.to_string()])
        .process_group(0)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| failed("cannot start the keeper", &error))?;
    let mut word = [0];
    let output = keeper.stdout.as_mut().map(|output| output.read_exact(&mut word));
    match output {
        Some(Ok(())) => Ok(()),
        Some(Err(error)) => Err(failed("the keeper does not watch", &error)),
        None => Err(CommandError::failed("--wrap: the keeper has no output")),
    }
}

fn keep_until_end(args: &KeeperArgs, mark: &str) -> Result<(), CommandError> {
    let open = |pid: i32| Pid::from_raw(pid).and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
    let tool = open(args.tool);
    let owner = open(args.owner);
    out::print_line("watching")?;
    let both: Vec<&OwnedFd> = tool.iter().chain(&owner).collect();
    // A process that cannot be opened has already ended.
    while both.len() == 2 && !wait_for_any_end(&both, TOOL_WAIT_LIMIT) {}
    let mark = format!("{WRAP_MARK_VARIABLE}={mark}");
    let deadline = Instant::now() + defaults().diagnose.wrap.rest;
    loop {
        let left = marked_processes(Path::new("/proc"), mark.as_bytes());
        if left.is_empty() {
            return Ok(());
        }
        let orphaned = owner.as_ref().is_none_or(|owner| wait_for_any_end(&[owner], Duration::ZERO));
        if orphaned || Instant::now() >= deadline {
            for pid in left {
                kill_marked(pid, mark.as_bytes());
            }
        }
        // Without processes, this call only sleeps.
        wait_for_any_end(&[], SCAN_INTERVAL);
    }
}

/// Longest single wait for the end of the tool; the keeper repeats the wait.
const TOOL_WAIT_LIMIT: Duration = Duration::from_secs(3600);
const SCAN_INTERVAL: Duration = Duration::from_millis(50);

fn wait_for_any_end(processes: &[&OwnedFd], limit: Duration) -> bool {
    let mut asked: Vec<PollFd<'_>> = processes.iter().map(|fd| PollFd::new(*fd, PollFlags::IN)).collect();
    let limit = Timespec::try_from(limit).ok();
    matches!(poll(&mut asked, limit.as_ref()), Ok(ended) if ended > 0)
}

fn marked_processes(proc: &Path, mark: &[u8]) -> Vec<Pid> {
    let entries = std::fs::read_dir(proc).into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok().and_then(Pid::from_raw));
    pids.filter(|pid| *pid != getpid() && has_mark(proc, *pid, mark)).collect()
}

fn has_mark(proc: &Path, pid: Pid, mark: &[u8]) -> bool {
    let process = proc.join(pid.as_raw_nonzero().to_string());
    let has = |folder: &Path| {
        let all = std::fs::read(folder.join("environ")).ok().filter(|all| !all.is_empty())?;
        Some(all.split(|byte| *byte == 0).any(|line| line == mark))
    };
    // A zombie, or a process whose first thread has ended, has an empty environment. Other threads still show
    // it.
    has(&process).unwrap_or_else(|| {
        let threads = std::fs::read_dir(process.join("task")).into_iter().flatten().flatten();
        threads.filter_map(|thread| has(&thread.path())).any(|has| has)
    })
}

/// The PID may have been reused, so check the mark again.
fn kill_marked(pid: Pid, mark: &[u8]) {
    if let Ok(process) = pidfd_open(pid, PidfdFlags::empty())
        && has_mark(Path::new("/proc"), pid, mark)
    {
        // The process may have ended already.
        let _ = pidfd_send_signal(process, Signal::KILL);
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

    #[test]
    fn only_processes_with_the_whole_mark_are_found() {
        let directory = tempfile::tempdir().unwrap();
        let environment = |pid: &str, text: &str| {
            std::fs::create_dir(directory.path().join(pid)).unwrap();
            std::fs::write(directory.path().join(pid).join("environ"), text).unwrap();
        };
        environment("11", "A=1\0LLAMA_WARDEN_WRAPPED=/tmp/x:1\0");
        environment("12", "LLAMA_WARDEN_WRAPPED=/tmp/x:12\0");
        environment("13", "XLLAMA_WARDEN_WRAPPED=/tmp/x:1\0");
        environment("14", "");
        environment("15", "");
        std::fs::create_dir_all(directory.path().join("15/task/16")).unwrap();
        std::fs::write(directory.path().join("15/task/16/environ"), "LLAMA_WARDEN_WRAPPED=/tmp/x:1\0")
            .unwrap();
        environment("self", "LLAMA_WARDEN_WRAPPED=/tmp/x:1\0");
        let found = marked_processes(directory.path(), b"LLAMA_WARDEN_WRAPPED=/tmp/x:1");
        assert_eq!(found.iter().map(|pid| pid.as_raw_nonzero().get()).collect::<Vec<_>>(), [11, 15]);
    }
}
