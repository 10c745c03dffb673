//! Classifies a request by llama-server's routes. The route determines the kind of lease, the format of
//! errors, the size limit of the body, the request rules, and the label in metrics. Unknown routes are
//! forwarded, and llama-server answers them. [`table`] has all routes; [`target`] reads a model name in the
//! path.

use std::borrow::Cow;

use http::Method;
use warden_policies::dispatch::LeaseKind;

use self::table::STREAM_LABEL;
use crate::protocol::query;
use crate::refusal::ErrorDialect;

mod table;
pub(crate) mod target;

/// Label of requests to a path that llama-server does not have.
pub(crate) const UNKNOWN_ROUTE: &str = "other";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RequestRoute {
    /// Label for logs and metrics, from a bounded set.
    pub(crate) name: &'static str,
    pub(crate) kind: LeaseKind,
    /// True if the route generates text, as a stream if the body asks for one. If a connection ends before
    /// any byte of the stream, the build determines whether execution may have begun
    /// ([`warden_policies::ServerFacts`]).
    pub(crate) generates: bool,
    /// True if the route only computes an answer, so that a request may be executed again if its server dies.
    pub(crate) computes: bool,
    pub(crate) dialect: ErrorDialect,
    pub(crate) size: BodySize,
    /// Shape of the JSON bodies for request rules; `None` if no rules apply.
    pub(crate) shape: Option<BodyShape>,
    pub(crate) effect: RouteEffect,
    /// True if a request loads its model; false for requests that only inspect a process.
    pub(crate) loads: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BodySize {
    /// Prompts, including images and recordings.
    Prompt,
    Audio,
    Text,
    Control,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RouteEffect {
    /// The request has no effect that would be lost with the process.
    None,
    /// The request changes a setting that the next process lacks. The contents of slots do not count: they
    /// make answers faster, not different.
    Sets,
    /// The server stops computing for the request: it saves, restores or erases a slot between two batches.
    Pauses,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum LocalRoute {
    Health,
    Models,
    /// `/v1/models/{id}` with the decoded id.
    Model(String),
    /// `/running`, the list of processes.
    Running,
    /// `/upstream/<model>` without a slash after the name.
    Bare(String),
    Page,
    Preflight,
    /// A method that a proxy must not serve.
    Forbidden,
}

impl RequestRoute {
    /// Only the replay of a generation (`/v1/stream`) ends; other event streams for a `GET` do not.
    pub(crate) fn is_endless(self) -> bool {
        self.name != STREAM_LABEL
    }

    /// Returns the route of a request to a server that is no llama-server. Which of its paths compute is not
    /// known, so each request with a body does; no path is known to change a setting. Any body may be a recording.
    pub(crate) fn at_other_program(self, method: &Method) -> Self {
        let has_body = matches!(*method, Method::POST | Method::PUT | Method::PATCH);
        let kind = if has_body { LeaseKind::Slot } else { self.kind };
        Self { kind, effect: RouteEffect::None, size: BodySize::Audio, loads: true, ..self }
    }
}

impl LocalRoute {
    pub(crate) fn label(&self) -> &'static str {
        match self {
            Self::Health => "health",
            Self::Models | Self::Model(_) => "models",
            Self::Running => "running",
            Self::Bare(_) => "upstream",
            Self::Page => "page",
            Self::Preflight => "preflight",
            Self::Forbidden => "forbidden",
        }
    }

    /// Returns whether the route needs no key. The page checks its clients itself.
    pub(crate) fn is_open(&self) -> bool {
        matches!(self, Self::Health | Self::Page | Self::Preflight | Self::Forbidden)
    }
}

/// Decodes a path as llama-server does, so that percent-encoding cannot evade slots or rules.
pub(crate) fn decoded_path(path: &str) -> Cow<'_, str> {
    let decoded = path.contains('%').then(|| query::percent_decoded(path)).flatten();
    decoded.map_or(Cow::Borrowed(path), Cow::Owned)
}

/// Returns each known path of llama-server once.
pub fn paths() -> impl Iterator<Item = &'static str> {
    table::ROWS.iter().map(|row| row.path)
}

/// Returns the table's spelling of a path that llama-server has.
pub(crate) fn known_path(path: &str) -> Option<&'static str> {
    let plain = decoded_path(path);
    paths().find(|known| *known == plain)
}

pub(crate) fn backend_route(method: &Method, path: &str) -> RequestRoute {
    let route = table::table_route(method, &decoded_path(path));
    if *method == Method::OPTIONS {
        RequestRoute { loads: false, kind: LeaseKind::Read, ..route }
    } else {
        route
    }
}

/// Returns whether a backend may get requests of this method. After an unknown method, llama-server reads
/// head and body as further requests. `CONNECT` asks for a tunnel, and `TRACE` could reveal fields of the
/// request.
fn is_served(method: &Method) -> bool {
    matches!(
        *method,
        Method::GET
            | Method::HEAD
            | Method::POST
            | Method::PUT
            | Method::PATCH
            | Method::DELETE
            | Method::OPTIONS
    )
}

/// Maximum number of letters of an unknown method in logs.
const METHOD_LETTERS: usize = 24;

/// Shortens an unknown method for logs and errors: clients may send one of any length.
pub(crate) fn logged_method(method: &Method) -> Method {
    let name = method.as_str();
    let short = name.get(..METHOD_LETTERS).and_then(|short| Method::from_bytes(short.as_bytes()).ok());
    short.unwrap_or_else(|| method.clone())
}

pub(crate) fn local_route(method: &Method, path: &str) -> Option<LocalRoute> {
    if !is_served(method) {
        return Some(LocalRoute::Forbidden);
    }
    if *method == Method::OPTIONS {
        return Some(LocalRoute::Preflight);
    }
    if !matches!(*method, Method::GET | Method::HEAD) {
        return None;
    }
    table::table_local(&decoded_path(path))
}

/// Shape of a request body for request rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BodyShape {
    /// Chat with `messages`; generates.
    Chat,
    /// `prompt`, in llama-server's own dialect; generates.
    Native,
    /// `prompt`, in OpenAI's dialect; generates.
    Completion,
    /// `instructions` and `input`; generates.
    Responses,
    /// `system` and `messages`; generates.
    Messages,
    /// Members of [`Self::Chat`], on a route that only counts tokens.
    ChatCount,
    /// Members of [`Self::Responses`], on a route that only counts tokens.
    ResponsesCount,
    /// Members of [`Self::Messages`], on a route that only counts tokens.
    MessagesCount,
}

impl BodyShape {
    pub(crate) fn generates(self) -> bool {
        matches!(self, Self::Chat | Self::Native | Self::Completion | Self::Responses | Self::Messages)
    }

    /// Returns whether the route accepts a seed, which llama-server's messages route ignores.
    pub(crate) fn takes_seeds(self) -> bool {
        self.generates() && self != Self::Messages
    }

    /// Returns the members for the list of messages and for the system prompt, if the shape has them.
    pub(crate) fn prompt_members(self) -> (Option<&'static str>, Option<&'static str>) {
        match self {
            Self::Chat | Self::ChatCount => (Some("messages"), None),
            Self::Responses | Self::ResponsesCount => (Some("input"), Some("instructions")),
            Self::Messages | Self::MessagesCount => (Some("messages"), Some("system")),
            Self::Native | Self::Completion => (None, None),
        }
    }

    /// Returns the members for the token limit that the route reads, its native name first.
    pub(crate) fn limit_members(self) -> &'static [&'static str] {
        match self {
            Self::Native => &["n_predict", "max_tokens", "max_completion_tokens"],
            Self::Responses => &["max_output_tokens", "max_tokens", "max_completion_tokens", "n_predict"],
            Self::Messages => &["max_tokens"],
            _ => &["max_tokens", "max_completion_tokens", "n_predict"],
        }
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
            (Method::POST, "/api/chat", "chat", LeaseKind::Slot),
            (Method::POST, "/v1/chat%2Fcompletion%73", "chat", LeaseKind::Slot),
            (Method::POST, "/%65mbeddings", "embeddings", LeaseKind::Slot),
            (Method::POST, "/v1/chat/completion%2573", "other", LeaseKind::Aux),
            (Method::POST, "/v1/embeddings", "embeddings", LeaseKind::Slot),
            (Method::GET, "/v1/chat/completions", "other", LeaseKind::Aux),
            (Method::POST, "/v1/messages/count_tokens", "count_tokens", LeaseKind::Aux),
            (Method::POST, "/slots/3", "slots", LeaseKind::Aux),
            (Method::GET, "/slots", "slots", LeaseKind::Read),
            (Method::HEAD, "/m%65trics", "metrics", LeaseKind::Read),
            (Method::GET, "/props", "props", LeaseKind::Read),
            (Method::DELETE, "/v1/stream", "stream", LeaseKind::Aux),
            (Method::GET, "/", "ui", LeaseKind::Aux),
            (Method::POST, "/no/such", "other", LeaseKind::Aux),
        ] {
            let route = backend_route(&method, path);
            assert_eq!((route.name, route.kind), (name, kind), "{method} {path}");
        }
    }

    #[test]
    fn at_another_program_each_request_with_a_body_takes_a_place() {
        for (method, path, kind) in [
            (Method::POST, "/v1/images/generations", LeaseKind::Slot),
            (Method::PUT, "/anything", LeaseKind::Slot),
            (Method::POST, "/tokenize", LeaseKind::Slot),
            (Method::GET, "/v1/audio/voices", LeaseKind::Aux),
            (Method::GET, "/metrics", LeaseKind::Read),
        ] {
            let route = backend_route(&method, path).at_other_program(&method);
            assert_eq!((route.kind, route.effect), (kind, RouteEffect::None), "{method} {path}");
        }
        let props = backend_route(&Method::POST, "/props").at_other_program(&Method::POST);
        assert_eq!(props.effect, RouteEffect::None);
    }

    #[test]
    fn errors_are_spelled_as_the_clients_of_the_route_expect() {
        for (path, dialect) in [
            ("/v1/messages", ErrorDialect::Anthropic),
            ("/v1/messages/count_tokens", ErrorDialect::Anthropic),
            ("/v1/mess%61ges", ErrorDialect::Anthropic),
            ("/v1/messagesx", ErrorDialect::OpenAi),
            ("/v1/responses", ErrorDialect::Responses),
            ("/v1/chat/completions", ErrorDialect::OpenAi),
        ] {
            assert_eq!(backend_route(&Method::POST, path).dialect, dialect, "{path}");
        }
    }

    #[test]
    fn every_path_stands_in_the_table_once() {
        for (at, row) in table::ROWS.iter().enumerate() {
            let first = table::ROWS.iter().position(|other| other.path == row.path);
            assert_eq!(first, Some(at), "{}", row.path);
        }
    }

    #[test]
    fn what_a_request_does_to_its_server_is_known_by_its_route() {
        for (method, path, effect) in [
            (Method::POST, "/props", RouteEffect::Sets),
            (Method::GET, "/props", RouteEffect::None),
            (Method::POST, "/lora-adapters", RouteEffect::Sets),
            (Method::POST, "/slots/0", RouteEffect::Pauses),
            (Method::GET, "/slots", RouteEffect::None),
            (Method::POST, "/completion", RouteEffect::None),
        ] {
            assert_eq!(backend_route(&method, path).effect, effect, "{method} {path}");
        }
    }

    #[test]
    fn what_only_looks_at_a_process_loads_none() {
        for (method, path, loads) in [
            (Method::GET, "/metrics", false),
            (Method::HEAD, "/slots", false),
            (Method::GET, "/props", false),
            (Method::GET, "/lora-adapters", false),
            (Method::GET, "/tools", false),
            (Method::GET, "/v1/models", false),
            (Method::GET, "/health", false),
            (Method::GET, "/v1/stream", false),
            (Method::DELETE, "/v1/stream", false),
            (Method::POST, "/v1/streams/lookup", false),
            (Method::POST, "/v1/chat/completions/control", false),
            (Method::POST, "/models/unload", false),
            (Method::OPTIONS, "/v1/chat/completions", false),
            (Method::POST, "/props", true),
            (Method::POST, "/lora-adapters", true),
            (Method::POST, "/slots/0", true),
            (Method::POST, "/tools", true),
            (Method::POST, "/tokenize", true),
            (Method::POST, "/completion", true),
            // An operator or user opens the page in order to use the model.
            (Method::GET, "/", true),
            (Method::GET, "/bundle.js", true),
        ] {
            assert_eq!(backend_route(&method, path).loads, loads, "{method} {path}");
        }
    }

    #[test]
    fn health_and_models_are_ours() {
        assert_eq!(local_route(&Method::GET, "/health"), Some(LocalRoute::Health));
        assert_eq!(local_route(&Method::HEAD, "/v1/health"), Some(LocalRoute::Health));
        assert_eq!(local_route(&Method::GET, "/v1/models"), Some(LocalRoute::Models));
        for (path, id) in
            [("/v1/models/org/a%2Fb", "org/a/b"), ("/mod%65ls/a%2525", "a%25"), ("/models/%zz", "%zz")]
        {
            assert_eq!(local_route(&Method::GET, path), Some(LocalRoute::Model(id.to_owned())), "{path}");
        }
        assert_eq!(local_route(&Method::GET, "/he%61lth"), Some(LocalRoute::Health));
        assert_eq!(local_route(&Method::GET, "/v1%2Fmodels"), Some(LocalRoute::Models));
        assert_eq!(local_route(&Method::GET, "/models/sse"), None);
        assert_eq!(local_route(&Method::GET, "/v1/models/"), None);
        assert_eq!(local_route(&Method::POST, "/v1/models"), None);
        assert_eq!(local_route(&Method::OPTIONS, "/anything"), Some(LocalRoute::Preflight));
        assert_eq!(local_route(&Method::TRACE, "/"), Some(LocalRoute::Forbidden));
        let made_up = Method::from_bytes(b"FROB").unwrap();
        assert_eq!(logged_method(&made_up), made_up);
        assert_eq!(
            logged_method(&Method::from_bytes("A".repeat(32_000).as_bytes()).unwrap()).as_str(),
            "A".repeat(24)
        );
        assert_eq!(local_route(&made_up, "/v1/chat/completions"), Some(LocalRoute::Forbidden));
        assert_eq!(local_route(&Method::GET, "/v1/healthx"), None);
    }
}
