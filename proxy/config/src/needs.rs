//! Computes the memory needs of the configured models from their files and the flags of their servers. The
//! needs decide which models are loaded together.

use std::collections::BTreeMap;
use std::path::PathBuf;

use warden_patches::mitigation::BuildFacts;
use warden_policies::book::held::HeldMemory;
use warden_policies::book::{
    self, FitError, LaterMemory, MachineCapacity as Room, MeasuredNeeds, MemoryNeeds, ModelShape,
    PlacementRequest, ServerBuild, ServerRun,
};
use warden_policies::cooldown::BudgetShortfall;
use warden_policies::cooldown::working_set::find_shortfalls;
use warden_policies::declared_memory::DeclaredMemory;
use warden_policies::{ByteSize, MemoryKind, Reason, loading};
use warden_sensors::gpu::{GpuDevice, GpuSensors, GpuVendor};
use warden_supervisor::spec::{FallbackSpec, FleetConfig, ModelSpec, ServerCommand};
use warden_supervisor::{KnownMemory, has_gpu, known_memory};

use super::machine::{HostMachine, left_for_models, own_memory};
use super::problem::{ConfigPlace, ConfigProblem};
use super::resolve::ResolvedConfig;
use super::{arguments, model_files};

const CUDA_DEVICES_VARIABLE: &str = "CUDA_VISIBLE_DEVICES";
const VISIBLE_DEVICES_VARIABLES: [&str; 4] =
    [CUDA_DEVICES_VARIABLE, "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GGML_VK_VISIBLE_DEVICES"];

/// Facts about a model's memory before the model is loaded.
pub struct ModelMemoryNeeds {
    /// Sizes and layers from the model file.
    pub shape: ModelShape,
    /// Settings from command line and environment.
    pub settings: ServerRun,
    /// Size of the projector in bytes.
    pub projector: u64,
    /// Host memory and VRAM in bytes.
    pub needs: MemoryNeeds,
    /// The llama-server build that runs the model.
    pub server: ServerBuild,
    /// Memory that fills up while the server runs, in addition to `needs`.
    pub later_memory: LaterMemory,
}

/// Returns true if a build supports no GPU. A build without provenance is assumed to support GPUs.
pub fn is_for_cpu(build: Option<&BuildFacts>) -> bool {
    backend(build) == Some("cpu")
}

fn backend(build: Option<&BuildFacts>) -> Option<&str> {
    Some(build?.provenance.as_ref()?.backend.as_str())
}

/// Returns the facts about a build that determine its memory needs.
pub fn server_build(build: Option<&BuildFacts>, has_gpu: bool) -> ServerBuild {
    // HIP and MUSA compile the sources of the CUDA backend.
    let is_cuda = backend(build).is_none_or(|backend| ["cuda", "hip", "musa"].contains(&backend));
    ServerBuild { has_gpu, is_cuda, number: build.and_then(|build| build.number) }
}

impl ModelMemoryNeeds {
    /// Computes the needs of a command's model with this server.
    ///
    /// # Errors
    /// The command names no model file, or a file cannot be read.
    pub fn compute(
        command: &ServerCommand,
        mut env: BTreeMap<String, String>,
        server: ServerBuild,
    ) -> Result<Self, String> {
        if !command.kind.is_llama_server() {
            return Err(
                "another program than llama-server serves it (`command`): it is measured while it runs"
                    .to_owned(),
            );
        }
        apply_variables(command, &mut env);
        let file = model_file(&command.args, &env)?;
        let directory = command.directory.clone().unwrap_or_default();
        let shape = model_files::read_model_file(&directory.join(file))?.shape.clone()?;
        let run = ServerRun::from_command(&command.args, &env);
        let projector = run.projector.as_deref().map_or(Ok(0), |path| {
            let path = directory.join(path);
            let size = std::fs::metadata(&path).map(|facts| facts.len());
            size.map_err(|error| format!("cannot read {}: {error}", path.display()))
        })?;
        let needs = book::predict_needs(&shape, &run, server, projector);
        let declared = DeclaredMemory::from_command(&command.args, &env, server.number);
        let later = LaterMemory::estimate(&shape, &run, declared.cache_bound(), declared.checkpoints().0);
        Ok(Self { shape, settings: run, projector, needs, server, later_memory: later })
    }

    /// Returns the GPUs named in the command, if any, and true if the model may be split over several GPUs.
    pub fn gpus(&self) -> (Vec<usize>, bool) {
        let one_only = self.settings.gpus.split.as_deref() == Some("none");
        let shares = self.settings.gpus.shares.iter().enumerate().filter(|(_, share)| **share > 0.0);
        let gpus = match self.settings.gpus.main_gpu {
            Some(gpu) if one_only => vec![gpu],
            _ => shares.map(|(gpu, _)| gpu).collect(),
        };
        (gpus, !one_only)
    }
}

fn apply_variables(command: &ServerCommand, env: &mut BTreeMap<String, String>) {
    env.extend(command.env.iter().cloned());
    for name in &command.env_remove {
        env.remove(name);
    }
}

/// Returns the model file named by a flag, else by a variable.
fn model_file(args: &[String], env: &BTreeMap<String, String>) -> Result<PathBuf, String> {
    let told = arguments::model_path(args).or_else(|| env.get("LLAMA_ARG_MODEL").map(String::as_str));
    told.map(PathBuf::from).ok_or_else(|| {
        "its command names no file (`-m`): what is downloaded is known when it is here".to_owned()
    })
}

/// Sets the needs of each model as far as they are known. If a GPU does not report its memory, the needs of
/// models that may run on GPUs stay unknown.
pub fn fill_needs(resolved: &mut ResolvedConfig, machine: &HostMachine) {
    let gpus = GpuSensors::open();
    let own = || gpus.devices().iter().filter(|gpu| !gpu.unified);
    let on_gpus = own().next().is_some();
    let tells = own().all(|gpu| gpu.total.is_some()) && (!has_gpu() || !gpus.devices().is_empty());
    let inherited: BTreeMap<String, String> = machine.text_vars().into_iter().collect();
    let mut of_server = inherited.clone();
    of_server.retain(|name, _| name.starts_with("LLAMA_ARG_"));
    // llama-warden can restrict the visible GPUs of a process only for NVIDIA GPUs.
    let nvidia = own().all(|gpu| gpu.vendor == GpuVendor::Nvidia);
    let room = left_for_models(machine.memory.0, &own_memory(&gpus), &resolved.fleet.loading);
    for (spec, model) in resolved.fleet.models.iter_mut().zip(&resolved.models) {
        let build = model.build.as_ref();
        let mut env = inherited.clone();
        apply_variables(&spec.command, &mut env);
        let on_cpu = is_for_cpu(build);
        let server = server_build(build, on_gpus && !on_cpu);
        if !tells && !on_cpu {
            continue;
        }
        let seen = visible_gpus(&env, gpus.devices());
        // Use the visible GPUs if all processes inherit them, or if the model's variable names only one.
        let is_own = spec.command.env.iter().any(|(name, _)| name == CUDA_DEVICES_VARIABLE);
        let seen = seen.filter(|seen| !is_own || seen.len() == 1);
        let says = selects_devices(&spec.command.args, &env, seen.is_some());
        let mut of_server = of_server.clone();
        of_server.extend(spec.start.cache_bounds.iter().cloned());
        let known = ModelMemoryNeeds::compute(&spec.command, of_server.clone(), server);
        let Ok(known) = known else { continue };
        let (named, may_split) = known.gpus();
        if says && named.is_empty() && spec.loading.gpus.is_empty() {
            // Skip the model: its command or environment selects devices in a form that is not parsed here.
            continue;
        }
        spec.start.choose_gpus = nvidia && !says && named.is_empty() && !is_own;
        if spec.loading.gpus.is_empty() {
            // A GPU number in a command is an index into the visible GPUs.
            spec.loading.gpus = match seen {
                Some(seen) if named.is_empty() => seen,
                Some(seen) => named.iter().filter_map(|number| seen.get(*number).copied()).collect(),
                None => named,
            };
        }
        spec.loading.may_split = may_split;
        spec.loading.needs = Some(known.needs);
        let mut command = spec.command.clone();
        if let Some(fallback) = &mut spec.start.fallback {
            command.args.extend(fallback.args.iter().cloned());
            let known = ModelMemoryNeeds::compute(&command, of_server, server);
            fallback.needs = known.ok().map(|known| known.needs);
        }
    }
    let seen: Vec<KnownMemory> = resolved
        .fleet
        .models
        .iter()
        .map(|spec| known_memory(&resolved.fleet.state_dir, &spec.command))
        .collect();
    resolved.warnings.extend(misfit_warnings(&resolved.fleet, &room, &seen));
    let total = |series| match series {
        MemoryKind::Host => Some(machine.memory.0),
        MemoryKind::Vram(gpu) => gpus.devices().iter().find(|device| device.index == gpu)?.total,
    };
    for (spec, seen) in resolved.fleet.models.iter().zip(&seen) {
        resolved.warnings.extend(small_budget_warnings(spec, &seen.held, total));
    }
}

fn small_budget_warnings(
    spec: &ModelSpec,
    seen: &[HeldMemory],
    total: impl Fn(MemoryKind) -> Option<u64>,
) -> Vec<ConfigProblem> {
    let found = find_shortfalls(&spec.recycle, seen, total);
    let problem = |(series, reason, shortfall): (MemoryKind, Reason, BudgetShortfall)| {
        let message = format!("model `{}`: {}", spec.name, shortfall.figures(series, reason));
        ConfigProblem::new(ConfigPlace::Nowhere, message).with_hint(shortfall.advice(reason))
    };
    found.into_iter().map(problem).collect()
}

/// Explains why models do not fit together.
pub fn misfit_text(misfit: &FitError) -> String {
    match misfit {
        FitError::Host { needed, there } => {
            format!("{} of the host are needed, {} are there", ByteSize(*needed), ByteSize(*there))
        }
        FitError::Gpu { name, needed, left } => {
            format!(
                "`{name}` needs {}, and the GPUs that it may be on have {} left",
                ByteSize(*needed),
                ByteSize(*left)
            )
        }
    }
}

/// Returns warnings about a model that is too large, and about pinned models that do not fit together. Such
/// models are started all the same, because the computed needs may be wrong.
fn misfit_warnings(fleet: &FleetConfig, room: &Room, seen: &[KnownMemory]) -> Vec<ConfigProblem> {
    let wanted: Vec<(PlacementRequest, &ModelSpec)> = fleet
        .models
        .iter()
        .zip(seen)
        .filter_map(|(spec, seen)| {
            let loading::LoadSpec { needs, gpus, may_split, .. } = spec.loading.clone();
            let needs = MemoryNeeds { measured: MeasuredNeeds::from_held(&seen.held), ..needs? };
            Some((PlacementRequest { name: spec.name.to_string(), needs, gpus, may_split }, &**spec))
        })
        .collect();
    let mut problems = Vec::new();
    let mut told = |message: String, hint: &str| {
        problems.push(ConfigProblem::new(ConfigPlace::Nowhere, message).with_hint(hint));
    };
    for (one, spec) in &wanted {
        let Err(misfit) = book::fit_models(room, &[one]) else { continue };
        let message = if let Some(FallbackSpec { args, needs }) = &spec.start.fallback {
            let less = needs.clone().map(|needs| PlacementRequest { needs, ..one.clone() });
            let misfit = less.and_then(|less| book::fit_models(room, &[&less]).err());
            let Some(misfit) = misfit else { continue };
            format!(
                "model `{}` does not fit on this machine even alone and with its fallback arguments ({}): {}",
                one.name,
                args.join(" "),
                misfit_text(&misfit)
            )
        } else {
            format!(
                "model `{}` does not fit on this machine even alone: {}; it is tried when no other model is loaded",
                one.name,
                misfit_text(&misfit)
            )
        };
        told(message, "`llama-warden plan` says with which context it would fit");
    }
    let pinned: Vec<&PlacementRequest> =
        wanted.iter().filter(|(_, spec)| spec.loading.pin).map(|(one, _)| one).collect();
    if pinned.len() > 1
        && let Err(misfit) = book::fit_models(room, &pinned)
    {
        let message = format!("the pinned models do not fit together: {}", misfit_text(&misfit));
        told(message, "pin fewer of them: what does not fit beside them is never loaded");
    }
    for (one, spec) in wanted.iter().filter(|(_, spec)| !spec.loading.companions.is_empty()) {
        let company = wanted.iter().filter(|(_, other)| spec.loading.companions.contains(&other.name));
        let all: Vec<&PlacementRequest> = company.map(|(other, _)| other).chain([one]).collect();
        // The loop above has already reported models that are too large by themselves.
        if all.iter().any(|one| book::fit_models(room, &[*one]).is_err()) {
            continue;
        }
        if let Err(misfit) = book::fit_models(room, &all) {
            let names: Vec<String> = spec.loading.companions.iter().map(|name| format!("`{name}`")).collect();
            let message = format!(
                "model `{}` and those that are to be loaded along with it (`with`: {}) do not fit together: \
                 {}; it is loaded without them",
                one.name,
                names.join(", "),
                misfit_text(&misfit)
            );
            told(
                message,
                "name fewer of them, or give them less context: `llama-warden plan` shows what each needs",
            );
        }
    }
    problems
}

/// Flags that select devices, each with the corresponding variable.
const DEVICE_FLAGS: [(&[&str], &str); 4] = [
    (&["-dev", "--device"], "LLAMA_ARG_DEVICE"),
    (&["-mg", "--main-gpu"], "LLAMA_ARG_MAIN_GPU"),
    (&["-ts", "--tensor-split"], "LLAMA_ARG_TENSOR_SPLIT"),
    (&["-ot", "--override-tensor"], "LLAMA_ARG_OVERRIDE_TENSOR"),
];

/// Returns the GPUs that `CUDA_VISIBLE_DEVICES` allows; `None` if the variable is not set or its value cannot
/// be interpreted. Prefixes of UUIDs are accepted. Numbers are accepted if CUDA and the driver number the
/// GPUs equally, because all GPUs are alike or a variable sets the order.
fn visible_gpus(env: &BTreeMap<String, String>, gpus: &[GpuDevice]) -> Option<Vec<usize>> {
    let words = env.get(CUDA_DEVICES_VARIABLE)?;
    let nvidia: Vec<&GpuDevice> = gpus.iter().filter(|gpu| gpu.vendor == GpuVendor::Nvidia).collect();
    let by_place = env.get("CUDA_DEVICE_ORDER").is_some_and(|order| order == "PCI_BUS_ID")
        || nvidia.windows(2).all(|pair| pair[0].name == pair[1].name);
    let one = |word: &str| {
        let gpu = match word.parse::<usize>() {
            Ok(number) if by_place => *nvidia.get(number)?,
            // A unique prefix of a GPU's UUID suffices.
            Err(_) if word.len() > 4 => {
                let mut named =
                    nvidia.iter().filter(|gpu| gpu.uuid.as_ref().is_some_and(|uuid| uuid.starts_with(word)));
                let first = named.next()?;
                if named.next().is_some() {
                    return None;
                }
                first
            }
            Ok(_) | Err(_) => return None,
        };
        usize::try_from(gpu.index.0).ok()
    };
    words.split(',').map(str::trim).map(one).collect()
}

/// `seen`: the value of `CUDA_VISIBLE_DEVICES` could be interpreted, so it does not count.
fn selects_devices(args: &[String], env: &BTreeMap<String, String>, seen: bool) -> bool {
    let sees_some = VISIBLE_DEVICES_VARIABLES
        .iter()
        .any(|name| env.contains_key(*name) && !(seen && *name == CUDA_DEVICES_VARIABLE));
    sees_some
        || DEVICE_FLAGS.iter().any(|(flags, variable)| {
            env.contains_key(*variable) || args.iter().any(|word| flags.contains(&word.as_str()))
        })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use warden_policies::GpuIndex;

    use super::*;

    #[test]
    fn the_gpus_that_the_environment_shows_are_known_where_its_words_are() {
        let gpu = |index: u32, vendor, name: &str| GpuDevice {
            index: GpuIndex(index),
            vendor,
            name: name.to_owned(),
            uuid: (vendor == GpuVendor::Nvidia).then(|| format!("GPU-{index}aaa-bbb")),
            pci: None,
            total: Some(1 << 34),
            unified: false,
        };
        let alike = [
            gpu(0, GpuVendor::Nvidia, "H100"),
            gpu(1, GpuVendor::Nvidia, "H100"),
            gpu(2, GpuVendor::Amd, "MI"),
        ];
        let mixed = [gpu(0, GpuVendor::Nvidia, "A2"), gpu(1, GpuVendor::Nvidia, "H100")];
        let env = |pairs: &[(&str, &str)]| {
            let pairs = pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
            pairs.collect::<BTreeMap<_, _>>()
        };
        let seen =
            |words: &str, gpus: &[GpuDevice]| visible_gpus(&env(&[(CUDA_DEVICES_VARIABLE, words)]), gpus);
        assert_eq!(visible_gpus(&env(&[]), &alike), None);
        assert_eq!(seen("0", &alike), Some(vec![0]));
        assert_eq!(seen("1, 0", &alike), Some(vec![1, 0]));
        assert_eq!(seen("GPU-1aaa", &mixed), Some(vec![1]));
        for words in ["", "2", "-1", "none", "GPU-", "GPU-9", "0,x"] {
            assert_eq!(seen(words, &alike), None, "{words}");
        }
        assert_eq!(seen("0", &mixed), None, "CUDA counts the fastest first");
        let by_place = env(&[(CUDA_DEVICES_VARIABLE, "0"), ("CUDA_DEVICE_ORDER", "PCI_BUS_ID")]);
        assert_eq!(visible_gpus(&by_place, &mixed), Some(vec![0]));
        assert_eq!(seen("0", &[]), None);
        let flags = ["-dev".to_owned(), "CUDA0".to_owned()];
        assert!(
            !selects_devices(&[], &env(&[(CUDA_DEVICES_VARIABLE, "0")]), true)
                && selects_devices(&[], &env(&[(CUDA_DEVICES_VARIABLE, "0")]), false)
        );
        assert!(selects_devices(&flags, &env(&[(CUDA_DEVICES_VARIABLE, "0")]), true));
    }

    #[test]
    fn a_models_file_is_found_by_flag_and_variable() {
        let args = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        let env: BTreeMap<_, _> = [("LLAMA_ARG_MODEL".to_owned(), "e.gguf".to_owned())].into();
        assert_eq!(
            model_file(&args(&["-m", "a.gguf", "--model", "b.gguf"]), &env).as_deref(),
            Ok(Path::new("b.gguf"))
        );
        assert_eq!(model_file(&[], &env).as_deref(), Ok(Path::new("e.gguf")));
        assert!(model_file(&args(&["-hf", "x/y"]), &BTreeMap::new()).unwrap_err().contains("names no file"));
    }
}
