//! Probes and last output of real processes: `/bin/sh` children and a server on a Unix socket.

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream, UnixListener};
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

use warden_policies::sample::GpuIndex;

use super::*;
use crate::spec::ServerCommand;
use crate::sync::lock;

/// Reading as a model's task requests it.
const ASK: SampleOptions =
    SampleOptions { by_page: true, gpu_age: PATIENCE, limit: PATIENCE, metrics: true, slots: true };
const PATIENCE: Duration = Duration::from_secs(10);

/// A sleeping child, while the test itself answers on its socket.
async fn sleeper(
    directory: &Path,
    script: &str,
    key: Option<&str>,
) -> (Arc<dyn BackendProcess>, PathBuf, Arc<Heard>) {
    let socket = directory.join("x.sock");
    let (process, heard) = sleeper_at(ListenAddress::Unix(socket.clone()), &socket, script, key).await;
    (process, socket, heard)
}

/// Like [`sleeper`], with another address.
#[expect(clippy::disallowed_methods, reason = "tests stop where the system has no thread to give")]
async fn sleeper_at(
    endpoint: ListenAddress,
    socket: &Path,
    script: &str,
    key: Option<&str>,
) -> (Arc<dyn BackendProcess>, Arc<Heard>) {
    let (nursery, handle) = crate::process::nursery::nursery_channel();
    std::thread::spawn(|| nursery.run());
    let mut args = vec!["-c".to_owned(), script.to_owned()];
    args.extend(key.iter().flat_map(|key| ["--api-key".to_owned(), (*key).to_owned()]));
    let command = ServerCommand { args, ..ServerCommand::from_binary("/bin/sh".into()) };
    let heard = Arc::new(Heard::default());
    let ears = Arc::clone(&heard);
    let sink: LineSink = Arc::new(move |stream, line| lock(&ears.0).push((stream, line)));
    let host = HostWorld::new(handle.clone());
    let request = SpawnRequest { command, oom_score_adj: 0 };
    let process = host.spawn(request, socket.to_owned(), endpoint, 100, sink).await.unwrap();
    // The nursery's thread has to outlive the child.
    std::mem::forget(handle);
    (process, heard)
}

#[derive(Default)]
struct Heard(Mutex<Vec<(OutputStream, String)>>);

/// Answers every connection with `answer` if the request contains `wanted`, with 401 otherwise.
fn answering(socket: &Path, wanted: &'static str, answer: &'static str) -> AbortOnDropHandle<()> {
    let listener = UnixListener::bind(socket).unwrap();
    AbortOnDropHandle::new(TaskTracker::new().spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut head = vec![0; 4096];
            let length = stream.read(&mut head).await.unwrap();
            let head = String::from_utf8_lossy(&head[..length]).to_lowercase();
            let answer =
                if head.contains(wanted) { answer } else { "HTTP/1.1 401 No\r\ncontent-length: 0\r\n\r\n" };
            // A client that only determines the socket's owner has left.
            let _gone = stream.write_all(answer.as_bytes()).await;
        }
    }))
}

#[tokio::test]
async fn probes_tell_ready_loading_and_lost_apart() {
    let directory = tempfile::tempdir().unwrap();
    let (process, socket, _) = sleeper(directory.path(), "exec sleep 60", None).await;
    assert_eq!(process.probe(PATIENCE).await, ProbeResult::SocketGone, "no socket yet");
    let loading = answering(&socket, "get /health ", "HTTP/1.1 503 Loading\r\ncontent-length: 0\r\n\r\n");
    assert_eq!(process.probe(PATIENCE).await, ProbeResult::Loading);
    drop(loading);
    std::fs::remove_file(&socket).unwrap();
    let ready = answering(&socket, "get /health ", "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}");
    assert!(process.sample(ASK).await.host.is_some(), "nobody has answered that could be another one");
    assert_eq!(process.probe(PATIENCE).await, ProbeResult::Ready);
    // The test itself answers, and is older than the child.
    let sample = process.sample(ASK).await;
    assert!(sample.host.is_none() && sample.confirmed.is_none() && sample.standing.is_none(), "{sample:?}");
    assert!(sample.unmeasured.is_some_and(|why| why.contains("was running before")));
    drop(ready);
    std::fs::remove_file(&socket).unwrap();
    // The socket accepts connections, but nothing answers.
    let _deaf = UnixListener::bind(&socket).unwrap();
    assert_eq!(process.probe(Duration::from_millis(50)).await, ProbeResult::Lost);
    process.kill();
    assert_eq!(process.wait().await, ProcessExit::Signal(9));
}

#[tokio::test]
async fn a_socket_directory_that_somebody_removed_is_made_again_and_private() {
    use std::os::unix::fs::PermissionsExt as _;
    let parent = tempfile::tempdir().unwrap();
    let directory = parent.path().join("gone");
    let (process, _, _) = sleeper(&directory, "exec sleep 60", None).await;
    let mode = std::fs::metadata(&directory).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o700);
    process.kill();
    process.wait().await;
}

#[tokio::test]
async fn probes_go_without_the_key_because_another_may_answer() {
    let directory = tempfile::tempdir().unwrap();
    let (process, socket, _) = sleeper(directory.path(), "exec sleep 60", Some("s3cret")).await;
    let listener = UnixListener::bind(&socket).unwrap();
    let probed = process.probe(PATIENCE);
    let heard = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut head = vec![0; 4096];
        let length = stream.read(&mut head).await.unwrap();
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await.unwrap();
        String::from_utf8_lossy(&head[..length]).into_owned()
    };
    let (health, heard) = tokio::join!(probed, heard);
    assert_eq!(health, ProbeResult::Ready);
    assert!(heard.starts_with("GET /health ") && !heard.contains("s3cret"), "{heard}");
    process.kill();
    process.wait().await;
}

#[tokio::test]
async fn another_program_at_its_port_is_sent_not_a_byte_while_it_runs_or_when_it_is_dead() {
    let directory = tempfile::tempdir().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap();
    let socket = directory.path().join("x.sock");
    let (process, _) = sleeper_at(ListenAddress::Tcp(port), &socket, "exec sleep 60", Some("s3cret")).await;
    let heard: Arc<Mutex<Vec<usize>>> = Arc::default();
    let ears = Arc::clone(&heard);
    let _stranger = AbortOnDropHandle::new(TaskTracker::new().spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut bytes = vec![0; 4096];
            let length = stream.read(&mut bytes).await.unwrap_or(0);
            lock(&ears).push(length);
            let _gone = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").await;
        }
    }));
    for _ in 0..2 {
        assert_eq!(process.probe(PATIENCE).await, ProbeResult::Lost);
        assert_eq!(process.read_props(PATIENCE).await, ServerProps::default());
        let setting = ClientSetting { path: "/slots/0?action=erase".to_owned(), body: Bytes::default() };
        assert!(process.apply_setting(setting, PATIENCE).await.is_err());
        process.kill();
        process.wait().await;
    }
    // Connections are accepted in order, so all earlier data was read before this byte.
    TcpStream::connect(port).await.unwrap().write_all(b"!").await.unwrap();
    let all = async {
        while lock(&heard).last() != Some(&1) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(PATIENCE, all).await.unwrap();
    let heard = lock(&heard).clone();
    assert!(heard.len() > 3 && heard.iter().filter(|length| **length > 0).count() == 1, "{heard:?}");
}

#[tokio::test]
async fn props_are_asked_with_the_key_and_unknown_ones_are_none() {
    let directory = tempfile::tempdir().unwrap();
    let (process, socket, _) = sleeper(directory.path(), "exec sleep 60", Some("first,second")).await;
    let answer = "HTTP/1.1 200 OK\r\ncontent-length: 92\r\n\r\n\
                  {\"total_slots\":3,\"default_generation_settings\":{\"n_ctx\":1024},\"build_info\":\"b8827-3f545bec\"}";
    let answers = answering(&socket, "authorization: bearer first", answer);
    assert_eq!(
        process.read_props(PATIENCE).await,
        ServerProps {
            slots: Some(3),
            n_ctx: Some(1024),
            modalities: None,
            build: Some(8827),
            reports_slots: false
        }
    );
    drop(answers);
    assert_eq!(process.read_props(PATIENCE).await, ServerProps::default());
}

#[tokio::test]
async fn its_own_counters_are_read_where_the_flag_is_given_and_only_there() {
    let directory = tempfile::tempdir().unwrap();
    let text = "llamacpp:n_decode_total 42\n";
    let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{text}", text.len());
    let answer: &'static str = Box::leak(answer.into_boxed_str());
    // `sleeper` gives its key as a flag, and `sh` takes any.
    for (key, decodes) in [(None, None), (Some("--metrics"), Some(42))] {
        let (process, socket, _) = sleeper(directory.path(), "exec sleep 60", key).await;
        let answers = answering(&socket, "get /metrics ", answer);
        let metrics = process.sample(ASK).await.answers.metrics;
        assert_eq!(metrics.and_then(|metrics| metrics.decodes), decodes);
        drop(answers);
        std::fs::remove_file(&socket).unwrap();
        process.kill();
        process.wait().await;
    }
}

#[test]
fn what_is_normal_is_not_told_as_missing() {
    let none = VramUnknown::NoDevice("no driver".to_owned());
    assert_eq!(no_vram(&none, false), None, "nothing to know");
    assert!(!no_vram(&none, true).unwrap().is_normal, "a GPU without a driver");
    assert!(no_vram(&VramUnknown::NotOnAny, true).unwrap().is_normal, "it computes on the CPU");
    let hidden = VramUnknown::NotListed { gpu: GpuIndex(0), reason: "no".to_owned() };
    assert!(no_vram(&hidden, true).unwrap().why.contains("GPU 0"));
}

#[tokio::test]
async fn the_end_is_told_after_the_last_words_and_memory_is_read_while_it_lives() {
    let directory = tempfile::tempdir().unwrap();
    let (process, _, _) = sleeper(directory.path(), "exec sleep 60", None).await;
    let sample = process.sample(ASK).await;
    assert!(sample.host.is_some_and(|memory| memory.anon > 0) && sample.report.is_none(), "{sample:?}");
    process.terminate();
    assert_eq!(process.wait().await, ProcessExit::Signal(15));
    assert!(process.sample(ASK).await.host.is_none());
    let (process, _, heard) = sleeper(directory.path(), "echo out; echo err >&2; exit 3", None).await;
    assert_eq!(process.wait().await, ProcessExit::Code(3));
    let mut words = lock(&heard.0).clone();
    words.sort_by_key(|(_, line)| line.clone());
    assert_eq!(words, [(OutputStream::Stderr, "err".to_owned()), (OutputStream::Stdout, "out".to_owned())]);
}
