//! Which of llama-server's routes a request is for: it decides what kind of lease the request needs, how errors are
//! spelled, how large a body may be, which rules for requests mean it, and the bounded label under which it is counted.
//! Routes we do not know pass through; llama-server answers them.
//!
//! The tables follow llama-server's own (`tools/server/server.cpp`). Its only event streams without a slot are answers to
//! `GET` (`/v1/stream`, `/models/sse`), which may be sent again like any `GET`; it has no websockets.

use std::borrow::Cow;

use http::Method;
use warden_policies::dispatch::LeaseKind;

use crate::errors::Dialect;
use crate::query;

/// What we know about a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Route {
    /// Label for logs and metrics: one of a bounded set.
    pub(crate) name: &'static str,
    /// What the request needs of a backend.
    pub(crate) kind: LeaseKind,
    /// Whether it generates text, as a stream if the body asks for one. What the end of a connection before any byte of
    /// such a stream proves is a fact of the binary ([`warden_policies::ServerFacts`]).
    pub(crate) generates: bool,
    /// How errors are spelled.
    pub(crate) dialect: Dialect,
    /// Which limit its bodies have.
    pub(crate) size: BodySize,
    /// What of a JSON body the rules for requests mean; `None`: they leave it alone.
    pub(crate) shape: Option<Shape>,
}

/// Classes of bodies by the limit that they have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BodySize {
    /// Prompts, with images and recordings in them.
    Prompt,
    /// Files of sound.
    Audio,
    /// Text alone.
    Text,
    /// Some words for the server itself.
    Control,
}

/// Where a request body has what rules are about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    /// `messages`; generates.
    Chat,
    /// `prompt`, in llama-server's own dialect; generates.
    Native,
    /// `prompt`, as OpenAI has it; generates.
    Completion,
    /// `instructions` and `input`; generates.
    Responses,
    /// `system` and `messages`; generates.
    Messages,
    /// As [`Self::Chat`], and nothing is generated.
    ChatCount,
    /// As [`Self::Responses`], and nothing is generated.
    ResponsesCount,
    /// As [`Self::Messages`], and nothing is generated.
    MessagesCount,
}

/// Whether a request sets something in llama-server that outlives it, and that a process which follows does not have. What
/// it does to slots is no such thing: their contents make answers faster and not different.
pub(crate) fn sets(method: &Method, route: &Route) -> bool {
    *method == Method::POST && matches!(route.name, "lora_adapters" | "props")
}

/// Whether llama-server stops computing while it answers: a slot is saved, restored or erased between two batches.
pub(crate) fn pauses(method: &Method, route: &Route) -> bool {
    *method == Method::POST && route.name == "slots"
}

/// The label of what is none of llama-server's routes, as far as we know them.
pub(crate) const UNKNOWN: &str = "other";

/// The label of streams of generations that go on without a client.
const STREAM: &str = "stream";

/// What is answered here and never reaches a backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Own<'a> {
    /// `/health`.
    Health,
    /// `/v1/models`.
    Models,
    /// `/v1/models/{id}`; the id, decoded.
    Model(Cow<'a, str>),
    /// `/running`: which processes there are.
    Running,
    /// `/upstream/<model>` without a slash behind it; the name.
    Bare(&'a str),
    /// The answer to a browser's question whether it may call.
    Preflight,
    /// A method that no proxy may serve to anybody.
    Forbidden,
}

/// Requests that generate text, possibly as a stream.
const GENERATING: [(&str, &str, Shape); 10] = [
    ("/v1/chat/completions", "chat", Shape::Chat),
    ("/chat/completions", "chat", Shape::Chat),
    // Of older ones: the same under Ollama's name.
    ("/api/chat", "chat", Shape::Chat),
    ("/v1/completions", "completions", Shape::Completion),
    ("/completions", "completions", Shape::Native),
    ("/completion", "completions", Shape::Native),
    ("/v1/responses", "responses", Shape::Responses),
    ("/responses", "responses", Shape::Responses),
    ("/v1/messages", "messages", Shape::Messages),
    ("/infill", "infill", Shape::Native),
];

/// Requests that occupy a slot, or the model, and answer at once. A transcription may be a stream, which only its form
/// says: nothing is proved by its head.
const EVALUATING: [(&str, &str, BodySize); 10] = [
    ("/v1/audio/transcriptions", "audio", BodySize::Audio),
    ("/audio/transcriptions", "audio", BodySize::Audio),
    ("/v1/embeddings", "embeddings", BodySize::Prompt),
    ("/embeddings", "embeddings", BodySize::Prompt),
    ("/embedding", "embeddings", BodySize::Prompt),
    ("/v1/rerank", "rerank", BodySize::Text),
    ("/v1/reranking", "rerank", BodySize::Text),
    ("/rerank", "rerank", BodySize::Text),
    ("/reranking", "rerank", BodySize::Text),
    ("/predict", "predict", BodySize::Prompt),
];

/// Requests that are answered beside the slots.
const AUXILIARY: [(&str, &str, BodySize, Option<Shape>); 22] = [
    ("/v1/chat/completions/input_tokens", "input_tokens", BodySize::Prompt, Some(Shape::ChatCount)),
    ("/chat/completions/input_tokens", "input_tokens", BodySize::Prompt, Some(Shape::ChatCount)),
    ("/v1/responses/input_tokens", "input_tokens", BodySize::Prompt, Some(Shape::ResponsesCount)),
    ("/responses/input_tokens", "input_tokens", BodySize::Prompt, Some(Shape::ResponsesCount)),
    ("/v1/messages/count_tokens", "count_tokens", BodySize::Prompt, Some(Shape::MessagesCount)),
    ("/apply-template", "apply_template", BodySize::Prompt, Some(Shape::ChatCount)),
    ("/v1/chat/completions/control", "control", BodySize::Control, None),
    ("/tokenize", "tokenize", BodySize::Text, None),
    ("/detokenize", "detokenize", BodySize::Text, None),
    ("/props", "props", BodySize::Control, None),
    ("/metrics", "metrics", BodySize::Control, None),
    ("/slots", "slots", BodySize::Control, None),
    ("/lora-adapters", "lora_adapters", BodySize::Control, None),
    ("/v1/stream", STREAM, BodySize::Control, None),
    ("/v1/streams/lookup", STREAM, BodySize::Control, None),
    ("/tools", "tools", BodySize::Text, None),
    ("/cors-proxy", "cors_proxy", BodySize::Text, None),
    ("/models", "router", BodySize::Control, None),
    ("/models/load", "router", BodySize::Control, None),
    ("/models/unload", "router", BodySize::Control, None),
    ("/models/sse", "router", BodySize::Control, None),
    ("/", "ui", BodySize::Control, None),
];

impl Route {
    /// Whether a stream of events that answers a `GET` here has no end of its own. The replay of a generation has one.
    pub(crate) fn watches(self) -> bool {
        self.name != STREAM
    }
}

/// A path as llama-server looks for its handler: decoded. So no spelling is a way around slots, rules and budgets. One that
/// cannot be decoded stays as it is.
pub(crate) fn plain(path: &str) -> Cow<'_, str> {
    let decoded = path.contains('%').then(|| query::path(path)).flatten();
    decoded.map_or(Cow::Borrowed(path), Cow::Owned)
}

/// The route of a request that goes to a backend.
pub(crate) fn route(method: &Method, path: &str) -> Route {
    let path = &*plain(path);
    let dialect = match path {
        "/v1/messages" => Dialect::Anthropic,
        "/v1/responses" | "/responses" => Dialect::Responses,
        _ if path.starts_with("/v1/messages/") => Dialect::Anthropic,
        _ => Dialect::OpenAi,
    };
    let aux = Route {
        name: UNKNOWN,
        kind: LeaseKind::Aux,
        generates: false,
        dialect,
        size: BodySize::Prompt,
        shape: None,
    };
    if *method == Method::POST {
        if let Some((_, name, shape)) = GENERATING.iter().find(|row| row.0 == path) {
            return Route { name, kind: LeaseKind::Slot, generates: true, shape: Some(*shape), ..aux };
        }
        if let Some((_, name, size)) = EVALUATING.iter().find(|row| row.0 == path) {
            return Route { name, kind: LeaseKind::Slot, size: *size, ..aux };
        }
    }
    if let Some((_, name, size, shape)) = AUXILIARY.iter().find(|row| row.0 == path) {
        return Route { name, size: *size, shape: shape.filter(|_| *method == Method::POST), ..aux };
    }
    if path.starts_with("/slots/") {
        return Route { name: "slots", size: BodySize::Control, ..aux };
    }
    aux
}

/// Whether the request is answered here.
pub(crate) fn own<'a>(method: &Method, path: &'a str) -> Option<Own<'a>> {
    if matches!(*method, Method::CONNECT | Method::TRACE) {
        return Some(Own::Forbidden);
    }
    if *method == Method::OPTIONS {
        return Some(Own::Preflight);
    }
    if !matches!(*method, Method::GET | Method::HEAD) {
        return None;
    }
    let path = plain(path);
    match &*path {
        "/health" | "/v1/health" => Some(Own::Health),
        "/v1/models" | "/models" => Some(Own::Models),
        "/running" => Some(Own::Running),
        _ => match path {
            Cow::Borrowed(path) => model_id(path).map(Cow::Borrowed),
            Cow::Owned(path) => model_id(&path).map(|id| Cow::Owned(id.to_owned())),
        }
        .map(Own::Model),
    }
}

fn model_id(path: &str) -> Option<&str> {
    path.strip_prefix("/v1/models/")
        .or_else(|| path.strip_prefix("/models/"))
        // llama-server's own event stream of that name must not be read as a model.
        .filter(|id| !id.is_empty() && *id != "sse")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generation_takes_a_slot_and_everything_else_does_not() {
        for (method, path, name, kind) in [
            (Method::POST, "/v1/chat/completions", "chat", LeaseKind::Slot),
            (Method::POST, "/completion", "completions", LeaseKind::Slot),
            (Method::POST, "/v1/messages", "messages", LeaseKind::Slot),
            (Method::POST, "/api/chat", "chat", LeaseKind::Slot),
            (Method::POST, "/v1/chat%2Fcompletion%73", "chat", LeaseKind::Slot),
            (Method::POST, "/%65mbeddings", "embeddings", LeaseKind::Slot),
            (Method::POST, "/v1/chat/completion%2573", "other", LeaseKind::Aux),
            (Method::POST, "/v1/embeddings", "embeddings", LeaseKind::Slot),
            (Method::GET, "/v1/chat/completions", "other", LeaseKind::Aux),
            (Method::POST, "/v1/messages/count_tokens", "count_tokens", LeaseKind::Aux),
            (Method::POST, "/slots/3", "slots", LeaseKind::Aux),
            (Method::GET, "/slots", "slots", LeaseKind::Aux),
            (Method::GET, "/props", "props", LeaseKind::Aux),
            (Method::GET, "/", "ui", LeaseKind::Aux),
            (Method::POST, "/no/such", "other", LeaseKind::Aux),
        ] {
            let route = route(&method, path);
            assert_eq!((route.name, route.kind), (name, kind), "{method} {path}");
        }
    }

    #[test]
    fn errors_are_spelled_as_the_clients_of_the_route_expect() {
        for (path, dialect) in [
            ("/v1/messages", Dialect::Anthropic),
            ("/v1/messages/count_tokens", Dialect::Anthropic),
            ("/v1/mess%61ges", Dialect::Anthropic),
            ("/v1/messagesx", Dialect::OpenAi),
            ("/v1/responses", Dialect::Responses),
            ("/v1/chat/completions", Dialect::OpenAi),
        ] {
            assert_eq!(route(&Method::POST, path).dialect, dialect, "{path}");
        }
    }

    #[test]
    fn health_and_models_are_ours() {
        assert_eq!(own(&Method::GET, "/health"), Some(Own::Health));
        assert_eq!(own(&Method::HEAD, "/v1/health"), Some(Own::Health));
        assert_eq!(own(&Method::GET, "/v1/models"), Some(Own::Models));
        for (path, id) in
            [("/v1/models/org/a%2Fb", "org/a/b"), ("/mod%65ls/a%2525", "a%25"), ("/models/%zz", "%zz")]
        {
            assert_eq!(own(&Method::GET, path), Some(Own::Model(id.into())), "{path}");
        }
        assert_eq!(own(&Method::GET, "/he%61lth"), Some(Own::Health));
        assert_eq!(own(&Method::GET, "/v1%2Fmodels"), Some(Own::Models));
        assert_eq!(own(&Method::GET, "/models/sse"), None);
        assert_eq!(own(&Method::GET, "/v1/models/"), None);
        assert_eq!(own(&Method::POST, "/v1/models"), None);
        assert_eq!(own(&Method::OPTIONS, "/anything"), Some(Own::Preflight));
        assert_eq!(own(&Method::TRACE, "/"), Some(Own::Forbidden));
        assert_eq!(own(&Method::GET, "/v1/healthx"), None);
    }
}
