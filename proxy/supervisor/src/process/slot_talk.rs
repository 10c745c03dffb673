//! Requests about the slots of a process: list, save, restore, and evaluate the prompt of a conversation.

use std::time::Duration;

use bytes::Bytes;
use serde_json::{Value, json};
use warden_policies::warmth::SlotFacts;

use crate::process::{BackendProcess, BackendRequest, touch};

/// A slot as reported by the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReportedSlot {
    pub(crate) facts: SlotFacts,
    /// True if the slot is empty, as far as reported.
    pub(crate) is_empty: bool,
}

/// Lists the slots of a process; `None` if the process does not report them.
pub(crate) async fn list_slots(process: &dyn BackendProcess, timeout: Duration) -> Option<Vec<ReportedSlot>> {
    let (status, answer) =
        process.send_request(BackendRequest { path: "/slots".to_owned(), body: None }, timeout).await?;
    if status != 200 {
        return None;
    }
    read_slots(&serde_json::from_slice(&answer).ok()?)
}

fn read_slots(answer: &Value) -> Option<Vec<ReportedSlot>> {
    let of = |slot: &Value| {
        let id = u32::try_from(slot["id"].as_u64()?).ok()?;
        // Older versions of llama-server have `state` in place of `is_processing`; 0 is idle.
        let by_state = || slot["state"].as_u64().is_some_and(|state| state != 0);
        let busy = slot["is_processing"].as_bool().unwrap_or_else(by_state);
        let tokens = slot["n_prompt_tokens"].as_u64();
        let task = slot["id_task"].as_i64().and_then(|task| u64::try_from(task).ok());
        Some(ReportedSlot {
            facts: SlotFacts { id, busy, tokens, task },
            is_empty: !busy && (task.is_none() || tokens == Some(0)),
        })
    };
    answer.as_array()?.iter().map(of).collect()
}

/// Why a slot was not saved or restored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SlotFailure {
    /// There was no answer in time.
    Silent,
    /// The answer was an error, or not understood.
    Rejected,
}

/// Saves a slot. Returns the numbers of tokens and bytes that the server reports.
pub(crate) async fn save_slot(
    process: &dyn BackendProcess,
    slot: u32,
    name: &str,
    timeout: Duration,
) -> Result<(u64, u64), SlotFailure> {
    let answer = slot_action(process, slot, "save", name, timeout).await?;
    answer["n_saved"].as_u64().zip(answer["n_written"].as_u64()).ok_or(SlotFailure::Rejected)
}

/// Restores a slot. Returns the number of tokens that the server reports.
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
    let body = Bytes::from(json!({ "filename": name }).to_string());
    let question = BackendRequest { path: format!("/slots/{slot}?action={action}"), body: Some(body) };
    let (status, answer) = process.send_request(question, timeout).await.ok_or(SlotFailure::Silent)?;
    if status != 200 {
        tracing::debug!(slot, action, status, "refused");
        return Err(SlotFailure::Rejected);
    }
    serde_json::from_slice(&answer).map_err(|_| SlotFailure::Rejected)
}

/// Result of a request that makes the process evaluate a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TouchResult {
    /// Number of prompt tokens found in the cache, and number of tokens that were evaluated.
    Counted(u64, u64),
    /// The request was refused, or the answer has no token counts.
    Refused,
    /// There was no answer in time.
    Silent,
}

/// Sends a request that makes a process evaluate a prompt without generating an answer.
pub(crate) async fn touch(
    process: &dyn BackendProcess,
    path: &str,
    body: Vec<u8>,
    timeout: Duration,
) -> TouchResult {
    let question = BackendRequest { path: path.to_owned(), body: Some(body.into()) };
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

/// Sends a `POST` and returns the answer as JSON.
pub(crate) async fn post_json(
    process: &dyn BackendProcess,
    path: &str,
    body: Vec<u8>,
    timeout: Duration,
) -> Option<Value> {
    let question = BackendRequest { path: path.to_owned(), body: Some(body.into()) };
    let (status, answer) = process.send_request(question, timeout).await?;
    (status == 200).then(|| serde_json::from_slice(&answer).ok()).flatten()
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
        for no_list in [json!({}), json!([{ "n_ctx": 1 }]), json!(["x"])] {
            assert_eq!(read_slots(&no_list), None, "{no_list}");
        }
    }
}
