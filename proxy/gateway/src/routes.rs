//! Which of llama-server's routes a request is for: it decides what kind of lease the request needs, how errors are
//! spelled, and the bounded label under which it is counted. Routes we do not know pass through; llama-server answers
//! them.

use http::Method;
use warden_policies::dispatch::LeaseKind;

/// What we know about a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Route {
    /// Label for logs and metrics: one of a bounded set.
    pub(crate) name: &'static str,
    /// What the request needs of a backend.
    pub(crate) kind: LeaseKind,
    /// Whether llama-server sends the head of a *streamed* answer only once the request has its slot, so that a
    /// connection which ends before any byte proves that nothing was generated.
    pub(crate) head_with_slot: bool,
    /// Errors are spelled as Anthropic's API does.
    pub(crate) anthropic: bool,
}

/// What is answered here and never reaches a backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Own<'a> {
    /// `/health`.
    Health,
    /// `/v1/models`.
    Models,
    /// `/v1/models/{id}`; the id as it stands in the path.
    Model(&'a str),
    /// The answer to a browser's question whether it may call.
    Preflight,
    /// A method that no proxy may serve to anybody.
    Forbidden,
}

/// Requests that generate text, possibly as a stream.
const GENERATING: [(&str, &str); 9] = [
    ("/v1/chat/completions", "chat"),
    ("/chat/completions", "chat"),
    ("/v1/completions", "completions"),
    ("/completions", "completions"),
    ("/completion", "completions"),
    ("/v1/responses", "responses"),
    ("/responses", "responses"),
    ("/v1/messages", "messages"),
    ("/infill", "infill"),
];

/// Requests that occupy a slot, or the model, and answer at once.
const EVALUATING: [(&str, &str); 10] = [
    ("/v1/audio/transcriptions", "audio"),
    ("/audio/transcriptions", "audio"),
    ("/v1/embeddings", "embeddings"),
    ("/embeddings", "embeddings"),
    ("/embedding", "embeddings"),
    ("/v1/rerank", "rerank"),
    ("/v1/reranking", "rerank"),
    ("/rerank", "rerank"),
    ("/reranking", "rerank"),
    ("/predict", "predict"),
];

/// Requests that are answered beside the slots.
const AUXILIARY: [(&str, &str); 18] = [
    ("/v1/chat/completions/input_tokens", "input_tokens"),
    ("/chat/completions/input_tokens", "input_tokens"),
    ("/v1/responses/input_tokens", "input_tokens"),
    ("/responses/input_tokens", "input_tokens"),
    ("/v1/messages/count_tokens", "count_tokens"),
    ("/v1/chat/completions/control", "control"),
    ("/tokenize", "tokenize"),
    ("/detokenize", "detokenize"),
    ("/apply-template", "apply_template"),
    ("/props", "props"),
    ("/metrics", "metrics"),
    ("/slots", "slots"),
    ("/lora-adapters", "lora_adapters"),
    ("/v1/stream", "stream"),
    ("/v1/streams/lookup", "stream"),
    ("/tools", "tools"),
    ("/cors-proxy", "cors_proxy"),
    ("/", "ui"),
];

/// The route of a request that goes to a backend.
pub(crate) fn route(method: &Method, path: &str) -> Route {
    let anthropic = path == "/v1/messages" || path.starts_with("/v1/messages/");
    let find = |table: &[(&str, &'static str)]| {
        table.iter().find(|(known, _)| *known == path).map(|(_, name)| *name)
    };
    if *method == Method::POST {
        if let Some(name) = find(&GENERATING) {
            return Route { name, kind: LeaseKind::Slot, head_with_slot: true, anthropic };
        }
        if let Some(name) = find(&EVALUATING) {
            return Route { name, kind: LeaseKind::Slot, head_with_slot: false, anthropic };
        }
    }
    let name = find(&AUXILIARY).or_else(|| path.starts_with("/slots/").then_some("slots")).unwrap_or("other");
    Route { name, kind: LeaseKind::Aux, head_with_slot: false, anthropic }
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
    match path {
        "/health" | "/v1/health" => Some(Own::Health),
        "/v1/models" | "/models" => Some(Own::Models),
        _ => path
            .strip_prefix("/v1/models/")
            .or_else(|| path.strip_prefix("/models/"))
            // llama-server's own event stream of that name must not be read as a model.
            .filter(|id| !id.is_empty() && *id != "sse")
            .map(Own::Model),
    }
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
    fn errors_are_anthropic_only_on_its_routes() {
        assert!(route(&Method::POST, "/v1/messages").anthropic);
        assert!(route(&Method::POST, "/v1/messages/count_tokens").anthropic);
        assert!(!route(&Method::POST, "/v1/messagesx").anthropic);
        assert!(!route(&Method::POST, "/v1/chat/completions").anthropic);
    }

    #[test]
    fn health_and_models_are_ours() {
        assert_eq!(own(&Method::GET, "/health"), Some(Own::Health));
        assert_eq!(own(&Method::HEAD, "/v1/health"), Some(Own::Health));
        assert_eq!(own(&Method::GET, "/v1/models"), Some(Own::Models));
        assert_eq!(own(&Method::GET, "/v1/models/org/a%2Fb"), Some(Own::Model("org/a%2Fb")));
        assert_eq!(own(&Method::GET, "/models/sse"), None);
        assert_eq!(own(&Method::GET, "/v1/models/"), None);
        assert_eq!(own(&Method::POST, "/v1/models"), None);
        assert_eq!(own(&Method::OPTIONS, "/anything"), Some(Own::Preflight));
        assert_eq!(own(&Method::TRACE, "/"), Some(Own::Forbidden));
        assert_eq!(own(&Method::GET, "/v1/healthx"), None);
    }
}
