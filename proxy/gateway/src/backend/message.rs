//! A request to a backend, which may be sent once or several times.

use std::sync::Arc;

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, HeaderValue};
use http::request::Parts;
use http::{Method, Request, Uri};

use crate::backend::RequestBody;
use crate::body::{BodyIntake, HeldPieces, SentBody};
use crate::protocol::CONVERSATION_ID;
use crate::refusal::RequestRefusal;
use crate::route::target;
use crate::trace;

#[expect(clippy::struct_excessive_bools, reason = "independent properties of a request")]
pub(crate) struct UpstreamRequest {
    head: Request<()>,
    body: OutgoingBody,
    pub(crate) streams: bool,
    /// The answer is a generated stream, whose head shows that execution has begun.
    pub(super) generates_stream: bool,
    repeats: bool,
    is_safe: bool,
}

#[derive(Clone, Copy, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "independent properties of a request")]
pub(crate) struct RepeatPolicy {
    pub(crate) generates: bool,
    pub(crate) repeats: bool,
    pub(crate) remembers: bool,
    /// True if `GET` only reads, as at a llama-server; another program may compute.
    pub(crate) gets_read: bool,
    /// Largest body kept for sending it again, in bytes.
    pub(crate) max_bytes: usize,
}

enum OutgoingBody {
    /// The body may be sent again, even after a backend has received it.
    Repeatable(Box<BodyIntake>),
    /// The body is sent once, unless a connection returns it unsent.
    Once(Option<RequestBody>, Arc<SentBody>),
    /// Body of a gateway's own request. If it kills the server, the client's request is blamed.
    Side(HeldPieces, Arc<SentBody>),
}

/// Safe methods (RFC 9110 section 9.2.1) that are forwarded; the gateway answers the others itself.
fn is_safe_method(method: &Method) -> bool {
    matches!(*method, Method::GET | Method::HEAD)
}

impl UpstreamRequest {
    /// Boxed, because requests are moved often.
    pub(crate) fn new(
        parts: Box<Parts>,
        intake: Box<BodyIntake>,
        repeating: RepeatPolicy,
    ) -> Result<Box<Self>, RequestRefusal> {
        let RepeatPolicy { generates, repeats, remembers, gets_read, max_bytes: most_bytes } = repeating;
        let parts = *parts;
        let mut head = Request::new(());
        *head.uri_mut() = target::origin_form(&parts.uri).map_err(|_| RequestRefusal::Host)?;
        let has_safe_method = is_safe_method(&parts.method);
        let is_safe = has_safe_method && gets_read;
        // The meaning of a missing head depends on the build, and each attempt may use another build.
        let streams = intake.is_stream();
        let generates_stream = generates && streams;
        let kept = is_safe || repeats || generates_stream || remembers;
        *head.headers_mut() = parts.headers;
        if !has_safe_method && parts.method != Method::DELETE && intake.is_whole() && intake.len() == 0 {
            // Without this field, llama-server would wait for a body until the connection ends.
            head.headers_mut().insert(CONTENT_LENGTH, HeaderValue::from(0));
        }
        *head.method_mut() = parts.method;
        let body = if kept && intake.is_whole() && intake.len() <= most_bytes as u64 {
            OutgoingBody::Repeatable(intake)
        } else {
            let sent = intake.sent.clone();
            OutgoingBody::Once(Some(RequestBody::from_intake(intake)), sent)
        };
        Ok(Box::new(Self { head, body, streams, generates_stream, repeats, is_safe }))
    }

    pub(super) fn set_parent_span(&mut self, parent: Option<HeaderValue>) {
        trace::set_traceparent(self.head.headers_mut(), parent);
    }

    /// Returns the request. The body of a request that is sent once is only in the first result.
    pub(super) fn request(&mut self) -> Request<RequestBody> {
        let (headers, body) = match &mut self.body {
            OutgoingBody::Repeatable(intake) => {
                let (pieces, sent) = intake.pieces_to_repeat();
                (self.head.headers().clone(), RequestBody::from_held(pieces, sent))
            }
            OutgoingBody::Side(held, sent) => {
                *sent = Arc::new(SentBody::for_resend(sent));
                (self.head.headers().clone(), RequestBody::from_held(held.shared_pieces(), sent.clone()))
            }
            OutgoingBody::Once(body, sent) => {
                let body = body.take().unwrap_or_else(|| RequestBody::empty(sent.clone()));
                (std::mem::take(self.head.headers_mut()), body)
            }
        };
        let mut request = Request::new(body);
        *request.method_mut() = self.head.method().clone();
        *request.uri_mut() = self.head.uri().clone();
        *request.headers_mut() = headers;
        request
    }

    pub(super) fn put_back(&mut self, request: Request<RequestBody>) {
        if let OutgoingBody::Once(kept, _) = &mut self.body {
            let (parts, body) = request.into_parts();
            *self.head.headers_mut() = parts.headers;
            *kept = Some(body);
        }
    }

    /// Returns true if a second execution does no harm.
    pub(super) fn is_safe(&self) -> bool {
        self.is_safe
    }

    pub(super) fn is_held(&self) -> bool {
        matches!(self.body, OutgoingBody::Repeatable(_))
    }

    pub(super) fn may_repeat(&self) -> bool {
        self.repeats && self.is_held()
    }

    pub(crate) fn sent(&self) -> Arc<SentBody> {
        match &self.body {
            OutgoingBody::Repeatable(intake) => intake.sent.clone(),
            OutgoingBody::Once(_, sent) | OutgoingBody::Side(_, sent) => sent.clone(),
        }
    }

    /// Returns the client's body, if all of it is held.
    pub(crate) fn held_body(&self) -> Option<&BodyIntake> {
        match &self.body {
            OutgoingBody::Repeatable(intake) => Some(intake),
            OutgoingBody::Once(..) | OutgoingBody::Side(..) => None,
        }
    }

    pub(crate) fn json(&self) -> Option<Bytes> {
        self.held_body()?.json()
    }

    /// Counts images and recordings in the body before it is sent.
    pub(crate) fn media(&self) -> (u64, u64) {
        self.held_body().map_or_else(|| self.sent().media(), BodyIntake::media)
    }

    /// Builds a request with the same head, and `path` if given. `None` if the budget has no room.
    pub(crate) fn side_request(
        &self,
        path: Option<&'static str>,
        body: Bytes,
        streams: bool,
    ) -> Option<Self> {
        let intake = self.held_body()?;
        let mut head = Request::new(());
        *head.method_mut() = self.head.method().clone();
        *head.uri_mut() = path.map_or_else(|| self.head.uri().clone(), Uri::from_static);
        *head.headers_mut() = self.head.headers().clone();
        // llama-server records the events of the client's own request under this id.
        head.headers_mut().remove(CONVERSATION_ID);
        let sent = Arc::new(SentBody::for_resend(&intake.sent));
        let body = OutgoingBody::Side(intake.hold_other(body)?, sent);
        Some(Self { head, body, streams, generates_stream: false, repeats: false, is_safe: false })
    }
}
