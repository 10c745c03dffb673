//! Examples and properties of carrying state over.

use proptest::prelude::*;

use super::*;

fn slot(id: u32, busy: bool, tokens: impl Into<Option<u64>>) -> SlotFacts {
    SlotFacts { id, busy, tokens: tokens.into(), task: None }
}

#[test]
fn slots_of_the_latest_conversations_are_saved_first_and_busy_or_small_ones_never() {
    let slots = [
        slot(0, false, 4000),
        slot(1, true, 900),
        slot(2, false, 12),
        slot(3, false, None),
        slot(4, false, 901),
    ];
    assert_eq!(slots_to_save(&slots, &[902, 4001], 256), [4, 0, 3]);
    assert_eq!(slots_to_save(&slots, &[], 256), [0, 3, 4]);
    let of = |id, task| SlotFacts { task: Some(task), ..slot(id, false, 500) };
    assert_eq!(slots_to_save(&[of(0, 7), of(1, 30), of(2, 9)], &[500, 500, 500], 256), [1, 2, 0]);
}

#[test]
fn a_slot_is_the_latest_conversation_of_about_its_size() {
    let all = [500, 801, 500];
    assert_eq!(conversation_of(499, &all, &[]), Some(0));
    assert_eq!(conversation_of(499, &all, &[0]), Some(2));
    assert_eq!(conversation_of(499, &all, &[0, 2]), None);
    assert_eq!(conversation_of(805, &all, &[]), None);
}

#[test]
fn files_keep_within_their_room_and_what_cannot_fit_is_not_begun() {
    const MIB: u64 = 1 << 20;
    let mut room = FileRoom::new(1000 * MIB, Some(1600 * MIB), 0.5);
    assert!(
        room.has(Some(1600)) && !room.has(Some(1601)),
        "before the first file: half a MiB a token, of 800 MiB"
    );
    assert!(!room.has(None), "a file of any size could come of it");
    assert!(room.record_file(100, 600 * MIB));
    assert!(room.has(Some(33)) && !room.has(Some(34)), "six MiB a token, 200 are left");
    assert!(!room.record_file(50, 300 * MIB), "larger than was thought: it goes");
    assert!(room.record_file(33, 200 * MIB) && !room.has(Some(1)));
    assert!(!FileRoom::new(0, None, 0.5).has(Some(1)));
}

#[test]
fn a_file_pays_where_writing_and_reading_it_is_quicker_than_evaluating() {
    assert!(is_worthwhile(1000, 400.0, Some(1.0)) && !is_worthwhile(1000, 600.0, Some(1.0)));
    assert!(is_worthwhile(1000, 600.0, None), "not known: the time limit holds");
    assert!(is_worthwhile(1000, 100.0, Some(0.001)), "nobody notices");
}

#[test]
fn a_turn_that_evaluates_all_of_its_prompt_shows_that_its_slot_is_of_no_use() {
    assert!(is_useless(900, 1000, 1000) && is_useless(900, 1000, 999));
    for (held, prompt, evaluated) in [(900, 1000, 990), (900, 1000, 110), (400, 1000, 1000), (0, 0, 0)] {
        assert!(!is_useless(held, prompt, evaluated), "{held} {prompt} {evaluated}");
    }
}

#[test]
fn a_proof_takes_less_than_evaluating_and_pieces_follow_the_speed() {
    let second = Duration::from_secs(1);
    let patience =
        |tokens, per_token_ms, nobody_waits| proof_timeout(tokens, per_token_ms, nobody_waits, second);
    assert_eq!(patience(8000, Some(1.0), false), second, "what is there costs one token");
    assert_eq!(patience(8000, Some(1.0), true), 12 * second, "nobody waits for it");
    assert_eq!(
        (patience(800, Some(1.0), false), patience(8000, None, true), patience(9, Some(f64::NAN), true)),
        (second, second, second)
    );
    let mut pieces = PromptPieces::new(Duration::from_millis(100));
    assert_eq!(pieces.size(), 32);
    for (took_ms, next) in [(10, 128), (100, 128), (50, 256), (400, 64), (900, 32), (0, 128)] {
        pieces.record_time(pieces.size(), Duration::from_millis(took_ms));
        assert_eq!(pieces.size(), next, "{took_ms}");
    }
}

#[test]
fn only_what_was_cached_proves_anything() {
    for (cached, evaluated, expected) in [
        (1440, 30, CacheProof::Reused),
        (0, 1470, CacheProof::Evaluated),
        (0, 3, CacheProof::Evaluated),
        (300, 16, CacheProof::Reused),
        (100, 17, CacheProof::Evaluated),
        (64, 1400, CacheProof::Evaluated),
    ] {
        assert_eq!(classify_proof(cached, evaluated), expected, "{cached} {evaluated}");
    }
}

#[test]
fn the_words_name_everything_that_is_not_warm() {
    let mut all = WarmthReport {
        conversations: 8,
        carried: 6,
        evaluated: 1,
        bytes: 3 << 20,
        ..WarmthReport::default()
    };
    all.count_cold(ColdReason::Media, 1);
    all.record_no_file(NoFileReason::Room);
    all.record_no_file(NoFileReason::Time);
    let mut windows =
        WarmthReport { conversations: 4, evaluated: 1, later: 2, unproven: 1, ..WarmthReport::default() };
    windows.record_no_file(NoFileReason::NotReused);
    let whole = WarmthReport { conversations: 8, carried: 8, bytes: 1 << 30, ..WarmthReport::default() };
    insta::assert_snapshot!(format!("{all}\n{windows}\n{whole}\n{}", WarmthReport::default()));
    let json = serde_json::to_value(&all).unwrap();
    assert_eq!((&json["cold"]["media"], &json["no_file"]), (&1.into(), &"room".into()));
    assert_eq!(serde_json::from_value::<WarmthReport>(json).unwrap(), all);
}

#[test]
fn what_was_due_is_counted_once_when_it_is_done() {
    let mut all =
        WarmthReport { conversations: 8, carried: 3, evaluated: 1, later: 4, ..WarmthReport::default() };
    let mut behind =
        WarmthReport { conversations: 3, evaluated: 1, evaluate_ms: 5, ..WarmthReport::default() };
    behind.count_cold(ColdReason::Refused, 1);
    all.add_later(&behind);
    assert_eq!((all.conversations, all.warm_count(), all.later), (8, 5, 0));
    assert_eq!((all.cold[&ColdReason::Refused], all.cold[&ColdReason::Time]), (1, 2));
}

proptest! {
    #[test]
    fn every_idle_slot_that_is_large_enough_is_ordered_once(
        slots in proptest::collection::vec((any::<bool>(), proptest::option::of(0_u64..3000)), 0..20),
        conversations in proptest::collection::vec(0_u64..3000, 0..20),
    ) {
        let slots: Vec<SlotFacts> =
            (0..).zip(slots).map(|(id, (busy, tokens))| slot(id, busy, tokens)).collect();
        let mut ordered = slots_to_save(&slots, &conversations, 256);
        let ranks: Vec<usize> = ordered
            .iter()
            .map(|id| {
                let tokens = slots[*id as usize].tokens;
                tokens.and_then(|tokens| conversation_of(tokens, &conversations, &[])).unwrap_or(usize::MAX)
            })
            .collect();
        prop_assert!(ranks.is_sorted(), "{ranks:?}");
        ordered.sort_unstable();
        let fit = slots.iter().filter(|slot| !slot.busy && slot.tokens.is_none_or(|tokens| tokens >= 256));
        prop_assert_eq!(ordered, fit.map(|slot| slot.id).collect::<Vec<_>>());
    }

    #[test]
    fn files_never_take_more_than_their_room(
        bytes in 0_u64..10_000,
        free in proptest::option::of(0_u64..10_000),
        files in proptest::collection::vec((1_u64..500, 0_u64..4000), 0..20),
    ) {
        // Sizes in MiB: a token is assumed to take half of one.
        let (bytes, free) = (bytes << 20, free.map(|free| free << 20));
        let files: Vec<(u64, u64)> = files.into_iter().map(|(tokens, size)| (tokens, size << 20)).collect();
        let mut room = FileRoom::new(bytes, free, 0.5);
        let mut taken = 0;
        for (tokens, size) in files {
            if room.has(Some(tokens)) && room.record_file(tokens, size) {
                taken += size;
            }
        }
        prop_assert!(taken <= bytes && free.is_none_or(|free| taken <= free / 2 + 1), "{taken}");
    }
}
