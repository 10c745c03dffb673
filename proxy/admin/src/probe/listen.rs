//! The thread that answers probes and `HAProxy`. A separate runtime protects it from delays by other work.
//!
//! Any client may connect, so connections are limited in number, duration and size of the head. Beyond the
//! number, the thread closes the oldest connection: clients that hold connections cannot keep probes out.
//! Neither can clients that reconnect constantly, because the thread answers an accepted connection before it
//! accepts many more.

use std::collections::VecDeque;
use std::io;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, Mutex};

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use warden_supervisor::sync::lock;

use super::board::ProbeBoard;
use super::http;
use crate::error::AdminError;

/// Gives the thread ten times the usual weight.
const THREAD_NICE: i32 = -10;
/// Scheduler steps between polls for I/O. With few steps, the thread answers connections before it closes
/// them in favour of new ones.
const EVENT_INTERVAL: u32 = 8;

/// The listeners for probes and agent checks.
#[derive(Debug, Default)]
pub struct ProbeListeners {
    probe: Option<StdListener>,
    agent: Option<StdListener>,
}

impl ProbeListeners {
    /// Keeps the sockets that the predecessor handed over, and binds the others.
    ///
    /// # Errors
    /// A socket cannot be bound.
    pub fn bind(
        probe: Option<SocketAddr>,
        agent: Option<SocketAddr>,
        left: Vec<OwnedFd>,
    ) -> Result<Self, AdminError> {
        let mut left: Vec<StdListener> = left.into_iter().map(StdListener::from).collect();
        let mut of = |key, address: Option<SocketAddr>| {
            let is_it = |listener: &StdListener| {
                let own = listener.local_addr().ok();
                own.is_some_and(|own| address.is_some_and(|wanted| matches_address(own, wanted)))
            };
            match left.iter().position(is_it) {
                Some(at) => Ok(Some(left.remove(at))),
                None => bind(key, address),
            }
        };
        Ok(Self { probe: of("probe.address", probe)?, agent: of("probe.agent", agent)? })
    }

    /// Duplicates the sockets for the successor.
    ///
    /// # Errors
    /// A descriptor cannot be duplicated.
    pub fn sockets(&self) -> io::Result<Vec<OwnedFd>> {
        let both = [&self.probe, &self.agent].into_iter().flatten();
        both.map(|listener| listener.as_fd().try_clone_to_owned()).collect()
    }

    /// Returns the addresses of the probe listener and of the `HAProxy` agent, with the ports that the kernel
    /// chose.
    pub fn addresses(&self) -> (Option<SocketAddr>, Option<SocketAddr>) {
        let of = |listener: &Option<StdListener>| listener.as_ref().and_then(|own| own.local_addr().ok());
        (of(&self.probe), of(&self.agent))
    }

    /// Starts a thread that answers until `stop` is cancelled.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn serve(self, board: Arc<ProbeBoard>, stop: CancellationToken) -> Result<(), AdminError> {
        if self.probe.is_none() && self.agent.is_none() {
            return Ok(());
        }
        let cannot =
            |problem: io::Error| AdminError::failed(format!("cannot start the thread for probes: {problem}"));
        let runtime =
            tokio::runtime::Builder::new_current_thread().event_interval(EVENT_INTERVAL).enable_all().build();
        let runtime = runtime.map_err(cannot)?;
        let work = async move {
            let tasks = TaskTracker::new();
            tokio::select! {
                () = accept(self.probe, ProbeProtocol::Probe, &board, &tasks) => {}
                () = accept(self.agent, ProbeProtocol::Agent, &board, &tasks) => {}
                () = stop.cancelled() => {}
            }
        };
        let thread = std::thread::Builder::new().name("probe".to_owned());
        let answer = move || {
            raise_priority();
            runtime.block_on(work);
        };
        thread.spawn(answer).map_err(cannot)?;
        Ok(())
    }
}

/// Raises the priority of the current thread, which has little to do but must run even if all cores are busy.
/// Has no effect without root or `RLIMIT_NICE` (`LimitNICE=` of a unit).
fn raise_priority() {
    // `None` means the calling thread.
    if let Err(problem) = rustix::process::setpriority_process(None, THREAD_NICE) {
        tracing::debug!(%problem, nice = THREAD_NICE, "the thread that answers probes goes first nowhere");
    }
}

/// Port 0 in `wanted` matches any port.
fn matches_address(own: SocketAddr, wanted: SocketAddr) -> bool {
    own.ip() == wanted.ip() && (wanted.port() == 0 || own.port() == wanted.port())
}

fn bind(key: &str, address: Option<SocketAddr>) -> Result<Option<StdListener>, AdminError> {
    let Some(address) = address else { return Ok(None) };
    let bound = StdListener::bind(address).and_then(|listener| {
        listener.set_nonblocking(true)?;
        Ok(listener)
    });
    bound.map(Some).map_err(|problem| {
        AdminError::hinted(
            format!("cannot listen on {address} (`{key}`): {problem}"),
            format!("choose another `{key}`"),
        )
    })
}

#[derive(Clone, Copy)]
enum ProbeProtocol {
    Probe,
    Agent,
}

/// Never returns, even without a listener.
async fn accept(
    listener: Option<StdListener>,
    kind: ProbeProtocol,
    board: &Arc<ProbeBoard>,
    tasks: &TaskTracker,
) {
    let Some(listener) = listener else { return std::future::pending().await };
    let listener = match TcpListener::from_std(listener) {
        Ok(listener) => listener,
        Err(problem) => {
            tracing::error!(%problem, "probes cannot be answered");
            return std::future::pending().await;
        }
    };
    let crowd = Arc::new(ConnectionLimit::new(board.numbers().connections));
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let place = crowd.add_connection();
                let board = board.clone();
                tasks.spawn(async move {
                    let gone = place.gone.clone();
                    tokio::select! {
                        () = serve_connection(stream, kind, board) => {}
                        () = gone.cancelled() => {}
                    }
                    drop(place);
                });
                // Let the new connection run before the next accept, however many clients wait.
                tokio::task::yield_now().await;
            }
            Err(problem) => {
                tracing::debug!(%problem, "a probe could not be accepted");
                tokio::time::sleep(warden_policies::defaults().server.accept_pause).await;
            }
        }
    }
}

async fn serve_connection(stream: TcpStream, kind: ProbeProtocol, board: Arc<ProbeBoard>) {
    let numbers = board.numbers().clone();
    if let ProbeProtocol::Agent = kind {
        let told = tokio::time::timeout(numbers.head_timeout, write_agent_line(stream, &board)).await;
        if let Ok(Err(problem)) = told {
            tracing::trace!(%problem, "the agent line could not be sent");
        }
        return;
    }
    let service = service_fn(move |request| {
        let board = board.clone();
        async move { http::answer(&board, request).await }
    });
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(numbers.head_timeout)
        .max_buf_size(numbers.head_bytes.in_memory());
    let served = builder.serve_connection(TokioIo::new(stream), service);
    tokio::pin!(served);
    tokio::select! {
        _ = served.as_mut() => return,
        () = tokio::time::sleep(numbers.connection_age) => served.as_mut().graceful_shutdown(),
    }
    // A client that has not read its answer within this time no longer reads.
    drop(tokio::time::timeout(numbers.head_timeout, served).await);
}

async fn write_agent_line(mut stream: TcpStream, board: &ProbeBoard) -> io::Result<()> {
    let line = format!("{}\n", board.agent_line());
    stream.write_all(line.as_bytes()).await?;
    stream.shutdown().await?;
    // Read pending input first: closing with unread input sends a reset, which could discard the line.
    let mut rest = [0; 256];
    for _ in 0..16 {
        if stream.read(&mut rest).await? == 0 {
            break;
        }
    }
    Ok(())
}

/// Open connections, oldest first.
struct ConnectionLimit {
    max_connections: usize,
    connections: Mutex<(u64, VecDeque<(u64, CancellationToken)>)>,
}

/// Removes the connection from the list on drop.
struct ConnectionSlot {
    number: u64,
    gone: CancellationToken,
    crowd: Arc<ConnectionLimit>,
}

impl ConnectionLimit {
    fn new(most: usize) -> Self {
        Self { max_connections: most.max(1), connections: Mutex::default() }
    }

    /// Beyond the limit, closes the oldest connection.
    fn add_connection(self: &Arc<Self>) -> ConnectionSlot {
        let mut inside = lock(&self.connections);
        let (next, all) = &mut *inside;
        *next += 1;
        let number = *next;
        let gone = CancellationToken::new();
        all.push_back((number, gone.clone()));
        while all.len() > self.max_connections {
            if let Some((_, oldest)) = all.pop_front() {
                oldest.cancel();
            }
        }
        ConnectionSlot { number, gone, crowd: self.clone() }
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        lock(&self.crowd.connections).1.retain(|(number, _)| *number != self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn when_too_many_are_connected_the_oldest_goes() {
        let crowd = Arc::new(ConnectionLimit::new(2));
        let (one, two) = (crowd.add_connection(), crowd.add_connection());
        assert!(!one.gone.is_cancelled());
        let three = crowd.add_connection();
        assert!(one.gone.is_cancelled() && !two.gone.is_cancelled());
        drop(two);
        let four = crowd.add_connection();
        assert!(!three.gone.is_cancelled() && !four.gone.is_cancelled());
        drop((one, three, four));
        assert!(lock(&crowd.connections).1.is_empty());
    }
}
