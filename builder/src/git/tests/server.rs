//! Servers for tests: git's own behind a proxy that may break connections, and a silent one.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread;

/// A `git daemon` on a local port, which ends with the test process.
pub(super) struct Server {
    port: u16,
    /// Number of connections so far.
    pub(super) asked: Arc<AtomicUsize>,
    /// Bytes after which a connection breaks.
    pub(super) limit: Arc<AtomicU64>,
    /// The server supports only version 0 of git's protocol.
    pub(super) old: Arc<AtomicBool>,
}

impl Server {
    #[expect(clippy::disallowed_methods, reason = "tests stop where the system has no thread to give")]
    pub(super) fn start(repository: &Path) -> Self {
        let (listener, port) = listen();
        let (asked, limit) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicU64::new(u64::MAX)));
        let old = Arc::new(AtomicBool::new(false));
        let (count, bytes, folder) = (Arc::clone(&asked), Arc::clone(&limit), repository.to_owned());
        let is_old = Arc::clone(&old);
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                count.fetch_add(1, Ordering::SeqCst);
                let (bytes, folder) = (bytes.load(Ordering::SeqCst), folder.clone());
                let is_old = is_old.load(Ordering::SeqCst);
                thread::spawn(move || serve(&stream, folder, bytes, is_old));
            }
        });
        Self { port, asked, limit, old }
    }

    /// An HTTP server that refuses every password.
    #[expect(clippy::disallowed_methods, reason = "tests stop where the system has no thread to give")]
    pub(super) fn forbidding() -> Self {
        let (listener, port) = listen();
        let asked = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&asked);
        thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    let mut byte = [0];
                    match stream.read(&mut byte) {
                        Ok(1..) => head.push(byte[0]),
                        _ => break,
                    }
                }
                // Count requests with the password in a header.
                count.fetch_add(
                    usize::from(String::from_utf8_lossy(&head).contains("Authorization: Basic")),
                    Ordering::SeqCst,
                );
                let refused = "HTTP/1.1 401 Unauthorized\r\nWWW-Authenticate: Basic realm=\"x\"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
                stream.write_all(refused.as_bytes()).ok();
            }
        });
        Self { port, asked, limit: Arc::default(), old: Arc::default() }
    }

    /// A server that accepts connections and never answers.
    #[expect(clippy::disallowed_methods, reason = "tests stop where the system has no thread to give")]
    pub(super) fn silent() -> Self {
        let (listener, port) = listen();
        let asked = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&asked);
        thread::spawn(move || {
            let mut held = Vec::new();
            for stream in listener.incoming().flatten() {
                held.push(stream);
                count.fetch_add(1, Ordering::SeqCst);
            }
        });
        Self { port, asked, limit: Arc::default(), old: Arc::default() }
    }

    pub(super) fn port(&self) -> u16 {
        self.port
    }

    pub(super) fn url(&self) -> String {
        format!("git://127.0.0.1:{}/repository", self.port)
    }

    pub(super) fn times_asked(&self) -> usize {
        self.asked.load(Ordering::SeqCst)
    }
}

fn listen() -> (TcpListener, u16) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    (listener, port)
}

#[expect(clippy::disallowed_methods, reason = "tests stop where the system has no thread to give")]
fn serve(client: &TcpStream, folder: PathBuf, limit: u64, is_old: bool) {
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let output: OwnedFd = theirs.try_clone().unwrap().into();
    let mut git = Command::new("git")
        .args(["daemon", "--inetd", "--export-all", "--log-destination=none"])
        .arg(format!("--interpolated-path={}", folder.display()))
        .arg(folder)
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .stdout(Stdio::from(output))
        .stderr(Stdio::null())
        .spawn()
        .expect("git is installed");
    let (mut up, mut down) = (client.try_clone().unwrap(), ours.try_clone().unwrap());
    thread::spawn(move || {
        if is_old {
            // The first line requests a protocol version. Remove the request, so that the server uses
            // version 0. Read the whole line, even if it arrives in parts: otherwise the request could
            // reach the server.
            let mut first = b"0000".to_vec();
            up.read_exact(&mut first).ok();
            let length = usize::from_str_radix(&String::from_utf8_lossy(&first), 16).unwrap_or(0);
            first.resize(length.max(first.len()), 0);
            up.read_exact(&mut first[4..]).ok();
            let first = String::from_utf8_lossy(&first).replace("version=2", "version=0");
            down.write_all(first.as_bytes()).ok();
        }
        std::io::copy(&mut up, &mut down).ok();
        down.shutdown(Shutdown::Write).ok();
    });
    let (mut from, mut to) = (ours.take(limit), client);
    std::io::copy(&mut from, &mut to).ok();
    to.flush().ok();
    client.shutdown(Shutdown::Both).ok();
    git.kill().ok();
    git.wait().ok();
}
