//! Decides whether the answer to a non-streaming request can be assembled from a stream. If so, splices
//! `"stream":true` into the request. A request whose stream would lack a part of the answer passes unchanged;
//! docs/cancellation.md gives the reason for each rule below.

use std::collections::VecDeque;

use bytes::Bytes;
use serde::Deserialize;
use serde::de::IgnoredAny;

use super::AnswerFormat;
use crate::body::{BodyIntake, ByteEdit, JsonIndex, LastRole, ValueGist, splice};
use crate::refusal::RequestRefusal;

/// Members that decide whether an answer can be assembled, as summaries: bodies may be large.
#[derive(Default, Deserialize)]
#[serde(default)]
struct StreamableMembers {
    stream: Option<ValueGist>,
    stream_options: Option<IgnoredAny>,
    // A stream holds back text that may begin a stop word, and loses it if the token limit comes first.
    stop: Option<ValueGist>,
    stop_sequences: Option<ValueGist>,
    // With `n_indent`, llama-server cuts off lines that a stream has already sent.
    n_indent: Option<ValueGist>,
    // A chat stream omits the probabilities of tokens without text.
    logprobs: Option<ValueGist>,
    top_logprobs: Option<ValueGist>,
    n_probs: Option<ValueGist>,
    // A stream reports one token per piece of text, but a piece may consist of several.
    return_tokens: Option<ValueGist>,
    // Only the last event of a stream has these fields.
    response_fields: Option<IgnoredAny>,
    // The verbose object has the raw text, which no stream contains.
    verbose: Option<ValueGist>,
    // Without a stream, the answer to such a request begins with the end of the prompt.
    continue_final_message: Option<IgnoredAny>,
    messages: Option<LastRole>,
    input: Option<LastRole>,
    reasoning_format: Option<ValueGist>,
    // Output that breaks off inside a prescribed format is only in a whole answer, as raw text.
    response_format: Option<ValueGist>,
    json_schema: Option<IgnoredAny>,
    grammar: Option<ValueGist>,
    tool_choice: Option<ValueGist>,
    text: Option<ValueGist>,
    n: Option<ValueGist>,
    n_cmpl: Option<ValueGist>,
}

/// Replaces a request by a streaming one if the answer can be assembled from the stream, and returns the
/// dialect of the stream. Returns `None` for an unchanged request.
pub(crate) async fn request_stream(
    kind: AnswerFormat,
    intake: &mut BodyIntake,
) -> Result<Option<AnswerFormat>, RequestRefusal> {
    if !intake.take_all().await? || intake.is_stream() {
        return Ok(None);
    }
    let asked = intake.json().and_then(|body| streaming_body(kind, &body));
    Ok(asked.filter(|body| intake.replace(body)).map(|_| kind))
}

/// Returns the body of the streaming request; `None` if the original body has to be sent.
fn streaming_body(kind: AnswerFormat, body: &Bytes) -> Option<VecDeque<Bytes>> {
    let asked: StreamableMembers = serde_json::from_slice(body).ok()?;
    if !can_be_assembled(kind, &asked) {
        return None;
    }
    if !matches!(asked.stream, None | Some(ValueGist::Bool(false))) {
        return None;
    }
    let index = JsonIndex::from_pieces([body], &["stream"]).ok()?;
    if index.count == 0 {
        // llama-server itself refuses an empty object.
        return None;
    }
    let mut insert = String::new();
    let mut edits = Vec::new();
    // `"stream":null` means no stream, and is replaced like `false`.
    match index.named(0).last() {
        Some(stream) => edits.push(ByteEdit { range: stream.value.clone(), text: "true".to_owned() }),
        None => insert.push_str("\"stream\":true,"),
    }
    if kind == AnswerFormat::Chat {
        insert.push_str("\"stream_options\":{\"include_usage\":true},");
    }
    let begin = index.open + 1;
    edits.push(ByteEdit { range: begin..begin, text: insert });
    Some(splice::apply_edits(VecDeque::from([body.clone()]), edits))
}

fn can_be_assembled(kind: AnswerFormat, asked: &StreamableMembers) -> bool {
    let is_text = matches!(kind, AnswerFormat::Text | AnswerFormat::Native);
    let on = |value: &Option<ValueGist>| value.as_ref().is_some_and(ValueGist::is_on);
    let is_plain = |format: Option<&ValueGist>| {
        let of_text = |format: &ValueGist| format.kind().is_some_and(|kind| kind.is_word("text"));
        is_text || format.is_none_or(of_text)
    };
    let is_one =
        |value: &Option<ValueGist>| value.as_ref().is_none_or(|value| *value == ValueGist::Number(1.0));
    let messages = asked.messages.as_ref().or(asked.input.as_ref());
    let is_begun = messages.is_some_and(|messages| messages.0.as_deref() == Some("assistant"));
    !is_begun
        && !on(&asked.stop)
        && !on(&asked.stop_sequences)
        && !on(&asked.n_indent)
        && !on(&asked.return_tokens)
        && !on(&asked.verbose)
        && (is_text || !(on(&asked.logprobs) || on(&asked.top_logprobs) || on(&asked.n_probs)))
        && (is_text || kind == AnswerFormat::Chat || (is_one(&asked.n) && is_one(&asked.n_cmpl)))
        && (is_text || !(asked.json_schema.is_some() || on(&asked.grammar)))
        && !forces_tool(asked.tool_choice.as_ref())
        && is_plain(asked.response_format.as_ref())
        && is_plain(asked.text.as_ref().and_then(ValueGist::format))
        && asked.response_fields.is_none()
        && asked.continue_final_message.is_none()
        && asked.stream_options.is_none()
        && asked.reasoning_format.as_ref().is_none_or(|format| !format.is_word("deepseek-legacy"))
}

fn forces_tool(choice: Option<&ValueGist>) -> bool {
    let word = choice.map(|choice| choice.kind().unwrap_or(choice));
    word.is_some_and(|word| !(word.is_word("auto") || word.is_word("none")))
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn asked(kind: AnswerFormat, body: &str) -> Option<String> {
        let pieces: Vec<Bytes> = streaming_body(kind, &Bytes::copy_from_slice(body.as_bytes()))?.into();
        Some(String::from_utf8(pieces.concat()).unwrap())
    }

    #[test]
    fn only_the_word_stream_changes() {
        for (kind, body, wanted) in [
            (AnswerFormat::Native, r#"{"prompt":"a"}"#, r#"{"stream":true,"prompt":"a"}"#),
            (
                AnswerFormat::Native,
                "{ \"prompt\" : \"\\\"stream\\\":false\", \"stream\" :\tfalse }",
                "{ \"prompt\" : \"\\\"stream\\\":false\", \"stream\" :\ttrue }",
            ),
            (
                AnswerFormat::Text,
                r#"{"x":{"stream":false},"str\u0065am":false,"y":1.50e3}"#,
                r#"{"x":{"stream":false},"str\u0065am":true,"y":1.50e3}"#,
            ),
            (AnswerFormat::Messages, r#"{"stream":null,"messages":[]}"#, r#"{"stream":true,"messages":[]}"#),
            (
                AnswerFormat::Chat,
                r#"{"stream":false,"messages":[]}"#,
                r#"{"stream_options":{"include_usage":true},"stream":true,"messages":[]}"#,
            ),
            (
                AnswerFormat::Chat,
                r#"{"messages":[{"role":"user"}]}"#,
                r#"{"stream":true,"stream_options":{"include_usage":true},"messages":[{"role":"user"}]}"#,
            ),
        ] {
            assert_eq!(asked(kind, body).as_deref(), Some(wanted), "{body}");
            let full: Value = serde_json::from_str(wanted).unwrap();
            assert_eq!(full.get("stream"), Some(&Value::Bool(true)), "{wanted}");
        }
    }

    #[test]
    fn what_a_stream_does_not_tell_passes_as_it_is() {
        for body in [
            r#"{"stream":true}"#,
            r#"{"stream":1}"#,
            "{}",
            "[]",
            "{",
            "",
            r#"{"stream":false,"stream":false}"#,
            r#"{"stop":["x"]}"#,
            r#"{"stop":"x"}"#,
            r#"{"stop_sequences":["x"]}"#,
            r#"{"logprobs":true}"#,
            r#"{"n_probs":1}"#,
            r#"{"response_fields":["content"]}"#,
            r#"{"return_tokens":true}"#,
            r#"{"verbose":true}"#,
            r#"{"continue_final_message":true}"#,
            r#"{"stream_options":{}}"#,
            r#"{"messages":[{"role":"user"},{"role":"assistant","content":[]}]}"#,
            r#"{"response_format":{"type":"json_object"}}"#,
            r#"{"text":{"format":{"type":"json_schema"}}}"#,
            r#"{"grammar":"root ::= \"a\""}"#,
            r#"{"json_schema":{}}"#,
            r#"{"tool_choice":"required"}"#,
            r#"{"tool_choice":{"type":"any"}}"#,
            r#"{"input":[{"role":"assistant"}]}"#,
            r#"{"reasoning_format":"deepseek-legacy"}"#,
        ] {
            assert_eq!(asked(AnswerFormat::Chat, body), None, "{body}");
        }
        assert!(asked(AnswerFormat::Native, r#"{"n_probs":3,"stop":[],"return_tokens":false}"#).is_some());
        assert!(asked(AnswerFormat::Native, r#"{"grammar":"x","json_schema":{}}"#).is_some());
        assert!(asked(AnswerFormat::Chat, r#"{"input":"x","logprobs":false,"n":2}"#).is_some());
        assert!(asked(AnswerFormat::Chat, r#"{"text":{},"response_format":{"type":"text"}}"#).is_some());
        assert!(asked(AnswerFormat::Messages, r#"{"tool_choice":{"type":"auto"}}"#).is_some());
        assert!(asked(AnswerFormat::Chat, r#"{"tool_choice":"none"}"#).is_some());
        assert!(asked(AnswerFormat::Messages, r#"{"n":2}"#).is_none());
    }
}
