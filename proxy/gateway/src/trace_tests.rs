//! Spans of requests: they nest, end, and are limited in number; the context is passed on.

use super::*;

const GIVEN: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

fn begun(fields: &[(&'static str, &'static str)], ratio: f64) -> (Box<GatewayTrace>, HeaderMap) {
    let mut headers = HeaderMap::new();
    for (name, value) in fields {
        headers.append(HeaderName::from_static(name), HeaderValue::from_static(value));
    }
    (GatewayTrace::begin(&mut headers, ratio, None, false), headers)
}

fn peer() -> TracePeer {
    TracePeer { generation: GenerationId(1), canary: false, address: "a".to_owned(), port: None }
}

/// Returns kind, parent and failure of each part.
fn told(trace: &GatewayTrace) -> Vec<(&'static str, Option<usize>, Option<&'static str>)> {
    let name = |kind: &TracePartKind| match kind {
        TracePartKind::Queue => "queue",
        TracePartKind::Attempt(_) => "attempt",
        TracePartKind::Prefill => "prefill",
        TracePartKind::Generation => "generation",
        TracePartKind::Continuation => "continuation",
    };
    let at = |span: SpanId| trace.parts.iter().position(|part| part.span == span);
    trace.parts.iter().map(|part| (name(&part.kind), at(part.parent), part.failed)).collect()
}

#[test]
fn a_sound_context_goes_on_with_our_span_as_parent_and_another_is_replaced() {
    let (mut trace, mut headers) =
        begun(&[("traceparent", GIVEN), ("tracestate", "a=1"), ("tracestate", "b=2")], 0.0);
    assert_eq!(trace.state.as_deref(), Some("a=1,b=2"));
    let parent = trace.start_attempt(peer);
    let value = parent.clone().unwrap();
    set_traceparent(&mut headers, parent);
    assert_eq!(headers.get_all("traceparent").iter().count(), 1);
    let value = value.to_str().unwrap();
    assert!(value.starts_with("00-0af7651916cd43dd8448eb211c80319c-") && value.ends_with("-01"), "{value}");
    assert!(value.contains(&trace.parts[0].span.to_string()), "{value}");
    assert_eq!(headers.get_all("tracestate").iter().count(), 2);
    for bad in [
        &[("traceparent", GIVEN), ("traceparent", GIVEN), ("tracestate", "a=1")][..],
        &[("traceparent", "00-zz"), ("tracestate", "a=1")],
        &[("tracestate", "a=1")],
    ] {
        let (mut trace, mut headers) = begun(bad, 0.0);
        let parent = trace.start_attempt(peer);
        set_traceparent(&mut headers, parent);
        let value = headers.get("traceparent").unwrap().to_str().unwrap().to_owned();
        assert!(!value.contains("0af7651916cd43dd8448eb211c80319c") && value.ends_with("-02"), "{value}");
        assert!(trace.state.is_none() && !headers.contains_key("tracestate"), "{bad:?}");
        assert!(trace.parts.is_empty(), "it is not recorded");
    }
    let (trace, headers) = begun(&[("traceparent", GIVEN), ("tracestate", "a")], 0.0);
    assert!(trace.context.parent.is_some() && !headers.contains_key("tracestate"));
}

#[tokio::test(start_paused = true)]
async fn parts_nest_and_each_ends() {
    let (mut trace, _) = begun(&[], 1.0);
    let step = || tokio::time::advance(Duration::from_millis(10));
    trace.note_waiting();
    step().await;
    trace.note_granted(Duration::from_millis(10));
    trace.start_attempt(peer);
    step().await;
    trace.end_attempt(Some("refused"));
    trace.note_waiting();
    trace.note_granted(Duration::ZERO);
    trace.start_attempt(peer);
    step().await;
    trace.note_first_token(Instant::now());
    trace.note_first_token(Instant::now());
    step().await;
    trace.start_continuation("died");
    trace.note_waiting();
    step().await;
    trace.note_granted(Duration::from_millis(10));
    trace.start_attempt(peer);
    step().await;
    trace.note_first_token(Instant::now());
    step().await;
    trace.end(Duration::from_millis(70), None);
    assert_eq!(
        told(&trace),
        [
            ("queue", None, None),
            ("attempt", None, Some("refused")),
            ("attempt", None, Some("died")),
            ("prefill", Some(2), None),
            ("generation", Some(2), None),
            ("continuation", None, None),
            ("queue", Some(5), None),
            ("attempt", Some(5), None),
            ("prefill", Some(7), None),
            ("generation", Some(7), None),
        ]
    );
    for part in &trace.parts {
        let (begin, end) = (part.begin, part.end.unwrap());
        assert!(begin <= end && end <= Duration::from_millis(70), "{part:?}");
        if let Some(parent) = trace.parts.iter().find(|parent| parent.span == part.parent) {
            assert!(parent.begin <= begin && end <= parent.end.unwrap(), "{part:?} in {parent:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn an_answer_in_one_piece_is_told_by_the_servers_clock_and_never_longer_than_it_took() {
    let (mut trace, _) = begun(&[], 1.0);
    trace.start_attempt(peer);
    tokio::time::advance(Duration::from_millis(100)).await;
    trace.note_times(Some(Duration::from_secs(9)), Some(Duration::from_millis(60)));
    trace.note_times(Some(Duration::from_secs(9)), Some(Duration::from_millis(60)));
    trace.end(Duration::from_millis(100), None);
    let times: Vec<_> =
        trace.parts[1..].iter().map(|part| (part.begin.as_millis(), part.end.unwrap().as_millis())).collect();
    assert_eq!(times, [(0, 40), (40, 100)]);
}

#[test]
fn a_request_that_is_tried_for_ever_is_told_with_its_first_parts() {
    let (mut trace, _) = begun(&[], 1.0);
    for _ in 0..1000 {
        trace.note_waiting();
        trace.note_granted(Duration::from_millis(1));
        assert!(trace.start_attempt(peer).is_some());
    }
    assert_eq!(trace.parts.len(), MAX_PARTS);
}

#[test]
fn a_question_of_ours_belongs_to_the_continuation_and_not_to_the_server_that_is_gone() {
    let (mut trace, _) = begun(&[("traceparent", GIVEN)], 1.0);
    let own = trace.context.span.to_string();
    let beside = |trace: &mut GatewayTrace| trace.side_traceparent().unwrap().to_str().unwrap().to_owned();
    assert!(beside(&mut trace).contains(&own), "before that, to the request");
    trace.start_attempt(peer);
    trace.start_continuation("died");
    trace.start_attempt(peer);
    let parts = trace.parts.len();
    let value = beside(&mut trace);
    assert!(value.contains(&trace.parts[1].span.to_string()), "{value}");
    assert_eq!(trace.parts[1].kind, TracePartKind::Continuation);
    assert_eq!(trace.parts.len(), parts, "it is no part");
}
