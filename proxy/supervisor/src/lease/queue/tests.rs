//! Queue, leases and gates of one model, tested with several tasks and threads.

use std::collections::BTreeSet;
use std::path::PathBuf;

use tokio_util::task::{AbortOnDropHandle, TaskTracker};
use warden_policies::ServerFacts;

use super::ask::{NextProcess, PromptFacts};
use super::*;
use crate::error::{BackendFailure, LeaseDenied};
use crate::lease::ExchangeOutcome;
use crate::lease::cell::GenerationCell;
use crate::process::endpoint::ListenAddress;

const WAIT: Duration = Duration::from_secs(300);

fn leases(depth: usize) -> Arc<LeaseQueue> {
    Arc::new(LeaseQueue::new(ModelName::new("m"), Arc::new(EventJournal::new(10)), depth, WAIT))
}

fn cell(id: u64) -> Arc<GenerationCell> {
    Arc::new(GenerationCell::new(
        GenerationId(id),
        ListenAddress::Unix(PathBuf::from("/x.sock")),
        ServerFacts::default(),
    ))
}

fn replica(id: u64, number: u32) -> Arc<GenerationCell> {
    let cell = cell(id);
    cell.replica.store(number, Ordering::Relaxed);
    cell
}

/// Answers a turn of a conversation, and returns the generation.
async fn turn(leases: &Arc<LeaseQueue>, conversation: u64) -> u64 {
    let prompt = PromptFacts { conversation: Some(conversation), ..PromptFacts::default() };
    leases.lease(LeaseKind::Slot, prompt).await.unwrap().generation().0
}

#[tokio::test]
async fn conversations_spread_over_replicas_and_return_to_theirs_also_after_a_replacement() {
    let leases = leases(8);
    leases.open_gate(&replica(1, 0), 4);
    assert!(!leases.needs_conversation_key());
    leases.open_gate(&replica(2, 1), 4);
    assert!(leases.needs_conversation_key());
    let first = [turn(&leases, 10).await, turn(&leases, 11).await, turn(&leases, 12).await];
    assert_eq!(first, [1, 2, 1]);
    for (conversation, generation) in [(12, 1), (11, 2), (10, 1), (11, 2)] {
        assert_eq!(turn(&leases, conversation).await, generation);
    }
    // The next process of replica 1 serves already when the old one is closed.
    leases.open_gate(&replica(3, 1), 4);
    leases.close_gate(GenerationId(2));
    assert_eq!((turn(&leases, 11).await, turn(&leases, 10).await), (3, 1));
    leases.close_gate(GenerationId(1));
    assert_eq!(turn(&leases, 10).await, 3, "its replica does not serve");
    leases.open_gate(&replica(4, 0), 4);
    assert_eq!(turn(&leases, 10).await, 3, "it has moved");
}

#[tokio::test]
async fn a_conversation_that_waited_stays_where_it_was_answered() {
    let leases = leases(8);
    leases.open_gate(&replica(1, 0), 1);
    leases.open_gate(&replica(2, 1), 1);
    let busy = [
        leases.lease(LeaseKind::Slot, PromptFacts::default()).await.unwrap(),
        leases.lease(LeaseKind::Slot, PromptFacts::default()).await.unwrap(),
    ];
    let ours = Arc::clone(&leases);
    let prompt = PromptFacts { conversation: Some(7), ..PromptFacts::default() };
    let waiting = waits(&leases, async move { ours.lease(LeaseKind::Slot, prompt).await }).await;
    let [first, second] = busy;
    let free = second.generation();
    drop(second);
    assert_eq!(waiting.await.unwrap().unwrap().generation(), free);
    drop(first);
    assert_eq!(turn(&leases, 7).await, free.0);
}

fn failure() -> BackendFailure {
    let kind = crate::error::FailureKind::BadModel;
    BackendFailure { kind, message: "bad".to_owned(), lines: Vec::new(), failures: 1 }
}

/// Spawns a request that is in the queue when this returns.
async fn queued(leases: &Arc<LeaseQueue>, kind: LeaseKind) -> AbortOnDropHandle<Result<Lease, LeaseDenied>> {
    let ours = Arc::clone(leases);
    waits(leases, async move { ours.lease(kind, PromptFacts::default()).await }).await
}

async fn waits(
    leases: &LeaseQueue,
    asks: impl Future<Output = Result<Lease, LeaseDenied>> + Send + 'static,
) -> AbortOnDropHandle<Result<Lease, LeaseDenied>> {
    let before = leases.waiting();
    let task = TaskTracker::new().spawn(asks);
    while leases.waiting() == before {
        tokio::task::yield_now().await;
    }
    AbortOnDropHandle::new(task)
}

#[tokio::test]
async fn an_open_generation_is_leased_at_once_and_given_back_by_dropping() {
    let leases = leases(4);
    let cell = cell(1);
    leases.open_gate(&cell, 1);
    let lease = leases.lease(LeaseKind::Slot, PromptFacts::default()).await.unwrap();
    assert_eq!((lease.generation(), leases.in_flight(cell.id)), (GenerationId(1), 1));
    assert_eq!(leases.idle_since(cell.id), None);
    drop(lease);
    assert_eq!(leases.in_flight(cell.id), 0);
    assert!(leases.idle_since(cell.id).is_some());
    tokio::time::timeout(WAIT, leases.wake.notified()).await.expect("the idle edge wakes the task");
}

#[tokio::test(start_paused = true)]
async fn a_look_is_no_use_but_a_drain_waits_for_it() {
    let leases = leases(4);
    let cell = cell(1);
    leases.open_gate(&cell, 1);
    drop(leases.lease(LeaseKind::Slot, PromptFacts::default()).await.unwrap());
    let rested = leases.idle_since(cell.id).unwrap();
    let look = || leases.lease_now(LeaseKind::Read, None).unwrap();
    tokio::time::advance(WAIT).await;
    let looks = look();
    assert_eq!((leases.in_flight(cell.id), leases.idle_since(cell.id)), (1, Some(rested)));
    drop(looks);
    assert_eq!((leases.idle_since(cell.id), leases.loader_view().idle_for), (Some(rested), WAIT));
    // A request that ends meanwhile counts as use.
    let (looks, runs) = (look(), leases.lease(LeaseKind::Slot, PromptFacts::default()).await.unwrap());
    drop(runs);
    assert_eq!(leases.idle_since(cell.id), None, "it is not idle yet");
    drop(looks);
    assert_eq!(leases.idle_since(cell.id), Some(Instant::now()));
    tokio::time::timeout(WAIT, leases.wake.notified()).await.unwrap();
    let looks = look();
    leases.close_gate(cell.id);
    assert!(leases.lease_now(LeaseKind::Read, None).is_none(), "nothing is open, and nobody waits");
    assert_eq!(leases.waiting(), 0);
    drop(looks);
    tokio::time::timeout(WAIT, leases.wake.notified()).await.expect("the drain hears of its end");
}

#[tokio::test]
async fn the_task_is_woken_for_the_first_idle_edge_and_then_not_until_it_has_looked() {
    let leases = leases(4);
    let cell = cell(1);
    leases.open_gate(&cell, 1);
    let cycle = || async { drop(leases.lease(LeaseKind::Slot, PromptFacts::default()).await.unwrap()) };
    let woken =
        || async { tokio::time::timeout(Duration::from_millis(20), leases.wake.notified()).await.is_ok() };
    cycle().await;
    assert!(woken().await);
    for _ in 0..3 {
        cycle().await;
    }
    assert!(!woken().await, "it was told and has not looked");
    let seen = leases.idle_since(cell.id);
    assert!(leases.with_state(|queue| queue.table.watch_idle(cell.id, seen, true)), "nothing came since");
    cycle().await;
    assert!(!woken().await, "it comes back by itself");
    assert!(
        !leases.with_state(|queue| queue.table.watch_idle(cell.id, seen, false)),
        "something came since: it looks once more"
    );
    cycle().await;
    assert!(woken().await, "it does not come back by itself");
    // A waiter for the last request is woken at once.
    let lease = leases.lease(LeaseKind::Slot, PromptFacts::default()).await.unwrap();
    leases.close_gate(cell.id);
    drop(lease);
    assert!(woken().await);
}

#[tokio::test]
async fn callers_wait_for_a_generation_to_open_and_wake_the_task() {
    let leases = leases(4);
    let waiting = queued(&leases, LeaseKind::Slot).await;
    assert!(leases.needs_process());
    tokio::time::timeout(WAIT, leases.wake.notified()).await.unwrap();
    let opened = leases.open_gate(&cell(1), 1);
    assert_eq!(opened.waiting, 1);
    assert!(waiting.await.unwrap().is_ok());
}

#[tokio::test(start_paused = true)]
async fn before_the_first_process_the_gap_begins_with_the_first_request() {
    let leases = leases(4);
    tokio::time::advance(Duration::from_secs(5)).await;
    let first = queued(&leases, LeaseKind::Slot).await;
    tokio::time::advance(Duration::from_secs(3)).await;
    let second = queued(&leases, LeaseKind::Slot).await;
    let gap = leases.open_gate(&cell(1), 2).gap.unwrap();
    assert_eq!(gap.elapsed().as_secs(), 3);
    assert!(first.await.unwrap().is_ok() && second.await.unwrap().is_ok());
    assert!(leases.open_gate(&cell(2), 1).gap.is_none(), "one is open");
}

#[tokio::test(start_paused = true)]
async fn a_caller_waits_no_longer_than_it_may() {
    let leases = leases(4);
    let denied = leases.lease(LeaseKind::Slot, PromptFacts::default()).await.unwrap_err();
    assert_eq!(denied, LeaseDenied::Deadline { waited: WAIT });
    assert_eq!(leases.waiting(), 0);
}

#[tokio::test(start_paused = true)]
async fn who_would_wait_in_vain_is_told_at_once_and_is_expected_back() {
    let leases = leases(4);
    let (now, wait) = (Instant::now(), WAIT);
    let slow = NextProcess { took: Some(3 * wait), fastest: Some(2 * wait), ..NextProcess::default() };
    leases.with_state(|queue| queue.coming.next = slow);
    let denied = leases.lease(LeaseKind::Slot, PromptFacts::default()).await.unwrap_err();
    assert_eq!(denied, LeaseDenied::TooSlow { left: 3 * wait, wait });
    tokio::time::timeout(WAIT, leases.wake.notified()).await.unwrap();
    assert!(leases.needs_process() && leases.loader_view().waiting == 1 && leases.waiting() == 0);
    // During the start less time remains, so the fastest start would be in time.
    leases.with_state(|queue| queue.coming.next = NextProcess { since: now.checked_sub(wait), ..slow });
    let waiting = queued(&leases, LeaseKind::Slot).await;
    let cell = cell(1);
    leases.open_gate(&cell, 1);
    drop(waiting.await.unwrap().unwrap());
    assert_eq!(leases.loader_view().waiting, 0, "whoever was expected has been served");
    // A repeated request is not refused because of a slow start.
    leases.close_gate(cell.id);
    leases.with_state(|queue| queue.coming.next = slow);
    let again = leases.lease_again(LeaseKind::Slot, PromptFacts::default()).await.unwrap_err();
    assert!(matches!(again, LeaseDenied::Deadline { .. }), "{again:?}");
    let _told = leases.lease(LeaseKind::Slot, PromptFacts::default()).await.unwrap_err();
    assert!(leases.needs_process() && leases.with_state(|queue| queue.refuses_requests()));
    tokio::time::sleep(4 * wait).await;
    assert!(!leases.needs_process() && leases.loader_view().waiting == 0, "nobody is expected for ever");
}

#[tokio::test]
async fn a_full_queue_turns_away_at_once_and_says_so_in_one_event() {
    let leases = leases(1);
    let waiting = queued(&leases, LeaseKind::Slot).await;
    for _ in 0..3 {
        let denied = leases.lease(LeaseKind::Slot, PromptFacts::default()).await.unwrap_err();
        assert_eq!(denied, LeaseDenied::QueueFull { waiting: 1, depth: 1 });
    }
    assert_eq!(leases.journal.journal.tail().events.len(), 1);
    leases.refuse_waiting(&LeaseDenied::Removed);
    assert_eq!(waiting.await.unwrap().unwrap_err(), LeaseDenied::Removed);
}

#[tokio::test]
async fn who_was_let_in_before_waits_beyond_the_depth_and_in_the_order_of_arrival() {
    let leases = leases(1);
    let first = queued(&leases, LeaseKind::Slot).await;
    // There are at most as many repeated requests as there were leases.
    let ours = Arc::clone(&leases);
    let again =
        waits(&leases, async move { ours.lease_again(LeaseKind::Slot, PromptFacts::default()).await }).await;
    let denied = leases.lease(LeaseKind::Slot, PromptFacts::default()).await.unwrap_err();
    assert_eq!(denied, LeaseDenied::QueueFull { waiting: 2, depth: 1 });
    leases.open_gate(&cell(1), 1);
    let first = first.await.unwrap().unwrap();
    assert!(!again.is_finished(), "it overtakes nobody");
    drop(first);
    assert!(again.await.unwrap().is_ok());
}

#[tokio::test]
async fn a_caller_that_leaves_frees_its_place() {
    let leases = leases(4);
    let mut leaving = Box::pin(leases.lease(LeaseKind::Slot, PromptFacts::default()));
    assert!(futures_util::poll!(leaving.as_mut()).is_pending());
    assert_eq!(leases.waiting(), 1);
    drop(leaving);
    assert_eq!(leases.waiting(), 0);
    assert!(lock(&leases.state).waiters.is_empty());
}

#[tokio::test]
async fn a_lease_granted_to_a_caller_that_leaves_goes_to_the_next() {
    let leases = leases(4);
    let mut leaving = Box::pin(leases.lease(LeaseKind::Slot, PromptFacts::default()));
    assert!(futures_util::poll!(leaving.as_mut()).is_pending());
    let next = queued(&leases, LeaseKind::Slot).await;
    let cell = cell(1);
    leases.open_gate(&cell, 1);
    // The lease was granted, but the request has not received it yet.
    assert_eq!(leases.in_flight(cell.id), 1);
    drop(leaving);
    let lease = next.await.unwrap().unwrap();
    assert_eq!(leases.in_flight(cell.id), 1);
    drop(lease);
    assert_eq!(leases.in_flight(cell.id), 0);
}

#[tokio::test]
async fn what_leases_tell_of_their_ends_is_kept_with_the_generation() {
    let leases = leases(4);
    let cell = cell(1);
    leases.open_gate(&cell, 2);
    let (one, two) = (
        leases.lease(LeaseKind::Slot, PromptFacts::default()).await.unwrap(),
        leases.lease(LeaseKind::Slot, PromptFacts::default()).await.unwrap(),
    );
    one.note_events(2);
    two.note_events(3);
    let failed = ExchangeOutcome {
        status: Some(500),
        compute_error: true,
        prompt: Some(40),
        ..ExchangeOutcome::default()
    };
    one.note_outcome(&failed);
    let errors = || lock(&cell.outcomes).compute_errors;
    let largest = || lock(&cell.outcomes).largest_prompt;
    assert_eq!((cell.pulses.progress_count(), errors(), largest()), (5, 1, 40));
    two.note_outcome(&ExchangeOutcome {
        status: Some(200),
        decode: Some((8, 16.0)),
        ..ExchangeOutcome::default()
    });
    assert_eq!((errors(), largest()), (0, 40));
    let decodes = std::mem::take(&mut lock(&cell.outcomes).decodes);
    assert_eq!(decodes.iter().map(|one| (one.tokens, one.ms, one.busy)).collect::<Vec<_>>(), [(8, 16.0, 2)]);
}

#[tokio::test]
async fn a_lease_that_outlives_its_process_is_harmless() {
    let leases = leases(4);
    let (old, new) = (cell(1), cell(2));
    leases.open_gate(&old, 1);
    let lease = leases.lease(LeaseKind::Slot, PromptFacts::default()).await.unwrap();
    assert_eq!(*lease.attachment(|| 7_u32), 7);
    assert_eq!(*lease.attachment(|| 8_u32), 7, "one per generation");
    leases.remove_generation(old.id);
    old.revoke();
    lease.until_revoked().await;
    leases.open_gate(&new, 1);
    drop(lease);
    assert_eq!(leases.in_flight(new.id), 0);
    assert!(leases.lease(LeaseKind::Slot, PromptFacts::default()).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn the_gap_runs_from_the_last_close_to_the_next_open() {
    let leases = leases(4);
    let (one, two) = (cell(1), cell(2));
    assert!(leases.open_gate(&one, 1).gap.is_none());
    assert!(leases.open_gate(&two, 1).gap.is_none());
    leases.close_gate(one.id);
    assert!(leases.open_gate(&one, 1).gap.is_none(), "the other one was open");
    leases.close_gate(one.id);
    leases.close_gate(two.id);
    tokio::time::advance(Duration::from_secs(3)).await;
    let gap = leases.open_gate(&two, 1).gap.unwrap();
    assert_eq!(gap.elapsed(), Duration::from_secs(3));
}

#[tokio::test(start_paused = true)]
async fn a_failed_start_is_told_at_once_with_the_time_to_the_next_attempt() {
    let leases = leases(4);
    let waiting = queued(&leases, LeaseKind::Slot).await;
    let again = Instant::now() + Duration::from_millis(1500);
    leases.set_refusal(Some(QueueRefusal::StartFailed(failure(), again)));
    let expected = LeaseDenied::StartFailed(failure(), Some(Duration::from_secs(2)));
    assert_eq!(waiting.await.unwrap().unwrap_err(), expected);
    assert_eq!(leases.lease(LeaseKind::Slot, PromptFacts::default()).await.unwrap_err(), expected);
    leases.open_gate(&cell(1), 1);
    assert!(
        leases.lease(LeaseKind::Slot, PromptFacts::default()).await.is_ok(),
        "what serves is not refused"
    );
}

#[tokio::test]
async fn the_end_lets_those_wait_on_who_can_still_be_served() {
    let leases = leases(4);
    leases.open_gate(&cell(1), 1);
    let lease = leases.lease(LeaseKind::Slot, PromptFacts::default()).await.unwrap();
    let waiting = queued(&leases, LeaseKind::Slot).await;
    leases.set_refusal(Some(QueueRefusal::ShuttingDown));
    leases.set_refusal(None);
    assert_eq!(
        leases.lease(LeaseKind::Slot, PromptFacts::default()).await.unwrap_err(),
        LeaseDenied::ShuttingDown
    );
    drop(lease);
    assert!(waiting.await.unwrap().is_ok());
}

/// Real threads: requests that are served, that leave at any moment, and a generation that comes and goes.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn under_contention_every_caller_is_answered_and_every_lease_comes_back() {
    const CALLERS: u64 = 2000;
    let leases = leases(usize::MAX);
    let callers = TaskTracker::new();
    for n in 0..CALLERS {
        let leases = Arc::clone(&leases);
        callers.spawn(async move {
            let kind = if n % 5 == 0 { LeaseKind::Aux } else { LeaseKind::Slot };
            let patience = if n % 3 == 0 { Duration::from_micros(n * 7 % 900) } else { WAIT };
            if let Ok(lease) =
                tokio::time::timeout(patience, leases.lease(kind, PromptFacts::default())).await
            {
                let lease = lease.unwrap();
                tokio::task::yield_now().await;
                lease.note_progress();
                drop(lease);
            }
        });
    }
    callers.close();
    let mut id = 0;
    while !callers.is_empty() {
        id += 1;
        let cell = cell(id);
        leases.open_gate(&cell, 3);
        tokio::task::yield_now().await;
        leases.close_gate(cell.id);
        if id % 7 == 0 {
            // The process died.
            leases.remove_generation(cell.id);
        } else {
            while leases.in_flight(cell.id) > 0 {
                tokio::task::yield_now().await;
            }
            leases.remove_generation(cell.id);
        }
    }
    tokio::time::timeout(WAIT, callers.wait()).await.unwrap();
    assert!(leases.with_state(|queue| queue.is_idle()) && lock(&leases.state).waiters.is_empty());
}

#[tokio::test]
async fn who_waits_in_another_instance_is_needed_for_but_has_no_place_here_and_may_be_given_up() {
    let leases = leases(1);
    let elsewhere =
        |waiting, came| leases.set_predecessor(PredecessorQueue::new(waiting, came, BTreeSet::new()));
    assert!(!leases.needs_process());
    elsewhere(2, 2);
    tokio::time::timeout(WAIT, leases.wake.notified()).await.expect("somebody came");
    assert!(leases.needs_process() && leases.waiting() == 2 && leases.loader_view().waiting == 2);
    let _own = queued(&leases, LeaseKind::Slot).await;
    assert_eq!(leases.waiting(), 3, "the queue of one had room");
    // Hopeless requests cause no start until another one comes.
    leases.refuse_waiting(&LeaseDenied::NeverLoaded("too large".to_owned()));
    leases.with_state(|queue| queue.predecessor.give_up());
    assert!(!leases.needs_process() && leases.loader_view().waiting == 0);
    elsewhere(1, 2);
    assert!(!leases.needs_process(), "one of them has left");
    elsewhere(2, 3);
    assert!(leases.needs_process(), "another one has come");
    leases.with_state(|queue| queue.predecessor.give_up());
    elsewhere(2, 3);
    assert!(!leases.needs_process(), "they are the same");
    elsewhere(2, 4);
    assert!(
        leases.needs_process() && leases.with_state(|queue| queue.queued_total()) == 5,
        "one has come while another one left, and one of ours had to wait"
    );
    leases.with_state(|queue| queue.predecessor.give_up());
    elsewhere(1, 0);
    assert!(!leases.needs_process(), "it does not say how many came");
    elsewhere(0, 0);
    assert!(!leases.needs_process() && leases.loader_view().idle_for < WAIT);
}

#[tokio::test]
async fn whoever_came_after_a_refusal_was_made_waits_on_and_so_do_all_where_somebody_serves() {
    let leases = leases(2);
    let early = queued(&leases, LeaseKind::Slot).await;
    let made = Instant::now();
    while Instant::now() <= made {
        tokio::task::yield_now().await;
    }
    let late = queued(&leases, LeaseKind::Slot).await;
    leases.refuse_waiting_since(&LeaseDenied::Removed, made);
    assert_eq!(early.await.unwrap().unwrap_err(), LeaseDenied::Removed);
    assert_eq!(leases.waiting(), 1);
    let cell = cell(1);
    leases.open_gate(&cell, 1);
    let _served = late.await.unwrap().unwrap();
    let waits = queued(&leases, LeaseKind::Slot).await;
    leases.refuse_waiting_since(&LeaseDenied::Removed, Instant::now());
    assert!(!waits.is_finished() && leases.waiting() == 1, "a slot will be free");
}

#[tokio::test]
async fn a_generation_is_open_elsewhere_until_that_is_said_to_be_over_and_what_runs_there_counts() {
    let leases = leases(1);
    let cell = cell(1);
    leases.open_gate(&cell, 1);
    let elsewhere = |open: &[u64]| {
        leases.set_predecessor(PredecessorQueue::new(0, 0, open.iter().copied().map(GenerationId).collect()));
    };
    elsewhere(&[1, 2]);
    assert!(!leases.with_state(|queue| queue.is_unused(cell.id)), "it may be given to somebody there");
    leases.close_gate(cell.id);
    let tally = leases.with_state(|queue| queue.generation_counts()).remove(0);
    assert!(tally.open && tally.in_flight == 0, "more may come: {tally:?}");
    let lease = leases.take_for_another(cell.id).expect("it counts, although nobody is let in here");
    assert_eq!(leases.in_flight(cell.id), 1);
    elsewhere(&[2]);
    tokio::time::timeout(WAIT, leases.wake.notified()).await.expect("whoever drains is woken");
    assert!(
        !leases.with_state(|queue| queue.is_unused(cell.id))
            && !leases.with_state(|queue| queue.generation_counts()).remove(0).open,
        "its lease is held"
    );
    drop(lease);
    assert_eq!(leases.in_flight(cell.id), 0);
    assert!(leases.with_state(|queue| queue.is_unused(cell.id)));
    assert!(leases.take_for_another(GenerationId(9)).is_none(), "nothing is known of it");
}
