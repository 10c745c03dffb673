//! `llama-warden policy replay`: runs the policy over recordings and prints the result.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use warden_config::advice::{self, AdvisedServer};
use warden_config::machine::HostMachine;
use warden_config::policy::PolicyConfig;
use warden_config::resolve::LaunchSettings;
use warden_config::settings::ModelConfig;
use warden_config::source::layers::LoadedConfig;
use warden_config::source::policy_file::load_policy;
use warden_policies::declared_memory::DeclaredMemory;
use warden_policies::{BackendSample, ByteSize, trace};

use crate::cli::shared::ConfigArgs;
use crate::exit::CommandError;
use crate::out;
use crate::replay::{self, ReplaySettings};

#[derive(Debug, Args)]
pub(crate) struct ReplayArgs {
    /// Recordings: one JSON object per line, as `record = true` writes them.
    #[arg(required = true, value_name = "TRACE")]
    traces: Vec<PathBuf>,
    /// TOML file with the keys of a model's `policy`. Default: no budgets, growth is observed.
    #[arg(long, value_name = "FILE")]
    policy: Option<PathBuf>,
    /// Uses policy, arguments and environment of this model of the configuration.
    #[arg(long, value_name = "NAME")]
    model: Option<String>,
    /// Limit of the server's prompt cache in MiB. Default: not known, none is assumed. -1 for no limit:
    /// half of --host-memory counts.
    #[arg(long, value_name = "MIB", allow_negative_numbers = true, value_parser = parse_cache_ram)]
    cache_ram: Option<CacheRamLimit>,
    /// Number of context checkpoints per slot of the server; counted with --checkpoint-size.
    #[arg(long, value_name = "N")]
    ctx_checkpoints: Option<u32>,
    /// Size of one context checkpoint, as in the server's log.
    #[arg(long, value_name = "SIZE", requires = "ctx_checkpoints")]
    checkpoint_size: Option<ByteSize>,
    /// Number of slots of the server.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    slots: u32,
    /// Memory of the machine, for budgets in percent.
    #[arg(long, value_name = "SIZE")]
    host_memory: Option<ByteSize>,
    /// Memory of each GPU, for budgets in percent.
    #[arg(long, value_name = "SIZE")]
    gpu_memory: Option<ByteSize>,
    /// Time of day of the first reading, for `only`. Default: every time counts as within `only`.
    #[arg(long, value_name = "HH:MM", value_parser = parse_minute)]
    starts_at: Option<u16>,
    /// Prints JSON, for programs: one object per line and recording.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    config: ConfigArgs,
}

/// Value of `--cache-ram`, as for llama-server.
#[derive(Clone, Copy, Debug, PartialEq)]
enum CacheRamLimit {
    Bound(ByteSize),
    /// Unlimited: -1.
    None,
}

pub(crate) fn run(args: &ReplayArgs) -> Result<(), CommandError> {
    let (told, server) = args.backend_settings()?;
    let recordings: Vec<(&Path, Vec<BackendSample>)> = args
        .traces
        .iter()
        .map(|path| Ok((path.as_path(), read_recording(path)?)))
        .collect::<Result<_, CommandError>>()?;
    let mut text = String::new();
    for (path, samples) in &recordings {
        let done = replay::replay_samples(&told, samples);
        let shown = path.display().to_string();
        let advice = advice::advise(server.as_ref(), done.work, done.growth().map(|(_, growth)| growth));
        if args.json {
            text.push_str(&replay::replay_json(&shown, &done, &advice).to_string());
            text.push('\n');
        } else {
            if !text.is_empty() {
                text.push('\n');
            }
            text.push_str(&replay::replay_text(&shown, &told, &done, &advice));
        }
    }
    out::print_text(&text)
}

fn read_recording(path: &Path) -> Result<Vec<BackendSample>, CommandError> {
    let shown = path.display();
    let text = std::fs::read_to_string(path).map_err(|error| {
        CommandError::usage(format!("{shown}: the recording cannot be read: {error}"), "check the path")
    })?;
    let samples = trace::parse_recording(&text).map_err(|error| {
        let message = error.to_string();
        let what = message.strip_prefix(&format!("line {}: ", error.line)).unwrap_or(&message);
        CommandError::usage(
            format!("{shown}:{}: {what}", error.line),
            "each line is a JSON object like {\"t\": 0.4, \"edge\": \"idle\", \"in_flight\": 0, \"requests\": 1, \
             \"rss_anon_kib\": 363876, \"vram_mib\": 3090}",
        )
    })?;
    if samples.is_empty() {
        return Err(CommandError::usage(
            format!("{shown}: there is no reading in it"),
            "`record = true` of a model writes recordings to `traces` in the state directory",
        ));
    }
    Ok(samples)
}

impl ReplayArgs {
    fn backend_settings(&self) -> Result<(ReplaySettings, Option<AdvisedServer>), CommandError> {
        let (machine, loaded) = self.config.read()?;
        let model = self.model.as_deref().map(|name| find_model(&loaded, name)).transpose()?;
        let given = self.policy.as_deref().map(load_policy).transpose()?;
        let policy: &PolicyConfig = match (&given, model) {
            (Some(policy), _) => policy,
            (None, Some((_, model))) => &model.policy,
            (None, None) => &loaded.defaults.policy,
        };
        let server =
            model.map(|(name, model)| PlannedServer::resolve(&loaded, &machine, name, model)).transpose()?;
        // This machine's memory only matters for a model of its configuration.
        let host_total = self.host_memory.or_else(|| model.map(|_| machine.memory));
        let told = ReplaySettings {
            policy: policy.to_recycle_policy(host_total),
            growth: loaded.settings.growth.clone(),
            allowance: self.declared_bytes(server.as_ref(), host_total)?,
            host_total: host_total.map(|size| size.0),
            gpu_total: self.gpu_memory.map(|size| size.0),
            starts_at: self.starts_at,
        };
        Ok((told, server.map(PlannedServer::into_advised)))
    }

    /// Returns the size of the declared caches. Flags of this command override those of the model's command.
    fn declared_bytes(
        &self,
        started: Option<&PlannedServer>,
        memory: Option<ByteSize>,
    ) -> Result<u64, CommandError> {
        let given = self.cache_ram.is_some() || self.ctx_checkpoints.is_some();
        if let Some(started) = started.filter(|_| !given) {
            return Ok(started.declared.bytes());
        }
        let cache = match (self.cache_ram, memory) {
            (None, _) => ByteSize(0),
            (Some(CacheRamLimit::Bound(size)), _) => size,
            // Count half of the memory for an unlimited cache, as `serve` does.
            (Some(CacheRamLimit::None), Some(memory)) => ByteSize(memory.0 / 2),
            (Some(CacheRamLimit::None), None) => {
                return Err(CommandError::usage(
                    "--cache-ram -1 is a cache without a bound, of which half of the machine's memory counts",
                    "give the memory of the machine with --host-memory, like `--host-memory 64GiB`",
                ));
            }
        };
        let each = self.checkpoint_size.unwrap_or_default().0;
        let number = u64::from(self.ctx_checkpoints.unwrap_or(0)).saturating_mul(u64::from(self.slots));
        Ok(cache.0.saturating_add(each.saturating_mul(number)))
    }
}

/// Settings with which this machine would start a model's server. Ignores missing model files, because
/// nothing is started.
pub(super) struct PlannedServer {
    is_other_program: bool,
    launch: LaunchSettings,
    env: BTreeMap<String, String>,
    pub(super) declared: DeclaredMemory,
}

impl PlannedServer {
    pub(super) fn resolve(
        loaded: &LoadedConfig,
        machine: &HostMachine,
        name: &str,
        model: &ModelConfig,
    ) -> Result<Self, CommandError> {
        let launch = loaded.launch_settings(machine, name, model)?;
        let mut env: BTreeMap<String, String> = machine.text_vars().into_iter().collect();
        env.retain(|name, _| !launch.command.env_remove.contains(name));
        env.extend(launch.command.env.iter().cloned());
        env.extend(launch.cache_bounds.iter().cloned());
        let is_other_program = model.runs_other_program();
        let build = launch.facts.as_ref().and_then(|facts| facts.number);
        let mut declared = if is_other_program {
            DeclaredMemory::NONE
        } else {
            DeclaredMemory::from_command(&launch.command.args, &env, build)
        };
        declared.set_available(machine.memory.0);
        Ok(Self { is_other_program, launch, env, declared })
    }

    fn into_advised(self) -> AdvisedServer {
        let LaunchSettings { command, mitigations, facts, .. } = self.launch;
        let facts = facts.as_ref();
        let provenance = facts.and_then(|facts| facts.provenance.as_ref());
        AdvisedServer {
            is_other_program: self.is_other_program,
            build: facts.and_then(|facts| facts.number),
            backend: provenance.map(|provenance| provenance.backend.clone()),
            variables: self.env.into_keys().collect(),
            inherited: Arc::default(),
            args: command.args,
            mitigations,
            displayed_mitigations: Vec::new(),
            fix_states: advice::fix_states(facts),
        }
    }
}

pub(crate) fn find_model<'a>(
    loaded: &'a LoadedConfig,
    name: &str,
) -> Result<(&'a str, &'a ModelConfig), CommandError> {
    let of = |(own, model): &'a (String, ModelConfig)| (own.as_str(), model);
    let mut models = loaded.models.iter().map(of);
    models.find(|(own, model)| *own == name || model.aliases.iter().any(|alias| alias == name)).ok_or_else(
        || {
            let known: Vec<&str> = loaded.models.iter().map(|(own, ..)| own.as_str()).collect();
            let hint = match known.as_slice() {
                [] => "give the configuration with --config".to_owned(),
                known => format!("there are {}", known.join(", ")),
            };
            CommandError::usage(format!("--model {name}: there is no such model in the configuration"), hint)
        },
    )
}

fn parse_cache_ram(text: &str) -> Result<CacheRamLimit, String> {
    let bound = |mib: i64| Some(ByteSize(u64::try_from(mib).ok()?.checked_mul(1 << 20)?));
    let read = match text.parse() {
        Ok(-1) => Some(CacheRamLimit::None),
        Ok(mib) => bound(mib).map(CacheRamLimit::Bound),
        Err(_) => None,
    };
    read.ok_or_else(|| "a number of MiB from 0 is needed, or -1 for no bound".to_owned())
}

/// Returns minutes after midnight.
fn parse_minute(text: &str) -> Result<u16, String> {
    let parts = text.split_once(':').and_then(|(hours, minutes)| {
        let (hours, minutes): (u16, u16) = (hours.parse().ok()?, minutes.parse().ok()?);
        (hours < 24 && minutes < 60).then_some(hours * 60 + minutes)
    });
    parts.ok_or_else(|| "a time of day is needed, like `02:30`".to_owned())
}
