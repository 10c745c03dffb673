//! The operator's interface: status, restart, drain, logs, events and metrics, over a Unix socket that only
//! its owner can open, and over a loopback address if configured. The public listener serves none of it,
//! except the page to holders of an operator's key.
//!
//! | module | job |
//! |---|---|
//! | [`route`] | maps requests to routes; pure |
//! | [`answer`] | answers of the routes |
//! | [`server`] | the listeners |
//! | [`metrics`] | Prometheus metrics |
//! | [`mod@request_counts`] | counters of requests, for metrics and page |
//! | [`memory_use`] | memory of processes, split by purpose; pure |
//! | [`leaving`], [`upgrade_order`] | leaving a group of instances, orders to upgrade |
//! | [`instance`] | directories of one instance, and the command line's search for it |
//! | [`mod@pointer`] | pointer files, which name the socket of a running instance, and the checks of them |
//! | [`requests`] | requests in flight and ended, and their cancellation |
//! | [`canary`] | starts, shows and ends a canary: another build that is tried with a model |
//! | [`series`] | recorded memory series |
//! | [`client`] | the command line's client |
//! | [`page`] | the page for a browser |

pub(crate) mod answer;
pub(crate) mod canary;
pub(crate) mod client;
mod event_metrics;
pub(crate) mod families;
pub(crate) mod growth_metrics;
pub(crate) mod instance;
mod key_metrics;
pub(crate) mod leaving;
mod machine_metrics;
pub(crate) mod memory_use;
pub(crate) mod metrics;
#[cfg(test)]
mod metrics_page_tests;
mod model_metrics;
pub(crate) mod page;
mod pointer;
pub(crate) mod pool_metrics;
pub(crate) mod query;
mod report_metrics;
mod request_counts;
mod request_metrics;
pub(crate) mod requests;
pub(crate) mod route;
mod series;
pub(crate) mod server;
pub(crate) mod upgrade_order;
