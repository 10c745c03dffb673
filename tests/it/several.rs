//! Promise: several instances behind a balancer are one service. A drain, a kill or a return costs no request
//! that the balancer can send again, and a conversation returns to the instance with its cached prompt.
//!
//! Real balancers run with the files of docs/haproxy and docs/envoy. Without them these tests are skipped,
//! except in CI.

mod alone;
mod balanced;
mod manifests;
mod picker;
