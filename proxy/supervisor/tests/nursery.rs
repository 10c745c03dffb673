//! The nursery with real processes: `/bin/sh` children, a thread standing in for main.
#![expect(clippy::unwrap_used, clippy::expect_used, reason = "the helpers of a test fail the test")]

use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::io::AsyncReadExt as _;
use tokio::net::unix::pipe;
use warden_supervisor::{
    ChildProcess, NurseryHandle, ProcessExit, ServerCommand, ServerKind, SpawnError, SpawnRequest, nursery,
};

/// Deadline that only a broken test reaches.
const PATIENCE: Duration = Duration::from_secs(10);

#[expect(clippy::disallowed_methods, reason = "tests stop where the system has no thread to give")]
fn start() -> (NurseryHandle, JoinHandle<()>) {
    let (nursery, handle) = nursery::nursery_channel();
    (handle, std::thread::spawn(|| nursery.run()))
}

fn sh(script: &str) -> SpawnRequest {
    SpawnRequest {
        command: ServerCommand {
            wrapper: Vec::new(),
            binary: PathBuf::from("/bin/sh"),
            args: vec!["-c".to_owned(), script.to_owned()],
            env: vec![("GIVEN".to_owned(), "value".to_owned()), ("BOTH".to_owned(), "value".to_owned())],
            // Cargo sets it for every test, so it is in our own environment.
            env_remove: vec!["CARGO_MANIFEST_DIR".to_owned(), "BOTH".to_owned()],
            directory: Some(PathBuf::from("/")),
            kind: ServerKind::LlamaServer,
        },
        oom_score_adj: 7,
    }
}

async fn spawn(handle: &NurseryHandle, script: &str) -> (ChildProcess, pipe::Receiver, pipe::Receiver) {
    let child = handle.spawn(sh(script)).await.unwrap();
    let (stdout, stderr) = child.take_output().unwrap();
    (child, stdout, stderr)
}

async fn line(from: &mut pipe::Receiver) -> String {
    let mut text = String::new();
    let read = async {
        while !text.ends_with('\n') {
            text.push(char::from(from.read_u8().await.unwrap()));
        }
    };
    tokio::time::timeout(PATIENCE, read).await.unwrap();
    text.trim_end().to_owned()
}

async fn wait(child: &ChildProcess) -> ProcessExit {
    tokio::time::timeout(PATIENCE, child.wait()).await.unwrap()
}

/// Zombies count as gone: the process that inherits an orphan reaps it later.
fn lives(pid: &str) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| !stat.rsplit(')').next().unwrap().trim_start().starts_with('Z'))
}

async fn until_gone(pid: &str) {
    let gone = async {
        while lives(pid) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, gone).await.expect("still alive");
}

#[tokio::test]
async fn a_child_runs_with_what_it_was_given_and_its_exit_code_is_told() {
    let (handle, _thread) = start();
    let script = "echo $GIVEN in $PWD; cat /proc/self/oom_score_adj; grep SigBlk /proc/self/status; echo oops >&2; exit 3";
    let (child, mut stdout, mut stderr) = spawn(&handle, script).await;
    assert_eq!(line(&mut stdout).await, "value in /");
    assert!(line(&mut stdout).await.parse::<i32>().is_ok());
    assert_eq!(line(&mut stdout).await, "SigBlk:\t0000000000000000");
    assert_eq!(line(&mut stderr).await, "oops");
    assert_eq!(wait(&child).await, ProcessExit::Code(3));
    assert_eq!(wait(&child).await, ProcessExit::Code(3), "asking again gives the same answer");
}

#[tokio::test]
async fn variables_that_are_to_be_removed_do_not_reach_the_child() {
    assert!(std::env::var_os("CARGO_MANIFEST_DIR").is_some(), "cargo gives it to tests");
    let (handle, _thread) = start();
    let script = "echo ${CARGO_MANIFEST_DIR-gone} ${BOTH-gone} ${GIVEN-gone}";
    let (_child, mut stdout, _stderr) = spawn(&handle, script).await;
    assert_eq!(line(&mut stdout).await, "gone gone value");
}

#[tokio::test]
async fn a_child_leads_its_own_group_and_inherits_no_other_file() {
    let (handle, _thread) = start();
    let (child, mut stdout, _stderr) = spawn(&handle, "cut -d' ' -f5 /proc/$$/stat; ls -x /proc/$$/fd").await;
    assert_eq!(line(&mut stdout).await, child.pid().to_string());
    let files = line(&mut stdout).await;
    assert_eq!(files.split_whitespace().collect::<Vec<_>>(), ["0", "1", "2"]);
    assert_eq!(wait(&child).await, ProcessExit::Code(0));
}

#[tokio::test]
async fn term_reaches_the_whole_group() {
    let (handle, _thread) = start();
    let script = "trap 'exit 5' TERM; sh -c 'echo $$; exec sleep 60' & wait";
    let (child, mut stdout, _stderr) = spawn(&handle, script).await;
    let grandchild = line(&mut stdout).await;
    child.terminate();
    assert_eq!(wait(&child).await, ProcessExit::Code(5));
    until_gone(&grandchild).await;
}

#[tokio::test]
async fn grandchildren_do_not_survive_the_end_of_their_parent() {
    let (handle, _thread) = start();
    let script =
        "sh -c 'trap \"\" TERM; echo $$; while :; do sleep 60; done' & read x </dev/null; exec sleep 60";
    let (child, mut stdout, _stderr) = spawn(&handle, script).await;
    let grandchild = line(&mut stdout).await;
    // Only the leader dies; the group is killed when its end is seen.
    let leader = rustix::process::Pid::from_raw(child.pid().cast_signed()).unwrap();
    rustix::process::kill_process(leader, rustix::process::Signal::KILL).unwrap();
    assert_eq!(wait(&child).await, ProcessExit::Signal(9));
    until_gone(&grandchild).await;
}

#[tokio::test]
async fn a_child_that_is_dropped_is_killed() {
    let (handle, _thread) = start();
    let (child, mut stdout, _stderr) = spawn(&handle, "echo up; exec sleep 60").await;
    line(&mut stdout).await;
    let pid = child.pid().to_string();
    drop(child);
    until_gone(&pid).await;
}

#[tokio::test]
async fn children_die_with_the_thread_that_forked_them() {
    let (handle, thread) = start();
    let (child, mut stdout, _stderr) = spawn(&handle, "echo up; exec sleep 60").await;
    line(&mut stdout).await;
    assert!(lives(&child.pid().to_string()));
    handle.stop();
    thread.join().unwrap();
    assert_eq!(wait(&child).await, ProcessExit::Signal(9));
    let error = handle.spawn(sh("true")).await.unwrap_err();
    assert!(matches!(error, SpawnError::NurseryGone { .. }), "{error}");
}

#[tokio::test]
async fn what_cannot_be_run_is_named() {
    let (handle, _thread) = start();
    let mut request = sh("true");
    request.command.binary = PathBuf::from("/nowhere/llama-server");
    let error = handle.spawn(request).await.unwrap_err().to_string();
    assert!(error.contains("/nowhere/llama-server") && error.contains("No such file"), "{error}");
    let mut request = sh("true");
    request.command.directory = Some(PathBuf::from("/nowhere"));
    let error = handle.spawn(request).await.unwrap_err();
    assert!(matches!(error, SpawnError::Directory { .. }), "{error}");
}

#[tokio::test]
async fn a_wrapper_runs_the_binary_with_its_arguments() {
    let (handle, _thread) = start();
    let mut request = sh("echo $0 $FROM_WRAPPER; exit 3");
    request.command.wrapper = ["env", "FROM_WRAPPER=yes"].map(str::to_owned).to_vec();
    let child = handle.spawn(request).await.unwrap();
    let (mut stdout, _stderr) = child.take_output().unwrap();
    assert_eq!(line(&mut stdout).await, "/bin/sh yes");
    assert_eq!(wait(&child).await, ProcessExit::Code(3));
    let mut request = sh("true");
    request.command.wrapper = vec!["/nowhere/nice".to_owned()];
    let error = handle.spawn(request).await.unwrap_err().to_string();
    assert!(error.contains("/nowhere/nice") && !error.contains("/bin/sh"), "{error}");
}

#[tokio::test]
async fn a_hangup_sent_to_every_process_of_a_service_does_not_end_a_child() {
    let (handle, _thread) = start();
    // As a server that handles only INT and TERM: HUP has no handler.
    let (child, mut stdout, _stderr) = spawn(&handle, "kill -HUP $$; echo alive; exit 4").await;
    assert_eq!(line(&mut stdout).await, "alive");
    assert_eq!(wait(&child).await, ProcessExit::Code(4));
}
