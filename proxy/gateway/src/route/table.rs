//! The one table of paths. The table follows llama-server's own (`tools/server/server.cpp`). llama-server
//! has no websockets; its only event streams without a slot answer `GET` (`/v1/stream`, `/models/sse`), and
//! may be sent again like any `GET`.

use http::Method;
use warden_policies::dispatch::LeaseKind;

use super::{BodySize, Effect, LocalRoute, Route, Shape, UNKNOWN};
use crate::refusal::Dialect;

/// Label of streams of generations that continue without a client.
pub(super) const STREAM: &str = "stream";

/// A path and its routes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Row {
    pub(super) path: &'static str,
    /// Route of a `POST`; if it needs no slot, other methods have the same.
    post: Route,
    /// The gateway's own answer to a `GET`.
    local: Option<Local>,
    loads: Loads,
}

/// Methods that load a model that is not loaded.
#[derive(Clone, Copy, Debug)]
enum Loads {
    All,
    /// The other methods only inspect a process.
    Post,
    None,
}

/// The gateway's own answers to a `GET`.
#[derive(Clone, Copy, Debug)]
enum Local {
    Health,
    Models,
    Running,
}

/// Route of a path that is none of llama-server's known ones.
const NONE: Route = Route {
    name: UNKNOWN,
    kind: LeaseKind::Aux,
    generates: false,
    computes: false,
    dialect: Dialect::OpenAi,
    size: BodySize::Prompt,
    shape: None,
    effect: Effect::None,
    loads: true,
};

/// All known paths, the most frequent first.
pub(super) static ROWS: [Row; 46] = [
    generating("/v1/chat/completions", "chat", Shape::Chat),
    generating("/chat/completions", "chat", Shape::Chat),
    // In older builds: the same under Ollama's name.
    generating("/api/chat", "chat", Shape::Chat),
    generating("/v1/completions", "completions", Shape::Completion),
    generating("/completions", "completions", Shape::Native),
    generating("/completion", "completions", Shape::Native),
    generating("/v1/responses", "responses", Shape::Responses).spelled(Dialect::Responses),
    generating("/responses", "responses", Shape::Responses).spelled(Dialect::Responses),
    generating("/v1/messages", "messages", Shape::Messages).spelled(Dialect::Anthropic),
    generating("/infill", "infill", Shape::Native),
    // Requests that occupy a slot, or the model, and answer at once. A transcription may be a stream, but
    // only its form shows that; its head proves nothing.
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
    counting("/v1/chat/completions/input_tokens", "input_tokens", Shape::ChatCount),
    counting("/chat/completions/input_tokens", "input_tokens", Shape::ChatCount),
    counting("/v1/responses/input_tokens", "input_tokens", Shape::ResponsesCount),
    counting("/responses/input_tokens", "input_tokens", Shape::ResponsesCount),
    counting("/v1/messages/count_tokens", "count_tokens", Shape::MessagesCount).spelled(Dialect::Anthropic),
    counting("/apply-template", "apply_template", Shape::ChatCount),
    beside("/v1/chat/completions/control", "control", BodySize::Control).loading_by(Loads::None),
    beside("/tokenize", "tokenize", BodySize::Text).computing(),
    beside("/detokenize", "detokenize", BodySize::Text).computing(),
    beside("/props", "props", BodySize::Control).doing(Effect::Sets).loading_by(Loads::Post),
    beside("/metrics", "metrics", BodySize::Control).loading_by(Loads::None),
    beside("/slots", "slots", BodySize::Control).doing(Effect::Pauses).loading_by(Loads::Post),
    beside("/lora-adapters", "lora_adapters", BodySize::Control).doing(Effect::Sets).loading_by(Loads::Post),
    beside("/v1/stream", STREAM, BodySize::Control).loading_by(Loads::None),
    beside("/v1/streams/lookup", STREAM, BodySize::Control).loading_by(Loads::None),
    beside("/tools", "tools", BodySize::Text).loading_by(Loads::Post),
    beside("/cors-proxy", "cors_proxy", BodySize::Text),
    beside("/models", "router", BodySize::Control).answered_by(Local::Models).loading_by(Loads::None),
    beside("/models/load", "router", BodySize::Control).loading_by(Loads::None),
    beside("/models/unload", "router", BodySize::Control).loading_by(Loads::None),
    beside("/models/sse", "router", BodySize::Control).loading_by(Loads::None),
    beside("/", "ui", BodySize::Control),
    // The gateway's own routes.
    beside("/health", UNKNOWN, BodySize::Prompt).answered_by(Local::Health).loading_by(Loads::None),
    beside("/v1/health", UNKNOWN, BodySize::Prompt).answered_by(Local::Health).loading_by(Loads::None),
    beside("/v1/models", UNKNOWN, BodySize::Prompt).answered_by(Local::Models).loading_by(Loads::None),
    beside("/running", UNKNOWN, BodySize::Prompt).answered_by(Local::Running).loading_by(Loads::None),
];

/// Generates text, possibly as a stream.
const fn generating(path: &'static str, name: &'static str, shape: Shape) -> Row {
    row(
        path,
        Route { name, kind: LeaseKind::Slot, generates: true, computes: true, shape: Some(shape), ..NONE },
    )
}

/// Occupies a slot, or the model, and answers at once.
const fn evaluating(path: &'static str, name: &'static str, size: BodySize) -> Row {
    row(path, Route { name, kind: LeaseKind::Slot, computes: true, size, ..NONE })
}

/// Counts the prompt of a route of this shape, without a slot.
const fn counting(path: &'static str, name: &'static str, shape: Shape) -> Row {
    row(path, Route { name, computes: true, shape: Some(shape), ..NONE })
}

/// Is answered without a slot.
const fn beside(path: &'static str, name: &'static str, size: BodySize) -> Row {
    row(path, Route { name, size, ..NONE })
}

const fn row(path: &'static str, post: Route) -> Row {
    Row { path, post, local: None, loads: Loads::All }
}

impl Row {
    const fn spelled(self, dialect: Dialect) -> Self {
        Self { post: Route { dialect, ..self.post }, ..self }
    }

    const fn doing(self, effect: Effect) -> Self {
        Self { post: Route { effect, ..self.post }, ..self }
    }

    const fn computing(self) -> Self {
        Self { post: Route { computes: true, ..self.post }, ..self }
    }

    const fn answered_by(self, local: Local) -> Self {
        Self { local: Some(local), ..self }
    }

    const fn loading_by(self, loads: Loads) -> Self {
        Self { loads, ..self }
    }

    fn of(path: &str) -> Option<&'static Self> {
        let path = if path.starts_with("/slots/") { "/slots" } else { path };
        ROWS.iter().find(|row| row.path == path)
    }
}

/// Returns the route of a request to this decoded path.
pub(super) fn route(method: &Method, path: &str) -> Route {
    let is_post = *method == Method::POST;
    let Some(Row { post, loads, .. }) = Row::of(path) else {
        let is_anthropic = path.starts_with("/v1/messages/");
        return Route { dialect: if is_anthropic { Dialect::Anthropic } else { NONE.dialect }, ..NONE };
    };
    let route = match post.kind {
        _ if is_post => *post,
        LeaseKind::Slot => Route { dialect: post.dialect, ..NONE },
        LeaseKind::Aux | LeaseKind::Read | LeaseKind::Watch => {
            Route { computes: false, shape: None, effect: Effect::None, ..*post }
        }
    };
    let loads = match loads {
        Loads::All => true,
        Loads::Post => is_post,
        Loads::None => false,
    };
    let reads = !loads && matches!(*method, Method::GET | Method::HEAD);
    Route { loads, kind: if reads { LeaseKind::Read } else { route.kind }, ..route }
}

/// Returns the gateway's own route for a `GET` to this decoded path.
pub(super) fn local(path: &str) -> Option<LocalRoute> {
    match Row::of(path).and_then(|row| row.local) {
        Some(Local::Health) => Some(LocalRoute::Health),
        Some(Local::Models) => Some(LocalRoute::Models),
        Some(Local::Running) => Some(LocalRoute::Running),
        None => model_id(path).map(|id| LocalRoute::Model(id.to_owned())),
    }
}

fn model_id(path: &str) -> Option<&str> {
    path.strip_prefix("/v1/models/")
        .or_else(|| path.strip_prefix("/models/"))
        // llama-server has an event stream of that name.
        .filter(|id| !id.is_empty() && *id != "sse")
}
