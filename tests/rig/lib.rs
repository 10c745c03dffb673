//! `warden_rig`: common parts of the end-to-end tests.
//!
//! | module | gives |
//! |---|---|
//! | [`wait`] | [`wait_until`]: a predicate and a deadline instead of a sleep |
//! | [`binaries`] | paths to `llama-warden` and `fake-llama`, built when needed |
//! | [`process`] | a child in its own process group that cannot outlive the test, and looks into `/proc` |
//! | [`pty`] | a terminal of its own for a program that wants one |
//! | [`warden`] | a running `llama-warden serve` with its own home and configuration |
//! | [`fake`] | a running `fake-llama`, to talk to directly |
//! | [`home`] | directories and environment of its own for every test |
//! | [`http`] | a client that can stream, leave early, read slowly, send raw bytes |
//! | [`sse`] | events out of bytes, and answers out of events |
//! | [`load`] | closed loops for benchmarks, and statistics of their times |
//! | [`poll`] | cheap sockets of one thread without a runtime |
//! | [`tls`] | certificates of its own, and clients that trust them |
//! | [`swarm`] | many requests at once, and the comparison with an undisturbed run |
//! | [`sdists`] | real sources of llama.cpp from eighteen months |
//! | [`real`] | a real llama-server built from the pinned source, and sample models |
//! | [`real_weights`] | small models that others trained and quantised |
//! | [`optional`] | skips or fails a test that lacks a network or a program |
//! | [`nvml`] | simulated NVIDIA GPUs |
//! | [`raw`] | raw bytes through a proxy to an upstream that records them |
//! | [`clients`] | client packages of other projects, and programs that use them |
//! | [`storm`] | many clients and faults at once, from a seed of [`dice`], compared with the ledger |
//! | [`scarcity`] | no threads, a disk that hangs, a disk that is full |
//! | [`control_group`] | a control group in which a llama-warden may make its own, or may not |
//! | [`ports`] | ports for programs that need a given one |
//! | [`words`] | answers of fake-llama |
//! | [`ledger`] | requests that fake-llama executed |
//!
//! Helpers return [`Trouble`] instead of panicking, so a test is `async fn …() -> Outcome` and uses `?`.

pub mod binaries;
pub mod browser;
pub mod clients;
pub mod control_group;
pub mod dice;
pub mod fake;
pub mod home;
pub mod http;
pub mod ledger;
pub mod load;
pub mod nvml;
pub mod optional;
pub mod poll;
pub mod ports;
pub mod process;
pub mod pty;
pub mod raw;
pub mod real;
pub mod real_weights;
pub mod scarcity;
pub mod sdists;
pub mod sse;
pub mod storm;
pub mod swarm;
pub mod tls;
pub mod trouble;
pub mod wait;
pub mod warden;
pub mod words;

pub use fake::Fake;
pub use home::Home;
pub use http::Http;
pub use ledger::Ledger;
pub use nvml::{FakeGpu, FakeNvml};
pub use sse::Answer;
pub use tls::Identity;
pub use trouble::{Context, Outcome, Trouble};
pub use wait::{wait_for, wait_until};
pub use warden::Warden;

/// Returns true in nightly runs (`WARDEN_LONG` is set, as by `.ci/run --long`): then tests repeat their work
/// as often as they promise.
pub fn is_long() -> bool {
    std::env::var_os("WARDEN_LONG").is_some()
}
