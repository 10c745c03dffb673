//! Reports as a llama-server writes them, and invalid ones.

use proptest::prelude::*;

use super::*;

/// Writes a file by the format, independently of the reader.
fn file(pid: u32, active: u64, settings: [u64; 5], records: &[[u64; 32]]) -> Vec<u8> {
    let mut bytes = b"LWREPT1\0".to_vec();
    for number in [1, 256, 62, pid] {
        bytes.extend(number.to_ne_bytes());
    }
    for number in [1_700_000_000_000, active].into_iter().chain(settings) {
        bytes.extend(number.to_ne_bytes());
    }
    bytes.resize(128, 0);
    for record in records {
        // The first two words are four numbers of 32 bits.
        bytes.extend(record.iter().flat_map(|word| word.to_ne_bytes()));
    }
    bytes.resize(16_384, 0);
    bytes
}

/// A record in words: `seq`, state, device, context, then `numbers`.
fn record(seq: u32, state: u32, device: i32, context: u32, numbers: [u64; 30]) -> [u64; 32] {
    let pair = |first: [u8; 4], second: [u8; 4]| {
        let mut both = [0; 8];
        both[..4].copy_from_slice(&first);
        both[4..].copy_from_slice(&second);
        u64::from_ne_bytes(both)
    };
    let mut words = [0; 32];
    words[0] = pair(seq.to_ne_bytes(), state.to_ne_bytes());
    words[1] = pair(device.to_ne_bytes(), context.to_ne_bytes());
    words[2..].copy_from_slice(&numbers);
    words
}

/// 100, 101, 102, …: each value identifies its position.
fn numbered() -> [u64; 30] {
    std::array::from_fn(|index| 100 + index as u64)
}

/// Reads a report from readings, the last of which repeats.
fn of(readings: &[Vec<u8>]) -> Option<CudaReport> {
    let mut next = 0;
    read_settled(|| {
        let reading = readings.get(next).or(readings.last()).cloned();
        next += 1;
        reading
    })
}

#[test]
fn what_is_written_is_read_back_number_by_number() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("m.report");
    let written = file(4711, 0b10101, [16, 2, 3, 4, 5], &[record(2, 1, 1, 7, numbered())]);
    std::fs::write(&path, written).unwrap();
    let report = read_report(&path).unwrap();
    assert_eq!((report.pid, report.started_unix_ms), (4711, 1_700_000_000_000));
    assert_eq!(
        report.active,
        BTreeSet::from([ActiveFix::GraphCacheCap, ActiveFix::CublasReset, ActiveFix::IdleTrim])
    );
    let settings = FixSettings {
        graph_cap: 16,
        idle_trim_ms: 2,
        pool_budget_bytes: 3,
        cublas_every: 4,
        cublas_min_ms: 5,
    };
    assert_eq!(report.settings, settings);
    let [context] = report.contexts.as_slice() else { panic!("one context: {report:?}") };
    assert_eq!((context.context, context.device, context.live), (7, 1, true));
    let counts = context.counts;
    assert_eq!(
        counts,
        ContextCounts {
            computes: 100,
            graphs_live: 101,
            graphs_peak: 102,
            graph_nodes_live: 103,
            graph_host_bytes: 104,
            graph_device_bytes: 105,
            graphs_evicted: 106,
            graphs_trimmed: 107,
            live_splits: 108,
            effective_cap: 109,
            pool_bytes: 110,
            pool_bytes_peak: 111,
            pool_purges: 112,
            pool_bytes_purged: 113,
            cublas_handles: 114,
            cublas_workspace_bytes: 115,
            cublas_resets: 116,
            graph_invalidations: 117,
            skipped_busy: 118,
            errors: 119,
        }
    );
    assert_eq!(context.updated_unix_ms, 120);
}

#[test]
fn what_is_no_report_is_none_and_no_error() {
    let good = file(1, 0, [0; 5], &[]);
    assert!(of(std::slice::from_ref(&good)).is_some());
    let changed = |at: usize| {
        let mut bytes = good.clone();
        bytes[at] ^= 0x40;
        bytes
    };
    // Magic, version, record size, number of records.
    for at in [0, 7, 8, 12, 16] {
        assert_eq!(of(&[changed(at)]), None, "byte {at}");
    }
    let longer = [good.clone(), vec![0]].concat();
    for foreign in [Vec::new(), good[..200].to_vec(), good[..16_383].to_vec(), longer, vec![0; 16_384]] {
        assert_eq!(of(std::slice::from_ref(&foreign)), None, "{} bytes", foreign.len());
    }
    let directory = tempfile::tempdir().unwrap();
    assert_eq!(read_report(&directory.path().join("absent")), None);
    assert_eq!(read_report(directory.path()), None, "a directory");
    let longer = directory.path().join("longer");
    std::fs::write(&longer, [good, vec![0]].concat()).unwrap();
    assert_eq!(read_report(&longer), None);
}

#[test]
fn a_record_that_is_being_written_is_read_again_and_left_out_if_it_never_rests() {
    let calm = record(2, 1, 0, 0, numbered());
    let odd = |seq: u32| record(seq, 1, 0, 1, numbered());
    let readings: Vec<Vec<u8>> = [odd(1), odd(1), record(2, 1, 0, 1, numbered())]
        .map(|other| file(1, 0, [0; 5], &[calm, other]))
        .into();
    assert_eq!(of(&readings).unwrap().contexts.len(), 2, "it came to rest");
    let for_ever = file(1, 0, [0; 5], &[calm, odd(3)]);
    assert_eq!(of(&[for_ever]).unwrap().contexts.len(), 1, "the calm one");
    // `seq` is even each time but different, so halves of two records cannot be told apart.
    let restless: Vec<Vec<u8>> = (0..20).map(|n| file(1, 0, [0; 5], &[calm, odd(2 * n)])).collect();
    assert_eq!(of(&restless).unwrap().contexts.len(), 1);
}

#[test]
fn readings_of_two_writers_are_not_mixed() {
    let of_writer = |pid: u32, context: u32| file(pid, 0, [0; 5], &[record(2, 1, 0, context, numbered())]);
    let (old, new) = (of_writer(1, 8), of_writer(2, 9));
    let report = of(&[old.clone(), new.clone(), new]).unwrap();
    assert_eq!((report.pid, report.contexts.len(), report.contexts[0].context), (2, 1, 9));
}

#[test]
fn sums_count_what_is_held_by_the_living_and_done_by_all() {
    let records = [
        record(2, 1, 0, 0, numbered()),
        record(2, 2, 0, 1, numbered()),
        record(2, 1, 3, 2, numbered()),
        record(2, 0, 0, 3, numbered()),
        record(2, 77, 0, 4, numbered()),
    ];
    let report = of(&[file(1, 0, [0; 5], &records)]).unwrap();
    assert_eq!(report.contexts.len(), 3, "free records and unknown states are none");
    let totals = report.totals();
    assert_eq!((totals.contexts, totals.counts.graphs_live, totals.counts.graphs_evicted), (2, 202, 318));
    let devices: Vec<_> =
        report.by_device().into_iter().map(|(device, sum)| (device, sum.counts.pool_purges)).collect();
    assert_eq!(devices, [(0, 224), (3, 112)]);
}

#[test]
fn a_writer_counts_as_the_childs_when_it_is_in_its_group() {
    use std::io::{BufRead as _, BufReader};
    use std::os::unix::process::CommandExt as _;
    let mut wrapper = std::process::Command::new("/bin/sh")
        .args(["-c", "exec 3<&0; sh -c 'echo $$; read x' <&3 & wait"])
        .process_group(0)
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(wrapper.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let report = |pid: u32| of(&[file(pid, 0, [0; 5], &[])]).unwrap();
    let leader = wrapper.id();
    assert!(report(leader).is_from(leader) && report(line.trim().parse().unwrap()).is_from(leader));
    assert!(!report(std::process::id()).is_from(leader) && !report(u32::MAX).is_from(leader));
    drop(wrapper.stdin.take());
    wrapper.wait().unwrap();
}

#[test]
fn a_report_survives_the_way_through_json() {
    let report = of(&[file(1, u64::MAX, [u64::MAX; 5], &[record(2, 1, -1, 7, [u64::MAX; 30])])]).unwrap();
    let text = serde_json::to_string(&report).unwrap();
    assert!(
        text.contains("\"graph-cache-cap\"") && text.contains("\"pool_bytes\":18446744073709551615"),
        "{text}"
    );
    assert_eq!(serde_json::from_str::<CudaReport>(&text).unwrap(), report);
}

fn words() -> impl Strategy<Value = u64> {
    prop_oneof![any::<u64>(), Just(u64::MAX), Just(0), Just(2), Just(1 << 32 | 2)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_bytes_make_the_reader_fall(mut bytes in prop::collection::vec(any::<u8>(), 0..20_000)) {
        let _none_or_some = of(std::slice::from_ref(&bytes));
        // With a valid header the records are read, too.
        bytes.resize(16_384, 0xff);
        bytes[..24].copy_from_slice(&file(1, 0, [0; 5], &[])[..24]);
        let report = of(&[bytes]).unwrap();
        prop_assert!(report.contexts.len() <= 62);
        let _no_overflow = (report.totals(), report.by_device());
    }

    #[test]
    fn every_record_at_rest_is_read_and_no_sum_overflows(
        records in prop::collection::vec(prop::array::uniform32(words()), 0..6),
        active in any::<u64>(),
    ) {
        let bytes = file(9, active, [u64::MAX; 5], &records);
        let report = of(&[bytes]).unwrap();
        let halves = |word: u64| {
            let bytes = word.to_ne_bytes();
            let half = |at: usize| u32::from_ne_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
            (half(0), half(4))
        };
        let counted = records.iter().filter(|words| {
            let (seq, state) = halves(words[0]);
            seq.is_multiple_of(2) && matches!(state, 1 | 2)
        });
        let computes: Vec<u64> = counted.map(|words| words[2]).collect();
        let read: Vec<u64> = report.contexts.iter().map(|context| context.counts.computes).collect();
        prop_assert_eq!(&read, &computes);
        let sum = computes.iter().fold(0_u64, |sum, more| sum.saturating_add(*more));
        prop_assert_eq!(report.totals().counts.computes, sum);
    }
}
