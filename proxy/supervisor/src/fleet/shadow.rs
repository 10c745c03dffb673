//! The task beside a canary that answers nobody: it sends it copies of requests, one after another, and compares its answers where nothing
//! is drawn.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;

use bytes::Bytes;
use serde_json::Value;
use tokio::sync::mpsc;
use warden_policies::canary::{Arm, Exchange};
use warden_policies::dispatch::LeaseKind;
use warden_policies::units;

use super::Fleet;
use super::canary::{Running, Stage};
use crate::lease::queue::Leases;
use crate::lease::shadow::Copied;
use crate::process::Question;
use crate::process::touch::Said;
use crate::sync::lock;

impl Fleet {
    /// Begins to copy the requests of a model for its canary, and returns who sends them.
    pub(super) fn cast_shadow(
        self,
        running: Arc<Running>,
        base: Arc<Leases>,
    ) -> impl Future<Output = ()> + Send + 'static {
        let numbers = running.spec.numbers;
        let (sender, mut receiver) = mpsc::channel(numbers.shadow_kept.max(1));
        base.shadow.set(sender.clone(), numbers.shadow_bytes.0);
        let mut stage = running.stage.subscribe();
        async move {
            loop {
                let ended = async {
                    drop(stage.wait_for(|stage| matches!(stage, Stage::Ended(_))).await);
                };
                let copied = tokio::select! {
                    biased;
                    () = ended => break,
                    copied = receiver.recv() => copied,
                };
                let Some(copied) = copied else { break };
                let mut unsent = base.shadow.take_dropped();
                // One whose canary ends meanwhile is not waited for.
                let ended = async {
                    drop(stage.wait_for(|stage| matches!(stage, Stage::Ended(_))).await);
                };
                let sent = tokio::select! {
                    biased;
                    () = ended => break,
                    sent = self.send_copy(&running, &copied) => sent,
                };
                unsent += u64::from(!sent);
                if unsent > 0 {
                    lock(&running.trial).dropped(unsent);
                }
            }
            base.shadow.unset(&sender);
        }
    }

    /// Sends one. False if the canary had no place for it.
    async fn send_copy(&self, running: &Running, copied: &Copied) -> bool {
        let Some(lease) = self.lease_now(&running.name, LeaseKind::Slot, None) else { return false };
        let (Some(process), Some((body, is_certain))) = (lease.process(), question(&copied.body)) else {
            return false;
        };
        let question = Question { path: copied.path.clone(), body: Some(body) };
        let answer = process.ask(question, running.spec.numbers.shadow_limit).await;
        lease.note_done();
        let mut hasher = DefaultHasher::new();
        copied.body.hash(&mut hasher);
        let mut exchange = Exchange {
            arm: Arm::Canary,
            conversation: hasher.finish(),
            failed: answer.as_ref().is_none_or(|(status, _)| *status >= 500),
            latency_ms: None,
            token_ms: None,
        };
        if let Some((200, whole)) = answer {
            exchange.token_ms = pace(&whole, running.spec.numbers.pace_tokens);
            let (theirs, ours) = (copied.said.text(), Said::Whole(whole).text());
            if let (true, Some(theirs), Some(ours)) = (is_certain, theirs, ours) {
                lock(&running.trial).compared(differs_at(&theirs, &ours));
            }
        }
        drop(lease);
        self.note_exchange(&running.model, &exchange);
        true
    }
}

/// The same request for one whole answer, and whether that is the same each time: nothing is drawn. `None` if it is no object.
fn question(body: &[u8]) -> Option<(Bytes, bool)> {
    let Ok(Value::Object(mut body)) = serde_json::from_slice(body) else { return None };
    let is_certain = body.get("temperature").and_then(Value::as_f64) == Some(0.0);
    body.remove("stream_options");
    body.insert("stream".to_owned(), Value::Bool(false));
    Some((Value::Object(body).to_string().into(), is_certain))
}

/// Milliseconds for a token, by the server's own clock.
fn pace(answer: &[u8], least: u64) -> Option<f64> {
    let answer: Value = serde_json::from_slice(answer).ok()?;
    let timings = &answer["timings"];
    let tokens = timings["predicted_n"].as_u64().filter(|tokens| *tokens >= least)?;
    Some(timings["predicted_ms"].as_f64()? / units::exact(tokens))
}

/// At which character two texts differ, if they do.
fn differs_at(one: &str, other: &str) -> Option<u64> {
    let same = one.chars().zip(other.chars()).take_while(|(one, other)| one == other).count();
    (one != other).then_some(same as u64)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_copy_asks_for_one_whole_answer_and_says_whether_chance_decides_it() {
        let asked = |body: Value| {
            let (body, is_certain) = question(body.to_string().as_bytes()).unwrap();
            (serde_json::from_slice::<Value>(&body).unwrap(), is_certain)
        };
        let body = json!({ "prompt": "a", "stream": true, "stream_options": {}, "temperature": 0 });
        assert_eq!(asked(body), (json!({ "prompt": "a", "stream": false, "temperature": 0 }), true));
        assert!(!asked(json!({ "prompt": "a", "temperature": 0.7 })).1);
        assert!(!asked(json!({ "prompt": "a" })).1);
        assert_eq!(question(b"[1]"), None);
    }

    #[test]
    fn answers_are_compared_by_characters_and_speeds_told_by_enough_tokens() {
        assert_eq!(differs_at("äb", "äb"), None);
        assert_eq!(differs_at("äbc", "äbd"), Some(2));
        assert_eq!(differs_at("äb", "äbd"), Some(2));
        let timed = json!({ "timings": { "predicted_n": 10, "predicted_ms": 50.0 } }).to_string();
        assert_eq!((pace(timed.as_bytes(), 8), pace(timed.as_bytes(), 11)), (Some(5.0), None));
        assert_eq!(pace(b"no json", 1), None);
    }
}
