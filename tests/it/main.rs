//! The one integration test binary. One module per promise; a test's name is the promise's sentence.

mod admission;
mod bad_input;
mod build;
mod cancel;
mod crash;
mod drain_and_replace;
mod drop_in;
mod eras;
mod fake;
mod growth;
mod layout;
mod mitigations;
mod operator;
mod passthrough;
mod patched;
mod patches;
mod policy;
mod queue;
mod real;
mod reload;
mod report;
mod shutdown;
mod sidecar;
mod storm;
mod supervisor_death;
mod vram;
