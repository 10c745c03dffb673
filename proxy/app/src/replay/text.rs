//! Result of a replay as text: each change with its request and time, then the state at the end.

use warden_patches::mitigation::LeakAdvice;
use warden_policies::growth::{GrowthBlame, GrowthVerdict, SeriesGrowth, VerdictChange};
use warden_policies::recycle::SeriesFacts;
use warden_policies::{ByteSize, MemoryLimit, Reason, RecycleAction, phrases};

use super::json::verdict_name;
use super::{ReplayDecision, ReplayResult, ReplaySettings};

pub(crate) fn replay_text(
    trace: &str,
    told: &ReplaySettings,
    done: &ReplayResult,
    advice: &[LeakAdvice],
) -> String {
    let mut lines = vec![format!(
        "{trace}: {} readings, {} requests, {}",
        done.readings,
        done.work.requests,
        phrases::time_phrase(done.lasted.as_secs_f64())
    )];
    lines.push(if told.allowance > 0 {
        format!("  declared caches: {} of host memory", ByteSize(told.allowance))
    } else {
        "  no caches are declared (--cache-ram, --ctx-checkpoints, --model)".to_owned()
    });
    lines.extend(unknown_shares(told));
    let mut steps: Vec<(std::time::Duration, u64, String)> = Vec::new();
    let mut said = Vec::new();
    steps.extend(done.changes.iter().map(|one| (one.at, one.request, change_line(one, &mut said))));
    steps.extend(done.actions.iter().map(|one| (one.at, one.request, decision_line(one))));
    steps.extend(done.observed.iter().map(|one| (one.at, one.request, observed_line(one))));
    steps.sort_by_key(|(at, ..)| *at);
    let when =
        |at: &std::time::Duration, request: &u64| format!("request {request}, {:.1} s", at.as_secs_f64());
    let width = steps.iter().map(|(at, request, _)| when(at, request).len()).max().unwrap_or_default();
    for (at, request, what) in &steps {
        lines.push(format!("  {:width$}  {what}", when(at, request)));
    }
    lines.push("  at the end".to_owned());
    for (facts, growth) in done.growth() {
        lines.extend(final_lines(facts, growth, &mut said));
    }
    if done.series.is_empty() {
        lines.push("    no memory was read".to_owned());
    }
    if done.actions.is_empty() && done.observed.is_empty() {
        lines.push(format!("    policy: nothing to do{}", missing_limit_note(done)));
    }
    lines.extend(advice.iter().map(|one| format!("    looks like: {}", one.sentence())));
    lines.join("\n") + "\n"
}

/// Lists budgets in percent of an unknown total, which are off.
fn unknown_shares(told: &ReplaySettings) -> Vec<String> {
    let policy = &told.policy;
    let all = [
        ("host memory", policy.host_soft, policy.host_hard, told.host_total, "--host-memory"),
        ("VRAM", policy.vram_soft, policy.vram_hard, told.gpu_total, "--gpu-memory"),
    ];
    let share = |limit: Option<MemoryLimit>| matches!(limit, Some(MemoryLimit::Percent(_)));
    let off =
        all.into_iter().filter(|(_, soft, hard, total, _)| total.is_none() && (share(*soft) || share(*hard)));
    off.map(|(memory, .., flag)| format!("  shares of {memory} in the policy are off: give {flag}")).collect()
}

fn change_line(change: &VerdictChange, said: &mut Vec<String>) -> String {
    let growth = &change.growth;
    format!(
        "{}: {} -> {}{}",
        growth.series,
        verdict_name(change.before),
        verdict_name(growth.verdict),
        evidence_text(growth, said)
    )
}

/// Describes slope, cause and fill level, where this verdict gives them a meaning. Explains only once why no
/// cause is named.
fn evidence_text(growth: &SeriesGrowth, said: &mut Vec<String>) -> String {
    let mut parts = Vec::new();
    if growth.verdict >= GrowthVerdict::Bounded {
        parts.extend(growth.slope.as_ref().map(phrases::slope_phrase));
        parts.extend(phrases::fill_phrase(&growth.fill));
    }
    match &growth.blame {
        Some(GrowthBlame::Undecided { why }) if said.contains(why) => {
            parts.push("nothing is blamed, as above".to_owned());
        }
        Some(blame) => {
            parts.push(phrases::blame_phrase(blame));
            if let GrowthBlame::Undecided { why } = blame {
                said.push(why.clone());
            }
        }
        None => {}
    }
    if parts.is_empty() { String::new() } else { format!(": {}", parts.join("; ")) }
}

fn decision_line(act: &ReplayDecision) -> String {
    let mut text = format!("policy: {}", phrases::decision_phrase(&act.decision).unwrap_or_default());
    if let Some(bytes) = act.bytes {
        text.extend([format!("; it holds {}", ByteSize(bytes))]);
    }
    match (act.held, act.decision.why_not) {
        (Some(held), _) => text.extend([format!("; held back: {held}")]),
        (None, Some(why)) => text.extend([format!("; not yet: {why}")]),
        (None, None) if act.decision.action == RecycleAction::RecycleWhenQuiet => {
            text.push_str("; the moment has come");
        }
        (None, None) => {}
    }
    text
}

fn observed_line(act: &ReplayDecision) -> String {
    let why = act.decision.why_not.map(|why| why.to_string()).unwrap_or_default();
    let reason = act.decision.reason.map(Reason::phrase).unwrap_or_default();
    let series = act.decision.series.map(|series| format!("{series}: ")).unwrap_or_default();
    format!("policy: {series}{reason}, and nothing is done: {why}")
}

/// Without a limit there is nothing to forecast, so the leak has no consequence.
fn missing_limit_note(done: &ReplayResult) -> &'static str {
    let leaks = done.growth().any(|(_, growth)| growth.verdict.leaks());
    let limits = done.series.iter().any(|facts| facts.to_soft.or(facts.to_hard).or(facts.to_end).is_some());
    match (leaks, limits) {
        (true, false) => {
            "; no limit is known to which it grows: give budgets with --policy, or --host-memory and --gpu-memory"
        }
        _ => "",
    }
}

fn final_lines(facts: &SeriesFacts, growth: &SeriesGrowth, said: &mut Vec<String>) -> Vec<String> {
    let held = |bytes: Option<u64>| bytes.map_or_else(|| "?".to_owned(), |bytes| ByteSize(bytes).to_string());
    let since = match growth.verdict {
        GrowthVerdict::Warming => String::new(),
        _ => format!(" since request {}", growth.since_request),
    };
    let mut lines = vec![format!(
        "    {}: {}{since}{}; settled at {}, now {}",
        growth.series,
        verdict_name(growth.verdict),
        evidence_text(growth, said),
        held(growth.baseline),
        held(growth.floor.or(facts.charged)),
    )];
    let limits = [
        ("the soft budget of", &facts.to_soft),
        ("the hard budget of", &facts.to_hard),
        ("the end of the memory at", &facts.to_end),
    ];
    for (limit, left) in limits {
        if let Some(left) = left {
            lines.push(format!(
                "      {limit} {} is reached {}",
                ByteSize(left.limit),
                phrases::forecast_phrase(left)
            ));
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::replay_samples;
    use warden_policies::recycle::{GrowthMode, RecyclePolicy};
    use warden_policies::{BackendSample, trace};

    /// A process that leaks 4 MiB a request, or none.
    fn samples(leak_kib: u64) -> Vec<BackendSample> {
        let line = |n: u64| {
            let rss = 1_000_000 + n * leak_kib;
            format!(
                "{{\"t\": {}, \"edge\": \"idle\", \"requests\": {n}, \"images\": {n}, \"rss_anon_kib\": {rss}}}\n",
                n * 5
            )
        };
        trace::parse_recording(&(0..400).map(line).collect::<String>()).unwrap()
    }

    #[test]
    fn what_a_policy_would_have_done_is_told_at_its_request() {
        let told = |growth, soft, allowance| {
            let mut policy = RecyclePolicy::new(&warden_policies::defaults().recycle);
            policy.common.growth = growth;
            policy.host_soft = soft;
            let growth = warden_policies::defaults().growth.clone();
            ReplaySettings { policy, growth, allowance, host_total: None, gpu_total: None, starts_at: None }
        };
        let of = |told: &ReplaySettings, leak| {
            replay_text("a.jsonl", told, &replay_samples(told, &samples(leak)), &[])
        };
        let budget = Some(MemoryLimit::Bytes(ByteSize(2 << 30)));
        let pages = [
            of(&told(GrowthMode::Recycle, budget, 0), 4096),
            of(&told(GrowthMode::Observe, budget, 0), 4096),
            of(&told(GrowthMode::Observe, Some(MemoryLimit::Percent(80.0)), 64 << 20), 0),
            of(&told(GrowthMode::Observe, None, 0), 4096),
        ];
        insta::assert_snapshot!(pages.join("\n"));
    }
}
