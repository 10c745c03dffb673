//! A request to a backend, which may be sent once or several times.

use std::sync::Arc;

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, HeaderValue};
use http::request::Parts;
use http::{Method, Request, Uri};

use crate::backend::request_body::RequestBody;
use crate::body::budget::HeldPieces;
use crate::body::intake::BodyIntake;
use crate::body::sent::SentBody;
use crate::protocol::headers::CONVERSATION_ID;
use crate::refusal::RequestRefusal;
use crate::route::target;
use crate::trace;

/// A request to a backend.
pub(crate) struct UpstreamRequest {
    head: Request<()>,
    body: OutgoingBody,
    /// The request asks for a stream.
    streams: bool,
    /// The answer is a generated stream: its head may show whether execution began.
    generates_stream: bool,
    /// The request may be executed again if its server dies.
    repeats: bool,
}

/// Properties that decide about sending a request again.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RepeatPolicy {
    /// The request generates text, as a stream if its body asks for one.
    pub(crate) generates: bool,
    /// The request may be executed again if its server dies.
    pub(crate) repeats: bool,
    /// The request is kept for the next process.
    pub(crate) remembers: bool,
    /// Largest body that is kept, in bytes.
    pub(crate) max_bytes: usize,
}

enum OutgoingBody {
    /// May be sent again, even after it was received: each attempt sends a copy that shares the bytes.
    Repeatable(Box<BodyIntake>),
    /// Sent once, unless a connection hands it back unsent.
    Once(Option<RequestBody>, Arc<SentBody>),
    /// A request of our own on behalf of a client's request, which is blamed for its effects.
    Side(HeldPieces, Arc<SentBody>),
}

/// RFC 9110 section 9.2.1. The gateway answers the other safe methods itself.
fn is_safe_method(method: &Method) -> bool {
    matches!(*method, Method::GET | Method::HEAD)
}

impl UpstreamRequest {
    /// Creates a request with its body, as far as that was read. Boxed, because it is moved often.
    pub(crate) fn new(
        parts: Box<Parts>,
        intake: Box<BodyIntake>,
        repeating: RepeatPolicy,
    ) -> Result<Box<Self>, RequestRefusal> {
        let RepeatPolicy { generates, repeats, remembers, max_bytes: most_bytes } = repeating;
        let parts = *parts;
        let mut head = Request::new(());
        *head.uri_mut() = target::origin_form(&parts.uri).map_err(|_| RequestRefusal::Host)?;
        let is_safe = is_safe_method(&parts.method);
        // The meaning of a missing head is decided after a failure: each attempt may use another build.
        let streams = intake.is_stream();
        let generates_stream = generates && streams;
        let kept = is_safe || repeats || generates_stream || remembers;
        *head.headers_mut() = parts.headers;
        if !is_safe && parts.method != Method::DELETE && intake.is_whole() && intake.len() == 0 {
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
        Ok(Box::new(Self { head, body, streams, generates_stream, repeats }))
    }

    /// Makes the following attempts children of this span.
    pub(super) fn set_parent_span(&mut self, parent: Option<HeaderValue>) {
        trace::set_traceparent(self.head.headers_mut(), parent);
    }

    /// Returns the request to send. A request that is sent only once is handed out by the first call.
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

    /// Takes back a request that was not sent.
    pub(super) fn put_back(&mut self, request: Request<RequestBody>) {
        if let OutgoingBody::Once(kept, _) = &mut self.body {
            let (parts, body) = request.into_parts();
            *self.head.headers_mut() = parts.headers;
            *kept = Some(body);
        }
    }

    pub(super) fn is_safe(&self) -> bool {
        is_safe_method(self.head.method())
    }

    /// Returns whether all of its body is held, to be sent again.
    pub(super) fn is_held(&self) -> bool {
        matches!(self.body, OutgoingBody::Repeatable(_))
    }

    /// Returns whether it may be executed again if its server dies.
    pub(super) fn may_repeat(&self) -> bool {
        self.repeats && self.is_held()
    }

    /// Returns whether it asks for a generated stream.
    pub(super) fn generates_stream(&self) -> bool {
        self.generates_stream
    }

    /// Returns whether it asks for a stream.
    pub(crate) fn streams(&self) -> bool {
        self.streams
    }

    pub(crate) fn sent(&self) -> Arc<SentBody> {
        match &self.body {
            OutgoingBody::Repeatable(intake) => intake.sent.clone(),
            OutgoingBody::Once(_, sent) | OutgoingBody::Side(_, sent) => sent.clone(),
        }
    }

    /// Returns the whole JSON body, if it is held.
    pub(crate) fn json(&self) -> Option<Bytes> {
        match &self.body {
            OutgoingBody::Repeatable(intake) => intake.json(),
            OutgoingBody::Once(..) | OutgoingBody::Side(..) => None,
        }
    }

    /// Returns whether the body may be held until the answer is complete: there is room left for other
    /// bodies, and it has no images or audio.
    pub(crate) fn may_be_held(&self) -> bool {
        match &self.body {
            OutgoingBody::Repeatable(intake) => intake.may_be_held(),
            OutgoingBody::Once(..) | OutgoingBody::Side(..) => false,
        }
    }

    /// Counts its images and recordings, before it is sent.
    pub(crate) fn media(&self) -> (u64, u64) {
        match &self.body {
            OutgoingBody::Repeatable(intake) => intake.media(),
            OutgoingBody::Once(..) | OutgoingBody::Side(..) => self.sent().media(),
        }
    }

    /// Returns the whole JSON body, to be kept until its answer is complete; `None` if it may not be held
    /// that long.
    pub(crate) fn held_copy(&self) -> Option<HeldPieces> {
        match &self.body {
            OutgoingBody::Repeatable(intake) if intake.may_be_held() => intake.held_copy(),
            _ => None,
        }
    }

    /// Builds another request with the head of this one, to `path` if given. `None` if no more bytes may be
    /// held now.
    pub(crate) fn side_request(
        &self,
        path: Option<&'static str>,
        body: Bytes,
        streams: bool,
    ) -> Option<Self> {
        let OutgoingBody::Repeatable(intake) = &self.body else { return None };
        let mut head = Request::new(());
        *head.method_mut() = self.head.method().clone();
        *head.uri_mut() = path.map_or_else(|| self.head.uri().clone(), Uri::from_static);
        *head.headers_mut() = self.head.headers().clone();
        // llama-server records the events of the client's own request under this id.
        head.headers_mut().remove(CONVERSATION_ID);
        let sent = Arc::new(SentBody::for_resend(&intake.sent));
        let body = OutgoingBody::Side(intake.hold_other(body)?, sent);
        Some(Self { head, body, streams, generates_stream: false, repeats: false })
    }
}
