//! Recordings of memory readings: one JSON object per line, parsed to a [`BackendSample`].
//!
//! ```text
//! {"t": 0.385, "edge": "idle", "in_flight": 0, "requests": 1, "prompt_tokens": 300, "output_tokens": 64, "images": 1,
//!  "rss_anon_kib": 363876, "rss_kib": 606676, "swap_kib": 0, "vram_mib": 3090}
//! ```
//!
//! | field | meaning |
//! |---|---|
//! | `t` | time in seconds, never falling; required |
//! | `requests` | number of requests answered so far; required |
//! | `edge` | `idle`: the last request in flight just ended; `tick` (default): a timer expired |
//! | `in_flight`, `prompt_tokens`, `output_tokens`, `images`, `audio`, `largest_prompt`, `reclaims` | zero if absent |
//! | `rss_anon_kib`, `swap_kib`, `rss_kib` | host memory; unknown without `rss_anon_kib` or when that is null |
//! | `vram_mib`, `vram1_mib`, `vram2_mib`, … | VRAM on each GPU; unknown if absent or null |
//! | `vram_estimated` | GPUs whose value is an estimate |
//! | `pools` | bytes in measured pools, by series: `{"host": 1048576}` |
//!
//! Other fields are ignored. This module opens no files.

use std::time::Duration;

use serde_json::{Map, Value, json};

use crate::sample::{
    BackendSample, GpuIndex, HostMemory, MemoryKind, SampleEdge, VramReading, VramSource, WorkDone,
};
use crate::units::{as_f64, truncate_to_u64};

const KIB: u64 = 1024;
const MIB: u64 = 1024 * KIB;

/// A line that is not a reading.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {what}")]
pub struct RecordingError {
    /// Line number, from 1.
    pub line: usize,
    what: String,
}

/// Parses all readings of a recording, skipping empty lines and a truncated last line (full disk, or still
/// recording).
///
/// # Errors
/// A line is not a reading, or its time is earlier than that of the line above.
pub fn parse_recording(text: &str) -> Result<Vec<BackendSample>, RecordingError> {
    // Some editors write a byte order mark.
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut samples: Vec<BackendSample> = Vec::new();
    for (index, line) in text.lines().enumerate() {
        if line.trim().is_empty() {
            continue;
        }
        let sample = match parse_line(line) {
            Err(_) if !samples.is_empty() && text.ends_with(line) && is_truncated(line) => break,
            sample => sample.map_err(|what| RecordingError { line: index + 1, what })?,
        };
        if samples.last().is_some_and(|before| before.at > sample.at) {
            let what =
                "`t` is before that of the line above: a recording holds one generation, in order".to_owned();
            return Err(RecordingError { line: index + 1, what });
        }
        samples.push(sample);
    }
    Ok(samples)
}

/// Returns true if a line is only the beginning of a JSON object.
fn is_truncated(line: &str) -> bool {
    line.starts_with('{') && serde_json::from_str::<Value>(line).is_err_and(|error| error.is_eof())
}

fn parse_line(line: &str) -> Result<BackendSample, String> {
    let value: Value = serde_json::from_str(line).map_err(|error| format!("not a JSON object: {error}"))?;
    let Value::Object(fields) = value else {
        return Err(format!("not a JSON object but {}", json_kind(&value)));
    };
    let edge = match fields.get("edge") {
        None | Some(Value::Null) => SampleEdge::Tick,
        Some(Value::String(edge)) if edge == "idle" => SampleEdge::Idle,
        Some(Value::String(edge)) if edge == "tick" => SampleEdge::Tick,
        Some(other) => return Err(format!("`edge` is {other}: it is \"idle\" or \"tick\"")),
    };
    let host = match optional_amount(&fields, "rss_anon_kib", KIB)? {
        None => None,
        Some(anon) => Some(HostMemory {
            anon,
            swap: optional_amount(&fields, "swap_kib", KIB)?.unwrap_or(0),
            rss: optional_amount(&fields, "rss_kib", KIB)?.unwrap_or(0),
        }),
    };
    let prompt_tokens = count(&fields, "prompt_tokens")?;
    Ok(BackendSample {
        at: seconds(&fields)?,
        edge,
        host,
        vram: vram(&fields)?,
        pools: pools(&fields)?,
        in_flight: u32::try_from(count(&fields, "in_flight")?)
            .map_err(|_| "`in_flight` is too large".to_owned())?,
        work: WorkDone {
            requests: optional_amount(&fields, "requests", 1)?
                .ok_or("no field `requests`: without the work that was done, growth cannot be judged")?,
            prompt_tokens,
            output_tokens: count(&fields, "output_tokens")?,
            images: count(&fields, "images")?,
            audio: count(&fields, "audio")?,
        },
        largest_prompt: count(&fields, "largest_prompt")?,
        reclaims: count(&fields, "reclaims")?,
    })
}

/// Formats a reading as a line, without a line break.
pub fn format_line(sample: &BackendSample) -> String {
    let mut fields = Map::new();
    let mut put = |name: &str, value: Value| fields.insert(name.to_owned(), value);
    put("t", json!((sample.at.as_secs_f64() * 1000.0).round() / 1000.0));
    put("edge", json!(sample.edge));
    put("in_flight", json!(sample.in_flight));
    put("requests", json!(sample.work.requests));
    put("prompt_tokens", json!(sample.work.prompt_tokens));
    put("output_tokens", json!(sample.work.output_tokens));
    put("images", json!(sample.work.images));
    put("audio", json!(sample.work.audio));
    put("largest_prompt", json!(sample.largest_prompt));
    if sample.reclaims > 0 {
        put("reclaims", json!(sample.reclaims));
    }
    match sample.host {
        None => put("rss_anon_kib", Value::Null),
        Some(host) => {
            put("rss_anon_kib", json!(host.anon / KIB));
            put("rss_kib", json!(host.rss / KIB));
            put("swap_kib", json!(host.swap / KIB))
        }
    };
    if sample.vram.is_empty() {
        put("vram_mib", Value::Null);
    }
    for vram in &sample.vram {
        put(&vram_field(vram.gpu), scaled(vram.bytes, MIB));
    }
    let estimated = sample.vram.iter().filter(|vram| vram.source == VramSource::Estimate);
    let estimated: Vec<GpuIndex> = estimated.map(|vram| vram.gpu).collect();
    if !estimated.is_empty() {
        put("vram_estimated", json!(estimated));
    }
    if !sample.pools.is_empty() {
        let mut pools = Map::new();
        for (series, _) in &sample.pools {
            pools.insert(series.to_string(), json!(sample.pooled(*series).unwrap_or(0)));
        }
        put("pools", Value::Object(pools));
    }
    Value::Object(fields).to_string()
}

fn vram_field(gpu: GpuIndex) -> String {
    if gpu.0 == 0 { "vram_mib".to_owned() } else { format!("vram{}_mib", gpu.0) }
}

/// Divides bytes by a unit; the result is an integer if the division leaves no rest.
fn scaled(bytes: u64, unit: u64) -> Value {
    if bytes.is_multiple_of(unit) { json!(bytes / unit) } else { json!(as_f64(bytes) / as_f64(unit)) }
}

fn json_kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

fn seconds(fields: &Map<String, Value>) -> Result<Duration, String> {
    let t = fields.get("t").ok_or("no field `t`: the time of the reading in seconds")?;
    let seconds = t.as_f64().ok_or_else(|| format!("`t` is {t}: it is a number of seconds"))?;
    Duration::try_from_secs_f64(seconds).map_err(|_| format!("`t` is {t}: it is a number of seconds from 0"))
}

/// Parses a count, or a number of units of `unit` bytes; `None` if absent or null.
fn optional_amount(fields: &Map<String, Value>, name: &str, unit: u64) -> Result<Option<u64>, String> {
    match fields.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => amount(value, unit).map(Some).map_err(|what| format!("`{name}` is {value}: {what}")),
    }
}

fn amount(value: &Value, unit: u64) -> Result<u64, &'static str> {
    if let Some(number) = value.as_u64() {
        return number.checked_mul(unit).ok_or("it is too large");
    }
    let number = value.as_f64().ok_or("it is a number")? * as_f64(unit);
    if (0.0..9.0e18).contains(&number) {
        Ok(truncate_to_u64(number.round()))
    } else {
        Err("it is a number from 0")
    }
}

fn count(fields: &Map<String, Value>, name: &str) -> Result<u64, String> {
    Ok(optional_amount(fields, name, 1)?.unwrap_or(0))
}

fn vram(fields: &Map<String, Value>) -> Result<Vec<VramReading>, String> {
    let estimated = match fields.get("vram_estimated") {
        None | Some(Value::Null) => vec![],
        Some(value) => serde_json::from_value::<Vec<GpuIndex>>(value.clone())
            .map_err(|_| format!("`vram_estimated` is {value}: it is a list of GPU numbers"))?,
    };
    let mut found = Vec::new();
    for name in fields.keys() {
        let number = name.strip_prefix("vram").and_then(|rest| rest.strip_suffix("_mib"));
        let gpu = match number {
            Some("") => GpuIndex(0),
            Some(number) => match number.parse() {
                Ok(number) => GpuIndex(number),
                Err(_) => continue,
            },
            None => continue,
        };
        if let Some(bytes) = optional_amount(fields, name, MIB)? {
            if found.iter().any(|vram: &VramReading| vram.gpu == gpu) {
                return Err(format!("`{name}`: another field tells of this GPU too"));
            }
            let source = if estimated.contains(&gpu) { VramSource::Estimate } else { VramSource::Process };
            found.push(VramReading { gpu, bytes, source });
        }
    }
    found.sort_by_key(|vram| vram.gpu);
    Ok(found)
}

fn pools(fields: &Map<String, Value>) -> Result<Vec<(MemoryKind, u64)>, String> {
    let pools = match fields.get("pools") {
        None | Some(Value::Null) => return Ok(vec![]),
        Some(Value::Object(pools)) => pools,
        Some(other) => {
            return Err(format!("`pools` is {}: it is an object of bytes by series", json_kind(other)));
        }
    };
    let mut found = Vec::new();
    for (name, bytes) in pools {
        let series: MemoryKind = name.parse().map_err(|error| format!("`pools`: {error}"))?;
        let bytes = amount(bytes, 1).map_err(|what| format!("`pools.{name}` is {bytes}: {what}"))?;
        found.push((series, bytes));
    }
    Ok(found)
}

#[cfg(test)]
#[path = "trace_tests.rs"]
mod tests;
