//! The reclaim file, with another process at its other end.

use std::io::Read as _;
use std::process::Stdio;
use std::sync::Arc;

use tokio_util::task::TaskTracker;

use super::*;

fn command(env: &[(&str, &str)]) -> ServerCommand {
    ServerCommand {
        env: env.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect(),
        ..ServerCommand::from_binary("/opt/llama-server".into())
    }
}

/// A reclaim file in a folder that exists as long as the first value.
fn desk() -> (tempfile::TempDir, PathBuf, ReclaimChannel) {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("m-7-g1.sock");
    let mut command = command(&[]);
    announce_reclaim(&mut command, &socket, true);
    let desk = ReclaimChannel::make(&command, &socket).unwrap();
    (folder, socket, desk)
}

/// Writes a block as a process does.
fn say(desk: &ReclaimChannel, part: ReclaimPart, index: usize, seq: u64, result: u16, bytes: u64) {
    let mut block = seq.to_ne_bytes().to_vec();
    for _ in 0..4 {
        block.extend(bytes.to_ne_bytes());
    }
    block.extend(7_u32.to_ne_bytes());
    block.extend(result.to_ne_bytes());
    block.resize(56, 0);
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for byte in &block {
        hash = (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    }
    block.extend(hash.to_ne_bytes());
    desk.file.write_all_at(&block, (part.block_offset() + index * BLOCK_BYTES) as u64).unwrap();
}

/// Another process that holds a lock on the whole file until its input ends.
struct Holder(std::process::Child);

impl Holder {
    fn of(socket: &Path) -> Self {
        let script = "import fcntl, sys\nf = open(sys.argv[1], 'r+')\nfcntl.lockf(f, fcntl.LOCK_EX)\nprint(1, flush=True)\nsys.stdin.read()";
        let mut child = std::process::Command::new("python3")
            .args(["-c", script])
            .arg(reclaim_path(socket))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = [0; 2];
        child.stdout.as_mut().unwrap().read_exact(&mut line).unwrap();
        Self(child)
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        drop(self.0.wait());
    }
}

#[test]
fn a_generation_is_told_a_file_of_its_own_unless_nobody_asks_or_its_owner_says_otherwise() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("m-7-g1.sock");
    let mut wanted = command(&[]);
    announce_reclaim(&mut wanted, &socket, true);
    assert_eq!(wanted.env, [(VARIABLE.to_owned(), reclaim_path(&socket).to_string_lossy().into_owned())]);
    assert!(ReclaimChannel::make(&wanted, &socket).is_some());
    assert_eq!(std::fs::read(reclaim_path(&socket)).unwrap().len(), 64 * 34);
    // A left-over file is replaced.
    std::fs::write(reclaim_path(&socket), "stale").unwrap();
    assert!(ReclaimChannel::make(&wanted, &socket).is_some());
    remove_reclaim_file(&socket);
    assert!(!reclaim_path(&socket).exists());
    let mut off = command(&[]);
    announce_reclaim(&mut off, &socket, false);
    assert_eq!((off.env.len(), off.env_remove.as_slice()), (0, [VARIABLE.to_owned()].as_slice()));
    for own in ["/tmp/mine", ""] {
        let mut own = command(&[(VARIABLE, own)]);
        announce_reclaim(&mut own, &socket, true);
        assert!(own.env.len() == 1 && ReclaimChannel::make(&own, &socket).is_none());
    }
    assert!(ReclaimChannel::make(&off, &socket).is_none() && !reclaim_path(&socket).exists());
}

#[test]
fn only_who_has_written_and_holds_its_block_is_there() {
    let (_folder, socket, desk) = desk();
    assert_eq!(desk.parts(), ReclaimParts::default());
    say(&desk, ReclaimPart::Heap, 3, 0, 0, 0);
    assert_eq!(desk.parts(), ReclaimParts::default(), "it has gone");
    let holder = Holder::of(&socket);
    assert_eq!(desk.parts(), ReclaimParts { heap: true, cuda: false });
    desk.file.write_all_at(&[0xa5; BLOCK_BYTES], ReclaimPart::Cuda.block_offset() as u64).unwrap();
    assert_eq!(desk.parts(), ReclaimParts { heap: true, cuda: false }, "garbage is nobody");
    say(&desk, ReclaimPart::Cuda, 0, 0, 0, 0);
    assert_eq!(desk.parts(), ReclaimParts { heap: true, cuda: true });
    drop(holder);
    assert_eq!(desk.parts(), ReclaimParts::default());
}

#[tokio::test]
async fn the_cuda_part_is_asked_first_and_answers_of_all_processes_are_added_up() {
    let (_folder, socket, desk) = desk();
    let _holder = Holder::of(&socket);
    for index in 0..2 {
        say(&desk, ReclaimPart::Cuda, index, 0, 0, 0);
    }
    say(&desk, ReclaimPart::Heap, 0, 0, 0, 0);
    let desk = Arc::new(desk);
    let asking = Arc::clone(&desk);
    let asked = TaskTracker::new().spawn(async move { asking.reclaim(Duration::from_secs(30)).await });
    let seen = async |seq| {
        let block = || {
            let mut block = [0; BLOCK_BYTES];
            desk.file.read_exact_at(&mut block, BLOCK_BYTES as u64).unwrap();
            block
        };
        while request_number(&block()) != Some(seq) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        u32::from_ne_bytes(block()[8..12].try_into().unwrap())
    };
    assert_eq!(seen(1).await, 7);
    say(&desk, ReclaimPart::Cuda, 0, 1, 1, 100);
    say(&desk, ReclaimPart::Cuda, 1, 1, 2, 10);
    assert_eq!(seen(2).await, 8);
    say(&desk, ReclaimPart::Heap, 0, 2, 5, 0);
    let ReclaimResult { outcome, heap, cuda, given, ms, .. } = asked.await.unwrap();
    assert_eq!(
        (outcome, heap, cuda),
        (ReclaimOutcome::Partly, Some(ReclaimOutcome::TooSoon), Some(ReclaimOutcome::Partly))
    );
    assert_eq!((given.pools, given.graphs_host, given.heap, ms), (110, 110, 0, 14));
}

#[tokio::test]
async fn who_is_silent_is_waited_for_until_the_time_is_up_and_who_ends_is_not() {
    let (_folder, socket, desk) = desk();
    let holder = Holder::of(&socket);
    say(&desk, ReclaimPart::Heap, 0, 0, 0, 0);
    let silent = desk.reclaim(Duration::ZERO).await;
    assert_eq!(
        (silent.outcome, silent.heap, silent.cuda),
        (ReclaimOutcome::NoAnswer, Some(ReclaimOutcome::NoAnswer), None)
    );
    let desk = Arc::new(desk);
    let asking = Arc::clone(&desk);
    let asked = TaskTracker::new().spawn(async move { asking.reclaim(Duration::from_secs(600)).await });
    while request_number(&{
        let mut block = [0; BLOCK_BYTES];
        desk.file.read_exact_at(&mut block, BLOCK_BYTES as u64).unwrap();
        block
    }) != Some(2)
    {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    drop(holder);
    assert_eq!(asked.await.unwrap().outcome, ReclaimOutcome::NoAnswer);
    // A truncated file only makes the request fail.
    desk.file.set_len(10).unwrap();
    assert_eq!(desk.parts(), ReclaimParts::default());
    assert_eq!(desk.reclaim(Duration::ZERO).await, ReclaimResult::NONE_ASKED);
}
