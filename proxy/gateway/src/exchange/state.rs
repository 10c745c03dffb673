//! The states of a request that several steps of its life share.

use std::sync::Arc;

use bytes::Bytes;
use http::StatusCode;
use http::header::{HeaderMap, HeaderValue};
use http::request::Parts;
use hyper::body::Incoming;

use crate::access::ClientAccess;
use crate::answer::{InFlightRequest, TurnRecorder};
use crate::backend::{RelayedAnswer, RepeatableRequest};
use crate::body::{BodyBudget, ClientShare, SentBody};
use crate::protocol::{ConnState, headers};
use crate::refusal::RequestRefusal;
use crate::route::RequestRoute;
use crate::route::target::ModelPath;
use crate::rules::ModelRules;
use crate::shared::{GatewayShared, LiveConfig};

/// State that lasts from a request's head to the head of its answer.
pub(super) struct HttpExchange {
    pub(super) shared: Arc<GatewayShared>,
    /// Configuration at the time when the request began.
    pub(super) live: Arc<LiveConfig>,
    pub(super) drop_in: bool,
    pub(super) conn: Arc<ConnState>,
    pub(super) route: RequestRoute,
    pub(super) request_id: HeaderValue,
    pub(super) origin: Option<HeaderValue>,
    pub(super) flight: Box<InFlightRequest>,
    pub(super) body: ClientBody,
    /// Memory budget of the client, once the client is known.
    pub(super) budget: Option<BodyBudget>,
    /// Rules of the requested name, if it has its own.
    pub(super) name_rules: Option<Arc<ModelRules>>,
    /// Identifier of the conversation, if the client or a load balancer wants it.
    pub(super) conversation: Option<HeaderValue>,
}

/// A request for a backend, with an unread body.
pub(super) struct ForwardRequest {
    pub(super) parts: Box<Parts>,
    pub(super) body: Incoming,
    pub(super) named: Option<Result<ModelPath, RequestRefusal>>,
    pub(super) held: Arc<ClientShare>,
    pub(super) access: ClientAccess,
}

/// A request that its backend has begun to answer.
pub(super) struct AnsweredRequest {
    pub(super) relayed: RelayedAnswer,
    /// Route and body of a setting that the request changes in the backend if it succeeds.
    pub(super) sets: Option<(String, Bytes)>,
    /// State for executing the request again, if its server dies before the client has any part of the body.
    pub(super) again: Option<Box<RepeatableRequest>>,
    pub(super) remember: Option<Box<TurnRecorder>>,
}

/// The client's body. Its state when the answer is sent decides whether the connection can be used again.
pub(super) enum ClientBody {
    /// The gateway does not read the body. If the body is incomplete, the bytes that follow are no request:
    /// they belong to the body, to an invalid head, or to a tunnel.
    Unread {
        is_complete: bool,
    },
    Read(Arc<SentBody>),
}

impl ClientBody {
    /// Returns whether the whole body arrived before the request was sent, or hyper handles the rest.
    pub(super) fn is_complete(&self) -> bool {
        match self {
            Self::Unread { is_complete } => *is_complete,
            Self::Read(sent) => sent.has_arrived(),
        }
    }
}

impl HttpExchange {
    /// A refusal must not bind the conversation to this instance, so only a success gets the identifier.
    pub(super) fn add_conversation_header(&self, status: StatusCode, headers: &mut HeaderMap) {
        if status.is_success()
            && let Some(word) = self.conversation.clone()
        {
            headers.insert(headers::CONVERSATION, word);
        }
    }

    /// Ends the request for an operator, with the same effects as a client's disconnect.
    pub(super) fn cancelled_refusal(&mut self) -> RequestRefusal {
        // The rest of a body may have arrived while the request was sent.
        if let ClientBody::Read(sent) = &self.body
            && sent.fingerprint().is_some()
        {
            self.body = ClientBody::Unread { is_complete: true };
        }
        RequestRefusal::Cancelled { executed: self.flight.progress.is_sent() }
    }
}
