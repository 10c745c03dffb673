//! Servers for tests: git's own behind a socket of ours, which may break off in the middle, and one that is silent.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;

/// A port that a repository can be fetched from, by `git daemon`. It ends with the test process.
pub(super) struct Server {
    port: u16,
    /// Connections so far.
    pub(super) asked: Arc<AtomicUsize>,
    /// Bytes that a connection may carry before it breaks.
    pub(super) limit: Arc<AtomicU64>,
}

impl Server {
    pub(super) fn start(repository: &Path) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (asked, limit) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicU64::new(u64::MAX)));
        let (count, bytes, folder) = (Arc::clone(&asked), Arc::clone(&limit), repository.to_owned());
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                count.fetch_add(1, Ordering::SeqCst);
                let (bytes, folder) = (bytes.load(Ordering::SeqCst), folder.clone());
                thread::spawn(move || serve(&stream, folder, bytes));
            }
        });
        Self { port, asked, limit }
    }

    /// One that takes connections and never says a word.
    pub(super) fn silent() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let asked = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&asked);
        thread::spawn(move || {
            let mut held = Vec::new();
            for stream in listener.incoming().flatten() {
                held.push(stream);
                count.fetch_add(1, Ordering::SeqCst);
            }
        });
        Self { port, asked, limit: Arc::new(AtomicU64::new(0)) }
    }

    pub(super) fn url(&self) -> String {
        format!("git://127.0.0.1:{}/repository", self.port)
    }

    pub(super) fn times_asked(&self) -> usize {
        self.asked.load(Ordering::SeqCst)
    }
}

fn serve(client: &TcpStream, folder: PathBuf, limit: u64) {
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
