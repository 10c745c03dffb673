//! Answers to short chats: grammars, echoes, and prompts with the beginning of an answer.

use super::*;

#[test]
fn a_grammar_must_start_after_the_whole_text() {
    let told = |grammar: &str, lazy: bool, start: &str| {
        let settings = json!({ "grammar": grammar, "grammar_lazy": lazy, "generation_prompt": start });
        let answer = json!({ "__verbose": { "generation_settings": settings } });
        grammar_start(answer.to_string().as_bytes(), "<tool_call>{")
    };
    assert_eq!(told("", false, "assistant\n"), Ok(None));
    let start = "assistant\n<tool_call>{";
    assert_eq!(told("root ::= \"a\"", false, start), Ok(Some(start.to_owned())));
    assert!(told("root ::= \"a\"", true, start).is_err());
    assert!(told("root ::= \"a\"", false, "assistant\n").is_err());
    assert!(grammar_start(b"{}", "").is_err());
}

#[test]
fn a_build_repeats_the_beginning_of_an_answer_or_not() {
    let told = |text: &str| {
        is_echoed(json!({ "choices": [{ "message": { "content": text } }] }).to_string().as_bytes())
    };
    assert!(told("One, two, three, four, five") && !told(", five") && !is_echoed(b"{}"));
    assert!(String::from_utf8(echo_request()).unwrap().contains(ECHO_TEXT));
}

#[test]
fn a_prompt_may_get_longer_by_the_answer_and_by_marks_of_its_thought() {
    let open = "<|im_start|>assistant\n";
    let with = |text: &str| format!("{open}{text}");
    for (prompt, continued, reasoning, text) in [
        (with(""), with("Once"), "", "Once"),
        (with("<think>\n"), with("<think>\nso"), "", "so"),
        (with("<think>\n"), with("<think>\nso\n</think>\n\nOnce"), "so", "Once"),
        (with(""), with("<think>\nso\n</think>\n\nOnce"), "so", "Once"),
        (with(""), with("<think>\n\n</think>\n\nOnce"), "", "Once"),
        (with("<think>\n\n</think>\n\n"), with("<think>\n</think>\n\nOnce"), "", "Once"),
    ] {
        assert!(is_appended(&prompt, &continued, reasoning, text), "{prompt:?} {continued:?}");
    }
    for (prompt, continued, reasoning, text) in [
        (with(""), with("Once<|im_end|>\n"), "", "Once"),
        (with(""), with("Once<|im_end|>\n<|im_start|>assistant\nOnce"), "", "Once"),
        (with(""), with(" Once"), "x", " Once"),
        (with(""), with("<think>\nno\n</think>\n\nOnce"), "so", "Once"),
        (with("I say: "), with("Once"), "", "Once"),
        ("a".to_owned(), "bOnce".to_owned(), "", "Once"),
    ] {
        assert!(!is_appended(&prompt, &continued, reasoning, text), "{prompt:?} {continued:?}");
    }
}
