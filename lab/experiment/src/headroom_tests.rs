//! Curves and verdicts of simulated servers.

use super::*;
use warden_policies::sample::GpuIndex;

const MIB: u64 = 1 << 20;
const VRAM: MemoryKind = MemoryKind::Vram(GpuIndex(0));

fn setup(context: u64, slots: u32) -> ServerSetup {
    let slot_context = context / u64::from(slots);
    ServerSetup { context, slots, slot_context, sequence_context: Some(slot_context), ubatch: 512 }
}

fn alone(lengths: &[u64], bytes: impl Fn(u64) -> u64) -> Vec<PromptPeak> {
    lengths.iter().map(|tokens| PromptPeak { tokens: *tokens, together: 1, bytes: bytes(*tokens) }).collect()
}

/// A pool that keeps every outgrown buffer and makes each new one a twentieth larger than needed.
fn hoard(tokens: u64, ubatch: u64, per_token: u64) -> u64 {
    let (mut held, mut largest, mut seen) = (0, 0, 0);
    while seen < tokens {
        seen = (seen + ubatch).min(tokens);
        if seen * per_token > largest {
            largest = seen * per_token * 21 / 20;
            held += largest;
        }
    }
    held
}

#[test]
fn a_server_whose_buffers_grow_by_the_token_has_that_price() {
    let setup = setup(16_384, 1);
    let peaks = alone(&[256, 1024, 2048, 4096, 8192], |tokens| 3000 * MIB + tokens * 8192);
    let curve = PromptCurve::from_peaks(VRAM, 3000 * MIB, &peaks, &setup).unwrap();
    assert!((curve.price().bytes_per_token - 8192.0).abs() < 1e-6);
    assert!((curve.end_slope() - 8192.0).abs() < 1e-6);
    assert_eq!(curve.bytes_at(16_384, 1), 3000 * MIB + 16_384 * 8192, "beyond what was measured");
    assert_eq!(curve.bytes_at(3000, 1), 3000 * MIB + 3000 * 8192, "between");
    assert_eq!(curve.bytes_at(100, 1), 3000 * MIB + 100 * 8192, "before the first");
    assert_eq!(curve.step(), None);
}

#[test]
fn the_second_micro_batch_is_a_step_and_no_price() {
    let setup = setup(8192, 1);
    let step = |tokens: u64| if tokens > 512 { 200 * MIB } else { 0 };
    let peaks =
        alone(&[128, 512, 1024, 2048, 4096, 8192], |tokens| 1000 * MIB + tokens * 1000 + step(tokens));
    let curve = PromptCurve::from_peaks(MemoryKind::Host, 1000 * MIB, &peaks, &setup).unwrap();
    assert!((curve.price().bytes_per_token - 1000.0).abs() < 1e-6, "{:?}", curve.price());
    let found = curve.step().unwrap();
    assert!(found.abs_diff(200 * MIB) < MIB, "{found}");
}

#[test]
fn the_peak_of_a_hoarding_pool_is_predicted_within_five_percent_from_half_of_its_length() {
    let lengths = &headroom_config().lengths;
    for context in [16_384_u64, 57_344, 60_000, 131_072] {
        for (per_token, ubatch, idle) in [(1_500, 512, 3395 * MIB), (4_096, 512, 0), (700, 1024, 100 * MIB)] {
            let setup = ServerSetup { ubatch, ..setup(context, 1) };
            let tokens = |share: &f64| warden_policies::units::scale_bytes(context, *share);
            let all: Vec<u64> = lengths.iter().map(tokens).collect();
            // The driver counts in pieces of 2 MiB; the cache grows by single tokens.
            let real = |tokens: u64| {
                idle + tokens * 100 + hoard(tokens, ubatch, per_token).next_multiple_of(2 * MIB)
            };
            let whole = PromptCurve::from_peaks(VRAM, idle, &alone(&all, real), &setup).unwrap();
            let half = whole.truncated_at(context / 2).unwrap();
            let (predicted, came) = (half.bytes_at(context, 1), whole.bytes_at(context, 1));
            assert_eq!(came, real(context));
            let off = predicted.abs_diff(came);
            assert!(off * 20 <= came, "{context} by {ubatch}: {predicted} instead of {came}");
        }
    }
}

#[test]
fn a_line_with_noise_is_not_taken_for_a_hoarding_pool() {
    let mut random = warden_policies::world::SplitMix::new(3);
    let setup = setup(57_344, 1);
    for _ in 0..500 {
        let lengths: Vec<u64> = (1..=8).map(|part| 57_344 / 16 * part).collect();
        let mut noise: Vec<u64> = (0..9).map(|_| random.below(4 * MIB)).collect();
        let peaks = alone(&lengths, |tokens| 1000 * MIB + tokens * 8192);
        let peaks: Vec<PromptPeak> = peaks
            .into_iter()
            .map(|peak| PromptPeak { bytes: peak.bytes + noise.pop().unwrap(), ..peak })
            .collect();
        let curve = PromptCurve::from_peaks(VRAM, 1000 * MIB, &peaks, &setup).unwrap();
        let (predicted, real) = (curve.bytes_at(57_344, 1), 1000 * MIB + 57_344 * 8192);
        assert!(predicted.abs_diff(real) * 20 < real, "{predicted} instead of {real}");
    }
}

#[test]
fn further_slots_cost_what_they_were_measured_to() {
    let setup = setup(8192, 4);
    let mut peaks = alone(&[256, 512, 1024, 2048], |tokens| 500 * MIB + tokens * 4096);
    peaks.push(PromptPeak { tokens: 2048, together: 4, bytes: 500 * MIB + 2048 * 4096 + 3 * 10 * MIB });
    let curve = PromptCurve::from_peaks(VRAM, 500 * MIB, &peaks, &setup).unwrap();
    assert_eq!(curve.worst_case(&setup), 500 * MIB + 2048 * 4096 + 30 * MIB);
    assert_eq!(curve.bytes_at(1024, 4), 500 * MIB + 1024 * 4096 + 15 * MIB);
}

#[test]
fn what_does_not_fit_is_told_with_what_would() {
    let setup = ServerSetup { ubatch: 512, ..setup(57_344, 1) };
    let bytes = |ubatch: u64| move |tokens: u64| 4000 * MIB + tokens * 64 * 1024 + ubatch * 8 * MIB;
    let lengths = [8192, 16_384, 28_672, 40_960, 57_344];
    let curve = PromptCurve::from_peaks(VRAM, 4000 * MIB, &alone(&lengths, bytes(512)), &setup).unwrap();
    let half = PromptCurve::from_peaks(VRAM, 4000 * MIB, &alone(&lengths, bytes(256)), &setup).unwrap();
    let worst = curve.worst_case(&setup);
    let limit = worst - 500 * MIB;
    let verdict = judge(&curve, &setup, Some(limit), Some((&half, 256)), None);
    assert_eq!((verdict.fits(), verdict.missing_bytes()), (Some(false), 500 * MIB));
    assert_eq!((verdict.smaller_context, verdict.smaller_ubatch), (Some(49_152), Some(256)));
    let tight = judge(&curve, &setup, Some(worst - 3500 * MIB), Some((&half, 256)), None);
    assert!(
        tight.smaller_context.is_some_and(|context| curve.worst_with(&setup, context) <= worst - 3500 * MIB)
    );
    assert_eq!(tight.smaller_ubatch, Some(64));
    let never = judge(&curve, &setup, Some(3000 * MIB), None, None);
    assert_eq!((never.smaller_context, never.smaller_ubatch), (None, None));
    let fits = judge(&curve, &setup, Some(worst + MIB), None, None);
    assert_eq!(fits.fits(), Some(true));
    let unknown = judge(&curve, &setup, None, None, None);
    assert_eq!(unknown.fits(), None);
    let said = [&verdict, &tight, &never, &fits, &unknown].map(HeadroomVerdict::sentence);
    insta::assert_snapshot!(said.join("\n"));
}

#[test]
fn a_suggestion_always_fits_and_the_next_larger_one_does_not() {
    let mut random = warden_policies::world::SplitMix::new(5);
    for _ in 0..2000 {
        let context = 1024 * (4 + random.below(60));
        let setup = setup(context, 1 + u32::try_from(random.below(4)).unwrap());
        let (idle, per_token) = (random.below(8000) * MIB, 100 + random.below(200_000));
        let lengths: Vec<u64> = (1..=8).map(|part| setup.slot_context * part / 8).collect();
        let curve =
            PromptCurve::from_peaks(VRAM, idle, &alone(&lengths, |tokens| idle + tokens * per_token), &setup)
                .unwrap();
        let worst = curve.worst_case(&setup);
        let limit = random.below(worst + worst / 8 + 1);
        let verdict = judge(&curve, &setup, Some(limit), None, None);
        if worst <= limit {
            assert_eq!((verdict.fits(), verdict.smaller_context), (Some(true), None));
            continue;
        }
        assert_eq!(verdict.fits(), Some(false));
        if let Some(smaller) = verdict.smaller_context {
            assert!(smaller < context && curve.worst_with(&setup, smaller) <= limit);
        }
        let step = previous_power_of_two(context / headroom_config().context_steps)
            .max(headroom_config().context_grain);
        let next = verdict.smaller_context.unwrap_or(0) + step;
        assert!(next >= context || curve.worst_with(&setup, next) > limit, "{next} of {context}");
    }
}

#[test]
fn numbers_are_grouped_by_three() {
    assert_eq!([0, 999, 1000, 57_344, 1_234_567].map(grouped), ["0", "999", "1,000", "57,344", "1,234,567"]);
}

#[test]
fn a_smaller_context_also_frees_its_kv_cache_where_that_was_measured() {
    let setup = setup(8192, 1);
    let idle = 1152 * MIB;
    let peaks = alone(&[512, 2048, 4096, 8192], |tokens| idle + tokens * 65_536);
    let curve = PromptCurve::from_peaks(VRAM, idle, &peaks, &setup).unwrap();
    // The idle server does not fit, so without the context's own memory no context would fit either.
    let limit = Some(1044 * MIB);
    let blind = judge(&curve, &setup, limit, None, None);
    assert_eq!(blind.smaller_context, None);
    // At 128 KiB per token, 128 MiB remain without context, and 192 KiB per token fit into 916 MiB.
    let seen = judge(&curve, &setup, limit, None, Some(131_072.0));
    assert_eq!(seen.smaller_context, Some(4096));
    let hopeless = judge(&curve, &setup, Some(100 * MIB), None, Some(131_072.0));
    insta::assert_snapshot!([&blind, &seen, &hopeless].map(HeadroomVerdict::sentence).join("\n"));
}

#[test]
fn a_slot_that_the_model_limits_stays_as_long_as_a_smaller_context_lets_it() {
    // The model was trained on 32,768 tokens, so half the context does not shorten the longest prompt.
    let capped = ServerSetup {
        context: 131_072,
        slots: 1,
        slot_context: 32_768,
        sequence_context: Some(131_072),
        ubatch: 512,
    };
    let of = |setup: &ServerSetup| [65_536, 32_768, 16_384].map(|context| setup.slot_context_with(context));
    assert_eq!(of(&capped), [32_768, 32_768, 16_384]);
    assert_eq!(of(&ServerSetup { sequence_context: None, ..capped }), [32_768, 32_768, 16_384]);
    let shared = ServerSetup { slots: 4, sequence_context: Some(32_768), ..capped };
    assert_eq!(of(&shared), [16_384, 8_192, 4_096]);
    let curve =
        PromptCurve::from_peaks(VRAM, 0, &alone(&[1024, 8192, 32_768], |tokens| tokens * 33 * 1024), &capped);
    let verdict = judge(&curve.unwrap(), &capped, Some(32_000 * 33 * 1024), None, None);
    assert!(verdict.smaller_context.is_some_and(|context| context < 32_768), "{verdict:?}");
}
