//! Every refusal as a client gets it: status, headers and body.

use warden_supervisor::{FailureKind, NoRoom};

use super::*;

fn refusals() -> Vec<RequestRefusal> {
    let model = || ModelName::new("m");
    let known = || vec!["a".to_owned(), "org/b".to_owned()];
    let unknown = || ResolveError::Unknown { name: "x".into(), known: known() };
    let failure = BackendFailure {
        kind: FailureKind::BadModel,
        message: "the model file /m.gguf does not exist".into(),
        lines: vec!["error: failed to open".into()],
        failures: 2,
    };
    let short = NoRoom {
        series: warden_policies::MemoryKind::Host,
        tokens: 9000,
        needed: 3 << 30,
        have: 1 << 30,
        bytes_per_token: 65_536.0,
        retry_after: Duration::from_secs(20),
    };
    let seconds = Duration::from_secs;
    let denied = |denied| RequestRefusal::Denied { model: model(), denied };
    let spent = |what| RequestRefusal::KeySpent {
        key: "alice".into(),
        what,
        rate: "60/min".parse().unwrap(),
        wait: Duration::from_micros(1_200_300),
    };
    let quarantined = |executed| RequestRefusal::Quarantined {
        model: model(),
        print: RequestFingerprint(0xab),
        left: seconds(600),
        executed,
    };
    vec![
        RequestRefusal::Host,
        RequestRefusal::Name("evil.example".into()),
        RequestRefusal::Origin,
        RequestRefusal::HeadTooLarge { limit: 65_536 },
        RequestRefusal::TargetTooLong { limit: 8192 },
        RequestRefusal::LineTooLong { limit: 8192 },
        RequestRefusal::TooManyFields { limit: 100 },
        RequestRefusal::Method(http::Method::TRACE),
        RequestRefusal::BodyTooLarge { limit: 1024, key: "server.body_bytes" },
        RequestRefusal::BodyTooSlow,
        RequestRefusal::BodyBroken,
        RequestRefusal::Busy,
        RequestRefusal::ModelTooFar { limit: 65_536 },
        RequestRefusal::NotJson { known: known() },
        RequestRefusal::ModelNotText { known: known() },
        RequestRefusal::TwoModels,
        RequestRefusal::Unreadable { model: model(), why: UnreadableBody::NotObject },
        RequestRefusal::Unreadable { model: model(), why: UnreadableBody::Repeats },
        RequestRefusal::NoRoute,
        RequestRefusal::NoPage,
        RequestRefusal::SlotFiles,
        RequestRefusal::NoPrefix("/api".into()),
        RequestRefusal::Upstream { known: known() },
        unknown().into(),
        ResolveError::Missing { known: known() }.into(),
        ResolveError::Missing { known: Vec::new() }.into(),
        denied(LeaseDenied::QueueFull { waiting: 8, depth: 8 }),
        denied(LeaseDenied::NoRoom(short)),
        denied(LeaseDenied::Deadline { waited: Duration::from_millis(30_040) }),
        denied(LeaseDenied::StartFailed(failure.clone(), Some(Duration::from_millis(2500)))),
        denied(LeaseDenied::Failed(failure, seconds(60))),
        denied(LeaseDenied::ShuttingDown),
        denied(LeaseDenied::Removed),
        quarantined(true),
        quarantined(false),
        RequestRefusal::Unreachable { model: model(), attempts: 3 },
        RequestRefusal::Died { model: model() },
        RequestRefusal::Garbled { model: model(), why: "its head has two lengths".into() },
        RequestRefusal::Revoked { model: model() },
        RequestRefusal::NotThere { model: model() },
        RequestRefusal::KeyThere { model: model() },
        RequestRefusal::TimedOut { model: model() },
        RequestRefusal::Cancelled { executed: false },
        RequestRefusal::Cancelled { executed: true },
        RequestRefusal::ShuttingDown,
        RequestRefusal::Loading,
        RequestRefusal::Down { after: seconds(7) },
        RequestRefusal::NoKey,
        RequestRefusal::WrongKey,
        spent("requests"),
        spent("tokens"),
        RequestRefusal::KeyBusy { key: "alice".into(), most: 2 },
        RequestRefusal::Hidden(Box::new(unknown().into())),
    ]
}

fn page(refusal: &RequestRefusal, dialect: ErrorDialect) -> String {
    let answer = refusal.answer(dialect, Duration::from_secs(1));
    let told = answer.headers.iter().filter(|(name, _)| name != CONTENT_TYPE);
    let told = told.map(|(name, value)| format!("{name}: {}\n", value.to_str().unwrap_or("?")));
    let told = told.collect::<Vec<_>>().concat();
    format!("{}\n{told}{}\n\n", answer.status, String::from_utf8_lossy(&answer.body))
}

#[test]
fn every_refusal_says_what_is_wrong_and_what_to_do() {
    insta::assert_snapshot!(
        refusals().iter().map(|refusal| page(refusal, ErrorDialect::OpenAi)).collect::<String>()
    );
}

#[test]
fn a_refusal_is_spelled_as_anthropic_does_on_its_routes() {
    let of_each_status = |kept: &mut Vec<StatusCode>, refusal: &RequestRefusal| {
        let status = refusal.facts().0;
        let new = !kept.contains(&status);
        kept.push(status);
        Some(if new { page(refusal, ErrorDialect::Anthropic) } else { String::new() })
    };
    insta::assert_snapshot!(refusals().iter().scan(Vec::new(), of_each_status).collect::<String>());
}

#[test]
fn a_request_that_can_be_read_in_two_ways_is_told_which_part_is_wrong() {
    let faults = [
        WireError::LengthAndCoding,
        WireError::TwoLengths,
        WireError::Length,
        WireError::Coding,
        WireError::BareLf,
        WireError::Field,
        WireError::RequestLine,
        WireError::Method,
        WireError::Target,
        WireError::HostCount,
        WireError::Host,
        WireError::HostDiffers,
        WireError::Expectation,
        WireError::Loop,
        WireError::Unseen,
    ];
    let bodies = [
        BodyError::TooLarge,
        BodyError::TooSlow,
        BodyError::Broken,
        BodyError::TwoModels,
        BodyError::Quarantined,
        BodyError::Stopped,
    ];
    let told = faults.map(|fault| format!("{} {fault}\n", fault.status().as_u16())).concat();
    insta::assert_snapshot!(told + &bodies.map(|fault| format!("    {fault}\n")).concat());
}

#[test]
fn a_stream_that_breaks_and_a_head_that_is_no_request_get_words_too() {
    let limits = HeadLimits { bytes: 65_536, count: 100, retry_after: Duration::from_secs(1) };
    let dialects = [ErrorDialect::OpenAi, ErrorDialect::Responses, ErrorDialect::Anthropic];
    let fault = |dialect| stream_error(StreamEnd::Fault, "model `m`: its process ended", dialect, 3);
    let cancelled = |dialect| stream_error(StreamEnd::Cancelled, CANCELLED, dialect, 3);
    let events = dialects.map(fault).concat() + &dialects.map(cancelled).concat();
    let heads = [400, 408, 414, 431, 503].into_iter().filter_map(|status| unreadable_head(status, &limits));
    // Each answer has its own id.
    let number = |line: &&str| !line.starts_with("x-request-id: ");
    let raw = heads.chain([not_tls_answer()]).map(|head| {
        head.lines().filter(number).map(|line| line.to_owned() + "\n").collect::<String>() + "\n"
    });
    insta::assert_snapshot!(events + &raw.collect::<String>());
}
