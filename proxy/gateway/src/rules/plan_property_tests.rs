//! Rules compared with a full parser, split at every point, and with bytes that are no valid body.

use proptest::prelude::*;
use serde_json::Map;

use super::*;

/// Applies the rules by a full parser.
#[expect(clippy::cast_precision_loss, reason = "the bounds of the tests are small")]
fn expected(body: &Value, rules: &RequestRules) -> Value {
    let mut fields: Map<String, Value> = body.as_object().unwrap().clone();
    for name in &rules.strip {
        fields.remove(name);
    }
    if let Some(most) = rules.max_tokens {
        for name in LIMIT_NAMES {
            let within = |value: &Value| value.as_f64().is_some_and(|n| (0.0..=most as f64).contains(&n));
            if let Some(value) = fields.get_mut(name).filter(|value| !within(value)) {
                *value = json!(most);
            }
        }
    }
    for (name, value) in &rules.default {
        fields.entry(name).or_insert(value.clone());
    }
    for (name, value) in &rules.set {
        fields.insert(name.clone(), value.clone());
    }
    if let Some(most) = rules.max_tokens
        && !BodyShape::Chat.limit_members().iter().any(|name| fields.contains_key(*name))
    {
        fields.insert("max_tokens".to_owned(), json!(most));
    }
    let Some(prompt) = &rules.system_prompt else { return fields.into() };
    if let Some(Value::Array(list)) = fields.get_mut("messages") {
        let is_system = |item: &Value| matches!(item["role"].as_str(), Some("system" | "developer"));
        let own = json!({ "role": "system", "content": prompt.text });
        let front = format!("{}\n\n", prompt.text);
        match prompt.mode {
            SystemMode::Missing if list.iter().any(is_system) => {}
            SystemMode::Prepend if list.iter().any(is_system) => {
                let first = list.iter_mut().find(|item| is_system(item)).unwrap();
                match first.get_mut("content") {
                    Some(Value::String(text)) => text.insert_str(0, &front),
                    Some(Value::Array(parts)) => parts.insert(0, json!({ "type": "text", "text": front })),
                    _ => list.insert(0, own),
                }
            }
            mode => {
                if mode == SystemMode::Replace {
                    list.retain(|item| !is_system(item));
                }
                list.insert(0, own);
            }
        }
    }
    fields.into()
}

fn value() -> impl Strategy<Value = Value> {
    let word = || {
        prop_oneof![
            Just("role".to_owned()),
            Just("system".to_owned()),
            Just("developer".to_owned()),
            Just("content".to_owned()),
            Just("messages".to_owned()),
            Just("max_tokens".to_owned()),
            Just("n_predict".to_owned()),
            Just("a".to_owned()),
            Just("b\"".to_owned()),
            any::<String>(),
        ]
    };
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        (-5..200_i32).prop_map(Value::from),
        any::<i16>().prop_map(|x| json!(f64::from(x) / 4.0)),
        word().prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 40, 6, move |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
            proptest::collection::vec((word(), inner), 0..5)
                .prop_map(|pairs| Value::Object(pairs.into_iter().collect())),
        ]
    })
}

fn message() -> impl Strategy<Value = Value> {
    (prop_oneof![Just("system"), Just("user"), Just("developer")], value(), any::<bool>()).prop_map(
        |(role, content, swapped)| {
            if swapped {
                json!({ "content": content, "role": role, "a": [{ "role": "system" }] })
            } else {
                json!({ "role": role, "content": content })
            }
        },
    )
}

/// The text of an object whose members may occur twice.
fn body() -> impl Strategy<Value = String> {
    let name = prop_oneof![
        Just("a".to_owned()),
        Just("b\"".to_owned()),
        Just("c".to_owned()),
        Just("max_tokens".to_owned()),
        Just("n_predict".to_owned()),
        any::<String>(),
    ];
    let messages = proptest::collection::vec(prop_oneof![message(), value()], 0..5).prop_map(Value::from);
    let member = prop_oneof![
        3 => (name, value()),
        1 => (Just("messages".to_owned()), messages),
    ];
    (proptest::collection::vec(member, 0..8), any::<bool>()).prop_map(|(members, pretty)| {
        let space = if pretty { "\n \t" } else { "" };
        let text = |value: &Value| {
            if pretty { serde_json::to_string_pretty(value).unwrap() } else { value.to_string() }
        };
        let members: Vec<String> = members
            .iter()
            .map(|(name, value)| format!("{}{space}:{space}{}", json!(name), text(value)))
            .collect();
        format!("{space}{{{space}{}{space}}}{space}", members.join(&format!("{space},{space}")))
    })
}

fn rules() -> impl Strategy<Value = RequestRules> {
    let mode = prop_oneof![Just(SystemMode::Missing), Just(SystemMode::Prepend), Just(SystemMode::Replace)];
    let system = proptest::option::of((any::<String>(), mode));
    let pairs = |names: [&'static str; 2]| {
        proptest::collection::vec((proptest::sample::select(names.to_vec()), value()), 0..2).prop_map(
            |pairs| pairs.into_iter().map(|(name, value)| (name.to_owned(), value)).collect::<Vec<_>>(),
        )
    };
    let strip = proptest::sample::subsequence(vec!["b\"", "n_predict"], 0..=2);
    (pairs(["a", "d"]), pairs(["c", "e"]), strip, proptest::option::of(0..100_u64), system).prop_map(
        |(set, default, strip, max_tokens, system)| RequestRules {
            set,
            default,
            strip: strip.into_iter().map(str::to_owned).collect(),
            system_prompt: system.map(|(text, mode)| SystemPrompt { text, mode }),
            max_tokens,
            fresh_seed: false,
        },
    )
}

proptest! {
    #[test]
    fn it_agrees_with_a_full_parser(body in body(), rules in rules(), size in 1..40_usize) {
        let before: Value = serde_json::from_str(&body).unwrap();
        let rules = request(rules);
        let out = ruled_in(&body, size, &rules, BodyShape::Chat).unwrap();
        let after: Value = serde_json::from_str(&out).map_err(|e| TestCaseError::fail(format!("{e}: {out}")))?;
        prop_assert_eq!(&after, &expected(&before, &rules.request), "{} -> {}", body, out);
    }

    #[test]
    fn no_bytes_make_it_fail(bytes in proptest::collection::vec(any::<u8>(), 0..200), rules in rules()) {
        let rules = request(rules);
        if let Some(plan) = RulePlan::new(&rules, Some(BodyShape::Chat)) {
            let pieces: Vec<Bytes> = bytes.chunks(7).map(Bytes::copy_from_slice).collect();
            if let Ok(index) = JsonIndex::from_pieces(&pieces, plan.wanted()) {
                splice::apply_edits(pieces.into(), plan.edits(&index, 7));
            }
        }
    }

    #[test]
    fn nothing_like_json_makes_it_fail(text in r#"(\{|\}|\[|\]|"a"|"role"|"messages"|"system"|:|,|1| ){0,30}"#, rules in rules()) {
        let rules = request(rules);
        let _whatever = ruled_in(&format!("{{{text}"), 5, &rules, BodyShape::Chat);
    }
}
