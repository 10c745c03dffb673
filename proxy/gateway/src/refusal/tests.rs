//! Errors as clients get them.

use super::*;

use warden_supervisor::FailureKind;

const LIMITS: HeadLimits = HeadLimits { bytes: 65536, count: 100, retry_after: Duration::from_secs(1) };

fn body(refusal: &RequestRefusal, dialect: ErrorDialect) -> (u16, Value, Vec<(String, String)>) {
    let answer = refusal.answer(dialect, Duration::from_secs(1));
    let headers = answer
        .headers
        .iter()
        .map(|(name, value)| (name.to_string(), value.to_str().unwrap().to_owned()))
        .collect();
    (answer.status.as_u16(), serde_json::from_slice(&answer.body).unwrap(), headers)
}

fn header<'a>(headers: &'a [(String, String)], name: &str) -> Option<&'a str> {
    headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
}

#[test]
fn an_unknown_model_is_named_with_the_known_ones() {
    let refusal = RequestRefusal::Resolve(ResolveError::Unknown {
        name: "x".into(),
        known: vec!["a".into(), "org/b".into()],
    });
    let (status, body, headers) = body(&refusal, ErrorDialect::OpenAi);
    assert_eq!(
        (status, &body["error"]["code"], &body["error"]["type"]),
        (404, &json!(404), &json!("not_found_error"))
    );
    assert_eq!(body["error"]["param"], "model");
    assert_eq!(body["error"]["source"], "llama-warden");
    let message = body["error"]["message"].as_str().unwrap();
    assert!(["`x`", "`a`", "`org/b`"].iter().all(|word| message.contains(word)), "{message}");
    assert_eq!(header(&headers, "x-warden-executed"), Some("no"));
    assert_eq!(header(&headers, "retry-after"), None);
}

#[test]
fn a_failed_start_shows_why_and_the_last_lines() {
    let failure = BackendFailure {
        kind: FailureKind::BadModel,
        message: "the model file /m.gguf does not exist".into(),
        lines: vec!["error: failed to open".into()],
        failures: 2,
    };
    let denied = LeaseDenied::StartFailed(failure, Some(Duration::from_millis(2500)));
    let (status, body, headers) =
        body(&RequestRefusal::Denied { model: ModelName::new("m"), denied }, ErrorDialect::OpenAi);
    assert_eq!(status, 503);
    assert_eq!(header(&headers, "retry-after"), Some("3"));
    assert_eq!(body["error"]["details"]["kind"], "bad_model");
    assert_eq!(body["error"]["details"]["lines"][0], "error: failed to open");
    assert!(body["error"]["message"].as_str().unwrap().contains("/m.gguf does not exist"));
}

#[test]
fn only_what_was_sent_may_have_been_executed() {
    let model = ModelName::new("m");
    for (refusal, executed, status) in [
        (RequestRefusal::Died { model: model.clone() }, "maybe", 502),
        (RequestRefusal::TimedOut { model: model.clone() }, "maybe", 504),
        (RequestRefusal::Unreachable { model: model.clone(), attempts: 3 }, "no", 503),
        (
            RequestRefusal::Denied { model, denied: LeaseDenied::QueueFull { waiting: 2, depth: 2 } },
            "no",
            503,
        ),
        (RequestRefusal::Busy, "no", 503),
        (RequestRefusal::BodyTooLarge { limit: 1, key: "server.body_bytes" }, "no", 413),
    ] {
        let (got, _, headers) = body(&refusal, ErrorDialect::OpenAi);
        assert_eq!((got, header(&headers, "x-warden-executed")), (status, Some(executed)), "{refusal}");
        assert_eq!(header(&headers, "retry-after").is_some(), status == 503, "{refusal}");
    }
}

#[test]
fn anthropic_routes_get_anthropic_errors() {
    let (status, body, _) = body(&RequestRefusal::Busy, ErrorDialect::Anthropic);
    assert_eq!(
        (status, &body["type"], &body["error"]["type"]),
        (503, &json!("error"), &json!("overloaded_error"))
    );
}

#[test]
fn keys_are_refused_as_llama_server_and_anthropic_do() {
    for (refusal, status, kind) in [
        (RequestRefusal::WrongKey, 401, "authentication_error"),
        (RequestRefusal::NoKey, 401, "authentication_error"),
        (RequestRefusal::KeyBusy { key: "a".into(), most: 1 }, 429, "rate_limit_error"),
        (
            RequestRefusal::Hidden(Box::new(
                ResolveError::Unknown { name: "x".into(), known: Vec::new() }.into(),
            )),
            404,
            "not_found_error",
        ),
    ] {
        for dialect in [ErrorDialect::OpenAi, ErrorDialect::Responses, ErrorDialect::Anthropic] {
            let (got, body, headers) = body(&refusal, dialect);
            assert_eq!((got, &body["error"]["type"]), (status, &json!(kind)), "{refusal}");
            assert_eq!(header(&headers, "x-warden-executed"), Some("no"));
            let challenge = header(&headers, "www-authenticate");
            assert_eq!(
                challenge.is_some_and(|value| value.starts_with("Bearer")),
                status == 401,
                "{refusal}"
            );
        }
    }
}

#[test]
fn the_wait_for_a_rate_is_told_exactly() {
    let rate = "60/min".parse().unwrap();
    let wait = Duration::from_micros(1_200_300);
    let refusal = RequestRefusal::KeySpent { key: "alice".into(), what: "requests", rate, wait };
    let (status, _, headers) = body(&refusal, ErrorDialect::OpenAi);
    assert_eq!((status, header(&headers, "retry-after")), (429, Some("2")));
    assert_eq!(header(&headers, "retry-after-ms"), Some("1201"));
}

#[test]
fn an_unreadable_head_gets_words_too() {
    let answer = unreadable_head(431, &LIMITS).unwrap();
    assert!(answer.starts_with("HTTP/1.1 431 Request Header Fields Too Large\r\n"));
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.contains(&format!("content-length: {}", body.len())));
    assert!(body.contains("65536"));
    assert!(head.contains("x-warden-executed: no\r\n") && head.contains("x-request-id: "), "{head}");
    assert!(unreadable_head(505, &LIMITS).is_none());
}
