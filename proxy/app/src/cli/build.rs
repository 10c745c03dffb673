//! `llama-warden build`: builds llama-server from source, verifies it, and adds it to the store.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::Args;
use tokio_util::sync::CancellationToken;
use warden_builder::git::{CommitRequest, GitSource};
use warden_builder::{
    ArchChoice, BackendChoice, BuildEnvironment, BuildId, BuildRequest, BuildSource, BuildStore, Builder,
    BuilderDirs, BuilderError, EventReporter, MachineNeeds, RunPriority, StoredBuild, SuccessorObstacle,
    sdist,
};
use warden_config::machine::HostMachine;
use warden_config::resolve::proofs;
use warden_config::source::layers::LoadedConfig;
use warden_patches::{SelectedSets, SetCatalogue, SetSelection};
use warden_policies::defaults::Build;

use super::builds::make_default;
use super::progress;
use super::shared::{ConfigArgs, block_on};
use crate::exit::CommandError;
use crate::out;
use crate::serve::SignalHandlers;

#[derive(Debug, Args)]
#[expect(clippy::struct_excessive_bools, reason = "a command line has flags")]
pub(crate) struct BuildArgs {
    /// Folder or archive (.tar.gz, .tar.xz, .zip) that contains llama.cpp.
    #[arg(long, value_name = "PATH", conflicts_with_all = ["sdist", "git", "reference", "offline"])]
    source: Option<PathBuf>,
    /// Builds the pinned source archive of llama-cpp-python, downloaded through pip.
    #[arg(long, conflicts_with_all = ["git", "reference", "offline"])]
    sdist: bool,
    #[command(flatten)]
    git: GitArgs,
    #[command(flatten)]
    target: TargetArgs,
    #[command(flatten)]
    patches: PatchArgs,
    /// Number of parallel compilers. Default: as many as cores and memory allow.
    #[arg(long, short, value_name = "N")]
    jobs: Option<NonZeroUsize>,
    /// An option for cmake, as NAME=VALUE. May be repeated.
    #[arg(short = 'D', value_name = "NAME=VALUE")]
    options: Vec<String>,
    /// Makes the build the default for all models that name no build, replacing the current default.
    #[arg(long = "use", conflicts_with = "plan")]
    take: bool,
    /// Shows the build plan and builds nothing. Asks the source for the commit; `--sdist` downloads the
    /// archive.
    #[arg(long)]
    plan: bool,
    /// Prints the result as JSON, for programs.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    config: ConfigArgs,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct TargetArgs {
    /// Backend to compute on: auto, cpu, cuda, hip or vulkan.
    ///
    /// `auto` picks a backend for which this machine has a device and a toolkit, and prints the reason.
    #[arg(long, value_name = "NAME", default_value = "auto", value_parser = parse_with_hint::<BackendChoice>)]
    pub(crate) backend: BackendChoice,
    #[command(flatten)]
    pub(crate) arch: ArchArgs,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct ArchArgs {
    /// Machines to build for: native, portable, any, or GPUs by name.
    ///
    /// `native` is this machine with its GPUs, `portable` the common CPUs and, for CUDA, the common GPUs.
    /// `any` is as `portable` and runs on old CPUs, too: the server loads the best of several libraries.
    /// GPUs by name, such as `90`, `86,89` or `gfx1201`, leave the CPU part native; `portable,90` makes the
    /// CPU part portable, too.
    #[arg(long, value_name = "LIST", default_value = "native", value_parser = parse_with_hint::<ArchChoice>)]
    pub(crate) arch: ArchChoice,
}

/// Parses a value, and adds the hint with valid values to the error, because clap shows only the error.
pub(crate) fn parse_with_hint<T: FromStr<Err = BuilderError>>(text: &str) -> Result<T, String> {
    text.parse().map_err(|error: BuilderError| {
        [Some(error.to_string()), error.hint()].into_iter().flatten().collect::<Vec<_>>().join("; ")
    })
}

#[derive(Clone, Debug, Default, Args)]
pub(crate) struct CatalogueArgs {
    /// Adds patch sets: the folder of one set, or a folder of several. May be repeated.
    #[arg(long, value_name = "DIR")]
    patches: Vec<PathBuf>,
}

impl CatalogueArgs {
    /// Returns the curated and configured sets, and those of these arguments.
    pub(crate) fn load(
        &self,
        loaded: &LoadedConfig,
        machine: &HostMachine,
    ) -> Result<SetCatalogue, CommandError> {
        self.extend(loaded.patch_sets(machine)?)
    }

    fn extend(&self, mut catalogue: SetCatalogue) -> Result<SetCatalogue, CommandError> {
        for folder in &self.patches {
            catalogue = catalogue.with_folder(folder)?;
        }
        Ok(catalogue)
    }
}

#[derive(Clone, Debug, Default, Args)]
pub(crate) struct PatchArgs {
    #[command(flatten)]
    catalogue: CatalogueArgs,
    /// Applies only this set, by its id. May be repeated. Default: every set for the backend.
    #[arg(long, value_name = "ID", conflicts_with = "plain")]
    patch_set: Vec<String>,
    /// Applies no patches: plain upstream.
    #[arg(long)]
    plain: bool,
    /// Applies sets also where nobody has reviewed them against this version of the code.
    #[arg(long, conflicts_with = "plain")]
    allow_unverified: bool,
}

impl PatchArgs {
    /// `known`: the curated and configured sets.
    pub(crate) fn select(&self, known: SetCatalogue) -> Result<SetSelection, CommandError> {
        let sets = match (self.plain, self.patch_set.as_slice()) {
            (true, _) => SelectedSets::None,
            (false, []) => SelectedSets::Default,
            (false, ids) => SelectedSets::Only(ids.to_vec()),
        };
        Ok(SetSelection {
            catalogue: self.catalogue.extend(known)?,
            sets,
            allow_unverified: self.allow_unverified,
            ..SetSelection::default()
        })
    }
}

#[derive(Clone, Debug, Default, Args)]
pub(crate) struct GitArgs {
    /// Git repository: a URL, a folder (read in place), or a name from `[build.sources]`, such as
    /// `ik_llama.cpp`.
    #[arg(long, value_name = "URL|PATH|NAME")]
    pub(crate) git: Option<String>,
    /// Tag, branch or commit of the repository. Default: the configured one, else the repository's default
    /// branch.
    #[arg(long = "ref", value_name = "TAG|BRANCH|SHA")]
    pub(crate) reference: Option<String>,
    /// Never uses the network for the repository: takes what was fetched before.
    #[arg(long)]
    pub(crate) offline: bool,
}

impl GitArgs {
    /// Without `--git`, uses the configured default source. `history` also fetches the preceding commits.
    pub(crate) fn repository_request(
        &self,
        numbers: &Build,
        history: bool,
    ) -> Result<CommitRequest, CommandError> {
        let named = GitSource::parse(self.git.as_deref().unwrap_or(&numbers.source), &numbers.sources)?;
        let reference = self.reference.clone().or(named.reference);
        Ok(CommitRequest { location: named.location, reference, offline: self.offline, history })
    }
}

pub(crate) fn dirs(loaded: &LoadedConfig, machine: &HostMachine) -> Result<BuilderDirs, CommandError> {
    let paths = loaded.dirs(machine)?;
    Ok(BuilderDirs { cache: paths.cache, data: paths.data })
}

pub(crate) fn sdist_pin(build: &Build) -> sdist::SdistPin {
    sdist::SdistPin { version: build.sdist_version.clone(), sha256: build.sdist_sha256.clone() }
}

pub(crate) fn build_request(source: BuildSource, patches: SetSelection, build: &Build) -> BuildRequest {
    BuildRequest {
        source,
        backend: BackendChoice::Auto,
        arch: ArchChoice::default(),
        patches,
        options: Vec::new(),
        jobs: None,
        needs: MachineNeeds {
            disk: build.min_disk.0,
            memory: build.min_memory.0,
            memory_per_job: build.memory_per_job.0,
            memory_per_gpu_job: build.memory_per_gpu_job.0,
        },
        page_timeout: build.page_timeout,
        verify_timeout: build.verify_timeout,
        priority: RunPriority::Inherited,
    }
}

pub(crate) fn run(args: BuildArgs) -> Result<(), CommandError> {
    block_on(build(args))?
}

pub(crate) fn select_patches(
    patches: &PatchArgs,
    loaded: &LoadedConfig,
    machine: &HostMachine,
) -> Result<SetSelection, CommandError> {
    let mut patches = patches.select(loaded.patch_sets(machine)?)?;
    patches.proofs = proofs::load_proofs(loaded, machine)?;
    Ok(patches)
}

async fn build(args: BuildArgs) -> Result<(), CommandError> {
    let (machine, loaded) = args.config.read()?;
    let patches = select_patches(&args.patches, &loaded, &machine)?;
    let numbers = &loaded.settings.build;
    with_builder(&loaded, &machine, async |builder| {
        let source = if args.source.is_some() || args.sdist {
            resolve_source(&builder, args.source.as_deref(), numbers).await?
        } else {
            builder.git(&args.git.repository_request(numbers, false)?).await?
        };
        let request = BuildRequest {
            backend: args.target.backend,
            arch: args.target.arch.arch.clone(),
            options: args.options.clone(),
            jobs: args.jobs.map(NonZeroUsize::get),
            ..build_request(source, patches, numbers)
        };
        if args.plan {
            let plan = builder.plan(&request).await?;
            return if args.json { out::print_json(&plan) } else { out::print_line(&plan.to_string()) };
        }
        let built = builder.build(&request).await?;
        let store = builder.store();
        if args.take {
            make_default(&store, &built.id)?;
        }
        print_built(&built, &store, args.json)
    })
    .await
}

/// Runs `work` with a builder, shows the builder's events, and cancels the work at a signal.
pub(crate) async fn with_builder<T>(
    loaded: &LoadedConfig,
    machine: &HostMachine,
    work: impl AsyncFnOnce(Builder) -> Result<T, CommandError>,
) -> Result<T, CommandError> {
    let (reporter, events) = EventReporter::channel();
    let builder = Builder {
        dirs: dirs(loaded, machine)?,
        env: BuildEnvironment::from_process(),
        memory: || warden_sensors::host_totals().ok().map(|totals| totals.available),
        reporter,
        cancel: cancel_on_signal()?,
    };
    // `work` drops the builder and with it the sender of events, which ends the display.
    let (done, ()) = tokio::join!(work(builder), progress::show_events(events));
    done
}

/// Without a `path`, downloads the pinned archive.
pub(crate) async fn resolve_source(
    builder: &Builder,
    path: Option<&Path>,
    numbers: &Build,
) -> Result<BuildSource, CommandError> {
    match path {
        Some(path) => Ok(BuildSource::at(path)?),
        None => Ok(BuildSource::at(&builder.sdist(&sdist_pin(numbers)).await?)?),
    }
}

fn print_built(built: &StoredBuild, store: &BuildStore, json: bool) -> Result<(), CommandError> {
    let in_use = store.default_build()?.map(|build| build.id);
    if json {
        return out::print_json(&serde_json::json!({
            "id": built.id,
            "binary": built.binary,
            "hit": built.hit,
            "in_use": in_use,
            "provenance": built.provenance,
        }));
    }
    let how = if built.hit { " (already in the store)" } else { "" };
    out::print_line(&format!("build {}{how}", built.id))?;
    if !built.provenance.fixes().is_empty() {
        out::print_line(&format!("fixes {}", built.provenance.fixes().join(", ")))?;
    }
    out::print_line(&built.binary.to_string_lossy())?;
    out::print_line(&describe_default_build(&built.id, in_use.as_ref(), store.successor_obstacle(&built.id)?))
}

fn describe_default_build(
    built: &BuildId,
    in_use: Option<&BuildId>,
    why: Option<SuccessorObstacle>,
) -> String {
    match in_use {
        Some(other) if other != built => {
            let why = why.map_or_else(|| "that one was chosen".to_owned(), |why| why.to_string());
            format!(
                "not in use: models that name no build run {other}; {why}. `llama-warden builds use {built}` takes \
                 this one"
            )
        }
        _ => format!("in use: models that name no build run {built} from their next start on"),
    }
}

fn cancel_on_signal() -> Result<CancellationToken, CommandError> {
    let mut signals = SignalHandlers::new()?;
    let cancel = CancellationToken::new();
    let token = cancel.clone();
    // The runtime or the signal ends this task, so no other task awaits it.
    tokio_util::task::TaskTracker::new().spawn(async move {
        // A closed terminal counts, too: it would leave compilers and the work folder behind.
        signals.wait_leave().await;
        token.cancel();
    });
    Ok(cancel)
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use warden_builder::git::GitLocation;
    use warden_builder::{ComputeBackend, CpuTarget};
    use warden_policies::defaults::defaults;

    use super::*;

    #[test]
    fn the_last_line_says_which_build_models_run() {
        let [built, other]: [BuildId; 2] =
            ["3a37063580c49344", "90b61a0bd726c6ae"].map(|id| id.parse().unwrap());
        let fork = SuccessorObstacle::OtherLineage {
            new: "ikawrakow/ik_llama.cpp".into(),
            in_use: "llama.cpp".into(),
        };
        let lines = [
            describe_default_build(&built, Some(&built), None),
            describe_default_build(&built, Some(&other), Some(fork)),
            describe_default_build(&built, Some(&other), None),
        ];
        insta::assert_snapshot!(lines.join("\n"));
    }

    #[derive(Debug, Parser)]
    struct BuildFlagsTestCli {
        #[command(flatten)]
        target: TargetArgs,
        #[command(flatten)]
        patches: PatchArgs,
    }

    fn parsed(flags: &[&str]) -> Result<BuildFlagsTestCli, String> {
        let words = std::iter::once(&"build").chain(flags);
        BuildFlagsTestCli::try_parse_from(words).map_err(|error| error.to_string())
    }

    #[test]
    fn without_flags_the_machine_decides_and_the_curated_sets_are_applied() {
        let command = parsed(&[]).unwrap();
        assert_eq!(command.target.backend, BackendChoice::Auto);
        assert_eq!(command.target.arch.arch, ArchChoice::default());
        let selection = command.patches.select(SetCatalogue::embedded().unwrap()).unwrap();
        assert_eq!((selection.sets, selection.allow_unverified), (SelectedSets::Default, false));
    }

    #[test]
    fn backend_and_architectures_are_read_with_the_cpu_part() {
        let command = parsed(&["--backend", "cuda", "--arch", "portable,90"]).unwrap();
        assert_eq!(command.target.backend, ComputeBackend::Cuda.into());
        assert_eq!(command.target.arch.arch, ArchChoice { cpu: CpuTarget::Portable, gpu: vec!["90".into()] });
    }

    #[test]
    fn sets_are_chosen_by_name_or_left_out() {
        let curated = || SetCatalogue::embedded().unwrap();
        let of = |flags: &[&str]| parsed(flags).unwrap().patches.select(curated()).unwrap();
        assert_eq!(of(&["--plain"]).sets, SelectedSets::None);
        let some = of(&["--patch-set", "a", "--patch-set", "b", "--allow-unverified"]);
        assert_eq!(
            (some.sets, some.allow_unverified),
            (SelectedSets::Only(vec!["a".into(), "b".into()]), true)
        );
        assert!(parsed(&["--plain", "--patch-set", "a"]).unwrap_err().contains("cannot be used with"));
    }

    fn request(git: Option<&str>, reference: Option<&str>) -> Result<CommitRequest, CommandError> {
        let own = |text: Option<&str>| text.map(str::to_owned);
        GitArgs { git: own(git), reference: own(reference), offline: false }
            .repository_request(&defaults().build, false)
    }

    #[test]
    fn without_a_word_it_is_upstream_at_a_whole_commit() {
        let request = request(None, None).unwrap();
        assert_eq!(request.location.host(), "github.com");
        assert_eq!(request.reference.map(|commit| commit.len()), Some(40));
    }

    #[test]
    fn what_is_asked_for_wins_over_the_configuration() {
        let asked = request(Some("ik_llama.cpp"), Some("main")).unwrap();
        assert!(asked.location.to_string().ends_with("/ik_llama.cpp"));
        assert_eq!(asked.reference.as_deref(), Some("main"));
        let path = request(Some("/srv/a"), None).unwrap();
        assert_eq!((path.location, path.reference), (GitLocation::Path("/srv/a".into()), None));
    }

    #[test]
    fn every_name_of_the_defaults_can_be_used_and_a_wrong_one_tells_them() {
        for name in defaults().build.sources.keys() {
            let location = request(Some(name), None).unwrap().location;
            assert!(matches!(location, GitLocation::Url(_)), "{name}");
        }
        let Err(CommandError::Usage { hint, .. }) = request(Some("ssh://x/y"), None) else {
            unreachable!("ssh is not understood")
        };
        assert!(hint.contains("ik_llama.cpp, llama.cpp, turboquant"), "{hint}");
    }
}
