//! Defaults of the path between a client and a backend.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::duration::duration;
use super::key::{AcceptedValues, DefaultsKey, DefaultsSection};
use crate::hosts::HostNames;
use crate::modes::{CancelMode, OnDeath, ReplaceMode, SocketMode, WarmMode, WhileLoading};
use crate::origins::AllowedOrigins;
use crate::units::ByteSize;

section!(
    /// Public listener. `defaults.toml` gives the reason for each value.
    Server of "server" {
        /// Address or host name to listen on; several are separated by commas and share the port.
        pub host: String,
        /// Port to listen on.
        pub port: u16 where AcceptedValues::Whole(0, 65_535),
        /// Threads that serve clients; 0 for one per usable core, at most four.
        pub threads: usize,
        /// Time to send a complete request head.
        pub header_timeout: Duration = "duration" where AcceptedValues::AtLeast("1ms"),
        /// Largest request head.
        pub header_bytes: ByteSize,
        /// Most fields in a request head.
        pub header_count: usize,
        /// Largest request body.
        pub body_bytes: ByteSize,
        /// Largest form of a transcription.
        pub audio_body_bytes: ByteSize,
        /// Largest text-only body, as for `/tokenize` and `/rerank`; never more than `body_bytes`.
        pub text_body_bytes: ByteSize,
        /// Largest body of a control request, as for `/slots` and `/props`; never more than `body_bytes`.
        pub control_body_bytes: ByteSize,
        /// Memory for bodies and for answers that their clients do not read, all requests together. One
        /// client, by address and by key, holds at most twice the remaining amount.
        pub buffered_bytes: ByteSize,
        /// Bytes of a body searched for `model`.
        pub model_scan_bytes: ByteSize,
        /// Longest pause within a request body.
        pub body_timeout: Duration = "duration" where AcceptedValues::AtLeast("1ms"),
        /// Total time that a client may spend sending a body, at any rate.
        pub body_deadline: Duration = "duration",
        /// Time after which an idle connection is closed.
        pub keep_alive: Duration = "duration",
        /// Time after which an idle connection is closed once a successor has taken over.
        retired_keep_alive: Duration = "duration",
        /// Time after which an idle connection is closed once a stop was requested.
        stopped_keep_alive: Duration = "duration",
        /// Time limit of an upgrade in place; after that the old program continues.
        upgrade_wait: Duration = "duration",
        /// Time within which the new program of an upgrade must answer its own test request.
        upgrade_answer: Duration = "duration",
        /// Time for which a closed connection is still read, so that the client sees its answer.
        linger: Duration = "duration",
        /// Pause after a failed accept.
        accept_pause: Duration = "duration",
        /// `Retry-After` for a temporary refusal without a better estimate.
        retry_after: Duration = "duration",
        /// Most connections.
        pub connections: usize,
        /// Most connections from one address, or from one IPv6 network (64 bits).
        pub connections_per_peer: usize,
        /// Bytes per second with which a client earns back its pauses in a body: a pause is forgiven, a
        /// trickle ends like silence after `body_timeout`. 0: any byte earns back everything.
        pub body_rate: ByteSize,
        /// Longest pause in a body that is streamed to a backend while it holds a slot.
        slot_body_pause: Duration = "duration" where AcceptedValues::AtLeast("1ms"),
        /// Least rate of such a body, in bytes per second.
        slot_body_rate: ByteSize,
        /// Time after which a client that reads nothing of a waiting answer is disconnected.
        pub send_timeout: Duration = "duration" where AcceptedValues::AtLeast("1ms"),
        /// Unsent bytes in the kernel per client, besides those in flight.
        unsent_bytes: ByteSize,
        /// Concurrent connections beyond the limits that get an answer; further ones are closed at once.
        refusals: usize,
        /// PEM file with the certificate and its chain; empty: no TLS. Relative to the configuration file.
        pub tls_cert: String where AcceptedValues::Path,
        /// PEM file with the private key of `tls_cert`.
        pub tls_key: String where AcceptedValues::Path,
        /// Interval of checks for a new certificate.
        tls_check: Duration = "duration" where AcceptedValues::AtLeast("1ms"),
        /// Remaining validity below which a certificate is warned of in the log.
        tls_warn: Duration = "duration",
        /// Time limit of a TLS handshake.
        tls_handshake_timeout: Duration = "duration" where AcceptedValues::AtLeast("1ms"),
        /// Time that running requests may take after SIGTERM.
        pub shutdown_deadline: Duration = "duration",
        /// File of API keys, relative to the configuration file; empty: no key is required, and clients'
        /// keys are passed on.
        pub keys: String where AcceptedValues::Path,
        /// Origins of web pages that may call: `"mirror"` (any), `"off"`, or a list, like
        /// `["https://app.example"]`.
        pub cors: AllowedOrigins where AcceptedValues::Origins,
        /// Path prefix of all routes, as llama-server's `--api-prefix`; empty: none.
        pub api_prefix: String,
        /// Host names accepted besides addresses and `localhost`: `"auto"`, `"any"`, or a list, like
        /// `["llm.example", "*.home.arpa"]`.
        pub names: HostNames where AcceptedValues::Names,
        /// Ended requests still shown, per thread that serves clients.
        requests_ended: usize,
        /// Requests rejected before they had a model that are still shown; any client can cause these.
        requests_turned_away: usize,
        /// Default number of requests in one answer to an operator.
        requests_listed: usize,
        /// Time for which a browser may cache the CORS preflight answer.
        cors_max_age: Duration = "duration",
    }
);

section!(
    /// Queue of a model.
    #[derive(Copy)]
    Queue of "queue" {
        /// Most waiting requests.
        pub depth: usize,
        /// Longest wait, not counting the time in which a replaced process drains and stops.
        pub wait: Duration = "duration",
    }
);

section!(
    /// Models served by remote endpoints.
    #[derive(Copy)]
    Remote of "remote" {
        /// Interval of checks of a working endpoint.
        interval: Duration = "duration",
        /// First retry interval of a failed endpoint; doubles up to `interval`.
        retry_first: Duration = "duration",
        /// Time limit to connect or to answer.
        answer_limit: Duration = "duration",
        /// Consecutive slow answers that are tolerated if the endpoint has answered before and no
        /// connection failed.
        slow: u32,
        /// Most concurrent requests.
        max_in_flight: u32,
    }
);

section!(
    /// Requests that kill their server.
    #[derive(Copy)]
    Quarantine of "quarantine" {
        /// Time for which a request is refused that killed its server while it ran alone. `0s`: no request
        /// is suspected.
        pub refuse_for: Duration = "duration",
        /// Time for which a request that was in flight at a server's death is tried alone.
        suspect_for: Duration = "duration",
        /// Time that a suspected request waits for earlier ones to end, while later ones queue; then it
        /// runs next to them. Doubles with each further death.
        alone_wait: Duration = "duration",
        /// Time after which other requests join it; two and four times as long after two and three deaths.
        alone_for: Duration = "duration",
        /// Time for which a request whose client has left still counts as in flight, because its server
        /// continues.
        lingers_for: Duration = "duration",
        /// Suspected requests remembered per model.
        known: usize,
    }
);

section!(
    /// Settings of a model's processes.
    #[derive(Copy)]
    Model of "model" {
        /// Number of processes; each needs the memory of the whole model.
        pub replicas: u32 where AcceptedValues::Whole(1, 4_294_967_295),
        /// Starts the model at once instead of at the first request.
        pub preload: bool,
        /// Keeps the model loaded: it is never unloaded for another one.
        pub pin: bool,
        /// Way of replacing a generation: `sequential` drains, stops, then starts; `overlap` starts the
        /// next one first; `auto` overlaps where memory allows.
        pub replace: ReplaceMode where AcceptedValues::OneOf(&["auto", "sequential", "overlap"]),
        /// Asks the process for a report of its GPU memory, for `status` and metrics. Needs a build with
        /// the fix `memory-report`. A change takes a new process.
        pub memory_report: bool,
        /// Listener of a process: `unix`, a private socket, or `tcp`, a free port of 127.0.0.1 open to all
        /// local users. `auto` uses the port only if llama-server is known not to support sockets (before
        /// about b5000, `ik_llama.cpp`). A change takes a new process.
        pub socket: SocketMode where AcceptedValues::OneOf(&["auto", "unix", "tcp"]),
        /// Records each process's readings, memory and work, to a file in the state directory, for
        /// `llama-warden policy replay`. A reload takes effect for processes that start after it.
        pub record: bool,
        /// Way to end abandoned work of a non-streamed answer: `auto` uses the fix `cancel-nonstream` if
        /// the build has it, `off` leaves it to llama-server.
        pub cancel: CancelMode where AcceptedValues::OneOf(&["auto", "off"]),
        /// Handling of a request whose server dies before its answer is complete: `continue` executes it
        /// once more on the next process, or computes the rest of its stream (docs/continuation.md);
        /// `error` answers 502 or ends the stream with an error. Only for requests that change nothing in
        /// the server.
        pub on_death: OnDeath where AcceptedValues::OneOf(&["continue", "error"]),
        /// Output to a streaming client while the model loads, after some seconds: `comment` begins the
        /// answer and keeps it alive with comments, `reasoning` shows the progress of the load in chats as
        /// reasoning text, `off` sends nothing before the model answers (docs/models.md).
        pub loading: WhileLoading where AcceptedValues::OneOf(&["comment", "reasoning", "off"]),
        /// State carried over in a planned replacement: `auto` restores the slots of the latest
        /// conversations from files or by evaluating their prompts again, so that their next turn need not
        /// (docs/warm.md); `disk` also keeps the conversations of an unloaded model in `paths.state_dir`, so
        /// that they survive an exit of llama-warden and a reboot; `off` keeps nothing of any request. A
        /// change takes effect for processes that start after it.
        pub warm: WarmMode where AcceptedValues::OneOf(&["auto", "disk", "off"]),
        /// Most bytes of slot files per replacement, kept in `paths.runtime_dir` during it. `0` writes none.
        pub warm_bytes: ByteSize,
        /// Time for which an unloaded model's conversations are kept in slot files and in memory, so that
        /// it returns warm. Slot files in memory take at most an eighth of the available memory. `0s` keeps
        /// nothing. With `warm = "disk"`, it is the time for which conversations without a usable slot are
        /// evaluated again; the others stay for `warm_disk_age`.
        pub warm_away: Duration = "duration",
        /// Most bytes of the model's conversations on disk with `warm = "disk"`. The least recently used
        /// conversations are removed first.
        pub warm_disk_bytes: ByteSize,
        /// Time after which a conversation on disk is removed, counted from its last save.
        pub warm_disk_age: Duration = "duration",
    }
);

section!(
    /// Warm state carried over to a new process.
    #[derive(Copy)]
    Warmth of "warmth" {
        /// Length in tokens below which a conversation is not carried over.
        least_tokens: u64,
        /// Conversations remembered per model.
        conversations: usize,
        /// Bytes of their requests and answers kept per model.
        kept_bytes: ByteSize,
        /// Time limit for saving, restoring and proving while no process takes requests.
        before_gate: Duration = "duration",
        /// Time limit for saving, restoring, proving and evaluating while the old process serves.
        beside: Duration = "duration",
        /// Time limit for saving conversations that stay on disk, and for restoring them.
        to_disk: Duration = "duration",
        /// Time for which prompts are evaluated after the gate opens, whenever nothing else runs.
        behind_gate: Duration = "duration",
        /// Idle time before an evaluation begins after the gate has opened.
        quiet_for: Duration = "duration",
        /// Approximate duration of one evaluated piece, whose end a new request has to wait for.
        piece: Duration = "duration",
        /// Largest share of a disk's free space, or of free memory if the files are in memory, for slot
        /// files.
        room: f64,
    }
);

section!(
    /// Log of llama-warden.
    Log of "log" {
        /// Log format: `text` or `json`.
        pub format: String where AcceptedValues::OneOf(&["text", "json"]),
        /// Log level, or a filter such as `info,warden_gateway=debug`.
        pub level: String,
        /// Includes the output lines of child processes.
        pub children: bool,
        /// File for the access log, relative to the configuration file, reopened at SIGHUP; empty: part of
        /// the log.
        pub access: String where AcceptedValues::Path,
        /// Lines buffered for a slow reader; further ones are dropped and counted.
        buffered_lines: usize,
    }
);

section!(
    /// Connections to a backend.
    Upstream of "upstream" {
        /// Time to connect.
        connect_timeout: Duration = "duration" where AcceptedValues::AtLeast("1ms"),
        /// Idle time after which a connection is not reused.
        idle_timeout: Duration = "duration",
        /// Idle connections kept per generation; more, if more are in use.
        idle_connections: usize,
        /// Idle connections kept per generation while the build's connection limit is unknown.
        idle_connections_unknown: usize,
        /// Longest life of one exchange.
        pub exchange_timeout: Duration = "duration" where AcceptedValues::AtLeast("1ms"),
        /// Time without a byte after which a body counts as dead.
        pub stream_idle: Duration = "duration" where AcceptedValues::AtLeast("1ms"),
        /// Attempts to find a backend that takes a request, each with proof that the previous one executed
        /// nothing.
        attempts: u32,
        /// Bytes at the end of an answer that are searched for `usage` and `timings`.
        tail_bytes: ByteSize,
        /// Bytes of a request body read before it is sent, and kept for a retry.
        pub replay_bytes: ByteSize,
        /// Bytes of a stream read ahead of a slow client, so that its end frees the slot.
        unread_bytes: ByteSize,
        /// Bytes of an incomplete stream event held until it is complete.
        event_bytes: ByteSize,
        /// Interval of comments on a stream that waits for a new process or for a load.
        comment_interval: Duration = "duration" where AcceptedValues::AtLeast("1ms"),
        /// Interval of progress in a chat that waits for a load (`loading = "reasoning"`).
        reasoning_interval: Duration = "duration" where AcceptedValues::AtLeast("1ms"),
        /// Text of a streamed answer kept so that another server can continue it after a death.
        continue_bytes: ByteSize,
    }
);
