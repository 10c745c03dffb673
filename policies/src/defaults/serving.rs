//! Defaults of what stands between a client and a backend.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::duration::duration;
use super::key::{Key, Section, Takes};
use crate::hosts::Names;
use crate::modes::{Cancel, OnDeath, Replace, Socket, Warm, WhileLoading};
use crate::origins::Origins;
use crate::units::ByteSize;

section!(
    /// The public listener. See `defaults.toml` for the reason behind each value.
    Server of "server" {
        /// Address or host name, or several with commas between them, all with the same port.
        pub host: String,
        /// Port.
        pub port: u16 where Takes::Whole(0, 65_535),
        /// Threads that serve clients; 0 for one on each core that we may use, at most four.
        pub threads: usize,
        /// Time to send a complete request head.
        pub header_timeout: Duration = "duration" where Takes::AtLeast("1ms"),
        /// Bytes in a request head.
        pub header_bytes: ByteSize,
        /// Fields in a request head.
        pub header_count: usize,
        /// Bytes in a request body.
        pub body_bytes: ByteSize,
        /// Bytes in the form of a transcription.
        pub audio_body_bytes: ByteSize,
        /// Bytes in a body that holds text alone, as for `/tokenize` and `/rerank`; never more than `body_bytes`.
        pub text_body_bytes: ByteSize,
        /// Bytes in a body that tells the server itself something, as for `/slots` and `/props`; never more than
        /// `body_bytes`.
        pub control_body_bytes: ByteSize,
        /// Bytes of bodies, and of answers that their clients do not read, held in memory, all requests together. No
        /// client, by address and by key, holds more than twice what is left.
        pub buffered_bytes: ByteSize,
        /// Bytes of a body read in search of `model`.
        pub model_scan_bytes: ByteSize,
        /// A request body without a byte for this long is given up.
        pub body_timeout: Duration = "duration" where Takes::AtLeast("1ms"),
        /// A client may let us wait this long for a body in all, however steadily it comes.
        pub body_deadline: Duration = "duration",
        /// An idle connection is closed after this.
        pub keep_alive: Duration = "duration",
        /// The same once another program has taken our place: a connection that was idle for so long is not missed.
        retired_keep_alive: Duration = "duration",
        /// The same once we were told to stop: what was sent before that is still answered.
        stopped_keep_alive: Duration = "duration",
        /// So long an upgrade in place may take before the old program goes on.
        upgrade_wait: Duration = "duration",
        /// Within this time a program that is to take our place has to have answered a request of its own.
        upgrade_answer: Duration = "duration",
        /// A connection closed with unread bytes is read for this long, so that the client sees its answer.
        linger: Duration = "duration",
        /// Pause after a failure to accept.
        accept_pause: Duration = "duration",
        /// When a client that is refused for something that passes is to send again, where no better time is known.
        retry_after: Duration = "duration",
        /// Connections in all.
        pub connections: usize,
        /// Connections from one address, or from one network of version 6 (64 bits).
        pub connections_per_peer: usize,
        /// Bytes a second with which a client earns back the time that it let us wait for its body: a pause is forgiven, a trickle ends like silence after `body_timeout`. 0: any byte earns it all back.
        pub body_rate: ByteSize,
        /// A body that is sent on while it still comes, with a slot that waits for it, may pause so long.
        slot_body_pause: Duration = "duration" where Takes::AtLeast("1ms"),
        /// So many bytes a second such a body comes with at least.
        slot_body_rate: ByteSize,
        /// A client that takes no byte of a waiting answer for this long is cut.
        pub send_timeout: Duration = "duration" where Takes::AtLeast("1ms"),
        /// Bytes that may wait in the kernel for a client that does not take them, beside those that are under way to it.
        unsent_bytes: ByteSize,
        /// Connections beyond the limits that are told so at a time; further ones are closed without a word.
        refusals: usize,
        /// PEM file with the certificate and those that lead to its authority; empty: no TLS. Relative to the configuration file.
        pub tls_cert: String where Takes::Path,
        /// PEM file with the private key of `tls_cert`.
        pub tls_key: String where Takes::Path,
        /// How often the two files are looked at for a new certificate.
        tls_check: Duration = "duration" where Takes::AtLeast("1ms"),
        /// A certificate that ends sooner than this is warned of in the log.
        tls_warn: Duration = "duration",
        /// Time for a TLS handshake.
        tls_handshake_timeout: Duration = "duration" where Takes::AtLeast("1ms"),
        /// Whether clients may choose HTTP/2 over TLS.
        pub h2: bool,
        /// Whether clients on this machine may speak HTTP/2 without TLS and without asking (prior knowledge).
        pub h2c: bool,
        /// Requests at a time on one HTTP/2 connection.
        pub h2_streams: u32,
        /// Bytes of a request body that a client may send ahead on one stream.
        h2_stream_window: ByteSize,
        /// The same for all streams of one connection.
        h2_connection_window: ByteSize,
        /// Bytes of an answer held per stream for a client that does not take them.
        h2_send_buffer: ByteSize,
        /// Streams that a client may reset before we have looked at them; more closes the connection.
        h2_pending_resets: usize,
        /// Streams of one connection that we may have to reset for errors of the client; more closes the connection.
        h2_local_resets: usize,
        /// Requests of one connection that its client may give up within `h2_reset_window`; more closes the connection.
        h2_resets: usize,
        /// Time over which they are counted.
        h2_reset_window: Duration = "duration" where Takes::AtLeast("1ms"),
        /// A connection without a frame for this long is asked whether it is alive.
        h2_ping: Duration = "duration" where Takes::AtLeast("1ms"),
        /// Time to answer that; a client that does not read cannot.
        h2_ping_timeout: Duration = "duration" where Takes::AtLeast("1ms"),
        /// After SIGTERM, running requests may take this long.
        pub shutdown_deadline: Duration = "duration",
        /// File of API keys, relative to the configuration file; empty: no key is asked for, and what clients send passes on.
        pub keys: String where Takes::Path,
        /// Whose web pages may call: `"mirror"` (everybody's), `"off"`, or a list of origins, like `["https://app.example"]`.
        pub cors: Origins where Takes::Origins,
        /// Path under which all routes are, as with llama-server's `--api-prefix`; empty: none.
        pub api_prefix: String,
        /// By which host names we may be reached, beside addresses and `localhost`: `"auto"`, `"any"`, or a list, like
        /// `["llm.example", "*.home.arpa"]`.
        pub names: Names where Takes::Names,
        /// Requests that ended and are still shown, of each thread that serves clients.
        requests_ended: usize,
        /// The same of those that were turned away before they had a model: anybody can make them.
        requests_turned_away: usize,
        /// Requests in one answer to an operator who names no other number.
        requests_listed: usize,
        /// How long a browser may keep the answer that a page may call.
        cors_max_age: Duration = "duration",
    }
);

section!(
    /// The queue of a model.
    #[derive(Copy)]
    Queue of "queue" {
        /// Callers that may wait.
        pub depth: usize,
        /// How long a caller waits, not counting the time in which a process drains and stops to be replaced.
        pub wait: Duration = "duration",
    }
);

section!(
    /// Models that somebody else's endpoint serves.
    #[derive(Copy)]
    Remote of "remote" {
        /// An endpoint that answers is asked again after this time.
        interval: Duration = "duration",
        /// One that does not is asked again after this time, then after twice as long each time, up to `interval`.
        retry_first: Duration = "duration",
        /// How long it may take to answer, or to be connected to.
        answer_limit: Duration = "duration",
        /// Times in a row that it may take longer, if it has answered before and no connection failed.
        slow: u32,
        /// Requests at a time.
        max_in_flight: u32,
    }
);

section!(
    /// Requests that kill their server.
    #[derive(Copy)]
    Quarantine of "quarantine" {
        /// A request that killed its server while nothing else ran there is refused for this long. `0s`: no request is suspected.
        pub refuse_for: Duration = "duration",
        /// A request that was in flight when its server died is tried alone if it is sent again within this time.
        suspect_for: Duration = "duration",
        /// So long it waits for those before it to end, while those behind it wait in the queue; then it runs beside them. Twice as long after each further death.
        alone_wait: Duration = "duration",
        /// After this time others are let in beside it; after two and four times as long once it has met two and three deaths.
        alone_for: Duration = "duration",
        /// A request whose client has left counts for this long as one in flight: its server goes on with it for a while.
        lingers_for: Duration = "duration",
        /// Such requests that are known at a time, for each model.
        known: usize,
    }
);

section!(
    /// How a model runs.
    #[derive(Copy)]
    Model of "model" {
        /// How many processes; each needs the memory of the whole model.
        pub replicas: u32 where Takes::Whole(1, 4_294_967_295),
        /// Start at once, instead of at the first request.
        pub preload: bool,
        /// It is never unloaded to make room for another model.
        pub pin: bool,
        /// How a generation is replaced by the next: `sequential` drains, stops, then starts; `overlap` starts the next one
        /// first; `auto` overlaps where memory allows.
        pub replace: Replace where Takes::OneOf(&["auto", "sequential", "overlap"]),
        /// Ask the process for a report of its GPU memory, for `status` and metrics. Only a build with the fix `memory-report`
        /// writes one. A change takes a new process.
        pub memory_report: bool,
        /// What a process listens on: `unix`, a socket that only we can reach, or `tcp`, a free port of 127.0.0.1, which any
        /// user of the machine can reach; `auto` takes the socket, and the port where llama-server is known to take no socket
        /// (before about b5000, `ik_llama.cpp`). A change takes a new process.
        pub socket: Socket where Takes::OneOf(&["auto", "unix", "tcp"]),
        /// Write what is read about each process, memory and work, to a file in the state directory, for `llama-warden policy
        /// replay`. A reload takes effect for processes that start after it.
        pub record: bool,
        /// How a client's leaving ends its work where the answer is no stream: `auto` by the fix `cancel-nonstream` where the
        /// build has it, `assemble` by asking for a stream and putting the answer together, `off` as llama-server does.
        pub cancel: Cancel where Takes::OneOf(&["auto", "assemble", "off"]),
        /// What becomes of a request whose server dies before its answer is whole: with `continue` the next process
        /// executes it once more, or computes the rest of its stream (docs/continuation.md), `error` answers 502 or ends the
        /// stream with an error. Only for requests that change nothing in the server.
        pub on_death: OnDeath where Takes::OneOf(&["continue", "error"]),
        /// What the client of a stream gets while the model is not loaded, after some seconds: `comment` begins the answer and keeps it alive
        /// by comments, `reasoning` shows in chats how far the load is, as text of reasoning, `off` sends nothing before the model answers
        /// (docs/models.md).
        pub loading: WhileLoading where Takes::OneOf(&["comment", "reasoning", "off"]),
        /// What goes along when a process is replaced as planned: with `auto` the slots of the latest conversations, by file or by
        /// evaluating their prompts again, so that their next turn need not (docs/warm.md); `off` keeps nothing of any request. A
        /// change takes effect for processes that start after it.
        pub warm: Warm where Takes::OneOf(&["auto", "off"]),
        /// Bytes of slot files of one replacement, at most; they lie in `paths.runtime_dir` for as long as it takes. `0` writes none.
        pub warm_bytes: ByteSize,
        /// For so long a model that is unloaded, for another one or after its `ttl`, keeps what its conversations had, in slot files and in memory, so that its return is warm. In memory its files take an eighth of what is available at most. `0s` keeps nothing.
        pub warm_away: Duration = "duration",
    }
);

section!(
    /// What goes along when a process is replaced.
    #[derive(Copy)]
    Warmth of "warmth" {
        /// Tokens of a conversation below which its next turn may as well evaluate them.
        least_tokens: u64,
        /// Conversations of one model that are known at a time.
        conversations: usize,
        /// Bytes of their requests and answers that are kept, for each model.
        kept_bytes: ByteSize,
        /// Saving, restoring and proving take no longer while no process takes requests.
        before_gate: Duration = "duration",
        /// The same, and evaluating, while the old process serves.
        beside: Duration = "duration",
        /// For so long prompts are evaluated behind the gate whenever nothing else runs.
        behind_gate: Duration = "duration",
        /// Such an evaluation begins when nothing has run for so long.
        quiet_for: Duration = "duration",
        /// A piece of it takes about this long: whoever comes waits for its end.
        piece: Duration = "duration",
        /// Share of a disk's free room, or of free memory where the files lie there, that slot files take at most.
        room: f64,
    }
);

section!(
    /// Our own log.
    Log of "log" {
        /// `text` or `json`.
        pub format: String where Takes::OneOf(&["text", "json"]),
        /// A level, or a filter such as `info,warden_gateway=debug`.
        pub level: String,
        /// Whether the lines of the children are repeated in it.
        pub children: bool,
        /// File for the access log, relative to the configuration file, opened anew at SIGHUP; empty: it is part of the log.
        pub access: String where Takes::Path,
        /// Lines that may wait for a slow reader; what comes beyond them is left out, and counted.
        buffered_lines: usize,
    }
);

section!(
    /// The connection to a backend.
    Upstream of "upstream" {
        /// Time to connect.
        connect_timeout: Duration = "duration" where Takes::AtLeast("1ms"),
        /// An idle connection is not used again after this.
        idle_timeout: Duration = "duration",
        /// Idle connections kept per generation.
        idle_connections: usize,
        /// Idle connections kept per generation while it is not known how many its build serves at a time.
        idle_connections_unknown: usize,
        /// Longest life of one exchange.
        pub exchange_timeout: Duration = "duration" where Takes::AtLeast("1ms"),
        /// A body without a byte for this long is dead.
        pub stream_idle: Duration = "duration" where Takes::AtLeast("1ms"),
        /// Attempts to find a backend that takes a request, each with proof that the last one executed nothing.
        attempts: u32,
        /// Bytes at the end of an answer in which `usage` and `timings` are looked for.
        tail_bytes: ByteSize,
        /// Bytes of a request body that are read before it is sent, and kept so that it can be sent again.
        pub replay_bytes: ByteSize,
        /// Bytes of a stream that are read ahead of a client that does not read, so that its end frees the slot.
        unread_bytes: ByteSize,
        /// Bytes of an incomplete event of a stream that are held until the event is complete.
        event_bytes: ByteSize,
        /// A stream whose server died, or whose model is loaded, gets a comment this often, while it waits.
        comment_interval: Duration = "duration" where Takes::AtLeast("1ms"),
        /// So does a chat whose model is loaded, where that is shown as reasoning (`loading = "reasoning"`).
        reasoning_interval: Duration = "duration" where Takes::AtLeast("1ms"),
        /// Bytes of the text of a streamed answer that are kept, so that another server can go on with it if its own dies.
        continue_bytes: ByteSize,
        /// Bytes of one answer that is put together from a stream.
        pub assembled_bytes: ByteSize,
    }
);
