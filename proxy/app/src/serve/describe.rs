//! Events of the fleet in one line each, for the log and for `llama-warden events`.

use warden_policies::ByteSize;
use warden_policies::sample::{HostMemory, MemoryKind, Vram};
use warden_supervisor::{EventKind, LedgerEntry};

/// What happened, without model and generation: the caller has those.
pub(crate) fn describe(kind: &EventKind) -> String {
    match kind {
        EventKind::Starting { pid, replica } => format!("starting: process {pid}, replica {replica}"),
        EventKind::Ready { start_ms, slots } => match slots {
            Some(slots) => format!("ready after {start_ms} ms with {slots} slots"),
            None => format!("ready after {start_ms} ms"),
        },
        EventKind::Suspect { refused: true } => {
            "suspect: it refused or broke a connection, so no new requests until a probe is answered"
                .to_owned()
        }
        EventKind::Suspect { .. } => "suspect: probes are lost, no new requests".to_owned(),
        EventKind::Recovered => "recovered: probes are answered again".to_owned(),
        EventKind::Draining { in_flight } => format!("draining: {in_flight} requests running"),
        EventKind::Stopped { exit } => format!("stopped: {exit}"),
        EventKind::Crashed { failure } => format!("crashed: {}", failure.message),
        EventKind::Backoff { delay_ms, failures } => {
            format!("the next start waits {delay_ms} ms after {failures} failure(s) in a row")
        }
        EventKind::Failed { failure } => {
            format!(
                "cannot start before something changes: {}; a change of its files or settings starts it, and so does \
                 `llama-warden restart`",
                failure.message
            )
        }
        EventKind::CrashLoop { ends, within_s, failure } => format!(
            "ended {ends} times within {}, and is started again and again: {}",
            warden_policies::units::span(std::time::Duration::from_secs(*within_s)),
            failure.message
        ),
        EventKind::RecycleWanted { decision, host_bytes, series_bytes } => {
            let reason = decision.reason.map_or("?", warden_policies::Reason::as_str);
            let held = match (decision.series, series_bytes.or(*host_bytes)) {
                (Some(series), Some(bytes)) => format!(" at {series} {}", ByteSize(bytes)),
                (None, Some(bytes)) => format!(" at {}", ByteSize(bytes)),
                (_, None) => String::new(),
            };
            format!("recycle wanted ({reason}){held}, at the next quiet moment")
        }
        EventKind::RecycleHeld { message, .. } => format!("recycle held back: {message}"),
        EventKind::RecycleBegan { reason, mode, note } => {
            let note = note.as_ref().map(|note| format!(" ({note})")).unwrap_or_default();
            format!("recycle began: {reason}, {}{note}", mode.as_str())
        }
        EventKind::RecycleDone { entry } => done(entry),
        EventKind::Verdict { message, .. }
        | EventKind::Unwell { message, .. }
        | EventKind::SettingLost { message }
        | EventKind::VramUnknown { message }
        | EventKind::DriverLeak { message, .. } => message.clone(),
        EventKind::PolicyOff { message } => format!("recycling by policy is off: {message}"),
        EventKind::ConfigApplied { report } => {
            let count = |what: &str, names: &[warden_policies::ModelName]| {
                (!names.is_empty()).then(|| {
                    let names: Vec<&str> = names.iter().map(warden_policies::ModelName::as_str).collect();
                    format!("{what}: {}", names.join(", "))
                })
            };
            let parts: Vec<String> = [
                count("added", &report.added),
                count("removed", &report.removed),
                count("restarted", &report.restarted),
                count("updated", &report.updated),
            ]
            .into_iter()
            .flatten()
            .collect();
            format!(
                "configuration applied; {}",
                if parts.is_empty() { "nothing changed".to_owned() } else { parts.join("; ") }
            )
        }
        EventKind::PromptTooLarge { action, short } => format!("{action}: {short}"),
        EventKind::RequestsSuspected { fingerprints } => {
            let names: Vec<String> = fingerprints.iter().map(ToString::to_string).collect();
            format!(
                "{} request(s) were in flight when it died, each is tried alone if it comes again: {}",
                names.len(),
                names.join(", ")
            )
        }
        EventKind::RequestQuarantined { fingerprint, seconds } => format!(
            "request {fingerprint} ended it while nothing else ran there: refused for {seconds} s, or until \
             `llama-warden quarantine release {fingerprint}`"
        ),
        EventKind::RequestsReleased { count } => format!("{count} request(s) released from quarantine"),
        EventKind::QueueFull { waiting } => format!("the queue is full: {waiting} requests wait"),
    }
}

fn done(entry: &LedgerEntry) -> String {
    let memory = |memory: Option<HostMemory>| {
        memory.map_or_else(|| "?".to_owned(), |memory| ByteSize(memory.charged()).to_string())
    };
    if let Some(failed) = &entry.failed {
        return format!("recycle failed ({}): {failed}", entry.reason);
    }
    let vram = |all: &[Vram], gpu| {
        let found = all.iter().find(|vram| vram.gpu == gpu);
        found.map_or_else(|| "?".to_owned(), |vram| ByteSize(vram.bytes).to_string())
    };
    let (what, before, after) = match entry.evidence.series {
        Some(series @ MemoryKind::Vram(gpu)) => {
            (series.to_string(), vram(&entry.vram_before, gpu), vram(&entry.vram_after, gpu))
        }
        _ => ("memory".to_owned(), memory(entry.host_before), memory(entry.host_after)),
    };
    format!(
        "recycle done: {}, {}, unavailable {} ms; {} waited, {} finished on the old process, {} aborted; {what} {before} -> \
         {after}",
        entry.reason,
        entry.mode.as_str(),
        entry.gap_ms,
        entry.carried_over,
        entry.drained,
        entry.cut,
    )
}
