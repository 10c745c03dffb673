//! Texts and markers that can be given to another server.

use super::*;

#[test]
fn marks_of_reasoning_and_calls_do_no_harm_and_others_may() {
    let told = |text: &str| read_harmless_marks(json!({ "content": text }).to_string().as_bytes());
    for text in ["", "<think></think><tool_call></tool_call>"] {
        assert_eq!(told(text).unwrap(), text);
    }
    for text in ["<|channel|>", "<think> ", "x", "<think><|message|>"] {
        assert!(told(text).is_err(), "{text}");
    }
    assert!(read_harmless_marks(b"{}").is_err() && read_harmless_marks(b"").is_err());
    // In the text they may have been one token, and would be tokenized as several.
    assert!(has_marks("a <think> b") && has_marks("<|im_end|>") && !has_marks("a < b | c > think"));
}

#[test]
fn tokens_of_a_text_are_taken_only_if_they_spell_it() {
    let answer = json!({ "tokens": [{ "id": 1, "piece": "a" }, { "id": 2, "piece": [230, 188] }, { "id": 3, "piece": [162] }] });
    let answer = answer.to_string();
    assert_eq!(read_tokens(answer.as_bytes(), "a漢"), Some(vec![1, 2, 3]));
    assert_eq!(read_tokens(answer.as_bytes(), " a漢"), None);
    for odd in [
        "",
        "{}",
        "{\"tokens\":[1,2]}",
        "{\"tokens\":[{\"id\":-1,\"piece\":\"a\"}]}",
        "{\"tokens\":[{\"id\":1,\"piece\":[256]}]}",
    ] {
        assert_eq!(read_tokens(odd.as_bytes(), "a"), None, "{odd}");
    }
    assert!(read_rendered(b"{}").is_err());
    assert_eq!(read_rendered(b"{\"prompt\":\"p\"}").unwrap(), "p");
}
