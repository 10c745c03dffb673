//! Errors of llama-server for invalid bodies, as far as redacted requests might cause them.

use serde_json::Value;

use crate::shape::Shape;

pub(crate) fn wrong(shape: Shape, body: &Value) -> Option<String> {
    if shape == Shape::Infill {
        return infill(body);
    }
    let all = |value: &Value| value.as_array().cloned().unwrap_or_default();
    for tool in all(&body["tools"]) {
        // Anthropic's tools have their fields next to the name.
        let own = if shape == Shape::Chat { &tool["function"] } else { &tool };
        if !own["name"].is_string() {
            return Some(format!("Failed to parse tools: no name; tools = {tool}"));
        }
        let schema = if shape == Shape::Chat { &own["parameters"] } else { &own["input_schema"] };
        let named = |name: &Value| schema["properties"].get(name.as_str().unwrap_or_default()).is_some();
        if !all(&schema["required"]).iter().all(named) {
            return Some(format!("JSON schema conversion failed: {schema}"));
        }
    }
    for message in all(&body["messages"]) {
        if message["role"].is_null() {
            return Some(format!("Missing 'role' in message: {message}"));
        }
        for call in all(&message["tool_calls"]) {
            let function = &call["function"];
            if !function["name"].is_string() {
                return Some(format!("Missing tool call name: {call}"));
            }
            let given =
                function["arguments"].as_str().and_then(|text| serde_json::from_str::<Value>(text).ok());
            if !given.is_some_and(|given| given.is_object()) {
                return Some(format!("the template needs arguments that are an object: {call}"));
            }
        }
        for part in all(&message["content"]) {
            let source = &part["source"];
            let has = |name: &str| source[name].as_str().is_some_and(|text| !text.is_empty());
            if part["type"] == "image" && !(source["type"] == "base64" && has("data")) {
                return Some("Failed to load image or audio file".to_owned());
            }
            let named = part["name"].as_str().is_some_and(|name| !name.is_empty());
            if part["type"] == "tool_use" && !(named && part["input"].is_object()) {
                return Some(format!("Missing tool call name: {part}"));
            }
        }
    }
    None
}

fn infill(body: &Value) -> Option<String> {
    for name in ["input_prefix", "input_suffix"] {
        if !body[name].is_string() {
            return Some(format!("\"{name}\" is required"));
        }
    }
    let extra = body["input_extra"].as_array().cloned().unwrap_or_default();
    let told = extra.iter().all(|chunk| chunk["text"].is_string());
    (!told).then(|| "extra_context chunk must contain a \"text\" field with a string value".to_owned())
}
