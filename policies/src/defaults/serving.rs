//! Defaults of what stands between a client and a backend.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::duration::duration;
use crate::hosts::Names;
use crate::origins::Origins;
use crate::units::ByteSize;

section!(
    /// The public listener. See `defaults.toml` for the reason behind each value.
    Server {
        /// Address or host name, or several with commas between them, all with the same port.
        host: String,
        /// Port.
        port: u16,
        /// Threads that serve clients; 0 for one on each core that we may use, at most four.
        threads: usize,
        /// Time to send a complete request head.
        header_timeout: Duration = "duration",
        /// Bytes in a request head.
        header_bytes: ByteSize,
        /// Fields in a request head.
        header_count: usize,
        /// Bytes in a request body.
        body_bytes: ByteSize,
        /// Bytes in the form of a transcription.
        audio_body_bytes: ByteSize,
        /// Bytes in a body that holds text alone, as for `/tokenize` and `/rerank`; never more than `body_bytes`.
        text_body_bytes: ByteSize,
        /// Bytes in a body that tells the server itself something, as for `/slots` and `/props`; never more than
        /// `body_bytes`.
        control_body_bytes: ByteSize,
        /// Bytes of bodies held in memory while their model is looked for, all requests together. No client, by address and by key, holds more than twice what is left.
        buffered_bytes: ByteSize,
        /// Bytes of a body read in search of `model`.
        model_scan_bytes: ByteSize,
        /// A request body without a byte for this long is given up.
        body_timeout: Duration = "duration",
        /// A client may let us wait this long for a body in all, however steadily it comes.
        body_deadline: Duration = "duration",
        /// An idle connection is closed after this.
        keep_alive: Duration = "duration",
        /// A connection closed with unread bytes is read for this long, so that the client sees its answer.
        linger: Duration = "duration",
        /// Pause after a failure to accept.
        accept_pause: Duration = "duration",
        /// Connections in all.
        connections: usize,
        /// Connections from one address.
        connections_per_peer: usize,
        /// Bytes a second with which a client earns back the time that it let us wait for its body: a pause is forgiven, a trickle ends like silence after `body_timeout`. 0: any byte earns it all back.
        body_rate: ByteSize,
        /// A client that takes no byte of a waiting answer for this long is cut.
        send_timeout: Duration = "duration",
        /// Bytes that may wait in the kernel for a client that does not take them, beside those that are under way to it.
        unsent_bytes: ByteSize,
        /// Connections beyond the limits that are told so at a time; further ones are closed without a word.
        refusals: usize,
        /// PEM file with the certificate and those that lead to its authority; empty: no TLS. Relative to the configuration file.
        tls_cert: String,
        /// PEM file with the private key of `tls_cert`.
        tls_key: String,
        /// How often the two files are looked at for a new certificate.
        tls_check: Duration = "duration",
        /// A certificate that ends sooner than this is warned of in the log.
        tls_warn: Duration = "duration",
        /// Time for a TLS handshake.
        tls_handshake_timeout: Duration = "duration",
        /// Whether clients may choose HTTP/2 over TLS.
        h2: bool,
        /// Whether clients on this machine may speak HTTP/2 without TLS and without asking (prior knowledge).
        h2c: bool,
        /// Requests at a time on one HTTP/2 connection.
        h2_streams: u32,
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
        h2_reset_window: Duration = "duration",
        /// A connection without a frame for this long is asked whether it is alive.
        h2_ping: Duration = "duration",
        /// Time to answer that; a client that does not read cannot.
        h2_ping_timeout: Duration = "duration",
        /// After SIGTERM, running requests may take this long.
        shutdown_deadline: Duration = "duration",
        /// File of API keys, relative to the configuration file; empty: no key is asked for, and what clients send passes on.
        keys: String,
        /// Whose web pages may call: `"mirror"` (everybody's), `"off"`, or a list of origins.
        cors: Origins,
        /// Path under which all routes are, as with llama-server's `--api-prefix`; empty: none.
        api_prefix: String,
        /// By which host names we may be reached, beside addresses and `localhost`: `"auto"`, `"any"`, or a list.
        names: Names,
        /// How long a browser may keep the answer that a page may call.
        cors_max_age: Duration = "duration",
    }
);

section!(
    /// The queue of a model.
    Queue {
        /// Callers that may wait.
        depth: usize,
        /// How long a caller waits.
        wait: Duration = "duration",
    }
);

section!(
    /// Requests that kill their server.
    Quarantine {
        /// A request that killed its server while nothing else ran there is refused for this long. `0s`: no request is suspected.
        refuse_for: Duration = "duration",
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
    Model {
        /// Processes.
        replicas: u32,
        /// Started at once instead of at the first request.
        preload: bool,
        /// `auto`, `sequential` or `overlap`.
        replace: String,
        /// Whether a process is asked for a report of its GPU memory.
        memory_report: bool,
        /// What a process listens on: `auto`, `unix` or `tcp`.
        socket: String,
        /// Whether what is read about a process is written to a file for `policy replay`.
        record: bool,
        /// `auto`, `assemble` or `off`.
        cancel: String,
    }
);

section!(
    /// Our own log.
    Log {
        /// `text` or `json`.
        format: String,
        /// A level, or a filter such as `info,warden_gateway=debug`.
        level: String,
        /// Whether the lines of the children are repeated in it.
        children: bool,
        /// File for the access log, relative to the configuration file, opened anew at SIGHUP; empty: it is part of the log.
        access: String,
        /// Lines that may wait for a slow reader; what comes beyond them is left out, and counted.
        buffered_lines: usize,
    }
);

section!(
    /// The connection to a backend.
    Upstream {
        /// Time to connect.
        connect_timeout: Duration = "duration",
        /// An idle connection is not used again after this.
        idle_timeout: Duration = "duration",
        /// Idle connections kept per generation.
        idle_connections: usize,
        /// Idle connections kept per generation while it is not known how many its build serves at a time.
        idle_connections_unknown: usize,
        /// Longest life of one exchange.
        exchange_timeout: Duration = "duration",
        /// A body without a byte for this long is dead.
        stream_idle: Duration = "duration",
        /// Attempts to find a backend that takes a request, each with proof that the last one executed nothing.
        attempts: u32,
        /// Bytes at the end of an answer in which `usage` and `timings` are looked for.
        tail_bytes: ByteSize,
        /// Bytes of a request body that are read before it is sent, and kept so that it can be sent again.
        replay_bytes: ByteSize,
        /// Bytes of an incomplete event of a stream that are held until the event is complete.
        event_bytes: ByteSize,
        /// Bytes of one answer that is put together from a stream.
        assembled_bytes: ByteSize,
    }
);
