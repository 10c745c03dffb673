//! Describes events of the fleet in one line each, for the log and for `llama-warden events`.

use warden_policies::ByteSize;
use warden_policies::sample::{HostMemory, MemoryKind, VramReading};
use warden_supervisor::{EventKind, LedgerEntry};

/// Describes an event, without model and generation, which the caller has.
pub(crate) fn describe_event(kind: &EventKind) -> String {
    match kind {
        EventKind::TakenOver { pid, replica } => {
            format!("taken over from the previous program: process {pid}, replica {replica}")
        }
        EventKind::Starting { pid, replica } => format!("starting: process {pid}, replica {replica}"),
        EventKind::Ready { start_ms, slots } => match slots {
            Some(slots) => format!("ready after {start_ms} ms with {slots} slots"),
            None => format!("ready after {start_ms} ms"),
        },
        EventKind::Suspect { crash: Some(line), .. } => {
            format!("suspect: no new requests until a probe is answered, because it logged `{line}`")
        }
        EventKind::Suspect { refused: true, .. } => {
            "suspect: it refused or broke a connection, so no new requests until a probe is answered"
                .to_owned()
        }
        EventKind::Suspect { .. } => "suspect: probes are lost, no new requests".to_owned(),
        EventKind::Recovered => "recovered: probes are answered again".to_owned(),
        EventKind::Draining { in_flight } => format!("draining: {in_flight} requests running"),
        EventKind::Unloaded { idle_ms } => {
            let idle = warden_policies::units::format_span(std::time::Duration::from_millis(*idle_ms));
            format!("unloaded: no request for {idle}; the next request loads it again")
        }
        EventKind::MakesRoom { wanted } => {
            format!("unloaded to free memory for `{wanted}`; its next request loads it again")
        }
        EventKind::WaitsForRoom { message } => format!("waits for room: {message}"),
        EventKind::LoadsAnew { message } => {
            format!("unloaded, and loaded with its new settings when there is room: {message}")
        }
        EventKind::FallsBack { message } => format!("falls back: {message}"),
        EventKind::StartSearchBegan { deaths, switches } => format!(
            "died {deaths} times while it loaded: searching for a switch that starts it, one of {switches}"
        ),
        EventKind::StartSearched { finding } => {
            let lines = finding.lines();
            format!("searched for a switch that starts it: {}", lines.join("; "))
        }
        EventKind::Stopped { exit } => format!("stopped: {exit}"),
        EventKind::Crashed { failure, .. } => format!("crashed: {}", failure.message),
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
            "ended {ends} times within {}, crash loop; still restarting: {}",
            warden_policies::units::format_span(std::time::Duration::from_secs(*within_s)),
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
        EventKind::RecycleDone { entry } => describe_replacement(entry),
        EventKind::Reclaimed { entry } => {
            let enough = match entry.helped {
                Some(true) => "; nothing is replaced",
                Some(false) => "; that is not enough",
                None => "",
            };
            format!("asked to give memory back ({}): {}{enough}", entry.reason, entry.sentence())
        }
        EventKind::CameBack { warmth } => format!("loaded again: {warmth}"),
        EventKind::Warmed { warmth } => format!("behind the gate: {warmth}"),
        EventKind::Verdict { message, .. }
        | EventKind::Unwell { message, .. }
        | EventKind::SettingLost { message }
        | EventKind::VramUnknown { message }
        | EventKind::DriverLeak { message, .. } => message.clone(),
        EventKind::EndpointAnswers { url } => format!("the endpoint `{url}` answers"),
        EventKind::EndpointSilent { failure } => failure.message.clone(),
        EventKind::PolicyOff { message } => format!("replacing by policy is off: {message}"),
        EventKind::CanaryBegan { binary, share } => {
            let what = share.map_or_else(
                || "copies of requests; its answers are discarded".to_owned(),
                |share| format!("{:.0} % of conversations", share * 100.0),
            );
            format!("canary: {} gets {what}", binary.display())
        }
        EventKind::CanaryEnded { entry } => {
            let words = entry.canary.verdict.words().join("; ");
            let words = if words.is_empty() { words } else { format!(": {words}") };
            let verdict = entry.canary.verdict.as_str().replace('_', " ");
            format!("canary over: {} is {verdict}{words}", entry.canary.binary.display())
        }
        EventKind::Pinned { entry } => entry.sentence(),
        EventKind::Asked { action, by } => format!("{by} asks for: {action}"),
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
                list_texts("changed", &report.changed),
                list_texts("takes effect at the next start of llama-warden", &report.needs_restart),
            ]
            .into_iter()
            .flatten()
            .collect();
            format!(
                "configuration applied; {}",
                if parts.is_empty() { "nothing changed".to_owned() } else { parts.join("; ") }
            )
        }
        EventKind::PromptTooLarge { action, short } => {
            let done = match action.as_str() {
                "refuse" => "refused",
                "wait" => "waits for running requests to end",
                "recycle" => "waits for a fresh process",
                "elsewhere" => "goes to another process",
                _ => "sent all the same",
            };
            format!("{done}: {short}")
        }
        EventKind::RequestsSuspected { fingerprints } => {
            let names: Vec<String> = fingerprints.iter().map(ToString::to_string).collect();
            format!(
                "{} request(s) were in flight when it died, each runs alone if it is sent again: {}",
                names.len(),
                names.join(", ")
            )
        }
        EventKind::RequestQuarantined { fingerprint, seconds } => format!(
            "request {fingerprint} ended it while nothing else ran there: refused for {seconds} s, or until \
             `llama-warden quarantine release {fingerprint}`"
        ),
        EventKind::RequestsReleased { count } => format!("{count} request(s) released from quarantine"),
        EventKind::RequestCancelled { request, state, by } => {
            format!("request {request} ({state}) was cancelled by {by}")
        }
        EventKind::QueueFull { waiting } => format!("the queue is full: {waiting} requests wait"),
    }
}

/// Lists the first of these texts and the number of those left out; `None` if there are no texts.
fn list_texts(what: &str, texts: &[String]) -> Option<String> {
    const SHOWN: usize = 12;
    let (first, more) = texts.split_at(texts.len().min(SHOWN));
    let more = if more.is_empty() { String::new() } else { format!(" and {} more", more.len()) };
    (!first.is_empty()).then(|| format!("{what}: {}{more}", first.join(", ")))
}

fn describe_replacement(entry: &LedgerEntry) -> String {
    let memory = |memory: Option<HostMemory>| {
        memory.map_or_else(|| "?".to_owned(), |memory| ByteSize(memory.charged()).to_string())
    };
    if let Some(failed) = &entry.failed {
        if entry.given_up {
            return format!("recycle given up ({}): {failed}", entry.reason);
        }
        return format!("recycle failed ({}): {failed}", entry.reason);
    }
    let vram = |all: &[VramReading], gpu| {
        let found = all.iter().find(|vram| vram.gpu == gpu);
        found.map_or_else(|| "?".to_owned(), |vram| ByteSize(vram.bytes).to_string())
    };
    let (what, before, after) = match entry.evidence.series {
        Some(series @ MemoryKind::Vram(gpu)) => {
            (series.to_string(), vram(&entry.vram_before, gpu), vram(&entry.vram_after, gpu))
        }
        _ => ("memory".to_owned(), memory(entry.host_before), memory(entry.host_after)),
    };
    let warm = entry.warm.as_ref().map(|warm| format!("; {warm}")).unwrap_or_default();
    format!(
        "recycle done: {}, {}, unavailable {} ms; {} requests waited, {} finished on the old process, {} failed; \
         {what} {before} -> {after}{warm}",
        entry.reason,
        entry.mode.as_str(),
        entry.gap_ms,
        entry.carried_over,
        entry.drained,
        entry.cut,
    )
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// An entry of the ledger with these fields replaced.
    fn replaced(other: &Value) -> Value {
        let host = |bytes: u64| json!({"anon": bytes, "swap": 0, "rss": bytes});
        let vram = |bytes: u64| json!([{"gpu": 0, "bytes": bytes, "source": "process"}]);
        let mut entry = json!({
            "id": 1, "at": "2026-01-02T03:00:00Z", "model": "m", "replica": 0, "reason": "host_soft",
            "evidence": {
                "host_bytes": 7, "budget_bytes": null, "requests": 2, "age_s": 1.5, "note": null,
                "work": {"requests": 2, "prompt_tokens": 1, "output_tokens": 1, "images": 0},
            },
            "mode": "overlap", "from": 1, "to": 2, "carried_over": 3, "drained": 4, "cut": 0, "gap_ms": 40,
            "drain_ms": 5, "start_ms": 30, "host_before": host(5 << 30), "host_after": host(2 << 30),
            "vram_before": vram(9 << 30), "vram_after": vram(8 << 30), "helped": true, "failed": null,
        });
        for (name, value) in other.as_object().into_iter().flatten() {
            entry[name] = value.clone();
        }
        json!({"kind": "recycle_done", "entry": entry})
    }

    #[test]
    fn every_event_is_one_line_for_people() {
        let failure = json!({"kind": "bad_model", "message": "the model could not be loaded", "lines": [], "failures": 2});
        let wanted = json!({"action": "recycle_when_quiet", "reason": "host_soft", "due": false});
        let mut of_vram = wanted.clone();
        of_vram["series"] = json!("vram0");
        let print = "0000000000000000000000000000abcd";
        let too_large = |action: &str| {
            json!({"kind": "prompt_too_large", "action": action, "short": {
                "series": "host", "tokens": 9000, "needed": 3_u64 << 30, "have": 1_u64 << 30,
                "bytes_per_token": 65_536.0, "retry_after_seconds": 20.0,
            }})
        };
        let applied = |names: &[&str]| {
            json!({"kind": "config_applied", "report": {
                "added": names, "removed": names, "restarted": [], "updated": names, "unchanged": [],
                "needs_restart": [],
            }})
        };
        let message = "what happened, in words";
        let events = vec![
            json!({"kind": "starting", "pid": 4711, "replica": 0}),
            json!({"kind": "ready", "start_ms": 1200, "slots": 4}),
            json!({"kind": "ready", "start_ms": 1200, "slots": null}),
            json!({"kind": "suspect", "refused": true}),
            json!({"kind": "suspect"}),
            json!({"kind": "recovered"}),
            json!({"kind": "draining", "in_flight": 2}),
            json!({"kind": "stopped", "exit": "exit code 0"}),
            json!({"kind": "crashed", "failure": failure}),
            json!({"kind": "backoff", "delay_ms": 1500, "failures": 2}),
            json!({"kind": "failed", "failure": failure}),
            json!({"kind": "crash_loop", "ends": 5, "within_s": 600, "failure": failure}),
            json!({"kind": "recycle_wanted", "decision": wanted, "host_bytes": 5_u64 << 30}),
            json!({"kind": "recycle_wanted", "decision": of_vram, "host_bytes": null, "series_bytes": 9_u64 << 30}),
            json!({"kind": "recycle_wanted", "decision": wanted, "host_bytes": null}),
            json!({"kind": "recycle_held", "decision": wanted, "held": {"kind": "cannot_start"}, "message": message}),
            json!({"kind": "recycle_began", "reason": "operator", "mode": "overlap", "note": "overlap: as configured"}),
            json!({"kind": "recycle_began", "reason": "operator", "mode": "sequential", "note": null}),
            replaced(&json!({})),
            replaced(&json!({"failed": "the next process did not start"})),
            replaced(&json!({"host_before": null, "host_after": null})),
            json!({"kind": "setting_lost", "message": message}),
            json!({"kind": "vram_unknown", "message": message}),
            json!({"kind": "driver_leak", "gpu": 0, "bytes": 1_u64 << 30, "message": message}),
            json!({"kind": "unwell", "reason": "wedged", "message": message}),
            json!({"kind": "policy_off", "message": message}),
            applied(&["a", "b"]),
            applied(&[]),
            json!({"kind": "config_applied", "report": {
                "added": [], "removed": [], "restarted": [], "updated": [], "unchanged": ["a"], "needs_restart": ["[server]"],
                "changed": ["models.a.request.max_tokens", "server.port"],
            }}),
            too_large("refuse"),
            too_large("wait"),
            too_large("recycle"),
            too_large("elsewhere"),
            too_large("warn"),
            json!({"kind": "asked", "action": "restart", "by": "page, 127.0.0.1"}),
            json!({"kind": "requests_suspected", "fingerprints": [print, print]}),
            json!({"kind": "request_quarantined", "fingerprint": print, "seconds": 600}),
            json!({"kind": "requests_released", "count": 2}),
            json!({"kind": "request_cancelled", "request": "0a1b", "state": "generating", "by": "uid 1000 (admin socket)"}),
            json!({"kind": "queue_full", "waiting": 8}),
        ];
        let told = events.into_iter().map(|event| {
            let read: EventKind =
                serde_json::from_value(event.clone()).unwrap_or_else(|why| panic!("{event}: {why}"));
            describe_event(&read) + "\n"
        });
        insta::assert_snapshot!(told.collect::<String>());
    }
}
