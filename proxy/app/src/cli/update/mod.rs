//! `llama-warden update`, `llama-warden rollback`: changes the default build, with a way back.
//! ```text
//!   source ── new revision ── plan: patch sets judged ── build, verified ── configuration checked
//!                                                                               v
//!      rejected, not retried automatically <── worse ── proof against the build in use
//!                                                                               v
//!      rejected, rolled back <── a model dies ── watched <── every instance reloads <── canary <── chosen
//! ```
//!
//! Instances stay unchanged until the last steps, and each step may be interrupted. If a run is killed after
//! its choice of a build, the next run first brings that build to every instance and watches them.

mod bring;
mod live;
mod prove;
pub(crate) mod schedule;
mod source;
mod told;

use std::fs::File;
use std::path::PathBuf;

use clap::Args;
use rustix::fs::FlockOperation;
use rustix::process::{Signal, getpid, kill_process};
use warden_builder::{
    ArchChoice, BackendChoice, BuildId, BuildPlan, BuildRequest, BuildStore, Builder, Provenance, RunPriority,
};
use warden_config::machine::HostMachine;
use warden_config::problem::ConfigPlace;
use warden_config::resolve::ResolvedConfig;
use warden_config::resolve::binary::BinaryChoice;
use warden_config::resolve::dirs::WardenDirs;
use warden_config::source::layers::LoadedConfig;
use warden_experiment::Workload;
use warden_experiment::proof::ProofRuling;
use warden_patches::SelectedSets;
use warden_supervisor::nursery::NurseryHandle;

pub(crate) use self::bring::rollback;
use self::prove::UpdateBuilds;
use self::schedule::LAST_RUN_FILE;
use self::source::NewSource;
use self::told::{UpdateOutcome, UpdateReport};
use super::build;
use super::shared::ConfigArgs;
use crate::exit::CommandError;
use crate::out;
use crate::serve::{ConfigSource, SignalHandlers, with_nursery};

#[expect(clippy::struct_excessive_bools, reason = "switches of a command line")]
#[derive(Clone, Debug, Args)]
#[command(
    after_help = "Exit codes: 0 it is in use, or nothing is new; 3 the new build is worse, or was found worse \
                  before; 5 that cannot be told; 1 anything else, 2 wrong use, 130 interrupted."
)]
pub(crate) struct UpdateArgs {
    /// Tag, branch or commit to build. Default: the newest that `update.track` selects.
    #[arg(long, value_name = "REV", conflicts_with_all = ["source", "sdist"])]
    to: Option<String>,
    /// Git repository: a URL, a folder, or a name from `[build.sources]`. Default: `build.source`.
    #[arg(long, value_name = "URL|PATH|NAME", conflicts_with_all = ["source", "sdist"])]
    git: Option<String>,
    /// Never uses the network for the repository: takes what was fetched before.
    #[arg(long)]
    offline: bool,
    /// Folder or archive that contains llama.cpp, in place of a repository.
    #[arg(long, value_name = "PATH", conflicts_with = "sdist")]
    source: Option<PathBuf>,
    /// Uses the newest source archive of llama-cpp-python that pip finds; with --offline the pinned one.
    #[arg(long)]
    sdist: bool,
    /// Backend to compute on. Default: that of the build in use.
    #[arg(long, value_name = "NAME", value_parser = build::parse_with_hint::<BackendChoice>)]
    backend: Option<BackendChoice>,
    #[command(flatten)]
    patches: build::PatchArgs,
    /// Option for cmake, as NAME=VALUE, in addition to those of the build in use. May be repeated.
    #[arg(short = 'D', value_name = "NAME=VALUE")]
    options: Vec<String>,
    /// Proves the build with this configured model, next to the served ones. Default: a tiny sample model.
    #[arg(long, value_name = "NAME", conflicts_with = "unproved")]
    model: Option<String>,
    /// Workload that is watched for growth and crashes with both builds, as for `diagnose`. May be
    /// repeated. Default: all that the model supports.
    #[arg(long, value_name = "NAME", value_delimiter = ',', requires = "model")]
    workload: Vec<Workload>,
    /// Brings the build in without a proof.
    #[arg(long)]
    unproved: bool,
    /// Brings the build in without a canary, which tries it on a share of the conversations.
    #[arg(long)]
    no_canary: bool,
    /// Tries a build again that was rejected.
    #[arg(long)]
    again: bool,
    /// Runs for a schedule: at low priority, and waits for the times at which all models may be replaced.
    #[arg(long, hide = true)]
    scheduled: bool,
    /// Shows the new revision and the build plan, and changes nothing.
    #[arg(long)]
    plan: bool,
    /// Prints the result as JSON, for programs.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    config: ConfigArgs,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct RollbackArgs {
    /// Shows the build that would be in use, and changes nothing.
    #[arg(long)]
    plan: bool,
    #[command(flatten)]
    config: ConfigArgs,
}

const LOCK_FILE: &str = "update.lock";

/// Must be called on the main thread, because the nursery forks.
pub(crate) fn run(args: UpdateArgs) -> Result<(), CommandError> {
    with_nursery(|nursery| update(args, nursery))
}

async fn update(args: UpdateArgs, nursery: NurseryHandle) -> Result<(), CommandError> {
    let mut signals = SignalHandlers::new()?;
    let (machine, loaded) = args.config.read()?;
    let dirs = loaded.dirs(&machine)?;
    let _only = lock_updates(&dirs)?;
    if args.scheduled {
        // Serving has priority. Continue if lowering the priority fails.
        rustix::process::nice(SCHEDULED_NICE).ok();
    }
    let report = build::with_builder(&loaded, &machine, async |builder| {
        if args.scheduled {
            // From here on, the builder handles the signal that `end_with_stdin` sends.
            end_with_stdin();
        }
        let store = builder.store();
        let run = UpdateRun { args: &args, machine: &machine, loaded: &loaded, dirs: &dirs, builder, store };
        Box::pin(run.run(nursery, &mut signals)).await
    })
    .await?;
    report.show(args.json)?;
    report.check_exit()
}

/// Ends the update when stdin ends: the process that requested the update closes the pipe to cancel it.
fn end_with_stdin() {
    let listens = std::thread::Builder::new().name("wanted".to_owned()).spawn(|| {
        drop(std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink()));
        kill_process(getpid(), Signal::TERM).ok();
    });
    if let Err(error) = listens {
        tracing::warn!(%error, "this update is not ended by the end of whoever wants it");
    }
}

const SCHEDULED_NICE: i32 = 10;

/// Concurrent updates would judge each other's builds.
fn lock_updates(dirs: &WardenDirs) -> Result<File, CommandError> {
    let path = dirs.data.join(LOCK_FILE);
    let held = super::shared::open_locked(&path, FlockOperation::NonBlockingLockExclusive);
    held.map_err(|error| {
        if error.kind() == std::io::ErrorKind::WouldBlock {
            CommandError::hinted("another `llama-warden update` is under way", "wait until it has ended")
        } else {
            CommandError::cannot("hold", &path)(error)
        }
    })
}

struct UpdateRun<'a> {
    args: &'a UpdateArgs,
    machine: &'a HostMachine,
    loaded: &'a LoadedConfig,
    dirs: &'a WardenDirs,
    builder: Builder,
    store: BuildStore,
}

impl UpdateRun<'_> {
    async fn run(
        &self,
        nursery: NurseryHandle,
        signals: &mut SignalHandlers,
    ) -> Result<UpdateReport, CommandError> {
        let numbers = &self.loaded.settings.update;
        let finished = if self.args.plan { None } else { self.finish(signals).await? };
        let old = self.store.default_build()?.ok_or_else(|| {
            CommandError::hinted(
                format!("there is no build in {} to renew", self.store.root().display()),
                "`update` renews builds of the store only: make the first one with `llama-warden build`, take \
                 `binary` out of the configuration, and reload it",
            )
        })?;
        let new =
            source::find_newest(self.args, &self.builder, &self.loaded.settings.build, &numbers.track, &old)
                .await?;
        let request = self.build_request(new.source.clone(), &old)?;
        let plan = self.builder.plan(&request).await?;
        let mut report = UpdateReport::new(&old, &plan, &new, numbers.listed);
        report.notes.extend(finished);
        if let Some(outcome) = self.outcome_without_build(&old, &new, &plan, &mut report.reasons)? {
            return Ok(report.with_outcome(outcome));
        }
        self.note_run();
        // Choose the build in use explicitly: a newer or rebuilt build in the store must not become the
        // default by itself.
        if self.store.choices()?.chosen.last().is_none_or(|last| last.build != old.id || last.held) {
            self.store.choose(&old.id, "it was in use when an update began")?;
        }
        out::error_line(&format!("update: {}", report.summary()));
        let built = self.builder.build(&request).await?;
        self.check_configuration(&built.id).await?;
        if !self.args.unproved {
            let both = UpdateBuilds {
                old: self.store.binary(&old.id)?,
                new: built.binary.clone(),
                provenance: &built.provenance,
                cache: &self.dirs.cache,
            };
            let proof =
                Box::pin(prove::prove_build(self.args, self.loaded, &both, &nursery, signals)).await?;
            let verdict = proof.verdict;
            report.add_proof(proof);
            match verdict {
                ProofRuling::Worse => {
                    self.store.reject(&built.id, &report.reasons_line())?;
                    return Ok(report.with_outcome(UpdateOutcome::Rejected));
                }
                ProofRuling::Unknown => return Ok(report.with_outcome(UpdateOutcome::Unknown)),
                ProofRuling::Better | ProofRuling::Same => {}
            }
        }
        let pinned = bound_models(&self.args.config, self.loaded, self.machine)?;
        let instances =
            live::find_instances(self.dirs, self.machine, &[self.store.binary(&old.id)?], &pinned, true)
                .await?;
        if !self.args.no_canary {
            for live in &instances {
                if let Some(why) =
                    prove::try_canaries(live, &built.id, numbers, &mut report.notes, signals).await?
                {
                    report.reasons.push(why);
                    self.store.reject(&built.id, &report.reasons_line())?;
                    return Ok(report.with_outcome(UpdateOutcome::Rejected));
                }
            }
        }
        self.bring_in(report, &instances, &built.id, signals).await
    }

    /// Returns the outcome if there is nothing to build.
    fn outcome_without_build(
        &self,
        old: &Provenance,
        new: &NewSource,
        plan: &BuildPlan,
        reasons: &mut Vec<String>,
    ) -> Result<Option<UpdateOutcome>, CommandError> {
        if plan.id == old.id {
            return Ok(Some(UpdateOutcome::NothingNew));
        }
        if let Some(why) = new.not_newer_reason(old, plan) {
            reasons.push(why);
            return Ok(Some(UpdateOutcome::NothingNew));
        }
        if !self.args.again
            && let Some(decided) = self.store.choices()?.rejected(&plan.id)
        {
            reasons.push(format!("{}: {}", decided.at, decided.why));
            return Ok(Some(UpdateOutcome::WasRejected));
        }
        Ok(self.args.plan.then_some(UpdateOutcome::Planned))
    }

    fn note_run(&self) {
        let last = self.dirs.state.join(LAST_RUN_FILE);
        let noted = std::fs::create_dir_all(&self.dirs.state)
            .and_then(|()| std::fs::write(&last, format!("{}\n", warden_admin::clock::now_text())));
        if let Err(error) = noted {
            out::error_line(&format!("warning: {} cannot be written: {error}", last.display()));
        }
    }

    /// Uses the recipe of the build in use with another source.
    fn build_request(
        &self,
        source: warden_builder::BuildSource,
        old: &Provenance,
    ) -> Result<BuildRequest, CommandError> {
        let recipe = &old.plan.recipe;
        let mut patches = build::select_patches(&self.args.patches, self.loaded, self.machine)?;
        if patches.sets == SelectedSets::Default && old.plan.patches.is_empty() {
            patches.sets = SelectedSets::None;
        }
        // A bundled build is made for the machines of others: renew it for this machine's CPU alone.
        let (arch, options) = if self.store.is_bundled(&old.id) {
            (ArchChoice::default(), [].as_slice())
        } else {
            (recipe.arch().parse().unwrap_or_default(), old.plan.options.as_slice())
        };
        Ok(BuildRequest {
            backend: self.args.backend.unwrap_or(BackendChoice::Explicit(recipe.backend)),
            arch,
            options: options.iter().chain(&self.args.options).cloned().collect(),
            priority: RunPriority::Background,
            ..build::build_request(source, patches, &self.loaded.settings.build)
        })
    }

    /// Refuses a build that lacks a configured mitigation or does not know a configured flag.
    async fn check_configuration(&self, id: &BuildId) -> Result<(), CommandError> {
        if self.loaded.models.is_empty() {
            return Ok(());
        }
        let plan = plan_of(&self.args.config);
        let resolving = plan.resolve_with(self.machine, |resolved| {
            for model in &mut resolved.models {
                if model.choice == BinaryChoice::Newest {
                    model.choice = BinaryChoice::Build(id.to_string());
                    model.choice_place = ConfigPlace::Flag("update".to_owned());
                }
            }
            Ok(())
        });
        let refuse = |lines: String| {
            CommandError::hinted(
                format!("build {id} cannot be used as it is configured: {lines}"),
                "nothing was changed; change what the lines name, or wait for another revision",
            )
        };
        let resolved = resolving.await.map_err(|failure| refuse(failure.lines().join("; ")))?;
        let unknown = warden_config::resolve::flags::find_unknown_words(self.loaded, &resolved).await;
        match unknown.refused.first() {
            None => Ok(()),
            Some(problem) => Err(refuse(problem.to_string())),
        }
    }
}

fn plan_of(config: &ConfigArgs) -> ConfigSource {
    ConfigSource { config: config.clone(), flags: Vec::new(), any_name: false }
}

fn resolve_configured(
    config: &ConfigArgs,
    loaded: &LoadedConfig,
    machine: &HostMachine,
) -> Result<Option<ResolvedConfig>, CommandError> {
    if loaded.models.is_empty() { Ok(None) } else { plan_of(config).as_configured(machine).map(Some) }
}

/// Returns the models whose configuration names a build or a program.
fn bound_models(
    config: &ConfigArgs,
    loaded: &LoadedConfig,
    machine: &HostMachine,
) -> Result<Vec<String>, CommandError> {
    let Some(resolved) = resolve_configured(config, loaded, machine)? else { return Ok(Vec::new()) };
    Ok(resolved.bound_models())
}
