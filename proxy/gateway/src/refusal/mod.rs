//! Every error that a client can get from the gateway, and its format. No other module maps errors to HTTP.
//!
//! llama-server's format: `{"error":{"code":503,"message":"...","type":"unavailable_error"}}`. `param` names
//! a faulty parameter, `details` has further data, and `source` distinguishes the gateway from the model.
//! Anthropic's routes get Anthropic's format. `x-warden-executed` says whether a client may safely retry. A
//! stream that cannot continue ends with an error event in the format of its route.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use http::header::{
    ACCEPT_ENCODING, ALLOW, CONTENT_TYPE, HeaderName, HeaderValue, RETRY_AFTER, WWW_AUTHENTICATE,
};
use serde_json::{Value, json};
use warden_policies::quarantine::RequestFingerprint;
use warden_policies::{ModelName, RateLimit};
use warden_supervisor::{BackendFailure, LeaseDenied, ResolveError};

use self::spelling::{anthropic_error, anthropic_kind, openai_error};
use crate::observe::RequestOutcome;
use crate::protocol::{EXECUTED, WireError};

pub(crate) use self::fault::{ACCEPTED_CODINGS, BodyError, MAX_DECODED_RATIO, UnreadableBody};
pub(crate) use self::spelling::{
    ErrorDialect, HeadLimits, StreamEnd, answer_error_event, not_tls_answer, stream_error, unreadable_head,
};

mod fault;
mod spelling;

/// Wait in milliseconds, which OpenAI's clients prefer to the whole seconds of `Retry-After`.
const RETRY_AFTER_MS: HeaderName = HeaderName::from_static("retry-after-ms");

/// Header that clients of `OpenAI` and Anthropic check before they retry.
const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");

pub(crate) const CANCELLED: &str =
    "the operator of this server has cancelled this request; ask before you send it again";

/// Error type and code of a cancelled request, for programs.
const CANCELLED_KIND: &str = "cancelled_error";
const CANCELLED_CODE: &str = "request_cancelled";

/// Returns 499, which is in use for cancelled calls. Clients do not retry after a 499, but do after a 503,
/// which would undo the cancellation within a second.
fn cancelled_status() -> StatusCode {
    StatusCode::from_u16(499).unwrap_or(StatusCode::GONE)
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum RequestRefusal {
    #[error("the request needs exactly one Host header")]
    Host,
    #[error(
        "this server is not reached by the name `{0}`; if it is meant to be, add it to `server.names`, \
         else use its address"
    )]
    Name(String),
    #[error(
        "a web page of an origin that may not call has sent this request; if it is meant to, add its \
         origin to `server.cors`"
    )]
    Origin,
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error(
        "the request head is larger than {limit} bytes (`server.header_bytes`); send fewer or smaller headers"
    )]
    HeadTooLarge { limit: usize },
    #[error(
        "the request target is too long: llama-server takes {limit} bytes in the first line of a request; \
         send parameters in the body"
    )]
    TargetTooLong { limit: usize },
    #[error(
        "one header of the request is too long: llama-server takes {limit} bytes in a line; send a shorter one"
    )]
    LineTooLong { limit: usize },
    #[error(
        "the request has too many headers: llama-server takes {limit}, of which up to 6 are added on the \
         way; send fewer"
    )]
    TooManyFields { limit: usize },
    #[error("the method {0} is not served")]
    Method(http::Method),
    #[error("the request body is larger than {limit} bytes, the limit `{key}`")]
    BodyTooLarge { limit: u64, key: &'static str },
    #[error(
        "the request body did not arrive in time: nothing came for longer than `server.body_timeout`, or \
         less than `server.body_rate`, or all of it took longer than `server.body_deadline`"
    )]
    BodyTooSlow,
    #[error("the request body broke off")]
    BodyBroken,
    #[error(
        "the request body is not what its `Content-Encoding` says, or breaks off; send it plain, or as \
         {ACCEPTED_CODINGS}"
    )]
    BodyUndecodable,
    #[error("the request body decodes to more than {MAX_DECODED_RATIO} times its size; send it plain")]
    BodyTooDense,
    #[error(
        "the `Content-Encoding` of the request is not served; send the body plain, or as one of {ACCEPTED_CODINGS}"
    )]
    Coding,
    #[error(
        "too many large requests are being received at the moment (`server.buffered_bytes`); send again soon"
    )]
    Busy,
    #[error(
        "no `model` was found in the first {limit} bytes of the body (`server.model_scan_bytes`): put \
         `model` first, or name the model in the query as `?model=NAME`"
    )]
    ModelTooFar { limit: usize },
    #[error(
        "the body is not a JSON object, so no model could be read from it; name one in the query as \
         `?model=NAME` ({})", list_models(.known)
    )]
    NotJson { known: Vec<String> },
    #[error("`model` must be a string ({})", list_models(.known))]
    ModelNotText { known: Vec<String> },
    #[error("the body names `model` twice, and it is not clear which one is meant")]
    TwoModels,
    #[error(
        "model `{model}` has rules for requests (`models.\"{model}\".request`), which cannot be applied: \
         {}", unreadable_message(*.why)
    )]
    Unreadable { model: ModelName, why: UnreadableBody },
    #[error("File Not Found: this is no route of llama-server, and the request names no model to send it to")]
    NoRoute,
    #[error(
        "model `{model}` is served by a remote endpoint: only routes that compute an answer go there, and \
         not under `/upstream/`"
    )]
    NotThere { model: ModelName },
    #[error(
        "model `{model}`: its endpoint wants a key, or another one than its `key_file` has (it answered 401)"
    )]
    KeyThere { model: ModelName },
    #[error(
        "File Not Found: this llama-server was built without its web page; `llama-warden build --plan` \
         says how to build one \
         that has it"
    )]
    NoPage,
    /// Message as llama-server writes it.
    #[error("This server does not support slots action. Start it with `--slot-save-path`")]
    SlotFiles,
    #[error("File Not Found: all routes are under `{0}` (`server.api_prefix`)")]
    NoPrefix(String),
    #[error("no model name follows `/upstream/` ({})", list_models(.known))]
    Upstream { known: Vec<String> },
    #[error(transparent)]
    Resolve(#[from] ResolveError),
    #[error(
        "model `{model}` is not loaded, and this request does not load it: send one that computes, or \
         `POST /models/load`"
    )]
    NotLoaded { model: ModelName },
    /// Message as llama-server's router writes it.
    #[error("model is already running")]
    AlreadyLoaded { model: ModelName },
    /// Message as llama-server's router writes it.
    #[error("model is not running")]
    NotRunning { model: ModelName },
    #[error("model `{model}` is pinned: only an operator unloads it (`llama-warden drain {model}`)")]
    Pinned { model: ModelName },
    #[error(
        "llama-warden neither downloads nor deletes models: put the file into a folder of `paths.models`, \
         or configure it"
    )]
    NoDownloads,
    #[error("llama-warden has no stream of events here: ask `GET /models` for the state of each model")]
    NoModelEvents,
    #[error("model `{model}`: {denied}")]
    Denied { model: ModelName, denied: LeaseDenied },
    #[error(
        "model `{model}`: this request (fingerprint {print}) ended its server while nothing else ran \
         there, so it is refused, for another {} s; change the request, or ask the operator to release it \
         (`llama-warden quarantine release {print}`)", whole_seconds(*.left)
    )]
    Quarantined { model: ModelName, print: RequestFingerprint, left: Duration, executed: bool },
    #[error("model `{model}`: its process could not be reached in {attempts} attempts; nothing was executed")]
    Unreachable { model: ModelName, attempts: u32 },
    #[error("model `{model}`: its process ended before it answered; the request may have been executed")]
    Died { model: ModelName },
    #[error("model `{model}`: its answer cannot be passed on: {why}; the request may have been executed")]
    Garbled { model: ModelName, why: String },
    #[error(
        "model `{model}`: its process was stopped before it answered; the request may have been executed"
    )]
    Revoked { model: ModelName },
    #[error(
        "model `{model}`: no whole answer in the time that one may take (`upstream.exchange_timeout`, or \
         an endpoint's own `timeout`)"
    )]
    TimedOut { model: ModelName },
    #[error("{CANCELLED}")]
    Cancelled { executed: bool },
    #[error("the server is shutting down")]
    ShuttingDown,
    /// Message as llama-server writes it.
    #[error("Loading model")]
    Loading,
    /// No model accepts requests. Anyone may read this answer of `/health`, so it gives no reason.
    #[error("no process of any model can be started at the moment; `llama-warden status` says why")]
    Down { after: Duration },
    #[error("Invalid API Key: none was sent; send one as `Authorization: Bearer KEY` or `x-api-key: KEY`")]
    NoKey,
    /// Message as llama-server writes it.
    #[error("Invalid API Key")]
    WrongKey,
    #[error("the key `{key}` has used up its {rate} {what}; send again in {} s", whole_seconds(*.wait))]
    KeySpent { key: Arc<str>, what: &'static str, rate: RateLimit, wait: Duration },
    #[error(
        "the key `{key}` has {most} requests under way, as many as it may; send again when one has ended"
    )]
    KeyBusy { key: Arc<str>, most: usize },
    /// The client may not use this model, and gets the same answer as for an unknown one.
    #[error(transparent)]
    Hidden(Box<RequestRefusal>),
}

/// Label of a denied lease, from a bounded set.
fn denial_label(denied: &LeaseDenied) -> &'static str {
    match denied {
        LeaseDenied::QueueFull { .. } => "queue_full",
        LeaseDenied::Deadline { .. } => "queue_deadline",
        LeaseDenied::TooSlow { .. } => "loads_too_long",
        LeaseDenied::NeverLoaded(_) => "never_loaded",
        LeaseDenied::NoRoom(_) => "no_room",
        LeaseDenied::StartFailed(..) => "start_failed",
        LeaseDenied::Failed(..) => "failed",
        LeaseDenied::Silent(..) => "endpoint_silent",
        LeaseDenied::ShuttingDown => "shutting_down",
        LeaseDenied::Removed => "removed",
    }
}

/// Rounds up to whole seconds, at least 1.
fn whole_seconds(time: Duration) -> u64 {
    (time.as_secs() + u64::from(time.subsec_nanos() > 0)).max(1)
}

fn list_models(known: &[String]) -> String {
    format!("the models are `{}`", known.join("`, `"))
}

fn unreadable_message(why: UnreadableBody) -> &'static str {
    match why {
        UnreadableBody::NotObject => "the body is not a JSON object",
        UnreadableBody::Repeats => "the body repeats a parameter, or messages of the system, too often",
    }
}

pub(crate) struct ErrorAnswer {
    pub(crate) status: StatusCode,
    pub(crate) headers: Vec<(HeaderName, HeaderValue)>,
    pub(crate) body: Bytes,
}

impl RequestRefusal {
    /// Returns status and type, paired as in llama-server, and the outcome for the record.
    fn facts(&self) -> (StatusCode, &'static str, RequestOutcome) {
        use RequestOutcome::{Denied, Rejected};
        const INVALID: &str = "invalid_request_error";
        const NOT_FOUND: &str = "not_found_error";
        const UNAVAILABLE: &str = "unavailable_error";
        const SERVER: &str = "server_error";
        const UNSUPPORTED: &str = "not_supported_error";
        const SPENT: &str = "rate_limit_error";
        let bad = StatusCode::BAD_REQUEST;
        let missing = StatusCode::NOT_FOUND;
        let busy = StatusCode::SERVICE_UNAVAILABLE;
        let spent = StatusCode::TOO_MANY_REQUESTS;
        match self {
            Self::Host => (bad, INVALID, Rejected("host")),
            Self::Name(_) => (StatusCode::MISDIRECTED_REQUEST, INVALID, Rejected("name")),
            Self::Origin => (StatusCode::FORBIDDEN, "permission_error", Rejected("origin")),
            Self::Wire(fault) => (fault.status(), INVALID, Rejected(fault.label())),
            Self::Method(_) => (StatusCode::METHOD_NOT_ALLOWED, INVALID, Rejected("method")),
            Self::HeadTooLarge { .. } | Self::LineTooLong { .. } | Self::TooManyFields { .. } => {
                (StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, INVALID, Rejected("head_too_large"))
            }
            Self::TargetTooLong { .. } => (StatusCode::URI_TOO_LONG, INVALID, Rejected("target_too_long")),
            Self::Quarantined { .. } => {
                (StatusCode::UNPROCESSABLE_ENTITY, INVALID, BodyError::Quarantined.outcome())
            }
            Self::BodyTooLarge { .. } => {
                (StatusCode::PAYLOAD_TOO_LARGE, INVALID, BodyError::TooLarge.outcome())
            }
            Self::BodyTooSlow => (StatusCode::REQUEST_TIMEOUT, INVALID, BodyError::TooSlow.outcome()),
            Self::BodyBroken => (bad, INVALID, BodyError::Broken.outcome()),
            Self::BodyUndecodable => (bad, INVALID, BodyError::Undecodable.outcome()),
            Self::BodyTooDense => (StatusCode::PAYLOAD_TOO_LARGE, INVALID, BodyError::TooDense.outcome()),
            Self::Coding => (StatusCode::UNSUPPORTED_MEDIA_TYPE, INVALID, Rejected("coding")),
            Self::Busy => (busy, UNAVAILABLE, Rejected("buffers_full")),
            Self::ModelTooFar { .. }
            | Self::NotJson { .. }
            | Self::ModelNotText { .. }
            | Self::Resolve(ResolveError::Missing { .. }) => (bad, INVALID, Rejected("no_model")),
            Self::Upstream { .. } | Self::Resolve(ResolveError::Unknown { .. }) => {
                (missing, NOT_FOUND, Rejected("unknown_model"))
            }
            Self::TwoModels => (bad, INVALID, BodyError::TwoModels.outcome()),
            Self::Unreadable { .. } => (bad, INVALID, Rejected("unreadable_body")),
            Self::NoRoute | Self::NotThere { .. } | Self::NoPage | Self::NoPrefix(_) => {
                (missing, NOT_FOUND, Rejected("unknown_route"))
            }
            Self::KeyThere { .. } => (StatusCode::BAD_GATEWAY, SERVER, Denied("endpoint_key")),
            Self::SlotFiles => (StatusCode::NOT_IMPLEMENTED, UNSUPPORTED, Rejected("slot_files")),
            Self::NoDownloads | Self::NoModelEvents => {
                (StatusCode::NOT_IMPLEMENTED, UNSUPPORTED, Rejected("unknown_route"))
            }
            Self::NotLoaded { .. } => (busy, UNAVAILABLE, Denied("not_loaded")),
            Self::AlreadyLoaded { .. } => (bad, INVALID, Rejected("already_loaded")),
            Self::NotRunning { .. } => (bad, INVALID, Rejected("not_running")),
            Self::Pinned { .. } => (StatusCode::FORBIDDEN, "permission_error", Rejected("pinned")),
            Self::Denied { denied: LeaseDenied::Removed, .. } => (missing, NOT_FOUND, Denied("removed")),
            Self::Denied { denied, .. } => (busy, UNAVAILABLE, Denied(denial_label(denied))),
            Self::Unreachable { .. } => (busy, UNAVAILABLE, Denied("unreachable")),
            Self::Died { .. } => (StatusCode::BAD_GATEWAY, SERVER, RequestOutcome::UpstreamDied),
            Self::Garbled { .. } => (StatusCode::BAD_GATEWAY, SERVER, RequestOutcome::UpstreamGarbled),
            Self::Revoked { .. } => (StatusCode::BAD_GATEWAY, SERVER, RequestOutcome::Revoked),
            Self::TimedOut { .. } => (StatusCode::GATEWAY_TIMEOUT, SERVER, RequestOutcome::TimedOut),
            Self::Cancelled { .. } => (cancelled_status(), CANCELLED_KIND, RequestOutcome::Cancelled),
            Self::ShuttingDown => (busy, UNAVAILABLE, Denied("shutting_down")),
            Self::Loading => (busy, UNAVAILABLE, Denied("loading")),
            Self::Down { .. } => (busy, UNAVAILABLE, Denied("down")),
            Self::NoKey => (StatusCode::UNAUTHORIZED, "authentication_error", Rejected("no_key")),
            Self::WrongKey => (StatusCode::UNAUTHORIZED, "authentication_error", Rejected("wrong_key")),
            Self::KeySpent { what: "tokens", .. } => (spent, SPENT, Rejected("key_tokens")),
            Self::KeySpent { .. } => (spent, SPENT, Rejected("key_rate")),
            Self::KeyBusy { .. } => (spent, SPENT, Rejected("key_concurrency")),
            Self::Hidden(told) => {
                let (status, kind, _) = told.facts();
                (status, kind, Rejected("key_model"))
            }
        }
    }

    pub(crate) fn outcome(&self) -> RequestOutcome {
        self.facts().2
    }

    fn param(&self) -> Option<&'static str> {
        match self {
            Self::TwoModels
            | Self::ModelTooFar { .. }
            | Self::NotJson { .. }
            | Self::ModelNotText { .. }
            | Self::Resolve(_) => Some("model"),
            Self::Hidden(told) => told.param(),
            _ => None,
        }
    }

    /// Returns a code for programs if the status does not identify the error.
    fn code(&self) -> Option<&'static str> {
        match self {
            Self::Quarantined { .. } => Some("request_quarantined"),
            Self::Cancelled { .. } => Some(CANCELLED_CODE),
            Self::NotLoaded { .. } => Some("model_not_loaded"),
            _ => None,
        }
    }

    /// Chooses between the death of the first server (`self`) and the failure of the second attempt.
    pub(crate) fn merge_with(self, next: Self) -> Self {
        match next {
            Self::Quarantined { model, print, left, .. } => {
                Self::Quarantined { model, print, left, executed: true }
            }
            _ => self,
        }
    }

    pub(crate) fn may_have_executed(&self) -> bool {
        matches!(
            self,
            Self::Quarantined { executed: true, .. }
                | Self::Cancelled { executed: true }
                | Self::Died { .. }
                | Self::Garbled { .. }
                | Self::Revoked { .. }
                | Self::TimedOut { .. }
        )
    }

    /// Returns the wait until the client may retry, for temporary errors.
    fn retry_after(&self, soon: Duration) -> Option<Duration> {
        match self {
            Self::Denied { denied: LeaseDenied::StartFailed(_, after), .. } => Some(after.unwrap_or(soon)),
            Self::Denied {
                denied: LeaseDenied::Failed(_, after) | LeaseDenied::Silent(_, after), ..
            }
            | Self::Down { after, .. } => Some(*after),
            Self::Denied { denied: LeaseDenied::NoRoom(short), .. } => Some(short.retry_after),
            Self::Denied { denied: LeaseDenied::TooSlow { left, .. }, .. } => Some(*left),
            Self::Denied { denied: LeaseDenied::Removed | LeaseDenied::NeverLoaded(_), .. } => None,
            Self::KeySpent { wait, .. } => Some(*wait),
            Self::KeyBusy { .. }
            | Self::Busy
            | Self::Denied { .. }
            | Self::Unreachable { .. }
            | Self::ShuttingDown
            | Self::Loading => Some(soon),
            _ => None,
        }
    }

    fn details(&self) -> Option<Value> {
        match self {
            Self::Denied {
                denied:
                    LeaseDenied::StartFailed(failure, _)
                    | LeaseDenied::Failed(failure, _)
                    | LeaseDenied::Silent(failure, _),
                ..
            } => {
                let BackendFailure { kind, lines, failures, .. } = failure;
                Some(json!({ "kind": kind, "failures": failures, "lines": lines }))
            }
            Self::Quarantined { print, left, .. } => {
                Some(json!({ "fingerprint": print, "refused_for_s": whole_seconds(*left) }))
            }
            Self::Denied { denied: LeaseDenied::TooSlow { left, wait }, .. } => {
                Some(json!({ "loads_in_s": whole_seconds(*left), "queue_wait_s": whole_seconds(*wait) }))
            }
            Self::Denied { denied: LeaseDenied::NoRoom(short), .. } => Some(json!({
                "memory": short.series,
                "prompt_tokens": short.tokens,
                "needed_bytes": short.needed,
                "left_bytes": short.have,
                "bytes_per_token": short.bytes_per_token,
            })),
            _ => None,
        }
    }

    /// Builds the response. `soon` is the default wait before another attempt.
    pub(crate) fn answer(&self, dialect: ErrorDialect, soon: Duration) -> ErrorAnswer {
        let (status, kind, _) = self.facts();
        let message = self.to_string();
        let mut body = match dialect {
            ErrorDialect::Anthropic => anthropic_error(anthropic_kind(status), &message),
            ErrorDialect::OpenAi | ErrorDialect::Responses => {
                openai_error(status.as_u16(), kind, &message, self.param(), self.details())
            }
        };
        if let Some(code) = self.code() {
            body["error"]["code"] = json!(code);
        }
        let executed = if self.may_have_executed() { "maybe" } else { "no" };
        let mut headers = vec![
            (CONTENT_TYPE, HeaderValue::from_static("application/json; charset=utf-8")),
            (EXECUTED, HeaderValue::from_static(executed)),
        ];
        if matches!(self, Self::Method(_)) {
            headers.push((ALLOW, HeaderValue::from_static("GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS")));
        }
        if matches!(self, Self::Coding) {
            headers.push((ACCEPT_ENCODING, HeaderValue::from_static(ACCEPTED_CODINGS)));
        }
        if let Some(after) = self.retry_after(soon) {
            headers.push((RETRY_AFTER, HeaderValue::from(whole_seconds(after))));
        }
        if let Self::KeySpent { wait, .. } = self {
            let whole = wait.as_nanos().div_ceil(1_000_000);
            headers.push((RETRY_AFTER_MS, HeaderValue::from(u64::try_from(whole).unwrap_or(u64::MAX))));
        }
        if matches!(self, Self::Cancelled { .. }) {
            headers.push((SHOULD_RETRY, HeaderValue::from_static("false")));
        }
        if status == StatusCode::UNAUTHORIZED {
            // A 401 must name the authentication scheme (RFC 9110 section 11.6.1).
            headers.push((WWW_AUTHENTICATE, HeaderValue::from_static("Bearer realm=\"llama-warden\"")));
        }
        ErrorAnswer { status, headers, body: Bytes::from(body.to_string()) }
    }
}

#[cfg(test)]
mod pages_tests;
#[cfg(test)]
mod tests;
