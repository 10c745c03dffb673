//! Delivery of spans: however a collector behaves, no request is affected.

use std::time::Duration;

use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTracePartialSuccess, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use prost::Message as _;
use serde_json::json;
use warden_rig::warden::{CHAT, SOON, Setup};
use warden_rig::{Context as _, Outcome, Warden, ports, wait_until};

use super::collector::{Collector, Says};
use super::{TRACE, ask, check, told_to, traced};

async fn served(warden: &Warden, count: usize) -> Outcome {
    for n in 0..count {
        let answer = warden.http.post(CHAT, &ask(&format!("s{n}"), 2, n.is_multiple_of(2))).await?;
        assert!(answer.status.is_success() && answer.answer()?.is_whole(), "{}", answer.text());
    }
    Ok(())
}

async fn spans_told(warden: &Warden, outcome: &str) -> u64 {
    let name = format!("llama_warden_trace_spans_total{{outcome=\"{outcome}\"}}");
    let count = warden.metric(&name).await.ok().flatten().unwrap_or_default();
    format!("{count:.0}").parse().unwrap_or_default()
}

#[tokio::test]
async fn a_collector_that_is_away_or_hangs_or_is_none_reaches_no_request() -> Outcome {
    let hangs =
        Collector::start(vec![Says { after: Duration::from_secs(600), ..Says::status(200) }; 1000]).await?;
    let refuses =
        Collector::start(vec![Says { body: b"<html>".to_vec(), ..Says::status(404) }; 1000]).await?;
    let nobody = format!("http://127.0.0.1:{}", ports::free()?);
    let few = "internal.telemetry.queue = 4\ninternal.telemetry.batch = 8\ninternal.telemetry.timeout = \"100ms\"\n\
               internal.telemetry.retry_pause = \"20ms\"\ninternal.telemetry.retry_for = \"200ms\"\ninternal.telemetry.flush = \"100ms\"";
    for (url, fate) in [(hangs.url(), "undelivered"), (refuses.url(), "rejected"), (nobody, "undelivered")] {
        let mut warden = Setup::new()?.top(&told_to(&url, few)).fake("m", &json!({}), "")?.start().await?;
        warden.until_ready(1).await?;
        served(&warden, 40).await?;
        wait_until(&format!("spans are {fate}"), SOON, async || spans_told(&warden, fate).await > 0)
            .await
            .context(url.clone())?;
        // Every span is counted exactly once.
        if fate == "undelivered" {
            wait_until("spans found the queue full", SOON, async || {
                served(&warden, 20).await.is_ok() && spans_told(&warden, "queue_full").await > 0
            })
            .await
            .context(url.clone())?;
        }
        assert_eq!(spans_told(&warden, "exported").await, 0);
        warden.says("spans cannot be sent").await?;
        assert_eq!(warden.kid.output().matches("spans cannot be sent").count(), 1, "it is said once");
        assert_eq!(warden.terminate(SOON).await?, 0);
    }
    Ok(())
}

#[tokio::test]
async fn spans_are_sent_again_when_the_collector_wants_them_later() -> Outcome {
    let part = ExportTracePartialSuccess { rejected_spans: 1, error_message: "too old".to_owned() };
    let partial = ExportTraceServiceResponse { partial_success: Some(part) }.encode_to_vec();
    let says = vec![
        Says { retry_after: Some("0"), ..Says::status(429) },
        Says::status(503),
        Says { body: partial, ..Says::status(200) },
        Says { body: b"rubbish".to_vec(), ..Says::status(200) },
    ];
    let collector = Collector::start(says).await?;
    let top = told_to(&collector.url(), "internal.telemetry.retry_pause = \"20ms\"");
    let mut warden = Setup::new()?.top(&top).fake("m", &json!({}), "")?.start().await?;
    warden.until_ready(1).await?;
    served(&warden, 1).await?;
    let first = collector.until(1).await?;
    assert_eq!(collector.got().iter().map(|got| got.status).collect::<Vec<_>>(), [429, 503, 200]);
    assert!(collector.got().windows(2).all(|pair| pair[0].body == pair[1].body), "the same is sent again");
    warden.until_metrics(&["llama_warden_trace_spans_total{outcome=\"rejected\"} 1"]).await?;
    served(&warden, 1).await?;
    let all = collector.until(2).await?;
    let exported = format!("llama_warden_trace_spans_total{{outcome=\"exported\"}} {}", all.len() - 1);
    warden.until_metrics(&[exported]).await?;
    assert!(all.len() > first.len());
    warden.says("the collector takes spans again").await?;
    Ok(())
}

#[tokio::test]
async fn the_end_of_the_program_sends_what_is_left_with_the_headers_that_are_wanted() -> Outcome {
    let collector = Collector::start(Vec::new()).await?;
    let setup = Setup::new()?;
    let headers = setup.home.file("headers", "X-Scope: tenant\nAuthorization: Bearer collectors-own\n")?;
    let top = format!(
        "telemetry.endpoint = \"{}\"\ntelemetry.headers = '{}'\ninternal.telemetry.interval = \"1h\"",
        collector.url(),
        headers.display()
    );
    let mut setup = setup.top(&top).fake("m", &json!({}), "")?;
    let attributes = "deployment.environment=lab,service.name=other";
    setup.home.env.insert("OTEL_RESOURCE_ATTRIBUTES".into(), attributes.into());
    setup.home.env.insert("OTEL_SERVICE_NAME".into(), "mine".into());
    let mut warden = setup.start().await?;
    warden.until_ready(1).await?;
    served(&warden, 3).await?;
    assert!(collector.got().is_empty(), "they are gathered");
    assert_eq!(warden.terminate(SOON).await?, 0);
    let spans = collector.spans()?;
    check(&collector, &spans);
    assert_eq!(spans.iter().filter(|span| span.kind == SpanKind::Server).count(), 3);
    let resource = &spans[0].resource;
    assert_eq!(
        (resource["service.name"].as_str(), resource["deployment.environment"].as_str()),
        ("mine", "lab")
    );
    let got = &collector.got()[0];
    assert_eq!(got.headers["x-scope"].to_str()?, "tenant");
    assert_eq!(got.headers["authorization"].to_str()?, "Bearer collectors-own");
    assert!(!warden.kid.output().contains("collectors-own"), "{}", warden.kid.output());
    Ok(())
}

#[tokio::test]
async fn a_share_of_the_traces_is_recorded_and_the_variables_of_opentelemetry_are_enough() -> Outcome {
    let collector = Collector::start(Vec::new()).await?;
    let top = "telemetry.ratio = 0.0\ninternal.telemetry.interval = \"50ms\"";
    let mut setup = Setup::new()?.top(top).fake("m", &json!({}), "")?;
    setup.home.env.insert("OTEL_EXPORTER_OTLP_ENDPOINT".into(), collector.url().into());
    let warden = setup.start().await?;
    warden.until_ready(1).await?;
    served(&warden, 10).await?;
    // Only requests that the client's trace records are recorded here.
    let answer = warden.http.send(traced("01", &ask("a", 2, false))?).await?;
    assert!(answer.status.is_success());
    let answer = warden.http.send(traced("00", &ask("b", 2, false))?).await?;
    assert!(answer.status.is_success());
    let spans = collector.until(1).await?;
    warden
        .until_metrics(&[format!("llama_warden_trace_spans_total{{outcome=\"exported\"}} {}", spans.len())])
        .await?;
    assert!(spans.iter().all(|span| span.trace == TRACE), "{spans:?}");
    assert_eq!(spans.iter().filter(|span| span.kind == SpanKind::Server).count(), 1);
    Ok(())
}
