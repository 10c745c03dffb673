//! Every refusal as a client gets it: status, headers and body.

use warden_supervisor::{FailureKind, NoRoom};

use super::*;

fn refusals() -> Vec<Refusal> {
    let model = || ModelName::new("m");
    let known = || vec!["a".to_owned(), "org/b".to_owned()];
    let unknown = || ResolveError::Unknown { name: "x".into(), known: known() };
    let failure = Failure {
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
    let denied = |denied| Refusal::Denied { model: model(), denied };
    let spent = |what| Refusal::KeySpent {
        key: "alice".into(),
        what,
        rate: "60/min".parse().unwrap(),
        wait: Duration::from_micros(1_200_300),
    };
    let quarantined = |executed| Refusal::Quarantined {
        model: model(),
        print: Fingerprint(0xab),
        left: seconds(600),
        executed,
    };
    vec![
        Refusal::Host,
        Refusal::Name("evil.example".into()),
        Refusal::Origin,
        Refusal::HeadTooLarge { limit: 65_536 },
        Refusal::TargetTooLong { limit: 8192 },
        Refusal::LineTooLong { limit: 8192 },
        Refusal::TooManyFields { limit: 100 },
        Refusal::Method(http::Method::TRACE),
        Refusal::BodyTooLarge { limit: 1024, key: "server.body_bytes" },
        Refusal::BodyTooSlow,
        Refusal::BodyBroken,
        Refusal::Busy,
        Refusal::ModelTooFar { limit: 65_536 },
        Refusal::NotJson { known: known() },
        Refusal::ModelNotText { known: known() },
        Refusal::TwoModels,
        Refusal::Unreadable { model: model(), why: Unreadable::NotObject },
        Refusal::Unreadable { model: model(), why: Unreadable::Repeats },
        Refusal::NoRoute,
        Refusal::NoPage,
        Refusal::SlotFiles,
        Refusal::NoPrefix("/api".into()),
        Refusal::Upstream { known: known() },
        unknown().into(),
        ResolveError::Missing { known: known() }.into(),
        ResolveError::Missing { known: Vec::new() }.into(),
        denied(Denied::QueueFull { waiting: 8, depth: 8 }),
        denied(Denied::NoRoom(short)),
        denied(Denied::Deadline { waited: Duration::from_millis(30_040) }),
        denied(Denied::StartFailed(failure.clone(), Some(Duration::from_millis(2500)))),
        denied(Denied::Failed(failure, seconds(60))),
        denied(Denied::ShuttingDown),
        denied(Denied::Removed),
        quarantined(true),
        quarantined(false),
        Refusal::Unreachable { model: model(), attempts: 3 },
        Refusal::Died { model: model() },
        Refusal::Garbled { model: model(), why: "its head has two lengths".into() },
        Refusal::Revoked { model: model() },
        Refusal::NotThere { model: model() },
        Refusal::KeyThere { model: model() },
        Refusal::TimedOut { model: model() },
        Refusal::Cancelled { executed: false },
        Refusal::Cancelled { executed: true },
        Refusal::ShuttingDown,
        Refusal::Loading,
        Refusal::Down { after: seconds(7) },
        Refusal::NoKey,
        Refusal::WrongKey,
        spent("requests"),
        spent("tokens"),
        Refusal::KeyBusy { key: "alice".into(), most: 2 },
        Refusal::Hidden(Box::new(unknown().into())),
    ]
}

fn page(refusal: &Refusal, dialect: Dialect) -> String {
    let answer = refusal.answer(dialect, Duration::from_secs(1));
    let told = answer.headers.iter().filter(|(name, _)| name != CONTENT_TYPE);
    let told = told.map(|(name, value)| format!("{name}: {}\n", value.to_str().unwrap_or("?")));
    let told = told.collect::<Vec<_>>().concat();
    format!("{}\n{told}{}\n\n", answer.status, String::from_utf8_lossy(&answer.body))
}

#[test]
fn every_refusal_says_what_is_wrong_and_what_to_do() {
    insta::assert_snapshot!(
        refusals().iter().map(|refusal| page(refusal, Dialect::OpenAi)).collect::<String>()
    );
}

#[test]
fn a_refusal_is_spelled_as_anthropic_does_on_its_routes() {
    let of_each_status = |kept: &mut Vec<StatusCode>, refusal: &Refusal| {
        let status = refusal.class().0;
        let new = !kept.contains(&status);
        kept.push(status);
        Some(if new { page(refusal, Dialect::Anthropic) } else { String::new() })
    };
    insta::assert_snapshot!(refusals().iter().scan(Vec::new(), of_each_status).collect::<String>());
}

#[test]
fn a_request_that_can_be_read_in_two_ways_is_told_which_part_is_wrong() {
    let faults = [
        WireFault::LengthAndCoding,
        WireFault::TwoLengths,
        WireFault::Length,
        WireFault::Coding,
        WireFault::BareLf,
        WireFault::Field,
        WireFault::RequestLine,
        WireFault::Method,
        WireFault::Target,
        WireFault::HostCount,
        WireFault::Host,
        WireFault::HostDiffers,
        WireFault::Expectation,
        WireFault::Loop,
        WireFault::Unseen,
    ];
    let bodies = [
        BodyFault::TooLarge,
        BodyFault::TooSlow,
        BodyFault::Broken,
        BodyFault::TwoModels,
        BodyFault::Quarantined,
        BodyFault::Stopped,
    ];
    let told = faults.map(|fault| format!("{} {fault}\n", fault.status().as_u16())).concat();
    insta::assert_snapshot!(told + &bodies.map(|fault| format!("    {fault}\n")).concat());
}

#[test]
fn a_stream_that_breaks_and_a_head_that_is_no_request_get_words_too() {
    let limits = HeadLimits { bytes: 65_536, count: 100, retry_after: Duration::from_secs(1) };
    let dialects = [Dialect::OpenAi, Dialect::Responses, Dialect::Anthropic];
    let fault = |dialect| stream_error(StreamEnd::Fault, "model `m`: its process ended", dialect, 3);
    let cancelled = |dialect| stream_error(StreamEnd::Cancelled, CANCELLED, dialect, 3);
    let events = dialects.map(fault).concat() + &dialects.map(cancelled).concat();
    let heads = [400, 408, 414, 431, 503].into_iter().filter_map(|status| unreadable_head(status, &limits));
    // Each answer has its own id.
    let number = |line: &&str| !line.starts_with("x-request-id: ");
    let raw = heads.chain([not_tls()]).map(|head| {
        head.lines().filter(number).map(|line| line.to_owned() + "\n").collect::<String>() + "\n"
    });
    insta::assert_snapshot!(events + &raw.collect::<String>());
}
