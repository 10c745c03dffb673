//! Continues answers on processes that do not repeat themselves, as on a GPU: each start of llama-server
//! favours other tokens. Answers with a format, tool calls and other routes continue all the same, as one
//! valid answer.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use warden_rig::real::{self, sample_model};
use warden_rig::real_weights;

use super::anew::{MESSAGES, PLAIN, RESPONSES, TEMPLATE};
use super::*;

/// Most tokens of an answer: enough for a call.
const LIMIT: u64 = 160;

/// Tokens that another start favours: common words of both vocabularies.
const FAVOURED: [u32; 12] = [260, 28, 284, 314, 282, 288, 281, 335, 411, 480, 523, 608];

/// Calls tools like the sample's template, without thoughts.
const CALLS: &str = "{%- if tools -%}<|im_start|>system\nYou call tools.\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor -%}\
    To call one: <tool_call>\n{\"name\": <name>, \"arguments\": <arguments>}\n</tool_call><|im_end|>\n{% endif -%}\
    {%- for m in messages -%}<|im_start|>{{ m.role }}\n{{ m.content }}\
    {%- for call in m.tool_calls or [] %}\n<tool_call>\n{\"name\": \"{{ call.function.name }}\", \"arguments\": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor -%}\
    <|im_end|>\n{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}";

/// Starts a model whose processes give different answers to one request, although their command is the same.
async fn started_unlike(
    home: &Path,
    model: &Path,
    slots: &str,
    template: Option<&str>,
) -> Result<Warden, Trouble> {
    let server = real::llama_server().await?;
    let starts = home.join("starts");
    let biases: Vec<String> = FAVOURED.iter().map(|token| format!("--logit-bias {token}+$bias")).collect();
    let script = format!(
        "#!/bin/sh\ncase \"$*\" in *.gguf*)\necho >> '{starts}'\nbias=$(( $(wc -l < '{starts}') % 4 ))\n\
         set -- \"$@\" {biases};;\nesac\nexec '{server}' \"$@\"\n",
        biases = biases.join(" "),
        starts = starts.display(),
        server = server.display()
    );
    let binary = home.join("llama-server");
    std::fs::write(&binary, script)?;
    std::fs::set_permissions(&binary, std::fs::Permissions::from_mode(0o755))?;
    let mut flags = vec!["-np", slots, "-c", "8192", "--cache-ram", "0", "--jinja"];
    flags.extend(REPRODUCIBLE);
    let path = home.join("template.jinja");
    if let Some(template) = template {
        std::fs::write(&path, template)?;
        flags.extend(["--chat-template-file", path.to_str().context("a path")?]);
    }
    let lines = format!(
        "binary = '{}'\nmodel = '{}'\nargs = {}\npreload = true\n{GOING_ON}",
        binary.display(),
        model.display(),
        json!(flags)
    );
    let warden = Setup::new()?.top("log.children = false").model("m", &lines).start().await?;
    warden.until_ready(1).await?;
    Ok(warden)
}

fn with(own: &Value, more: &Value) -> Value {
    let mut body = json!({ "model": "m", "stream": true });
    for (name, value) in own.as_object().into_iter().chain(more.as_object()).flatten() {
        body[name] = value.clone();
    }
    body
}

/// What an answer must be, apart from being one answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AnswerForm {
    Text,
    Schema,
    /// Calls of `weather`, each with a city.
    Calls,
    /// Such calls, or a text.
    MayCall,
}

/// Requests of all routes, each with the form of its answer. With `thinks`, a thought comes first.
fn requests(thinks: bool) -> Vec<(&'static str, AnswerForm, &'static str, Value)> {
    // Two examples make a small model call at once.
    let called = |city: &str| {
        let city = format!("the city of {city}, with its old streets, markets and the river below the hills");
        format!(
            "<tool_call>\n{{\"name\": \"weather\", \"arguments\": {{\"city\": \"{city}\"}}}}\n</tool_call>"
        )
    };
    let turn = |role: &str, content: &str| json!({ "type": "message", "role": role, "content": content });
    let input = json!([
        turn("user", "Weather in Rome?"),
        turn("assistant", &called("Rome")),
        turn("user", "Weather in Oslo?"),
        turn("assistant", &called("Oslo")),
        turn("user", "Weather in Lima?")
    ]);
    let mut messages = input.clone();
    for turn in messages.as_array_mut().into_iter().flatten() {
        turn.as_object_mut().into_iter().for_each(|turn| drop(turn.remove("type")));
    }
    let city = json!({ "type": "object", "required": ["city"],
        "properties": { "city": { "type": "string", "minLength": 60, "maxLength": 90 } } });
    let function = json!({ "name": "weather", "parameters": city });
    let chat = json!({ "messages": messages, "max_tokens": LIMIT, "stream_options": { "include_usage": true },
        "chat_template_kwargs": { "enable_thinking": thinks } });
    let tools = json!([{ "type": "function", "function": function }]);
    let format = json!({ "type": "json_schema", "json_schema": { "schema": city } });
    let mut flat = function.clone();
    flat["type"] = json!("function");
    let message = json!({ "messages": messages, "max_tokens": LIMIT, "chat_template_kwargs": { "enable_thinking": thinks } });
    let response = json!({ "input": input, "max_output_tokens": LIMIT,
        "chat_template_kwargs": { "enable_thinking": thinks } });
    let any =
        json!({ "tool_choice": { "type": "any" }, "tools": [{ "name": "weather", "input_schema": city }] });
    vec![
        ("a schema", AnswerForm::Schema, CHAT, with(&chat, &json!({ "response_format": format }))),
        (
            "a call",
            AnswerForm::Calls,
            CHAT,
            with(&chat, &json!({ "tools": tools, "tool_choice": "required", "parallel_tool_calls": false })),
        ),
        (
            "an optional call",
            AnswerForm::MayCall,
            CHAT,
            with(&chat, &json!({ "tools": tools, "parallel_tool_calls": false })),
        ),
        ("a call", AnswerForm::Calls, MESSAGES, with(&message, &any)),
        (
            "a call",
            AnswerForm::Calls,
            RESPONSES,
            with(&response, &json!({ "tools": [flat], "tool_choice": "required" })),
        ),
        ("a text", AnswerForm::Text, CHAT, with(&chat, &json!({ "max_tokens": 60 }))),
        ("a text", AnswerForm::Text, MESSAGES, with(&message, &json!({ "max_tokens": 60 }))),
        ("a text", AnswerForm::Text, RESPONSES, with(&response, &json!({ "max_output_tokens": 60 }))),
    ]
}

/// Fails unless this is one whole answer of its form.
fn check_whole(form: AnswerForm, heard: &Heard, context: &str) {
    assert!(heard.ends.len() == 1 && heard.done && heard.behind == 0, "{context}: {heard:?}");
    assert_eq!((heard.ids, heard.late_roles), (1, 0), "{context}: {heard:?}");
    // `/v1/responses` calls such an answer complete, too.
    let is_cut = heard.usage.is_some_and(|(_, made)| made >= LIMIT);
    let is_city = |text: &str| {
        serde_json::from_str::<Value>(text).is_ok_and(|value| {
            // Noise of the sample has bytes that are no characters; a client counts them otherwise.
            let is_long = |city: &str| (60..=90).contains(&city.chars().count()) || city.contains('\u{FFFD}');
            value["city"].as_str().is_some_and(is_long)
        })
    };
    match form {
        AnswerForm::Text => {
            let has_any = !heard.text.is_empty() || !heard.reasoning.is_empty();
            assert!(heard.calls.is_empty() && has_any, "{context}: {heard:?}");
        }
        AnswerForm::Schema => assert!(is_cut || is_city(&heard.text), "{context}: {heard:?}"),
        AnswerForm::Calls | AnswerForm::MayCall => {
            let mut calls = heard.calls.split("weather{").skip(1).map(|call| format!("{{{call}"));
            assert!(
                is_cut
                    || ((form == AnswerForm::MayCall || heard.call_ids > 0)
                        && calls.all(|call| is_city(&call))),
                "{context}: {heard:?}"
            );
            assert!(
                heard.calls.is_empty() || heard.calls.starts_with("weather"),
                "{context}, the tool's name: {heard:?}"
            );
        }
    }
}

/// Answers of killed servers.
#[derive(Debug, Default)]
struct KilledAnswers {
    whole: u64,
    /// Number of whole answers that are one call.
    in_calls: u64,
    errors: Vec<String>,
}

/// Kills the server of each request, at one event or more (`WARDEN_KILLS`).
async fn killed_everywhere(
    warden: &Warden,
    temperature: &Value,
    thinks: bool,
) -> Result<KilledAnswers, Trouble> {
    let mut told = KilledAnswers::default();
    for (index, (what, form, path, mut body)) in requests(thinks).into_iter().enumerate() {
        if thinks {
            body["reasoning_budget_tokens"] = json!(20);
            body["thinking"] = json!({ "type": "enabled", "budget_tokens": 20 });
        }
        body["temperature"] = temperature.clone();
        for kill in 0..kills().div_ceil(3) {
            let at = 4 + (index + usize::try_from(kill).unwrap_or(0)) * 13 % 34;
            let mut heard = asked(warden, path, &body, Some(at)).await?;
            for _ in 0..20 {
                // llama-server's parser refuses some noise of the sample, even without a kill.
                let refused = |error: &str| error.contains("does not match the expected");
                if !heard.error.as_deref().is_some_and(refused) {
                    break;
                }
                heard = asked(warden, path, &body, Some(at)).await?;
            }
            let context = format!("{path}, {what}, temperature {temperature}, killed at event {at}");
            if let Some(error) = &heard.error {
                told.errors.push(format!("{context}: {error}: {heard:?}"));
                continue;
            }
            check_whole(form, &heard, &context);
            told.whole += 1;
            told.in_calls += u64::from(heard.text.is_empty() && heard.call_ids == 1);
        }
    }
    Ok(told)
}

/// Kills the servers of a model at each temperature; no answer may end with an error. An untrained model draws
/// texts with any sequence of texts and calls, of which some cannot be continued.
async fn all_continue(
    model: &Path,
    template: &str,
    temperatures: [Value; 2],
    thinks: bool,
) -> Result<Vec<KilledAnswers>, Trouble> {
    let home = tempfile::tempdir()?;
    let warden = started_unlike(home.path(), model, "2", Some(template)).await?;
    let mut all = Vec::new();
    for temperature in temperatures {
        let told = killed_everywhere(&warden, &temperature, thinks).await?;
        let is_drawn = template == PLAIN && temperature != json!(0);
        let allowed = if is_drawn { told.whole / 2 } else { 0 };
        assert!(told.errors.len() as u64 <= allowed, "temperature {temperature}: {told:#?}");
        all.push(told);
    }
    Ok(all)
}

#[tokio::test]
async fn calls_and_formats_continue_on_a_process_that_answers_otherwise() -> Outcome {
    let model = sample_model(SamplePreset::Tools)?;
    let all = all_continue(&model, PLAIN, [json!(0), json!(0.7)], false).await?;
    println!("{all:?}");
    assert!(all.iter().all(|told| told.whole > 0), "{all:#?}");
    Ok(())
}

#[tokio::test]
async fn trained_calls_and_formats_continue_on_a_process_that_answers_otherwise() -> Outcome {
    let Some(model) = real_weights::smollm2().await? else { return Ok(()) };
    let all = all_continue(&model, CALLS, [json!(0), json!(0.8)], false).await?;
    println!("{all:?}");
    assert!(all.iter().all(|told| told.in_calls > 0), "{all:#?}");
    Ok(())
}

#[tokio::test]
async fn thoughts_and_what_follows_them_continue_on_a_process_that_answers_otherwise() -> Outcome {
    let Some(model) = real_weights::smollm2().await? else { return Ok(()) };
    let all = all_continue(&model, TEMPLATE, [json!(0), json!(0.8)], true).await?;
    println!("{all:?}");
    assert!(all.iter().all(|told| told.whole > 0), "{all:#?}");
    Ok(())
}

/// A template without tools: a required tool has no grammar, and the answer is a text.
#[tokio::test]
async fn a_text_of_a_model_without_tools_continues_where_a_tool_is_required() -> Outcome {
    let Some(model) = real_weights::smollm2().await? else { return Ok(()) };
    let home = tempfile::tempdir()?;
    let warden = started_unlike(home.path(), &model, "2", None).await?;
    let tools = requests(false).into_iter().filter(|(_, form, ..)| *form == AnswerForm::Calls);
    for (_, _, path, mut body) in tools {
        for name in ["max_tokens", "max_output_tokens"] {
            if body[name].is_number() {
                body[name] = json!(50);
            }
        }
        for temperature in [json!(0), json!(0.8)] {
            body["temperature"] = temperature.clone();
            for kill in 0..kills().div_ceil(2) {
                let at = 5 + usize::try_from(kill).unwrap_or(0) * 7 % 30;
                let heard = asked(&warden, path, &body, Some(at)).await?;
                assert!(heard.error.is_none(), "{path}, {temperature}, killed at {at}: {heard:?}");
                check_whole(AnswerForm::Text, &heard, path);
            }
        }
    }
    Ok(())
}
