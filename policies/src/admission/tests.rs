//! Tests of prompt prices and of predictive admission.

use proptest::prelude::*;

use super::*;
use crate::sample::{BackendSample, GpuIndex, HostMemory, SampleEdge, VramReading, VramSource, WorkDone};

const MIB: u64 = 1024 * 1024;
const VRAM: MemoryKind = MemoryKind::Vram(GpuIndex(0));

fn policy() -> &'static AdmissionPolicy {
    &crate::defaults().admission
}

fn sample(vram: u64, largest_prompt: u64, in_flight: u32) -> BackendSample {
    BackendSample {
        at: Duration::ZERO,
        edge: SampleEdge::Tick,
        host: Some(HostMemory { anon: 100 * MIB, swap: 0, rss: 0 }),
        vram: vec![VramReading { gpu: GpuIndex(0), bytes: vram, source: VramSource::Process }],
        pools: Vec::new(),
        in_flight,
        work: WorkDone::default(),
        largest_prompt,
        reclaims: 0,
    }
}

/// Creates a learner whose backend takes `price` bytes per token of its largest prompt, plus 200 MiB once.
fn taught(price: u64, prompts: &[u64]) -> PromptCost {
    let mut cost = PromptCost::new(policy());
    cost.observe(&sample(500 * MIB, 0, 0));
    let mut largest = 0;
    for tokens in prompts {
        // While the prompt runs, memory is high and the prompt's size is unknown.
        let after = 700 * MIB + price * largest.max(*tokens);
        cost.observe(&sample(after, largest, 1));
        largest = largest.max(*tokens);
        cost.observe(&sample(after, largest, 0));
    }
    cost
}

#[test]
fn the_price_of_a_token_is_learnt_from_prompts_larger_than_all_before() {
    let cost = taught(10_000, &[500, 1000, 300, 2000, 2000, 8000]);
    let price = cost.price(VRAM).unwrap();
    assert!((price.bytes_per_token - 10_000.0).abs() < 1e-6 && price.evidence == 3, "{price:?}");
    assert_eq!(cost.price(MemoryKind::Host).map(|price| price.bytes_per_token), Some(0.0));
    assert_eq!(cost.needed_bytes(10_000, 8000), [(MemoryKind::Host, 0), (VRAM, 20_000_000)]);
    assert_eq!(cost.needed_bytes(8000, 8000), [(MemoryKind::Host, 0), (VRAM, 0)]);
}

#[test]
fn the_first_prompt_and_too_few_larger_ones_prove_nothing() {
    assert_eq!(taught(10_000, &[500]).price(VRAM), None);
    assert_eq!(taught(10_000, &[500, 1000, 2000]).price(VRAM), None);
    assert_eq!(taught(10_000, &[500, 1000, 2000]).needed_bytes(99_999, 0), []);
}

#[test]
fn small_steps_are_added_up() {
    let prompts: Vec<u64> = (500..1400).step_by(10).collect();
    let price = taught(10_000, &prompts).price(VRAM).unwrap();
    assert!((price.bytes_per_token - 10_000.0).abs() < 1e-6, "{price:?}");
}

#[test]
fn a_busy_backend_that_is_never_idle_teaches_too() {
    let mut cost = PromptCost::new(policy());
    for (index, largest) in [100, 500, 1000, 2000, 4000].into_iter().enumerate() {
        for _ in 0..40 {
            cost.observe(&sample(700 * MIB + 10_000 * largest, largest, 1 + u32::try_from(index).unwrap()));
        }
    }
    let price = cost.price(VRAM).unwrap();
    assert!((price.bytes_per_token - 10_000.0).abs() < 1e-6, "{price:?}");
}

#[test]
fn a_price_of_an_earlier_process_holds_until_a_higher_one_is_learnt() {
    let mut cost = PromptCost::new(policy());
    cost.set_price(PromptPrice { series: VRAM, bytes_per_token: 5000.0, evidence: 1 });
    cost.set_price(PromptPrice { series: MemoryKind::Host, bytes_per_token: f64::NAN, evidence: 1 });
    assert_eq!(cost.needed_bytes(10, 0), [(VRAM, 50_000)]);
    let mut cost = taught(10_000, &[500, 1000, 2000, 8000]);
    cost.set_price(PromptPrice { series: VRAM, bytes_per_token: 5000.0, evidence: 1 });
    assert_eq!(cost.price(VRAM).map(|price| price.evidence), Some(3));
}

fn room(need: u64, left: u64) -> MemoryRoom {
    MemoryRoom {
        series: VRAM,
        need: need * MIB,
        left: Some(left * MIB),
        returns: 0,
        need_fresh: need * MIB,
        left_fresh: None,
    }
}

fn replica(replica: u32, room: MemoryRoom) -> ReplicaRoom {
    ReplicaRoom { replica, in_flight: 0, recycle: Some(Duration::from_secs(10)), rooms: vec![room] }
}

#[test]
fn a_prompt_that_fits_or_of_which_nothing_is_known_is_sent() {
    let admit = |replica| admit(policy(), 0, &[replica]);
    assert_eq!(admit(replica(0, room(1000, 1256))), AdmitDecision::Fits);
    assert_eq!(admit(replica(0, room(0, 0))), AdmitDecision::Fits, "it needs nothing new");
    assert_eq!(admit(replica(0, MemoryRoom { left: None, ..room(1000, 0) })), AdmitDecision::Fits);
    assert_eq!(admit(ReplicaRoom { rooms: Vec::new(), ..replica(0, room(1, 0)) }), AdmitDecision::Fits);
    assert_eq!(super::admit(policy(), 7, &[]), AdmitDecision::Fits);
}

#[test]
fn another_replica_with_room_is_better_than_waiting_and_waiting_is_better_than_a_recycle() {
    let full = ReplicaRoom {
        in_flight: 2,
        ..replica(0, MemoryRoom { returns: 900 * MIB, left_fresh: Some(5000 * MIB), ..room(1000, 500) })
    };
    let roomy = replica(1, room(1000, 2000));
    assert_eq!(admit(policy(), 0, &[full.clone(), roomy]), AdmitDecision::Elsewhere { replica: 1 });
    assert_eq!(admit(policy(), 0, std::slice::from_ref(&full)), AdmitDecision::Wait { series: VRAM });
    let idle = ReplicaRoom { in_flight: 0, ..full };
    assert_eq!(admit(policy(), 0, &[idle]), AdmitDecision::RecycleFirst { replica: 0, series: VRAM });
}

#[test]
fn the_replica_whose_recycle_costs_least_is_recycled() {
    let leaked = |number, seconds| ReplicaRoom {
        recycle: Some(Duration::from_secs(seconds)),
        ..replica(number, MemoryRoom { left_fresh: Some(5000 * MIB), ..room(1000, 500) })
    };
    let decision = admit(policy(), 0, &[leaked(0, 60), leaked(1, 5)]);
    assert_eq!(decision, AdmitDecision::RecycleFirst { replica: 1, series: VRAM });
}

#[test]
fn what_fits_nowhere_is_refused_with_the_numbers() {
    let small = replica(0, MemoryRoom { left_fresh: Some(600 * MIB), ..room(1000, 500) });
    let refused = admit(policy(), 0, std::slice::from_ref(&small));
    let numbers =
        AdmitDecision::Refuse { series: VRAM, needed: 1256 * MIB, have: 600 * MIB, retry_after: None };
    assert_eq!(refused, numbers);
    assert!(
        refused.to_string().contains("1.2 GiB of VRAM on GPU 0, and there are 600.0 MiB, even in a fresh"),
        "{refused}"
    );
}

#[test]
fn a_recycle_that_would_help_and_is_held_back_makes_it_try_later() {
    let leaked = replica(0, MemoryRoom { left_fresh: Some(5000 * MIB), ..room(1000, 500) });
    let AdmitDecision::Refuse { have, retry_after, .. } =
        admit(policy(), 0, &[ReplicaRoom { recycle: None, ..leaked }])
    else {
        panic!("not refused")
    };
    assert_eq!((have, retry_after), (500 * MIB, Some(policy().retry_most)));
}

#[test]
fn tokens_are_estimated_on_the_careful_side() {
    assert_eq!(estimate_tokens(policy(), 0), 0);
    assert_eq!(estimate_tokens(policy(), 4000), 1334);
}

proptest! {
    #[test]
    fn a_larger_prompt_is_never_easier_to_place(
        small in 1u64..5000, more in 0u64..5000, left in 0u64..6000, returns in 0u64..3000, fresh in 0u64..9000, in_flight in 0u32..3
    ) {
        let rank = |need: u64| {
            let room = MemoryRoom { returns: returns * MIB, left_fresh: Some(fresh * MIB), ..room(need, left) };
            match admit(policy(), 0, &[ReplicaRoom { in_flight, ..replica(0, room) }]) {
                AdmitDecision::Fits | AdmitDecision::Elsewhere { .. } => 0,
                AdmitDecision::Wait { .. } => 1,
                AdmitDecision::RecycleFirst { .. } => 2,
                AdmitDecision::Refuse { .. } => 3,
            }
        };
        prop_assert!(rank(small) <= rank(small + more));
    }

    #[test]
    fn the_price_never_exceeds_what_was_seen(price in 0u64..100_000, prompts in proptest::collection::vec(1u64..50_000, 1..20)) {
        if let Some(learnt) = taught(price, &prompts).price(VRAM) {
            let most = f64::from(u32::try_from(price).unwrap()) * (1.0 + 1e-9);
            prop_assert!(learnt.bytes_per_token <= most);
        }
    }
}
