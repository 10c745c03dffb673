//! Formats a backend's report about its GPU memory. Pure: a report in, text out.

use warden_policies::ByteSize;
use warden_sensors::Report;
use warden_sensors::report::{Fix, Totals};

/// One line per device with a live context; several devices are numbered.
pub(crate) fn lines(report: &Report) -> Vec<String> {
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

fn describe(report: &Report, totals: &Totals) -> String {
    let counts = &totals.counts;
    let when = |fix: Fix, text: String| report.active.contains(&fix).then_some(text);
    let some = |number: u64, text: String| (number > 0).then_some(text);
    let each = if totals.contexts > 1 { " each" } else { "" };
    let (host, device) = (counts.graph_host_bytes, counts.graph_device_bytes);
    let graphs = [
        when(Fix::GraphCacheCap, format!("cap {}{each}", report.settings.graph_cap)),
        when(Fix::GraphCacheCap, format!("{} evicted", counts.graphs_evicted)),
        when(Fix::IdleTrim, format!("{} trimmed", counts.graphs_trimmed)),
        some(host.max(device), format!("~{} host + ~{} VRAM", ByteSize(host), ByteSize(device))),
    ];
    let pools = [
        some(counts.pool_bytes_peak, format!("peak {}", ByteSize(counts.pool_bytes_peak))),
        when(Fix::PoolPurge, number(counts.pool_purges, "purge")),
    ];
    let cublas = [
        some(
            counts.cublas_workspace_bytes,
            format!("~{} workspace", ByteSize(counts.cublas_workspace_bytes)),
        ),
        when(Fix::CublasReset, number(counts.cublas_resets, "reset")),
    ];
    let parts = [
        Some(format!("{}{}", number(counts.graphs_live, "graph"), in_brackets(graphs))),
        Some(format!("pools {} cached{}", ByteSize(counts.pool_bytes), in_brackets(pools))),
        Some(format!("{}{}", number(counts.cublas_handles, "cuBLAS handle"), in_brackets(cublas))),
        some(counts.skipped_busy, format!("{} skipped", number(counts.skipped_busy, "safe point"))),
        some(counts.errors, number(counts.errors, "error")),
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

fn number(count: u64, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

fn in_brackets(parts: impl IntoIterator<Item = Option<String>>) -> String {
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    if parts.is_empty() { String::new() } else { format!(" ({})", parts.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use warden_sensors::report::{ContextReport, Counts, Settings};

    fn context(device: i32, live: bool, counts: Counts) -> ContextReport {
        ContextReport { context: 0, device, live, counts, updated_unix_ms: 0 }
    }

    fn report(active: &[Fix], contexts: Vec<ContextReport>) -> Report {
        Report {
            pid: 1,
            started_unix_ms: 0,
            active: active.iter().copied().collect(),
            settings: Settings { graph_cap: 16, ..Settings::default() },
            contexts,
        }
    }

    fn counts() -> Counts {
        Counts {
            graphs_live: 12,
            graphs_evicted: 34,
            graph_host_bytes: 8_493_466,
            graph_device_bytes: 3_355_443,
            pool_bytes: 212 << 20,
            pool_bytes_peak: 1_946 << 20,
            pool_purges: 3,
            cublas_handles: 2,
            cublas_resets: 1,
            ..Counts::default()
        }
    }

    #[test]
    fn the_line_says_what_is_held_and_what_the_active_fixes_have_done() {
        let all = [Fix::GraphCacheCap, Fix::PoolPurge, Fix::CublasReset, Fix::MemoryReport];
        let calm = Counts { graphs_live: 1, errors: 1, skipped_busy: 2, ..Counts::default() };
        let busy = lines(&report(&all, vec![context(0, true, counts())]));
        let two = vec![context(0, true, counts()), context(1, true, counts()), context(1, true, counts())];
        let calm = lines(&report(&[Fix::MemoryReport], vec![context(0, true, calm)]));
        insta::assert_snapshot!([busy, calm, lines(&report(&[Fix::GraphCacheCap], two))].concat().join("\n"));
    }

    #[test]
    fn what_has_ended_has_no_line() {
        assert!(lines(&report(&[], vec![context(0, false, counts())])).is_empty());
        assert!(lines(&report(&[], Vec::new())).is_empty());
    }
}
