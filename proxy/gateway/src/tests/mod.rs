//! The gateway against scripted backends on Unix sockets, and leases that are counted.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixListener, UnixStream};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use warden_policies::dispatch::LeaseKind;
use warden_policies::health::{AnswerKeys, AnswerSigns};
use warden_policies::modes::OnDeath;
use warden_policies::quarantine::{RequestFingerprint, RequestStanding};
use warden_policies::{ByteSize, GenerationId, ModelName, ServerFacts, StreamHeadTime, WorkDone, defaults};
use warden_supervisor::{
    AnswerIdentity, CanaryRoute, ControlError, ConversationTurn, ExchangeOutcome as Ended, FleetView,
    LeaseAddress, LeaseDenied, ListenAddress, ModelState, ModelView, NextProcess, PromptFit, PromptSize,
    ResolveError, SolitudeResult,
};

use self::peer::{EVENTS, Peer, Upstream, json_answer, post};
use crate::backend::{
    BackendLease, BoxFuture, ConnectionPool, LeaseDemand, LeaseMode, LeaseProvider, SharedLease,
};
use crate::{
    Gateway, GatewayConfig, GatewayControl, GatewayGauges, GatewayObserver, LiveConfig, ModelRules,
    RequestRecord, RequestRegistry, StopTokens,
};

mod again;
mod behind_its_text;
mod canary;
mod cancel;
mod cancelled;
mod choice;
mod computation;
mod death;
mod encoded;
mod goes_on;
mod inline;
mod keys;
mod limits;
mod loading;
mod names;
mod outcomes;
mod passing;
mod peer;
mod remember;
mod router;
mod ruled;
mod slow;
mod stopping;
mod storm;
mod tls;
mod unread;
mod weighing;

/// Facts of a new build.
const NEW: ServerFacts = ServerFacts {
    stream_head: StreamHeadTime::BeforeFirstToken,
    unix_sockets: Some(true),
    http_threads: Some(ServerFacts::THREADS_ON_DEMAND),
    slot_files: None,
    discards_bodies: Some(true),
};

/// Identity of all generations.
const KIN: AnswerIdentity = AnswerIdentity { made_of: 1, but_for_binary: 1, answer_tokens: None };

/// Time limit of every wait in these tests.
const PATIENCE: Duration = Duration::from_secs(10);

/// Waits until `holds` returns true.
async fn eventually(what: &str, holds: impl Fn() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < until, "never: {what}");
        sleep(Duration::from_millis(2)).await;
    }
}

/// Waits until all connections are stalled: no further byte within 300 ms. Returns the bytes until then.
async fn stalled(written: &AtomicUsize) -> usize {
    let until = Instant::now() + PATIENCE * 9;
    let mut last = usize::MAX;
    while written.load(Ordering::SeqCst) != last || last == 0 {
        assert!(Instant::now() < until, "never stalls: {last} bytes");
        last = written.load(Ordering::SeqCst);
        sleep(Duration::from_millis(300)).await;
    }
    last
}

/// A model without a process.
pub(crate) fn unloaded(name: &ModelName, aliases: Vec<String>) -> ModelView {
    ModelView { aliases, ..ModelView::unloaded(name.clone()) }
}

/// Models whose generations are the given sockets, in order: each lease after a failed one gets the next.
struct TestBackends {
    models: Vec<ModelName>,
    any_name: bool,
    sockets: Vec<PathBuf>,
    /// Index of the socket for the next lease.
    turn: AtomicUsize,
    /// Advances with every lease.
    rotates: bool,
    room: Arc<Semaphore>,
    waiting: Arc<AtomicUsize>,
    live: Arc<AtomicUsize>,
    granted: AtomicUsize,
    pools: Mutex<HashMap<u64, Arc<ConnectionPool>>>,
    work: Arc<Mutex<Vec<WorkDone>>>,
    /// Answer bytes reported as progress.
    heard: AtomicUsize,
    /// Reported events with data.
    events: AtomicU64,
    /// Number of generations reported as broken.
    doubts: AtomicUsize,
    ended: Mutex<Vec<Ended>>,
    turns: Mutex<Vec<ConversationTurn>>,
    keeps_turns: AtomicBool,
    saves_for_us: AtomicBool,
    /// Tokens given with each request for a slot.
    demands: Mutex<Vec<Option<u64>>>,
    /// Tokens that fit, if prompts are weighed.
    room_tokens: Mutex<Option<u64>>,
    revoke: CancellationToken,
    /// True if the processes have ended.
    dead: AtomicBool,
    /// Address of another program that has the port of every generation; their processes are gone.
    stranger: Mutex<Option<SocketAddr>>,
    denied: Mutex<Option<LeaseDenied>>,
    /// State of the models in views, and for requests that load none; unloaded and ready if `None`.
    shown: Mutex<Option<ModelState>>,
    /// Models that a client unloaded.
    let_go: Mutex<Vec<String>>,
    /// Process that will serve the model; `None` while one serves it.
    coming: Mutex<Option<NextProcess>>,
    /// Facts of the backends' build.
    facts: Mutex<ServerFacts>,
    /// Quarantine state of all requests, and the reports about them.
    standing: Mutex<RequestStanding>,
    told: Mutex<Vec<&'static str>>,
    /// The processes take long to end: waits for that are counted, and last until this is notified.
    slow_end: Mutex<Option<Arc<Notify>>>,
    /// Identity of the generations after the first, if known.
    kin_of_later: Mutex<Option<AnswerIdentity>>,
    settling: AtomicUsize,
    /// The canary, and its socket if a lease is available.
    canary: Mutex<Option<(CanaryRoute, Option<PathBuf>)>>,
    granted_by_canary: AtomicUsize,
    /// Note at which the request `x` is cancelled.
    cancels_when: Mutex<Option<(&'static str, RequestRegistry)>>,
}

impl TestBackends {
    fn noted(&self, what: &'static str) {
        let when = self.cancels_when.lock().unwrap().take_if(|(when, _)| *when == what);
        if let Some((_, requests)) = when {
            requests.cancel("x", None).unwrap();
        }
    }
}

/// Generation of the canary.
const CANARY: u64 = 99;

struct Waiting(Arc<AtomicUsize>);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

struct TestRight {
    address: LeaseAddress,
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

impl LeaseProvider for Shell {
    fn takes_any_name(&self) -> bool {
        self.0.any_name
    }

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
        _: &'a ModelName,
        demand: LeaseDemand,
    ) -> BoxFuture<'a, Result<Option<SharedLease>, LeaseDenied>> {
        let LeaseDemand { kind, prompt, mode } = demand;
        let backends = self.0.clone();
        if mode == LeaseMode::IfLoaded && *backends.shown.lock().unwrap() == Some(ModelState::Unloaded) {
            return Box::pin(async { Ok(None) });
        }
        if kind == LeaseKind::Slot {
            backends.demands.lock().unwrap().push(prompt.tokens);
        }
        Box::pin(async move {
            if let Some(denied) = backends.denied.lock().unwrap().clone() {
                return Err(denied);
            }
            backends.waiting.fetch_add(1, Ordering::SeqCst);
            let waiting = Waiting(backends.waiting.clone());
            let room = backends.room.clone().acquire_owned().await.unwrap();
            drop(waiting);
            if let Some(denied) = backends.denied.lock().unwrap().clone() {
                return Err(denied);
            }
            let turn = backends.turn.load(Ordering::SeqCst);
            if backends.rotates {
                backends.turn.fetch_add(1, Ordering::SeqCst);
            }
            let turn = turn.min(backends.sockets.len() - 1);
            backends.live.fetch_add(1, Ordering::SeqCst);
            backends.granted.fetch_add(1, Ordering::SeqCst);
            let stranger = *backends.stranger.lock().unwrap();
            let endpoint = stranger
                .map_or_else(|| ListenAddress::Unix(backends.sockets[turn].clone()), ListenAddress::Tcp);
            Ok(Some(Arc::new(TestRight {
                address: endpoint.into(),
                generation: turn as u64,
                backends,
                _room: room,
            }) as SharedLease))
        })
    }

    fn unload(&self, model: &ModelName, by: &str) -> Result<(), ControlError> {
        self.0.let_go.lock().unwrap().push(format!("{model} by {by}"));
        Ok(())
    }

    fn canary(&self, _: &ModelName) -> Option<CanaryRoute> {
        self.0.canary.lock().unwrap().as_ref().map(|(route, _)| route.clone())
    }

    fn lease_now(&self, _: &ModelName, _: LeaseKind, _: Option<u64>) -> Option<SharedLease> {
        let socket = self.0.canary.lock().unwrap().as_ref()?.1.clone()?;
        let room = self.0.room.clone().try_acquire_owned().ok()?;
        self.0.live.fetch_add(1, Ordering::SeqCst);
        self.0.granted_by_canary.fetch_add(1, Ordering::SeqCst);
        let (generation, backends) = (CANARY, self.0.clone());
        Some(Arc::new(TestRight {
            address: ListenAddress::Unix(socket).into(),
            generation,
            backends,
            _room: room,
        }))
    }

    fn weigh_prompt(&self, _: &ModelName, size: PromptSize) -> PromptFit {
        let Some(room) = *self.0.room_tokens.lock().unwrap() else { return PromptFit::NotChecked };
        let tokens = match size {
            PromptSize::Bytes(bytes) => bytes / 3,
            PromptSize::Tokens(tokens) => tokens,
        };
        if tokens <= room { PromptFit::Fits { tokens } } else { PromptFit::Unclear { tokens } }
    }

    fn refuses_requests(&self, _: &ModelName) -> bool {
        false
    }

    fn has_room(&self, _: &ModelName) -> bool {
        true
    }

    fn needs_conversation_key(&self, _: &ModelName) -> bool {
        false
    }

    fn has_faulty_answers(&self, _: &ModelName) -> bool {
        false
    }

    fn next_process(&self, _: &ModelName) -> Option<NextProcess> {
        *self.0.coming.lock().unwrap()
    }

    fn request_standing(&self, _: &ModelName, _: RequestFingerprint) -> RequestStanding {
        *self.0.standing.lock().unwrap()
    }

    fn note_refusal(&self, _: &ModelName, _: RequestFingerprint) {
        self.0.told.lock().unwrap().push("refusal");
    }

    fn view(&self) -> Arc<FleetView> {
        let one = |name: &ModelName| ModelView {
            was_ready: true,
            n_ctx: Some(4096),
            state: self.0.shown.lock().unwrap().unwrap_or(ModelState::Unloaded),
            pin: warden_supervisor::PinView { pinned: name.as_str() == "pinned", by: None },
            ..unloaded(name, vec![format!("alias-of-{name}")])
        };
        Arc::new(FleetView {
            number: 1,
            models: self.0.models.iter().map(one).map(Arc::new).collect(),
            ..FleetView::default()
        })
    }
}

impl BackendLease for TestRight {
    fn generation(&self) -> GenerationId {
        GenerationId(self.generation)
    }
    fn address(&self) -> &LeaseAddress {
        &self.address
    }
    fn is_canary(&self) -> bool {
        self.generation == CANARY
    }
    fn is_running(&self) -> bool {
        matches!(self.address, LeaseAddress::Process(ListenAddress::Unix(_)))
            && !self.backends.dead.load(Ordering::SeqCst)
    }
    fn was_stopped(&self) -> bool {
        !self.backends.dead.load(Ordering::SeqCst)
    }
    fn kin(&self) -> Option<AnswerIdentity> {
        if self.generation == CANARY {
            return Some(AnswerIdentity { made_of: 2, ..KIN });
        }
        if self.generation == 0 { Some(KIN) } else { *self.backends.kin_of_later.lock().unwrap() }
    }

    fn queued_for(&self) -> Duration {
        Duration::ZERO
    }
    fn add_work(&self, work: WorkDone) {
        self.backends.work.lock().unwrap().push(work);
    }
    fn note_outcome(&self, outcome: &Ended) {
        self.backends.ended.lock().unwrap().push(*outcome);
        self.backends.noted("outcome");
    }
    fn watches_answers(&self) -> bool {
        true
    }
    fn record_answer(&self, _: AnswerSigns, _: AnswerKeys) {}
    fn note_progress(&self, bytes: usize) {
        self.backends.heard.fetch_add(bytes, Ordering::SeqCst);
    }
    fn note_sent(&self, _: Arc<crate::body::sent::SentBody>, _: bool) {}
    fn note_answered(&self, _: bool, _: bool) {
        self.backends.noted("answered");
    }
    fn note_waiting(&self, _: Instant) {}
    fn note_events(&self, events: u64) {
        self.backends.events.fetch_add(events, Ordering::SeqCst);
    }
    fn note_pause(&self) {}
    fn keeps_turns(&self) -> bool {
        self.backends.keeps_turns.load(Ordering::SeqCst)
    }
    fn note_turn(&self, turn: ConversationTurn) {
        self.backends.turns.lock().unwrap().push(turn);
    }
    fn saves_for_us(&self) -> bool {
        self.backends.saves_for_us.load(Ordering::SeqCst)
    }
    fn note_setting(&self, _: &str, _: bytes::Bytes) {}
    fn pool(&self, init: &dyn Fn() -> ConnectionPool) -> Arc<ConnectionPool> {
        let mut pools = self.backends.pools.lock().unwrap();
        pools.entry(self.generation).or_insert_with(|| Arc::new(init())).clone()
    }
    fn doubt(&self) {
        self.backends.doubts.fetch_add(1, Ordering::SeqCst);
    }

    fn server_facts(&self) -> ServerFacts {
        *self.backends.facts.lock().unwrap()
    }

    fn request_standing(&self, _: RequestFingerprint) -> RequestStanding {
        *self.backends.standing.lock().unwrap()
    }

    fn report_broken(&self, _: RequestFingerprint) {
        self.backends.told.lock().unwrap().push("broke");
    }

    fn report_lost(&self, _: RequestFingerprint) {
        self.backends.told.lock().unwrap().push("lost");
    }

    fn settled(&self) -> BoxFuture<'static, ()> {
        self.backends.settling.fetch_add(1, Ordering::SeqCst);
        let end = self.backends.slow_end.lock().unwrap().clone();
        Box::pin(async {
            if let Some(end) = end {
                end.notified().await;
            }
        })
    }

    fn alone(self: Arc<Self>, _: RequestFingerprint) -> BoxFuture<'static, SolitudeResult> {
        self.backends.told.lock().unwrap().push("alone");
        Box::pin(async { SolitudeResult::Granted })
    }

    fn is_alone(&self) -> bool {
        self.backends.told.lock().unwrap().contains(&"alone")
    }

    fn solitude_limit(&self, _: RequestFingerprint) -> Duration {
        PATIENCE
    }

    fn end_solitude(&self) {}

    fn note_survival(&self, _: RequestFingerprint) {
        self.backends.told.lock().unwrap().push("survived");
    }

    fn done(&self) {}

    fn mark_read_only(&self) {}

    fn mark_endless(&self) {
        self.backends.told.lock().unwrap().push("watches");
    }

    fn revoked(self: Arc<Self>) -> BoxFuture<'static, ()> {
        // Like the supervisor's, the future holds the lease while it is awaited. A revocation that came
        // before this call is not seen: a later caller has another generation.
        let later = self.backends.revoke.is_cancelled();
        Box::pin(async move {
            if later {
                std::future::pending::<()>().await;
            }
            self.backends.revoke.cancelled().await;
        })
    }
}

#[derive(Default)]
struct Records(Mutex<Vec<RequestRecord>>);

impl GatewayObserver for Records {
    fn request_done(&self, record: &RequestRecord) {
        self.0.lock().unwrap().push(record.clone());
    }
}

/// Setup of a rig.
struct Plan {
    models: Vec<&'static str>,
    any_name: bool,
    rotates: bool,
    room: usize,
    config: GatewayConfig,
    /// Applies to every model. Most tests check the error after a death.
    on_death: OnDeath,
}

impl Default for Plan {
    fn default() -> Self {
        let mut config = GatewayConfig::new(&defaults().server, &defaults().upstream);
        config.server.port = 0;
        config.server.linger = Duration::from_millis(500);
        Self {
            models: vec!["m"],
            any_name: false,
            rotates: false,
            room: 10_000,
            config,
            on_death: OnDeath::Error,
        }
    }
}

/// A running gateway in front of test backends.
struct Rig {
    address: SocketAddr,
    backends: Arc<TestBackends>,
    records: Arc<Records>,
    gauges: Arc<GatewayGauges>,
    tls: Option<Arc<crate::TlsState>>,
    control: GatewayControl,
    requests: RequestRegistry,
    stop: CancellationToken,
    /// Cancelled when another instance takes over.
    retire: CancellationToken,
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
            heard: AtomicUsize::new(0),
            events: AtomicU64::new(0),
            doubts: AtomicUsize::new(0),
            ended: Mutex::default(),
            turns: Mutex::default(),
            keeps_turns: AtomicBool::new(false),
            saves_for_us: AtomicBool::new(false),
            demands: Mutex::default(),
            room_tokens: Mutex::default(),
            coming: Mutex::default(),
            revoke: CancellationToken::new(),
            dead: AtomicBool::new(false),
            stranger: Mutex::default(),
            denied: Mutex::default(),
            shown: Mutex::default(),
            let_go: Mutex::default(),
            facts: Mutex::new(NEW),
            standing: Mutex::new(RequestStanding::Clear),
            slow_end: Mutex::default(),
            kin_of_later: Mutex::new(Some(KIN)),
            settling: AtomicUsize::new(0),
            canary: Mutex::default(),
            granted_by_canary: AtomicUsize::new(0),
            cancels_when: Mutex::default(),
            told: Mutex::default(),
        });
        let records = Arc::new(Records::default());
        let bound = Gateway::bind(plan.config).await.unwrap();
        let (address, gauges, ends) = (bound.local_addr(), bound.gauges(), StopTokens::default());
        let (control, requests) = (bound.control(), bound.requests());
        let rules = Arc::new(ModelRules { on_death: plan.on_death, ..ModelRules::default() });
        let models = plan.models.iter().map(|model| (ModelName::new(model), rules.clone())).collect();
        control.update(LiveConfig { models, ..LiveConfig::default() });
        let tls = bound.tls();
        let mut serving = JoinSet::new();
        serving.spawn(bound.serve_backends(Arc::new(Shell(backends.clone())), records.clone(), ends.clone()));
        Self {
            address,
            backends,
            records,
            gauges,
            tls,
            control,
            requests,
            stop: ends.stop,
            retire: ends.retire,
            serving,
        }
    }

    async fn client(&self) -> Peer<TcpStream> {
        Peer::new(TcpStream::connect(self.address).await.unwrap())
    }

    /// Sends one request on its own connection and returns the answer.
    async fn ask(&self, request: &[u8]) -> (String, String) {
        let mut client = self.client().await;
        client.send(request).await;
        let (head, body) = client.response().await;
        (head, String::from_utf8(body).unwrap())
    }

    fn live(&self) -> usize {
        self.backends.live.load(Ordering::SeqCst)
    }

    /// Returns the record of the `n`th request that ended, from 0.
    async fn record(&self, n: usize) -> RequestRecord {
        eventually("the record", || self.records.0.lock().unwrap().len() > n).await;
        self.records.0.lock().unwrap()[n].clone()
    }

    /// Waits until everything was freed.
    async fn is_clean(&self) {
        eventually("no lease is held", || self.live() == 0).await;
        eventually("no byte is held", || self.gauges.held_bytes.load(Ordering::SeqCst) == 0).await;
        eventually("nothing is in flight", || self.gauges.in_flight.load(Ordering::SeqCst) == 0).await;
        eventually("nothing is shown as in flight", || self.requests.in_flight() == 0).await;
        assert_eq!(self.backends.waiting.load(Ordering::SeqCst), 0);
    }
}

/// A backend that sends events without end, but answers a path with `/quick` at once. It counts the bytes
/// taken. `room`: size of its socket's send buffer in bytes.
fn endless(written: &Arc<AtomicUsize>, room: Option<usize>) -> Upstream {
    let count = written.clone();
    Upstream::start(move |mut peer| {
        let count = count.clone();
        async move {
            if let Some(room) = room {
                rustix::net::sockopt::set_socket_send_buffer_size(&peer.stream, room).unwrap();
            }
            let Some((head, _)) = peer.request().await else { return };
            if head.contains("/quick") {
                peer.send(&json_answer("{}")).await;
                return;
            }
            peer.send(EVENTS).await;
            let chunk = [b"1000\r\n".as_slice(), &[b'x'; 0xffe], b"\n\n\r\n"].concat();
            while peer.stream.write_all(&chunk).await.is_ok() {
                count.fetch_add(chunk.len(), Ordering::SeqCst);
                // Up to a thousand of these share a thread with the rest of the test.
                tokio::task::yield_now().await;
            }
        }
    })
}
