//! Pure decisions of llama-warden: facts in, decisions out.
//!
//! This crate has no clock, no I/O, no threads and no async. Time comes in as a [`std::time::Duration`] since an epoch
//! that the caller chooses; randomness comes in as a number. So every decision can be printed, stored,
//! replayed and tested with values alone.
//!
//! | module | decides |
//! |---|---|
//! | [`growth`] | whether memory leaks, which unit of work pays, when a limit is reached |
//! | [`server_flags`] | how a flag is spelled for the llama-server at hand |
//! | [`start_search`] | which switch is tried on a server that dies while it loads |
//! | [`standstill`] | whether a process that starts stands still |
//! | [`lifecycle`] | what one backend process does next: start, drain, stop, back off, give up |
//! | [`dispatch`] | who gets a lease on a backend, who waits, who is turned away |
//! | [`declared_memory`] | what a server is told to keep, so that growth in it is no leak |
//! | [`health`] | whether a backend is ill in other ways: wedged, answering errors, slow, a fault of its device |
//! | [`book`] | what a model needs before it was ever loaded, and who fits together |
//! | [`loading`] | which models are loaded, on which GPUs, and who leaves for whom |
//! | [`reclaim`] | whether a process is asked to give memory back before it is replaced |
//! | [`recycle`] | whether a backend's memory, age or request count calls for a replacement |
//! | [`cooldown`] | whether a replacement is allowed now, and when recycling has proved futile |
//! | [`rollup`] | nothing: it keeps what memory did, small |
//! | [`trace`] | nothing: it reads and writes recordings of readings |
//! | [`world`] | nothing: it makes up readings, for tests and simulations |
//! | [`replacement_cost`] | whether now is the cheapest moment for it |
//! | [`schedule`] | whether the time of the day allows it |
//! | [`share`] | who goes first where backends share a budget or a GPU |
//! | [`admission`] | whether a prompt fits into the memory that is left |
//! | [`simulate`] | what a policy would do to a backend that leaks, before it does it to a real one |
//! | [`canary`] | whether another build is as good as the one that serves |
//! | [`experiment`] | what an experiment with a fresh server found out about its memory |
//! | [`server_facts`] | nothing: it names what is known of how a llama-server behaves |
//! | [`hosts`] | by which host names we may be reached |
//! | [`origins`] | which web pages may call |
//! | [`quarantine`] | which requests are kept from a model because its server died of them |
//! | [`rate`] | whether something may happen once more, and when again if not |
//! | [`modes`] | nothing: it names the ways in which a model can be run |
//! | [`phrases`] | nothing: it says what was decided, in words |
//! | [`trace_context`] | which trace a request belongs to, and whether it is recorded |
//! | [`warmth`] | what goes along when a process is replaced, and what became of it |
//! | [`backoff`] | how long to wait after a crash |
//! | [`mod@defaults`] | every default number of the product, each with its reason |

pub mod admission;
pub mod backoff;
pub mod book;
pub mod canary;
pub mod client_network;
pub mod cooldown;
pub mod declared_memory;
pub mod defaults;
pub mod dispatch;
pub mod growth;
pub mod health;
pub mod hosts;
pub mod lifecycle;
pub mod loading;
pub mod measured_needs;
pub mod modes;
pub mod name_pattern;
mod names;
pub mod origins;
pub mod own_variables;
pub mod phrases;
pub mod pool;
pub mod quarantine;
pub mod rate;
pub mod reclaim;
pub mod recycle;
pub mod replacement_cost;
pub mod rollup;
pub mod sample;
pub mod schedule;
pub mod seconds;
pub mod secrets;
pub mod server_facts;
pub mod server_flags;
pub mod share;
pub mod simulate;
pub mod standstill;
pub mod start_search;
pub mod trace;
pub mod trace_context;
pub mod units;
pub mod warmth;
mod words;
pub mod world;

pub use client_network::client_network;
pub use defaults::defaults;
pub use hosts::Names;
pub use name_pattern::{is_pattern, pattern_matches};
pub use names::{GenerationId, ModelName, QuickMap};
pub use origins::Origins;
pub use quarantine::{Fingerprint, QuarantinePolicy};
pub use rate::Rate;
pub use recycle::{Action, Decision, Reason};
pub use sample::{GpuIndex, MemoryKind, Sample, Vram, VramSource, Work};
pub use server_facts::{ServerFacts, StreamHead};
pub use units::{ByteSize, MemoryLimit};
