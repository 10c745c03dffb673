//! Traces: spans that an OpenTelemetry collector gets, decoded with the protocol's generated types. They
//! contain no text, and no behaviour of a collector affects a request.

mod collector;
mod delivery;

use std::collections::BTreeMap;

use bytes::Bytes;
use http_body_util::Full;
use hyper::Request;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use rustix::process::Signal;
use serde_json::{Value, json};
use warden_rig::http::json_request;
use warden_rig::warden::{CHAT, SOON, Setup, chat};
use warden_rig::{Context as _, Outcome, Trouble, Warden, wait_until};

use self::collector::{Collector, Span};

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const PARENT: &str = "b7ad6b7169203331";

/// Part of each prompt, which no span may contain.
const SECRET: &str = "whispered-words";

const GOING_ON: &str =
    "on_death = \"continue\"\nlifecycle.backoff_first = \"20ms\"\nlifecycle.backoff_cap = \"50ms\"\n";

fn told_to(url: &str, more: &str) -> String {
    format!(
        "telemetry.endpoint = \"{url}\"\ninternal.telemetry.interval = \"50ms\"\ninternal.lifecycle.look_interval = \"50ms\"\n{more}"
    )
}

async fn started(collector: &Collector, script: &Value, more: &str) -> Result<Warden, Trouble> {
    let warden = Setup::new()?.top(&told_to(&collector.url(), "")).fake("m", script, more)?.start().await?;
    warden.until_ready(1).await?;
    Ok(warden)
}

fn ask(id: &str, tokens: u64, stream: bool) -> Value {
    chat(id, "m", SECRET, tokens, stream)
}

/// A chat request within a client's trace.
fn traced(flags: &str, body: &Value) -> Result<Request<Full<Bytes>>, Trouble> {
    let mut request = json_request(CHAT, body)?;
    let headers = request.headers_mut();
    headers.insert("traceparent", format!("00-{TRACE}-{PARENT}-{flags}").parse()?);
    headers.insert("tracestate", "vendor=value".parse()?);
    headers.insert("authorization", "Bearer sk-very-secret-indeed".parse()?);
    Ok(request)
}

fn server<'a>(spans: &'a [Span], trace: &str) -> Result<&'a Span, Trouble> {
    let found = spans.iter().find(|span| span.trace == trace && span.kind == SpanKind::Server);
    found.context(format!("no request in trace {trace}: {spans:?}"))
}

fn below<'a>(spans: &'a [Span], parent: &Span, name: &str) -> Vec<&'a Span> {
    spans.iter().filter(|span| span.parent == parent.id && span.name == name).collect()
}

/// Checks that each span lies within its parent, and that nothing sent contains text or a key.
fn check(collector: &Collector, spans: &[Span]) {
    for span in spans {
        assert!(span.begin <= span.end, "{span:?}");
        if span.kind == SpanKind::Server {
            continue;
        }
        let parent = spans.iter().find(|parent| parent.id == span.parent && parent.trace == span.trace);
        let is_within = parent.is_some_and(|parent| parent.begin <= span.begin && span.end <= parent.end);
        assert!(is_within, "{span:?} is not within {parent:?}");
    }
    let mut ids: Vec<&str> = spans.iter().map(|span| span.id.as_str()).collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), spans.len(), "two spans have one number");
    for got in collector.got() {
        assert_eq!(got.path, "/v1/traces");
        assert_eq!(got.headers["content-type"], "application/x-protobuf");
        for word in [SECRET, "very-secret", "amber", "quartz", "zephyr", "willow"] {
            let is_there = got.body.windows(word.len()).any(|window| window == word.as_bytes());
            assert!(!is_there, "`{word}` was sent to the collector");
        }
    }
}

#[tokio::test]
async fn a_request_is_a_span_with_its_parts_in_the_trace_that_it_came_with() -> Outcome {
    let collector = Collector::start(Vec::new()).await?;
    let warden = started(&collector, &json!({"ms_per_token": 5, "prompt_ms": 30}), "").await?;
    for stream in [true, false] {
        let answer = warden.http.send(traced("01", &ask("a", 6, stream))?).await?;
        assert!(answer.status.is_success() && answer.answer()?.is_whole(), "{}", answer.text());
    }
    let spans = collector.until(2).await?;
    check(&collector, &spans);
    for (own, stream) in spans.iter().filter(|span| span.kind == SpanKind::Server).zip([true, false]) {
        assert_eq!(
            (own.trace.as_str(), own.parent.as_str(), own.state.as_str()),
            (TRACE, PARENT, "vendor=value")
        );
        assert_eq!(own.name, "POST /v1/chat/completions");
        for (name, value) in [
            ("http.request.method", "POST"),
            ("http.route", CHAT),
            ("http.response.status_code", "200"),
            ("url.scheme", "http"),
            ("network.protocol.version", "1.1"),
            ("client.address", "127.0.0.1"),
            ("gen_ai.operation.name", "chat"),
            ("gen_ai.provider.name", "llama.cpp"),
            ("gen_ai.request.model", "m"),
            ("gen_ai.usage.output_tokens", "6"),
            ("llama_warden.outcome", "ok"),
        ] {
            assert_eq!(own.attribute(name), value, "{name} of {own:?}");
        }
        assert!(
            own.attribute("gen_ai.usage.input_tokens").parse::<u64>().is_ok_and(|tokens| tokens > 0),
            "{own:?}"
        );
        assert_eq!(own.attribute("llama_warden.stream"), stream.to_string());
        assert_eq!(own.events == ["first_token"], stream, "{own:?}");
        assert!(!own.is_error);
        assert_eq!(own.resource["service.name"], "llama-warden");
        let attempts = below(&spans, own, "chat m");
        let [attempt] = attempts[..] else { panic!("{attempts:?}") };
        assert_eq!((attempt.kind, attempt.attribute("network.transport")), (SpanKind::Client, "unix"));
        assert!(attempt.attribute("server.address").starts_with('/'), "{attempt:?}");
        for part in ["prefill", "generation"] {
            let found = below(&spans, attempt, part);
            assert_eq!(found.len(), 1, "{part} of {attempt:?}: {spans:?}");
            assert!(found[0].end - found[0].begin >= 20_000_000, "{:?}", found[0]);
        }
    }
    warden.until_metrics(&["llama_warden_trace_spans_total{outcome=\"exported\"} 8"]).await?;
    Ok(())
}

async fn arrived(
    warden: &Warden,
    fields: &[(&'static str, String)],
) -> Result<BTreeMap<String, Vec<String>>, Trouble> {
    let mut request = Request::get("/fake/echo?model=m");
    for (name, value) in fields {
        request = request.header(*name, value);
    }
    let echo = warden.http.send(request.body(Full::default())?).await?.json()?;
    let mut all: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for field in echo["headers"].as_array().context("no headers")? {
        let text = |at: usize| field[at].as_str().unwrap_or_default().to_owned();
        all.entry(text(0).to_lowercase()).or_default().push(text(1));
    }
    Ok(all)
}

#[tokio::test]
async fn a_context_goes_on_to_the_server_as_the_standard_says() -> Outcome {
    let collector = Collector::start(Vec::new()).await?;
    let warden = started(&collector, &json!({}), "").await?;
    let parent = |value: &str| ("traceparent", value.to_owned());
    let sound = format!("00-{TRACE}-{PARENT}-01");
    let got = arrived(&warden, &[parent(&sound), ("tracestate", "a=1".to_owned())]).await?;
    let [value] = &got["traceparent"][..] else { panic!("{got:?}") };
    assert!(
        value.starts_with(&format!("00-{TRACE}-")) && value.ends_with("-01") && !value.contains(PARENT),
        "{value}"
    );
    assert_eq!(got["tracestate"], ["a=1"]);
    let spans = collector.until(1).await?;
    let own = server(&spans, TRACE)?;
    let attempt = spans.iter().find(|span| span.parent == own.id).context("no attempt")?;
    assert!(value.contains(&attempt.id), "{value} is no part of {attempt:?}");

    // The parent is not recorded, so the request is not either, and its field says so.
    let got = arrived(&warden, &[parent(&sound.replace("-01", "-00"))]).await?;
    assert!(got["traceparent"][0].ends_with("-00"), "{got:?}");
    // An invalid parent begins a new trace and drops the old state.
    for bad in ["00-zz-zz-01", &format!("{sound}-more"), &sound.to_uppercase()] {
        let got = arrived(&warden, &[parent(bad), ("tracestate", "a=1".to_owned())]).await?;
        assert!(!got["traceparent"][0].contains(TRACE) && !got.contains_key("tracestate"), "{got:?}");
    }
    let got = arrived(&warden, &[parent(&sound), parent(&sound)]).await?;
    assert!(got["traceparent"].len() == 1 && !got["traceparent"][0].contains(TRACE), "{got:?}");
    let spans = collector.until(5).await?;
    assert_eq!(spans.iter().filter(|span| span.kind == SpanKind::Server).count(), 5, "{spans:?}");

    // Without an exporter, clients' fields pass unchanged.
    let plain = Setup::new()?.fake("m", &json!({}), "")?.start().await?;
    plain.until_ready(1).await?;
    let got = arrived(&plain, &[parent("anything"), ("tracestate", "at all".to_owned())]).await?;
    assert_eq!(
        (&got["traceparent"][..], &got["tracestate"][..]),
        (&["anything".to_owned()][..], &["at all".to_owned()][..])
    );
    Ok(())
}

#[tokio::test]
async fn waiting_retrying_and_leaving_are_told() -> Outcome {
    let collector = Collector::start(Vec::new()).await?;
    let setup = Setup::new()?.top(&told_to(&collector.url(), ""));
    let once = setup.home.path().join("once");
    let fault = json!({"do": "crash", "after_tokens": 0, "signal": 9, "once": once, "body_has": "dies"});
    let script = json!({"ms_per_token": 5, "faults": [fault]});
    let more = format!("{GOING_ON}args = [\"-np\", \"1\"]\n");
    let warden = setup.fake("m", &script, &more)?.start().await?;
    warden.until_ready(1).await?;

    // The second request waits for the first, whose client leaves.
    let mut first = warden.http.stream(CHAT, &ask("leaves", 100_000, true)).await?;
    first.event().await?;
    let waits = async {
        wait_until("it waits", SOON, async || warden.waiting("m").await.is_ok_and(|waiting| waiting == 1))
            .await?;
        drop(first);
        Ok::<_, Trouble>(())
    };
    let waiting = ask("waits", 3, false);
    let (answer, left) = tokio::join!(warden.http.post(CHAT, &waiting), waits);
    left?;
    assert!(answer?.status.is_success());
    let spans = collector.until(2).await?;
    check(&collector, &spans);
    let left = spans
        .iter()
        .find(|span| span.attribute("llama_warden.outcome") == "client_gone")
        .context("nobody left")?;
    assert!(!left.is_error && !below(&spans, left, "chat m").is_empty(), "{left:?}");
    let waited =
        spans.iter().find(|span| span.attribute("llama_warden.outcome") == "ok").context("nobody waited")?;
    assert_eq!(below(&spans, waited, "queue").len(), 1, "{spans:?}");

    // The first server dies before its answer, so the trace has both attempts.
    let answer = warden.http.post(CHAT, &chat("dies", "m", &format!("{SECRET} dies"), 4, false)).await?;
    assert_eq!(answer.header("x-warden-continued"), "1", "{}", answer.text());
    let spans = collector.until(3).await?;
    check(&collector, &spans);
    let own = spans
        .iter()
        .find(|span| span.attribute("llama_warden.continued") == "true")
        .context("none went on")?;
    let attempts = below(&spans, own, "chat m");
    assert_eq!(
        attempts.iter().map(|attempt| attempt.is_error).collect::<Vec<_>>(),
        [true, false],
        "{attempts:?}"
    );
    assert_ne!(
        attempts[0].attribute("llama_warden.generation"),
        attempts[1].attribute("llama_warden.generation")
    );
    Ok(())
}

#[tokio::test]
async fn a_stream_that_goes_on_by_another_process_is_one_trace() -> Outcome {
    let collector = Collector::start(Vec::new()).await?;
    let warden = started(&collector, &json!({"ms_per_token": 10}), GOING_ON).await?;
    let mut flow = warden.http.open(traced("01", &ask("on", 40, true))?).await?;
    for _ in 0..4 {
        flow.event().await?.context("it has ended")?;
    }
    for process in warden.backends() {
        process.signal(Signal::KILL);
    }
    let (answer, _) = flow.rest().await;
    assert!(answer.error.is_none() && answer.done, "{answer:?}");
    let spans = collector.until(1).await?;
    check(&collector, &spans);
    let own = server(&spans, TRACE)?;
    let [first] = below(&spans, own, "chat m")[..] else { panic!("{spans:?}") };
    assert!(first.is_error && below(&spans, first, "generation").len() == 1, "{spans:?}");
    let [rest] = below(&spans, own, "continuation")[..] else { panic!("{spans:?}") };
    let attempts = below(&spans, rest, "chat m");
    let last = attempts.last().context("nobody went on")?;
    assert!(!last.is_error && below(&spans, last, "generation").len() == 1, "{spans:?}");
    assert_eq!((own.attribute("llama_warden.continued"), own.end), ("true", rest.end));
    Ok(())
}
