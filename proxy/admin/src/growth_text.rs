//! Formats the memory growth of a backend, the policy's response, and what the backend reports about its GPU
//! memory. Pure: views in, text out.

use warden_policies::growth::{GrowthBlame, GrowthVerdict, SeriesGrowth};
use warden_policies::recycle::RecycleHindrance;
use warden_policies::sample::VramSource;
use warden_policies::{ByteSize, MemoryKind, Reason, RecycleAction, phrases};
use warden_sensors::CudaReport;
use warden_sensors::report::{ActiveFix, ContextTotals};
use warden_supervisor::{BackendView, DeviceView, ForecastView, PolicyView};

/// Returns all lines about a process: growth, declared caches, VRAM, health, reclaims, next action.
pub fn process_lines(backend: &BackendView) -> Vec<String> {
    let memory = &backend.memory;
    let mut lines = Vec::new();
    let (quiet, loud): (Vec<&SeriesGrowth>, Vec<&SeriesGrowth>) =
        memory.growth.iter().partition(|growth| growth.verdict < GrowthVerdict::Bounded);
    if !quiet.is_empty() {
        let each = quiet.iter().map(|growth| format!("{} {}", growth.series, growth.verdict.as_str()));
        lines.push(format!("growth: {}", each.collect::<Vec<_>>().join(", ")));
    }
    for growth in loud {
        let of_series = memory.forecasts.iter().filter(|one| one.series == growth.series);
        lines.push(format!(
            "growth: {}{}",
            growth_line(growth),
            of_series.map(forecast_text).collect::<String>()
        ));
    }
    let host = memory.growth.iter().find(|growth| growth.series == MemoryKind::Host);
    if host.is_some_and(|growth| growth.verdict >= GrowthVerdict::Bounded) {
        lines.extend(memory.allowance.iter().map(|line| format!("declared cache: {line}")));
    }
    lines.extend(memory.unmeasured.clone());
    lines.extend(vram_line(backend));
    lines.extend(health_line(backend));
    lines.extend(reclaim_line(backend));
    lines.extend(backend.next.as_ref().and_then(next_action).map(|text| format!("next: {text}")));
    lines
}

/// Describes the growth of one kind of memory.
pub fn growth_line(growth: &SeriesGrowth) -> String {
    let mut parts = Vec::new();
    parts.extend(growth.slope.as_ref().map(phrases::slope_phrase));
    match &growth.blame {
        Some(blame @ GrowthBlame::Pays { .. }) => parts.push(phrases::blame_phrase(blame)),
        Some(blame @ GrowthBlame::Undecided { .. }) if growth.verdict.leaks() => {
            parts.push(phrases::blame_phrase(blame));
        }
        _ => {}
    }
    parts.extend(phrases::fill_phrase(&growth.fill));
    format!(
        "{} {} since request {}: {}",
        growth.series,
        growth.verdict.as_str(),
        growth.since_request,
        parts.join("; ")
    )
}

fn forecast_text(one: &ForecastView) -> String {
    let limit = match one.reason {
        Reason::MemoryExhausted => "the end of the memory".to_owned(),
        reason => reason.to_string(),
    };
    format!("; {limit} at {} {}", ByteSize(one.forecast.limit), phrases::forecast_phrase(&one.forecast))
}

fn vram_line(backend: &BackendView) -> Option<String> {
    let memory = &backend.memory;
    if memory.unmeasured.is_some() {
        // The line about all memory of the process already says this.
        return None;
    }
    if let Some(why) = &memory.vram_unknown {
        return Some(format!("VRAM is not known: {why}"));
    }
    let each = memory.vram.iter().map(|vram| {
        let source = match vram.source {
            VramSource::Process => "",
            VramSource::Estimate => " (estimate)",
        };
        format!("GPU {} {}{source}", vram.gpu.0, ByteSize(vram.bytes))
    });
    let each: Vec<String> = each.collect();
    (!each.is_empty()).then(|| format!("VRAM: {}", each.join(", ")))
}

fn health_line(backend: &BackendView) -> Option<String> {
    let health = &backend.health;
    let mut parts = Vec::new();
    if health.compute_errors > 0 {
        parts.push(format!("{} answers in a row report a compute error", health.compute_errors));
    }
    // Ignore short times without progress, such as a prefill.
    if let Some(time) = health.stalled_for.filter(|time| time.as_secs() >= 60) {
        parts
            .push(format!("work in flight and no progress for {}", phrases::time_phrase(time.as_secs_f64())));
    }
    if let (Some(now), Some(fresh)) = (health.decode_rate, health.decode_baseline)
        && now < fresh * 0.8
    {
        parts.push(format!("{now:.1} tokens/s for a busy slot, {fresh:.1} when it was fresh"));
    }
    (!parts.is_empty()).then(|| format!("health: {}", parts.join("; ")))
}

/// Says that a process cannot be asked to return memory, if this is known and a reclaim would be useful.
pub fn no_reclaim_note(backend: &BackendView, has_budget: bool) -> Option<String> {
    let reclaim = &backend.reclaim;
    let reason = backend.next.as_ref().and_then(|next| next.decision.reason);
    let wanted = reclaim.wanted && (has_budget || reason.is_some_and(Reason::is_memory));
    let nobody = reclaim.parts.is_some_and(|parts| !parts.any());
    (wanted && nobody).then(|| {
        "reclaim: this build cannot give memory back, so its policy begins with a replacement; `llama-warden build` \
         makes one with the fixes reclaim-heap and reclaim-cuda"
            .to_owned()
    })
}

fn reclaim_line(backend: &BackendView) -> Option<String> {
    let reclaim = &backend.reclaim;
    let parts = reclaim.parts.filter(|parts| reclaim.wanted && parts.any())?;
    let mut text = format!("reclaim: it can give back {}", parts.words());
    if reclaim.asking {
        text.push_str("; reclaiming now");
    }
    if let Some(last) = &reclaim.last {
        let times =
            if reclaim.count == 1 { "once, at" } else { &format!("{} times, last at", reclaim.count) };
        text.extend([format!("; requested {times} {} ({}): {}", last.at, last.reason, last.sentence())]);
    }
    Some(text)
}

/// Says which action the policy wants next and why it waits; `None` if it wants nothing.
pub fn next_action(next: &PolicyView) -> Option<String> {
    let decision = &next.decision;
    let mut text = match (decision.action, decision.reason) {
        (RecycleAction::Observe, Some(reason)) => {
            let series = decision.series.map(|series| format!("{series}: ")).unwrap_or_default();
            format!("nothing; {series}{}", reason.phrase())
        }
        _ => phrases::decision_phrase(decision)?,
    };
    match (&next.held, &decision.why_not) {
        (Some(held), _) | (None, Some(RecycleHindrance::Held { by: held })) => {
            text.extend([format!("; held back: {held}")]);
        }
        (None, Some(why)) => text.extend([format!("; not yet: {why}")]),
        (None, None) => {}
    }
    Some(text)
}

/// Returns a line for each GPU.
pub fn device_lines(all: &[DeviceView]) -> Vec<String> {
    let size = |bytes: Option<u64>| bytes.map_or_else(|| "?".to_owned(), |bytes| ByteSize(bytes).to_string());
    all.iter()
        .map(|device| {
            let mut text = format!(
                "GPU {}: {}, {} of {} in use, {} free",
                device.gpu.0,
                device.name,
                size(device.used),
                size(device.total),
                size(device.free)
            );
            if let Some(degrees) = device.temperature {
                text.extend([format!(", {degrees} °C")]);
            }
            if let Some(xid) = device.xid {
                text.extend([format!(", last Xid error {xid}")]);
            }
            if let Some(leak) = &device.leak {
                text.extend([format!("; {leak}")]);
            }
            text
        })
        .collect()
}

/// Returns the lines of a report about its contexts.
pub fn context_lines(report: &CudaReport) -> Vec<String> {
    let devices = report.by_device();
    let many = devices.len() > 1;
    let living = devices.iter().filter(|(_, totals)| totals.contexts > 0);
    living
        .map(|(device, totals)| {
            let number = if many { device.to_string() } else { String::new() };
            format!("CUDA{number}: {}", describe_context(report, totals))
        })
        .collect()
}

fn describe_context(report: &CudaReport, totals: &ContextTotals) -> String {
    let counts = &totals.counts;
    let when = |fix: ActiveFix, text: String| report.active.contains(&fix).then_some(text);
    let some = |number: u64, text: String| (number > 0).then_some(text);
    let each = if totals.contexts > 1 { " each" } else { "" };
    let host = counts.graph_host_bytes;
    let device = counts.graph_device_bytes;
    let graphs = [
        when(ActiveFix::GraphCacheCap, format!("cap {}{each}", report.settings.graph_cap)),
        when(ActiveFix::GraphCacheCap, format!("{} evicted", counts.graphs_evicted)),
        when(ActiveFix::IdleTrim, format!("{} trimmed", counts.graphs_trimmed)),
        some(host.max(device), format!("~{} host + ~{} VRAM", ByteSize(host), ByteSize(device))),
    ];
    let pools = [
        some(counts.pool_bytes_peak, format!("peak {}", ByteSize(counts.pool_bytes_peak))),
        when(ActiveFix::PoolPurge, counted_noun(counts.pool_purges, "purge")),
    ];
    let cublas = [
        some(
            counts.cublas_workspace_bytes,
            format!("~{} workspace", ByteSize(counts.cublas_workspace_bytes)),
        ),
        when(ActiveFix::CublasReset, counted_noun(counts.cublas_resets, "reset")),
    ];
    let parts = [
        Some(format!("{}{}", counted_noun(counts.graphs_live, "graph"), in_brackets(graphs))),
        Some(format!("pools {} cached{}", ByteSize(counts.pool_bytes), in_brackets(pools))),
        Some(format!("{}{}", counted_noun(counts.cublas_handles, "cuBLAS handle"), in_brackets(cublas))),
        some(counts.skipped_busy, format!("{} skipped", counted_noun(counts.skipped_busy, "safe point"))),
        some(counts.errors, counted_noun(counts.errors, "error")),
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

fn counted_noun(count: u64, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

fn in_brackets(parts: impl IntoIterator<Item = Option<String>>) -> String {
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    if parts.is_empty() { String::new() } else { format!(" ({})", parts.join(", ")) }
}

#[cfg(test)]
mod tests {
    use warden_policies::RecycleDecision;
    use warden_policies::cooldown::HoldReason;
    use warden_sensors::report::{ContextCounts, ContextReport, FixSettings};

    use super::*;
    use crate::growth_fixture::{fleet, leaking};

    #[test]
    fn a_backend_that_leaks_says_how_much_who_pays_how_long_and_what_happens() {
        let mut backend = leaking();
        backend.memory.growth[0].slope =
            Some(warden_policies::growth::IntervalEstimate { value: 4.42e6, low: 4.4e6, high: 4.5e6 });
        insta::assert_snapshot!(process_lines(&backend).join("\n"));
    }

    #[test]
    fn a_quiet_backend_takes_one_line_and_unknown_vram_says_why() {
        let mut backend = leaking();
        backend.memory.growth[0].verdict = GrowthVerdict::Steady;
        backend.memory.vram_unknown = Some("no driver lists it".to_owned());
        backend.health = warden_supervisor::HealthView::default();
        backend.next = None;
        assert_eq!(process_lines(&backend), ["growth: host steady", "VRAM is not known: no driver lists it"]);
        // The reason applies to all its memory, including VRAM.
        backend.memory.growth.clear();
        backend.memory.unmeasured = Some("the server's memory is not measured: it is elsewhere".to_owned());
        assert_eq!(process_lines(&backend), ["the server's memory is not measured: it is elsewhere"]);
    }

    #[test]
    fn what_is_held_back_says_by_what() {
        let decision = RecycleDecision {
            action: RecycleAction::RecycleWhenQuiet,
            reason: Some(Reason::HostSoft),
            due: true,
            series: Some(MemoryKind::Host),
            limit_bytes: Some(1 << 30),
            why_not: None,
            threat: false,
        };
        let held = PolicyView {
            decision,
            held: Some(HoldReason::TooSoon {
                seconds_left: 9,
                rule: warden_policies::cooldown::PauseRule::MinInterval,
            }),
        };
        insta::assert_snapshot!(next_action(&held).unwrap());
        assert_eq!(next_action(&PolicyView { decision: RecycleDecision::OBSERVE, held: None }), None);
    }

    #[test]
    fn a_gpu_is_shown_with_what_its_driver_tells() {
        let mut all = fleet(Vec::new()).devices;
        all[0].name = "H200".to_owned();
        all[0].leak = Some("1.0 GiB did not come back".to_owned());
        insta::assert_snapshot!(device_lines(&all).join("\n"));
    }

    fn context(device: i32, live: bool, counts: ContextCounts) -> ContextReport {
        ContextReport { context: 0, device, live, counts, updated_unix_ms: 0 }
    }

    fn report(active: &[ActiveFix], contexts: Vec<ContextReport>) -> CudaReport {
        CudaReport {
            pid: 1,
            started_unix_ms: 0,
            active: active.iter().copied().collect(),
            settings: FixSettings { graph_cap: 16, ..FixSettings::default() },
            contexts,
        }
    }

    fn counts() -> ContextCounts {
        ContextCounts {
            graphs_live: 12,
            graphs_evicted: 34,
            graph_host_bytes: 8_493_466,
            graph_device_bytes: 3_355_443,
            pool_bytes: 212 << 20,
            pool_bytes_peak: 1_946 << 20,
            pool_purges: 3,
            cublas_handles: 2,
            cublas_resets: 1,
            ..ContextCounts::default()
        }
    }

    #[test]
    fn the_line_says_what_is_held_and_what_the_active_fixes_have_done() {
        let all =
            [ActiveFix::GraphCacheCap, ActiveFix::PoolPurge, ActiveFix::CublasReset, ActiveFix::MemoryReport];
        let calm = ContextCounts { graphs_live: 1, errors: 1, skipped_busy: 2, ..ContextCounts::default() };
        let busy = context_lines(&report(&all, vec![context(0, true, counts())]));
        let two = vec![context(0, true, counts()), context(1, true, counts()), context(1, true, counts())];
        let calm = context_lines(&report(&[ActiveFix::MemoryReport], vec![context(0, true, calm)]));
        insta::assert_snapshot!(
            [busy, calm, context_lines(&report(&[ActiveFix::GraphCacheCap], two))].concat().join("\n")
        );
    }

    #[test]
    fn what_has_ended_has_no_line() {
        assert!(context_lines(&report(&[], vec![context(0, false, counts())])).is_empty());
        assert!(context_lines(&report(&[], Vec::new())).is_empty());
    }
}
