//! Prompts that wait for memory, and the events that end the wait. A fixed price per token decides whether a
//! prompt fits.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::task::{AbortOnDropHandle, TaskTracker};
use warden_policies::admission::PromptPrice;
use warden_policies::{ModelName, ServerFacts, defaults};

use super::*;
use crate::lease::Lease;
use crate::lease::cell::GenerationCell;
use crate::lease::queue::LeaseQueue;
use crate::lease::queue::ask::PromptFacts;
use crate::process::endpoint::ListenAddress;
use crate::view::event::{EventJournal, EventKind};

const MIB: u64 = 1 << 20;
const WAIT: Duration = Duration::from_secs(300);
const A: GenerationId = GenerationId(1);
const B: GenerationId = GenerationId(2);

/// A model with this admission mode, and processes of two slots each.
struct Rig {
    leases: Arc<LeaseQueue>,
    journal: Arc<EventJournal>,
}

fn of_tokens(tokens: Option<u64>) -> PromptFacts {
    PromptFacts { tokens, ..PromptFacts::default() }
}

impl Rig {
    fn new(mode: AdmissionMode, open: &[GenerationId]) -> Self {
        let journal = Arc::new(EventJournal::new(100));
        let leases = Arc::new(LeaseQueue::new(ModelName::new("m"), Arc::clone(&journal), 4, WAIT));
        let policy =
            AdmissionPolicy { reserve: warden_policies::ByteSize(0), ..defaults().admission.clone() };
        leases.change_admission(|admit| admit.set_policy(mode, policy));
        let rig = Self { leases, journal };
        for id in open {
            rig.open(*id);
        }
        rig
    }

    fn open(&self, id: GenerationId) {
        let endpoint = ListenAddress::Unix(PathBuf::from("/x.sock"));
        self.leases.open_gate(&Arc::new(GenerationCell::new(id, endpoint, ServerFacts::default())), 2);
    }

    fn publish(&self, known: Vec<ProcessHeadroom>) {
        self.leases.change_admission(|admit| admit.publish(known));
    }

    /// Spawns a request that is waiting when this returns.
    async fn waiting(&self, tokens: u64) -> AbortOnDropHandle<Result<Lease, LeaseDenied>> {
        let (before, leases) = (self.leases.waiting(), Arc::clone(&self.leases));
        let task = TaskTracker::new()
            .spawn(async move { leases.lease(LeaseKind::Slot, of_tokens(Some(tokens))).await });
        while self.leases.waiting() == before {
            tokio::task::yield_now().await;
        }
        AbortOnDropHandle::new(task)
    }

    async fn lease(&self, tokens: u64) -> Result<Lease, LeaseDenied> {
        self.leases.lease(LeaseKind::Slot, of_tokens(Some(tokens))).await
    }

    fn actions(&self) -> Vec<String> {
        let events = self.journal.tail().events;
        events
            .into_iter()
            .filter_map(|event| match event.kind {
                EventKind::PromptTooLarge { action, .. } => Some(action),
                _ => None,
            })
            .collect()
    }
}

/// A process with room for so many MiB of host memory; a prompt token costs 1 MiB.
fn known(generation: GenerationId, left: u64) -> ProcessHeadroom {
    let mut cost = PromptCost::new(&defaults().admission);
    #[expect(clippy::cast_precision_loss, reason = "a power of two")]
    cost.set_price(PromptPrice { series: MemoryKind::Host, bytes_per_token: MIB as f64, evidence: 3 });
    let left = MemoryHeadroom {
        series: MemoryKind::Host,
        now: Some(left * MIB),
        coming_back: 0,
        fresh: Some(1000 * MIB),
    };
    ProcessHeadroom { generation, largest: 0, busy: false, recycle: None, left: vec![left], cost }
}

#[tokio::test]
async fn where_it_is_off_or_nothing_is_known_nobody_is_weighed() {
    for (mode, told) in [(AdmissionMode::Off, true), (AdmissionMode::Enforce, false)] {
        let rig = Rig::new(mode, &[A]);
        if told {
            rig.publish(vec![known(A, 10)]);
        }
        assert_eq!(rig.leases.weigh_prompt(PromptSize::Tokens(1_000_000)), PromptFit::NotChecked);
        assert!(rig.lease(1_000_000).await.is_ok());
        assert_eq!(rig.actions(), [""; 0]);
    }
}

#[tokio::test]
async fn a_prompt_with_room_passes_and_one_that_fits_nowhere_is_refused_with_the_numbers() {
    let rig = Rig::new(AdmissionMode::Enforce, &[A]);
    rig.publish(vec![known(A, 100)]);
    assert_eq!(rig.leases.weigh_prompt(PromptSize::Tokens(100)), PromptFit::Fits { tokens: 100 });
    assert_eq!(rig.leases.weigh_prompt(PromptSize::Tokens(2000)), PromptFit::Unclear { tokens: 2000 });
    assert!(rig.lease(100).await.is_ok());
    let Err(LeaseDenied::NoRoom(short)) = rig.lease(2000).await else { panic!("refused") };
    assert_eq!((short.tokens, short.needed, short.have), (2000, 2000 * MIB, 1000 * MIB));
    assert!((short.bytes_per_token - 1_048_576.0).abs() < 0.5 && short.retry_after > Duration::ZERO);
    let words = LeaseDenied::NoRoom(short).to_string();
    assert!(words.contains("2000 tokens") && words.contains("host"), "{words}");
    assert_eq!(rig.actions(), ["refuse"]);
    assert_eq!((rig.leases.waiting(), rig.leases.in_flight(A)), (0, 0));
}

#[tokio::test]
async fn a_warning_is_told_and_the_prompt_is_sent() {
    let rig = Rig::new(AdmissionMode::Warn, &[A]);
    rig.publish(vec![known(A, 100)]);
    assert!(rig.lease(2000).await.is_ok());
    assert_eq!(rig.actions(), ["warn"]);
}

#[tokio::test]
async fn another_process_with_room_gets_it() {
    let rig = Rig::new(AdmissionMode::Enforce, &[A, B]);
    rig.publish(vec![known(A, 10), known(B, 100)]);
    for _ in 0..2 {
        let lease = rig.lease(50).await.unwrap();
        assert_eq!(lease.generation(), B);
        drop(lease);
    }
    assert_eq!(rig.actions(), ["elsewhere", "elsewhere"]);
}

#[tokio::test]
async fn a_full_process_with_room_keeps_its_next_slot_for_it() {
    let rig = Rig::new(AdmissionMode::Enforce, &[A, B]);
    rig.publish(vec![known(A, 10), known(B, 100)]);
    let mut held = Vec::new();
    for _ in 0..4 {
        held.push(rig.lease(1).await.unwrap());
    }
    held.retain(|lease| lease.generation() == B);
    assert_eq!((rig.leases.in_flight(A), rig.leases.in_flight(B)), (0, 2));
    let large = rig.waiting(50).await;
    drop(held.pop());
    assert_eq!(large.await.unwrap().unwrap().generation(), B);
}

#[tokio::test]
async fn a_prompt_waits_for_requests_to_end_and_nobody_takes_its_place() {
    let rig = Rig::new(AdmissionMode::Enforce, &[A]);
    let running = rig.lease(1).await.unwrap();
    let mut short = known(A, 10);
    (short.busy, short.left[0].coming_back) = (true, 90 * MIB);
    rig.publish(vec![short.clone()]);
    let first = rig.waiting(50).await;
    let second = rig.waiting(60).await;
    let small = rig.waiting(1).await;
    drop(running);
    // The memory has not been read since, so it does not count as free.
    assert_eq!((rig.leases.waiting(), rig.leases.in_flight(A)), (3, 0));
    rig.publish(vec![known(A, 100)]);
    let (first, second) = (first.await.unwrap().unwrap(), second.await.unwrap().unwrap());
    assert_eq!(rig.leases.in_flight(A), 2);
    drop((first, second));
    assert!(small.await.unwrap().is_ok());
    // The others waited in the queue for a slot.
    assert_eq!(rig.actions(), ["wait"]);
}

#[tokio::test]
async fn a_fresh_process_is_asked_for_and_the_only_one_may_be_replaced_by_it() {
    let rig = Rig::new(AdmissionMode::Enforce, &[A]);
    rig.publish(vec![ProcessHeadroom { recycle: Some(Duration::ZERO), ..known(A, 10) }]);
    let large = rig.waiting(50).await;
    assert_eq!(rig.leases.admission_wish(A), Some(MemoryKind::Host));
    tokio::time::timeout(WAIT, rig.leases.wake.notified()).await.expect("the task is woken");
    // Other requests are served as long as the process serves.
    assert!(rig.lease(1).await.is_ok());
    // In a sequential replacement no process is open for a while.
    rig.leases.close_gate(A);
    rig.leases.remove_generation(A);
    assert!(rig.leases.needs_process());
    assert_eq!(rig.leases.admission_wish(A), None);
    rig.open(B);
    assert_eq!(large.await.unwrap().unwrap().generation(), B);
    assert_eq!(rig.actions(), ["recycle"]);
}

#[tokio::test(start_paused = true)]
async fn the_wait_ends_with_the_deadline_of_the_queue_and_says_what_was_short() {
    let rig = Rig::new(AdmissionMode::Enforce, &[A]);
    rig.publish(vec![ProcessHeadroom { recycle: Some(Duration::ZERO), ..known(A, 10) }]);
    let begun = tokio::time::Instant::now();
    let Err(LeaseDenied::NoRoom(short)) = rig.lease(50).await else { panic!("refused") };
    assert_eq!((begun.elapsed(), short.needed, short.have), (WAIT, 50 * MIB, 10 * MIB));
    assert_eq!((rig.leases.waiting(), rig.leases.admission_wish(A)), (0, None));
}

#[tokio::test]
async fn a_client_that_leaves_frees_what_was_kept_for_it() {
    let rig = Rig::new(AdmissionMode::Enforce, &[A]);
    let running = rig.lease(1).await.unwrap();
    let mut short = known(A, 10);
    (short.busy, short.left[0].coming_back) = (true, 90 * MIB);
    rig.publish(vec![short]);
    let mut leaving = Box::pin(rig.lease(50));
    assert!(futures_util::poll!(leaving.as_mut()).is_pending());
    let small = rig.waiting(1).await;
    drop(leaving);
    assert!(small.await.unwrap().is_ok());
    drop(running);
    assert_eq!((rig.leases.waiting(), rig.leases.in_flight(A)), (0, 0));
}

#[tokio::test]
async fn a_mode_that_only_warns_lets_those_go_who_wait() {
    for mode in [AdmissionMode::Warn, AdmissionMode::Off] {
        let rig = Rig::new(AdmissionMode::Enforce, &[A]);
        rig.publish(vec![ProcessHeadroom { recycle: Some(Duration::ZERO), ..known(A, 10) }]);
        let large = rig.waiting(50).await;
        rig.leases.change_admission(|admit| admit.set_policy(mode, defaults().admission.clone()));
        let lease = tokio::time::timeout(WAIT, large).await.expect("it is let go").unwrap().unwrap();
        assert_eq!((lease.generation(), rig.leases.admission_wish(A)), (A, None));
        rig.publish(vec![known(A, 10)]);
        assert_eq!(rig.actions(), ["recycle"]);
    }
}

#[tokio::test]
async fn a_queue_for_nobody_still_tells_the_numbers_and_sends_elsewhere() {
    let rig = Rig::new(AdmissionMode::Enforce, &[A, B]);
    rig.leases.with_state(|queue| queue.set_limits(0, WAIT));
    rig.publish(vec![known(A, 10), known(B, 100)]);
    assert_eq!(rig.lease(50).await.unwrap().generation(), B);
    assert!(matches!(rig.lease(2000).await, Err(LeaseDenied::NoRoom(_))));
    rig.publish([A, B].map(|id| ProcessHeadroom { recycle: Some(Duration::ZERO), ..known(id, 10) }).to_vec());
    assert!(matches!(rig.lease(50).await, Err(LeaseDenied::QueueFull { .. })));
}

#[tokio::test]
async fn a_newcomer_does_not_take_the_place_of_one_who_waits_for_room() {
    let rig = Rig::new(AdmissionMode::Enforce, &[A]);
    rig.leases.with_state(|queue| queue.set_limits(1, WAIT));
    rig.publish(vec![ProcessHeadroom { recycle: Some(Duration::ZERO), ..known(A, 10) }]);
    let _large = rig.waiting(50).await;
    let _running = (rig.lease(1).await.unwrap(), rig.lease(1).await.unwrap());
    let mut third = Box::pin(rig.lease(1));
    let answer = futures_util::poll!(third.as_mut());
    assert!(matches!(answer, std::task::Poll::Ready(Err(LeaseDenied::QueueFull { waiting: 1, depth: 1 }))));
    assert_eq!(rig.leases.waiting(), 1);
}

#[tokio::test]
async fn those_who_wait_for_room_count_in_the_queue_and_are_dismissed_with_it() {
    let rig = Rig::new(AdmissionMode::Enforce, &[A]);
    rig.publish(vec![ProcessHeadroom { recycle: Some(Duration::ZERO), ..known(A, 10) }]);
    let mut large = Vec::new();
    for _ in 0..4 {
        large.push(rig.waiting(50).await);
    }
    assert!(matches!(rig.lease(50).await, Err(LeaseDenied::QueueFull { .. })));
    rig.leases.refuse_waiting(&LeaseDenied::Removed);
    for one in large {
        assert_eq!(one.await.unwrap().unwrap_err(), LeaseDenied::Removed);
    }
    assert_eq!((rig.leases.waiting(), rig.leases.admission_wish(A)), (0, None));
}

/// Real threads: prompts of all sizes, requests that leave at any moment, changing processes and room.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn under_contention_every_prompt_is_answered_and_every_lease_comes_back() {
    const CALLERS: u64 = 1000;
    let journal = Arc::new(EventJournal::new(1));
    let leases = Arc::new(LeaseQueue::new(ModelName::new("m"), Arc::clone(&journal), usize::MAX, WAIT));
    let rig = Rig { leases, journal };
    rig.leases
        .change_admission(|admit| admit.set_policy(AdmissionMode::Enforce, defaults().admission.clone()));
    let callers = TaskTracker::new();
    for n in 0..CALLERS {
        let leases = Arc::clone(&rig.leases);
        callers.spawn(async move {
            let patience = if n % 3 == 0 { Duration::from_micros(n * 7 % 900) } else { WAIT };
            let tokens = (n % 4 > 0).then_some(n % 90);
            let lease = leases.lease(LeaseKind::Slot, of_tokens(tokens));
            match tokio::time::timeout(patience, lease).await {
                Ok(Err(denied)) => assert!(matches!(denied, LeaseDenied::NoRoom(_)), "{denied}"),
                Ok(Ok(lease)) => {
                    tokio::task::yield_now().await;
                    drop(lease);
                }
                Err(_) => {}
            }
        });
    }
    callers.close();
    let mut id = 0;
    while !callers.is_empty() {
        id += 2;
        let both = [GenerationId(id), GenerationId(id + 1)];
        for one in both {
            rig.open(one);
        }
        for round in 0..4 {
            let known = both.map(|one| {
                let mut known = known(one, 256 + (one.0 * 31 + round * 17) % 100);
                known.busy = (one.0 + round) % 3 == 0;
                known.left[0].coming_back = (round * 13 % 60) * MIB;
                known.recycle = (round % 2 == 0).then_some(Duration::ZERO);
                known
            });
            rig.publish(known.to_vec());
            tokio::task::yield_now().await;
        }
        for one in both {
            rig.leases.close_gate(one);
            rig.leases.remove_generation(one);
        }
    }
    tokio::time::timeout(WAIT, callers.wait()).await.unwrap();
    assert!(rig.leases.with_state(|queue| queue.is_idle()));
}
