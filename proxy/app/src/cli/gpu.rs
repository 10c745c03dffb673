//! Formats a backend's report about its GPU memory. Pure: a report in, text out.

use warden_policies::ByteSize;
use warden_sensors::CudaReport;
use warden_sensors::report::{ActiveFix, ContextTotals};

/// One line per device with a live context; several devices are numbered.
pub(crate) fn device_lines(report: &CudaReport) -> Vec<String> {
    let devices = report.by_device();
    let many = devices.len() > 1;
    let living = devices.iter().filter(|(_, totals)| totals.contexts > 0);
    living
        .map(|(device, totals)| {
            let number = if many { device.to_string() } else { String::new() };
            format!("CUDA{number}: {}", describe(report, totals))
        })
        .collect()
}

fn describe(report: &CudaReport, totals: &ContextTotals) -> String {
    let counts = &totals.counts;
    let when = |fix: ActiveFix, text: String| report.active.contains(&fix).then_some(text);
    let some = |number: u64, text: String| (number > 0).then_some(text);
    let each = if totals.contexts > 1 { " each" } else { "" };
    let (host, device) = (counts.graph_host_bytes, counts.graph_device_bytes);
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
    use super::*;
    use warden_sensors::report::{ContextCounts, ContextReport, FixSettings};

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
        let busy = device_lines(&report(&all, vec![context(0, true, counts())]));
        let two = vec![context(0, true, counts()), context(1, true, counts()), context(1, true, counts())];
        let calm = device_lines(&report(&[ActiveFix::MemoryReport], vec![context(0, true, calm)]));
        insta::assert_snapshot!(
            [busy, calm, device_lines(&report(&[ActiveFix::GraphCacheCap], two))].concat().join("\n")
        );
    }

    #[test]
    fn what_has_ended_has_no_line() {
        assert!(device_lines(&report(&[], vec![context(0, false, counts())])).is_empty());
        assert!(device_lines(&report(&[], Vec::new())).is_empty());
    }
}
