//! `llama-warden policy check`: explains a configuration's policies, model by model: the action at each
//! level, disabled parts, and reasons. Starts no process, but queries the drivers for GPUs.

use clap::Args;
use warden_config::needs;
use warden_config::resolve::resolve_config;
use warden_policies::admission::AdmissionMode;
use warden_policies::declared_memory::DeclaredMemory;
use warden_policies::modes::WarmMode;
use warden_policies::recycle::{AnswersMode, GrowthMode, RecyclePolicy};
use warden_policies::units::format_span;
use warden_policies::warmth::NoFileReason;
use warden_policies::{ByteSize, MemoryLimit, phrases};
use warden_sensors::gpu::{GpuDevice, GpuSensors};
use warden_supervisor::ModelSpec;
use warden_supervisor::spec::{ServerKind, SharedBudgets};

use super::replay::{PlannedServer, find_model};
use crate::cli::config::print_warnings;
use crate::cli::shared::ConfigArgs;
use crate::exit::CommandError;
use crate::out;

#[derive(Debug, Args)]
pub(crate) struct PolicyCheckArgs {
    /// Configuration file, as an alternative to --config.
    file: Option<std::path::PathBuf>,
    /// Explains only this model.
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    #[command(flatten)]
    config: ConfigArgs,
}

pub(crate) fn run(args: PolicyCheckArgs) -> Result<(), CommandError> {
    let PolicyCheckArgs { file, model, mut config } = args;
    config.config = file.or(config.config);
    let (machine, loaded) = config.read()?;
    if let Some(name) = &model {
        find_model(&loaded, name)?;
    }
    let mut resolved = resolve_config(&loaded, &machine, false)?;
    needs::fill_needs(&mut resolved, &machine);
    let gpus = GpuSensors::open();
    let here = MachineLimits { memory: machine.memory, gpus: gpus.devices(), notes: gpus.notes() };
    let mut sheets = Vec::new();
    let specs = resolved.fleet.models.iter().zip(&resolved.models);
    for ((spec, settled), (name, own)) in specs.zip(&loaded.models) {
        if model.as_ref().is_some_and(|asked| asked != name && !own.aliases.contains(asked)) {
            continue;
        }
        let planned = PlannedServer::resolve(&loaded, &machine, name, own)?;
        let caches =
            CacheSummary { declared: &planned.declared, bounds: settled.mitigations.applied_cache_bounds() };
        sheets.push(model_sheet(spec, &caches, &here));
    }
    let mut text = join_sheets(&sheets);
    if resolved.fleet.models.is_empty() {
        text.push_str("the configuration has no models\n\n");
    }
    text.push_str(&shared_budgets(&resolved.fleet.shared, &here));
    out::print_text(&text)?;
    print_warnings(&resolved.warnings);
    Ok(())
}

struct MachineLimits<'a> {
    memory: ByteSize,
    gpus: &'a [GpuDevice],
    notes: &'a [String],
}

impl MachineLimits<'_> {
    fn no_vram(&self) -> Option<String> {
        let own = self.gpus.iter().any(|gpu| !gpu.unified);
        (!own).then(|| match self.gpus.first() {
            Some(gpu) => {
                format!("GPU {} uses the host's memory, which the budgets of the host watch", gpu.index.0)
            }
            None if self.notes.is_empty() => "no GPU is visible here".to_owned(),
            None => format!("no GPU is visible here: {}", self.notes.join("; ")),
        })
    }

    fn on_gpus(&self, limit: MemoryLimit) -> String {
        let MemoryLimit::Percent(_) = limit else { return limit.to_string() };
        let each = self.gpus.iter().filter(|gpu| !gpu.unified).filter_map(|gpu| {
            let bytes = limit.resolve(ByteSize(gpu.total?))?;
            Some(format!("{bytes} on GPU {}", gpu.index.0))
        });
        let each: Vec<String> = each.collect();
        if each.is_empty() { format!("{limit} of the GPU") } else { format!("{limit}: {}", each.join(", ")) }
    }
}

fn describe_warm_start(spec: &ModelSpec) -> String {
    if spec.run.warm == WarmMode::Off {
        return "off: the next process begins cold, and nothing of a request is kept".to_owned();
    }
    if let Some(why) = warden_supervisor::stays_cold(&spec.command) {
        return format!("off: the next process begins cold, because {why}");
    }
    let again = "before the switch if the old process keeps serving, else whenever nothing else runs";
    let hindrance = warden_supervisor::no_slot_files(&spec.command)
        .or_else(|| (spec.run.warm_bytes.0 == 0).then_some(NoFileReason::Off));
    let stays = if spec.run.warm == WarmMode::Disk {
        format!(
            "; after an unload or the exit of llama-warden, conversations stay on disk for {}, in {} at most",
            format_span(spec.run.warm_disk_age),
            spec.run.warm_disk_bytes
        )
    } else {
        String::new()
    };
    match hindrance {
        Some(why) => {
            format!(
                "prompts of the latest conversations are evaluated again, {again}; no slot files: {}{stays}",
                why.words()
            )
        }
        None => format!(
            "slots of the latest conversations are carried over in files of {} at most; where build or model does \
             not allow that, their prompts are evaluated again, {again}{stays}",
            spec.run.warm_bytes
        ),
    }
}

/// Caches of a model's process.
struct CacheSummary<'a> {
    declared: &'a DeclaredMemory,
    /// Variables with which llama-warden bounds them.
    bounds: Vec<(String, String)>,
}

fn model_sheet(spec: &ModelSpec, caches: &CacheSummary<'_>, here: &MachineLimits<'_>) -> PolicySheet {
    let mut sheet = PolicySheet::new(&format!("model {}", spec.name));
    add_program(&mut sheet, spec);
    add_host_budget(&mut sheet, spec, caches, here);
    add_vram_budget(&mut sheet, spec, here);
    add_growth(&mut sheet, spec, here);
    add_reclaim(&mut sheet, spec);
    let recycle = &spec.recycle;
    let jitter = recycle.common.jitter * 100.0;
    if let Some(max) = recycle.max_requests {
        sheet.add_line(
            "requests",
            format!("replaced when quiet after {max} requests, or up to {jitter:.0} % fewer"),
        );
    }
    if let Some(max) = recycle.max_age {
        sheet.add_line(
            "age",
            format!("replaced when quiet at an age of {}, or up to {jitter:.0} % less", duration_text(max)),
        );
    }
    if recycle.max_requests.is_none() && recycle.max_age.is_none() {
        sheet.add_line("requests, age", "off: neither `max_requests` nor `max_age` is set");
    }
    sheet.add_line(
        "when quiet",
        format!(
            "nothing in flight for {}; it waits for that at most {}, and a backend that would run out before the next \
             pause does not wait",
            duration_text(recycle.common.quiet_for),
            duration_text(recycle.common.quiet_within)
        ),
    );
    sheet.add_line(
        "only",
        if recycle.only.is_always() {
            "at any time of the day".to_owned()
        } else {
            format!("replacements that can wait happen within {}; hard budgets do not wait", recycle.only)
        },
    );
    add_cooldown(&mut sheet, spec);
    sheet.add_line("warm", describe_warm_start(spec));
    sheet.add_line(
        "admission",
        match spec.requests.admission.mode {
            AdmissionMode::Off => "off: prompts are sent whatever they need",
            AdmissionMode::Warn => "a prompt that may not fit into memory is reported, and sent",
            AdmissionMode::Enforce => {
                "a prompt that may not fit into memory waits for slots to finish, goes to another replica, waits for \
                 a fresh process, or is answered 503 with `Retry-After`"
            }
        },
    );
    let levels = &recycle.levels;
    sheet.add_line(
        "last defence",
        format!(
            "ended without draining when it could give enough back and the machine has less than {} ({:.0} % of its \
             memory, if that is less) available, or a GPU on which it still grows less than {} free",
            levels.kill_host,
            levels.kill_host_share * 100.0,
            levels.kill_vram
        ),
    );
    add_health(&mut sheet, recycle);
    sheet
}

fn add_program(sheet: &mut PolicySheet, spec: &ModelSpec) {
    let ServerKind::OtherProgram(check) = &spec.command.kind else { return };
    sheet.add_line(
        "program",
        format!(
            "ready when `GET {}` is answered with {}; it is no llama-server, so reclaim, admission, warm \
             replacement, continued answers, checks of answers, canaries, mitigations and `plan` are off",
            check.path,
            if check.needs_success { "a status from 200 to 299" } else { "any status below 500" }
        ),
    );
}

fn add_health(sheet: &mut PolicySheet, recycle: &RecyclePolicy) {
    let answers = match recycle.common.answers {
        AnswersMode::Replace => "; replaced when its answers have become faulty",
        AnswersMode::Observe => "; reported when its answers have become faulty",
        AnswersMode::Off => "",
    };
    let slow = match recycle.common.growth {
        GrowthMode::Recycle => "; replaced when quiet when it has become much slower than when fresh",
        GrowthMode::Observe => "; reported when it has become much slower than when fresh",
        GrowthMode::Off => "",
    };
    sheet.add_line(
        "health",
        format!(
            "replaced when it is wedged, answers only compute errors, or its GPU reports a fault{answers}{slow}"
        ),
    );
}

/// Prints lines that all sheets share only once, at the top.
fn join_sheets(sheets: &[PolicySheet]) -> String {
    let (Some(first), true) = (sheets.first(), sheets.len() > 1) else {
        return paragraphs(sheets.iter());
    };
    let same = |line: &String| sheets.iter().all(|sheet| sheet.lines.contains(line));
    let common = PolicySheet {
        head: "each model".to_owned(),
        lines: first.lines.iter().filter(|line| same(line)).cloned().collect(),
    };
    let own = sheets.iter().map(|sheet| {
        let lines: Vec<String> = sheet.lines.iter().filter(|line| !same(line)).cloned().collect();
        let lines = if lines.is_empty() { vec![line("", "nothing of its own")] } else { lines };
        PolicySheet { head: sheet.head.clone(), lines }
    });
    let common = (!common.lines.is_empty()).then_some(common);
    let all: Vec<PolicySheet> = common.into_iter().chain(own).collect();
    paragraphs(all.iter())
}

fn paragraphs<'s>(sheets: impl Iterator<Item = &'s PolicySheet>) -> String {
    sheets.flat_map(|sheet| [sheet.text(), "\n".to_owned()]).collect()
}

fn add_host_budget(
    sheet: &mut PolicySheet,
    spec: &ModelSpec,
    caches: &CacheSummary<'_>,
    here: &MachineLimits<'_>,
) {
    let recycle = &spec.recycle;
    let soft = recycle.host_soft;
    let hard = recycle.host_hard;
    if soft.is_none() && hard.is_none() {
        sheet.add_line("host memory", "off: neither `host.soft` nor `host.hard` is set");
    }
    let levels = &recycle.levels;
    let soft_text = soft.map(|limit| match limit {
        MemoryLimit::Auto => format!(
            "auto: {:.0} % of its settled size with its declared caches, at least {} above its settled size, at \
             most {:.0} % of the machine; off until it has settled",
            levels.host_soft * 100.0,
            levels.host_room,
            levels.host_soft_most * 100.0
        ),
        limit => limit.to_string(),
    });
    let hard_text = hard.map(|limit| match limit {
        MemoryLimit::Auto => format!(
            "auto: {:.0} % of the soft budget, at most {:.0} % of the machine",
            levels.host_hard * 100.0,
            levels.host_hard_most * 100.0
        ),
        limit => limit.to_string(),
    });
    add_budgets(sheet, spec, "host", soft_text, hard_text);
    let beyond =
        [soft, hard].into_iter().flatten().filter_map(MemoryLimit::bytes).find(|size| *size > here.memory);
    if let Some(size) = beyond {
        let memory = here.memory;
        sheet.add_line(
            "warning",
            format!("{size} is more than the {memory} of this machine: it is never reached"),
        );
    }
    for line in caches.declared.source_sentences() {
        sheet.add_line("caches", line);
    }
    if !caches.bounds.is_empty() {
        let set: Vec<String> = caches.bounds.iter().map(|(name, value)| format!("{name}={value}")).collect();
        sheet.add_line(
            "caches",
            format!(
                "llama-warden sets {} ({:.1} % of the machine's memory for each cache); `args` or `env` overrides that",
                set.join(" and "),
                warden_policies::defaults().loading.cache_share * 100.0
            ),
        );
    }
    let kept = caches.declared.bytes();
    let least = soft.or(hard).and_then(MemoryLimit::bytes);
    if let Some(budget) = least.filter(|budget| budget.0 <= kept) {
        sheet.add_line(
            "warning",
            format!(
                "the budget of {budget} is passed without any leak, because its declared caches are {}: lower that \
                 with `--cache-ram MIB` in `args` (or the mitigation `cache-ram=MIB`), or raise the budget above its \
                 settled size and that",
                ByteSize(kept)
            ),
        );
    }
}

fn add_budgets(
    sheet: &mut PolicySheet,
    spec: &ModelSpec,
    memory: &str,
    soft: Option<String>,
    hard: Option<String>,
) {
    if let Some(what) = soft {
        sheet.add_line(&format!("{memory} soft"), format!("{what}: replaced when quiet"));
    }
    if let Some(what) = hard {
        let then = describe_escalation(spec);
        sheet.add_line(&format!("{memory} hard"), format!("{what}: drained and replaced now; {then}"));
    }
}

fn describe_escalation(spec: &ModelSpec) -> String {
    let levels = &spec.recycle.levels;
    format!(
        "running requests may take {}; ended when it is {:.0} % of the budget for {}",
        duration_text(spec.lifecycle.drain_deadline),
        levels.kill_over * 100.0,
        duration_text(levels.kill_after)
    )
}

fn add_vram_budget(sheet: &mut PolicySheet, spec: &ModelSpec, here: &MachineLimits<'_>) {
    let recycle = &spec.recycle;
    let soft = recycle.vram_soft;
    let hard = recycle.vram_hard;
    if soft.is_none() && hard.is_none() {
        sheet.add_line("VRAM", "off: neither `vram.soft` nor `vram.hard` is set");
        return;
    }
    if let Some(why) = here.no_vram() {
        sheet.add_line("VRAM", format!("off here: {why}"));
    }
    let levels = &recycle.levels;
    let text = |limit: MemoryLimit, share: f64, left: f64| match limit {
        MemoryLimit::Auto => format!(
            "auto: {:.0} % of what the GPU can give it, but not below {:.0} % of what its settled size leaves",
            share * 100.0,
            left * 100.0
        ),
        limit => here.on_gpus(limit),
    };
    let soft = soft.map(|limit| text(limit, levels.vram_soft, levels.vram_soft_left));
    let hard = hard.map(|limit| text(limit, levels.vram_hard, levels.vram_hard_left));
    add_budgets(sheet, spec, "VRAM", soft, hard);
}

fn add_growth(sheet: &mut PolicySheet, spec: &ModelSpec, here: &MachineLimits<'_>) {
    let recycle = &spec.recycle;
    let does = format!(
        "a leak that reaches a budget or the end of the memory within {} is answered by a replacement when quiet, \
         within {} by a drain now",
        duration_text(recycle.common.growth_quiet),
        duration_text(recycle.common.growth_drain)
    );
    let text = match recycle.common.growth {
        GrowthMode::Off => "off: leaks are shown, and no action follows".to_owned(),
        GrowthMode::Observe => format!("observe: leaks are reported; with `growth = \"recycle\"` {does}"),
        GrowthMode::Recycle => format!("recycle: {does}"),
    };
    sheet.add_line("growth", text);
    if let Some(why) = here.no_vram() {
        sheet.add_line("growth, VRAM", format!("not watched: {why}"));
    }
}

fn add_reclaim(sheet: &mut PolicySheet, spec: &ModelSpec) {
    let own = &spec.recycle.common;
    sheet.add_line(
        "reclaim",
        if own.reclaim {
            format!(
                "first the process gives back unused memory (a build with the fix reclaim-heap or reclaim-cuda; \
                 others are replaced at once); replaced if {:.0} % of the way to the budget are not free then, if it \
                 is as large again within {}, or if nothing is known after {} ({} at a hard budget)",
                own.reclaim_room * 100.0,
                duration_text(own.reclaim_again),
                duration_text(own.reclaim_limit),
                duration_text(own.reclaim_limit_hard)
            )
        } else {
            "`policy.reclaim` is off: it is replaced without reclaiming memory first".to_owned()
        },
    );
}

fn add_cooldown(sheet: &mut PolicySheet, spec: &ModelSpec) {
    let own = &spec.recycle.common;
    let mut text = format!(
        "at most one replacement every {}, and never more often than {:.0} times the time that a load takes; at the \
         hard budget every {}",
        duration_text(own.min_interval),
        own.load_factor,
        duration_text(own.min_interval_hard)
    );
    if own.max_futile > 0 {
        text.extend([format!("; off after {} in a row that did not bring memory down", own.max_futile)]);
    }
    if own.growth_recycles > 0 {
        text.extend([format!(
            "; {} because of growth within {} end those",
            own.growth_recycles,
            duration_text(own.growth_window)
        )]);
    }
    sheet.add_line("cooldown", text);
}

fn shared_budgets(shared: &SharedBudgets, here: &MachineLimits<'_>) -> String {
    let mut sheet = PolicySheet::new(&format!("all models together, on {} of host memory", here.memory));
    let all = [
        ("host soft", shared.host_soft.map(|size| size.to_string()), "when quiet"),
        ("host hard", shared.host_hard.map(|size| size.to_string()), "now"),
        ("VRAM soft", shared.vram_soft.map(|limit| here.on_gpus(limit)), "when quiet"),
        ("VRAM hard", shared.vram_hard.map(|limit| here.on_gpus(limit)), "now"),
    ];
    if all.iter().all(|(_, limit, _)| limit.is_none()) {
        sheet.add_line("shared", "off: nothing is set in [shared]");
    }
    for (name, limit, when) in all {
        if let Some(limit) = limit {
            sheet.add_line(
                name,
                format!("{limit}: the one whose replacement gives back most is replaced {when}"),
            );
        }
    }
    if (shared.vram_soft.is_some() || shared.vram_hard.is_some())
        && let Some(why) = here.no_vram()
    {
        sheet.add_line("VRAM", format!("off here: {why}"));
    }
    sheet.add_line(
        "at a time",
        "never two replicas of one model at once, one replacement for each GPU at a time",
    );
    sheet.text()
}

fn duration_text(time: std::time::Duration) -> String {
    phrases::time_phrase(time.as_secs_f64())
}

struct PolicySheet {
    head: String,
    lines: Vec<String>,
}

impl PolicySheet {
    fn new(head: &str) -> Self {
        Self { head: head.to_owned(), lines: Vec::new() }
    }

    fn text(&self) -> String {
        format!("{}\n{}", self.head, self.lines.concat())
    }

    fn add_line(&mut self, name: &str, text: impl AsRef<str>) {
        self.lines.push(line(name, text.as_ref()));
    }
}

fn line(name: &str, text: &str) -> String {
    format!("  {name:13}  {text}\n")
}

#[cfg(test)]
mod tests {

    use super::*;
    use warden_config::machine::HostMachine;
    use warden_config::source::layers::{ConfigSources, load_config};

    #[test]
    fn what_is_the_same_for_all_models_is_said_once() {
        let sheet = |name: &str, lines: &[(&str, &str)]| {
            let mut sheet = PolicySheet::new(&format!("model {name}"));
            for (name, text) in lines {
                sheet.add_line(name, text);
            }
            sheet
        };
        let (a, b) =
            (sheet("a", &[("host soft", "1 GiB"), ("growth", "off")]), sheet("b", &[("growth", "off")]));
        assert_eq!(join_sheets(&[]), "");
        let alone = join_sheets(&[sheet("b", &[("growth", "off")])]);
        insta::assert_snapshot!(alone + &join_sheets(&[a, b]));
    }

    /// Resolves a text as a configuration, with a file `m.gguf` next to it, on a machine with 24 GiB.
    fn resolved(text: &str) -> warden_config::resolve::ResolvedConfig {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("m.gguf"), "").unwrap();
        std::fs::write(dir.path().join("w.toml"), text).unwrap();
        let file = Some(dir.path().join("w.toml"));
        let loaded = load_config(ConfigSources { file, ..ConfigSources::default() }).unwrap();
        let mut machine = HostMachine::read();
        machine.env.clear();
        machine.memory = ByteSize(24 << 30);
        resolve_config(&loaded, &machine, false).unwrap()
    }

    #[test]
    fn what_a_policy_comes_to_is_a_sheet_for_each_kind_of_machine() {
        let resolved = resolved(
            "[models.plain]\nmodel = \"m.gguf\"\npolicy.growth = \"off\"\n\
             [models.auto]\nmodel = \"m.gguf\"\npolicy.admission = \"enforce\"\n\
             policy.growth = \"recycle\"\npolicy.max_requests = 1000\npolicy.max_age = \"24h\"\n\
             policy.only = \"02:00-05:00\"\n\
             policy.host = { soft = \"auto\", hard = \"auto\" }\npolicy.vram = { soft = \"auto\", hard = \"95%\" }\n\
             [models.fixed]\nmodel = \"m.gguf\"\npolicy.reclaim = false\npolicy.admission = \"warn\"\npolicy.growth = \"observe\"\n\
             policy.host = { soft = \"4GiB\", hard = \"80GiB\" }\npolicy.vram.hard = \"10GiB\"\n\
             [shared]\nhost.soft = \"80%\"\nvram.hard = \"90%\"\n",
        );
        let gpu = GpuDevice {
            index: warden_policies::GpuIndex(0),
            vendor: warden_sensors::gpu::GpuVendor::Nvidia,
            name: "H200".to_owned(),
            uuid: None,
            pci: None,
            total: Some(24 << 30),
            unified: false,
        };
        let notes = ["NVIDIA's library is not installed".to_owned()];
        let memory = ByteSize(24 << 30);
        let (with, without) = (
            MachineLimits { memory, gpus: &[gpu], notes: &[] },
            MachineLimits { memory, gpus: &[], notes: &notes },
        );
        let fleet = &resolved.fleet;
        let bounds = resolved.models[0].mitigations.applied_cache_bounds();
        let env = bounds.iter().cloned().collect();
        let keeps = DeclaredMemory::from_command(&[], &env, Some(11_100));
        let caches = CacheSummary { declared: &keeps, bounds };
        let on = |here: &MachineLimits<'_>| {
            let sheets: Vec<PolicySheet> =
                fleet.models.iter().map(|spec| model_sheet(spec, &caches, here)).collect();
            join_sheets(&sheets) + &shared_budgets(&fleet.shared, here)
        };
        insta::assert_snapshot!(on(&with) + "\n---\n" + &on(&without));
    }
}
