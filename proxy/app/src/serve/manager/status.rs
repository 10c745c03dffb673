//! The status line shown by a service manager: models, requests, memory, and the policy's next action. Pure.

use std::fmt::Write as _;

use warden_policies::recycle::RecycleAction;
use warden_policies::{ByteSize, secrets};
use warden_supervisor::{FleetView, ModelState, ModelView};

/// Length limit in bytes: a line or two of a terminal. `llama-warden status` shows more.
const MAX_STATUS_BYTES: usize = 240;

pub(super) fn status_line(view: &FleetView, in_flight: usize) -> String {
    let count = |state| view.models.iter().filter(|model| model.state == state).count();
    let mut text = match view.models.len() {
        0 => "no models yet".to_owned(),
        models => format!("{} of {models} models ready", count(ModelState::Loaded)),
    };
    for state in [ModelState::Loading, ModelState::Draining, ModelState::Backoff, ModelState::Failed] {
        let models = count(state);
        if models > 0 {
            let _infallible = write!(text, ", {models} {}", state.as_str());
        }
    }
    let waiting: usize = view.models.iter().map(|model| model.waiting).sum();
    let _infallible = write!(text, "; {in_flight} requests in flight, {waiting} waiting");
    let backends = view.models.iter().chain(&view.canaries).flat_map(|model| &model.backends);
    let held: u64 = backends.filter_map(|backend| backend.host.as_ref()).map(|host| host.charged()).sum();
    if held > 0 {
        let _infallible = write!(text, "; {} host memory", ByteSize(held));
    }
    if let Some(next) = view.models.iter().find_map(|model| next_action(model)) {
        let _infallible = write!(text, "; next: {next}");
    }
    to_single_line(&text)
}

fn next_action(model: &ModelView) -> Option<String> {
    let policy = model.policy.as_ref().filter(|policy| policy.decision.action != RecycleAction::Observe)?;
    let reason = policy.decision.reason.map_or("", |reason| reason.phrase());
    let held = if policy.held.is_some() { ", held back" } else { "" };
    Some(format!("{}: {} ({reason}){held}", model.name, policy.decision.action.phrase()))
}

/// Joins a text into one line: each line of a message is a field, and names may contain anything.
pub(super) fn to_single_line(text: &str) -> String {
    let plain = secrets::redact_text(text);
    let mut line: String =
        plain.chars().map(|char| if char.is_control() { ' ' } else { char }).take(MAX_STATUS_BYTES).collect();
    if plain.chars().nth(MAX_STATUS_BYTES).is_some() {
        line.push('…');
    }
    line
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn model(name: &str, state: &str, policy: &Value) -> Value {
        json!({
            "name": name, "aliases": [], "state": state, "waiting": 2, "queue_depth": 512, "recycles": [], "crashes": 0,
            "n_ctx": null, "policy": policy, "last_failure": null, "replace_note": null,
            "backends": if state == "unloaded" { json!([]) } else { json!([{
                "replica": 0, "generation": 1, "phase": "ready", "pid": 7, "ready_for": null, "in_flight": 1, "slots": 4,
                "host": {"anon": 3_u64 << 30, "swap": 0, "rss": 3_u64 << 30}, "host_at_ready": null,
                "work": {"requests": 1, "prompt_tokens": 1, "output_tokens": 1, "images": 0},
            }]) },
        })
    }

    fn view(models: &[Value]) -> FleetView {
        serde_json::from_value(json!({"number": 1, "models": models})).unwrap()
    }

    #[test]
    fn the_line_says_what_is_served_and_what_comes_next() {
        let wants = json!({
            "decision": {"action": "recycle_when_quiet", "reason": "host_soft", "due": false}, "held": {"kind": "cannot_start"},
        });
        let some = view(&[
            model("chat", "loaded", &wants),
            model("code", "loading", &Value::Null),
            model("embed", "unloaded", &Value::Null),
        ]);
        let broken = view(&[model("a\nREADY=1\u{1b}[2J", "failed", &Value::Null)]);
        let lines = [status_line(&view(&[]), 0), status_line(&some, 5), status_line(&broken, 0)];
        insta::assert_snapshot!(lines.join("\n"));
        assert!(lines.iter().all(|line| !line.contains('\n')));
        let many: Vec<Value> = (0..1000).map(|_| model(&"m".repeat(300), "loaded", &wants)).collect();
        assert_eq!(status_line(&view(&many), 0).chars().count(), MAX_STATUS_BYTES + 1);
    }
}
