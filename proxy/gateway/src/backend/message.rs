//! What goes to a backend, once or several times.

use std::sync::Arc;

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, HeaderValue};
use http::request::Parts;
use http::{Method, Request, Uri};

use crate::backend::request_body::RequestBody;
use crate::body::budget::Held;
use crate::body::intake::Intake;
use crate::body::sent::Sent;
use crate::protocol::headers::CONVERSATION_ID;
use crate::refusal::Refusal;
use crate::route::target;
use crate::trace;

/// What goes to a backend.
pub(crate) struct Message {
    head: Request<()>,
    body: Outgoing,
    /// It asks for a stream.
    streams: bool,
    /// Its answer is a stream that is generated: whether that was begun with may show in its head.
    generates_stream: bool,
    /// It may be executed again if its server dies.
    repeats: bool,
}

/// What sending a request again depends on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Repeating {
    /// It generates text, as a stream if its body asks for one.
    pub(crate) generates: bool,
    /// It may be executed again if its server dies.
    pub(crate) repeats: bool,
    /// It is remembered for the process that follows.
    pub(crate) remembers: bool,
    /// Bytes of a body that is kept, at most.
    pub(crate) most_bytes: usize,
}

enum Outgoing {
    /// May be sent again, even after it was received: each attempt sends a copy that shares the bytes.
    Again(Box<Intake>),
    /// Sent once, unless it comes back unsent.
    Once(Option<RequestBody>, Arc<Sent>),
    /// Ours, beside the one that it stands for: that is blamed for what becomes of it.
    Beside(Held, Arc<Sent>),
}

/// RFC 9110 section 9.2.1. The other safe methods are answered by us.
fn executes_nothing(method: &Method) -> bool {
    matches!(*method, Method::GET | Method::HEAD)
}

impl Message {
    /// A request with its body, as far as that was taken in. Boxed, as it goes through many hands.
    pub(crate) fn new(
        parts: Box<Parts>,
        intake: Box<Intake>,
        repeating: Repeating,
    ) -> Result<Box<Self>, Refusal> {
        let Repeating { generates, repeats, remembers, most_bytes } = repeating;
        let parts = *parts;
        let mut head = Request::new(());
        *head.uri_mut() = target::origin_form(&parts.uri).map_err(|_| Refusal::Host)?;
        let is_safe = executes_nothing(&parts.method);
        // Whether that proves anything is looked at when it has failed: each attempt may meet another build.
        let streams = intake.is_stream();
        let generates_stream = generates && streams;
        let kept = is_safe || repeats || generates_stream || remembers;
        *head.headers_mut() = parts.headers;
        if !is_safe && parts.method != Method::DELETE && intake.is_whole() && intake.len() == 0 {
            // Without it, llama-server would wait for a body until the connection ends.
            head.headers_mut().insert(CONTENT_LENGTH, HeaderValue::from(0));
        }
        *head.method_mut() = parts.method;
        let body = if kept && intake.is_whole() && intake.len() <= most_bytes as u64 {
            Outgoing::Again(intake)
        } else {
            let sent = intake.sent.clone();
            Outgoing::Once(Some(RequestBody::once(intake)), sent)
        };
        Ok(Box::new(Self { head, body, streams, generates_stream, repeats }))
    }

    /// What is sent from now on is a part of this span.
    pub(super) fn follow(&mut self, parent: Option<HeaderValue>) {
        trace::follow(self.head.headers_mut(), parent);
    }

    /// A request to send. One that is sent once is given away by the first call.
    pub(super) fn request(&mut self) -> Request<RequestBody> {
        let (headers, body) = match &mut self.body {
            Outgoing::Again(intake) => {
                let (pieces, sent) = intake.again();
                (self.head.headers().clone(), RequestBody::again(pieces, sent))
            }
            Outgoing::Beside(held, sent) => {
                *sent = Arc::new(Sent::again(sent));
                (self.head.headers().clone(), RequestBody::again(held.again(), sent.clone()))
            }
            Outgoing::Once(body, sent) => {
                let body = body.take().unwrap_or_else(|| RequestBody::nothing(sent.clone()));
                (std::mem::take(self.head.headers_mut()), body)
            }
        };
        let mut request = Request::new(body);
        *request.method_mut() = self.head.method().clone();
        *request.uri_mut() = self.head.uri().clone();
        *request.headers_mut() = headers;
        request
    }

    /// Takes back what was not sent.
    pub(super) fn put_back(&mut self, request: Request<RequestBody>) {
        if let Outgoing::Once(kept, _) = &mut self.body {
            let (parts, body) = request.into_parts();
            *self.head.headers_mut() = parts.headers;
            *kept = Some(body);
        }
    }

    /// Whether the request executes nothing.
    pub(super) fn is_safe(&self) -> bool {
        executes_nothing(self.head.method())
    }

    /// Whether all of its body is held, to be sent again.
    pub(super) fn is_held(&self) -> bool {
        matches!(self.body, Outgoing::Again(_))
    }

    /// Whether it may be executed again if its server dies.
    pub(super) fn repeats(&self) -> bool {
        self.repeats && self.is_held()
    }

    /// Whether it asks for a stream that is generated.
    pub(super) fn generates_stream(&self) -> bool {
        self.generates_stream
    }

    /// Whether it asks for a stream.
    pub(crate) fn streams(&self) -> bool {
        self.streams
    }

    pub(crate) fn sent(&self) -> Arc<Sent> {
        match &self.body {
            Outgoing::Again(intake) => intake.sent.clone(),
            Outgoing::Once(_, sent) | Outgoing::Beside(_, sent) => sent.clone(),
        }
    }

    /// All of a JSON body that is held.
    pub(crate) fn json(&self) -> Option<Bytes> {
        match &self.body {
            Outgoing::Again(intake) => intake.json(),
            Outgoing::Once(..) | Outgoing::Beside(..) => None,
        }
    }

    /// Whether it may be held for as long as its answer takes: there is room for the bodies of others, and it has no images and no
    /// sound.
    pub(crate) fn may_stay(&self) -> bool {
        match &self.body {
            Outgoing::Again(intake) => intake.may_stay(),
            Outgoing::Once(..) | Outgoing::Beside(..) => false,
        }
    }

    /// Images and recordings in it, before it is sent.
    pub(crate) fn media(&self) -> (u64, u64) {
        match &self.body {
            Outgoing::Again(intake) => intake.media(),
            Outgoing::Once(..) | Outgoing::Beside(..) => self.sent().media(),
        }
    }

    /// All of a JSON body, to be remembered until its answer is whole; `None` if it may not stay that long.
    pub(crate) fn remembered(&self) -> Option<Held> {
        match &self.body {
            Outgoing::Again(intake) if intake.may_stay() => intake.remembered(),
            _ => None,
        }
    }

    /// Another request with the head of this one, to this path if one is given. `None`: no more may be held now.
    pub(crate) fn beside(&self, path: Option<&'static str>, body: Bytes, streams: bool) -> Option<Self> {
        let Outgoing::Again(intake) = &self.body else { return None };
        let mut head = Request::new(());
        *head.method_mut() = self.head.method().clone();
        *head.uri_mut() = path.map_or_else(|| self.head.uri().clone(), Uri::from_static);
        *head.headers_mut() = self.head.headers().clone();
        // What is recorded under it are the events of the client's own request.
        head.headers_mut().remove(CONVERSATION_ID);
        let sent = Arc::new(Sent::again(&intake.sent));
        let body = Outgoing::Beside(intake.beside(body)?, sent);
        Some(Self { head, body, streams, generates_stream: false, repeats: false })
    }
}
