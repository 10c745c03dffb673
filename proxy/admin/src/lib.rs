//! The operator's interface: status, restart, drain, logs, events and metrics, over a Unix socket that only
//! its owner can open, and over a loopback address if configured. The public listener serves none of it,
//! except the web page to holders of an operator's key.
//!
//! ```text
//!   command line ─ client ─> Unix socket ─┬─> server ─> page? [`server::AdminPage`], in a crate of its own
//!   scrapers ──────────────> loopback ────┘          └> route ─> answer ─> fleet, gateway, records
//!   load balancers ────────> probe
//!   fleet, gateway ────────> metrics, access_log, otel, series
//! ```
//!
//! | module | job |
//! |---|---|
//! | `route` | maps requests to routes; pure |
//! | `answer` | answers of the routes |
//! | `response` | bodies and headers of answers |
//! | `state`, `status` | the state from which answers are made, and the answer to `GET /status` |
//! | `server` | the listeners |
//! | `client` | the command line's client |
//! | `query` | queries and forms; pure |
//! | `requests` | requests in flight and ended, and their cancellation |
//! | `canary` | starts, shows and ends a canary: another build that is tried with a model |
//! | `leaving`, `upgrade_order` | leaving a group of instances, orders to upgrade |
//! | `instance` | directories of one instance, and the command line's search for it |
//! | `pointer` | pointer files, which name the socket of a running instance, and the checks of them |
//! | `metrics` | Prometheus metrics |
//! | `memory_use` | memory of processes, split by purpose; pure |
//! | `pool_facts` | facts for load balancers; pure |
//! | `series`, `series_route` | recorded memory series, and their route |
//! | `probe` | probes of load balancers and of the service manager |
//! | `otel` | traces of requests for an OpenTelemetry collector |
//! | `access_log`, `access_line`, `log_writer` | the access log, and the thread that writes log lines |
//! | `growth_text` | memory growth of processes in words; pure |
//! | `error` | errors of listeners, files and the client |
//! | `clock` | wall-clock time for display |

mod access_line;
pub mod access_log;
pub mod answer;
mod canary;
pub mod client;
pub mod clock;
pub mod error;
#[cfg(test)]
#[path = "../tests/fixtures/growth_fixture.rs"]
mod growth_fixture;
pub mod growth_text;
pub mod instance;
pub mod leaving;
pub mod log_writer;
pub mod memory_use;
pub mod metrics;
#[cfg(test)]
#[path = "../tests/fixtures/mutated.rs"]
mod mutated;
pub mod otel;
mod pointer;
mod pool_facts;
#[cfg(test)]
#[path = "../../config/src/printed_tests.rs"]
mod printed;
pub mod probe;
pub mod query;
#[cfg(test)]
#[path = "../tests/fixtures/request_fixture.rs"]
mod request_fixture;
pub mod requests;
pub mod response;
mod route;
pub mod series;
mod series_route;
pub mod server;
pub mod state;
pub mod status;
pub mod upgrade_order;
