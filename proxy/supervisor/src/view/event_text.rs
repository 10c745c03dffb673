//! Describes each event in one line, for the log, the command line and the pages.

use std::time::Duration;

use warden_policies::sample::{HostMemory, MemoryKind, VramReading};
use warden_policies::units::format_span;
use warden_policies::{ByteSize, ModelName, Reason, RecycleDecision, RequestFingerprint};

use crate::view::entry::{CanaryView, ReclaimEntry};
use crate::view::event::{ApplyReport, EventKind};
use crate::view::ledger::{LedgerEntry, ReplacementMode};

impl EventKind {
    /// Describes the event in one line, without model and generation.
    ///
    /// The line may quote the output of a process, so callers redact it.
    pub fn sentence(&self) -> String {
        match self {
            Self::TakenOver { pid, replica } => {
                format!("taken over from the previous program: process {pid}, replica {replica}")
            }
            Self::Starting { pid, replica } => format!("starting: process {pid}, replica {replica}"),
            Self::Ready { start_ms, slots } => {
                let slots = slots.map_or_else(String::new, |slots| format!(" with {slots} slots"));
                format!("ready after {start_ms} ms{slots}")
            }
            Self::Suspect { crash, refused } => describe_suspicion(crash.as_deref(), *refused),
            Self::Recovered => "recovered: probes are answered again".to_owned(),
            Self::Draining { in_flight } => format!("draining: {in_flight} requests running"),
            Self::Unloaded { idle_ms } => format!(
                "unloaded: no request for {}; the next request loads it again",
                format_span(Duration::from_millis(*idle_ms))
            ),
            Self::MakesRoom { wanted } => {
                format!("unloaded to free memory for `{wanted}`; its next request loads it again")
            }
            Self::WaitsForRoom { message } => format!("waits for room: {message}"),
            Self::LoadsAnew { message } => {
                format!("unloaded, and loaded with its new settings when there is room: {message}")
            }
            Self::FallsBack { message } => format!("falls back: {message}"),
            Self::StartSearchBegan { deaths, switches } => format!(
                "died {deaths} times while it loaded: searching for a switch that starts it, one of {switches}"
            ),
            Self::StartSearched { finding } => {
                format!("searched for a switch that starts it: {}", finding.lines().join("; "))
            }
            Self::Stopped { exit } => format!("stopped: {exit}"),
            Self::Crashed { failure, .. } => format!("crashed: {}", failure.message),
            Self::Backoff { delay_ms, failures } => {
                format!("the next start waits {delay_ms} ms after {failures} failure(s) in a row")
            }
            Self::Failed { failure } => format!(
                "cannot start before something changes: {}; a change of its files or settings starts it, and so does \
                 `llama-warden restart`",
                failure.message
            ),
            Self::CrashLoop { ends, within_s, failure } => {
                describe_crash_loop(*ends, *within_s, &failure.message)
            }
            Self::EndpointAnswers { url } => format!("the endpoint `{url}` answers"),
            Self::EndpointSilent { failure } => failure.message.clone(),
            Self::Pinned { entry } => entry.sentence(),
            Self::Asked { action, by } => format!("{by} asks for: {action}"),
            Self::ConfigApplied { report } => describe_changes(report),
            Self::QueueFull { waiting } => format!("the queue is full: {waiting} requests wait"),
            Self::Verdict { message, .. }
            | Self::Unwell { message, .. }
            | Self::SettingLost { message }
            | Self::VramUnknown { message }
            | Self::DriverLeak { message, .. } => message.clone(),
            Self::RecycleWanted { decision, host_bytes, series_bytes } => {
                describe_wanted(decision, series_bytes.or(*host_bytes))
            }
            Self::RecycleHeld { message, .. } => format!("recycle held back: {message}"),
            Self::RecycleBegan { reason, mode, note } => describe_beginning(*reason, *mode, note.as_deref()),
            Self::RecycleDone { entry } => entry.sentence(),
            Self::Reclaimed { entry } => describe_reclaim(entry),
            Self::CameBack { warmth } => format!("loaded again: {warmth}"),
            Self::ConversationsStored { .. } => self.describe_stored(),
            Self::Warmed { warmth } => format!("behind the gate: {warmth}"),
            Self::PolicyOff { message } => format!("replacing by policy is off: {message}"),
            Self::CanaryBegan { binary, share } => {
                format!("canary: {} gets {}", binary.display(), canary_traffic(*share))
            }
            Self::CanaryEnded { entry } => describe_canary_end(&entry.canary),
            Self::PromptTooLarge { action, short } => format!("{}: {short}", admission_words(action)),
            Self::RequestsSuspected { fingerprints } => describe_suspects(fingerprints),
            Self::RequestQuarantined { fingerprint, seconds } => describe_quarantine(fingerprint, *seconds),
            Self::RequestsReleased { count } => format!("{count} request(s) released from quarantine"),
            Self::RequestCancelled { request, state, by } => {
                format!("request {request} ({state}) was cancelled by {by}")
            }
        }
    }
}

impl EventKind {
    fn describe_stored(&self) -> String {
        match self {
            Self::ConversationsStored { failed: Some(why), .. } => {
                format!("conversations are not on disk: {why}")
            }
            Self::ConversationsStored { conversations, slots, bytes, took_ms, no_file, .. } => {
                let bytes = ByteSize(*bytes);
                let why = no_file.map(|why| format!("; {}", why.words())).unwrap_or_default();
                format!(
                    "on disk: {conversations} conversations, {slots} with slots; {bytes} written in {took_ms} ms{why}"
                )
            }
            _ => String::new(),
        }
    }
}

fn describe_quarantine(fingerprint: &RequestFingerprint, seconds: u64) -> String {
    format!(
        "request {fingerprint} ended it while nothing else ran there: refused for {seconds} s, or until \
         `llama-warden quarantine release {fingerprint}`"
    )
}

fn describe_suspicion(crash: Option<&str>, refused: bool) -> String {
    match crash {
        Some(line) => {
            format!("suspect: no new requests until a probe is answered, because it logged `{line}`")
        }
        None if refused => {
            "suspect: it refused or broke a connection, so no new requests until a probe is answered"
                .to_owned()
        }
        None => "suspect: probes are lost, no new requests".to_owned(),
    }
}

fn describe_crash_loop(ends: u32, within_s: u64, message: &str) -> String {
    let within = format_span(Duration::from_secs(within_s));
    format!("ended {ends} times within {within}, crash loop; still restarting: {message}")
}

fn describe_beginning(reason: Reason, mode: ReplacementMode, note: Option<&str>) -> String {
    let note = note.map(|note| format!(" ({note})")).unwrap_or_default();
    format!("recycle began: {reason}, {}{note}", mode.as_str())
}

fn describe_wanted(decision: &RecycleDecision, bytes: Option<u64>) -> String {
    let reason = decision.reason.map_or("?", Reason::as_str);
    let held = match (decision.series, bytes) {
        (Some(series), Some(bytes)) => format!(" at {series} {}", ByteSize(bytes)),
        (None, Some(bytes)) => format!(" at {}", ByteSize(bytes)),
        (_, None) => String::new(),
    };
    format!("recycle wanted ({reason}){held}, at the next quiet moment")
}

fn describe_reclaim(entry: &ReclaimEntry) -> String {
    let enough = match entry.helped {
        Some(true) => "; nothing is replaced",
        Some(false) => "; that is not enough",
        None => "",
    };
    format!("asked to give memory back ({}): {}{enough}", entry.reason, entry.sentence())
}

/// Names the requests that a canary gets. `share`: its share of the model's conversations.
pub fn canary_traffic(share: Option<f64>) -> String {
    match share {
        Some(share) => format!("{:.0} % of conversations", share * 100.0),
        None => "copies of requests; its answers are discarded".to_owned(),
    }
}

fn describe_canary_end(canary: &CanaryView) -> String {
    let words = canary.verdict.words().join("; ");
    let words = if words.is_empty() { words } else { format!(": {words}") };
    let verdict = canary.verdict.as_str().replace('_', " ");
    format!("canary over: {} is {verdict}{words}", canary.binary.display())
}

fn describe_changes(report: &ApplyReport) -> String {
    let parts: Vec<String> = [
        list_models("added", &report.added),
        list_models("removed", &report.removed),
        list_models("restarted", &report.restarted),
        list_models("updated", &report.updated),
        list_texts("changed", &report.changed),
        list_texts("takes effect at the next start of llama-warden", &report.needs_restart),
    ]
    .into_iter()
    .flatten()
    .collect();
    let parts = if parts.is_empty() { "nothing changed".to_owned() } else { parts.join("; ") };
    format!("configuration applied; {parts}")
}

fn list_models(what: &str, names: &[ModelName]) -> Option<String> {
    let names: Vec<&str> = names.iter().map(ModelName::as_str).collect();
    (!names.is_empty()).then(|| format!("{what}: {}", names.join(", ")))
}

/// Lists the first of these texts and the number of those left out; `None` if there are no texts.
fn list_texts(what: &str, texts: &[String]) -> Option<String> {
    const SHOWN: usize = 12;
    let (first, more) = texts.split_at(texts.len().min(SHOWN));
    let more = if more.is_empty() { String::new() } else { format!(" and {} more", more.len()) };
    (!first.is_empty()).then(|| format!("{what}: {}{more}", first.join(", ")))
}

fn admission_words(action: &str) -> &'static str {
    match action {
        "refuse" => "refused",
        "wait" => "waits for running requests to end",
        "recycle" => "waits for a fresh process",
        "elsewhere" => "goes to another process",
        _ => "sent all the same",
    }
}

fn describe_suspects(fingerprints: &[RequestFingerprint]) -> String {
    let names: Vec<String> = fingerprints.iter().map(ToString::to_string).collect();
    format!(
        "{} request(s) were in flight when it died, each runs alone if it is sent again: {}",
        names.len(),
        names.join(", ")
    )
}

impl LedgerEntry {
    /// Returns VRAM before and after a replacement if a GPU's memory was the reason, else host memory.
    pub fn memory_change(&self) -> (Option<u64>, Option<u64>) {
        match self.evidence.series {
            Some(MemoryKind::Vram(gpu)) => {
                let held =
                    |all: &[VramReading]| all.iter().find(|vram| vram.gpu == gpu).map(|vram| vram.bytes);
                (held(&self.vram_before), held(&self.vram_after))
            }
            _ => (self.host_before.map(HostMemory::charged), self.host_after.map(HostMemory::charged)),
        }
    }

    /// Describes the replacement in one line, without its model.
    pub fn sentence(&self) -> String {
        if let Some(failed) = &self.failed {
            let outcome = if self.given_up { "given up" } else { "failed" };
            return format!("recycle {outcome} ({}): {failed}", self.reason);
        }
        let what = match self.evidence.series {
            Some(series @ MemoryKind::Vram(_)) => series.to_string(),
            _ => "memory".to_owned(),
        };
        let (before, after) = self.memory_change();
        let size =
            |bytes: Option<u64>| bytes.map_or_else(|| "?".to_owned(), |bytes| ByteSize(bytes).to_string());
        let warm = self.warm.as_ref().map(|warm| format!("; {warm}")).unwrap_or_default();
        format!(
            "recycle done: {}, {}, unavailable {} ms; {} requests waited, {} finished on the old process, {} failed; \
             {what} {} -> {}{warm}",
            self.reason,
            self.mode.as_str(),
            self.gap_ms,
            self.carried_over,
            self.drained,
            self.cut,
            size(before),
            size(after),
        )
    }
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
            json!({"kind": "taken_over", "pid": 4711, "replica": 1}),
            json!({"kind": "unloaded", "idle_ms": 300_000}),
            json!({"kind": "makes_room", "wanted": "other"}),
            json!({"kind": "waits_for_room", "message": message}),
            json!({"kind": "loads_anew", "message": message}),
            json!({"kind": "falls_back", "message": message}),
            json!({"kind": "start_search_began", "deaths": 3, "switches": 4}),
            json!({"kind": "endpoint_answers", "url": "http://host:1"}),
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
            read.sentence() + "\n"
        });
        insta::assert_snapshot!(told.collect::<String>());
    }
}
