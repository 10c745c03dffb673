//! Promise: several instances behind a balancer are one service. What is drained, killed or comes back costs nobody a request that the
//! balancer can send again, and a conversation goes back to where its prompt is warm.
//!
//! The balancers are real ones, with the very files that docs/haproxy and docs/envoy ship. Where they are not installed the tests say so
//! and are skipped; in CI, where they are, they are not.

mod alone;
mod balanced;
mod manifests;
mod picker;
