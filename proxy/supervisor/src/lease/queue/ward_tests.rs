//! Deaths, suspects and trials alone, together with leases.

use std::path::PathBuf;

use warden_policies::ServerFacts;
use warden_policies::quarantine::{RequestFingerprint, RequestStanding};

use super::ask::PromptFacts;
use super::ward::{ProcessEnd, SolitudeResult};
use super::*;
use crate::lease::SentRequest;
use crate::lease::cell::GenerationCell;
use crate::process::endpoint::ListenAddress;

const WAIT: Duration = Duration::from_secs(300);
const A: RequestFingerprint = RequestFingerprint(1);
const B: RequestFingerprint = RequestFingerprint(2);

/// A request that was sent whole.
struct Whole(RequestFingerprint);

impl SentRequest for Whole {
    fn is_whole(&self) -> bool {
        true
    }
    fn bytes(&self) -> u64 {
        1
    }
    fn media_count(&self) -> u64 {
        0
    }
    fn fingerprint(&self) -> Option<RequestFingerprint> {
        Some(self.0)
    }
}

struct Ward {
    leases: Arc<LeaseQueue>,
    generations: u64,
}

impl Ward {
    fn new() -> Self {
        let journal = Arc::new(EventJournal::new(10));
        Self { leases: Arc::new(LeaseQueue::new(ModelName::new("m"), journal, 4, WAIT)), generations: 0 }
    }

    fn open(&mut self) -> Arc<GenerationCell> {
        self.generations += 1;
        let endpoint = ListenAddress::Unix(PathBuf::from("/x.sock"));
        let cell =
            Arc::new(GenerationCell::new(GenerationId(self.generations), endpoint, ServerFacts::default()));
        self.leases.open_gate(&cell, 4);
        cell
    }

    async fn sent(&self, request: RequestFingerprint) -> Lease {
        let lease = self.leases.lease(LeaseKind::Slot, PromptFacts::default()).await.unwrap();
        lease.note_sent(Arc::new(Whole(request)), true);
        lease
    }

    async fn reads(&self) -> Lease {
        let lease = self.leases.lease(LeaseKind::Aux, PromptFacts::default()).await.unwrap();
        lease.mark_read_only();
        lease
    }

    fn die(&self, cell: &GenerationCell) {
        self.leases.note_ended(cell, ProcessEnd::ByItself);
        self.leases.remove_generation(cell.id);
    }

    /// Lets a process die with this request in flight.
    async fn suspecting(&mut self, request: RequestFingerprint) -> Arc<GenerationCell> {
        let cell = self.open();
        let lease = self.sent(request).await;
        lease.report_broken(request);
        drop(lease);
        self.die(&cell);
        assert_eq!(self.leases.ward.standing(request), RequestStanding::Suspect);
        self.open()
    }

    /// Waits until the request runs alone, sends it, and returns while it is on trial.
    async fn tried(&self, request: RequestFingerprint) -> Lease {
        let lease = self.leases.lease(LeaseKind::Slot, PromptFacts::default()).await.unwrap();
        assert_eq!(lease.wait_alone(request).await, SolitudeResult::Granted);
        lease.note_sent(Arc::new(Whole(request)), true);
        lease
    }

    fn is_refused(&self, request: RequestFingerprint) -> bool {
        matches!(self.leases.ward.standing(request), RequestStanding::Refused { .. })
    }
}

#[tokio::test(start_paused = true)]
async fn a_client_that_leaves_before_its_request_kills_the_server_hides_nothing() {
    let mut ward = Ward::new();
    let cell = ward.open();
    // The client leaves before the server dies.
    drop(ward.sent(A).await);
    // Answered requests are no suspects.
    let answered = ward.sent(B).await;
    answered.note_done();
    drop(answered);
    tokio::time::advance(Duration::from_secs(2)).await;
    ward.die(&cell);
    assert_eq!(
        (ward.leases.ward.standing(A), ward.leases.ward.standing(B)),
        (RequestStanding::Suspect, RequestStanding::Clear)
    );
    let cell = ward.open();
    drop(ward.tried(A).await);
    tokio::time::advance(Duration::from_secs(2)).await;
    ward.die(&cell);
    assert!(ward.is_refused(A));
}

#[tokio::test(start_paused = true)]
async fn nobody_is_refused_for_what_a_request_does_whose_client_left_before() {
    let mut ward = Ward::new();
    let cell = ward.suspecting(A).await;
    let leaving = ward.sent(B).await;
    let lease = ward.leases.lease(LeaseKind::Slot, PromptFacts::default()).await.unwrap();
    let mut alone = Box::pin(lease.wait_alone(A));
    assert!(futures_util::poll!(alone.as_mut()).is_pending());
    drop(leaving);
    assert!(futures_util::poll!(alone.as_mut()).is_pending(), "the server may still be at work on it");
    let begun = Instant::now();
    assert_eq!(alone.await, SolitudeResult::Granted);
    assert_eq!(begun.elapsed(), warden_policies::defaults().quarantine.lingers_for);
    lease.note_sent(Arc::new(Whole(A)), true);
    ward.die(&cell);
    assert!(ward.is_refused(A), "by then it was alone");
    // The server dies first.
    ward.leases.ward.release(None);
    let cell = ward.suspecting(A).await;
    drop(ward.sent(B).await);
    let lease = ward.leases.lease(LeaseKind::Slot, PromptFacts::default()).await.unwrap();
    let mut alone = Box::pin(lease.wait_alone(A));
    assert!(futures_util::poll!(alone.as_mut()).is_pending());
    ward.die(&cell);
    assert_eq!(alone.await, SolitudeResult::Gone);
    assert_eq!(
        (ward.leases.ward.standing(A), ward.leases.ward.standing(B)),
        (RequestStanding::Suspect, RequestStanding::Suspect)
    );
}

#[tokio::test(start_paused = true)]
async fn those_who_run_for_long_do_not_save_a_suspect_from_its_trial_for_ever() {
    let mut ward = Ward::new();
    let alone_wait = warden_policies::defaults().quarantine.alone_wait;
    let mut cell = ward.suspecting(A).await;
    for times in [1, 2, 4] {
        let long = ward.sent(B).await;
        let lease = ward.leases.lease(LeaseKind::Slot, PromptFacts::default()).await.unwrap();
        let begun = Instant::now();
        assert_eq!(lease.wait_alone(A).await, SolitudeResult::Shared);
        assert_eq!(begun.elapsed(), alone_wait * times);
        lease.note_sent(Arc::new(Whole(A)), true);
        ward.die(&cell);
        drop((lease, long));
        assert_eq!(ward.leases.ward.standing(A), RequestStanding::Suspect);
        cell = ward.open();
    }
}

#[tokio::test(start_paused = true)]
async fn who_only_reads_saves_nobody_from_its_trial() {
    let mut ward = Ward::new();
    let cell = ward.suspecting(A).await;
    let (_dashboard, _scrape) = (ward.reads().await, ward.reads().await);
    let lease = ward.tried(A).await;
    lease.report_broken(A);
    ward.die(&cell);
    assert!(ward.is_refused(A));
    // Other requests without a slot may compute.
    ward.leases.ward.release(None);
    let cell = ward.suspecting(A).await;
    let _tokenizes = ward.leases.lease(LeaseKind::Aux, PromptFacts::default()).await.unwrap();
    let watches = ward.reads().await;
    watches.mark_endless();
    let _lease = ward.tried(A).await;
    ward.die(&cell);
    assert_eq!(ward.leases.ward.standing(A), RequestStanding::Suspect);
}

#[tokio::test(start_paused = true)]
async fn a_trial_whose_connection_broke_is_over_when_the_server_answers() {
    let mut ward = Ward::new();
    let cell = ward.suspecting(A).await;
    let lease = ward.tried(A).await;
    lease.report_broken(A);
    drop(lease);
    assert!(ward.leases.with_state(|queue| queue.table.take_doubted()).contains(&cell.id));
    ward.leases.note_alive(cell.id);
    // The process dies much later, without requests.
    ward.die(&cell);
    assert_eq!(ward.leases.ward.standing(A), RequestStanding::Suspect);
}

#[tokio::test(start_paused = true)]
async fn of_a_server_that_was_stopped_nobody_is_suspected_and_of_one_short_of_memory_nobody_is_refused() {
    let mut ward = Ward::new();
    for (ending, standing) in
        [(ProcessEnd::Stopped, RequestStanding::Clear), (ProcessEnd::OutOfMemory, RequestStanding::Suspect)]
    {
        let cell = ward.open();
        let lease = ward.sent(A).await;
        drop(ward.sent(B).await);
        lease.report_broken(A);
        ward.leases.note_ended(&cell, ending);
        ward.leases.remove_generation(cell.id);
        drop(lease);
        assert_eq!(
            (ward.leases.ward.standing(A), ward.leases.ward.standing(B)),
            (standing, standing),
            "{ending:?}"
        );
    }
    let cell = ward.open();
    let lease = ward.tried(A).await;
    lease.report_broken(A);
    drop(lease);
    ward.leases.note_ended(&cell, ProcessEnd::OutOfMemory);
    assert_eq!(ward.leases.ward.standing(A), RequestStanding::Suspect);
}

#[tokio::test(start_paused = true)]
async fn who_waits_to_be_alone_gives_its_place_back_however_it_leaves() {
    let mut ward = Ward::new();
    let cell = ward.suspecting(A).await;
    let running = ward.sent(B).await;
    let lease = ward.leases.lease(LeaseKind::Slot, PromptFacts::default()).await.unwrap();
    let mut alone = Box::pin(lease.wait_alone(A));
    assert!(futures_util::poll!(alone.as_mut()).is_pending());
    let mut other = Box::pin(ward.leases.lease(LeaseKind::Slot, PromptFacts::default()));
    assert!(futures_util::poll!(other.as_mut()).is_pending(), "nobody comes between");
    // The client leaves.
    drop(alone);
    drop(lease);
    let other = other.await.unwrap();
    // A drain begins: the request still runs alone, and the drain waits for it.
    let lease = ward.leases.lease(LeaseKind::Slot, PromptFacts::default()).await.unwrap();
    let mut alone = Box::pin(lease.wait_alone(A));
    assert!(futures_util::poll!(alone.as_mut()).is_pending());
    ward.leases.close_gate(cell.id);
    for running in [running, other] {
        running.note_done();
        drop(running);
    }
    assert_eq!(alone.await, SolitudeResult::Granted);
    assert_eq!(ward.leases.in_flight(cell.id), 1);
    // The process is asked to end: waiting requests go elsewhere.
    drop(lease);
    ward.leases.open_gate(&cell, 4);
    let running = ward.sent(B).await;
    let lease = ward.leases.lease(LeaseKind::Slot, PromptFacts::default()).await.unwrap();
    let mut alone = Box::pin(lease.wait_alone(A));
    assert!(futures_util::poll!(alone.as_mut()).is_pending());
    cell.revoke();
    assert_eq!(alone.await, SolitudeResult::Gone);
    drop((running, lease));
    assert_eq!(ward.leases.in_flight(cell.id), 0);
}
