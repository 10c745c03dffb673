//! Rules with examples; `properties` compares them with a full parser.

use bytes::Bytes;

use super::*;
use crate::body::splice;
use crate::refusal::UnreadableBody;

#[path = "plan_property_tests.rs"]
mod properties;

fn ruled_in(text: &str, size: usize, rules: &ModelRules, shape: BodyShape) -> Result<String, UnreadableBody> {
    let pieces: Vec<Bytes> = text.as_bytes().chunks(size.max(1)).map(Bytes::copy_from_slice).collect();
    let Some(plan) = RulePlan::new(rules, Some(shape)) else { return Ok(text.to_owned()) };
    let index = JsonIndex::from_pieces(&pieces, plan.wanted())?;
    let out = splice::apply_edits(pieces.into(), plan.edits(&index, 7));
    Ok(String::from_utf8(out.iter().flat_map(|piece| piece.to_vec()).collect()).unwrap())
}

fn ruled(text: &str, rules: &ModelRules, shape: BodyShape) -> String {
    let whole = ruled_in(text, usize::MAX, rules, shape).unwrap();
    for size in 1..=text.len() {
        assert_eq!(ruled_in(text, size, rules, shape).unwrap(), whole, "pieces of {size}");
    }
    whole
}

fn request(rules: RequestRules) -> ModelRules {
    ModelRules { request: rules, ..ModelRules::default() }
}

fn parameters(set: &[(&str, Value)], default: &[(&str, Value)], strip: &[&str]) -> ModelRules {
    let own = |pairs: &[(&str, Value)]| {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect()
    };
    request(RequestRules {
        set: own(set),
        default: own(default),
        strip: strip.iter().map(|&name| name.to_owned()).collect(),
        ..RequestRules::default()
    })
}

fn most(tokens: u64) -> ModelRules {
    request(RequestRules { max_tokens: Some(tokens), ..RequestRules::default() })
}

fn prompt(mode: SystemMode) -> ModelRules {
    let system_prompt = Some(SystemPrompt { text: "Say \"hi\".".to_owned(), mode });
    request(RequestRules { system_prompt, ..RequestRules::default() })
}

#[test]
fn only_what_a_rule_names_changes_and_everything_else_stays_as_it_is_spelled() {
    let rules =
        parameters(&[("seed", json!(7))], &[("top_k", json!(40)), ("x", json!({"y": [1]}))], &["user"]);
    for (body, expected) in [
        ("{}", r#"{"seed":7,"top_k":40,"x":{"y":[1]}}"#),
        (r#"{"seed":1}"#, r#"{"seed":7,"top_k":40,"x":{"y":[1]}}"#),
        (
            r#" { "temperature" : 1.50e0 ,"user":"u", "top_k" : 3,"x":null, "big":123456789012345678901234567890 } "#,
            r#" { "temperature" : 1.50e0 , "top_k" : 3,"x":null, "big":123456789012345678901234567890 ,"seed":7} "#,
        ),
        (r#"{"user":{"seed":1,"user":[2]}}"#, r#"{"seed":7,"top_k":40,"x":{"y":[1]}}"#),
        // The backend uses the last of repeated members, so none may be left.
        (
            r#"{"user":1,"a":{"user":2},"\u0075ser":3,"seed":[1,{"a":2}],"seed" :"x","top_k":1,"x":1}"#,
            r#"{"a":{"user":2},"seed":7,"seed" :7,"top_k":1,"x":1}"#,
        ),
        ("\u{feff}{\"x\":1,\"top_k\":2,\"seed\":3}", "\u{feff}{\"x\":1,\"top_k\":2,\"seed\":7}"),
    ] {
        assert_eq!(ruled(body, &rules, BodyShape::Chat), expected);
    }
}

#[test]
fn a_bound_on_tokens_holds_whatever_the_client_says() {
    for (shape, body, expected) in [
        (BodyShape::Chat, r#"{"max_tokens":50}"#, r#"{"max_tokens":50}"#),
        (BodyShape::Chat, r#"{"max_tokens":5e1}"#, r#"{"max_tokens":5e1}"#),
        (BodyShape::Chat, r#"{"max_tokens":101}"#, r#"{"max_tokens":100}"#),
        (BodyShape::Chat, r#"{"max_tokens":-1,"x":2}"#, r#"{"max_tokens":100,"x":2}"#),
        (BodyShape::Chat, r#"{"max_tokens":null}"#, r#"{"max_tokens":100}"#),
        (BodyShape::Chat, r#"{"max_tokens":"9"}"#, r#"{"max_tokens":100}"#),
        (BodyShape::Chat, r#"{"max_tokens":[1]}"#, r#"{"max_tokens":100}"#),
        (BodyShape::Chat, r#"{"max_tokens":5,"n_predict":-1}"#, r#"{"max_tokens":5,"n_predict":100}"#),
        (BodyShape::Chat, r#"{"max_tokens":5,"max_tokens":500}"#, r#"{"max_tokens":5,"max_tokens":100}"#),
        (BodyShape::Chat, r#"{"max_completion_tokens":1e9}"#, r#"{"max_completion_tokens":100}"#),
        (BodyShape::Chat, "{}", r#"{"max_tokens":100}"#),
        (BodyShape::Chat, r#"{"max_output_tokens":5}"#, r#"{"max_output_tokens":5,"max_tokens":100}"#),
        (BodyShape::Native, "{}", r#"{"n_predict":100}"#),
        (BodyShape::Native, r#"{"max_tokens":7}"#, r#"{"max_tokens":7}"#),
        (BodyShape::Completion, "{}", r#"{"max_tokens":100}"#),
        (BodyShape::Responses, "{}", r#"{"max_output_tokens":100}"#),
        (BodyShape::Responses, r#"{"max_output_tokens":500}"#, r#"{"max_output_tokens":100}"#),
        (BodyShape::Messages, r#"{"n_predict":5}"#, r#"{"n_predict":5,"max_tokens":100}"#),
        (BodyShape::ChatCount, "{}", "{}"),
    ] {
        assert_eq!(ruled(body, &most(100), shape), expected, "{shape:?}");
    }
    // llama-server limits Anthropic's route itself.
    assert_eq!(ruled("{}", &most(5000), BodyShape::Messages), "{}");
    // A number too long to be parsed is ignored.
    let long = format!("{{\"max_tokens\":1e{}9}}", "0".repeat(100));
    assert_eq!(ruled_in(&long, 7, &most(100), BodyShape::Chat).unwrap(), r#"{"max_tokens":100}"#);
    let both =
        request(RequestRules { default: vec![("n_predict".to_owned(), json!(20))], ..most(100).request });
    assert_eq!(ruled("{}", &both, BodyShape::Chat), r#"{"n_predict":20}"#);
    assert_eq!(ruled(r#"{"n_predict":200}"#, &both, BodyShape::Chat), r#"{"n_predict":100}"#);
}

#[test]
fn a_system_prompt_stands_where_each_route_has_it() {
    use SystemMode::{Missing, Prepend, Replace};
    let own = r#"{"role":"system","content":"Say \"hi\"."}"#;
    let chat = |before: &str, after: &str| {
        (format!(r#"{{"messages":{before},"x":1}}"#), format!(r#"{{"messages":{after},"x":1}}"#))
    };
    let user = r#"{"role":"user","content":"q"}"#;
    let theirs = r#"{"role" : "system","content": "t"}"#;
    for (mode, shape, (body, expected)) in [
        (Missing, BodyShape::Chat, chat(&format!("[{user}]"), &format!("[{own},{user}]"))),
        (Missing, BodyShape::Chat, chat("[ ]", &format!("[{own} ]"))),
        (Missing, BodyShape::ChatCount, chat(&format!("[{theirs},{user}]"), &format!("[{theirs},{user}]"))),
        (Missing, BodyShape::Chat, chat(r#"[{"role":"developer"}]"#, r#"[{"role":"developer"}]"#)),
        (Missing, BodyShape::Chat, chat("3", "3")),
        (
            Prepend,
            BodyShape::Chat,
            chat(
                &format!("[{theirs},{user}]"),
                r#"[{"role" : "system","content": "Say \"hi\".\n\nt"},{"role":"user","content":"q"}]"#,
            ),
        ),
        (
            Prepend,
            BodyShape::Chat,
            chat(
                r#"[{"content":[{"type":"text","text":"t"}],"role":"system"}]"#,
                r#"[{"content":[{"type":"text","text":"Say \"hi\".\n\n"},{"type":"text","text":"t"}],"role":"system"}]"#,
            ),
        ),
        (
            Prepend,
            BodyShape::Chat,
            chat(
                r#"[{"content":[ ],"role":"system"}]"#,
                r#"[{"content":[{"type":"text","text":"Say \"hi\".\n\n"} ],"role":"system"}]"#,
            ),
        ),
        (Prepend, BodyShape::Chat, chat(&format!("[{user}]"), &format!("[{own},{user}]"))),
        (Replace, BodyShape::Chat, chat(&format!("[{theirs},{user},{theirs}]"), &format!("[{own},{user}]"))),
        (Replace, BodyShape::Chat, chat(&format!("[{theirs}]"), &format!("[{own}]"))),
        // The last role counts.
        (
            Missing,
            BodyShape::Chat,
            chat(
                r#"[{"role":"system","role":"user"}]"#,
                &format!(r#"[{own},{{"role":"system","role":"user"}}]"#),
            ),
        ),
        (
            Missing,
            BodyShape::Responses,
            (r#"{"input":"q"}"#.to_owned(), r#"{"input":"q","instructions":"Say \"hi\"."}"#.to_owned()),
        ),
        (
            Missing,
            BodyShape::Responses,
            (r#"{"instructions":null}"#.to_owned(), r#"{"instructions":"Say \"hi\"."}"#.to_owned()),
        ),
        (
            Missing,
            BodyShape::Responses,
            (format!(r#"{{"input":[{theirs}]}}"#), format!(r#"{{"input":[{theirs}]}}"#)),
        ),
        (
            Prepend,
            BodyShape::ResponsesCount,
            (r#"{"instructions":"t"}"#.to_owned(), r#"{"instructions":"Say \"hi\".\n\nt"}"#.to_owned()),
        ),
        (
            Replace,
            BodyShape::Responses,
            (
                format!(r#"{{"instructions":"t","input":[{theirs},{user}]}}"#),
                format!(r#"{{"instructions":"Say \"hi\".","input":[{user}]}}"#),
            ),
        ),
        (
            Prepend,
            BodyShape::Messages,
            (
                r#"{"system":[{"type":"text","text":"t"}]}"#.to_owned(),
                r#"{"system":[{"type":"text","text":"Say \"hi\".\n\n"},{"type":"text","text":"t"}]}"#
                    .to_owned(),
            ),
        ),
        (
            Missing,
            BodyShape::MessagesCount,
            (
                format!(r#"{{"messages":[{user}]}}"#),
                format!(r#"{{"messages":[{user}],"system":"Say \"hi\"."}}"#),
            ),
        ),
        (Replace, BodyShape::Native, ("{}".to_owned(), "{}".to_owned())),
    ] {
        assert_eq!(ruled(&body, &prompt(mode), shape), expected, "{mode:?} {shape:?}");
    }
}

#[test]
fn the_backend_sees_its_own_name_of_the_model() {
    let rules = ModelRules { upstream_model: Some("org/b\"".to_owned()), ..ModelRules::default() };
    for (body, expected) in [
        (r#"{"a":1,"model": "x" ,"b":2}"#, r#"{"a":1,"model": "org/b\"" ,"b":2}"#),
        (r#"{"model":1,"model":"y"}"#, r#"{"model":"org/b\"","model":"org/b\""}"#),
        ("{}", r#"{"model":"org/b\""}"#),
    ] {
        assert_eq!(ruled(body, &rules, BodyShape::Chat), expected);
    }
}

#[test]
fn what_is_no_object_or_repeats_itself_is_not_touched() {
    for body in
        ["", "[]", "3", "{", r#"{"a":1"#, r#"{"a":1}}"#, r#"{"a":1} x"#, "\u{feff}", "model=x", r#"{"a"#]
    {
        for size in [1, 100] {
            assert_eq!(
                ruled_in(body, size, &most(1), BodyShape::Chat),
                Err(UnreadableBody::NotObject),
                "{body}"
            );
        }
    }
    let often = format!("{{{}\"b\":1}}", r#""max_tokens":1,"#.repeat(100));
    assert_eq!(ruled_in(&often, 9, &most(1), BodyShape::Chat), Err(UnreadableBody::Repeats));
    let often = format!("{{\"messages\":[{}3]}}", r#"{"role":"system"},"#.repeat(100));
    assert_eq!(
        ruled_in(&often, 9, &prompt(SystemMode::Replace), BodyShape::Chat),
        Err(UnreadableBody::Repeats)
    );
}

#[test]
fn a_zero_byte_ends_the_body_as_it_does_for_llama_server() {
    assert_eq!(ruled("{\"max_tokens\":-1} \0x}", &most(5), BodyShape::Chat), "{\"max_tokens\":5} \0x}");
}

#[test]
fn no_rule_means_no_plan() {
    assert!(RulePlan::new(&ModelRules::default(), Some(BodyShape::Chat)).is_none());
    assert!(RulePlan::new(&most(1), None).is_none());
    assert!(RulePlan::new(&most(1), Some(BodyShape::ChatCount)).is_none());
}

#[test]
fn whoever_names_no_seed_gets_one_of_its_own() {
    let fresh = request(RequestRules { fresh_seed: true, ..RequestRules::default() });
    for (shape, body, expected) in [
        (BodyShape::Chat, "{}", r#"{"seed":7}"#),
        (BodyShape::Native, r#"{"prompt":"a"}"#, r#"{"prompt":"a","seed":7}"#),
        (BodyShape::Responses, r#"{"seed":null,"a":1}"#, r#"{"seed":7,"a":1}"#),
        // The client's own seed stays, including the value for a random one.
        (BodyShape::Chat, r#"{"seed":-1}"#, r#"{"seed":-1}"#),
        (BodyShape::Completion, r#"{ "seed" : 3 }"#, r#"{ "seed" : 3 }"#),
        (BodyShape::Messages, "{}", "{}"),
        (BodyShape::ChatCount, "{}", "{}"),
    ] {
        assert_eq!(ruled(body, &fresh, shape), expected, "{shape:?} {body}");
    }
    let mut rules = parameters(&[], &[("seed", json!(5))], &[]);
    rules.request.fresh_seed = true;
    assert_eq!(ruled("{}", &rules, BodyShape::Chat), r#"{"seed":5}"#, "another rule says it");
    let mut rules = parameters(&[], &[], &["seed"]);
    rules.request.fresh_seed = true;
    assert_eq!(ruled(r#"{"seed":1,"a":2}"#, &rules, BodyShape::Chat), r#"{"a":2,"seed":7}"#);
    let body = Bytes::from_static(b"{}");
    let plan = RulePlan::new(&fresh, Some(BodyShape::Chat)).unwrap();
    let index = JsonIndex::from_pieces([&body], plan.wanted()).unwrap();
    assert_eq!(plan.edits(&index, u32::MAX)[0].text, "\"seed\":0", "the highest number is no seed");
}
