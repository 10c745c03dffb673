//! The data plane: it listens, limits, chooses the model, waits for the right to use a backend, forwards, and says what
//! went wrong. It owns no backend and decides nothing about one: that is the supervisor's.
//!
//! ```text
//!   client --TCP--> connection --> exchange --> intake (which model?) --> lease --> pool --socket--> llama-server
//!                                     ^                                               |
//!                                     +------------- relay (holds the lease) <--------+
//! ```
//!
//! Promises, each with its test:
//! - Bytes pass unchanged, both ways, as they come; a slow reader stalls its own backend and nobody else's.
//! - No request is executed twice. It is sent again only with proof that nothing was executed (`attempts`).
//! - A client that leaves gives up everything at once: its place in the queue, its lease, its backend's generation.
//! - Every error is one of ours with a cure, or the backend's own (`errors`).
//! - Memory is bounded: connections, heads, and one budget for bodies that are held.
//!
//! | module | job |
//! |---|---|
//! | `workers` | the threads that all of it runs on |
//! | `gateway`, `front` | listening; a connection's first moments |
//! | `connection`, `client_io`, `h2`, `tls` | client connections: their limits and clocks |
//! | `exchange`, `attempts` | one request's life; its way to an answer |
//! | `routes`, `own`, `errors` | what is served by whom; our own answers |
//! | `demand` | how large a prompt is, where admission wants to know |
//! | `intake`, `scan`, `multipart`, `query`, `target`, `budget` | which model a request names; held bodies |
//! | `pace` | how slowly a body may come |
//! | `wire`, `raw_head` | what HTTP demands of an intermediary; ambiguous requests |
//! | `rules`, `outline`, `splice` | what an operator wants changed in request bodies, in place |
//! | `backends`, `pool`, `link`, `signal`, `request_body`, `headers` | the way to a backend |
//! | `assemble` | answers put together from streams, where a model is told so |
//! | `fingerprint`, `checkpoint` | requests that may have killed their server: known again, looked at |
//! | `relay`, `sse`, `meter` | the way back: whole events, counted work |
//! | `limits` | what connections may cost, and how often that was too much |
//! | `tls_files` | certificate and key, read and read again |
//! | `cors` | which web pages may call |
//! | `keys` | API keys: who may send requests, to which models, how many |
//! | `live` | what may change while we serve: rules of single models |
//! | `observe` | what is told: records and gauges |

mod assemble;
mod attempts;
mod backends;
mod budget;
mod checkpoint;
mod client_io;
mod clock;
mod config;
mod connection;
mod cors;
mod demand;
mod doors;
mod dropin;
mod errors;
mod exchange;
mod fingerprint;
mod forged;
mod front;
mod gateway;
mod h2;
mod headers;
mod intake;
mod keys;
mod limits;
mod link;
mod live;
mod meter;
mod multipart;
mod names;
mod observe;
mod outline;
mod own;
mod pace;
mod pool;
mod prefix;
mod query;
mod raw_head;
mod relay;
mod request_body;
mod routes;
mod rules;
mod scan;
mod signal;
mod spelling;
mod splice;
mod sse;
mod tape;
mod target;
mod tls;
mod tls_files;
mod wire;
mod workers;

pub use budget::most_of_one_client;
pub use config::{GatewayConfig, H2Limits};
pub use cors::Cors;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing;

pub use gateway::{Bound, Gateway, GatewayError};
pub use keys::{KeyCounts, KeyHash, KeySpec, Keys};
pub use limits::{Limit, Limited};
pub use live::{Control, Live};
pub use observe::{Gauges, Observer, Outcome, Record};
pub use rules::{ModelRules, RequestRules, SystemMode, SystemPrompt};
pub use tape::Recorder;
pub use tls_files::{Certificate, Tls, TlsError, TlsFiles};

#[cfg(test)]
mod tests;
