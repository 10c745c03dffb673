//! Reads llama-server's answer to `/slots`, in the forms of all versions: the number of busy slots, and a
//! value that changes with each token and each prompt batch. Texts in the answers of older versions are
//! skipped.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use serde_json::Value;
use warden_policies::health::SlotActivity;

/// Fields that change while a slot works.
const WORK_FIELDS: [&str; 7] = [
    "id_task",
    "n_decoded",
    "n_past",
    "n_prompt_tokens",
    "n_prompt_tokens_cache",
    "n_prompt_tokens_processed",
    "n_remain",
];

/// Reads the answer; `None` if the answer is no list of slots.
pub(crate) fn read_slots(answer: &Value) -> Option<SlotActivity> {
    let slots = answer.as_array().filter(|slots| slots.iter().all(Value::is_object))?;
    let busy = slots.iter().filter(|slot| is_busy(slot)).count();
    let mut hasher = DefaultHasher::new();
    for slot in slots {
        hash_work(slot, &mut hasher);
    }
    Some(SlotActivity { busy: u32::try_from(busy).unwrap_or(u32::MAX), mark: hasher.finish() })
}

/// True if a slot is busy. Older versions have `state` in place of `is_processing`; 0 is idle.
fn is_busy(slot: &Value) -> bool {
    let by_state = || slot["state"].as_u64().is_none_or(|state| state != 0);
    slot["is_processing"].as_bool().unwrap_or_else(by_state)
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
    use serde_json::json;

    use super::*;

    #[test]
    fn busy_slots_are_counted_and_every_token_changes_the_mark() {
        let newer = |decoded: u64, processed: u64| {
            json!([
                {"id": 0, "is_processing": false, "id_task": -1},
                {"id": 1, "is_processing": true, "id_task": 7, "n_prompt_tokens_processed": processed,
                 "prompt": "n_decoded", "next_token": [{"n_decoded": decoded, "n_remain": -1}]},
            ])
        };
        let one = read_slots(&newer(3, 10)).unwrap();
        assert_eq!(one.busy, 1);
        assert_eq!(read_slots(&newer(3, 10)), Some(one));
        assert!(
            read_slots(&newer(4, 10)).unwrap().mark != one.mark
                && read_slots(&newer(3, 20)).unwrap().mark != one.mark
        );
        let older = json!([{"id": 0, "state": 1, "n_past": 7}, {"id": 1, "state": 0}]);
        assert_eq!(read_slots(&older).unwrap().busy, 1);
        for other in [json!({"error": {"code": 501}}), json!([1, 2]), json!("x")] {
            assert_eq!(read_slots(&other), None, "{other}");
        }
        assert_eq!(read_slots(&json!([])).unwrap().busy, 0);
    }
}
