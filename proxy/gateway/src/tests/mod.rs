//! The gateway against backends that do exactly what a test wants: a listener on a Unix socket whose connections are
//! handled byte by byte, and leases that are counted.

mod cancel;
mod choice;
mod death;
mod limits;
mod passing;
mod stopping;
mod storm;

use std::collections::HashMap;
use std::future::Future;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tempfile::TempDir;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use warden_policies::dispatch::LeaseKind;
use warden_policies::{GenerationId, ModelName, Work, defaults};
use warden_supervisor::{Denied, Endpoint, FleetView, ModelState, ModelView, ResolveError};

use crate::backends::{Backends, BoxFuture, Right};
use crate::pool::Pool;
use crate::{Gateway, GatewayConfig, Gauges, Observer, Record};

/// Nothing in these tests takes longer.
const PATIENCE: Duration = Duration::from_secs(10);

/// Waits until `holds` says so.
async fn eventually(what: &str, holds: impl Fn() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < until, "never: {what}");
        sleep(Duration::from_millis(2)).await;
    }
}

/// One generation: a socket, and what its connections do.
struct Upstream {
    path: PathBuf,
    open: Arc<AtomicUsize>,
    accepted: Arc<AtomicUsize>,
    tasks: JoinSet<()>,
    _dir: TempDir,
}

impl Upstream {
    /// Each connection is given to `handle`; it counts as open until `handle` returns.
    fn start<F, R>(handle: F) -> Self
    where
        F: Fn(Peer<UnixStream>) -> R + Send + Sync + 'static,
        R: Future<Output = ()> + Send + 'static,
    {
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("s.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let (open, accepted) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (open_inside, accepted_inside) = (open.clone(), accepted.clone());
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                accepted_inside.fetch_add(1, Ordering::SeqCst);
                open_inside.fetch_add(1, Ordering::SeqCst);
                let (handling, done) = (handle(Peer::new(stream)), open_inside.clone());
                connections.spawn(async move {
                    handling.await;
                    done.fetch_sub(1, Ordering::SeqCst);
                });
            }
        });
        Self { path, open, accepted, tasks, _dir: dir }
    }

    /// Answers every request on a connection with what `answer` makes of its head and body.
    fn answering(answer: impl Fn(&str, &[u8]) -> Vec<u8> + Send + Sync + 'static) -> Self {
        let answer = Arc::new(answer);
        Self::start(move |mut peer| {
            let answer = answer.clone();
            async move {
                while let Some((head, body)) = peer.request().await {
                    peer.send(&answer(&head, &body)).await;
                }
            }
        })
    }

    fn open(&self) -> usize {
        self.open.load(Ordering::SeqCst)
    }

    fn accepted(&self) -> usize {
        self.accepted.load(Ordering::SeqCst)
    }
}

/// One end of a connection, read message by message.
struct Peer<S> {
    stream: S,
    buffer: Vec<u8>,
}

impl<S: AsyncRead + tokio::io::AsyncWrite + Unpin> Peer<S> {
    fn new(stream: S) -> Self {
        Self { stream, buffer: Vec::new() }
    }

    async fn send(&mut self, bytes: &[u8]) {
        // A peer that has left is the test's business.
        let _left = self.stream.write_all(bytes).await;
    }

    /// Reads more; false at the end.
    async fn more(&mut self) -> bool {
        let read = timeout(PATIENCE, self.stream.read_buf(&mut self.buffer)).await.expect("bytes or an end");
        read.unwrap_or(0) > 0
    }

    /// Reads until the connection ends.
    async fn rest(&mut self) -> Vec<u8> {
        while self.more().await {}
        std::mem::take(&mut self.buffer)
    }

    /// Reads until `text` was received; everything up to and with it.
    async fn until(&mut self, text: &str) -> String {
        loop {
            if let Some(at) = memchr::memmem::find(&self.buffer, text.as_bytes()) {
                let rest = self.buffer.split_off(at + text.len());
                return String::from_utf8(std::mem::replace(&mut self.buffer, rest)).unwrap();
            }
            assert!(self.more().await, "no {text:?} in {:?}", String::from_utf8_lossy(&self.buffer));
        }
    }

    /// A request with its body; `None` when the peer has closed.
    async fn request(&mut self) -> Option<(String, Vec<u8>)> {
        while memchr::memmem::find(&self.buffer, b"\r\n\r\n").is_none() {
            if self.stream.read_buf(&mut self.buffer).await.unwrap_or(0) == 0 {
                return None;
            }
        }
        let head = self.until("\r\n\r\n").await;
        let body = self.body(&head).await;
        Some((head, body))
    }

    /// A response with its body.
    async fn response(&mut self) -> (String, Vec<u8>) {
        let head = self.until("\r\n\r\n").await;
        let body = self.body(&head).await;
        (head, body)
    }

    async fn body(&mut self, head: &str) -> Vec<u8> {
        let field = |name: &str| {
            let line =
                head.lines().find(|line| line.to_ascii_lowercase().starts_with(&format!("{name}:")))?;
            Some(line.split_once(':')?.1.trim().to_owned())
        };
        if let Some(length) = field("content-length") {
            let length: usize = length.parse().unwrap();
            while self.buffer.len() < length && self.more().await {}
            let rest = self.buffer.split_off(length.min(self.buffer.len()));
            return std::mem::replace(&mut self.buffer, rest);
        }
        let mut body = Vec::new();
        if field("transfer-encoding").is_some() {
            while let Some(piece) = self.chunk().await {
                body.extend(piece);
            }
        }
        body
    }

    /// One chunk; `None` for the last one.
    async fn chunk(&mut self) -> Option<Vec<u8>> {
        let size = self.until("\r\n").await;
        let size = usize::from_str_radix(size.trim(), 16).unwrap();
        while self.buffer.len() < size + 2 && self.more().await {}
        let mut rest = self.buffer.split_off(size);
        rest.drain(..2);
        let piece = std::mem::replace(&mut self.buffer, rest);
        (size > 0).then_some(piece)
    }

    async fn send_chunk(&mut self, bytes: &[u8]) {
        let mut chunk = format!("{:x}\r\n", bytes.len()).into_bytes();
        chunk.extend_from_slice(bytes);
        chunk.extend_from_slice(b"\r\n");
        self.send(&chunk).await;
    }
}

const EVENTS: &[u8] =
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\nKeep-Alive: timeout=5, max=100\r\n\r\n";

fn json_answer(body: &str) -> Vec<u8> {
    format!(
        "HTTP/1.1 200 OK\r\nContent-Type: application/json; charset=utf-8\r\nKeep-Alive: timeout=5, max=100\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

fn post(path: &str, body: &str) -> Vec<u8> {
    format!("POST {path} HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}", body.len())
        .into_bytes()
}

/// Models whose generations are the given sockets, in order: each lease after a failed one gets the next.
struct TestBackends {
    models: Vec<ModelName>,
    any_name: bool,
    sockets: Vec<PathBuf>,
    /// Which socket the next lease gets.
    turn: AtomicUsize,
    /// Moves on with every lease.
    rotates: bool,
    room: Arc<Semaphore>,
    waiting: Arc<AtomicUsize>,
    live: Arc<AtomicUsize>,
    granted: AtomicUsize,
    pools: Mutex<HashMap<u64, Arc<Pool>>>,
    work: Arc<Mutex<Vec<Work>>>,
    revoke: CancellationToken,
    denied: Mutex<Option<Denied>>,
}

struct Waiting(Arc<AtomicUsize>);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

struct TestRight {
    endpoint: Endpoint,
    generation: u64,
    backends: Arc<TestBackends>,
    _room: OwnedSemaphorePermit,
}

impl Drop for TestRight {
    fn drop(&mut self) {
        self.backends.live.fetch_sub(1, Ordering::SeqCst);
    }
}

struct Shell(Arc<TestBackends>);

impl Backends for Shell {
    fn resolve(&self, name: Option<&str>) -> Result<ModelName, ResolveError> {
        let models = &self.0.models;
        let known = || models.iter().map(ToString::to_string).collect();
        match name {
            _ if self.0.any_name => Ok(models[0].clone()),
            None if models.len() == 1 => Ok(models[0].clone()),
            None => Err(ResolveError::Missing { known: known() }),
            Some(name) => models
                .iter()
                .find(|model| model.as_str() == name || format!("alias-of-{model}") == name)
                .cloned()
                .ok_or_else(|| ResolveError::Unknown { name: name.to_owned(), known: known() }),
        }
    }

    fn lease<'a>(
        &'a self,
        model: &'a ModelName,
        _: LeaseKind,
    ) -> BoxFuture<'a, Result<Arc<dyn Right>, Denied>> {
        let backends = self.0.clone();
        let _ = model;
        Box::pin(async move {
            if let Some(denied) = backends.denied.lock().unwrap().clone() {
                return Err(denied);
            }
            backends.waiting.fetch_add(1, Ordering::SeqCst);
            let waiting = Waiting(backends.waiting.clone());
            let room = backends.room.clone().acquire_owned().await.unwrap();
            drop(waiting);
            let turn = backends.turn.load(Ordering::SeqCst);
            if backends.rotates {
                backends.turn.fetch_add(1, Ordering::SeqCst);
            }
            let turn = turn.min(backends.sockets.len() - 1);
            backends.live.fetch_add(1, Ordering::SeqCst);
            backends.granted.fetch_add(1, Ordering::SeqCst);
            let endpoint = Endpoint::Unix(backends.sockets[turn].clone());
            Ok(Arc::new(TestRight { endpoint, generation: turn as u64, backends, _room: room })
                as Arc<dyn Right>)
        })
    }

    fn view(&self) -> Arc<FleetView> {
        let one = |name: &ModelName| ModelView {
            name: name.clone(),
            aliases: vec![format!("alias-of-{name}")],
            state: ModelState::Unloaded,
            waiting: 0,
            queue_depth: 1,
            backends: Vec::new(),
            recycles: Vec::new(),
            crashes: 0,
            n_ctx: Some(4096),
            policy: None,
            last_failure: None,
            replace_note: None,
        };
        Arc::new(FleetView { number: 1, models: self.0.models.iter().map(one).collect() })
    }
}

impl Right for TestRight {
    fn generation(&self) -> GenerationId {
        GenerationId(self.generation)
    }
    fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }
    fn queued_for(&self) -> Duration {
        Duration::ZERO
    }
    fn add_work(&self, work: Work) {
        self.backends.work.lock().unwrap().push(work);
    }
    fn note_progress(&self) {}
    fn pool(&self, init: &dyn Fn() -> Pool) -> Arc<Pool> {
        let mut pools = self.backends.pools.lock().unwrap();
        pools.entry(self.generation).or_insert_with(|| Arc::new(init())).clone()
    }
    fn revoked(self: Arc<Self>) -> BoxFuture<'static, ()> {
        let revoke = self.backends.revoke.clone();
        Box::pin(async move { revoke.cancelled().await })
    }
}

#[derive(Default)]
struct Records(Mutex<Vec<Record>>);

impl Observer for Records {
    fn request_done(&self, record: &Record) {
        self.0.lock().unwrap().push(record.clone());
    }
}

/// How a rig is set up.
struct Plan {
    models: Vec<&'static str>,
    any_name: bool,
    rotates: bool,
    room: usize,
    config: GatewayConfig,
}

impl Default for Plan {
    fn default() -> Self {
        let mut config = GatewayConfig::from(defaults());
        config.port = 0;
        config.linger = Duration::from_millis(500);
        Self { models: vec!["m"], any_name: false, rotates: false, room: 10_000, config }
    }
}

/// A running gateway in front of test backends.
struct Rig {
    address: SocketAddr,
    backends: Arc<TestBackends>,
    records: Arc<Records>,
    gauges: Arc<Gauges>,
    stop: CancellationToken,
    serving: JoinSet<()>,
}

impl Rig {
    async fn start(upstreams: &[&Upstream]) -> Self {
        Self::with(Plan::default(), upstreams).await
    }

    async fn with(plan: Plan, upstreams: &[&Upstream]) -> Self {
        let backends = Arc::new(TestBackends {
            models: plan.models.iter().map(ModelName::new).collect(),
            any_name: plan.any_name,
            sockets: upstreams.iter().map(|upstream| upstream.path.clone()).collect(),
            turn: AtomicUsize::new(0),
            rotates: plan.rotates,
            room: Arc::new(Semaphore::new(plan.room)),
            waiting: Arc::default(),
            live: Arc::default(),
            granted: AtomicUsize::new(0),
            pools: Mutex::default(),
            work: Arc::default(),
            revoke: CancellationToken::new(),
            denied: Mutex::default(),
        });
        let records = Arc::new(Records::default());
        let bound = Gateway::bind(plan.config).await.unwrap();
        let (address, gauges, stop) = (bound.local_addr(), bound.gauges(), CancellationToken::new());
        let mut serving = JoinSet::new();
        serving.spawn(bound.serve_backends(Arc::new(Shell(backends.clone())), records.clone(), stop.clone()));
        Self { address, backends, records, gauges, stop, serving }
    }

    async fn client(&self) -> Peer<TcpStream> {
        Peer::new(TcpStream::connect(self.address).await.unwrap())
    }

    /// One request on its own connection, answered.
    async fn ask(&self, request: &[u8]) -> (String, String) {
        let mut client = self.client().await;
        client.send(request).await;
        let (head, body) = client.response().await;
        (head, String::from_utf8(body).unwrap())
    }

    fn live(&self) -> usize {
        self.backends.live.load(Ordering::SeqCst)
    }

    /// The record of the request that ended as the `n`th, from 0.
    async fn record(&self, n: usize) -> Record {
        eventually("the record", || self.records.0.lock().unwrap().len() > n).await;
        self.records.0.lock().unwrap()[n].clone()
    }

    /// Everything was given back.
    async fn is_clean(&self) {
        eventually("no lease is held", || self.live() == 0).await;
        eventually("no byte is held", || self.gauges.held_bytes.load(Ordering::SeqCst) == 0).await;
        eventually("nothing is in flight", || self.gauges.in_flight.load(Ordering::SeqCst) == 0).await;
        assert_eq!(self.backends.waiting.load(Ordering::SeqCst), 0);
    }
}
