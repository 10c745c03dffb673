//! A repeated answer continues after the client's part, or fails.

use super::*;
use crate::answer::AnswerTranscript;

const LIMIT: usize = 1 << 20;

fn chunk(id: &str, delta: &Value, finish: &Value) -> String {
    let choice = json!({ "index": 0, "delta": delta, "finish_reason": finish });
    let event = json!({ "choices": [choice], "created": id.len(), "id": id, "model": "m", "object": "c" });
    format!("data: {event}\n\n")
}

fn delta(id: &str, delta: &Value) -> String {
    chunk(id, delta, &Value::Null)
}

fn role(id: &str) -> String {
    delta(id, &json!({ "role": "assistant", "content": null }))
}

fn named(event: &Value) -> String {
    format!("event: {}\ndata: {event}\n\n", event["type"].as_str().unwrap())
}

fn repeat(kind: AnswerFormat, heard: &str) -> RepeatTranslator {
    let mut transcript = AnswerTranscript::for_stream(kind, LIMIT);
    transcript.feed(heard.as_bytes());
    assert_eq!(transcript.lost, None, "{heard}");
    RepeatTranslator::from_transcript(transcript, WorkDone::default()).unwrap()
}

/// Returns what a client that has `heard` gets of the repeated answer.
fn behind(kind: AnswerFormat, heard: &str, again: &str) -> Result<String, MismatchReason> {
    let mut repeat = repeat(kind, heard);
    let mut told = String::new();
    for event in again.split_inclusive("\n\n") {
        let catching_up = repeat.is_catching_up();
        let said = repeat.translate(event.as_bytes())?;
        told.push_str(std::str::from_utf8(&said).unwrap());
        assert!(!catching_up || repeat.is_catching_up() || !said.is_empty() || told.is_empty());
    }
    assert!(repeat.is_ended, "{again}");
    Ok(told)
}

/// All beginnings of a stream, including those that end within a piece of the other server's.
fn beginnings(events: &str) -> impl Iterator<Item = String> {
    let ends: Vec<usize> = memchr::memmem::find_iter(events.as_bytes(), "\n\n").map(|at| at + 2).collect();
    let events = events.to_owned();
    ends.into_iter().map(move |end| events[..end].to_owned())
}

#[test]
fn wherever_a_chat_ended_the_client_has_one_answer() {
    let answer = |id: &str, call: &str, pieces: [&str; 4]| {
        role(id)
            + &delta(id, &json!({ "reasoning_content": pieces[0] }))
            + &delta(id, &json!({ "reasoning_content": pieces[1] }))
            + &delta(id, &json!({ "content": pieces[2] }))
            + &delta(id, &json!({ "content": pieces[3] }))
            + &delta(
                id,
                &json!({ "tool_calls": [{ "index": 0, "id": call, "type": "function", "function": { "name": "f", "arguments": "{\"a" } }] }),
            )
            + &delta(id, &json!({ "tool_calls": [{ "index": 0, "function": { "arguments": "\":1}" } }] }))
            + &chunk(id, &json!({}), &json!("tool_calls"))
    };
    let end = |id: &str| {
        format!(
            "data: {}\n\n",
            json!({ "choices": [], "id": id, "created": id.len(), "model": "m", "usage": { "completion_tokens": 9 } })
        ) + "data: [DONE]\n\n"
    };
    let first = answer("one", "x", ["so", " it", "Hel", "lo"]);
    for pieces in [["so", " it", "Hel", "lo"], ["so it", "", "Hello", ""], ["s", "o it", "He", "llo"]] {
        let again = answer("two!", "y", pieces) + &end("two!");
        for begun in beginnings(&first) {
            let told =
                behind(AnswerFormat::Chat, &begun, &again).unwrap_or_else(|why| panic!("{begun}: {why}"));
            let whole = texts(&(begun.clone() + &told));
            assert_eq!(whole, texts(&(first.clone() + &end("one"))), "{begun}\n{told}");
            assert!(!told.contains("two!") && !told.contains("\"y\"") || !begun.contains("\"x\""), "{told}");
            assert!(!told.contains("role"), "{told}");
        }
    }
}

/// Returns a chat client's view of events: reasoning, text, name and arguments of a call, the end, counters.
fn texts(events: &str) -> [String; 6] {
    let mut all: [String; 6] = Default::default();
    for data in events.split_terminator("\n\n").map(|event| event.strip_prefix("data: ").unwrap()) {
        let event: Value = serde_json::from_str(data).unwrap_or_default();
        let (choice, usage) = (&event["choices"][0], &event["usage"]["completion_tokens"]);
        let (delta, call) = (&choice["delta"], &choice["delta"]["tool_calls"][0]["function"]);
        let parts = [
            &delta["reasoning_content"],
            &delta["content"],
            &call["name"],
            &call["arguments"],
            &choice["finish_reason"],
        ];
        for (all, part) in all.iter_mut().zip(parts) {
            all.push_str(part.as_str().unwrap_or_default());
        }
        all[5] += &usage.as_u64().map(|usage| usage.to_string()).unwrap_or_default();
    }
    all
}

#[test]
fn whatever_else_is_said_ends_it() {
    let begun = role("one") + &delta("one", &json!({ "content": "Hello" }));
    for again in [
        role("two") + &delta("two", &json!({ "content": "Help" })),
        role("two") + &delta("two", &json!({ "reasoning_content": "Hello" })),
        role("two") + &delta("two", &json!({ "content": "Hell" })) + "data: [DONE]\n\n",
        role("two") + &delta("two", &json!({ "content": "Hel" })) + &chunk("two", &json!({}), &json!("stop")),
        role("two")
            + &delta(
                "two",
                &json!({ "tool_calls": [{ "index": 0, "id": "x", "function": { "name": "f" } }] }),
            ),
    ] {
        assert_eq!(behind(AnswerFormat::Chat, &begun, &again), Err(DIFFERENT_ANSWER), "{again}");
    }
    assert!(behind(AnswerFormat::Chat, &begun, "data: nonsense\n\n").is_err());
    let error = "data: {\"error\":{\"message\":\"full\"}}\n\n";
    assert_eq!(behind(AnswerFormat::Chat, &begun, error).as_deref(), Ok(error), "its own words");
}

#[test]
fn messages_go_on_with_their_blocks() {
    let answer = |id: &str, tool: &str| {
        let block = |index: u64, block: Value| {
            named(&json!({ "type": "content_block_start", "index": index, "content_block": block }))
        };
        let delta = |index: u64, delta: Value| {
            named(&json!({ "type": "content_block_delta", "index": index, "delta": delta }))
        };
        let stop = |index: u64| named(&json!({ "type": "content_block_stop", "index": index }));
        named(&json!({ "type": "message_start", "message": { "id": id, "usage": { "input_tokens": 5 } } }))
            + &block(0, json!({ "type": "thinking", "thinking": "" }))
            + &delta(0, json!({ "type": "thinking_delta", "thinking": "so" }))
            + &block(1, json!({ "type": "text", "text": "" }))
            + &delta(1, json!({ "type": "text_delta", "text": "Hel" }))
            + &delta(1, json!({ "type": "text_delta", "text": "lo" }))
            + &block(2, json!({ "type": "tool_use", "id": tool, "name": "f" }))
            + &delta(2, json!({ "type": "input_json_delta", "partial_json": "{}" }))
            + &delta(0, json!({ "type": "signature_delta", "signature": "" }))
            + &stop(0)
            + &stop(1)
            + &stop(2)
            + &named(
                &json!({ "type": "message_delta", "delta": { "stop_reason": "tool_use" }, "usage": { "output_tokens": 9 } }),
            )
            + &named(&json!({ "type": "message_stop" }))
    };
    let first = answer("msg_1", "tool_1");
    let again = answer("msg_2", "tool_2");
    for begun in beginnings(&first).filter(|begun| !begun.contains("message_stop")) {
        let told = behind(AnswerFormat::Messages, &begun, &again).unwrap();
        let whole = begun.clone() + &told;
        assert_eq!(whole.replace("tool_2", "tool_1"), first, "{begun}");
        assert!(!(begun.contains("tool_1") && told.contains("tool_2")));
    }
}

#[test]
fn responses_go_on_with_their_names_and_numbers() {
    let answer = |n: &str, first: u64| {
        let (response, item) = (format!("resp_{n}"), format!("msg_{n}"));
        let events = [
            json!({ "type": "response.created", "response": { "id": response } }),
            json!({ "type": "response.output_item.added", "item": { "type": "message", "id": item } }),
            json!({ "type": "response.content_part.added", "item_id": item, "part": { "type": "output_text" } }),
            json!({ "type": "response.output_text.delta", "item_id": item, "delta": "Hel" }),
            json!({ "type": "response.output_text.delta", "item_id": item, "delta": "lo" }),
            json!({ "type": "response.output_text.done", "item_id": item, "text": "Hello" }),
            json!({ "type": "response.completed", "response": { "id": response, "output": [{ "id": item }], "usage": { "output_tokens": 2 } } }),
        ];
        events.into_iter().zip(first..).map(|(mut event, number)| {
            event["sequence_number"] = json!(number);
            named(&event)
        })
    };
    let first: Vec<String> = answer("a", 3).collect();
    // The other server may have reported more prompt progress, with sequence numbers.
    let again: String = named(&json!({ "type": "response.in_progress", "sequence_number": 0 }))
        + &answer("b", 1).collect::<String>();
    for had in 1..first.len() {
        let begun = first[..had].concat();
        let told = behind(AnswerFormat::Responses, &begun, &again).unwrap();
        let names = told.replace("msg_b", if had < 2 { "msg_a" } else { "msg_b" });
        assert_eq!(begun + &names, first.concat(), "{had}");
    }
    // The client gets `response.in_progress` once.
    let begun = answer("a", 0).next().unwrap()
        + &named(
            &json!({ "type": "response.in_progress", "response": { "id": "resp_a" }, "sequence_number": 1 }),
        );
    let again = answer("b", 0).next().unwrap()
        + &named(
            &json!({ "type": "response.in_progress", "response": { "id": "resp_b" }, "sequence_number": 1 }),
        )
        + &answer("b", 2).skip(1).collect::<String>();
    let told = behind(AnswerFormat::Responses, &begun, &again).unwrap();
    let whole = told.replace("_b", "_a");
    assert_eq!(whole, answer("a", 1).skip(1).collect::<String>());
}

#[test]
fn llama_servers_own_tokens_are_not_told_twice() {
    let one = |text: &str, counted: u64| {
        let event = json!({ "index": 0, "content": text, "tokens": [counted], "stop": false, "tokens_predicted": counted });
        format!("data: {event}\n\n")
    };
    let end = "data: {\"content\":\"\",\"stop\":true,\"tokens_predicted\":4}\n\n";
    let all = [one("a", 1), one("", 2), one("", 3), one("bcd", 4)];
    let again = all.concat() + end;
    for had in 1..all.len() {
        let told = behind(AnswerFormat::Native, &all[..had].concat(), &again).unwrap();
        assert_eq!(all[..had].concat() + &told, again, "{had}");
    }
    // Tokens that were drafted together: each event counts all of them.
    let all = [one("a", 1), one("b", 4), one("c", 4), one("", 4), one("d", 6), one("e", 6)];
    let again = all.concat() + end;
    for had in 1..all.len() {
        let told = behind(AnswerFormat::Native, &all[..had].concat(), &again).unwrap();
        assert_eq!(all[..had].concat() + &told, again, "{had}");
    }
    // Other tokens for the same text are a different answer.
    assert_eq!(
        behind(AnswerFormat::Native, &one("ab", 1), &(one("a", 1) + &one("bc", 2) + end)),
        Err(DIFFERENT_ANSWER)
    );
    // A build that does not count tokens.
    let one = |text: &str| format!("data: {}\n\n", json!({ "content": text, "stop": false }));
    let again = one("a") + &one("b") + &one("c") + end;
    assert_eq!(behind(AnswerFormat::Native, &(one("a") + &one("b")), &again).unwrap(), one("c") + end);
}

#[test]
fn a_completion_keeps_its_name_and_counts_all() {
    let one = |id: &str, text: &str, finish: Value| {
        format!(
            "data: {}\n\n",
            json!({ "choices": [{ "text": text, "index": 0, "finish_reason": finish }], "id": id })
        )
    };
    let begun = one("one", "a", Value::Null);
    let again = one("two", "ab", Value::Null) + &one("two", "", json!("length")) + "data: [DONE]\n\n";
    let told = behind(AnswerFormat::Text, &begun, &again).unwrap();
    assert_eq!(told, one("one", "b", Value::Null) + &one("one", "", json!("length")) + "data: [DONE]\n\n");
}

#[test]
fn what_had_no_token_is_begun_with_its_names_and_one_role() {
    let again = role("two")
        + &delta("two", &json!({ "role": "assistant", "content": "a" }))
        + &chunk("two", &json!({}), &json!("stop"))
        + "data: [DONE]\n\n";
    let told = behind(AnswerFormat::Chat, &role("one"), &again).unwrap();
    let wanted = delta("one", &json!({ "content": "a" })) + &chunk("one", &json!({}), &json!("stop"));
    assert_eq!(told, wanted + "data: [DONE]\n\n");
    assert!(
        RepeatTranslator::from_transcript(
            AnswerTranscript::for_stream(AnswerFormat::Chat, LIMIT),
            WorkDone::default()
        )
        .is_none(),
        "no event, no names"
    );
}

#[test]
fn what_the_client_has_is_paid_for_once() {
    let work = |output_tokens| WorkDone { output_tokens, ..WorkDone::default() };
    let mut transcript = AnswerTranscript::for_stream(AnswerFormat::Chat, LIMIT);
    transcript.feed((role("one") + &delta("one", &json!({ "content": "ab" }))).as_bytes());
    let mut repeat = RepeatTranslator::from_transcript(transcript, work(2)).unwrap();
    repeat.translate(delta("two", &json!({ "content": "a" })).as_bytes()).unwrap();
    assert_eq!(repeat.work(work(1)), work(2), "the other server has not said more yet");
    repeat.translate(delta("two", &json!({ "content": "bc" })).as_bytes()).unwrap();
    assert_eq!(repeat.work(work(3)), work(3));
}

#[test]
fn only_what_is_drawn_the_same_way_is_asked_for_again() {
    let may = |kind, body: &Value| may_repeat(kind, body.to_string().as_bytes()).is_ok();
    for body in [
        json!({}),
        json!({ "temperature": null }),
        json!({ "temperature": 0 }),
        json!({ "temperature": 0.0, "seed": -1 }),
        json!({ "temperature": 1, "top_k": 1 }),
        json!({ "temperature": 1, "seed": 7 }),
        json!({ "mirostat": 2, "seed": 7 }),
    ] {
        assert!(may(AnswerFormat::Chat, &body), "{body}");
    }
    for body in [
        json!({ "temperature": 0.1 }),
        json!({ "temperature": 1, "seed": -1 }),
        json!({ "temperature": 1, "seed": 4_294_967_295_u32 }),
        json!({ "temperature": 1, "seed": "7" }),
        json!({ "temperature": 0, "mirostat": 1 }),
        json!([]),
    ] {
        assert!(!may(AnswerFormat::Chat, &body), "{body}");
    }
    assert!(!may(AnswerFormat::Messages, &json!({ "temperature": 1, "seed": 7 })), "no seed comes there");
}

#[test]
fn what_asks_for_several_answers_or_hides_its_end_is_not_told_as_one() {
    let one = |kind, body: Value| check_single_answer(kind, body.to_string().as_bytes()).is_ok();
    for body in [
        json!({ "prompt": "a", "n": 1, "logprobs": false, "verbose": false, "n_probs": 0 }),
        json!({ "prompt": ["a", 1, 2], "n": null }),
        json!({ "prompt": "a", "response_fields": ["content", "stop"] }),
        json!({ "input_prefix": "a" }),
    ] {
        assert!(one(AnswerFormat::Native, body.clone()), "{body}");
    }
    for body in [
        json!({ "prompt": ["a", "b"] }),
        json!({ "prompt": [[1], [2]] }),
        json!({ "prompt": "a", "n": 2 }),
        json!({ "prompt": "a", "n_cmpl": 2 }),
        json!({ "prompt": "a", "n_probs": 3 }),
        json!({ "prompt": "a", "response_fields": ["content"] }),
        json!([]),
    ] {
        assert!(!one(AnswerFormat::Native, body.clone()), "{body}");
    }
    for body in [json!({ "n": 2 }), json!({ "logprobs": true }), json!({ "verbose": true })] {
        assert!(!one(AnswerFormat::Chat, body.clone()), "{body}");
    }
    assert!(one(AnswerFormat::Chat, json!({ "messages": [] })), "it has no prompt");
}

#[test]
fn a_different_answer_leaves_the_first_one_to_another_method() {
    let kin = warden_supervisor::AnswerIdentity { made_of: 1, but_for_binary: 2, answer_tokens: None };
    let first = FirstServer { kin, by_canary: false };
    let heard = role("one")
        + &delta("one", &json!({ "content": "Once" }))
        + &delta("one", &json!({ "content": " upon" }));
    let begin = || repeat(AnswerFormat::Chat, &heard).or_otherwise(Some(first));
    let mut differs = begin();
    differs.translate((role("two") + &delta("two", &json!({ "content": "Once" }))).as_bytes()).unwrap();
    assert!(differs.translate(delta("two", &json!({ "content": " more" })).as_bytes()).is_err());
    let (left, _, _) = differs.take_answer().unwrap();
    assert_eq!((left.decode_string(), left.frame.is_some()), ("Once upon", true));
    assert_eq!(left.pieces().collect::<Vec<_>>(), ["Once", " upon"]);
    assert!(differs.take_answer().is_none() && !differs.is_catching_up());
    let mut fails = begin();
    assert!(
        fails.translate(b"data: {\"error\":{\"message\":\"no\"}}\n\n").is_err()
            && fails.take_answer().is_some()
    );
    let mut same = begin();
    same.translate((role("two") + &delta("two", &json!({ "content": "Once upon a" }))).as_bytes()).unwrap();
    assert!(!same.may_continue_otherwise() && same.take_answer().is_none(), "the client has more");
    assert!(repeat(AnswerFormat::Chat, &heard).take_answer().is_none());
}

#[test]
fn a_thought_keeps_its_blanks_in_the_event_that_repeats_the_answer() {
    let events = |id: &str, thought: &str, text: &str| {
        [
            json!({ "type": "response.created", "response": { "id": id } }),
            json!({ "type": "response.output_item.added", "item": { "type": "reasoning", "id": id } }),
            json!({ "type": "response.reasoning_text.delta", "delta": thought, "item_id": id }),
            json!({ "type": "response.output_item.added", "item": { "type": "message", "id": id } }),
            json!({ "type": "response.output_text.delta", "delta": text, "item_id": id }),
        ]
        .iter()
        .map(named)
        .collect::<String>()
    };
    let end = |thought: &str| {
        let item = json!({ "type": "reasoning", "content": [{ "text": thought }] });
        named(&json!({ "type": "response.completed", "response": { "output": [item] } }))
    };
    for (own, other) in [("so", "so\n"), ("so\n\n", "so\n"), ("so\n", "so\n")] {
        let mut transcript = AnswerTranscript::for_stream(AnswerFormat::Responses, LIMIT);
        transcript.feed(events("one", own, "Once").as_bytes());
        let shift = PromptShift { tokens: 3, evaluated: 50 };
        let mut repeat = RepeatTranslator::after_prefix(transcript, WorkDone::default(), shift).unwrap();
        let told = repeat.translate((events("two", other, "Once upon") + &end(other)).as_bytes()).unwrap();
        let told = std::str::from_utf8(&told).unwrap();
        assert!(told.contains("\"delta\":\" upon\"") && told.ends_with(&end(own)), "{told}");
    }
    let mut transcript = AnswerTranscript::for_stream(AnswerFormat::Responses, LIMIT);
    transcript.feed(events("one", "so", "Once").as_bytes());
    let shift = PromptShift { tokens: 3, evaluated: 50 };
    let mut repeat = RepeatTranslator::after_prefix(transcript, WorkDone::default(), shift).unwrap();
    assert!(repeat.translate(events("two", "so I", "Once").as_bytes()).is_err(), "more than blanks");
}

#[test]
fn what_stood_in_the_prompt_counts_as_answer() {
    let message = |id: &str, text: &str| {
        named(&json!({ "type": "message_start", "message": { "id": id } }))
            + &named(
                &json!({ "type": "content_block_start", "index": 0, "content_block": { "type": "text", "text": "" } }),
            )
            + &named(
                &json!({ "type": "content_block_delta", "index": 0, "delta": { "type": "text_delta", "text": text } }),
            )
    };
    let end = |tokens: u64| {
        named(&json!({ "type": "content_block_stop", "index": 0 }))
            + &named(
                &json!({ "type": "message_delta", "delta": { "stop_reason": "end_turn" }, "usage": { "output_tokens": tokens } }),
            )
            + &named(&json!({ "type": "message_stop" }))
    };
    let mut transcript = AnswerTranscript::for_stream(AnswerFormat::Messages, LIMIT);
    transcript.feed(message("one", "Once").as_bytes());
    let shift = PromptShift { tokens: 3, evaluated: 50 };
    let mut repeat = RepeatTranslator::after_prefix(transcript, WorkDone::default(), shift).unwrap();
    assert!(repeat.is_catching_up());
    let told = repeat.translate((message("two", "Once upon") + &end(4)).as_bytes()).unwrap();
    let delta = json!({ "type": "content_block_delta", "index": 0, "delta": { "type": "text_delta", "text": " upon" } });
    assert_eq!(told, named(&delta) + &end(7));
    let work = WorkDone { prompt_tokens: 1, output_tokens: 4, ..WorkDone::default() };
    assert_eq!(repeat.work(work), WorkDone { prompt_tokens: 50, output_tokens: 7, ..WorkDone::default() });
    let mut told = json!({ "usage": { "input_tokens": 60, "output_tokens": 2, "total_tokens": 62, "input_tokens_details": { "cached_tokens": 59 } },
        "timings": { "cache_n": 59, "prompt_n": 1, "predicted_n": 2 } });
    shift_counts(told.as_object_mut().unwrap(), 3);
    assert_eq!(
        told,
        json!({ "usage": { "input_tokens": 57, "output_tokens": 5, "total_tokens": 62, "input_tokens_details": { "cached_tokens": 57 } },
        "timings": { "cache_n": 57, "prompt_n": 0, "predicted_n": 5 } })
    );
    let mut told =
        json!({ "usage": { "input_tokens": 5, "cache_read_input_tokens": 55, "output_tokens": 2 } });
    shift_counts(told.as_object_mut().unwrap(), 7);
    assert_eq!(
        told,
        json!({ "usage": { "input_tokens": 0, "cache_read_input_tokens": 53, "output_tokens": 9 } })
    );
}
