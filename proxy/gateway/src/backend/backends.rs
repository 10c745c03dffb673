//! The seam between the gateway and the supervisor, so that tests can put their own backends behind it. The product's
//! only implementation is [`Fleet`].

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;
use warden_policies::dispatch::LeaseKind;
use warden_policies::quarantine::{Fingerprint, Standing};
use warden_policies::{GenerationId, ModelName, ServerFacts, Work};
use warden_supervisor::{
    Address, Alone, CanaryRoute, Coming, ControlError, Denied, Fleet, FleetView, Kin, Lease, Outcome,
    ResolveError, Size, Turn, Weighed,
};

use crate::backend::pool::Pool;
use crate::body::sent::Sent;
use crate::refusal::Refusal;

pub(crate) type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Who knows models and gives leases.
pub(crate) trait Backends: Send + Sync + 'static {
    /// The model that a name means.
    fn resolve(&self, name: Option<&str>) -> Result<ModelName, ResolveError>;
    /// Whether every name means the only model.
    fn takes_any_name(&self) -> bool;
    /// Waits for the right to send one request, whose prompt has so many tokens where that was asked.
    fn lease<'a>(
        &'a self,
        model: &'a ModelName,
        kind: LeaseKind,
        tokens: Option<u64>,
    ) -> BoxFuture<'a, Result<Arc<dyn BackendLease>, Denied>>;
    /// The same for a request whose generation has died: a full queue does not turn it away.
    fn lease_again<'a>(
        &'a self,
        model: &'a ModelName,
        kind: LeaseKind,
        tokens: Option<u64>,
    ) -> BoxFuture<'a, Result<Arc<dyn BackendLease>, Denied>>;
    /// The same for a request that loads nothing: a process that starts or is replaced is waited for. `None`: the
    /// model is not loaded.
    fn lease_loaded<'a>(
        &'a self,
        model: &'a ModelName,
        kind: LeaseKind,
        tokens: Option<u64>,
    ) -> BoxFuture<'a, Result<Option<Arc<dyn BackendLease>>, Denied>>;
    /// Lets a model go: its requests end, and then its processes. `by` is who says so.
    fn unload(&self, model: &ModelName, by: &str) -> Result<(), ControlError>;
    /// The build that is tried beside the model's own, if there is one.
    fn canary(&self, model: &ModelName) -> Option<CanaryRoute>;
    /// A lease that can be had at once; for one that cannot, nobody waits.
    fn lease_now(
        &self,
        model: &ModelName,
        kind: LeaseKind,
        tokens: Option<u64>,
    ) -> Option<Arc<dyn BackendLease>>;
    /// Whether a prompt of this size would find room in memory now.
    fn weigh(&self, model: &ModelName, size: Size) -> Weighed;
    /// When a model will serve of which no process does; `None` if one does.
    fn coming(&self, model: &ModelName) -> Option<Coming>;
    /// Whether a request for a model would be refused at once now.
    fn refuses(&self, model: &ModelName) -> bool;
    /// Whether a model is loaded, or could be without another one's leaving, as far as memory is known.
    fn has_room(&self, model: &ModelName) -> bool;
    /// What is known against a request, and that one was refused for it.
    fn standing(&self, model: &ModelName, request: Fingerprint) -> Standing;
    fn note_refusal(&self, model: &ModelName, request: Fingerprint);
    fn view(&self) -> Arc<FleetView>;
}

/// A lease. It ends when the last handle is dropped.
pub(crate) trait BackendLease: Send + Sync + 'static {
    fn generation(&self) -> GenerationId;
    /// Whether it is of a build that is tried beside the model's own: whatever becomes of it, that one answers.
    fn is_canary(&self) -> bool;
    fn address(&self) -> &Address;
    /// Whether its process still runs, as the kernel knows it now: what answers on its port may be another's.
    fn is_running(&self) -> bool;
    /// Whether llama-warden told its process to end. A lease is revoked then, and also when its process died by itself.
    fn was_stopped(&self) -> bool;
    fn queued_for(&self) -> Duration;
    /// The same for generations of the same command, binary and files; `None`: not known.
    fn kin(&self) -> Option<Kin>;
    fn add_work(&self, work: Work);
    fn note_outcome(&self, outcome: &Outcome);
    /// So many bytes of an answer came, or its head (0): it lives.
    fn note_progress(&self, bytes: usize);
    /// The request goes to the backend, and asks for events or for one answer.
    fn note_asked(&self, asked: Arc<Sent>, streams: bool);
    /// The head of the answer is here: events follow or one answer, a success or not.
    fn note_answered(&self, streams: bool, succeeds: bool);
    /// Since this moment the client has everything and wants more.
    fn note_waiting(&self, since: Instant);
    /// So many events with data came: it works.
    fn note_events(&self, events: u64);
    /// It has taken what a client has set in it.
    fn note_setting(&self, path: &str, body: Bytes);
    /// It stops computing for as long as this request takes.
    fn note_pause(&self);
    /// Whether conversations are kept for the process that follows.
    fn keeps_turns(&self) -> bool;
    /// The request was answered whole.
    fn note_turn(&self, turn: Turn);
    /// Whether it saves slots for us alone, and for no client.
    fn saves_for_us(&self) -> bool;
    /// The connections to this generation, made with `init` at its first use.
    fn pool(&self, init: &dyn Fn() -> Pool) -> Arc<Pool>;
    /// The backend broke a connection: it gets no other request until it has answered a probe. Without this, whoever
    /// waits for the lease that ends now would be sent to a process that is dying.
    fn doubt(&self);
    /// What is known of how its binary behaves.
    fn facts(&self) -> ServerFacts;
    /// What is known against a request.
    fn standing(&self, request: Fingerprint) -> Standing;
    /// The connection broke after this request was sent whole.
    fn broke(&self, request: Fingerprint);
    /// The lease of this request, which was sent whole, was revoked.
    fn lost(&self, request: Fingerprint);
    /// Resolves when it is known what became of the generation after that. Holds no lease.
    fn settled(&self) -> BoxFuture<'static, ()>;
    /// Waits until nothing else runs in its slots, for a suspect.
    fn alone(self: Arc<Self>, request: Fingerprint) -> BoxFuture<'static, Alone>;
    /// Whether it is alone now.
    fn is_alone(&self) -> bool;
    /// For how long this request may be alone.
    fn alone_for(&self, request: Fingerprint) -> Duration;
    /// Lets others in again.
    fn join(&self);
    /// The request was answered, and something was known against it.
    fn survived(&self, request: Fingerprint);
    /// The answer came whole: the server is at work on it no more. Who gives the lease back without that, and without a
    /// broken connection, has left.
    fn done(&self);
    /// The request only reads: it is no company for one that is tried alone.
    fn reads(&self);
    /// The answer is a stream of events without an end.
    fn watches(&self);
    /// Resolves when the generation has to end in spite of this lease.
    fn revoked(self: Arc<Self>) -> BoxFuture<'static, ()>;
}

impl dyn BackendLease {
    /// The answer came whole: the backend is done, and nothing is held any more against the request, which is known by this.
    pub(crate) fn answered(&self, print: Option<Fingerprint>) {
        self.done();
        if let Some(print) = print.filter(|print| self.standing(*print) == Standing::Suspect) {
            self.survived(print);
        }
    }

    /// The error for a request whose lease was revoked and that is not sent again.
    pub(crate) fn taken_away(&self, model: &ModelName) -> Refusal {
        let model = model.clone();
        if self.was_stopped() { Refusal::Revoked { model } } else { Refusal::Died { model } }
    }
}

/// Methods that the supervisor's type has itself, under the same name.
macro_rules! its_own {
    ($type:ident: $(fn $name:ident(&self $(, $arg:ident: $of:ty)*) $(-> $gives:ty)?;)*) => {
        $(fn $name(&self $(, $arg: $of)*) $(-> $gives)? {
            $type::$name(self $(, $arg)*)
        })*
    };
}

impl Backends for Fleet {
    its_own! { Fleet:
        fn resolve(&self, name: Option<&str>) -> Result<ModelName, ResolveError>;
        fn takes_any_name(&self) -> bool;
        fn canary(&self, model: &ModelName) -> Option<CanaryRoute>;
        fn weigh(&self, model: &ModelName, size: Size) -> Weighed;
        fn coming(&self, model: &ModelName) -> Option<Coming>;
        fn has_room(&self, model: &ModelName) -> bool;
        fn refuses(&self, model: &ModelName) -> bool;
        fn standing(&self, model: &ModelName, request: Fingerprint) -> Standing;
        fn note_refusal(&self, model: &ModelName, request: Fingerprint);
        fn view(&self) -> Arc<FleetView>;
    }

    fn lease<'a>(
        &'a self,
        model: &'a ModelName,
        kind: LeaseKind,
        tokens: Option<u64>,
    ) -> BoxFuture<'a, Result<Arc<dyn BackendLease>, Denied>> {
        Box::pin(async move {
            let lease = Fleet::lease_for(self, model, kind, tokens).await?;
            Ok(Arc::new(lease) as Arc<dyn BackendLease>)
        })
    }

    fn lease_again<'a>(
        &'a self,
        model: &'a ModelName,
        kind: LeaseKind,
        tokens: Option<u64>,
    ) -> BoxFuture<'a, Result<Arc<dyn BackendLease>, Denied>> {
        Box::pin(async move {
            let lease = Fleet::lease_again(self, model, kind, tokens).await?;
            Ok(Arc::new(lease) as Arc<dyn BackendLease>)
        })
    }

    fn lease_loaded<'a>(
        &'a self,
        model: &'a ModelName,
        kind: LeaseKind,
        tokens: Option<u64>,
    ) -> BoxFuture<'a, Result<Option<Arc<dyn BackendLease>>, Denied>> {
        Box::pin(async move {
            let lease = Fleet::lease_loaded(self, model, kind, tokens).await?;
            Ok(lease.map(|lease| Arc::new(lease) as Arc<dyn BackendLease>))
        })
    }

    fn unload(&self, model: &ModelName, by: &str) -> Result<(), ControlError> {
        Fleet::unload(self, model.as_str(), by)
    }

    fn lease_now(
        &self,
        model: &ModelName,
        kind: LeaseKind,
        tokens: Option<u64>,
    ) -> Option<Arc<dyn BackendLease>> {
        Fleet::lease_now(self, model, kind, tokens).map(|lease| Arc::new(lease) as Arc<dyn BackendLease>)
    }
}

impl BackendLease for Lease {
    its_own! { Lease:
        fn generation(&self) -> GenerationId;
        fn is_canary(&self) -> bool;
        fn address(&self) -> &Address;
        fn is_running(&self) -> bool;
        fn was_stopped(&self) -> bool;
        fn queued_for(&self) -> Duration;
        fn kin(&self) -> Option<Kin>;
        fn add_work(&self, work: Work);
        fn note_outcome(&self, outcome: &Outcome);
        fn note_asked(&self, asked: Arc<Sent>, streams: bool);
        fn note_answered(&self, streams: bool, succeeds: bool);
        fn note_waiting(&self, since: Instant);
        fn note_events(&self, events: u64);
        fn note_setting(&self, path: &str, body: Bytes);
        fn note_pause(&self);
        fn keeps_turns(&self) -> bool;
        fn note_turn(&self, turn: Turn);
        fn saves_for_us(&self) -> bool;
        fn facts(&self) -> ServerFacts;
        fn standing(&self, request: Fingerprint) -> Standing;
        fn broke(&self, request: Fingerprint);
        fn lost(&self, request: Fingerprint);
        fn is_alone(&self) -> bool;
        fn alone_for(&self, request: Fingerprint) -> Duration;
        fn join(&self);
        fn survived(&self, request: Fingerprint);
        fn reads(&self);
        fn watches(&self);
    }

    fn note_progress(&self, _: usize) {
        Lease::note_progress(self);
    }

    fn pool(&self, init: &dyn Fn() -> Pool) -> Arc<Pool> {
        self.attachment(init)
    }

    fn doubt(&self) {
        self.refused();
    }

    fn done(&self) {
        Lease::note_done(self);
    }

    fn settled(&self) -> BoxFuture<'static, ()> {
        Box::pin(Lease::settled(self))
    }

    fn alone(self: Arc<Self>, request: Fingerprint) -> BoxFuture<'static, Alone> {
        Box::pin(async move { Lease::alone(&self, request).await })
    }

    fn revoked(self: Arc<Self>) -> BoxFuture<'static, ()> {
        Box::pin(async move { Lease::revoked(&self).await })
    }
}
