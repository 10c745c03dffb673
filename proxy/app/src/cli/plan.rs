//! `llama-warden plan`: shows the memory that each configured model needs, and which models fit together,
//! before any is loaded.
//!
//! Reads the models' files and the flags of their llama-servers, and queries the drivers for GPUs. `--gpus`
//! and `--host` describe another machine.

use std::collections::BTreeMap;
use std::path::Path;
use std::str::FromStr;

use clap::Args;
use serde_json::{Value, json};
use warden_config::machine::{HostMachine, left_for_models, own_memory};
use warden_config::needs::{ModelMemoryNeeds, is_for_cpu, misfit_text, server_build};
use warden_config::resolve::{binary, resolve_config};
use warden_policies::book::{
    self, LaterMemory, MachineCapacity as Room, MeasuredNeeds, MemoryNeeds, ModelFit, NeedPurpose,
    PlacementRequest, ServerRun,
};
use warden_policies::growth::LeakPrior;
use warden_policies::modes::WarmMode;
use warden_policies::{ByteSize, defaults, phrases};
use warden_sensors::gpu::GpuSensors;
use warden_supervisor::known_memory;
use warden_supervisor::spec::ServerCommand;

use crate::cli::shared::{ConfigArgs, block_on};
use crate::exit::CommandError;
use crate::out;

const MAX_COMBINED_MODELS: usize = 12;
/// Proposed contexts are multiples of this many tokens.
const CONTEXT_STEP: u64 = 1024;

#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    /// GPUs of another machine, by their memory: `24GiB,24GiB`; `none` for a machine or build without GPUs.
    #[arg(long, value_name = "SIZES")]
    gpus: Option<String>,
    /// Host memory of another machine.
    #[arg(long, value_name = "SIZE")]
    host: Option<ByteSize>,
    /// Shows only this model.
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// Prints JSON, with sizes in bytes.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    config: ConfigArgs,
}

struct PlanSheet {
    name: String,
    replicas: u32,
    known: Result<ModelMemoryNeeds, String>,
    leaks: Vec<LeakPrior>,
    /// Bound of the conversations that stay on disk (`warm = "disk"`).
    disk: Option<ByteSize>,
}

pub(crate) fn run(args: &PlanArgs) -> Result<(), CommandError> {
    let (mut machine, loaded) = args.config.read()?;
    // `--host` also determines the bounds of the caches.
    machine.memory = args.host.unwrap_or(machine.memory);
    let only = match &args.model {
        Some(name) => Some(super::policy::find_model(&loaded, name)?.0.to_owned()),
        None => None,
    };
    let mut resolved = resolve_config(&loaded, &machine, false)?;
    let room = machine_room(args, &machine)?;
    // Measurements are keyed by the whole command, so resolve the programs. A missing program is no error
    // here.
    drop(block_on(binary::fill_from_store(&mut resolved, &machine))?);
    let mut env: BTreeMap<String, String> = machine.text_vars().into_iter().collect();
    env.retain(|name, _| name.starts_with("LLAMA_ARG_"));
    let asked = |name: &str| only.as_deref().is_none_or(|asked| asked == name);
    let models = resolved.fleet.models.iter().zip(&resolved.models);
    let sheets: Vec<PlanSheet> = models
        .filter(|(spec, _)| asked(spec.name.as_str()))
        .map(|(spec, model)| {
            let build = model.build.as_ref();
            // With `--gpus`, assume a build that can use these GPUs.
            let mut env = env.clone();
            env.extend(spec.start.cache_bounds.iter().cloned());
            let has_gpu = !room.gpus.is_empty() && (args.gpus.is_some() || !is_for_cpu(build));
            let mut sheet = PlanSheet {
                name: spec.name.to_string(),
                replicas: spec.run.replicas,
                known: ModelMemoryNeeds::compute(&spec.command, env, server_build(build, has_gpu)),
                leaks: Vec::new(),
                disk: (spec.run.warm == WarmMode::Disk).then_some(spec.run.warm_disk_bytes),
            };
            if args.gpus.is_none() {
                sheet.apply_measurements(&resolved.dirs.state, &spec.command);
            }
            sheet
        })
        .collect();
    if args.json {
        out::print_text(&format!("{:#}\n", as_json(&sheets, &room)))
    } else {
        out::print_text(&plan_text(&sheets, &room))
    }
}

fn machine_room(args: &PlanArgs, machine: &HostMachine) -> Result<Room, CommandError> {
    let gpus = match args.gpus.as_deref() {
        Some("none") => Vec::new(),
        Some(sizes) => sizes.split(',').map(|size| parse_size(size.trim())).collect::<Result<_, _>>()?,
        None => own_memory(&GpuSensors::open()),
    };
    Ok(left_for_models(machine.memory.0, &gpus, &defaults().loading))
}

fn parse_size(text: &str) -> Result<u64, CommandError> {
    ByteSize::from_str(text).map(|size| size.0).map_err(|error| {
        CommandError::usage(
            format!("--gpus: {error}"),
            "write the memory of each GPU: `--gpus 24GiB,24GiB`, or `none`",
        )
    })
}

impl PlanSheet {
    /// Prefers the sizes that processes with this command held on this machine.
    fn apply_measurements(&mut self, state_dir: &Path, command: &ServerCommand) {
        let seen = known_memory(state_dir, command);
        if let Ok(known) = &mut self.known {
            known.needs.measured = MeasuredNeeds::from_held(&seen.held);
        }
        self.leaks = seen.leaks;
    }
}

fn processes_to_place(sheets: &[PlanSheet]) -> Vec<PlacementRequest> {
    let each = sheets.iter().filter_map(|sheet| Some((sheet, sheet.known.as_ref().ok()?)));
    let each = each.flat_map(|(sheet, known)| {
        (1..=sheet.replicas).map(move |number| (number, replica_name(&sheet.name, number), known))
    });
    each.map(|(number, name, known)| {
        let (gpus, may_split) = known.gpus();
        // Count a mapped file once, because replicas share it.
        let mapped = if number == 1 { known.needs.mapped } else { 0 };
        PlacementRequest { name, needs: MemoryNeeds { mapped, ..known.needs.clone() }, gpus, may_split }
    })
    .collect()
}

fn replica_name(name: &str, number: u32) -> String {
    if number == 1 { name.to_owned() } else { format!("{name} ({number})") }
}

/// Returns the largest sets of processes that fit, with their placement. No set contains another.
fn fitting_sets(all: &[PlacementRequest], room: &Room) -> Vec<Vec<ModelFit>> {
    let fits = |set: u32| {
        let chosen: Vec<&PlacementRequest> =
            (0..).zip(all).filter(|(index, _)| set >> index & 1 == 1).map(|(_, one)| one).collect();
        book::fit_models(room, &chosen).ok()
    };
    let mut sets: Vec<u32> = (1..1_u32 << all.len()).collect();
    sets.sort_by_key(|set| std::cmp::Reverse(set.count_ones()));
    let mut found: Vec<(u32, Vec<ModelFit>)> = Vec::new();
    for set in sets {
        if found.iter().any(|(larger, _)| larger & set == set) {
            continue;
        }
        if let Some(fit) = fits(set) {
            found.push((set, fit));
        }
    }
    found.into_iter().map(|(_, fit)| fit).collect()
}

fn part_bytes(parts: &[(NeedPurpose, u64)], part: NeedPurpose) -> String {
    parts
        .iter()
        .find(|(known, _)| *known == part)
        .map_or("-".to_owned(), |(_, bytes)| ByteSize(*bytes).to_string())
}

fn plan_text(sheets: &[PlanSheet], room: &Room) -> String {
    let mut lines = Vec::new();
    let rows = plan_rows(sheets);
    if !rows.is_empty() {
        let head = ["MODEL", "WHERE", "WEIGHTS", "CACHE", "STATE", "COMPUTING", "PROJECTOR", "FIXED", "ALL"];
        lines.push(out::table(head, rows));
    }
    lines.extend(sheets.iter().map(|sheet| match &sheet.known {
        Ok(known) => model_notes(sheet, known),
        Err(why) => format!("{}: not known: {why}", sheet.name),
    }));
    let gpus: Vec<String> = room.gpus.iter().map(|bytes| ByteSize(*bytes).to_string()).collect();
    let gpus = if gpus.is_empty() { "no GPU".to_owned() } else { format!("GPUs of {}", gpus.join(", ")) };
    lines.push(format!("\nmodels may have {} of the host, and {gpus}", ByteSize(room.host)));
    let all = processes_to_place(sheets);
    let mut every = Vec::new();
    for one in &all {
        match book::fit_models(room, &[one]) {
            Ok(_) => every.push(one),
            Err(misfit) => {
                // The line of the first replica describes the model.
                let Some(sheet) = sheets.iter().find(|sheet| sheet.name == one.name) else { continue };
                let known = sheet.known.as_ref().ok();
                let less = known.map(|known| smaller_context(known, one, room)).unwrap_or_default();
                lines.push(format!("{} does not fit even alone: {}{less}", one.name, misfit_text(&misfit)));
            }
        }
    }
    match (book::fit_models(room, &every), every.len()) {
        (Ok(_), 0) => {}
        (Ok(fits), count) => {
            let all = if count == 1 { "it fits".to_owned() } else { format!("all {count} fit together") };
            lines.push(format!("{all}: {}", placement_text(&fits)));
            lines.extend(later_warning(sheets, &fits, room));
        }
        (Err(misfit), count) => {
            lines.push(format!("not all of them fit together: {}", misfit_text(&misfit)));
            if count <= MAX_COMBINED_MODELS {
                let every: Vec<PlacementRequest> = every.into_iter().cloned().collect();
                lines.extend(
                    fitting_sets(&every, room)
                        .iter()
                        .map(|fits| format!("  together: {}", placement_text(fits))),
                );
            }
        }
    }
    lines.join("\n") + "\n"
}

fn plan_rows(sheets: &[PlanSheet]) -> Vec<Vec<String>> {
    let mut rows = Vec::new();
    for sheet in sheets {
        let Ok(ModelMemoryNeeds { needs, .. }) = &sheet.known else { continue };
        for (place, parts, fixed, all) in [
            ("GPU", &needs.gpu, needs.each_gpu, needs.gpu_bytes(1)),
            ("host", &needs.host, 0, needs.host_bytes()),
        ] {
            if all == 0 {
                continue;
            }
            let is_measured =
                if place == "host" { needs.measured.host.is_some() } else { needs.measured.gpu.is_some() };
            let all = format!("{}{}", ByteSize(all), if is_measured { " (measured)" } else { "" });
            let fixed =
                if fixed > 0 { ByteSize(fixed).to_string() } else { part_bytes(parts, NeedPurpose::Fixed) };
            let name = if place == "host" && needs.uses_gpu() { String::new() } else { sheet.name.clone() };
            let cells = [
                NeedPurpose::Weights,
                NeedPurpose::Cache,
                NeedPurpose::State,
                NeedPurpose::Computing,
                NeedPurpose::Projector,
            ];
            let mut row = vec![name, place.to_owned()];
            row.extend(cells.map(|part| part_bytes(parts, part)));
            row.extend([fixed, all]);
            rows.push(row);
        }
    }
    rows
}

fn model_notes(sheet: &PlanSheet, known: &ModelMemoryNeeds) -> String {
    let name = &sheet.name;
    let MemoryNeeds { context, slots, mapped, untouched, unknown, .. } = &known.needs;
    let each = if *slots == 1 { "one slot".to_owned() } else { format!("{slots} slots") };
    let mut parts = vec![format!("{name}: {context} tokens of context for {each}")];
    if sheet.replicas > 1 {
        parts.push(format!("{} processes, of which each needs all that", sheet.replicas));
    }
    if *mapped > 0 {
        let mapped = ByteSize(*mapped);
        parts.push(format!("{mapped} of its file are mapped, and are read again where memory is short"));
    }
    if *untouched > 0 {
        let untouched = ByteSize(*untouched);
        parts.push(format!(
            "{untouched} of buffers are reserved on the host and never touched, which costs nothing"
        ));
    }
    if !unknown.is_empty() {
        parts.push(format!("not reckoned with: {}", unknown.join(", ")));
    }
    parts.extend(measured_note(&known.needs));
    parts.extend(later_note(&known.later_memory));
    parts.extend(sheet.disk.and_then(|disk| disk_note(known, disk)));
    for leak in &sheet.leaks {
        parts.push(format!("it leaks: {}, {}", leak.series, phrases::slope_phrase(&leak.slope)));
    }
    parts.join("; ")
}

fn measured_note(needs: &MemoryNeeds) -> Option<String> {
    let of = |measured: u64, planned: u64, place: &str| {
        format!("{} {place} ({} planned)", ByteSize(measured), ByteSize(planned))
    };
    let gpu = needs.measured.gpu.map(|(bytes, gpus)| of(bytes, needs.planned_gpu(gpus), "on GPUs"));
    let host = needs.measured.host.map(|bytes| of(bytes, needs.planned_host(), "on the host"));
    let both: Vec<String> = gpu.into_iter().chain(host).collect();
    (!both.is_empty()).then(|| format!("measured: {}", both.join(" and ")))
}

fn later_note(later: &LaterMemory) -> Option<String> {
    let cache = match later.prompt_cache {
        Some(0) => None,
        Some(bytes) => Some(format!("a prompt cache of up to {}", ByteSize(bytes))),
        None => Some("a prompt cache without a bound in bytes".to_owned()),
    };
    let checkpoints = (later.checkpoints > 0).then(|| {
        format!("up to {} context checkpoints of {} each", later.checkpoints, ByteSize(later.checkpoint))
    });
    let both: Vec<String> = cache.into_iter().chain(checkpoints).collect();
    (!both.is_empty())
        .then(|| format!("it may come to hold on the host, beyond its needs: {}", both.join(", and ")))
}

/// Conversations that fit on disk if each fills a slot.
fn disk_note(known: &ModelMemoryNeeds, disk: ByteSize) -> Option<String> {
    let needs = &known.needs;
    let is_saved = |part: &NeedPurpose| matches!(part, NeedPurpose::Cache | NeedPurpose::State);
    let saved = needs.host.iter().chain(&needs.gpu).filter(|(part, _)| is_saved(part));
    let (bytes, slots) = (saved.map(|(_, bytes)| bytes).sum::<u64>(), needs.slots.max(1));
    let each = bytes / slots;
    let count = disk.0.checked_div(each)?;
    Some(format!(
        "{disk} on disk have room for {count} conversations of {} tokens, {} each without checkpoints",
        needs.context / slots,
        ByteSize(each)
    ))
}

/// Returns an upper bound in bytes; `None` if a cache is unbounded.
fn max_host_bytes(known: &ModelMemoryNeeds) -> Option<u64> {
    // Use the maximum instead of the sum: the measured size may already include parts of the caches.
    let with_caches = known.needs.planned_host().saturating_add(known.later_memory.bytes()?);
    Some(with_caches.max(known.needs.host_bytes()))
}

fn later_warning(sheets: &[PlanSheet], fits: &[ModelFit], room: &Room) -> Option<String> {
    let fitting = sheets.iter().filter(|sheet| fits.iter().any(|fit| fit.name == sheet.name));
    let known = fitting.filter_map(|sheet| Some((sheet, sheet.known.as_ref().ok()?)));
    let most: Option<u64> = known
        .map(|(sheet, known)| {
            let each = max_host_bytes(known)?;
            Some(each.saturating_mul(u64::from(sheet.replicas)).saturating_add(known.needs.mapped))
        })
        .try_fold(0, |sum, one: Option<u64>| Some(u64::saturating_add(sum, one?)));
    let hint = "`--cache-ram` bounds the prompt cache, `--ctx-checkpoints` the checkpoints";
    match most {
        Some(most) if most <= room.host => None,
        Some(most) => {
            let most = ByteSize(most);
            Some(format!(
                "with full prompt caches and checkpoints they may come to hold {most} of the host: {hint}"
            ))
        }
        None => Some(format!("a prompt cache without a bound may fill the host: {hint}")),
    }
}

fn smaller_context(known: &ModelMemoryNeeds, one: &PlacementRequest, room: &Room) -> String {
    let fits = |context: u64| {
        let run = ServerRun { context: Some(context), ..known.settings.clone() };
        // Predict the needs again, because measurements only hold for the configured context.
        let needs = book::predict_needs(&known.shape, &run, known.server, known.projector);
        book::fit_models(room, &[&PlacementRequest { needs, ..one.clone() }]).is_ok()
    };
    let mut low = 0;
    let mut high = known.needs.context / CONTEXT_STEP;
    while low + 1 < high {
        let middle = low.midpoint(high);
        if fits(middle * CONTEXT_STEP) { low = middle } else { high = middle }
    }
    if low == 0 { String::new() } else { format!("; with `-c {}` it would", low * CONTEXT_STEP) }
}

/// Formats a placement, such as `a on GPU 0, b on GPUs 0 and 1`.
fn placement_text(fits: &[ModelFit]) -> String {
    let mut fits: Vec<&ModelFit> = fits.iter().collect();
    fits.sort_by(|one, other| one.name.cmp(&other.name));
    let place = |fit: &ModelFit| match &fit.gpus[..] {
        [] => format!("{} on the host", fit.name),
        [(gpu, _)] => format!("{} on GPU {gpu}", fit.name),
        several => {
            let shares: Vec<String> =
                several.iter().map(|(gpu, bytes)| format!("{gpu} ({})", ByteSize(*bytes))).collect();
            format!("{} on GPUs {}", fit.name, shares.join(" and "))
        }
    };
    fits.into_iter().map(place).collect::<Vec<_>>().join(", ")
}

fn as_json(sheets: &[PlanSheet], room: &Room) -> Value {
    let parts = |parts: &[(NeedPurpose, u64)]| {
        Value::Object(parts.iter().map(|(part, bytes)| (part.as_str().to_owned(), json!(bytes))).collect())
    };
    let models: Vec<Value> = sheets
        .iter()
        .map(|sheet| match &sheet.known {
            Ok(known @ ModelMemoryNeeds { needs, later_memory: later, .. }) => json!({
                "name": sheet.name, "replicas": sheet.replicas, "context": needs.context, "slots": needs.slots,
                "host": parts(&needs.host), "host_bytes": needs.host_bytes(), "mapped_bytes": needs.mapped,
                "gpu": parts(&needs.gpu), "each_gpu_bytes": needs.each_gpu, "gpu_bytes": needs.gpu_bytes(1),
                "unknown": needs.unknown, "untouched_host_bytes": needs.untouched,
                "may_hold": {
                    "prompt_cache_bytes": later.prompt_cache, "checkpoint_bytes": later.checkpoint,
                    "checkpoints": later.checkpoints, "host_bytes": max_host_bytes(known),
                },
                "planned_host_bytes": needs.planned_host(), "planned_gpu_bytes": needs.planned_gpu(1),
                "measured_host_bytes": needs.measured.host,
                "measured_gpu_bytes": needs.measured.gpu.map(|(bytes, _)| bytes),
            }),
            Err(why) => json!({ "name": sheet.name, "error": why }),
        })
        .collect();
    let all = processes_to_place(sheets);
    let every: Vec<&PlacementRequest> = all.iter().collect();
    let place = |fit: &ModelFit| {
        let gpus = fit.gpus.iter().map(|(gpu, bytes)| json!({ "gpu": gpu, "bytes": bytes }));
        json!({ "name": fit.name, "gpus": gpus.collect::<Vec<_>>() })
    };
    let fit = match book::fit_models(room, &every) {
        Ok(fits) => json!({ "all": true, "places": fits.iter().map(place).collect::<Vec<_>>() }),
        Err(misfit) => json!({ "all": false, "why": misfit_text(&misfit) }),
    };
    json!({ "host_bytes": room.host, "gpu_bytes": room.gpus, "models": models, "fit": fit })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_sets_are_told_and_none_that_is_a_part_of_another() {
        let one = |name: &str, gib: u64| PlacementRequest {
            name: name.to_owned(),
            needs: MemoryNeeds { gpu: vec![(NeedPurpose::Weights, gib << 30)], ..MemoryNeeds::default() },
            gpus: Vec::new(),
            may_split: false,
        };
        let room = Room { host: 1 << 40, gpus: vec![24 << 30] };
        let all = [one("a", 12), one("b", 12), one("c", 20), one("d", 4)];
        let sets: Vec<String> = fitting_sets(&all, &room).iter().map(|fits| placement_text(fits)).collect();
        assert_eq!(
            sets,
            [
                "a on GPU 0, b on GPU 0",
                "a on GPU 0, d on GPU 0",
                "b on GPU 0, d on GPU 0",
                "c on GPU 0, d on GPU 0",
            ]
        );
    }
}
