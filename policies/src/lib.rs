//! Pure decisions of llama-warden: facts in, decisions out.
//!
//! This crate has no clock, no I/O, no threads and no async. Callers pass time as a [`std::time::Duration`]
//! since an epoch of their choice, and randomness as a number. So every decision can be printed, stored,
//! replayed and tested with values only.
//!
//! | module | subject |
//! |---|---|
//! | [`growth`] | verdicts on memory: leaks, the unit of work that causes them, time to a limit |
//! | [`server_flags`] | spelling of flags for a given llama-server |
//! | [`start_search`] | switches to try on a server that dies while it loads |
//! | [`standstill`] | stalled starts |
//! | [`lifecycle`] | next step of one backend process: start, drain, stop, back off, fail |
//! | [`dispatch`] | leases on a backend: grant, queue, refuse |
//! | [`declared_memory`] | caches that a server is configured to fill, so that growth in them is no leak |
//! | [`health`] | other faults of a backend: wedged, answering errors, slow, device fault |
//! | [`book`] | predicted memory needs of a model, and placement of several models |
//! | [`loading`] | models to load, their GPUs, and evictions |
//! | [`reclaim`] | reclaiming memory from a process before it is replaced |
//! | [`recycle`] | replacement because of memory, age or request count |
//! | [`conversation_replicas`] | the last replica of each conversation |
//! | [`cooldown`] | permission for a replacement now, and futile recycling |
//! | [`rollup`] | compact history of memory |
//! | [`trace`] | reading and writing of recorded readings |
//! | [`world`] | generated readings for tests and simulations |
//! | [`replacement_cost`] | cheapest moment of a replacement |
//! | [`schedule`] | replacement windows by time of day |
//! | [`share`] | order of replacement among backends that share a budget or a GPU |
//! | [`admission`] | prompts that fit into the remaining memory |
//! | [`simulate`] | effect of a policy on a simulated leaking backend |
//! | [`canary`] | comparison of another build with the serving one |
//! | [`server_facts`] | names of known behaviour of llama-server |
//! | [`hosts`] | accepted host names |
//! | [`origins`] | origins of web pages whose requests are allowed |
//! | [`quarantine`] | requests kept from a model because its server died of them |
//! | [`rate`] | rate limits and retry times |
//! | [`modes`] | names of the modes of running a model |
//! | [`phrases`] | descriptions of decisions in words |
//! | [`trace_context`] | trace identifiers of a request, and whether the trace is recorded |
//! | [`warmth`] | state carried over in a replacement |
//! | [`backoff`] | delay after a crash |
//! | [`mod@defaults`] | all default numbers, with reasons |

pub mod admission;
pub mod backoff;
pub mod book;
pub mod canary;
pub mod client_network;
pub mod conversation_replicas;
pub mod cooldown;
pub mod declared_memory;
pub mod defaults;
pub mod dispatch;
pub mod growth;
pub mod health;
pub mod hosts;
pub mod lifecycle;
pub mod loading;
pub mod modes;
pub mod name_pattern;
mod named;
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
pub use hosts::HostNames;
pub use name_pattern::{is_pattern, pattern_matches};
pub use names::{GenerationId, ModelName, QuickMap};
pub use origins::AllowedOrigins;
pub use quarantine::{QuarantinePolicy, RequestFingerprint};
pub use rate::RateLimit;
pub use recycle::{Reason, RecycleAction, RecycleDecision};
pub use sample::{BackendSample, GpuIndex, MemoryKind, VramReading, VramSource, WorkDone};
pub use server_facts::{ServerFacts, StreamHeadTime};
pub use units::{ByteSize, MemoryLimit};
