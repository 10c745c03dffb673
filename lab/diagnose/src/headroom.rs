//! Measures the worst case before production meets it: reads the memory during prompts of growing length, up
//! to the context of a slot, then with all slots full at once.
//!
//! ```text
//!   start ─ ready ─ idle reading ─┬─ one prompt of a length ── readings every few ms ─┬─ all slots at once ─ stop
//!                                 └─────────────────────<───────────────────────────┘
//! ```
//!
//! [`warden_experiment::headroom`] interprets the figures. A server that a prompt kills is a result, too.

use futures_util::future::join_all;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio_util::sync::CancellationToken;
use warden_experiment::headroom::{PromptCurve, PromptPeak, ServerSetup};
use warden_policies::MemoryKind;
use warden_policies::sample::{BackendSample, SampleEdge, WorkDone};
use warden_policies::units::scale_bytes;
use warden_supervisor::{SoloProcess, SoloReading, SoloSpec};

use crate::client::{LabAnswer, LabClient, LabRequest, LabRequestError};
use crate::error::DiagnoseError;
use crate::lab::Lab;
use crate::leg::{server_facts, stuck_crash_text};
use crate::workload::TextGenerator;

mod context;

pub use self::context::{SmallerContext, measure_smaller_context};

/// Server and prompts to measure.
#[derive(Clone, Debug)]
pub struct HeadroomRun {
    /// Server to measure.
    pub spec: SoloSpec,
    /// Configured `-c`, if any.
    pub context: Option<u64>,
    /// Configured `-ub`, if any.
    pub ubatch: Option<u64>,
    /// Prompt lengths as shares of a slot's context, in ascending order.
    pub lengths: Vec<f64>,
}

/// Result of a measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HeadroomMeasurement {
    /// Slots, contexts and micro-batch of the server.
    pub setup: ServerSetup,
    /// Measurements for each kind of memory, host memory first.
    pub series: Vec<HeadroomSeries>,
    /// Reason why the longest prompts are missing: the server ended, or refused them.
    pub broke: Option<PromptFailure>,
    /// True if the user interrupted the measurement before its end.
    pub interrupted: bool,
    /// Idle memory with a smaller context, measured if the worst case did not fit.
    #[serde(default)]
    pub less_context: Option<SmallerContext>,
}

/// Measurements of one kind of memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HeadroomSeries {
    /// Measured kind of memory.
    pub series: MemoryKind,
    /// Bytes of the process when ready, before any prompt.
    pub idle: u64,
    /// Bytes that were free at that time; `None` if unknown.
    pub free: Option<u64>,
    /// Prompts, each with the most bytes meanwhile.
    pub peaks: Vec<PromptPeak>,
}

/// Prompts that were not answered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PromptFailure {
    /// Tokens of each prompt.
    pub tokens: u64,
    /// Number of concurrent prompts.
    #[serde(rename = "together")]
    pub concurrent: u32,
    /// Reason.
    pub why: String,
}

/// Progress of a measurement.
#[derive(Clone, Copy, Debug)]
pub enum HeadroomProgress<'a> {
    /// A process starts.
    Starting,
    /// Prompts are being sent.
    Sending {
        /// Tokens of each prompt.
        tokens: u64,
        /// Number of concurrent prompts.
        together: u32,
    },
    /// The server answered the prompts.
    Took {
        /// Tokens of each prompt.
        tokens: u64,
        /// Number of concurrent prompts.
        together: u32,
        /// Most bytes meanwhile, for each kind of memory.
        peaks: &'a [(MemoryKind, u64)],
    },
}

impl HeadroomSeries {
    /// Returns the curve through the measurements; `None` without any prompt.
    pub fn curve(&self, setup: &ServerSetup) -> Option<PromptCurve> {
        PromptCurve::from_peaks(self.series, self.idle, &self.peaks, setup)
    }

    /// Returns the most bytes that the process may hold if `reserve` bytes are to stay free.
    pub fn limit(&self, reserve: u64) -> Option<u64> {
        self.free.map(|free| self.idle.saturating_add(free).saturating_sub(reserve))
    }
}

/// Runs a measurement. Cancelling `stop` ends it with the results so far.
///
/// # Errors
/// The server does not start, or does not complete texts.
pub async fn measure_headroom(
    lab: &Lab,
    what: &HeadroomRun,
    watch: &mut (dyn FnMut(HeadroomProgress<'_>) + Send),
    stop: &CancellationToken,
) -> Result<HeadroomMeasurement, DiagnoseError> {
    watch(HeadroomProgress::Starting);
    let started = stop.run_until_cancelled(lab.starter.start(&what.spec)).await;
    let solo = started.ok_or(DiagnoseError::Interrupted)?.map_err(DiagnoseError::Start)?;
    let touched = send_prompts(lab, what, &solo, watch, stop).await;
    solo.stop().await;
    touched
}

async fn send_prompts(
    lab: &Lab,
    what: &HeadroomRun,
    solo: &SoloProcess,
    watch: &mut (dyn FnMut(HeadroomProgress<'_>) + Send),
    stop: &CancellationToken,
) -> Result<HeadroomMeasurement, DiagnoseError> {
    let client = LabClient::new(solo)?;
    let setup = server_setup(what, solo);
    let first = async {
        tokio::time::sleep(lab.numbers.settle).await;
        let idle = solo.read_sample(SampleEdge::Idle, WorkDone::default(), 0, 0).await;
        (idle, server_facts(solo, &client, lab.numbers.question_limit).await)
    };
    let (idle, facts) = stop.run_until_cancelled(first).await.ok_or(DiagnoseError::Interrupted)?;
    let mut touched = HeadroomMeasurement {
        setup,
        series: idle_memories(&idle),
        broke: None,
        interrupted: false,
        less_context: None,
    };
    let mut sender = PromptSender {
        lab,
        solo,
        client,
        words: TextGenerator::new(facts.tokens_per_word),
        text_seed: 0,
        largest: 0,
        work: WorkDone::default(),
    };
    let spare = lab.numbers.headroom.spare;
    let one = setup.slot_context.saturating_sub(spare);
    let least = lab.numbers.headroom.least_prompt;
    let part = |share: &f64| (scale_bytes(one, share.clamp(0.0, 1.0)).max(least), 1);
    let mut lengths: Vec<(u64, u32)> = what.lengths.iter().map(part).collect();
    lengths.dedup();
    if setup.slots > 1 {
        lengths.push((setup.full_slot().saturating_sub(spare).max(1), setup.slots));
    }
    for (tokens, together) in lengths {
        watch(HeadroomProgress::Sending { tokens, together });
        let Some(sent) = stop.run_until_cancelled(sender.send(tokens, together)).await else {
            touched.interrupted = true;
            break;
        };
        match sent {
            Ok((tokens, peaks)) => {
                watch(HeadroomProgress::Took { tokens, together, peaks: &peaks });
                for (series, bytes) in peaks {
                    if let Some(of) = touched.series.iter_mut().find(|of| of.series == series) {
                        of.peaks.push(PromptPeak { tokens, together, bytes });
                    }
                }
            }
            Err(why) => {
                touched.broke = Some(PromptFailure { tokens, concurrent: together, why });
                break;
            }
        }
    }
    Ok(touched)
}

const DEFAULT_UBATCH: u64 = 512;
/// Tokens assumed if the context is unknown.
const DEFAULT_CONTEXT: u64 = 4096;

/// Returns the setup that the server logs at its start, or the configured value if none is logged.
fn server_setup(what: &HeadroomRun, solo: &SoloProcess) -> ServerSetup {
    let props = solo.props();
    let slots = props.slots.unwrap_or(1).max(1);
    let lines = solo.last_lines();
    let said = |name: &str| lines.iter().rev().find_map(|line| parse_logged_number(line, name));
    let given = what.context.filter(|context| *context > 0);
    let slot = props.n_ctx.or(given).unwrap_or(DEFAULT_CONTEXT);
    let all = said("n_ctx").or(given).unwrap_or_else(|| slot.saturating_mul(u64::from(slots)));
    ServerSetup {
        context: all.max(slot),
        slots,
        slot_context: slot,
        // Older builds log the sequence context as `n_ctx_per_seq`.
        sequence_context: said("n_ctx_seq").or_else(|| said("n_ctx_per_seq")),
        ubatch: said("n_ubatch").or(what.ubatch).unwrap_or(DEFAULT_UBATCH),
    }
}

/// Parses `llama_context: n_ctx         = 4096`.
fn parse_logged_number(line: &str, name: &str) -> Option<u64> {
    let (_, rest) = line.split_once("llama_context: ")?;
    let (own, value) = rest.split_once('=')?;
    (own.trim() == name).then(|| value.trim().parse().ok()).flatten()
}

fn idle_memories(idle: &SoloReading) -> Vec<HeadroomSeries> {
    let mut all = Vec::new();
    for (series, bytes) in charged_bytes(&idle.sample) {
        let free = match series {
            MemoryKind::Host => idle.totals.map(|totals| totals.available),
            MemoryKind::Vram(gpu) => {
                idle.devices.iter().find(|device| device.gpu == gpu).and_then(|device| device.free)
            }
        };
        all.push(HeadroomSeries { series, idle: bytes, free, peaks: Vec::new() });
    }
    all
}

/// Returns the bytes that count as costs of prompts, for each kind of memory. On the host, measured pools are
/// excluded, because a prompt cache is no such cost. On a GPU they are included: a backend's pool keeps what
/// it took for a prompt.
fn charged_bytes(sample: &BackendSample) -> Vec<(MemoryKind, u64)> {
    let gpus = sample.vram.iter().map(|vram| (MemoryKind::Vram(vram.gpu), vram.bytes));
    let cached = sample.pooled(MemoryKind::Host).unwrap_or(0);
    let host = sample.charged(MemoryKind::Host).map(|bytes| (MemoryKind::Host, bytes.saturating_sub(cached)));
    host.into_iter().chain(gpus).collect()
}

struct PromptSender<'a> {
    lab: &'a Lab,
    solo: &'a SoloProcess,
    client: LabClient,
    words: TextGenerator,
    /// Seed of the last text. No text is sent twice, because a cache would answer.
    text_seed: u64,
    largest: u64,
    work: WorkDone,
}

impl PromptSender<'_> {
    /// Returns the length as counted by the server, and the most bytes held.
    async fn send(&mut self, tokens: u64, together: u32) -> Result<(u64, Vec<(MemoryKind, u64)>), String> {
        let mut tokens = tokens;
        let mut refused = String::new();
        let numbers = &self.lab.numbers;
        for _ in 0..numbers.headroom.attempts {
            let mut peaks = Vec::new();
            let solo = self.solo;
            let sent = tokio::select! {
                biased;
                sent = self.send_once(tokens, together, &mut peaks) => sent,
                line = solo.until_crash_hang() => return Err(stuck_crash_text(&line)),
            };
            match sent {
                Ok(counted) => return Ok((counted, peaks)),
                Err(LabRequestError::Refused { status, message }) => {
                    refused = format!("{message} (status {status})");
                    tokens = scale_bytes(tokens, numbers.headroom.shorter).max(1);
                }
                Err(error) => {
                    // The supervisor notices the end of a process a moment after its connections break.
                    let ended = tokio::time::timeout(self.lab.numbers.noticed, self.solo.until_end()).await;
                    return Err(ended.map_or_else(|_| error.to_string(), |failure| failure.message));
                }
            }
        }
        Err(refused)
    }

    async fn send_once(
        &mut self,
        tokens: u64,
        together: u32,
        peaks: &mut Vec<(MemoryKind, u64)>,
    ) -> Result<u64, LabRequestError> {
        let asks: Vec<LabRequest> = (0..together)
            .map(|_| {
                self.text_seed += 1;
                let prompt = self.words.text(self.text_seed, tokens);
                let body = json!({ "prompt": prompt, "n_predict": 1, "cache_prompt": false, "stream": true });
                LabRequest::post("/completion", body)
            })
            .collect();
        let limit = self.lab.numbers.request_limit;
        let mut answers = std::pin::pin!(join_all(asks.iter().map(|ask| self.client.send(ask, limit))));
        let pause = self.lab.numbers.headroom.interval;
        let answers: Vec<Result<LabAnswer, LabRequestError>> = loop {
            tokio::select! {
                answers = &mut answers => break answers,
                () = tokio::time::sleep(pause) => {
                    let reading = self.solo.read_sample(SampleEdge::Tick, self.work, together, self.largest).await;
                    raise_peaks(peaks, &reading.sample);
                }
            }
        };
        let mut counted = 0;
        for answer in answers {
            let answer = answer?;
            counted = counted.max(answer.prompt_size);
            self.work += WorkDone {
                requests: 1,
                prompt_tokens: answer.prompt_tokens,
                output_tokens: answer.output_tokens,
                ..WorkDone::default()
            };
        }
        self.largest = self.largest.max(counted);
        let reading = self.solo.read_sample(SampleEdge::Idle, self.work, 0, self.largest).await;
        raise_peaks(peaks, &reading.sample);
        Ok(if counted == 0 { tokens } else { counted })
    }
}

fn raise_peaks(peaks: &mut Vec<(MemoryKind, u64)>, sample: &BackendSample) {
    for (series, bytes) in charged_bytes(sample) {
        match peaks.iter_mut().find(|(of, _)| *of == series) {
            Some((_, most)) => *most = bytes.max(*most),
            None => peaks.push((series, bytes)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_server_says_of_its_context_is_read() {
        let line = "0.12.345.678 I llama_context: n_ctx         = 57344";
        assert_eq!(parse_logged_number(line, "n_ctx"), Some(57_344));
        assert_eq!(parse_logged_number("llama_context: n_ubatch      = 256", "n_ubatch"), Some(256));
        assert_eq!(parse_logged_number("llama_context: n_ctx_seq     = 14336", "n_ctx"), None);
        assert_eq!(parse_logged_number("n_ctx = 5", "n_ctx"), None);
    }

    #[test]
    fn a_cache_of_prompts_is_no_price_and_a_pool_of_a_gpu_is() {
        let gpu = warden_policies::sample::GpuIndex(0);
        let sample = BackendSample {
            at: std::time::Duration::ZERO,
            edge: SampleEdge::Tick,
            host: Some(warden_policies::sample::HostMemory { anon: 500, ..Default::default() }),
            vram: vec![warden_policies::sample::VramReading {
                gpu,
                bytes: 900,
                source: warden_policies::sample::VramSource::Process,
            }],
            pools: vec![(MemoryKind::Host, 200), (MemoryKind::Vram(gpu), 700)],
            in_flight: 1,
            work: WorkDone::default(),
            largest_prompt: 0,
            reclaims: 0,
        };
        assert_eq!(charged_bytes(&sample), [(MemoryKind::Host, 300), (MemoryKind::Vram(gpu), 900)]);
        assert_eq!(charged_bytes(&BackendSample { host: None, vram: Vec::new(), ..sample }), []);
    }
}
