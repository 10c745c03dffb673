//! The scanner against examples and against `serde_json`, split at every point.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn scanned(body: &[u8]) -> (ScannedModel, bool, u32) {
    let mut whole = BodyScanner::default();
    whole.feed(body);
    let answer = (whole.model().clone(), whole.is_stream(), whole.images());
    for cut in 0..=body.len() {
        let mut scanner = BodyScanner::default();
        scanner.feed(&body[..cut]);
        scanner.feed(&body[cut..]);
        assert_eq!((scanner.model().clone(), scanner.is_stream(), scanner.images()), answer, "cut at {cut}");
    }
    answer
}

fn named(name: &str) -> ScannedModel {
    ScannedModel::Named(name.to_owned())
}

#[test]
fn the_model_is_found_wherever_it_stands() {
    for (body, model) in [
        (r#"{"model":"a"}"#, named("a")),
        (r#" { "x" : {"model":"no"} , "model" : "org/b-GGUF" , "y":1 }"#, named("org/b-GGUF")),
        (r#"{"messages":[{"content":"\"model\":\"no\""}],"model":"yes"}"#, named("yes")),
        (r#"{"mod\u0065l":"esc\u0061ped \"q\" \ud83e\udd99"}"#, named("escaped \"q\" 🦙")),
        (r#"{"a\\":"b","model":"c"}"#, named("c")),
        (r#"{"x":["model","no"],"modelx":"no","model":"yes"}"#, named("yes")),
        (r#"{"x":"model","y":"model"}"#, ScannedModel::Absent),
        (r#"{"model":"first","model":"second"}"#, named("first")),
        (r#"{"model":null,"model":"second"}"#, ScannedModel::NotText),
        (r#"{"model":{"model":"no"}}"#, ScannedModel::NotText),
        (r#"["model","no"]"#, ScannedModel::Absent),
        ("\u{feff}{\"model\":\"bom\"}", named("bom")),
        ("", ScannedModel::Absent),
        ("model=form&x=1", ScannedModel::Absent),
        (r#"{"model":""}"#, named("")),
    ] {
        assert_eq!(scanned(body.as_bytes()).0, model, "{body}");
    }
}

#[test]
fn only_a_single_literal_true_is_a_stream() {
    for (body, stream) in [
        (r#"{"stream":true}"#, true),
        (r#"{"stream" : true , "n":1}"#, true),
        (r#"{"model":"m","stream":true,"stop":["x"]}"#, true),
        (r#"{"stream":false}"#, false),
        (r#"{"stream":"true"}"#, false),
        (r#"{"stream":true,"stream":false}"#, false),
        (r#"{"stream":true,"stream":true}"#, false),
        (r#"{"x":{"stream":true}}"#, false),
        (r#"{"stream":[true]}"#, false),
        // A truncated body proves nothing.
        (r#"{"stream":true"#, false),
    ] {
        assert_eq!(scanned(body.as_bytes()).1, stream, "{body}");
    }
}

#[test]
fn images_are_counted_by_their_type() {
    let body = json!({
        "model": "m",
        "type": "image",
        "messages": [{"role": "user", "content": [
            {"type": "text", "text": "{\"type\":\"image_url\"} is text"},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
            {"type" : "input_image", "image_url": "data:"},
            {"type": "image", "source": {"type": "base64"}},
            ["type", "image"],
            {"kind": "image", "type": ["image"]}
        ]}],
    });
    assert_eq!(scanned(body.to_string().as_bytes()).2, 4);
    let pretty = serde_json::to_string_pretty(&body).unwrap();
    assert_eq!(scanned(pretty.as_bytes()).2, 4);
    assert_eq!(scanned(br#"{"x":{"typ\u0065":"im\u0061ge_url"}}"#).2, 1);
}

#[test]
fn audio_clips_are_counted_beside_images() {
    let body = json!({"model": "m", "messages": [{"role": "user", "content": [
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "text", "text": "\"type\":\"input_audio\""},
        {"type": "image_url", "image_url": {"url": "data:"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "mp3"}},
    ]}]});
    let body = body.to_string();
    for cut in 0..=body.len() {
        let mut scanner = BodyScanner::default();
        scanner.feed(&body.as_bytes()[..cut]);
        scanner.feed(&body.as_bytes()[cut..]);
        assert_eq!((scanner.images(), scanner.audio()), (1, 2), "cut at {cut}");
    }
}

#[test]
fn what_holds_media_is_no_text() {
    let data = "A".repeat(1000);
    let body = json!({"data": data, "messages": [{"content": [
        {"type": "image_url", "image_url": {"url": format!("data:image/png;base64,{data}")}},
        {"type": "input_audio", "input_audio": {"format": "wav", "data": data}},
        {"type": "text", "text": data},
        {"type": "text", "text": format!("data: {data}")},
        ["data", data],
    ]}]});
    let body = body.to_string();
    for cut in 0..=body.len() {
        let mut scanner = BodyScanner::default();
        scanner.feed(&body.as_bytes()[..cut]);
        scanner.feed(&body.as_bytes()[cut..]);
        assert_eq!(scanner.media_bytes(), 3000 + "data:image/png;base64,".len() as u64, "cut at {cut}");
    }
}

#[test]
fn a_long_name_is_not_kept_without_bound() {
    let body = format!(r#"{{"model":"{}"}}"#, "x".repeat(10 * MAX_MODEL_BYTES));
    let mut scanner = BodyScanner::default();
    scanner.feed(body.as_bytes());
    assert_eq!(*scanner.model(), ScannedModel::NotText);
    assert!(scanner.raw.kept() <= 2 * MAX_MODEL_BYTES);
}

#[test]
fn the_search_ends_as_soon_as_the_answer_is_known() {
    let mut scanner = BodyScanner::default();
    scanner.feed(br#"{"model":"m"#);
    assert!(!scanner.settled());
    scanner.feed(br#"","messages""#);
    assert!(scanner.settled());
    let mut other = BodyScanner::default();
    other.feed(b" [");
    assert!(other.settled());
}

#[test]
fn the_place_of_the_model_is_known_and_how_often_it_is_named() {
    for (body, place, models) in [
        (r#"{"x":[1,2],"mod\u0065l" : "a\"b","model":"c"}"#, Some(r#""a\"b""#), 2),
        (r#"{"x":{"model":"no"},"model":""}"#, Some(r#""""#), 1),
        (r#"{"model":3,"model":"x"}"#, None, 2),
        ("{}", None, 0),
    ] {
        for cut in 0..=body.len() {
            let mut scanner = BodyScanner::default();
            scanner.feed(&body.as_bytes()[..cut]);
            scanner.feed(&body.as_bytes()[cut..]);
            let range = scanner
                .model_value()
                .map(|range| usize::try_from(range.start).unwrap()..usize::try_from(range.end).unwrap());
            assert_eq!(range.map(|range| &body[range]), place, "{body} cut at {cut}");
            assert_eq!(scanner.models(), models, "{body}");
        }
    }
}

#[test]
fn a_byte_order_mark_counts_only_where_it_may_stand() {
    assert_eq!(scanned("\u{feff} {\"model\":\"a\"}".as_bytes()).0, named("a"));
    for wrong in
        [&b"\xEF\xEF{\"model\":\"a\"}"[..], b" \xEF\xBB\xBF{\"model\":\"a\"}", b"\xBB{\"model\":\"a\"}"]
    {
        assert_eq!(scanned(wrong).0, ScannedModel::Absent);
    }
}

#[test]
fn deep_and_long_values_are_passed_over() {
    let deep = format!("{}1{}", "[{\"a\":".repeat(60), "}]".repeat(60));
    let numbers = (0..500).map(|n| format!("{n}e{n}, -0.{n}")).collect::<Vec<_>>().join(" , ");
    let body = format!(
        "{{\"x\":{deep},\"input\":[{numbers},true,null,\"model\"],\"huge\":{},\"stream\":true,\"model\":\"m\"}}",
        "9".repeat(1000)
    );
    let mut whole = BodyScanner::default();
    whole.feed(body.as_bytes());
    assert_eq!((whole.model(), whole.is_stream()), (&named("m"), true));
    for size in [1, 2, 3, 7, 64] {
        let mut scanner = BodyScanner::default();
        body.as_bytes().chunks(size).for_each(|piece| scanner.feed(piece));
        assert_eq!((scanner.model(), scanner.is_stream()), (&named("m"), true), "pieces of {size}");
    }
}

fn value() -> impl Strategy<Value = Value> {
    let text = prop_oneof![
        Just("model".to_owned()),
        Just("stream".to_owned()),
        Just("type".to_owned()),
        Just("image".to_owned()),
        Just("image_url".to_owned()),
        any::<String>(),
    ];
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i32>().prop_map(Value::from),
        any::<i16>().prop_map(|x| json!(f64::from(x) / 4.0)),
        text.clone().prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 40, 6, move |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            proptest::collection::vec((text.clone(), inner), 0..6)
                .prop_map(|pairs| Value::Object(pairs.into_iter().collect())),
        ]
    })
}

fn images(value: &Value) -> u32 {
    match value {
        Value::Array(items) => items.iter().map(images).sum(),
        Value::Object(fields) => fields
            .iter()
            .map(|(key, value)| {
                let image = key == "type"
                    && value.as_str().is_some_and(|v| ["image", "image_url", "input_image"].contains(&v));
                u32::from(image) + images(value)
            })
            .sum(),
        _ => 0,
    }
}

/// Spells every second letter of every string as a `\u` escape, which is the same JSON.
fn escaped(text: &str) -> String {
    let mut out = String::new();
    let mut in_text = false;
    let mut chars = text.chars().enumerate().peekable();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => {
                in_text = !in_text;
                out.push(c);
            }
            '\\' => {
                out.push(c);
                if let Some((_, next)) = chars.next() {
                    out.push(next);
                    if next == 'u' {
                        out.extend(chars.by_ref().take(4).map(|(_, digit)| digit));
                    }
                }
            }
            c if in_text && at % 2 == 0 && c.is_ascii_alphabetic() => {
                out.extend(format!("\\u{:04x}", c as u32).chars());
            }
            c => out.push(c),
        }
    }
    out
}

proptest! {
    #[test]
    fn it_agrees_with_a_full_parser_on_every_valid_body(
        body in value(), pretty in any::<bool>(), escape in any::<bool>(),
        cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..6),
    ) {
        let mut text = if pretty { serde_json::to_string_pretty(&body).unwrap() } else { body.to_string() };
        if escape {
            text = escaped(&text);
            prop_assert_eq!(&serde_json::from_str::<Value>(&text).unwrap(), &body);
        }
        let bytes = text.as_bytes();
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
        cuts.extend([0, bytes.len()]);
        cuts.sort_unstable();
        let mut scanner = BodyScanner::default();
        for pair in cuts.windows(2) {
            scanner.feed(&bytes[pair[0]..pair[1]]);
        }
        let expected = match body.as_object().and_then(|fields| fields.get("model")) {
            None => ScannedModel::Absent,
            Some(Value::String(name)) => ScannedModel::Named(name.clone()),
            Some(_) => ScannedModel::NotText,
        };
        prop_assert_eq!(scanner.model(), &expected);
        if body.is_object() {
            prop_assert!(scanner.is_complete_object());
            prop_assert_eq!(scanner.is_stream(), body.get("stream") == Some(&Value::Bool(true)));
            prop_assert_eq!(scanner.images(), images(&body));
        }
    }

    #[test]
    fn no_bytes_make_it_fail(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let mut scanner = BodyScanner::default();
        for piece in bytes.chunks(7) {
            scanner.feed(piece);
        }
    }
}
