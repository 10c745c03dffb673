//! Which of llama-server's routes a request is for: it decides what kind of lease the request needs, how errors are
//! spelled, how large a body may be, which rules for requests mean it, and the bounded label under which it is counted.
//! Routes we do not know pass through; llama-server answers them. All routes of llama-server stand in [`table`]; what names a
//! model in its path is read by [`target`].

mod shape;
mod table;
pub(crate) mod target;

use std::borrow::Cow;

use http::Method;
use warden_policies::dispatch::LeaseKind;

use self::table::STREAM;
use crate::protocol::query;
use crate::refusal::Dialect;

pub(crate) use self::shape::Shape;

/// The label of what is none of llama-server's routes, as far as we know them.
pub(crate) const UNKNOWN: &str = "other";

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
    /// Whether it computes an answer and changes nothing else, so that it may be executed again if its server dies.
    pub(crate) computes: bool,
    /// How errors are spelled.
    pub(crate) dialect: Dialect,
    /// Which limit its bodies have.
    pub(crate) size: BodySize,
    /// What of a JSON body the rules for requests mean; `None`: they leave it alone.
    pub(crate) shape: Option<Shape>,
    /// What the request does to its server beside being answered.
    pub(crate) effect: Effect,
    /// Whether a model that is not loaded is loaded for it. What only looks at a process does not bring one about.
    pub(crate) loads: bool,
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

/// What a request does to its server beside being answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    /// Nothing that the next process would lack.
    None,
    /// It sets something that outlives it, and that a process which follows does not have. What a request does to slots is no
    /// such thing: their contents make answers faster and not different.
    Sets,
    /// The server stops computing while it answers: a slot is saved, restored or erased between two batches.
    Pauses,
}

/// What is answered here and never reaches a backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum LocalRoute {
    /// `/health`.
    Health,
    /// `/v1/models`.
    Models,
    /// `/v1/models/{id}`; the id, decoded.
    Model(String),
    /// `/running`: which processes there are.
    Running,
    /// `/upstream/<model>` without a slash behind it; the name.
    Bare(String),
    /// The page for operators.
    Page,
    /// The answer to a browser's question whether it may call.
    Preflight,
    /// A method that no proxy may serve to anybody.
    Forbidden,
}

impl Route {
    /// Whether a stream of events that answers a `GET` here has no end of its own. The replay of a generation has one.
    pub(crate) fn watches(self) -> bool {
        self.name != STREAM
    }
}

impl LocalRoute {
    /// Label for logs and metrics.
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

    /// Whether everybody may ask it: whether we live, and whether a browser may call. What judges itself who asks. And what nobody
    /// is served.
    pub(crate) fn is_open(&self) -> bool {
        matches!(self, Self::Health | Self::Page | Self::Preflight | Self::Forbidden)
    }
}

/// A path as llama-server looks for its handler: decoded. So no spelling is a way around slots, rules and budgets. One that
/// cannot be decoded stays as it is.
pub(crate) fn plain(path: &str) -> Cow<'_, str> {
    let decoded = path.contains('%').then(|| query::percent_decoded(path)).flatten();
    decoded.map_or(Cow::Borrowed(path), Cow::Owned)
}

/// All paths of llama-server that we know, each once.
pub fn paths() -> impl Iterator<Item = &'static str> {
    table::ROWS.iter().map(|row| row.path)
}

/// The path as we write it, if it is one of llama-server's that we know.
pub(crate) fn known(path: &str) -> Option<&'static str> {
    let plain = plain(path);
    paths().find(|known| *known == plain)
}

/// The route of a request that goes to a backend.
pub(crate) fn route(method: &Method, path: &str) -> Route {
    let route = table::route(method, &plain(path));
    // A browser's question.
    if *method == Method::OPTIONS { Route { loads: false, kind: LeaseKind::Read, ..route } } else { route }
}

/// Whether a backend may get requests of this method. Behind one that it does not know, llama-server takes head and
/// body for requests of their own; `CONNECT` asks for a tunnel, and `TRACE` for what others must not see.
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

/// Letters of a method that is made up, as far as it is logged and named.
const METHOD_LETTERS: usize = 24;

/// The method by which a request is logged and named: there is no bound to what clients make up.
pub(crate) fn named(method: &Method) -> Method {
    let name = method.as_str();
    let short = name.get(..METHOD_LETTERS).and_then(|short| Method::from_bytes(short.as_bytes()).ok());
    short.unwrap_or_else(|| method.clone())
}

/// Whether the request is answered here.
pub(crate) fn local(method: &Method, path: &str) -> Option<LocalRoute> {
    if !is_served(method) {
        return Some(LocalRoute::Forbidden);
    }
    if *method == Method::OPTIONS {
        return Some(LocalRoute::Preflight);
    }
    if !matches!(*method, Method::GET | Method::HEAD) {
        return None;
    }
    table::local(&plain(path))
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
    fn every_path_stands_in_the_table_once() {
        for (at, row) in table::ROWS.iter().enumerate() {
            let first = table::ROWS.iter().position(|other| other.path == row.path);
            assert_eq!(first, Some(at), "{}", row.path);
        }
    }

    #[test]
    fn what_a_request_does_to_its_server_is_known_by_its_route() {
        for (method, path, effect) in [
            (Method::POST, "/props", Effect::Sets),
            (Method::GET, "/props", Effect::None),
            (Method::POST, "/lora-adapters", Effect::Sets),
            (Method::POST, "/slots/0", Effect::Pauses),
            (Method::GET, "/slots", Effect::None),
            (Method::POST, "/completion", Effect::None),
        ] {
            assert_eq!(route(&method, path).effect, effect, "{method} {path}");
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
            // Its page is opened by a person who means to use it.
            (Method::GET, "/", true),
            (Method::GET, "/bundle.js", true),
        ] {
            assert_eq!(route(&method, path).loads, loads, "{method} {path}");
        }
    }

    #[test]
    fn health_and_models_are_ours() {
        assert_eq!(local(&Method::GET, "/health"), Some(LocalRoute::Health));
        assert_eq!(local(&Method::HEAD, "/v1/health"), Some(LocalRoute::Health));
        assert_eq!(local(&Method::GET, "/v1/models"), Some(LocalRoute::Models));
        for (path, id) in
            [("/v1/models/org/a%2Fb", "org/a/b"), ("/mod%65ls/a%2525", "a%25"), ("/models/%zz", "%zz")]
        {
            assert_eq!(local(&Method::GET, path), Some(LocalRoute::Model(id.to_owned())), "{path}");
        }
        assert_eq!(local(&Method::GET, "/he%61lth"), Some(LocalRoute::Health));
        assert_eq!(local(&Method::GET, "/v1%2Fmodels"), Some(LocalRoute::Models));
        assert_eq!(local(&Method::GET, "/models/sse"), None);
        assert_eq!(local(&Method::GET, "/v1/models/"), None);
        assert_eq!(local(&Method::POST, "/v1/models"), None);
        assert_eq!(local(&Method::OPTIONS, "/anything"), Some(LocalRoute::Preflight));
        assert_eq!(local(&Method::TRACE, "/"), Some(LocalRoute::Forbidden));
        let made_up = Method::from_bytes(b"FROB").unwrap();
        assert_eq!(named(&made_up), made_up);
        assert_eq!(
            named(&Method::from_bytes("A".repeat(32_000).as_bytes()).unwrap()).as_str(),
            "A".repeat(24)
        );
        assert_eq!(local(&made_up, "/v1/chat/completions"), Some(LocalRoute::Forbidden));
        assert_eq!(local(&Method::GET, "/v1/healthx"), None);
    }
}
