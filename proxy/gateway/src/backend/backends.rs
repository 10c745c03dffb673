//! The traits between gateway and supervisor, which tests implement with their own backends.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;
use warden_policies::dispatch::LeaseKind;
use warden_policies::health::{AnswerKeys, AnswerSigns};
use warden_policies::quarantine::{RequestFingerprint, RequestStanding};
use warden_policies::{GenerationId, ModelName, ServerFacts, WorkDone};
use warden_supervisor::{
    AnswerIdentity, CanaryRoute, ControlError, ConversationTurn, ExchangeOutcome, Fleet, FleetView, Lease,
    LeaseAddress, LeaseDenied, NextProcess, PromptFacts, PromptFit, PromptSize, ResolveError, SolitudeResult,
};

use crate::backend::ConnectionPool;
use crate::body::SentBody;
use crate::refusal::RequestRefusal;

pub(crate) type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

pub(crate) type SharedLease = Arc<dyn BackendLease>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LeaseMode {
    /// Waits in the model's queue, unless the queue is full.
    First,
    /// Waits even if the queue is full, because the request's generation has died.
    Again,
    /// Loads no model, but waits for a process that is starting or being replaced.
    IfLoaded,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct LeaseDemand {
    pub(crate) kind: LeaseKind,
    pub(crate) prompt: PromptFacts,
    pub(crate) mode: LeaseMode,
}

pub(crate) trait LeaseProvider: Send + Sync + 'static {
    fn resolve(&self, name: Option<&str>) -> Result<ModelName, ResolveError>;
    /// Returns whether every name resolves to the only model.
    fn takes_any_name(&self) -> bool;
    /// Waits for a lease. `None` only with [`LeaseMode::IfLoaded`], if the model is not loaded.
    fn lease<'a>(
        &'a self,
        model: &'a ModelName,
        demand: LeaseDemand,
    ) -> BoxFuture<'a, Result<Option<SharedLease>, LeaseDenied>>;
    /// Unloads a model after its requests have ended. `by` names the requester.
    fn unload(&self, model: &ModelName, by: &str) -> Result<(), ControlError>;
    fn canary(&self, model: &ModelName) -> Option<CanaryRoute>;
    /// Takes a lease only if one is available at once.
    fn lease_now(&self, model: &ModelName, kind: LeaseKind, tokens: Option<u64>) -> Option<SharedLease>;
    fn weigh_prompt(&self, model: &ModelName, size: PromptSize) -> PromptFit;
    /// Describes the next process of a model; `None` while a process serves the model.
    fn next_process(&self, model: &ModelName) -> Option<NextProcess>;
    fn refuses_requests(&self, model: &ModelName) -> bool;
    /// Returns whether a model is loaded, or fits without unloading another, as far as sizes are known.
    fn has_room(&self, model: &ModelName) -> bool;
    /// Returns whether requests to the model need a conversation key.
    fn needs_conversation_key(&self, model: &ModelName) -> bool;
    /// Returns whether the model's latest judged answer has a fault.
    fn has_faulty_answers(&self, model: &ModelName) -> bool;
    fn request_standing(&self, model: &ModelName, request: RequestFingerprint) -> RequestStanding;
    fn note_refusal(&self, model: &ModelName, request: RequestFingerprint);
    fn view(&self) -> Arc<FleetView>;
}

/// The right to send one request to a generation. Ends when the last handle is dropped.
pub(crate) trait BackendLease: Send + Sync + 'static {
    fn generation(&self) -> GenerationId;
    /// Returns whether the generation is a canary, for which the model's normal build can step in.
    fn is_canary(&self) -> bool;
    fn address(&self) -> &LeaseAddress;
    /// Asks the kernel whether the generation's process still runs. If not, another process may own its port.
    fn is_running(&self) -> bool;
    /// Returns whether llama-warden stopped the process. A lease is also revoked when its process dies.
    fn was_stopped(&self) -> bool;
    fn queued_for(&self) -> Duration;
    /// Identity of the generation: equal for the same command, binary and files. `None` if unknown.
    fn kin(&self) -> Option<AnswerIdentity>;
    fn add_work(&self, work: WorkDone);
    fn note_outcome(&self, outcome: &ExchangeOutcome);
    /// Returns whether answers are to be judged.
    fn watches_answers(&self) -> bool;
    /// Records what an answer shows about faults.
    fn record_answer(&self, signs: AnswerSigns, keys: AnswerKeys);
    /// Records that `bytes` bytes of an answer arrived (0 for its head), so the backend is alive.
    fn note_progress(&self, bytes: usize);
    /// Records that a request is sent. `streams`: it asks for a stream.
    fn note_sent(&self, asked: Arc<SentBody>, streams: bool);
    /// Records the answer's head. `streams`: an event stream follows; `succeeds`: the status is a success.
    fn note_answered(&self, streams: bool, succeeds: bool);
    /// Records that the client has read everything since `since` and waits for more.
    fn note_waiting(&self, since: Instant);
    /// Records that events with data arrived: the backend is computing.
    fn note_events(&self, events: u64);
    fn note_setting(&self, path: &str, body: Bytes);
    /// Records that this request needs no computation at the moment.
    fn note_pause(&self);
    /// Returns whether conversations are kept for the model's next process.
    fn keeps_turns(&self) -> bool;
    /// Records a completely answered request.
    fn note_turn(&self, turn: ConversationTurn);
    /// Returns whether saving slots is reserved for the supervisor.
    fn saves_for_us(&self) -> bool;
    /// Returns the generation's connection pool, created with `init` on first use.
    fn pool(&self, init: &dyn Fn() -> ConnectionPool) -> Arc<ConnectionPool>;
    /// Reports a broken connection. A dying process must get no request, so a probe comes first.
    fn doubt(&self);
    fn server_facts(&self) -> ServerFacts;
    fn request_standing(&self, request: RequestFingerprint) -> RequestStanding;
    /// Reports a connection that broke after the whole request was sent.
    fn report_broken(&self, request: RequestFingerprint);
    /// Reports a lease that was revoked after the whole request was sent.
    fn report_lost(&self, request: RequestFingerprint);
    /// Resolves when the fate of the process is known after such a report. Holds no lease.
    fn settled(&self) -> BoxFuture<'static, ()>;
    /// Waits until no other request occupies a slot of the generation, so that a suspect can run alone.
    fn alone(self: Arc<Self>, request: RequestFingerprint) -> BoxFuture<'static, SolitudeResult>;
    /// Returns whether the generation admits no other request now.
    fn is_alone(&self) -> bool;
    /// Returns how long other requests wait while this suspect runs alone.
    fn solitude_limit(&self, request: RequestFingerprint) -> Duration;
    fn end_solitude(&self);
    fn note_survival(&self, request: RequestFingerprint);
    /// Reports that the answer is complete. Otherwise, dropping the lease means that the client left.
    fn done(&self);
    /// Reports that the request only reads state, so that it may run next to a suspect.
    fn mark_read_only(&self);
    fn mark_endless(&self);
    /// Resolves when the generation has to end although requests still hold leases.
    fn revoked(self: Arc<Self>) -> BoxFuture<'static, ()>;
}

impl dyn BackendLease {
    /// Reports a complete answer: the request with fingerprint `print` is no longer a suspect.
    pub(crate) fn note_whole_answer(&self, print: Option<RequestFingerprint>) {
        self.done();
        if let Some(print) = print.filter(|print| self.request_standing(*print) == RequestStanding::Suspect) {
            self.note_survival(print);
        }
    }

    /// Returns the refusal of a request that is not sent again after its lease was revoked.
    pub(crate) fn revoked_refusal(&self, model: &ModelName) -> RequestRefusal {
        let model = model.clone();
        if self.was_stopped() { RequestRefusal::Revoked { model } } else { RequestRefusal::Died { model } }
    }
}

/// Implements trait methods by the inherent methods of the same names.
macro_rules! its_own {
    ($type:ident: $(fn $name:ident(&self $(, $arg:ident: $of:ty)*) $(-> $gives:ty)?;)*) => {
        $(fn $name(&self $(, $arg: $of)*) $(-> $gives)? {
            $type::$name(self $(, $arg)*)
        })*
    };
}

impl LeaseProvider for Fleet {
    its_own! { Fleet:
        fn resolve(&self, name: Option<&str>) -> Result<ModelName, ResolveError>;
        fn takes_any_name(&self) -> bool;
        fn canary(&self, model: &ModelName) -> Option<CanaryRoute>;
        fn weigh_prompt(&self, model: &ModelName, size: PromptSize) -> PromptFit;
        fn next_process(&self, model: &ModelName) -> Option<NextProcess>;
        fn has_room(&self, model: &ModelName) -> bool;
        fn needs_conversation_key(&self, model: &ModelName) -> bool;
        fn has_faulty_answers(&self, model: &ModelName) -> bool;
        fn refuses_requests(&self, model: &ModelName) -> bool;
        fn request_standing(&self, model: &ModelName, request: RequestFingerprint) -> RequestStanding;
        fn note_refusal(&self, model: &ModelName, request: RequestFingerprint);
        fn view(&self) -> Arc<FleetView>;
    }

    fn lease<'a>(
        &'a self,
        model: &'a ModelName,
        demand: LeaseDemand,
    ) -> BoxFuture<'a, Result<Option<SharedLease>, LeaseDenied>> {
        let LeaseDemand { kind, prompt, mode } = demand;
        Box::pin(async move {
            let lease = match mode {
                LeaseMode::First => Some(self.lease_for(model, kind, prompt).await?),
                LeaseMode::Again => Some(self.lease_again(model, kind, prompt).await?),
                LeaseMode::IfLoaded => self.lease_loaded(model, kind, prompt).await?,
            };
            Ok(lease.map(|lease| Arc::new(lease) as SharedLease))
        })
    }

    fn unload(&self, model: &ModelName, by: &str) -> Result<(), ControlError> {
        Fleet::unload(self, model.as_str(), by)
    }

    fn lease_now(&self, model: &ModelName, kind: LeaseKind, tokens: Option<u64>) -> Option<SharedLease> {
        Fleet::lease_now(self, model, kind, tokens).map(|lease| Arc::new(lease) as SharedLease)
    }
}

impl BackendLease for Lease {
    its_own! { Lease:
        fn generation(&self) -> GenerationId;
        fn is_canary(&self) -> bool;
        fn address(&self) -> &LeaseAddress;
        fn is_running(&self) -> bool;
        fn was_stopped(&self) -> bool;
        fn queued_for(&self) -> Duration;
        fn kin(&self) -> Option<AnswerIdentity>;
        fn add_work(&self, work: WorkDone);
        fn note_outcome(&self, outcome: &ExchangeOutcome);
        fn watches_answers(&self) -> bool;
        fn record_answer(&self, signs: AnswerSigns, keys: AnswerKeys);
        fn note_sent(&self, asked: Arc<SentBody>, streams: bool);
        fn note_answered(&self, streams: bool, succeeds: bool);
        fn note_waiting(&self, since: Instant);
        fn note_events(&self, events: u64);
        fn note_setting(&self, path: &str, body: Bytes);
        fn note_pause(&self);
        fn keeps_turns(&self) -> bool;
        fn note_turn(&self, turn: ConversationTurn);
        fn saves_for_us(&self) -> bool;
        fn server_facts(&self) -> ServerFacts;
        fn request_standing(&self, request: RequestFingerprint) -> RequestStanding;
        fn report_broken(&self, request: RequestFingerprint);
        fn report_lost(&self, request: RequestFingerprint);
        fn is_alone(&self) -> bool;
        fn solitude_limit(&self, request: RequestFingerprint) -> Duration;
        fn end_solitude(&self);
        fn note_survival(&self, request: RequestFingerprint);
        fn mark_read_only(&self);
        fn mark_endless(&self);
    }

    fn note_progress(&self, _: usize) {
        Lease::note_progress(self);
    }

    fn pool(&self, init: &dyn Fn() -> ConnectionPool) -> Arc<ConnectionPool> {
        self.attachment(init)
    }

    fn doubt(&self) {
        self.report_refused();
    }

    fn done(&self) {
        Lease::note_done(self);
    }

    fn settled(&self) -> BoxFuture<'static, ()> {
        Box::pin(Lease::until_settled(self))
    }

    fn alone(self: Arc<Self>, request: RequestFingerprint) -> BoxFuture<'static, SolitudeResult> {
        Box::pin(async move { Lease::wait_alone(&self, request).await })
    }

    fn revoked(self: Arc<Self>) -> BoxFuture<'static, ()> {
        Box::pin(async move { Lease::until_revoked(&self).await })
    }
}
