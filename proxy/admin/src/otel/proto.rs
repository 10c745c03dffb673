//! Messages of OTLP 1.x (`opentelemetry/proto/trace/v1/trace.proto` and its imports), with the protocol's
//! field numbers. Tests decode these messages with types generated from the protocol's files.

use prost::{Message, Oneof};

/// `ExportTraceServiceRequest`
#[derive(Clone, PartialEq, Message)]
pub(crate) struct ExportRequest {
    #[prost(message, repeated, tag = "1")]
    pub(crate) resource_spans: Vec<ResourceSpans>,
}

/// `ExportTraceServiceResponse`
#[derive(Clone, PartialEq, Message)]
pub(crate) struct ExportResponse {
    #[prost(message, optional, tag = "1")]
    pub(crate) partial_success: Option<PartialSuccess>,
}

/// `ExportTracePartialSuccess`
#[derive(Clone, PartialEq, Message)]
pub(crate) struct PartialSuccess {
    #[prost(int64, tag = "1")]
    pub(crate) rejected_spans: i64,
    #[prost(string, tag = "2")]
    pub(crate) error_message: String,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ResourceSpans {
    #[prost(message, optional, tag = "1")]
    pub(crate) resource: Option<OtlpResource>,
    #[prost(message, repeated, tag = "2")]
    pub(crate) scope_spans: Vec<ScopeSpans>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct OtlpResource {
    #[prost(message, repeated, tag = "1")]
    pub(crate) attributes: Vec<KeyValue>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct ScopeSpans {
    #[prost(message, optional, tag = "1")]
    pub(crate) scope: Option<OtlpScope>,
    #[prost(message, repeated, tag = "2")]
    pub(crate) spans: Vec<OtlpSpan>,
}

/// `InstrumentationScope`
#[derive(Clone, PartialEq, Message)]
pub(crate) struct OtlpScope {
    #[prost(string, tag = "1")]
    pub(crate) name: String,
    #[prost(string, tag = "2")]
    pub(crate) version: String,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct OtlpSpan {
    #[prost(bytes = "vec", tag = "1")]
    pub(crate) trace_id: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(crate) span_id: Vec<u8>,
    #[prost(string, tag = "3")]
    pub(crate) trace_state: String,
    /// Empty if the trace begins with this span.
    #[prost(bytes = "vec", tag = "4")]
    pub(crate) parent_span_id: Vec<u8>,
    #[prost(string, tag = "5")]
    pub(crate) name: String,
    #[prost(enumeration = "SpanKind", tag = "6")]
    pub(crate) kind: i32,
    #[prost(fixed64, tag = "7")]
    pub(crate) start_time_unix_nano: u64,
    #[prost(fixed64, tag = "8")]
    pub(crate) end_time_unix_nano: u64,
    #[prost(message, repeated, tag = "9")]
    pub(crate) attributes: Vec<KeyValue>,
    #[prost(message, repeated, tag = "11")]
    pub(crate) events: Vec<OtlpEvent>,
    #[prost(message, optional, tag = "15")]
    pub(crate) status: Option<OtlpStatus>,
    #[prost(fixed32, tag = "16")]
    pub(crate) flags: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub(crate) enum SpanKind {
    Unspecified = 0,
    Internal = 1,
    Server = 2,
    Client = 3,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct OtlpEvent {
    #[prost(fixed64, tag = "1")]
    pub(crate) time_unix_nano: u64,
    #[prost(string, tag = "2")]
    pub(crate) name: String,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct OtlpStatus {
    #[prost(string, tag = "2")]
    pub(crate) message: String,
    #[prost(int32, tag = "3")]
    pub(crate) code: i32,
}

pub(crate) const STATUS_CODE_ERROR: i32 = 2;

#[derive(Clone, PartialEq, Message)]
pub(crate) struct KeyValue {
    #[prost(string, tag = "1")]
    pub(crate) key: String,
    #[prost(message, optional, tag = "2")]
    pub(crate) value: Option<AnyValue>,
}

#[derive(Clone, PartialEq, Message)]
pub(crate) struct AnyValue {
    #[prost(oneof = "AttributeValue", tags = "1, 2, 3")]
    pub(crate) value: Option<AttributeValue>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(crate) enum AttributeValue {
    #[prost(string, tag = "1")]
    Text(String),
    #[prost(bool, tag = "2")]
    Is(bool),
    #[prost(int64, tag = "3")]
    Number(i64),
}

impl From<&str> for AttributeValue {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<bool> for AttributeValue {
    fn from(is: bool) -> Self {
        Self::Is(is)
    }
}

impl From<u64> for AttributeValue {
    fn from(number: u64) -> Self {
        Self::Number(i64::try_from(number).unwrap_or(i64::MAX))
    }
}

impl KeyValue {
    pub(crate) fn new(key: &str, value: impl Into<AttributeValue>) -> Self {
        Self { key: key.to_owned(), value: Some(AnyValue { value: Some(value.into()) }) }
    }
}
