//! The data plane: it listens, limits, chooses the model, waits for the right to use a backend, forwards, and says what
//! went wrong. It owns no backend and decides nothing about one: that is the supervisor's.
//!
//! ```text
//!   client --TCP--> client ──> exchange ──> answer ··> back to the client, and holds the lease until it has ended
//!                                 │
//!       access ──> route ──> body ──> rules ──> backend --socket--> llama-server
//!    may it ask?  for what?  taken in  changed   lease, connection, attempts
//! ```
//!
//! Promises, each with its test:
//! - Bytes pass unchanged, both ways, as they come; a slow reader stalls its own backend and nobody else's.
//! - No request is executed twice by servers that live. It is sent again with proof that nothing was executed, or once more after
//!   its server died, if it only computes an answer of which its client has nothing (`backend::attempts`, `backend::again`).
//! - A client that leaves gives up everything at once: its place in the queue, its lease, its backend's generation.
//! - Every error is one of ours with a cure, or the backend's own (`refusal`).
//! - Memory is bounded: connections, heads, and one budget for bodies that are held.
//!
//! Each folder is one stage of a request, and may use only those below it:
//!
//! | folder | job |
//! |---|---|
//! | `gateway` | listening and serving: the entry point |
//! | `client` | client connections: their first moments, their limits and clocks, TLS, HTTP/2 |
//! | `inward` | connections that we make to ourselves |
//! | `exchange` | one request's life, stage by stage; what is answered here; how large a prompt is |
//! | `shared`, `live` | what all requests share; what of it may change while we serve |
//! | `answer` | the way back: whole events, counted work, answers put together from streams, the record |
//! | `page` | the way to the page for operators, if there is one here |
//! | `access` | keys, web pages, host names: who may send a request |
//! | `rules` | what an operator wants changed in request bodies, in place |
//! | `backend` | the way to a backend: leases, connections, attempts |
//! | `body` | request bodies: taken in, read as they pass, changed in place, under one budget |
//! | `route` | the one table of paths; what a target says of its model |
//! | `requests` | those in flight and those that ended last, for an operator, and how one is cancelled |
//! | `refusal` | every error that a client can get from us, and how it is spelled |
//! | `protocol` | what HTTP demands of an intermediary; ambiguous requests; heads, queries, events |
//! | `config`, `observe`, `trace`, `limits` | numbers; records and gauges; their parts in traces; what connections may cost |
//! | `workers`, `pulse`, `clock` | the threads that all of it runs on; whether they turn; the time of day |

mod access;
mod answer;
mod backend;
mod body;
mod client;
mod clock;
mod config;
mod exchange;
mod gateway;
mod inward;
mod limits;
mod live;
mod observe;
mod page;
mod protocol;
mod pulse;
mod refusal;
mod requests;
mod route;
mod rules;
mod shared;
mod trace;
mod workers;

#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
#[path = "../tests/fuzzing/mod.rs"]
pub mod fuzzing;

pub use access::cors::Cors;
pub use access::keys::{KeyCounts, KeyHash, KeySpec, Keys};
pub use body::budget::most_of_one_client;
pub use body::request_copy::Recorder;
pub use client::error::GatewayError;
pub use client::tls_files::{Certificate, Tls, TlsError};
pub use config::{GatewayConfig, TlsFiles};
pub use gateway::{Bound, Ends, Gateway};
pub use inward::Inward;
pub use limits::{Limit, Limited};
pub use live::{Control, Live};
pub use observe::{Gauges, Observer, Outcome, Record};
pub use page::{Answering, Asker, Page};
pub use protocol::query::percent_decoded;
pub use pulse::Pulse;
pub use requests::{Holds, NotCancelled, RequestState, RequestView, Requests, Told};
pub use route::paths;
pub use rules::{Listing, ModelRules, Name, RequestRules, SystemMode, SystemPrompt};
pub use trace::{Kind as PartKind, Part, Peer, Trace};

#[cfg(test)]
mod tests;
