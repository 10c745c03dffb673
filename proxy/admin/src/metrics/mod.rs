//! Prometheus metrics: requests, replacements, memory of processes.
//!
//! Counters and histograms are updated when something happens; gauges are read from the fleet at each
//! scrape. Each group has its own file, and a table in docs/metrics.md that is generated from the
//! declarations.
//!
//! | group | file |
//! |---|---|
//! | requests | `request_metrics`, counted in `request_counts` |
//! | models and their processes | `model_metrics` |
//! | events of processes | `event_metrics` |
//! | growth, forecasts, the policy | `growth_metrics` |
//! | reports of patched servers | `report_metrics` |
//! | the machine | `machine_metrics` |
//! | API keys | `key_metrics` |
//! | one instance of several | `pool_metrics` |
//! | llama-warden itself, and all groups together | `registry` |

mod event_metrics;
pub(crate) mod families;
mod growth_metrics;
mod key_metrics;
mod machine_metrics;
#[cfg(test)]
mod metrics_page_tests;
mod model_metrics;
pub(crate) mod pool_metrics;
mod registry;
mod report_metrics;
pub mod request_counts;
mod request_metrics;

pub use registry::MetricsRegistry;
pub(crate) use registry::SpanOutcome;
