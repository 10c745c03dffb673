//! Turns the record of a request into the spans of its trace, named by OpenTelemetry's conventions for HTTP
//! and generative AI. Spans contain numbers and fixed names, never text of a client or of a model. Pure.

use std::time::Duration;

use http::{Method, Version};
use warden_gateway::{GatewayTrace, PartKind, RequestOutcome, RequestRecord, TracePart, TracePeer};
use warden_policies::ModelName;

use super::proto::{AttributeValue, KeyValue, OtlpEvent, OtlpSpan, OtlpStatus, STATUS_CODE_ERROR, SpanKind};

const PROVIDER: &str = "llama.cpp";

#[derive(Default)]
struct SpanAttributes(Vec<KeyValue>);

impl SpanAttributes {
    fn set(&mut self, key: &str, value: impl Into<AttributeValue>) {
        self.0.push(KeyValue::new(key, value));
    }

    fn set_if(&mut self, key: &str, value: Option<impl Into<AttributeValue>>) {
        if let Some(value) = value {
            self.set(key, value);
        }
    }
}

pub(crate) fn request_spans(record: &RequestRecord, trace: &GatewayTrace) -> Vec<OtlpSpan> {
    let mut spans = Vec::with_capacity(1 + trace.parts.len());
    spans.push(server_span(record, trace));
    spans.extend(trace.parts.iter().map(|part| child_span(record, trace, part)));
    spans
}

/// Returns `None` for routes without a value of `gen_ai.operation.name`.
fn operation_name(route: &str) -> Option<&'static str> {
    match route {
        "chat" | "messages" | "responses" => Some("chat"),
        "completions" | "infill" => Some("text_completion"),
        "embeddings" => Some("embeddings"),
        _ => None,
    }
}

/// Returns an error only for faults of the gateway or the backend: not if the client disconnects, nor for a
/// refusal with a status below 500.
fn error_of(record: &RequestRecord) -> Option<String> {
    match record.outcome {
        RequestOutcome::ClientGone => None,
        RequestOutcome::Ok | RequestOutcome::Rejected(_) | RequestOutcome::Denied(_)
            if record.answer_status() < 500 =>
        {
            None
        }
        RequestOutcome::Ok => Some(record.answer_status().to_string()),
        outcome => Some(outcome.as_str().to_owned()),
    }
}

fn span(trace: &GatewayTrace, begin: Duration, end: Duration) -> OtlpSpan {
    let nanos = |since: Duration| {
        trace.began_unix_nanos.saturating_add(u64::try_from(since.as_nanos()).unwrap_or(u64::MAX))
    };
    OtlpSpan {
        trace_id: trace.context.trace.bytes().to_vec(),
        trace_state: trace.state.clone().unwrap_or_default(),
        start_time_unix_nano: nanos(begin),
        end_time_unix_nano: nanos(end),
        flags: u32::from(trace.context.flags()),
        ..OtlpSpan::default()
    }
}

fn span_status(error: Option<&str>) -> Option<OtlpStatus> {
    error.map(|message| OtlpStatus { message: message.to_owned(), code: STATUS_CODE_ERROR })
}

fn server_span(record: &RequestRecord, trace: &GatewayTrace) -> OtlpSpan {
    let mut all = SpanAttributes::default();
    let method = method_name(&record.method);
    all.set("http.request.method", method);
    all.set("url.scheme", if trace.tls { "https" } else { "http" });
    all.set_if("http.route", trace.path);
    all.set_if("url.path", trace.path);
    all.set_if("http.response.status_code", (record.status > 0).then_some(u64::from(record.status)));
    all.set("network.protocol.version", version_name(record.protocol));
    all.set("client.address", &*record.peer.to_string());
    add_common(&mut all, record);
    add_tokens(&mut all, record, trace);
    all.set("llama_warden.request.id", &*record.request_id);
    all.set("llama_warden.route", record.route);
    all.set("llama_warden.outcome", record.outcome.as_str());
    all.set_if("llama_warden.key", record.key.as_deref());
    all.set("llama_warden.stream", record.stream);
    all.set_if("llama_warden.retries", (record.retries > 0).then_some(u64::from(record.retries)));
    all.set_if("llama_warden.continued", record.continued.then_some(true));
    let error = error_of(record);
    all.set_if("error.type", error.as_deref());
    let name = trace.path.map_or_else(|| method.to_owned(), |path| format!("{method} {path}"));
    let own = span(trace, Duration::ZERO, record.total);
    let first = record.first_token.map(|first| OtlpEvent {
        time_unix_nano: span(trace, first, first).start_time_unix_nano,
        name: "first_token".to_owned(),
    });
    OtlpSpan {
        span_id: trace.context.span.bytes().to_vec(),
        parent_span_id: trace.context.parent.map(|parent| parent.bytes().to_vec()).unwrap_or_default(),
        name,
        kind: SpanKind::Server.into(),
        attributes: all.0,
        events: first.into_iter().collect(),
        status: span_status(error.as_deref()),
        ..own
    }
}

fn child_span(record: &RequestRecord, trace: &GatewayTrace, part: &TracePart) -> OtlpSpan {
    let mut all = SpanAttributes::default();
    let (name, kind) = match &part.kind {
        PartKind::Queue => ("queue".to_owned(), SpanKind::Internal),
        PartKind::Prefill => ("prefill".to_owned(), SpanKind::Internal),
        PartKind::Generation => ("generation".to_owned(), SpanKind::Internal),
        PartKind::Continuation => ("continuation".to_owned(), SpanKind::Internal),
        PartKind::Attempt(peer) => {
            all.set("http.request.method", method_name(&record.method));
            add_attempt(&mut all, peer);
            add_common(&mut all, record);
            let model = record.model.as_ref().map_or("", |model| model.as_str());
            let name = match operation_name(record.route) {
                Some(operation) if !model.is_empty() => format!("{operation} {model}"),
                Some(operation) => operation.to_owned(),
                None => format!("{} {}", method_name(&record.method), trace.path.unwrap_or(record.route)),
            };
            (name, SpanKind::Client)
        }
    };
    // The request's own span has the tokens of all attempts.
    all.set_if("error.type", part.failed);
    let own = span(trace, part.begin, part.end.unwrap_or(record.total));
    OtlpSpan {
        span_id: part.span.bytes().to_vec(),
        parent_span_id: part.parent.bytes().to_vec(),
        name,
        kind: kind.into(),
        attributes: all.0,
        status: span_status(part.failed.filter(|failed| *failed != RequestOutcome::ClientGone.as_str())),
        ..own
    }
}

/// Adds attributes that the request and each attempt share.
fn add_common(all: &mut SpanAttributes, record: &RequestRecord) {
    if let Some(operation) = operation_name(record.route) {
        all.set("gen_ai.operation.name", operation);
        all.set("gen_ai.provider.name", PROVIDER);
    }
    all.set_if("gen_ai.request.model", record.model.as_ref().map(ModelName::as_str));
}

fn add_tokens(all: &mut SpanAttributes, record: &RequestRecord, trace: &GatewayTrace) {
    let evaluated = record.work.prompt_tokens;
    let prompt = trace.prompt.unwrap_or(evaluated).max(evaluated);
    let some = |count: u64| (count > 0).then_some(count);
    all.set_if("gen_ai.usage.input_tokens", some(prompt));
    all.set_if("gen_ai.usage.cache_read.input_tokens", some(prompt - evaluated));
    all.set_if("gen_ai.usage.output_tokens", some(record.work.output_tokens));
}

fn add_attempt(all: &mut SpanAttributes, peer: &TracePeer) {
    all.set("server.address", &*peer.address);
    all.set_if("server.port", peer.port.map(u64::from));
    all.set("network.transport", if peer.port.is_some() { "tcp" } else { "unix" });
    all.set("llama_warden.generation", peer.generation.0);
    all.set_if("llama_warden.canary", peer.canary.then_some(true));
}

/// Clients may send any method, so unknown methods share one name.
fn method_name(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::HEAD => "HEAD",
        Method::POST => "POST",
        Method::PUT => "PUT",
        Method::DELETE => "DELETE",
        Method::OPTIONS => "OPTIONS",
        Method::PATCH => "PATCH",
        Method::TRACE => "TRACE",
        Method::CONNECT => "CONNECT",
        _ => "_OTHER",
    }
}

fn version_name(version: Version) -> &'static str {
    match version {
        Version::HTTP_10 => "1.0",
        _ => "1.1",
    }
}
