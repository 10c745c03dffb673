//! What the stand-in is told to do wrong, and at what pace it works.
//!
//! Three sources, later ones win: a JSON file named by `FAKE_LLAMA_SCRIPT` (read at each start, so a test can rewrite
//! it between two generations), the variables `FAKE_LLAMA_<FIELD>` (values are JSON, or plain text), and
//! `POST /fake/script` at run time. An unknown field is an error: a fault that silently does not happen
//! makes a test that silently proves nothing.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::slots::{FileFault, Kept};

/// Variables that are settings of ours and not fields of [`Script`].
const NOT_FIELDS: [&str; 3] = ["FAKE_LLAMA_SCRIPT", "FAKE_LLAMA_LEDGER", "FAKE_LLAMA_HELP"];

/// The whole script. All zero and empty: a well-behaved, very fast llama-server.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Script {
    /// Milliseconds before the socket is bound.
    pub(crate) bind_ms: u64,
    /// Milliseconds of 503 "Loading model" after that.
    pub(crate) load_ms: u64,
    /// Knows no Unix sockets, as llama-server before about b5000: one is taken for the name of a host that nobody knows.
    pub(crate) no_unix: bool,
    /// Never bind; stay alive.
    pub(crate) never_bind: bool,
    /// Fail instead of becoming ready.
    pub(crate) fail: Option<Fail>,
    /// Dies of SIGSEGV while it loads, unless one of these words is given: a flag (`--flag`, `--flag=VALUE`) or a variable (`NAME=VALUE`).
    pub(crate) dies_without: Vec<String>,
    /// Exit code for `fail` (1 when absent).
    pub(crate) exit_code: Option<u8>,
    /// Lines on standard error before anything else happens.
    pub(crate) stderr: Vec<String>,
    /// Output tokens of a request that names no limit (16 when absent); also caps those that do.
    pub(crate) tokens: Option<u64>,
    /// Milliseconds per output token.
    pub(crate) ms_per_token: f64,
    /// Milliseconds by which `ms_per_token` grows with each request: a server that gets slower and slower.
    pub(crate) ms_per_token_per_request: f64,
    /// Milliseconds between the slot and the first token.
    pub(crate) prompt_ms: u64,
    /// Milliseconds without an event after which a stream gets a comment, as from llama-server since b9488; 0: none, as
    /// from older ones.
    pub(crate) ping_ms: u64,
    /// When the head of a stream is sent.
    pub(crate) stream_head: StreamHead,
    /// Pads every token to this many bytes.
    pub(crate) token_bytes: usize,
    /// Extra MiB held from the start on.
    pub(crate) base_mib: u64,
    /// KiB never given back, per generating request.
    pub(crate) leak_kib_per_request: u64,
    /// KiB never given back, per `image_url` in a request.
    pub(crate) leak_kib_per_image: u64,
    /// KiB never given back, per `input_audio` in a request, or recording to transcribe.
    pub(crate) leak_kib_per_audio: u64,
    /// KiB never given back, per prompt token.
    pub(crate) leak_kib_per_prompt_token: u64,
    /// KiB never given back, per output token.
    pub(crate) leak_kib_per_token: u64,
    /// KiB per prompt token of the largest prompt so far: buffers that are made larger when need be and kept.
    pub(crate) buffer_kib_per_prompt_token: u64,
    /// MiB never given back, per hour, whatever is done in it.
    pub(crate) leak_mib_per_hour: u64,
    /// KiB that the prompt cache keeps for a request, up to `--cache-ram` in all.
    pub(crate) cache_kib_per_request: u64,
    /// KiB that the prompt cache keeps for a prompt token, likewise.
    pub(crate) cache_kib_per_prompt_token: u64,
    /// The script of the test's own NVML ([`crate::vram`]): what this process holds on GPU 0 is told there.
    pub(crate) vram_told: Option<PathBuf>,
    /// MiB that GPU has (80 GiB when 0).
    pub(crate) vram_total_mib: u64,
    /// MiB of VRAM held from the start on.
    pub(crate) vram_base_mib: u64,
    /// KiB of VRAM held from the start on, for each token of context.
    pub(crate) vram_kib_per_context_token: u64,
    /// KiB of VRAM never given back, per generating request.
    pub(crate) vram_kib_per_request: u64,
    /// KiB of VRAM never given back, per `image_url` in a request.
    pub(crate) vram_kib_per_image: u64,
    /// KiB of VRAM per prompt token of the largest prompt so far.
    pub(crate) vram_buffer_kib_per_prompt_token: u64,
    /// KiB of VRAM for each token of a micro-batch of the largest so far.
    pub(crate) vram_buffer_kib_per_ubatch_token: u64,
    /// By the name of a field: what sets it to zero. Each word is a variable of the environment or, with a dash, a flag;
    /// `NAME=VALUE` and `--flag=VALUE` ask for that value, and one of them is enough.
    pub(crate) stopped_by: BTreeMap<String, Vec<String>>,
    /// The same words, and the factor by which each makes a token take longer.
    pub(crate) slowed_by: BTreeMap<String, f64>,
    /// What the first SIGTERM does.
    pub(crate) on_term: OnTerm,
    /// Milliseconds until a slot is free after the client of a non-streaming request has left.
    pub(crate) cancel_ms: u64,
    /// What is written where `LLAMA_WARDEN_REPORT` says.
    pub(crate) report: ReportKind,
    /// What is given back where `LLAMA_WARDEN_RECLAIM` says; absent: it is a plain build, and does not know the variable.
    pub(crate) reclaim: Option<crate::reclaim::Reclaim>,
    /// How slots keep what they hold.
    pub(crate) kept: Kept,
    /// Milliseconds that evaluating a token of prompt takes, where slots keep what they hold.
    pub(crate) ms_per_prompt_token: f64,
    /// Milliseconds that saving a slot takes.
    pub(crate) save_ms: u64,
    /// What goes wrong with saving.
    pub(crate) save_fault: Option<FileFault>,
    /// What goes wrong with restoring.
    pub(crate) restore_fault: Option<FileFault>,
    /// Refuses `--slot-save-path`, as a server does that is started where the directory is not.
    pub(crate) no_slot_path: bool,
    /// Paths whose requests are never answered.
    pub(crate) hangs_on: Vec<String>,
    /// Everything that goes wrong with single requests.
    pub(crate) faults: Vec<Fault>,
}

/// When the head of a stream is sent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum StreamHead {
    /// When the request gets its slot, as newer builds do.
    #[default]
    Slot,
    /// With the first token, as older builds and forks do. What fails before it has a status of its own.
    FirstToken,
}

/// How a start fails; each prints what llama-server prints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Fail {
    /// The model file is not there.
    MissingModel,
    /// The model file is not a GGUF file.
    CorruptModel,
    /// A flag it does not know.
    BadFlag,
    /// The context does not fit into memory.
    OutOfMemory,
    /// The address is taken.
    PortInUse,
    /// The dynamic loader misses a library (exit code 127).
    MissingLibrary,
    /// A failed assertion (SIGABRT).
    Abort,
    /// Exits without a word.
    Silent,
}

/// What SIGTERM does while requests run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum OnTerm {
    /// As the real one mostly does: nothing is sent any more, the process ends when the clients have left.
    #[default]
    Hang,
    /// As the real one sometimes does: streams are cut, the process ends.
    Cut,
    /// Nothing; only SIGKILL helps. The second one is ignored too.
    Ignore,
}

/// The memory report.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ReportKind {
    /// As a patched llama-server writes it.
    #[default]
    Good,
    /// None, as from a plain one.
    None,
    /// A file of the right size with something else in it.
    Corrupt,
}

/// One fault: when, and what.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Fault {
    /// Only the request with this ordinal (from 1, counted over working requests of this process).
    pub(crate) at: Option<u64>,
    /// This ordinal and all later ones.
    pub(crate) from: Option<u64>,
    /// Only requests whose body contains this text.
    pub(crate) body_has: Option<String>,
    /// Not where one of these is given: words as in `stopped_by`.
    pub(crate) unless: Vec<String>,
    /// At most once over all processes: the fault happens only to the one that creates this file.
    pub(crate) once: Option<PathBuf>,
    /// After this many tokens; absent: on arrival, before anything was executed or written to the ledger.
    pub(crate) after_tokens: Option<u64>,
    /// Written to standard error when it happens.
    pub(crate) says: Option<String>,
    /// What happens.
    #[serde(rename = "do")]
    pub(crate) what: What,
    /// For `stall`: milliseconds.
    pub(crate) ms: u64,
    /// For `crash`: the signal (6 when absent).
    pub(crate) signal: Option<i32>,
    /// For `error`: the status (500 when absent).
    pub(crate) status: Option<u16>,
    /// For `hang`: /health is silent too.
    pub(crate) silent_health: bool,
}

/// What a fault does.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum What {
    /// Nothing.
    #[default]
    Nothing,
    /// The process dies by `signal`; with `ms` so much later, whether the client waits for it or not.
    Crash,
    /// This request and all later ones get no (further) byte; /health still answers unless `silent_health`.
    Hang,
    /// This request and all later ones are answered with `Compute error.`, as by a process whose GPU context is lost;
    /// /health still answers.
    Poison,
    /// Nothing is computed any more, for nobody: no token comes, and what the computing loop answers (`/slots`,
    /// `/metrics`) is not answered. The HTTP threads go on: `/health` is well, and streams get their comments.
    Wedge,
    /// This request pauses for `ms`.
    Stall,
    /// The connection is closed.
    Close,
    /// An error answer; mid-stream an in-band error without `[DONE]`.
    Error,
    /// The listening sockets are closed; what is connected goes on.
    Refuse,
    /// `ICY 200 OK`: not an HTTP status line.
    BadStatusLine,
    /// Two Content-Length headers that disagree.
    TwoLengths,
    /// Content-Length and Transfer-Encoding: chunked in one head.
    LengthAndChunked,
    /// A head that ends in the middle.
    CutHead,
    /// A body shorter than its Content-Length.
    ShortBody,
    /// A chunk shorter than its size line, then the end of the connection.
    CutChunk,
    /// A whole answer, then bytes that belong to none.
    GarbageAfter,
    /// A head of some 300 KiB.
    HugeHead,
}

impl Script {
    /// Tokens to generate when the request asks for `asked`.
    pub(crate) fn tokens_for(&self, asked: Option<u64>) -> u64 {
        match (asked, self.tokens) {
            (Some(asked), Some(cap)) => asked.min(cap),
            (Some(asked), None) => asked,
            (None, cap) => cap.unwrap_or(16),
        }
    }

    /// This script with the fields of `patch` replaced.
    ///
    /// # Errors
    /// A field that does not exist or has the wrong type.
    pub(crate) fn merged(&self, patch: Value) -> Result<Self, String> {
        let mut all = serde_json::to_value(self).map_err(|error| error.to_string())?;
        if let (Value::Object(all), Value::Object(patch)) = (&mut all, patch) {
            all.extend(patch);
        }
        serde_json::from_value(all).map_err(|error| format!("script: {error}"))
    }
}

impl Script {
    /// This script with what the environment and the flags switch off or slow down.
    ///
    /// # Errors
    /// `stopped_by` names a field that does not exist, or one that zero is no value of.
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

/// Whether a variable is set or a flag is given, with the value that the word asks for, if it asks for one.
fn is_given(word: &str, flags: &[String]) -> bool {
    let (name, value) = word.split_once('=').map_or((word, None), |(name, value)| (name, Some(value)));
    if name.starts_with('-') {
        let mut next = flags.iter().skip_while(|flag| *flag != name).skip(1);
        let given = flags.iter().any(|flag| flag == name);
        return given && value.is_none_or(|value| next.next().is_some_and(|own| own == value));
    }
    std::env::var(name).is_ok_and(|own| value.is_none_or(|value| own == value))
}

/// The script of the environment, with what `flags` switch off.
///
/// # Errors
/// An unreadable file, JSON that is none, an unknown field.
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
