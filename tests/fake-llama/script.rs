//! Script of fake-llama: its faults and its speed.
//!
//! There are three sources, of which later ones take precedence: a JSON file named by `FAKE_LLAMA_SCRIPT`
//! (read at each start, so a test can change it between two processes), the variables `FAKE_LLAMA_<FIELD>`
//! (JSON or plain text), and `POST /fake/script` at run time. An unknown field is an error, because a missing
//! fault would make a test prove nothing.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::slots::{FileFault, Kept};

/// Variables that are no fields of [`Script`].
const NOT_FIELDS: [&str; 3] = ["FAKE_LLAMA_SCRIPT", "FAKE_LLAMA_LEDGER", "FAKE_LLAMA_HELP"];

/// By default, a fast llama-server without faults.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Script {
    pub(crate) bind_ms: u64,
    /// Milliseconds of 503 "Loading model" after the bind.
    pub(crate) load_ms: u64,
    /// Treats a Unix socket as an unknown host name, as llama-server before about b5000.
    pub(crate) no_unix: bool,
    /// Never binds, and stays alive.
    pub(crate) never_bind: bool,
    pub(crate) fail: Option<Fail>,
    /// Dies of SIGSEGV while loading without one of these words: a flag (`--flag`, `--flag=VALUE`) or a
    /// variable (`NAME=VALUE`).
    pub(crate) dies_without: Vec<String>,
    /// Exit code for `fail`; 1 by default.
    pub(crate) exit_code: Option<u8>,
    pub(crate) stderr: Vec<String>,
    /// Most output tokens of a request; 16 by default for a request without a limit.
    pub(crate) tokens: Option<u64>,
    pub(crate) ms_per_token: f64,
    /// Milliseconds by which `ms_per_token` grows with each request.
    pub(crate) ms_per_token_per_request: f64,
    pub(crate) prompt_ms: u64,
    /// Milliseconds without an event after which a stream gets a comment, as from llama-server since b9488; 0
    /// for none.
    pub(crate) ping_ms: u64,
    pub(crate) stream_head: StreamHead,
    pub(crate) token_bytes: usize,
    /// MiB held from the start on.
    pub(crate) base_mib: u64,
    pub(crate) leak_kib_per_request: u64,
    pub(crate) leak_kib_per_image: u64,
    /// Leaked KiB per `input_audio` in a request, or recording to transcribe.
    pub(crate) leak_kib_per_audio: u64,
    pub(crate) leak_kib_per_prompt_token: u64,
    pub(crate) leak_kib_per_token: u64,
    /// KiB per prompt token of the largest prompt so far, for buffers that grow and are kept.
    pub(crate) buffer_kib_per_prompt_token: u64,
    /// Leaked MiB per hour, independent of requests.
    pub(crate) leak_mib_per_hour: u64,
    /// KiB in the prompt cache per request, up to `--cache-ram`.
    pub(crate) cache_kib_per_request: u64,
    /// KiB in the prompt cache per prompt token, up to `--cache-ram`.
    pub(crate) cache_kib_per_prompt_token: u64,
    /// Script of the simulated NVML ([`crate::vram`]), to which this process writes its VRAM on GPU 0.
    pub(crate) vram_told: Option<PathBuf>,
    pub(crate) vram_base_mib: u64,
    pub(crate) vram_kib_per_request: u64,
    pub(crate) vram_kib_per_image: u64,
    /// For each named field, the words that set it to zero. A word is an environment variable or, with a
    /// dash, a flag; `NAME=VALUE` and `--flag=VALUE` require that value. One word suffices.
    pub(crate) stopped_by: BTreeMap<String, Vec<String>>,
    /// The same kind of words, each with the factor by which it slows a token down.
    pub(crate) slowed_by: BTreeMap<String, f64>,
    pub(crate) on_term: OnTerm,
    /// Milliseconds until a slot is free after the client of a non-streaming request has left.
    pub(crate) cancel_ms: u64,
    /// Content of the file in `LLAMA_WARDEN_REPORT`.
    pub(crate) report: ReportKind,
    /// Answers in the file of `LLAMA_WARDEN_RECLAIM`; without it, a plain build that ignores the variable.
    pub(crate) reclaim: Option<crate::reclaim::Reclaim>,
    pub(crate) kept: Kept,
    /// Noise in nats of the log probabilities that `n_probs` asks for; without it, none are reported.
    pub(crate) chances: Option<f64>,
    /// Every so many requests that may reuse a prompt, a slot answers the other conversation that it had before;
    /// 0 for never.
    pub(crate) mixes: u64,
    pub(crate) ms_per_prompt_token: f64,
    pub(crate) save_ms: u64,
    pub(crate) restore_ms: u64,
    pub(crate) save_fault: Option<FileFault>,
    pub(crate) restore_fault: Option<FileFault>,
    /// Refuses `--slot-save-path`, as a server that does not see the directory.
    pub(crate) no_slot_path: bool,
    /// Paths whose requests are never answered.
    pub(crate) hangs_on: Vec<String>,
    pub(crate) faults: Vec<Fault>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum StreamHead {
    /// When the request gets its slot, as in newer builds.
    #[default]
    Slot,
    /// With the first token, as in older builds and forks: earlier errors have a status of their own.
    FirstToken,
}

/// Failures of a start, with llama-server's messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Fail {
    MissingModel,
    /// The model file is not a GGUF file.
    CorruptModel,
    BadFlag,
    OutOfMemory,
    PortInUse,
    /// The dynamic loader misses a library (exit code 127).
    MissingLibrary,
    /// An assertion fails (SIGABRT).
    Abort,
    Silent,
}

/// Effect of SIGTERM while requests run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum OnTerm {
    /// Nothing more is sent, and the process ends when the clients have left, as llama-server mostly does.
    #[default]
    Hang,
    /// Streams are cut and the process ends, as llama-server sometimes does.
    Cut,
    /// None, even at the second one; only SIGKILL ends the process.
    Ignore,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ReportKind {
    /// As a patched llama-server writes it.
    #[default]
    Good,
    /// No file, as with a plain build.
    None,
    /// A file of the right size with other content.
    Corrupt,
}

/// A fault, with its conditions.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Fault {
    /// Only the request with this ordinal, from 1, among the process's working requests.
    pub(crate) at: Option<u64>,
    /// This ordinal and all later ones.
    pub(crate) from: Option<u64>,
    /// Only requests whose body contains this text.
    pub(crate) body_has: Option<String>,
    /// Not if one of these words is given; as in `stopped_by`.
    pub(crate) unless: Vec<String>,
    /// At most once over all processes: only for the process that creates this file.
    pub(crate) once: Option<PathBuf>,
    /// After this many tokens; by default on arrival, before the request is executed or recorded.
    pub(crate) after_tokens: Option<u64>,
    pub(crate) says: Option<String>,
    #[serde(rename = "do")]
    pub(crate) what: What,
    /// For `stall`: milliseconds.
    pub(crate) ms: u64,
    /// For `crash`: the signal (6 when absent).
    pub(crate) signal: Option<i32>,
    /// For `error`: the status (500 when absent).
    pub(crate) status: Option<u16>,
    /// For `hang`: `/health` hangs as well.
    pub(crate) silent_health: bool,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum What {
    #[default]
    Nothing,
    /// The process dies by `signal`, after `ms` even if the client has left.
    Crash,
    /// This request and all later ones get no more bytes; `/health` still answers unless `silent_health`.
    Hang,
    /// This request and all later ones get `Compute error.`, as from a process that lost its GPU context;
    /// `/health` still answers.
    Poison,
    /// From this request on, each token is `/`, as from a process with NaN in its logits.
    Babble,
    /// From this request on, the model ends each answer at once.
    Mute,
    /// As `mute`, but only this request.
    Silence,
    /// From this request on, embeddings are null, as from a process with NaN in its cache.
    Nullify,
    /// From this request on, log-probabilities differ.
    Alter,
    /// The computing loop hangs: no token is generated, and `/slots` and `/metrics` hang. The HTTP threads
    /// still answer `/health` and send comments in streams.
    Wedge,
    /// The request pauses for `ms`.
    Stall,
    Close,
    /// An error answer; within a stream an error event without `[DONE]`.
    Error,
    /// The listening sockets are closed; existing connections continue.
    Refuse,
    /// `ICY 200 OK`, which is no HTTP status line.
    BadStatusLine,
    TwoLengths,
    LengthAndChunked,
    /// A head that ends in the middle.
    CutHead,
    ShortBody,
    /// A chunk shorter than its size line, then the end of the connection.
    CutChunk,
    /// A whole answer, then further bytes.
    GarbageAfter,
    /// A head of some 300 KiB.
    HugeHead,
}

impl Script {
    /// Returns the number of tokens to generate for this limit of a request.
    pub(crate) fn tokens_for(&self, asked: Option<u64>) -> u64 {
        match (asked, self.tokens) {
            (Some(asked), Some(cap)) => asked.min(cap),
            (Some(asked), None) => asked,
            (None, cap) => cap.unwrap_or(16),
        }
    }

    /// Returns this script with the fields of `patch` replaced.
    ///
    /// # Errors
    /// A field does not exist or has the wrong type.
    pub(crate) fn merged(&self, patch: Value) -> Result<Self, String> {
        let mut all = serde_json::to_value(self).map_err(|error| error.to_string())?;
        if let (Value::Object(all), Value::Object(patch)) = (&mut all, patch) {
            all.extend(patch);
        }
        serde_json::from_value(all).map_err(|error| format!("script: {error}"))
    }
}

impl Script {
    /// Returns this script with fields stopped or slowed by the environment and the flags.
    ///
    /// # Errors
    /// `stopped_by` names a field that does not exist or cannot be zero.
    fn switched(self, flags: &[String]) -> Result<Self, String> {
        let off: Map<String, Value> = self
            .stopped_by
            .iter()
            .filter(|(_, words)| words.iter().any(|word| is_given(word, flags)))
            .map(|(field, _)| (field.clone(), Value::from(0)))
            .collect();
        let known = serde_json::to_value(&self).map_err(|error| error.to_string())?;
        if let Some(unknown) = self.stopped_by.keys().find(|field| known.get(field.as_str()).is_none()) {
            return Err(format!("script: stopped_by: no field {unknown}"));
        }
        let mut script = self.merged(Value::Object(off))?;
        if script.dies_without.iter().any(|word| is_given(word, flags)) {
            script.dies_without.clear();
        }
        script.faults.retain(|fault| !fault.unless.iter().any(|word| is_given(word, flags)));
        let factors =
            script.slowed_by.iter().filter(|(word, _)| is_given(word, flags)).map(|(_, factor)| factor);
        script.ms_per_token *= factors.product::<f64>();
        Ok(script)
    }
}

/// Returns true if a variable is set or a flag is given, with the word's value if it has one.
fn is_given(word: &str, flags: &[String]) -> bool {
    let (name, value) = word.split_once('=').map_or((word, None), |(name, value)| (name, Some(value)));
    if name.starts_with('-') {
        let mut next = flags.iter().skip_while(|flag| *flag != name).skip(1);
        let given = flags.iter().any(|flag| flag == name);
        return given && value.is_none_or(|value| next.next().is_some_and(|own| own == value));
    }
    std::env::var(name).is_ok_and(|own| value.is_none_or(|value| own == value))
}

/// Returns the script from the environment, changed by `flags`.
///
/// # Errors
/// A file is unreadable or no JSON, or a field is unknown.
pub(crate) fn from_env(flags: &[String]) -> Result<Script, String> {
    let mut script = Script::default();
    if let Some(path) = std::env::var_os("FAKE_LLAMA_SCRIPT") {
        let path = PathBuf::from(path);
        let text = std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let value = serde_json::from_str(&text).map_err(|error| format!("{}: {error}", path.display()))?;
        script = script.merged(value)?;
    }
    let mut patch = Map::new();
    for (name, text) in std::env::vars() {
        if NOT_FIELDS.contains(&name.as_str()) {
            continue;
        }
        if let Some(field) = name.strip_prefix("FAKE_LLAMA_") {
            let value = serde_json::from_str(&text).unwrap_or(Value::String(text));
            patch.insert(field.to_lowercase(), value);
        }
    }
    script.merged(Value::Object(patch))?.switched(flags)
}
