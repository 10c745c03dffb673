//! `llama-warden policy simulate --trace`: plays recorded requests for several models under the loading
//! policy. The numbers come from [`warden_policies::loading::simulate`].

use std::path::Path;
use std::time::Duration;

use serde::Deserialize;
use serde_json::json;
use warden_config::machine::HostMachine;
use warden_config::needs;
use warden_config::resolve::{ResolvedConfig, binary, resolve_config};
use warden_config::source::layers::LoadedConfig;
use warden_policies::loading::simulate::{RequestTrace, TraceModel, TraceRequest, TraceScore, run};
use warden_policies::{ByteSize, phrases};

use super::simulate::SimulateArgs;
use crate::cli::shared::block_on;
use crate::exit::CommandError;
use crate::out;

#[derive(Deserialize)]
struct AccessLogLine {
    timestamp: String,
    model: Option<String>,
    #[serde(default)]
    queue_ms: f64,
    #[serde(default)]
    total_ms: f64,
}

pub(super) fn play_trace(args: &SimulateArgs, path: &Path) -> Result<(), CommandError> {
    let (machine, loaded) = args.config.read()?;
    let trace = read_trace(args, path, &loaded, &machine)?;
    let score = run(&trace, &loaded.settings.loading);
    if args.json { out::print_json(&as_json(&trace, &score)) } else { out::print_text(&text(&trace, &score)) }
}

fn read_trace(
    args: &SimulateArgs,
    path: &Path,
    loaded: &LoadedConfig,
    machine: &HostMachine,
) -> Result<RequestTrace, CommandError> {
    let wrong = |why: String| {
        let hint = "it takes an access log in JSON: `log.format = \"json\"` and `log.access = \"FILE\"`";
        CommandError::hinted(format!("{}: {why}", path.display()), hint)
    };
    let text = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
    let mut resolved = resolve_config(loaded, machine, false)?;
    drop(block_on(binary::fill_from_store(&mut resolved, machine))?);
    needs::fill_needs(&mut resolved, machine);
    let mut models: Vec<TraceModel> = Vec::new();
    let mut requests = Vec::new();
    let mut first = None;
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let line: AccessLogLine =
            serde_json::from_str(line).map_err(|error| wrong(format!("line {}: {error}", number + 1)))?;
        let Some(name) = line.model else { continue };
        let known = models.iter().position(|model| model.name == name);
        if known.is_none() {
            models.push(trace_model(args, &resolved, &name)?);
        }
        let model = known.unwrap_or(models.len() - 1);
        let ms = |ms: f64| Duration::try_from_secs_f64(ms / 1000.0).unwrap_or_default();
        let ended: jiff::Timestamp =
            line.timestamp.parse().map_err(|error| wrong(format!("line {}: {error}", number + 1)))?;
        // Times since the first line, in milliseconds, are small enough for f64.
        let since = ended.duration_since(*first.get_or_insert(ended)).as_millis_f64();
        requests.push((since - line.total_ms, model, ms(line.total_ms - line.queue_ms)));
    }
    if requests.is_empty() {
        return Err(wrong("there is no request for a model in it".to_owned()));
    }
    // The log has a line at the end of each request, so a request may start before the time of the first
    // line.
    let earliest = requests.iter().map(|(at, ..)| *at).fold(0.0, f64::min);
    let mut requests: Vec<TraceRequest> = requests
        .into_iter()
        .map(|(at, model, takes)| TraceRequest {
            at: Duration::try_from_secs_f64((at - earliest) / 1000.0).unwrap_or_default(),
            model,
            duration: takes,
        })
        .collect();
    requests.sort_by_key(|request| request.at);
    Ok(RequestTrace { name: path.display().to_string(), memory: args.gpu_memory.0, models, requests })
}

fn trace_model(
    args: &SimulateArgs,
    resolved: &ResolvedConfig,
    name: &str,
) -> Result<TraceModel, CommandError> {
    let spec = resolved.fleet.models.iter().find(|spec| spec.name.as_str() == name);
    let needs = spec.and_then(|spec| spec.loading.needs.as_ref()).ok_or_else(|| {
        CommandError::hinted(
            format!("the access log names model `{name}`, and what it needs is not known"),
            "give its configuration with --config; `llama-warden plan` says why a model is not known",
        )
    })?;
    let bytes = if needs.uses_gpu() { needs.gpu_bytes(1) } else { needs.host_bytes() + needs.mapped };
    let slots = u32::try_from(needs.slots).unwrap_or(u32::MAX).max(1);
    Ok(TraceModel { name: name.to_owned(), bytes, load: args.load_time, slots })
}

fn text(trace: &RequestTrace, score: &TraceScore) -> String {
    let sizes: Vec<String> =
        trace.models.iter().map(|model| format!("{} {}", model.name, ByteSize(model.bytes))).collect();
    let wait = |time: Duration| phrases::time_phrase(time.as_secs_f64());
    let row = vec![
        score.loads.to_string(),
        ByteSize(score.bytes).to_string(),
        wait(score.median),
        wait(score.p99),
        wait(score.longest),
        score.unserved.to_string(),
    ];
    format!(
        "{}: {} requests for {} in {}\n{}",
        trace.name,
        trace.requests.len(),
        sizes.join(", "),
        ByteSize(trace.memory),
        out::table(["LOADS", "MOVED", "HALF WAIT", "99 OF 100", "LONGEST", "UNSERVED"], [row])
    )
}

fn as_json(trace: &RequestTrace, score: &TraceScore) -> serde_json::Value {
    json!({
        "trace": trace.name,
        "requests": trace.requests.len(),
        "memory_bytes": trace.memory,
        "loads": score.loads,
        "bytes": score.bytes,
        "wait_seconds": {
            "p50": score.median.as_secs_f64(),
            "p99": score.p99.as_secs_f64(),
            "max": score.longest.as_secs_f64(),
        },
        "unserved": score.unserved,
    })
}
