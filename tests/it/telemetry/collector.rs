//! An OpenTelemetry collector for tests: decodes requests with the protocol's generated types, and answers as
//! configured.

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::header::HeaderMap;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1 as wire;
use prost::Message as _;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use warden_rig::warden::SOON;
use warden_rig::{Context as _, Trouble, wait_for};

#[derive(Clone, Debug)]
pub(super) struct Says {
    pub(super) status: u16,
    pub(super) retry_after: Option<&'static str>,
    pub(super) body: Vec<u8>,
    pub(super) after: Duration,
}

impl Says {
    pub(super) fn status(status: u16) -> Self {
        Self { status, retry_after: None, body: Vec::new(), after: Duration::ZERO }
    }
}

#[derive(Clone, Debug)]
pub(super) struct Got {
    pub(super) path: String,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
    pub(super) status: u16,
}

/// A span, as far as tests need it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Span {
    pub(super) trace: String,
    pub(super) id: String,
    pub(super) parent: String,
    pub(super) name: String,
    pub(super) kind: wire::span::SpanKind,
    pub(super) begin: u64,
    pub(super) end: u64,
    pub(super) attributes: BTreeMap<String, String>,
    pub(super) events: Vec<String>,
    pub(super) is_error: bool,
    pub(super) state: String,
    pub(super) resource: BTreeMap<String, String>,
}

impl Span {
    pub(super) fn attribute(&self, name: &str) -> &str {
        self.attributes.get(name).map_or("", String::as_str)
    }
}

#[derive(Debug, Default)]
struct Book {
    got: Vec<Got>,
    /// Next answers; then 200.
    says: VecDeque<Says>,
}

#[derive(Debug)]
pub(super) struct Collector {
    address: SocketAddr,
    book: Arc<Mutex<Book>>,
    // Aborted on drop.
    _tasks: JoinSet<()>,
}

fn lock(book: &Mutex<Book>) -> MutexGuard<'_, Book> {
    book.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn answer(
    book: Arc<Mutex<Book>>,
    request: Request<Incoming>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let (parts, body) = request.into_parts();
    let body = body.collect().await.map(http_body_util::Collected::to_bytes).unwrap_or_default();
    let says = {
        let mut book = lock(&book);
        let says = book.says.pop_front().unwrap_or_else(|| Says::status(200));
        let path = parts.uri.path().to_owned();
        book.got.push(Got { path, headers: parts.headers, body, status: says.status });
        says
    };
    tokio::time::sleep(says.after).await;
    let mut response = Response::builder().status(says.status);
    if let Some(after) = says.retry_after {
        response = response.header("retry-after", after);
    }
    Ok(response.body(Full::from(says.body)).unwrap_or_default())
}

impl Collector {
    pub(super) async fn start(says: Vec<Says>) -> Result<Self, Trouble> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let (address, book) = (listener.local_addr()?, Arc::new(Mutex::new(Book::default())));
        lock(&book).says = says.into();
        let (mut tasks, shared) = (JoinSet::new(), Arc::clone(&book));
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let book = Arc::clone(&shared);
                let service = service_fn(move |request| answer(Arc::clone(&book), request));
                connections.spawn(async move {
                    let served = hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service);
                    drop(served.await);
                });
            }
        });
        Ok(Self { address, book, _tasks: tasks })
    }

    pub(super) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(super) fn got(&self) -> Vec<Got> {
        lock(&self.book).got.clone()
    }

    pub(super) fn spans(&self) -> Result<Vec<Span>, Trouble> {
        let mut all = Vec::new();
        for got in self.got().into_iter().filter(|got| got.status == 200) {
            let request = ExportTraceServiceRequest::decode(got.body).context("what came is no OTLP")?;
            for of_resource in request.resource_spans {
                let resource = attributes(&of_resource.resource.unwrap_or_default().attributes);
                for of_scope in of_resource.scope_spans {
                    assert_eq!(of_scope.scope.unwrap_or_default().name, "llama-warden");
                    all.extend(of_scope.spans.into_iter().map(|span| read(span, &resource)));
                }
            }
        }
        Ok(all)
    }

    /// Waits for complete spans of this number of requests; returns them.
    pub(super) async fn until(&self, count: usize) -> Result<Vec<Span>, Trouble> {
        wait_for(&format!("spans of {count} requests"), SOON, async || {
            let spans = self.spans().ok()?;
            let served = spans.iter().filter(|span| span.kind == wire::span::SpanKind::Server).count();
            (served >= count).then_some(spans)
        })
        .await
        .context(format!("{:?}", self.spans()))
    }
}

fn attributes(all: &[KeyValue]) -> BTreeMap<String, String> {
    let text = |one: &KeyValue| match one.value.as_ref().and_then(|value| value.value.as_ref()) {
        Some(Value::StringValue(text)) => text.clone(),
        Some(Value::IntValue(number)) => number.to_string(),
        Some(Value::BoolValue(is)) => is.to_string(),
        other => format!("{other:?}"),
    };
    all.iter().map(|one| (one.key.clone(), text(one))).collect()
}

fn read(span: wire::Span, resource: &BTreeMap<String, String>) -> Span {
    assert_eq!((span.trace_id.len(), span.span_id.len()), (16, 8), "{span:?}");
    assert!([0, 8].contains(&span.parent_span_id.len()), "{span:?}");
    Span {
        trace: hex::encode(&span.trace_id),
        id: hex::encode(&span.span_id),
        parent: hex::encode(&span.parent_span_id),
        kind: span.kind(),
        begin: span.start_time_unix_nano,
        end: span.end_time_unix_nano,
        attributes: attributes(&span.attributes),
        events: span.events.iter().map(|event| event.name.clone()).collect(),
        is_error: span.status.is_some_and(|status| status.code() == wire::status::StatusCode::Error),
        state: span.trace_state,
        name: span.name,
        resource: resource.clone(),
    }
}
