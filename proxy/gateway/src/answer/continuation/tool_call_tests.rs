//! Generated text of calls, for the routes and for templates that show arguments in another form.

use super::*;

fn call(before: &str, arguments: &str) -> PartialCall {
    PartialCall::from_beginning(before, CallBeginning { name: "weather", arguments })
}

fn object(value: Value) -> Map<String, Value> {
    let Value::Object(members) = value else { panic!("{value}") };
    members
}

fn parsed(body: &[u8]) -> Value {
    serde_json::from_slice(body).unwrap()
}

/// An answer to the short chat: the generated text, and the call in it.
fn short(raw: &str, name: &str, arguments: &str) -> Vec<u8> {
    let call = json!({ "function": { "name": name, "arguments": arguments } });
    let message = json!({ "content": "", "tool_calls": [call] });
    json!({ "choices": [{ "message": message }], "__verbose": { "content": raw } }).to_string().into_bytes()
}

#[test]
fn the_arguments_of_the_client_follow_the_head_of_the_short_call() {
    let answer = short("{\"name\": \"weather\", \"arguments\": {\"city\": \"x", "weather", "{\"city\": \"x");
    let text = call("", "{\"city\": \"Par").generated_text("<tool_call>\n", &answer);
    let head = "<tool_call>\n{\"name\": \"weather\", \"arguments\": ";
    assert_eq!(text, Ok(format!("{head}{{\"city\": \"Par")));
    let text = call("I look.\n", "").generated_text("<tool_call>\n", &answer);
    assert_eq!(text, Ok(format!("I look.\n{head}")), "only the name has arrived");
}

#[test]
fn a_call_in_another_form_is_refused() {
    let refused = |trigger: &str, answer: &[u8]| call("", "{").generated_text(trigger, answer).unwrap_err();
    let tagged = short("<function=weather><parameter=city>x", "weather", "{\"city\":\"x");
    assert!(refused("", &tagged).contains("in another form"));
    let other = short("{\"name\": \"time\", \"arguments\": {\"city\": \"x", "time", "{\"city\": \"x");
    assert!(refused("", &other).contains("another way"));
    let late =
        short("{\"arguments\": {\"city\": \"x\"}, \"name\": \"weather\"", "weather", "{\"city\": \"x\"}");
    assert!(refused("", &late).contains("another form"), "the name follows the arguments");
    assert!(refused("", &short("{\"name\": \"weather\"", "weather", "{")).contains("another way"));
    assert!(refused("", b"{}").contains("does not call"));
    let text = json!({ "choices": [{ "message": { "content": "no" } }], "__verbose": { "content": "no" } });
    assert!(refused("", text.to_string().as_bytes()).contains("does not call"));
}

#[test]
fn tools_of_all_routes_become_functions_of_a_short_chat() {
    let schema = json!({ "type": "object" });
    let function = json!({ "name": "weather", "description": "", "parameters": schema });
    let mut flat = function.clone();
    flat["type"] = json!("function");
    let kwargs = json!({ "enable_thinking": false });
    for (kind, tools) in [
        (AnswerFormat::Chat, json!([{ "type": "function", "function": function }])),
        (AnswerFormat::Messages, json!([{ "name": "time" }, { "name": "weather", "input_schema": schema }])),
        (AnswerFormat::Responses, json!([{ "type": "web_search" }, flat])),
    ] {
        let body = object(json!({ "tools": tools, "temperature": 2, "chat_template_kwargs": kwargs }));
        let chat = parsed(&call("", "").short_call_request(kind, &body, "<tool_call>").unwrap());
        assert_eq!(chat["tools"], json!([{ "type": "function", "function": function }]), "{kind:?}");
        assert_eq!((&chat["tool_choice"], &chat["temperature"]), (&json!("required"), &json!(0)));
        assert_eq!(chat["chat_template_kwargs"], kwargs);
        assert_eq!(chat["messages"][1], json!({ "role": "assistant", "content": "<tool_call>" }));
        let first = parsed(&call("", "").trigger_request(kind, &body).unwrap());
        assert_eq!((&first["tool_choice"], &first["max_tokens"]), (&json!("auto"), &json!(1)));
        assert_eq!(first["messages"].as_array().map(Vec::len), Some(1));
    }
    let none = object(json!({ "tools": [] }));
    assert!(call("", "").trigger_request(AnswerFormat::Chat, &none).is_err());
}

#[test]
fn a_text_begins_a_call_but_no_pattern_does() {
    let told = |triggers: Value| {
        let settings = json!({ "__verbose": { "generation_settings": { "grammar_triggers": triggers } } });
        read_trigger(settings.to_string().as_bytes())
    };
    assert_eq!(
        told(json!([{ "type": 2, "value": "<t.*" }, { "type": 1, "value": "<tool_call>" }])),
        "<tool_call>"
    );
    assert_eq!(told(json!([{ "type": 0, "value": "[CALLS]", "token": 9 }])), "[CALLS]");
    assert_eq!(told(json!([{ "type": 2, "value": "<t.*" }])), "");
    assert_eq!(told(json!([])), "");
}
