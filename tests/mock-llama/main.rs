//! `mock-llama`: an upstream that costs next to nothing, so that a benchmark measures the proxy.
//!
//! It implements as much of llama-server as llama-warden needs, and answers at once: chat requests with about
//! 610 bytes, streams with events of about 250 bytes, one write each. A request sets its stream:
//! `"stream":true`, `"max_tokens":N` events, `"per_second":R` of them (0 or absent: without a pause). Like
//! llama-server it closes the connection after a stream. Each thread has one `epoll` and no runtime, and
//! checks nothing: [`fake-llama`](../fake-llama/main.rs) is for tests of behaviour.
//!
//! | variable | means |
//! |---|---|
//! | `MOCK_LLAMA_CPU` | its CPU, or the first and the last of them: `4-7` |
//! | `MOCK_LLAMA_THREADS` | number of its threads, 1 if absent; more are for clients that one cannot keep busy |
//! | `MOCK_LLAMA_LISTEN` | `ADDRESS:PORT` of a second listener |
//!
//! `GET /mock/counts` returns the number of accepted connections, and how many of them carried generations.

mod answers;
mod connection;

use std::io;
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use rustix::thread::{CpuSet, sched_setaffinity};
use warden_rig::poll::{Poller, Ready, Stream, now};

use crate::connection::{Connection, Counts, Next};

/// Interval at which paced streams are checked.
const TICK: Duration = Duration::from_micros(250);
/// Smaller tokens are listeners.
const FIRST_CONNECTION: u64 = 16;

enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Listener {
    fn accept(&self) -> io::Result<Stream> {
        match self {
            Self::Tcp(listener) => Stream::tcp(listener.accept()?.0),
            Self::Unix(listener) => Stream::unix(listener.accept()?.0),
        }
    }
}

struct Asked {
    listeners: Vec<Listener>,
    slots: u64,
    threads: usize,
}

fn main() -> ExitCode {
    let flags: Vec<String> = std::env::args().skip(1).collect();
    if flags.iter().any(|flag| flag == "--version") {
        say("version: 0.0.0-mock (build 1, commit 000000000)\nbuilt with Rust for Linux");
        return ExitCode::SUCCESS;
    }
    if flags.iter().any(|flag| flag == "--help") {
        say("--host HOST   a UNIX socket, if the address ends with .sock");
        return ExitCode::SUCCESS;
    }
    match asked(&flags).and_then(|asked| serve_on_threads(&asked)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(&format!("mock-llama: {error}"));
            ExitCode::FAILURE
        }
    }
}

fn say(line: &str) {
    use io::Write as _;
    let _closed = writeln!(io::stderr(), "{line}");
}

fn after<'a>(flags: &'a [String], names: &[&str]) -> Option<&'a str> {
    let at = flags.iter().rposition(|flag| names.contains(&flag.as_str()))?;
    flags.get(at + 1).map(String::as_str)
}

fn asked(flags: &[String]) -> io::Result<Asked> {
    if let Some((first, last)) = std::env::var("MOCK_LLAMA_CPU").ok().and_then(|cpus| first_and_last(&cpus)) {
        let mut cpus = CpuSet::new();
        (first..=last).for_each(|cpu| cpus.set(cpu));
        sched_setaffinity(None, &cpus)?;
    }
    let mut listeners = Vec::new();
    let tcp = |address: String| {
        let listener = TcpListener::bind(&address)
            .map_err(|error| io::Error::new(error.kind(), format!("cannot listen on {address}: {error}")))?;
        say(&format!("listening on http://{}", listener.local_addr()?));
        listener.set_nonblocking(true)?;
        Ok::<_, io::Error>(Listener::Tcp(listener))
    };
    let host = after(flags, &["--host"]).unwrap_or("127.0.0.1");
    if Path::new(host).extension().is_some_and(|end| end == "sock") {
        let listener = UnixListener::bind(host)?;
        listener.set_nonblocking(true)?;
        say(&format!("listening on unix://{host}"));
        listeners.push(Listener::Unix(listener));
    } else {
        listeners.push(tcp(format!("{host}:{}", after(flags, &["--port"]).unwrap_or("8080")))?);
    }
    if let Ok(address) = std::env::var("MOCK_LLAMA_LISTEN") {
        listeners.push(tcp(address)?);
    }
    let slots = after(flags, &["-np", "--parallel"]).and_then(|slots| slots.parse().ok()).unwrap_or(4);
    let threads = std::env::var("MOCK_LLAMA_THREADS").ok().and_then(|count| count.parse().ok()).unwrap_or(1);
    Ok(Asked { listeners, slots, threads })
}

fn first_and_last(cpus: &str) -> Option<(usize, usize)> {
    let (first, last) = cpus.split_once('-').unwrap_or((cpus, cpus));
    Some((first.parse().ok()?, last.parse().ok()?))
}

/// Serves the same listeners on each thread; a connection stays on the thread that accepted it. Each thread
/// counts by itself.
fn serve_on_threads(asked: &Asked) -> io::Result<()> {
    std::thread::scope(|scope| {
        for _ in 1..asked.threads {
            std::thread::Builder::new().spawn_scoped(scope, || serve(asked))?;
        }
        serve(asked)
    })
}

fn serve(asked: &Asked) -> io::Result<()> {
    let mut poller = Poller::new()?;
    for (token, listener) in (0..).zip(&asked.listeners) {
        match listener {
            Listener::Tcp(listener) => poller.add(listener, token)?,
            Listener::Unix(listener) => poller.add(listener, token)?,
        }
    }
    let mut mock = Mock {
        connections: Vec::new(),
        free: Vec::new(),
        flat_out: Vec::new(),
        paced: Vec::new(),
        counts: Counts { slots: asked.slots, ..Counts::default() },
        scratch: vec![0; 256 << 10],
        ticking: false,
    };
    let mut ready = Vec::new();
    loop {
        ready.clear();
        let limit = mock.has_work().then_some(Duration::ZERO);
        let ticked = poller.wait(limit, &mut ready)?;
        for one in &ready {
            match asked.listeners.get(usize::try_from(one.token).unwrap_or(usize::MAX)) {
                Some(listener) => mock.accept(&poller, listener)?,
                None => mock.turn(&poller, *one)?,
            }
        }
        if ticked {
            mock.paced(&poller)?;
        }
        mock.flat_out(&poller)?;
        if !mock.flat_out.is_empty() {
            // The reader may need the same CPU, which the kernel does not take from a real-time process.
            rustix::thread::sched_yield();
        }
        if mock.ticking == mock.paced.is_empty() {
            mock.ticking = !mock.ticking;
            poller.tick(mock.ticking.then_some(TICK))?;
        }
    }
}

struct Mock {
    connections: Vec<Option<Connection>>,
    free: Vec<usize>,
    /// Streams without a pace, which get one event each in turn, as a batch of slots decodes.
    flat_out: Vec<usize>,
    paced: Vec<usize>,
    counts: Counts,
    scratch: Vec<u8>,
    ticking: bool,
}

impl Mock {
    /// Accepts one connection. If more wait, the kernel reports the listener again, perhaps to another thread.
    fn accept(&mut self, poller: &Poller, listener: &Listener) -> io::Result<()> {
        // Without a connection, another thread was faster, or the client has already left.
        let Ok(stream) = listener.accept() else { return Ok(()) };
        self.counts.accepted += 1;
        let at = self.free.pop().unwrap_or_else(|| {
            self.connections.push(None);
            self.connections.len() - 1
        });
        poller.add(&stream, token(at))?;
        self.connections[at] = Some(Connection::new(stream));
        Ok(())
    }

    fn turn(&mut self, poller: &Poller, ready: Ready) -> io::Result<()> {
        let at = usize::try_from(ready.token - FIRST_CONNECTION).unwrap_or(usize::MAX);
        let Some(Some(connection)) = self.connections.get_mut(at) else { return Ok(()) };
        let had_stream = connection.has_stream();
        let mut next = Next::Go;
        if ready.writable {
            next = connection.flush();
        }
        if ready.readable && next != Next::Close {
            next = connection.read(&mut self.scratch, &mut self.counts);
        }
        if let Some(paced) = connection.stream_begun(had_stream) {
            if paced { self.paced.push(at) } else { self.flat_out.push(at) }
        }
        self.settle(poller, at, next)
    }

    /// Returns true if a stream without a pace can continue; if all wait for room, the kernel reports when
    /// there is some.
    fn has_work(&self) -> bool {
        self.flat_out.iter().any(|at| self.connections[*at].as_ref().is_some_and(|one| !one.is_blocked()))
    }

    fn flat_out(&mut self, poller: &Poller) -> io::Result<()> {
        let mut turn = 0;
        while turn < self.flat_out.len() {
            let at = self.flat_out[turn];
            let next = match self.connections[at].as_mut() {
                Some(connection) if connection.is_blocked() => Next::Go,
                Some(connection) => connection.event(now()),
                None => Next::Close,
            };
            // Closing removes this stream from the list and puts the last one in its place.
            if next != Next::Close {
                turn += 1;
            }
            self.settle(poller, at, next)?;
        }
        Ok(())
    }

    fn paced(&mut self, poller: &Poller) -> io::Result<()> {
        let mut turn = 0;
        while turn < self.paced.len() {
            let (at, time) = (self.paced[turn], now());
            let next = match self.connections[at].as_mut() {
                Some(connection) if !connection.is_due(time) => Next::Go,
                Some(connection) => connection.event(time),
                None => Next::Close,
            };
            if next != Next::Close {
                turn += 1;
            }
            self.settle(poller, at, next)?;
        }
        Ok(())
    }

    fn settle(&mut self, poller: &Poller, at: usize, next: Next) -> io::Result<()> {
        let Some(connection) = self.connections[at].as_mut() else { return Ok(()) };
        if next == Next::Close {
            self.connections[at] = None;
            self.free.push(at);
            for list in [&mut self.flat_out, &mut self.paced] {
                if let Some(place) = list.iter().position(|other| *other == at) {
                    list.swap_remove(place);
                }
            }
        } else if let Some(on) = connection.wants_change() {
            poller.writes(connection.stream(), token(at), on)?;
        }
        Ok(())
    }
}

fn token(at: usize) -> u64 {
    at as u64 + FIRST_CONNECTION
}
