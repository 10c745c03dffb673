//! Declared memory of a server from its arguments, environment and log.

use proptest::prelude::*;

use super::*;
use crate::book::{LayerShape, ModelShape};

fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

fn declared(args: &str) -> DeclaredMemory {
    DeclaredMemory::from_command(&words(args), &BTreeMap::new(), Some(11_100))
}

#[test]
fn without_a_flag_the_default_of_the_build_counts() {
    let bytes = |build| DeclaredMemory::from_command(&[], &BTreeMap::new(), build).bytes();
    assert_eq!(bytes(Some(11_100)), 8192 * MIB);
    assert_eq!(bytes(Some(6723)), 8192 * MIB);
    assert_eq!(bytes(Some(6722)), 0, "older than the prompt cache");
    assert_eq!(bytes(None), 8192 * MIB);
    assert_eq!(bytes(Some(1)), 8192 * MIB, "a shallow source calls itself build 1");
}

#[test]
fn a_flag_beats_a_variable_and_the_last_flag_beats_the_others() {
    let env = BTreeMap::from([("LLAMA_ARG_CACHE_RAM".to_owned(), "100".to_owned())]);
    let bytes = |args: &str| DeclaredMemory::from_command(&words(args), &env, None).bytes();
    assert_eq!(bytes("-m x"), 100 * MIB);
    assert_eq!(bytes("-cram 200 --cache_ram 300"), 300 * MIB);
    assert_eq!(bytes("--cache-ram 0"), 0);
    assert_eq!(bytes("--cache-ram many"), 100 * MIB, "llama-server will not start with it");
}

#[test]
fn a_build_without_a_feature_ignores_its_variable() {
    let env = [("LLAMA_ARG_CACHE_RAM", "100"), ("LLAMA_ARG_CTX_CHECKPOINTS", "5")];
    let env = env.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
    let of = |build| {
        let declared = DeclaredMemory::from_command(&[], &env, Some(build));
        (declared.cache_bound().unwrap() / MIB, declared.checkpoints().0)
    };
    assert_eq!(of(6723), (100, 5));
    assert_eq!(of(6722), (0, 5));
    assert_eq!(of(6684), (0, 3), "the default for sliding windows");
}

const GIB: u64 = 1 << 30;

#[test]
fn a_small_machine_bounds_caches_and_a_large_one_leaves_the_defaults() {
    let cache = |memory| {
        CacheBounds::for_process(&crate::defaults().loading, ByteSize(memory), None).prompt_cache_mib
    };
    assert_eq!(cache(16 * GIB), Some(2048));
    assert_eq!(cache(64 * GIB - 1), Some(8191));
    assert_eq!(cache(64 * GIB), None);
    assert_eq!(cache(100 * MIB), Some(64), "less holds no conversation");
    assert_eq!(cache(0), None, "the memory is unknown");
}

#[test]
fn checkpoints_are_bounded_by_their_size_and_number_of_slots() {
    let windowed = LayerShape { keys: 512, values: 512, windowed: true, ..LayerShape::default() };
    let shape = |layers| ModelShape {
        layers: vec![windowed; layers],
        window: 1024,
        context: 8192,
        ..ModelShape::default()
    };
    let count = |memory, args: &str, layers| {
        let run = ServerRun::from_command(&words(args), &BTreeMap::new());
        CacheBounds::for_process(&crate::defaults().loading, ByteSize(memory), Some((&shape(layers), &run)))
            .checkpoints
    };
    // A checkpoint has 64 layers of 1,024 tokens of 1,024 numbers of 2 bytes: 128 MiB.
    assert_eq!(count(16 * GIB, "-c 8192 -np 1", 64), Some(16));
    assert_eq!(count(16 * GIB, "-c 8192 -np 4", 64), Some(4));
    assert_eq!(count(2 * GIB, "-c 8192 -np 4", 64), Some(2), "one does not serve an edited message");
    assert_eq!(count(64 * GIB, "-c 8192 -np 1", 64), None, "all 32 fit");
    assert_eq!(count(16 * GIB, "-c 8192 -np 4", 0), None, "a model without checkpoints");
}

#[test]
fn a_cache_without_a_bound_is_reckoned_with_half_of_what_is_available() {
    let mut keeps = declared("--cache-ram -1");
    assert_eq!(keeps.bytes(), 8192 * MIB);
    keeps.set_available(3000);
    assert_eq!(keeps.bytes(), 1500);
    insta::assert_snapshot!(keeps.source_sentences().join("\n"));
}

#[test]
fn checkpoints_count_once_their_size_is_known() {
    let mut keeps = declared("--cache-ram 0 -np 2 --ctx-checkpoints 8");
    assert_eq!(keeps.bytes(), 0);
    insta::assert_snapshot!(keeps.source_sentences().join("\n"));
    let line = "slot update_slots: id  1 | task 7 | created context checkpoint 3 of 8 (pos_min = 0, pos_max = 99, n_tokens = 100, size = 62.500 MiB)";
    let size = 62 * MIB + MIB / 2;
    let learned = CacheLogLine::Checkpoint { slot: Some(1), count: 3, of: 8, bytes: size };
    assert_eq!(keeps.apply_log_line(line), Some(learned));
    assert_eq!(keeps.bytes(), 2 * 8 * size);
    assert_eq!(keeps.measured(), Some(3 * size));
    assert_eq!(keeps.unmeasured(), 0);
}

#[test]
fn lines_of_the_real_server_are_read_with_what_stands_before_them() {
    for (line, learned) in [
        (
            "srv        update:  - cache state: 12 prompts, 418.355 MiB (limits: 8192.000 MiB, 8192 tokens, 163840 est)",
            CacheLogLine::CacheState { bytes: 438_677_012 },
        ),
        (
            "0.01.234.567 W srv    load_model: prompt cache is enabled, size limit: 8192 MiB",
            CacheLogLine::CacheLimit { bytes: Some(8192 * MIB) },
        ),
        (
            "srv    load_model: prompt cache is enabled, size limit: no limit",
            CacheLogLine::CacheLimit { bytes: None },
        ),
        (
            "srv load_model: prompt cache is disabled - use `--cache-ram N` to enable it",
            CacheLogLine::CacheOff,
        ),
        (
            "srv  alloc:  - cache size limit reduced to 12.000 MiB",
            CacheLogLine::CacheLimit { bytes: Some(12 * MIB) },
        ),
        (
            "0.00.424.534 I slot create_check: id  1 | task 0 | created context checkpoint 1 of 32 (pos_min = 0, pos_max = 289, n_tokens = 290, size = 0.500 MiB)",
            CacheLogLine::Checkpoint { slot: Some(1), count: 1, of: 32, bytes: MIB / 2 },
        ),
        (
            "0.00.650.223 I slot process_sing: id  1 | task -1 | saving idle slot to prompt cache",
            CacheLogLine::SlotSaved { slot: 1 },
        ),
        (
            "srv load_model: context checkpoints enabled, max = 32, min spacing = 8192",
            CacheLogLine::Checkpoints { of: 32 },
        ),
        ("context checkpoints disabled", CacheLogLine::Checkpoints { of: 0 }),
        (
            "srv  load_model: initializing, n_slots = 4, n_ctx_slot = 2048, kv_unified = 'true'",
            CacheLogLine::Slots { slots: 4, one_pool: Some(true) },
        ),
        (
            "srv  load_model: initializing, n_slots = 2, n_ctx_slot = 512, kv_unified = 'false'",
            CacheLogLine::Slots { slots: 2, one_pool: Some(false) },
        ),
        (
            "srv    load_model: initializing slots, n_slots = 4",
            CacheLogLine::Slots { slots: 4, one_pool: None },
        ),
    ] {
        assert_eq!(parse_line(line), Some(learned), "{line}");
    }
    for line in [
        "",
        "saving idle slot to prompt cache",
        "srv  update_slots: all slots are idle",
        "cache state: ",
        "cache state: 12 prompts, lots",
        "created context checkpoint",
        "slot x: id 0 | erasing old context checkpoint (pos_min = 1, pos_max = 2, n_tokens = 3, size = 1.000 MiB)",
    ] {
        assert_eq!(parse_line(line), None, "{line}");
    }
}

#[test]
fn slots_share_one_context_if_that_was_asked_for_or_their_number_was_not() {
    for (words, one_pool) in [
        ("", true),
        ("-np 4", false),
        ("-np 4 -kvu", true),
        ("--parallel 4 --kv-unified", true),
        ("--no-kv-unified", false),
    ] {
        assert_eq!(declared(words).is_one_pool(), one_pool, "{words}");
    }
    let mut told = declared("-np 4");
    told.apply_log_line("srv load_model: initializing slots, n_slots = 4");
    assert!(!told.is_one_pool(), "an old build says nothing of it");
    told.apply_log_line("srv load_model: initializing, n_slots = 4, n_ctx_slot = 2048, kv_unified = 'true'");
    assert!(told.is_one_pool(), "its log knows better");
    // Versions before `one_pool` wrote state without that field.
    let mut written = serde_json::to_value(&told).unwrap();
    written.as_object_mut().unwrap().remove("one_pool");
    let read: DeclaredMemory = serde_json::from_value(written).unwrap();
    assert!(!read.is_one_pool());
}

#[test]
fn the_log_beats_what_was_declared_and_a_measured_cache_is_not_allowed_for_twice() {
    let mut keeps = declared("");
    keeps.apply_log_line("srv load_model: prompt cache is enabled, size limit: 512 MiB");
    assert_eq!((keeps.bytes(), keeps.unmeasured(), keeps.measured()), (512 * MIB, 512 * MIB, None));
    keeps.apply_log_line("cache state: 2 prompts, 100.000 MiB (limits: 512.000 MiB, 8192 tokens, 9000 est)");
    assert_eq!((keeps.unmeasured(), keeps.measured()), (0, Some(100 * MIB)));
    insta::assert_snapshot!(keeps.source_sentences().join("\n"));
}

#[test]
fn checkpoints_that_move_to_the_cache_are_counted_there_only() {
    let mut keeps = declared("");
    keeps.apply_log_line(
        "slot create_check: id  1 | task 0 | created context checkpoint 2 of 32 (size = 10.000 MiB)",
    );
    assert_eq!(keeps.measured(), Some(20 * MIB));
    keeps.apply_log_line("slot process_sing: id  1 | task -1 | saving idle slot to prompt cache");
    keeps.apply_log_line("srv        update:  - cache state: 1 prompts, 30.000 MiB (limits: 64.000 MiB, 2048 tokens, 4092 est)");
    assert_eq!(keeps.measured(), Some(30 * MIB));
}

#[test]
fn nothing_is_kept_by_a_server_that_keeps_nothing() {
    assert_eq!((DeclaredMemory::NONE.bytes(), DeclaredMemory::NONE.measured()), (0, None));
    assert_eq!(declared("--cache-ram 0 --ctx-checkpoints 0").source_sentences().len(), 2);
}

proptest! {
    #[test]
    fn no_line_makes_it_panic_and_only_marked_lines_teach(line in "\\PC{0,200}") {
        let mut keeps = declared("");
        let before = keeps.clone();
        if keeps.apply_log_line(&line).is_none() {
            prop_assert_eq!(keeps, before);
        }
    }

    #[test]
    fn marked_lines_with_anything_behind_do_not_panic(mark in 0usize..5, rest in "\\PC{0,60}") {
        let marks = ["cache state: ", "created context checkpoint ", "size limit: ", "n_slots = ", "reduced to "];
        let _ = parse_line(&format!("{}{rest}", marks[mark]));
    }
}
