//! The operator's side: status, restart, drain, logs, events and metrics, over a Unix socket that only its owner can
//! open, and over a loopback address if configured. None of it is ever on the public listener.
//!
//! | module | job |
//! |---|---|
//! | [`route`] | which request means what; pure |
//! | [`answer`] | what each route answers |
//! | [`server`] | the listeners |
//! | [`metrics`] | numbers for Prometheus |
//! | [`instance`] | directories of one instance, and how the command line finds it |
//! | [`mod@pointer`] | files that say where an instance is, and which of them are believed |
//! | [`requests`] | what is in flight and what ended, and how one is cancelled |
//! | [`canary`] | another build that is tried with a model |
//! | [`series`] | what memory did |
//! | [`client`] | the command line's end |
//! | [`page`] | what a browser shows |

pub(crate) mod answer;
pub(crate) mod canary;
pub(crate) mod client;
mod event_metrics;
pub(crate) mod families;
pub(crate) mod growth_metrics;
pub(crate) mod instance;
mod key_metrics;
mod machine_metrics;
pub(crate) mod metrics;
#[cfg(test)]
mod metrics_page;
mod model_metrics;
pub(crate) mod page;
mod pointer;
pub(crate) mod pool_metrics;
pub(crate) mod query;
mod report_metrics;
mod request_metrics;
pub(crate) mod requests;
pub(crate) mod route;
mod series;
pub(crate) mod server;
