//! The table of all known paths, which follows llama-server's own (`tools/server/server.cpp`). llama-server
//! has no websockets. Its only event streams without a slot are `GET` routes (`/v1/stream`, `/models/sse`),
//! so they may be repeated like any `GET`.

use http::Method;
use warden_policies::dispatch::LeaseKind;

use super::{BodyShape, BodySize, LocalRoute, RequestRoute, RouteEffect, UNKNOWN_ROUTE};
use crate::refusal::ErrorDialect;

/// Label of the route that replays a generation; llama-server continues the generation without a client.
pub(super) const STREAM_LABEL: &str = "stream";

#[derive(Clone, Copy, Debug)]
pub(super) struct RouteRow {
    pub(super) path: &'static str,
    /// Route of a `POST`, and of other methods unless it needs a slot.
    post: RequestRoute,
    /// The gateway's own answer to a `GET`.
    local: Option<LocalGet>,
    loads: LoadingMethods,
}

#[derive(Clone, Copy, Debug)]
enum LoadingMethods {
    All,
    /// The other methods only inspect a process.
    Post,
    None,
}

#[derive(Clone, Copy, Debug)]
enum LocalGet {
    Health,
    Models,
    Running,
}

const UNKNOWN_PATH: RequestRoute = RequestRoute {
    name: UNKNOWN_ROUTE,
    kind: LeaseKind::Aux,
    generates: false,
    computes: false,
    dialect: ErrorDialect::OpenAi,
    size: BodySize::Prompt,
    shape: None,
    effect: RouteEffect::None,
    loads: true,
};

/// All known paths, the most frequent first.
pub(super) static ROWS: [RouteRow; 46] = [
    generating("/v1/chat/completions", "chat", BodyShape::Chat),
    generating("/chat/completions", "chat", BodyShape::Chat),
    // Older builds have the chat route under Ollama's path, too.
    generating("/api/chat", "chat", BodyShape::Chat),
    generating("/v1/completions", "completions", BodyShape::Completion),
    generating("/completions", "completions", BodyShape::Native),
    generating("/completion", "completions", BodyShape::Native),
    generating("/v1/responses", "responses", BodyShape::Responses).with_dialect(ErrorDialect::Responses),
    generating("/responses", "responses", BodyShape::Responses).with_dialect(ErrorDialect::Responses),
    generating("/v1/messages", "messages", BodyShape::Messages).with_dialect(ErrorDialect::Anthropic),
    generating("/infill", "infill", BodyShape::Native),
    // Requests that occupy a slot or the whole model, and get a single answer. A transcription may be a
    // stream, but only its form data shows that, and the head of its stream does not prove that execution
    // began.
    evaluating("/v1/audio/transcriptions", "audio", BodySize::Audio),
    evaluating("/audio/transcriptions", "audio", BodySize::Audio),
    evaluating("/v1/embeddings", "embeddings", BodySize::Prompt),
    evaluating("/embeddings", "embeddings", BodySize::Prompt),
    evaluating("/embedding", "embeddings", BodySize::Prompt),
    evaluating("/v1/rerank", "rerank", BodySize::Text),
    evaluating("/v1/reranking", "rerank", BodySize::Text),
    evaluating("/rerank", "rerank", BodySize::Text),
    evaluating("/reranking", "rerank", BodySize::Text),
    evaluating("/predict", "predict", BodySize::Prompt),
    // Requests that need no slot.
    counting("/v1/chat/completions/input_tokens", "input_tokens", BodyShape::ChatCount),
    counting("/chat/completions/input_tokens", "input_tokens", BodyShape::ChatCount),
    counting("/v1/responses/input_tokens", "input_tokens", BodyShape::ResponsesCount),
    counting("/responses/input_tokens", "input_tokens", BodyShape::ResponsesCount),
    counting("/v1/messages/count_tokens", "count_tokens", BodyShape::MessagesCount)
        .with_dialect(ErrorDialect::Anthropic),
    counting("/apply-template", "apply_template", BodyShape::ChatCount),
    slotless("/v1/chat/completions/control", "control", BodySize::Control).with_loads(LoadingMethods::None),
    slotless("/tokenize", "tokenize", BodySize::Text).with_computes(),
    slotless("/detokenize", "detokenize", BodySize::Text).with_computes(),
    setting("/props", "props", RouteEffect::Sets),
    slotless("/metrics", "metrics", BodySize::Control).with_loads(LoadingMethods::None),
    setting("/slots", "slots", RouteEffect::Pauses),
    setting("/lora-adapters", "lora_adapters", RouteEffect::Sets),
    slotless("/v1/stream", STREAM_LABEL, BodySize::Control).with_loads(LoadingMethods::None),
    slotless("/v1/streams/lookup", STREAM_LABEL, BodySize::Control).with_loads(LoadingMethods::None),
    slotless("/tools", "tools", BodySize::Text).with_loads(LoadingMethods::Post),
    slotless("/cors-proxy", "cors_proxy", BodySize::Text),
    local("/models", "router", BodySize::Control, LocalGet::Models),
    slotless("/models/load", "router", BodySize::Control).with_loads(LoadingMethods::None),
    slotless("/models/unload", "router", BodySize::Control).with_loads(LoadingMethods::None),
    slotless("/models/sse", "router", BodySize::Control).with_loads(LoadingMethods::None),
    slotless("/", "ui", BodySize::Control),
    // The gateway's own routes.
    local("/health", UNKNOWN_ROUTE, BodySize::Prompt, LocalGet::Health),
    local("/v1/health", UNKNOWN_ROUTE, BodySize::Prompt, LocalGet::Health),
    local("/v1/models", UNKNOWN_ROUTE, BodySize::Prompt, LocalGet::Models),
    local("/running", UNKNOWN_ROUTE, BodySize::Prompt, LocalGet::Running),
];

/// Row of a route that generates text, possibly as a stream.
const fn generating(path: &'static str, name: &'static str, shape: BodyShape) -> RouteRow {
    row(
        path,
        RequestRoute {
            name,
            kind: LeaseKind::Slot,
            generates: true,
            computes: true,
            shape: Some(shape),
            ..UNKNOWN_PATH
        },
    )
}

/// Row of a route that occupies a slot or the whole model, and gives a single answer.
const fn evaluating(path: &'static str, name: &'static str, size: BodySize) -> RouteRow {
    row(path, RequestRoute { name, kind: LeaseKind::Slot, computes: true, size, ..UNKNOWN_PATH })
}

/// Row of a route that counts the prompt of a body of this shape, without a slot.
const fn counting(path: &'static str, name: &'static str, shape: BodyShape) -> RouteRow {
    row(path, RequestRoute { name, computes: true, shape: Some(shape), ..UNKNOWN_PATH })
}

const fn slotless(path: &'static str, name: &'static str, size: BodySize) -> RouteRow {
    row(path, RequestRoute { name, size, ..UNKNOWN_PATH })
}

/// Row of a route whose `POST` changes the server, while other methods only inspect it.
const fn setting(path: &'static str, name: &'static str, effect: RouteEffect) -> RouteRow {
    let post = RequestRoute { name, size: BodySize::Control, effect, ..UNKNOWN_PATH };
    RouteRow { loads: LoadingMethods::Post, ..row(path, post) }
}

/// Row of a route whose `GET` the gateway answers itself.
const fn local(path: &'static str, name: &'static str, size: BodySize, get: LocalGet) -> RouteRow {
    RouteRow { local: Some(get), ..slotless(path, name, size).with_loads(LoadingMethods::None) }
}

const fn row(path: &'static str, post: RequestRoute) -> RouteRow {
    RouteRow { path, post, local: None, loads: LoadingMethods::All }
}

impl RouteRow {
    const fn with_dialect(self, dialect: ErrorDialect) -> Self {
        Self { post: RequestRoute { dialect, ..self.post }, ..self }
    }

    const fn with_computes(self) -> Self {
        Self { post: RequestRoute { computes: true, ..self.post }, ..self }
    }

    const fn with_loads(self, loads: LoadingMethods) -> Self {
        Self { loads, ..self }
    }

    fn find(path: &str) -> Option<&'static Self> {
        let path = if path.starts_with("/slots/") { "/slots" } else { path };
        ROWS.iter().find(|row| row.path == path)
    }
}

pub(super) fn table_route(method: &Method, path: &str) -> RequestRoute {
    let is_post = *method == Method::POST;
    let Some(RouteRow { post, loads, .. }) = RouteRow::find(path) else {
        let is_anthropic = path.starts_with("/v1/messages/");
        return RequestRoute {
            dialect: if is_anthropic { ErrorDialect::Anthropic } else { UNKNOWN_PATH.dialect },
            ..UNKNOWN_PATH
        };
    };
    let route = match post.kind {
        _ if is_post => *post,
        LeaseKind::Slot => RequestRoute { dialect: post.dialect, ..UNKNOWN_PATH },
        LeaseKind::Aux | LeaseKind::Read | LeaseKind::Watch => {
            RequestRoute { computes: false, shape: None, effect: RouteEffect::None, ..*post }
        }
    };
    let loads = match loads {
        LoadingMethods::All => true,
        LoadingMethods::Post => is_post,
        LoadingMethods::None => false,
    };
    let reads = !loads && matches!(*method, Method::GET | Method::HEAD);
    RequestRoute { loads, kind: if reads { LeaseKind::Read } else { route.kind }, ..route }
}

pub(super) fn table_local(path: &str) -> Option<LocalRoute> {
    match RouteRow::find(path).and_then(|row| row.local) {
        Some(LocalGet::Health) => Some(LocalRoute::Health),
        Some(LocalGet::Models) => Some(LocalRoute::Models),
        Some(LocalGet::Running) => Some(LocalRoute::Running),
        None => model_id(path).map(|id| LocalRoute::Model(id.to_owned())),
    }
}

fn model_id(path: &str) -> Option<&str> {
    path.strip_prefix("/v1/models/")
        .or_else(|| path.strip_prefix("/models/"))
        // `/models/sse` is an event stream of llama-server, not a model.
        .filter(|id| !id.is_empty() && *id != "sse")
}
