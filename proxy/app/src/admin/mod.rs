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
//! | [`canary`] | another build that is tried with a model |
//! | [`client`] | the command line's end |

pub(crate) mod answer;
pub(crate) mod canary;
pub(crate) mod client;
mod event_metrics;
mod families;
pub(crate) mod growth_metrics;
pub(crate) mod instance;
mod key_metrics;
mod machine_metrics;
pub(crate) mod metrics;
#[cfg(test)]
mod metrics_page;
mod model_metrics;
mod report_metrics;
mod request_metrics;
pub(crate) mod route;
pub(crate) mod server;
