//! Assembles an OpenAI response: takes the response object from the last event and corrects the fields that
//! differ from a non-streaming answer. Pure.

use serde_json::{Map, Value, json};

use super::order_fields;

#[derive(Debug, Default)]
pub(super) struct ResponsesAssembly {
    response: Option<Value>,
}

impl ResponsesAssembly {
    pub(super) fn add_event(&mut self, mut event: Map<String, Value>, size: usize) -> usize {
        if event.get("type").is_some_and(|kind| kind == "response.completed") {
            self.response = event.remove("response");
            return size;
        }
        0
    }

    pub(super) fn finish(self) -> Option<Value> {
        let Value::Object(mut response) = self.response? else { return None };
        if let Some(created) = response.get("created_at").cloned() {
            response.entry("completed_at").or_insert(created);
        }
        for item in response.get_mut("output").and_then(Value::as_array_mut).into_iter().flatten() {
            if let Value::Object(fields) = item.take() {
                *item = Value::Object(complete_item(fields));
            }
        }
        let order = ["completed_at", "created_at", "id", "model", "object", "output", "status", "usage"];
        Some(Value::Object(order_fields(response, &order)))
    }
}

fn complete_item(mut item: Map<String, Value>) -> Map<String, Value> {
    match item.get("type").and_then(Value::as_str) {
        Some("reasoning") => {
            item.entry("status").or_insert(json!("completed"));
            item
        }
        Some("message") => order_fields(item, &["content", "id", "role", "status", "type"]),
        _ => item,
    }
}
