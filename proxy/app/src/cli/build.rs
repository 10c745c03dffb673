//! `llama-warden build`: builds llama-server from source, verifies it, and adds it to the store.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use clap::Args;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use warden_builder::{
    ArchChoice, BackendChoice, BuildEnvironment, BuildId, BuildRequest, BuildSource, BuildStore, Builder,
    BuilderDirs, EventReporter, MachineNeeds, StoredBuild, SuccessorObstacle, sdist,
};
use warden_patches::{SetCatalogue, SetSelection};
use warden_policies::defaults::Build;

pub(crate) mod flags;
pub(crate) mod git;

pub(crate) use flags::{ArchArgs, PatchArgs, TargetArgs};
pub(crate) use git::GitArgs;

use super::builds::make_default;
use super::{ConfigArgs, block_on, progress};
use crate::config::machine::HostMachine;
use crate::config::resolve::proofs;
use crate::config::source::layers::LoadedConfig;
use crate::exit::CommandError;
use crate::out;

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

pub(crate) fn dirs(loaded: &LoadedConfig, machine: &HostMachine) -> Result<BuilderDirs, CommandError> {
    let paths = loaded.dirs(machine)?;
    Ok(BuilderDirs { cache: paths.cache, data: paths.data })
}

/// Loads the curated patch sets and those of the configuration.
pub(crate) fn load_patch_sets(
    loaded: &LoadedConfig,
    machine: &HostMachine,
) -> Result<SetCatalogue, CommandError> {
    Ok(loaded.patch_sets(machine)?)
}

/// The source archive that the defaults pin.
pub(crate) fn sdist_pin(build: &Build) -> sdist::SdistPin {
    sdist::SdistPin { version: build.sdist_version.clone(), sha256: build.sdist_sha256.clone() }
}

/// Creates a build request with the limits of the configuration.
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
    }
}

pub(crate) fn run(args: BuildArgs) -> Result<(), CommandError> {
    block_on(build(args))?
}

/// Selects the patch sets of the flags, with the proofs recorded for the configured sets.
pub(crate) fn select_patches(
    patches: &PatchArgs,
    loaded: &LoadedConfig,
    machine: &HostMachine,
) -> Result<SetSelection, CommandError> {
    let mut patches = patches.select(load_patch_sets(loaded, machine)?)?;
    patches.proofs = proofs::load_proofs(loaded, machine)?;
    Ok(patches)
}

async fn build(args: BuildArgs) -> Result<(), CommandError> {
    let machine = HostMachine::read();
    let loaded = args.config.load(&machine, Vec::new())?;
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
            return print_plan(&builder.plan(&request).await?, args.json);
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

/// Runs `work` with a builder of this configuration. Shows the builder's events; a signal cancels the work.
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

/// Resolves the source at `path`, or the pinned archive without a path.
pub(crate) async fn resolve_source(
    builder: &Builder,
    path: Option<&Path>,
    numbers: &Build,
) -> Result<BuildSource, CommandError> {
    Ok(match path {
        Some(path) => BuildSource::at(path)?,
        None => BuildSource::at(&builder.sdist(&sdist_pin(numbers)).await?)?,
    })
}

fn print_plan(plan: &warden_builder::BuildPlan, json: bool) -> Result<(), CommandError> {
    if json { out::print_json(plan) } else { out::print_line(&plan.to_string()) }
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

/// Says which build is now the default one, after a build was made.
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

/// Returns a token that the first SIGINT, SIGTERM or SIGHUP cancels. All running work then ends and cleans
/// up.
fn cancel_on_signal() -> Result<CancellationToken, CommandError> {
    let cancel = CancellationToken::new();
    let listen = |kind| {
        signal(kind).map_err(|error| CommandError::failed(format!("cannot listen for signals: {error}")))
    };
    let (mut int, mut term) = (listen(SignalKind::interrupt())?, listen(SignalKind::terminate())?);
    let mut hup = listen(SignalKind::hangup())?;
    let token = cancel.clone();
    // The task ends with the runtime or with the signal, so nobody waits for it.
    tokio_util::task::TaskTracker::new().spawn(async move {
        tokio::select! {
            _ = int.recv() => {}
            _ = term.recv() => {}
            // Without this, closing the terminal would leave compilers and the work folder behind.
            _ = hup.recv() => {}
        }
        token.cancel();
    });
    Ok(cancel)
}

#[cfg(test)]
mod tests {
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
}
