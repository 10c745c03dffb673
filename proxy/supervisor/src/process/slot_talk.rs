//! Slot requests for all versions of llama-server: list, save, restore, and evaluate a prompt.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::time::Duration;

use serde_json::{Value, json};
use warden_policies::health::SlotActivity;
use warden_policies::warmth::SlotFacts;

use crate::process::{BackendProcess, BackendRequest, touch};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReportedSlot {
    pub(crate) facts: SlotFacts,
    pub(crate) is_empty: bool,
}

/// Returns `None` if the process does not report its slots.
pub(crate) async fn list_slots(process: &dyn BackendProcess, timeout: Duration) -> Option<Vec<ReportedSlot>> {
    read_slots(&request_slots(process, timeout).await?)
}

/// Returns `None` if the process does not report its slots.
pub(crate) async fn slot_activity(process: &dyn BackendProcess, timeout: Duration) -> Option<SlotActivity> {
    read_activity(&request_slots(process, timeout).await?)
}

async fn request_slots(process: &dyn BackendProcess, timeout: Duration) -> Option<Value> {
    let question = BackendRequest { path: "/slots".to_owned(), body: None };
    let (status, answer) = process.send_request(question, timeout).await?;
    (status == 200).then(|| serde_json::from_slice(&answer).ok()).flatten()
}

/// Returns `None` if the answer is no list of slots.
fn read_slots(answer: &Value) -> Option<Vec<ReportedSlot>> {
    let of = |slot: &Value| {
        let id = u32::try_from(slot["id"].as_u64()?).ok()?;
        let busy = is_busy(slot);
        let tokens = slot["n_prompt_tokens"].as_u64();
        let task = slot["id_task"].as_i64().and_then(|task| u64::try_from(task).ok());
        Some(ReportedSlot {
            facts: SlotFacts { id, busy, tokens, task },
            is_empty: !busy && (task.is_none() || tokens == Some(0)),
        })
    };
    answer.as_array()?.iter().map(of).collect()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SlotFailure {
    Silent,
    Rejected,
}

/// Returns the reported numbers of tokens and bytes.
pub(crate) async fn save_slot(
    process: &dyn BackendProcess,
    slot: u32,
    name: &str,
    timeout: Duration,
) -> Result<(u64, u64), SlotFailure> {
    let answer = slot_action(process, slot, "save", name, timeout).await?;
    answer["n_saved"].as_u64().zip(answer["n_written"].as_u64()).ok_or(SlotFailure::Rejected)
}

/// Returns the reported number of tokens.
pub(crate) async fn restore_slot(
    process: &dyn BackendProcess,
    slot: u32,
    name: &str,
    timeout: Duration,
) -> Result<u64, SlotFailure> {
    slot_action(process, slot, "restore", name, timeout).await?["n_restored"]
        .as_u64()
        .ok_or(SlotFailure::Rejected)
}

async fn slot_action(
    process: &dyn BackendProcess,
    slot: u32,
    action: &str,
    name: &str,
    timeout: Duration,
) -> Result<Value, SlotFailure> {
    let body = json!({ "filename": name }).to_string();
    let question = BackendRequest::post(&format!("/slots/{slot}?action={action}"), body.into());
    let (status, answer) = process.send_request(question, timeout).await.ok_or(SlotFailure::Silent)?;
    if status != 200 {
        tracing::debug!(slot, action, status, "refused");
        return Err(SlotFailure::Rejected);
    }
    serde_json::from_slice(&answer).map_err(|_| SlotFailure::Rejected)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TouchResult {
    /// Prompt tokens found in the cache, and evaluated tokens.
    Counted(u64, u64),
    /// The server refused the request, or its answer has no token counts.
    Refused,
    Silent,
}

/// Makes a process evaluate a prompt without generating an answer.
pub(crate) async fn touch(
    process: &dyn BackendProcess,
    path: &str,
    body: Vec<u8>,
    timeout: Duration,
) -> TouchResult {
    let question = BackendRequest::post(path, body);
    match process.send_request(question, timeout).await {
        None => TouchResult::Silent,
        Some((200, answer)) => match touch::answer_counts(&answer) {
            Some((cached, evaluated)) => TouchResult::Counted(cached, evaluated),
            None => TouchResult::Refused,
        },
        Some((status, _)) => {
            tracing::debug!(path, status, "a conversation's prompt was refused");
            TouchResult::Refused
        }
    }
}

pub(crate) async fn post_json(
    process: &dyn BackendProcess,
    path: &str,
    body: Vec<u8>,
    timeout: Duration,
) -> Option<Value> {
    let question = BackendRequest::post(path, body);
    let (status, answer) = process.send_request(question, timeout).await?;
    (status == 200).then(|| serde_json::from_slice(&answer).ok()).flatten()
}

const WORK_FIELDS: [&str; 7] = [
    "id_task",
    "n_decoded",
    "n_past",
    "n_prompt_tokens",
    "n_prompt_tokens_cache",
    "n_prompt_tokens_processed",
    "n_remain",
];

/// Reads the number of busy slots, and a value that changes with each token and each prompt batch.
fn read_activity(answer: &Value) -> Option<SlotActivity> {
    let busy = read_slots(answer)?.iter().filter(|slot| slot.facts.busy).count();
    let mut hasher = DefaultHasher::new();
    hash_work(answer, &mut hasher);
    Some(SlotActivity { busy: u32::try_from(busy).unwrap_or(u32::MAX), mark: hasher.finish() })
}

/// Older versions of llama-server have `state` in place of `is_processing`; 0 is idle. A slot with neither
/// may be computing: nothing is saved from it, and it does not make a wedged server look idle.
fn is_busy(slot: &Value) -> bool {
    let by_state = || slot["state"].as_u64().map(|state| state != 0);
    slot["is_processing"].as_bool().or_else(by_state).unwrap_or(true)
}

fn hash_work(value: &Value, hasher: &mut DefaultHasher) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                match value.as_i64() {
                    Some(number) if WORK_FIELDS.contains(&name.as_str()) => (name, number).hash(hasher),
                    _ => hash_work(value, hasher),
                }
            }
        }
        Value::Array(items) => items.iter().for_each(|item| hash_work(item, hasher)),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_read_as_every_build_tells_them() {
        let slot = |id, busy, tokens, task, is_empty| ReportedSlot {
            facts: SlotFacts { id, busy, tokens, task },
            is_empty,
        };
        let now = json!([
            { "id": 0, "is_processing": false, "id_task": 7, "n_prompt_tokens": 900 },
            { "id": 1, "is_processing": true, "id_task": 9, "n_prompt_tokens": 3 },
            { "id": 2, "is_processing": false },
            { "id": 3, "is_processing": false, "id_task": 5, "n_prompt_tokens": 0 },
        ]);
        let expected = [
            slot(0, false, Some(900), Some(7), false),
            slot(1, true, Some(3), Some(9), false),
            slot(2, false, None, None, true),
            slot(3, false, Some(0), Some(5), true),
        ];
        assert_eq!(read_slots(&now).unwrap(), expected);
        let once = json!([{ "id": 0, "state": 1, "id_task": 4 }, { "id": 1, "state": 0, "id_task": -1 }]);
        assert_eq!(
            read_slots(&once).unwrap(),
            [slot(0, true, None, Some(4), false), slot(1, false, None, None, true)]
        );
        let unknown = json!([{ "id": 0 }]);
        assert_eq!(read_slots(&unknown).unwrap(), [slot(0, true, None, None, false)]);
        assert_eq!(read_activity(&unknown).unwrap().busy, 1, "both readers count a slot alike");
        for no_list in [json!({}), json!([{ "n_ctx": 1 }]), json!(["x"])] {
            assert_eq!(read_slots(&no_list), None, "{no_list}");
        }
    }

    #[test]
    fn busy_slots_are_counted_and_every_token_changes_the_mark() {
        let newer = |decoded: u64, processed: u64| {
            json!([
                {"id": 0, "is_processing": false, "id_task": -1},
                {"id": 1, "is_processing": true, "id_task": 7, "n_prompt_tokens_processed": processed,
                 "prompt": "n_decoded", "next_token": [{"n_decoded": decoded, "n_remain": -1}]},
            ])
        };
        let one = read_activity(&newer(3, 10)).unwrap();
        assert_eq!(one.busy, 1);
        assert_eq!(read_activity(&newer(3, 10)), Some(one));
        assert!(
            read_activity(&newer(4, 10)).unwrap().mark != one.mark
                && read_activity(&newer(3, 20)).unwrap().mark != one.mark
        );
        let older = json!([{"id": 0, "state": 1, "n_past": 7}, {"id": 1, "state": 0}]);
        assert_eq!(read_activity(&older).unwrap().busy, 1);
        for other in [json!({"error": {"code": 501}}), json!([1, 2]), json!("x")] {
            assert_eq!(read_activity(&other), None, "{other}");
        }
        assert_eq!(read_activity(&json!([])).unwrap().busy, 0);
    }
}
