//! `warden_rig`: what every end-to-end test needs and none should write again.
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
//! | [`http2`] | streams that share one connection of HTTP/2 |
//! | [`sse`] | events out of bytes, and answers out of events |
//! | [`load`] | closed loops for benchmarks, and what the times say |
//! | [`poll`] | sockets of one thread without a runtime, for what has to be cheap |
//! | [`tls`] | certificates of its own, and clients that trust them |
//! | [`swarm`] | many requests at once, and the comparison with an undisturbed run |
//! | [`sdists`] | real sources of llama.cpp from eighteen months |
//! | [`real`] | a real llama-server built from the pinned source, and sample models |
//! | [`real_weights`] | small models that others trained and quantised |
//! | [`optional`] | whether a test that lacks a network or a program is skipped or fails |
//! | [`nvml`] | NVIDIA GPUs that say what a test wants |
//! | [`raw`] | raw bytes through a proxy to an upstream that writes down what it got |
//! | [`clients`] | packages of other people, and programs that use them |
//! | [`storm`] | everything at once, drawn from a seed by [`dice`], and the books afterwards |
//! | [`scarcity`] | no threads, a disk that hangs, a disk that is full |
//! | [`control_group`] | a control group in which a llama-warden may make its own, or may not |
//! | [`ports`] | ports for programs that have to be given one |
//! | [`words`] | what fake-llama says to a request |
//! | [`ledger`] | what fake-llama executed, and whether anything ran twice |
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
pub mod http2;
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

/// Whether there is time: `WARDEN_LONG` is set, as `.ci/run --long` does at night. Then tests repeat what they do as often as their promise
/// says; else as often as shows it to be broken when it is.
pub fn is_long() -> bool {
    std::env::var_os("WARDEN_LONG").is_some()
}
