//! Child processes of several kinds: short, verbose, ignoring TERM, and with children of their own.

use std::fs;
use std::path::Path;

use super::*;

fn shell(script: &str) -> Command {
    let mut command = Command::new("/bin/sh");
    command.arg("-c").arg(script);
    command
}

/// Waits until a file has a line, at most ten seconds.
async fn line_of(path: &Path) -> String {
    let wait = async {
        loop {
            match fs::read_to_string(path) {
                Ok(text) if text.ends_with('\n') => return text.trim().to_owned(),
                _ => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(10), wait).await.unwrap()
}

/// Waits until a process has ended or is a zombie, at most ten seconds.
async fn gone(pid: &str) {
    let wait = async {
        while fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z ")) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), wait).await.unwrap();
}

#[tokio::test]
async fn both_outputs_arrive_in_their_order_with_the_status() {
    let cancel = CancellationToken::new();
    let (ended, text) = output(shell("echo one; echo two >&2; printf three; exit 3"), &cancel).await.unwrap();
    assert_eq!(text, "one\ntwo\nthree\n");
    assert!(matches!(ended, ChildExit::Exited(status) if status.code() == Some(3)));
}

#[tokio::test]
async fn a_program_that_does_not_exist_is_an_error() {
    let failed = output(Command::new("/nonexistent/program"), &CancellationToken::new()).await.unwrap_err();
    assert_eq!(failed.kind(), io::ErrorKind::NotFound);
}

/// A program file, and a handle that holds it open for writing.
fn program(folder: &Path) -> (Command, fs::File) {
    use std::os::unix::fs::PermissionsExt;
    let path = folder.join("program");
    fs::write(&path, "#!/bin/sh\necho done\n").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    (Command::new(&path), fs::File::options().append(true).open(&path).unwrap())
}

#[tokio::test]
async fn a_program_that_is_still_open_for_writing_is_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let (command, writer) = program(folder.path());
    let cancel = CancellationToken::new();
    // Biased: the first attempt runs while the file is open, the next ones after it was closed.
    let (ran, ()) = tokio::join!(biased; output(command, &cancel), async { drop(writer) });
    assert_eq!(ran.unwrap().1, "done\n");
}

#[tokio::test]
async fn a_program_that_stays_open_for_writing_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let (command, _writer) = program(folder.path());
    let failed = output(command, &CancellationToken::new()).await.unwrap_err();
    assert_eq!(failed.kind(), io::ErrorKind::ExecutableFileBusy);
}

#[tokio::test]
async fn a_helper_that_keeps_the_pipe_does_not_keep_us() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("pid");
    let script = format!("sleep 600 & echo $! > {}; echo done", file.display());
    let (ended, text) = output(shell(&script), &CancellationToken::new()).await.unwrap();
    assert_eq!(text, "done\n");
    assert!(matches!(ended, ChildExit::Exited(status) if status.success()));
    let pid: i32 = line_of(&file).await.parse().unwrap();
    rustix::process::kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
}

#[tokio::test]
async fn cancelling_ends_descendants_in_other_groups_too() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("pid");
    // `setsid` leaves the process group, like ninja's compilers.
    let script = format!("setsid sleep 600 & echo $! > {}; wait", file.display());
    let cancel = CancellationToken::new();
    let (ended, pid) = tokio::join!(output(shell(&script), &cancel), async {
        let pid = line_of(&file).await;
        cancel.cancel();
        pid
    });
    assert!(matches!(ended.unwrap().0, ChildExit::Cancelled));
    gone(&pid).await;
}

#[tokio::test]
async fn a_child_that_is_deaf_to_term_is_killed_after_the_grace() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("pid");
    let script = format!("trap '' TERM; echo $$ > {}; while :; do sleep 0.01; done", file.display());
    let mut family = ProcessTree::spawn(shell(&script)).await.unwrap();
    let pid = line_of(&file).await;
    family.stop(Duration::from_millis(50)).await.unwrap();
    gone(&pid).await;
}

#[tokio::test]
async fn dropping_the_future_ends_the_child() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("pid");
    let script = format!("echo $$ > {}; sleep 600", file.display());
    let cancel = CancellationToken::new();
    let pid = tokio::select! {
        _ = output(shell(&script), &cancel) => unreachable!("sleeps for minutes"),
        pid = line_of(&file) => pid,
    };
    gone(&pid).await;
}

#[tokio::test]
async fn what_runs_inside_of_a_tool_is_told_to_end_and_the_tool_sees_it() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("pid");
    let sleep = ["/usr/bin/sleep", "/bin/sleep"].iter().find_map(|path| fs::canonicalize(path).ok()).unwrap();
    let script = format!("{} 600 & echo $! > {}; wait $!; exit 7", sleep.display(), file.display());
    let mut family = ProcessTree::spawn(shell(&script)).await.unwrap();
    let pid = line_of(&file).await;
    // Between fork and exec, the child still is a shell.
    let runs = async {
        while fs::read_link(format!("/proc/{pid}/exe")).ok().as_ref() != Some(&sleep) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), runs).await.unwrap();
    family.terminate_program(Path::new("/nonexistent/program"));
    assert!(!fs::read_to_string(format!("/proc/{pid}/stat")).unwrap().contains(") Z "), "another program's");
    family.terminate_program(&sleep);
    assert_eq!(family.wait().await.unwrap().code(), Some(7), "the tool ended by itself");
    gone(&pid).await;
}

fn cut(chunks: &[&[u8]]) -> Vec<String> {
    let (mut lines, mut found) = (LineSplitter::default(), Vec::new());
    for chunk in chunks {
        lines.push(chunk, &mut |line: &str| found.push(line.to_owned()));
    }
    lines.finish(&mut |line: &str| found.push(line.to_owned()));
    found
}

#[test]
fn lines_are_joined_across_chunks() {
    assert_eq!(cut(&[b"on", b"e\ntw", b"o\r\nthree"]), ["one", "two", "three"]);
}

#[test]
fn bytes_that_are_not_text_are_replaced() {
    assert_eq!(cut(&[b"a\xffb\n"]), ["a\u{fffd}b"]);
}

#[test]
fn a_line_without_end_is_handed_over_in_pieces() {
    assert_eq!(
        cut(&[&vec![b'x'; MAX_LINE_BYTES + 1], b"y\n"]),
        ["x".repeat(MAX_LINE_BYTES + 1), "y".to_owned()]
    );
}

#[tokio::test]
async fn a_background_program_and_what_it_starts_have_a_low_priority() {
    let script = "until [ \"$(nice)\" -ge 10 ]; do sleep 0.01; done; sh -c nice";
    let mut text = String::new();
    let cancel = CancellationToken::new();
    let run = run_at_priority(shell(script), RunPriority::Background, &cancel, |line| text.push_str(line));
    tokio::time::timeout(Duration::from_secs(10), run).await.unwrap().unwrap();
    assert!(text.parse::<i32>().unwrap() >= 10, "{text}");
}
