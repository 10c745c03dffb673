//! The list of requests: none is missing, none remains, and a cancellation never hits another request.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use http::{Method, Version};
use proptest::prelude::*;
use warden_policies::{GenerationId, ModelName, WorkDone};
use warden_supervisor::ExchangeOutcome;

use super::shard::WallClock;
use super::*;
use crate::observe::{RequestOutcome, RequestRecord};
use crate::protocol::LEAST_BUFFER;

const SIZES: ShardSizes = ShardSizes { ended: 8, turned_away: 2 };

fn record(id: &str) -> RequestRecord {
    RequestRecord {
        request_id: id.to_owned(),
        peer: IpAddr::V4(Ipv4Addr::LOCALHOST),
        method: Method::POST,
        protocol: Version::HTTP_11,
        user_agent: None,
        key: None,
        route: "chat",
        model: None,
        generation: None,
        status: 200,
        late_status: None,
        outcome: RequestOutcome::Ok,
        stream: false,
        queued: Duration::ZERO,
        first_byte: None,
        first_token: None,
        trace: None,
        total: Duration::ZERO,
        bytes_in: 0,
        bytes_out: 0,
        work: WorkDone::default(),
        retries: 0,
        continued: false,
        canary_part: None,
    }
}

fn begun(record: &RequestRecord) -> RequestStart<'_> {
    RequestStart {
        request_id: &record.request_id,
        peer: record.peer,
        method: &record.method,
        protocol: record.protocol,
        route: record.route,
        generates: true,
        at: Instant::now(),
    }
}

/// Begins an admitted request on the shard with this number.
fn begin(
    requests: &RequestRegistry,
    shard: usize,
    id: &str,
    conn: &Arc<ConnState>,
) -> (ShardTicket, ProgressHandle) {
    let record = record(id);
    let (ticket, progress) = RequestShard::begin(&requests.0[shard], &begun(&record), conn);
    progress.set_model(&ModelName::new("m"));
    (ticket, progress)
}

#[test]
fn a_request_is_shown_as_far_as_it_has_come() {
    let requests = RequestRegistry::with_sizes(1, SIZES);
    let (ticket, progress) = begin(&requests, 0, "a", &ConnState::new(LEAST_BUFFER));
    let now = || requests.list().remove(0);
    assert_eq!((now().state, now().attempts, now().generation), (RequestState::Receiving, 0, None));
    progress.set_key(Some(&"alice".into()));
    progress.note_waiting();
    let waits = now();
    assert_eq!((waits.state, waits.key.as_deref()), (RequestState::Queued, Some("alice")));
    assert!(waits.queued_ms >= 0.0 && waits.prefill_ms.is_none());
    progress.note_leased(GenerationId(3), Duration::from_millis(7));
    assert_eq!((now().state, now().queued_ms), (RequestState::Sent, 7.0));
    progress.note_asked(true, None, 7);
    let held = || requests.context_holdings()[&ModelName::new("m")];
    assert_eq!(held(), ContextHoldings { requests: 1, tokens: 7 }, "by its length, until somebody counts");
    progress.note_asked(true, Some(40), 7);
    let sent = now();
    assert_eq!((sent.state, sent.prompt_tokens, sent.stream), (RequestState::Prefill, 40, true));
    assert!(sent.prefill_ms.is_some() && sent.generating_ms.is_none());
    progress.note_answer(Instant::now());
    progress.note_generated(5);
    let generates = now();
    assert_eq!((generates.state, generates.output_tokens), (RequestState::Generating, 5));
    assert_eq!(held().tokens, 45);
    assert_eq!((generates.prompt_tokens, generates.generation), (40, Some(GenerationId(3))));
    progress.note_continuing();
    progress.note_waiting_again(true);
    progress.note_leased(GenerationId(4), Duration::from_millis(9));
    assert_eq!((now().state, now().attempts), (RequestState::Continuing, 2), "nothing more is there yet");
    progress.note_answer(Instant::now());
    assert_eq!(now().state, RequestState::Generating);
    progress.note_times(&ExchangeOutcome {
        prefill: Some((1, 12.5)),
        decode: Some((1, 30.0)),
        ..ExchangeOutcome::default()
    });
    let mut end = record("a");
    (end.total, end.queued, end.retries) = (Duration::from_millis(60), Duration::from_millis(9), 1);
    (end.generation, end.continued) = (Some(GenerationId(4)), true);
    end.work = WorkDone { prompt_tokens: 41, output_tokens: 6, ..WorkDone::default() };
    ticket.end(&end);
    assert!(requests.context_holdings().is_empty());
    let ended = now();
    assert_eq!(
        (ended.state, ended.status, ended.outcome.as_deref()),
        (RequestState::Ended, Some(200), Some("ok"))
    );
    assert_eq!((ended.prefill_ms, ended.generating_ms), (Some(12.5), Some(30.0)), "as its backend says");
    assert_eq!((ended.total_ms, ended.queued_ms, ended.attempts), (60.0, 9.0, 2));
    assert_eq!((ended.prompt_tokens, ended.output_tokens, ended.continued), (41, 6, true));
    assert_eq!(requests.in_flight(), 0);
    let json = serde_json::to_value(&ended).unwrap();
    assert_eq!(serde_json::from_value::<RequestView>(json).unwrap(), ended);
}

#[test]
fn the_names_of_states_are_those_in_json() {
    for state in RequestState::ALL {
        assert_eq!(serde_json::to_value(state).unwrap(), state.as_str());
    }
}

#[test]
fn the_last_that_ended_are_kept_and_their_places_are_used_again() {
    let requests = RequestRegistry::with_sizes(1, SIZES);
    let mut places = HashSet::new();
    for n in 0..1000 {
        let (ticket, progress) = begin(&requests, 0, &n.to_string(), &ConnState::new(LEAST_BUFFER));
        places.insert(progress.0.as_ref().map(|entry| Arc::as_ptr(entry) as usize));
        assert_eq!(requests.list()[0].output_tokens, 0, "nothing is left of who was there before");
        progress.note_generated(n);
        drop(progress);
        ticket.end(&RequestRecord { total: Duration::from_nanos(n), ..record("") });
    }
    assert!(places.len() <= SIZES.ended + 2, "{} for {}", places.len(), SIZES.ended);
    let kept: Vec<String> = requests.list().into_iter().map(|one| one.id).collect();
    assert_eq!(kept.len(), SIZES.ended);
    assert!(kept.contains(&"999".to_owned()) && !kept.contains(&"991".to_owned()), "{kept:?}");
}

#[test]
fn who_ends_while_others_are_looked_at_is_not_shown_as_in_flight_though_it_is_not_kept_any_more() {
    let requests = RequestRegistry::with_sizes(1, SIZES);
    let shard = &requests.0[0];
    let (first, _) = begin(&requests, 0, "first", &ConnState::new(LEAST_BUFFER));
    let _stays = begin(&requests, 0, "stays", &ConnState::new(LEAST_BUFFER));
    let live = shard.live();
    assert_eq!(live.len(), 2);
    first.end(&record(""));
    for n in 0..SIZES.ended {
        begin(&requests, 0, &n.to_string(), &ConnState::new(LEAST_BUFFER)).0.end(&record(""));
    }
    let all = shard.with_ended(live);
    let shown: Vec<_> = all.iter().filter(|one| one.end.is_none()).map(|one| one.entry.id.as_str()).collect();
    assert_eq!(shown, ["stays"]);
    assert_eq!(all.len(), 1 + SIZES.ended);
    // A request that ends afterwards was in flight when the list was made.
    let (late, _) = begin(&requests, 0, "late", &ConnState::new(LEAST_BUFFER));
    let entry = shard.live().into_iter().find(|one| one.entry.id == "late").unwrap().entry;
    let before = SIZES.ended as u64 + 1;
    assert!(entry.was_in_flight(before));
    late.end(&record(""));
    assert!(entry.was_in_flight(before) && !entry.was_in_flight(before + 1));
}

#[test]
fn what_is_over_stays_where_it_was_when_the_clock_is_set() {
    let requests = RequestRegistry::with_sizes(1, SIZES);
    let (ticket, _) = begin(&requests, 0, "a", &ConnState::new(LEAST_BUFFER));
    ticket.end(&RequestRecord { total: Duration::from_millis(40), ..record("") });
    let seen = requests.0[0].list().remove(0);
    let (now, wall) = (Instant::now(), clock::unix_ms());
    let first = seen.view(now, wall);
    assert_eq!(first.ended_unix_ms, Some(first.began_unix_ms + 40));
    assert!(first.began_unix_ms.abs_diff(wall) < 60_000, "{first:?}");
    let set = wall - 3_600_000;
    assert_eq!(seen.view(now + Duration::from_secs(1), set), first);
}

#[test]
fn the_clock_on_the_wall_is_looked_at_once_a_second() {
    let start = Instant::now();
    let mut wall = WallClock { at: start, unix_ms: 5_000 };
    assert_eq!(wall.unix_ms_at(start + Duration::from_millis(999), || panic!("too soon")), 5_999);
    assert_eq!(wall.unix_ms_at(start + Duration::from_secs(1), || 77_000), 77_000, "it was set");
    assert_eq!(wall.unix_ms_at(start + Duration::from_millis(1_001), || panic!("too soon")), 77_001);
    assert_eq!(wall.unix_ms_at(start, || panic!("too soon")), 77_000, "never before the last look");
}

#[test]
fn those_that_were_turned_away_drive_out_no_other() {
    let requests = RequestRegistry::with_sizes(1, SIZES);
    let (ticket, _) = begin(&requests, 0, "let in", &ConnState::new(LEAST_BUFFER));
    ticket.end(&record(""));
    for n in 0..100 {
        let away = record(&n.to_string());
        let (ticket, _) = requests.begin(&begun(&away), &ConnState::new(LEAST_BUFFER));
        ticket.end(&away);
    }
    let ids: HashSet<String> = requests.list().into_iter().map(|one| one.id).collect();
    assert_eq!(ids, ["let in", "98", "99"].map(str::to_owned).into());
}

#[test]
fn in_flight_is_the_oldest_first_and_then_the_last_that_ended() {
    let requests = RequestRegistry::with_sizes(3, SIZES);
    let begin = |n: usize| begin(&requests, n % 3, &n.to_string(), &ConnState::new(LEAST_BUFFER));
    let mut all: Vec<_> = (0..6).map(|n| Some(begin(n))).collect();
    for n in [1, 4] {
        let (ticket, _) = all[n].take().unwrap();
        ticket.end(&RequestRecord { total: Duration::from_millis(n as u64), ..record("") });
    }
    let ids: Vec<String> = requests.list().into_iter().map(|one| one.id).collect();
    assert_eq!(ids, ["0", "2", "3", "5", "4", "1"]);
    assert_eq!(requests.in_flight(), 4);
}

proptest! {
    /// Requests begin and end in any order: those in flight are those that began and have not ended.
    #[test]
    fn the_books_say_what_happened(steps in proptest::collection::vec((0..3_usize, 0..8_usize, any::<bool>()), 1..200)) {
        let requests = RequestRegistry::with_sizes(3, SIZES);
        let (mut open, mut ended) = (HashMap::new(), Vec::new());
        for (step, (shard, which, begins)) in steps.into_iter().enumerate() {
            let (id, conn) = (step.to_string(), ConnState::new(LEAST_BUFFER));
            if begins || open.is_empty() {
                open.insert(id.clone(), (begin(&requests, shard, &id, &conn), conn));
            } else {
                let id: String = open.keys().nth(which % open.len()).cloned().unwrap_or_default();
                if let Some(((ticket, _), conn)) = open.remove(&id) {
                    ticket.end(&record(""));
                    prop_assert!(requests.cancel(&id, None).is_err());
                    prop_assert!(!conn.cancelling.take_request());
                    ended.push(id);
                }
            }
            let list = requests.list();
            let live: HashSet<String> = list.iter().filter(|one| one.is_in_flight()).map(|one| one.id.clone()).collect();
            prop_assert_eq!(&live, &open.keys().cloned().collect::<HashSet<_>>());
            prop_assert_eq!(requests.in_flight(), open.len());
            let numbers: HashSet<u64> = list.iter().map(|one| one.number).collect();
            prop_assert_eq!(numbers.len(), list.len());
            let over: Vec<&RequestView> = list.iter().filter(|one| !one.is_in_flight()).collect();
            prop_assert!(over.iter().all(|one| ended.contains(&one.id)));
        }
        for (id, ((_ticket, _), conn)) in &open {
            prop_assert!(requests.cancel(id, None).is_ok_and(|told| !told.was_cancelled));
            prop_assert!(requests.cancel(id, None).is_ok_and(|told| told.was_cancelled));
            prop_assert!(conn.cancelling.take_request() && !conn.cancelling.take_request());
        }
    }
}

/// Threads begin and end requests as fast as they can; one thread lists, another cancels at random.
#[test]
#[expect(clippy::disallowed_methods, reason = "tests stop where the system has no thread to give")]
fn in_a_storm_nobody_is_missing_nobody_stays_and_a_cancel_meets_nobody_else() {
    const THREADS: usize = 4;
    const AT_LEAST: u64 = 2000;
    // A watcher that starts late must find requests: the threads continue until both watchers saw some.
    const AT_MOST: u64 = 2_000_000;
    let requests = RequestRegistry::with_sizes(2, SIZES);
    let over = AtomicBool::new(false);
    let (told, taken) = (Mutex::new(HashSet::new()), Mutex::new(HashSet::new()));
    let (lists, left) = (AtomicUsize::new(0), AtomicUsize::new(THREADS));
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (requests, told, taken) = (&requests, &told, &taken);
            let (lists, left, over) = (&lists, &left, &over);
            scope.spawn(move || {
                let conn = ConnState::new(LEAST_BUFFER);
                for n in 0..AT_MOST {
                    let watched = lists.load(Ordering::SeqCst) > 0 && !told.lock().unwrap().is_empty();
                    if n >= AT_LEAST && watched {
                        break;
                    }
                    let busy = conn.begin();
                    let id = format!("{thread}-{n}");
                    // Two threads share a shard, so that they contend for its lock.
                    let (ticket, progress) = begin(requests, thread % 2, &id, &conn);
                    if n % 16 == 0 {
                        let list = requests.list();
                        let own: Vec<_> = list.iter().filter(|one| one.id == id).collect();
                        assert!(own.len() == 1 && own[0].is_in_flight(), "{own:?}");
                    }
                    if busy.takes_cancel() {
                        taken.lock().unwrap().insert(id.clone());
                        assert!(progress.is_cancelled(), "{id} was meant");
                    }
                    drop(progress);
                    ticket.end(&record(""));
                    // A cancellation between its end and the next beginning has no effect.
                    if n % 16 == 0 {
                        let list = requests.list();
                        assert!(list.iter().all(|one| one.id != id || !one.is_in_flight()));
                    }
                    drop(busy);
                }
                if left.fetch_sub(1, Ordering::SeqCst) == 1 {
                    over.store(true, Ordering::SeqCst);
                }
            });
        }
        scope.spawn(|| {
            while !over.load(Ordering::SeqCst) {
                let list = requests.list();
                let numbers: HashSet<u64> = list.iter().map(|one| one.number).collect();
                assert_eq!(numbers.len(), list.len(), "nobody is in it twice");
                lists.fetch_add(1, Ordering::SeqCst);
            }
        });
        scope.spawn(|| {
            while !over.load(Ordering::SeqCst) {
                let Some(first) = requests.list().into_iter().find(RequestView::is_in_flight) else {
                    continue;
                };
                if requests.cancel(&first.id, None).is_ok() {
                    told.lock().unwrap().insert(first.id);
                }
            }
        });
    });
    let (told, taken) = (told.into_inner().unwrap(), taken.into_inner().unwrap());
    assert!(taken.is_subset(&told), "{:?}", taken.difference(&told));
    assert!(lists.into_inner() > 0 && !told.is_empty());
    assert_eq!(requests.in_flight(), 0);
    println!("{} were told, {} of them saw it in time", told.len(), taken.len());
}
