//! The data plane: listens, enforces limits, chooses the model, waits for a lease, forwards, and reports
//! errors. The supervisor owns the backends and decides everything about them.
//!
//! ```text
//!   client --TCP--> client ──> exchange ──> answer ··> to the client; holds the lease until the answer ends
//!                                 │
//!       access ──> route ──> body ──> rules ──> backend --socket--> llama-server
//!      permitted?  which?     read     changed   lease, connection, attempts
//! ```
//!
//! Guarantees, each with its test:
//! - Bytes are passed on unchanged in both directions, as they arrive; a slow client slows down only its
//!   own backend connection.
//! - No two live servers execute the same request. The gateway sends a request again only if nothing was
//!   executed, or if its server died, it only computes an answer, and the client has no part of that answer
//!   (`backend::attempts`, `backend::again`). If the client has a part of a generated stream, another server
//!   may continue the stream (`answer::continuation`).
//! - A client that leaves frees everything at once: its place in the queue, its lease, its backend's
//!   generation.
//! - Every error is either the gateway's, with a remedy, or the backend's own (`refusal`).
//! - Memory is bounded: connections, heads, and one budget for held bodies.
//!
//! Each folder is one stage of a request, and may use only the folders below it in this table:
//!
//! | folder | job |
//! |---|---|
//! | `gateway` | the entry point: listens and serves; connections from this process to itself |
//! | `client` | client connections: accepting, limits and timeouts, TLS |
//! | `exchange` | one request's life, stage by stage; own routes; prompt sizes |
//! | `shared` | state that all requests share; the settings that may change while serving |
//! | `answer` | the response path: relays whole events, counts work, keeps the record |
//! | `page` | the interface to the operators' page, if there is one |
//! | `access` | keys, web pages, host names: who may send a request |
//! | `rules` | the operator's changes to request bodies, in place |
//! | `backend` | the path to a backend: leases, connections, attempts |
//! | `body` | request bodies: read, scanned while passed on, edited in place, held under one budget |
//! | `route` | the one table of paths; the model in a target |
//! | `requests` | requests in flight and the last ended ones, for operators to list and cancel |
//! | `refusal` | every error that a client can get from the gateway, and its format |
//! | `protocol` | duties of an HTTP intermediary; checks for ambiguous requests; heads, queries, events |
//! | `config`, `observe`, `trace` | settings; records, gauges and counters of limits; spans |
//! | `workers`, `clock` | the worker threads, and the check that they respond; the time of day |

mod access;
mod answer;
mod backend;
mod body;
mod client;
mod clock;
mod config;
mod exchange;
mod gateway;
mod observe;
mod page;
mod protocol;
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

pub use access::cors::CorsConfig;
pub use access::keys::{ApiKeys, KeyCounts, KeyHash, KeySpec};
pub use body::budget::max_client_bytes;
pub use client::error::GatewayError;
pub use client::tls_files::{CertificateInfo, TlsError, TlsState};
pub use config::{GatewayConfig, TlsFiles};
pub use gateway::{BoundGateway, Gateway, InwardConnector};
pub use observe::{
    GatewayGauges, GatewayLimit, GatewayObserver, LimitCounters, RequestOutcome, RequestRecord,
};
pub use page::{OperatorPage, PageAnswer, PageClient};
pub use protocol::query::percent_decoded;
pub use requests::{
    CancelError, CancelledRequest, ContextHoldings, RequestRegistry, RequestState, RequestView,
};
pub use route::paths;
pub use rules::{ListingRules, ModelRules, RequestRules, SystemMode, SystemPrompt, VirtualName};
pub use shared::{GatewayControl, LiveConfig, StopTokens};
pub use trace::{GatewayTrace, TracePart, TracePartKind as PartKind, TracePeer};
pub use workers::GatewayPulse;

#[cfg(test)]
mod tests;
