//! `llama-warden builds list|show|use|rm|gc`: manages the store of builds.

use std::path::Path;

use clap::Subcommand;
use warden_admin::client::AdminClient;
use warden_admin::instance;
use warden_builder::{BuildId, BuildStore, GcKeep, GcPlan, Provenance};
use warden_config::machine::HostMachine;
use warden_config::resolve::dirs::WardenDirs;
use warden_config::source::layers::LoadedConfig;
use warden_page::build_text::{build_cells, default_state};
use warden_policies::ByteSize;

use super::builds_between;
use super::shared::{ConfigArgs, block_on};
use crate::exit::CommandError;
use crate::out;

#[derive(Debug, Subcommand)]
pub(crate) enum BuildsCommand {
    /// Lists builds, newest first.
    List {
        /// JSON, for programs.
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        config: ConfigArgs,
    },
    /// Shows all that is known about a build.
    Show {
        /// The id of the build, or the beginning of it.
        id: String,
        #[command(flatten)]
        config: ConfigArgs,
    },
    /// Makes a build the default for models that name none; running instances switch when they reload their
    /// configuration.
    Use {
        /// The id of the build, or the beginning of it.
        id: String,
        #[command(flatten)]
        config: ConfigArgs,
    },
    /// Removes builds.
    Rm {
        /// The ids of the builds, or the beginnings of them.
        #[arg(required = true)]
        ids: Vec<String>,
        /// Removes builds even if a running instance uses them or will start them next.
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        config: ConfigArgs,
    },
    /// Removes old builds and leftovers of interrupted builds. Keeps the newest builds, builds that the
    /// configuration names, and builds that running instances need.
    Gc {
        /// Number of newest builds to keep (`build.keep`).
        #[arg(long, value_name = "N")]
        keep: Option<usize>,
        /// Only prints what would be removed.
        #[arg(long)]
        dry_run: bool,
        /// Removes builds of running instances and the last build, too.
        #[arg(long)]
        force: bool,
        /// Removes instead all builds that `diagnose --between` left. A search that continues later builds
        /// them again.
        #[arg(long, conflicts_with_all = ["keep", "force"])]
        between: bool,
        #[command(flatten)]
        config: ConfigArgs,
    },
}

pub(crate) fn run(command: BuildsCommand) -> Result<(), CommandError> {
    match command {
        BuildsCommand::List { json, config } => list(&BuildsContext::find(&config)?, json),
        BuildsCommand::Show { id, config } => {
            let store = BuildsContext::find(&config)?.store;
            let id = store.resolve(&id)?;
            out::print_json(&store.show(&id)?)
        }
        BuildsCommand::Use { id, config } => {
            let store = BuildsContext::find(&config)?.store;
            let id = store.resolve(&id)?;
            make_default(&store, &id)?;
            out::print_line(&format!("build {id} is in use; a running instance takes it with SIGHUP"))
        }
        BuildsCommand::Rm { ids, force, config } => {
            let place = BuildsContext::find(&config)?;
            // Resolve all ids first: an unknown id must not leave the command half done.
            let ids = ids.iter().map(|id| place.store.resolve(id)).collect::<Result<Vec<_>, _>>()?;
            if !force {
                place.check_none_in_use(&ids)?;
            }
            ids.iter().try_for_each(|id| {
                let bytes = place.store.bytes(id);
                place.store.remove(id)?;
                out::print_line(&format!("removed {id}, {}", ByteSize(bytes)))
            })
        }
        BuildsCommand::Gc { dry_run, between: true, config, .. } => {
            gc_between(&BuildsContext::find(&config)?, dry_run)
        }
        BuildsCommand::Gc { keep, dry_run, force, config, .. } => {
            gc(&BuildsContext::find(&config)?, keep, dry_run, force)
        }
    }
}

/// If no build was ever chosen, first records the newest build as chosen, so that a rollback can return to
/// it.
pub(super) fn make_default(store: &BuildStore, id: &BuildId) -> Result<(), CommandError> {
    if store.choices()?.chosen.is_empty()
        && let Some(before) = store.default_build()?
    {
        store.choose(&before.id, "it was the newest build")?;
    }
    Ok(store.choose(id, "it was chosen by hand")?)
}

fn gc(place: &BuildsContext, keep: Option<usize>, dry_run: bool, force: bool) -> Result<(), CommandError> {
    let BuildsContext { store, loaded, .. } = place;
    let newest = keep.unwrap_or(loaded.settings.build.keep);
    let mut keep = GcKeep { newest, ids: configured_builds(store, loaded) };
    keep.ids.extend(store.kept_by_choice());
    if !force {
        let without = store.plan_gc(&keep)?;
        let in_use = place.in_use(store)?;
        print_builds_in_use(&in_use, &without)?;
        keep.ids.extend(in_use.ids());
        if !without.builds.is_empty() && !dry_run {
            in_use.check_all_answered()?;
        }
    }
    let all = store.plan_gc(&keep)?;
    if !all.builds.is_empty() && all.left == 0 && !force {
        print_sweep(&all)?;
        return Err(CommandError::hinted(
            format!("nothing was removed: no build would be left in {}", store.root().display()),
            "keep one with --keep 1, or use --force",
        ));
    }
    run_sweep(store, &all, dry_run)
}

/// Keeps builds of searches that running instances need: an operator may have configured their binaries.
fn gc_between(place: &BuildsContext, dry_run: bool) -> Result<(), CommandError> {
    let idle = builds_between::IdleSearchStore::find(&place.dirs.data, &place.store)?;
    let in_use = place.in_use(&idle.store)?;
    print_builds_in_use(&in_use, &idle.sweep_except(Vec::new())?)?;
    let all = idle.sweep_except(in_use.ids())?;
    if !all.is_empty() && !dry_run {
        in_use.check_all_answered()?;
    }
    run_sweep(&idle.store, &all, dry_run)
}

fn print_builds_in_use(in_use: &BuildsInUse, all: &GcPlan) -> Result<(), CommandError> {
    for (id, bytes) in &all.builds {
        let users = in_use.users_of(id);
        if !users.is_empty() {
            out::print_line(&format!("keeps {id}, {}: {} needs it", ByteSize(*bytes), users.join(", ")))?;
        }
    }
    Ok(())
}

fn print_sweep(sweep: &GcPlan) -> Result<(), CommandError> {
    let leftovers = sweep.leftovers.iter().map(|(path, bytes)| (path.display().to_string(), bytes));
    for (name, bytes) in sweep.builds.iter().map(|(id, bytes)| (id.to_string(), bytes)).chain(leftovers) {
        out::print_line(&format!("would remove {name}, {}", ByteSize(*bytes)))?;
    }
    Ok(())
}

fn run_sweep(store: &BuildStore, sweep: &GcPlan, dry_run: bool) -> Result<(), CommandError> {
    if dry_run {
        print_sweep(sweep)?;
    }
    if sweep.is_empty() {
        return out::print_line("nothing to remove");
    }
    if dry_run {
        return out::print_line(&format!("that would free {}", ByteSize(sweep.bytes())));
    }
    let mut freed = 0;
    let mut told = Ok(());
    store.gc(sweep, |name, bytes| {
        freed += bytes;
        // The reader of stdout may be gone; continue with the removal all the same.
        let line = out::print_line(&format!("removed {name}, {}", ByteSize(bytes)));
        told = std::mem::replace(&mut told, Ok(())).and(line);
    })?;
    told?;
    out::print_line(&format!("freed {}", ByteSize(freed)))
}

struct BuildsContext {
    machine: HostMachine,
    loaded: LoadedConfig,
    dirs: WardenDirs,
    store: BuildStore,
}

impl BuildsContext {
    fn find(config: &ConfigArgs) -> Result<Self, CommandError> {
        let (machine, loaded) = config.read()?;
        let dirs = loaded.dirs(&machine)?;
        let store = BuildStore::with_bundled(&dirs.data);
        Ok(Self { machine, loaded, dirs, store })
    }

    fn in_use(&self, store: &BuildStore) -> Result<BuildsInUse, CommandError> {
        let mut found = BuildsInUse::default();
        for located in instance::all_instances(&self.dirs.state, &self.machine.registration_dirs()) {
            let status = block_on(AdminClient::from_located(&located).status())?;
            let instance = located.instance;
            let Some(binaries) = status.and_then(|status| status.binaries) else {
                // An instance whose record names another store needs no build of this store.
                if instance.data_dir.is_empty() || Path::new(&instance.data_dir) == self.dirs.data {
                    found.unanswered.push(format!("pid {} on {}", instance.pid, instance.admin_socket));
                }
                continue;
            };
            for (model, files) in binaries {
                let used = files.iter().filter_map(|file| store.find_by_file(file));
                found.builds.extend(used.map(|id| (id, format!("model `{model}` of pid {}", instance.pid))));
            }
        }
        found.builds.dedup();
        Ok(found)
    }

    fn check_none_in_use(&self, ids: &[BuildId]) -> Result<(), CommandError> {
        let in_use = self.in_use(&self.store)?;
        for id in ids {
            let users = in_use.users_of(id);
            if !users.is_empty() {
                return Err(CommandError::hinted(
                    format!("nothing was removed: {} needs build {id}", users.join(", ")),
                    "reload it with another build first, or use --force",
                ));
            }
        }
        in_use.check_all_answered()
    }
}

/// Builds that running instances use now or will start next.
#[derive(Debug, Default)]
struct BuildsInUse {
    /// Each build, with the model and the instance that need it, as text.
    builds: Vec<(BuildId, String)>,
    unanswered: Vec<String>,
}

impl BuildsInUse {
    fn ids(&self) -> Vec<BuildId> {
        self.builds.iter().map(|(id, _)| id.clone()).collect()
    }

    fn users_of(&self, id: &BuildId) -> Vec<&str> {
        self.builds.iter().filter(|(used, _)| used == id).map(|(_, who)| who.as_str()).collect()
    }

    fn check_all_answered(&self) -> Result<(), CommandError> {
        if self.unanswered.is_empty() {
            return Ok(());
        }
        Err(CommandError::hinted(
            format!(
                "nothing was removed: a running llama-warden does not say which builds it needs: {}",
                self.unanswered.join(", ")
            ),
            "ask again where it can be reached, or use --force",
        ))
    }
}

fn configured_builds(store: &BuildStore, loaded: &LoadedConfig) -> Vec<BuildId> {
    let all = std::iter::once(&loaded.defaults).chain(loaded.models.iter().map(|(_, model)| model));
    all.filter_map(|model| store.resolve(model.build.as_deref()?).ok()).collect()
}

fn list(place: &BuildsContext, json: bool) -> Result<(), CommandError> {
    let store = &place.store;
    let listing = store.list()?;
    if json {
        return out::print_json(&listing.builds);
    }
    for (path, why) in &listing.damaged {
        out::error_line(&format!("warning: {} cannot be used: {why}", path.display()));
    }
    if listing.builds.is_empty() {
        out::print_line(&format!("no builds in {}", store.root().display()))?;
    } else {
        let choices = store.choices().unwrap_or_default();
        let in_use = store.default_build()?.map(|build| build.id);
        let state = |id: &BuildId| default_state(id, in_use.as_ref(), &choices, listing.bundled.contains(id));
        out::print_text(&table(&listing.builds, state))?;
    }
    builds_between::describe_leftovers(&place.dirs.data).map_or(Ok(()), |line| out::print_line(&line))
}

fn table(builds: &[Provenance], stands: impl Fn(&BuildId) -> &'static str) -> String {
    let rows = builds.iter().map(|build| {
        let mut row = build_cells(build);
        row.push(stands(&build.id).to_owned());
        row
    });
    out::table(["ID", "BUILT", "LLAMA.CPP", "BACKEND", "ARCH", "FIXES", "VERIFIED", "SIZE", ""], rows)
}

#[cfg(test)]
mod tests {
    use warden_builder::BuildChoices;

    use super::*;
    use serde_json::json;

    #[test]
    fn builds_are_a_table_with_what_they_are_of_and_for() {
        let tool = json!({"path": "/usr/bin/cc", "version": "cc 12.2.0"});
        let build = |id: &str, number: Option<u32>, gpu: &[&str], fixes: &[&str]| -> Provenance {
            let revision = json!({"commit": "0c1e570980000000", "build_number": number});
            let recipe = json!({
                "schema": 1, "source": "archive-sha256:00", "root": "", "patch_set": "none", "backend": "cuda",
                "arch": "portable", "cmake": [], "c": "cc", "cxx": "c++", "target": "x86_64-linux-gnu",
                "cpu": "", "gpu": gpu,
            });
            let source = json!({
                "given": "/x.tar.gz", "kind": "archive", "identity": "archive-sha256:00", "root": "",
                "server": "tools/server", "revision": revision,
            });
            let compilers = json!({"c": tool, "cxx": tool, "target": "x86_64-linux-gnu", "cpu": ""});
            let read = serde_json::from_value(json!({
                "schema": 1, "id": id, "built_at": "2026-01-02T03:04:05Z",
                "plan": {"id": id, "recipe": recipe, "source": source, "compilers": compilers},
                "drivers": {"cmake": tool, "ninja": tool, "launcher": null},
                "timings": {"unpack": 0.0, "configure": 0.0, "compile": 0.0, "verify": 0.0},
                "binary": {"size": 78_643_200, "sha256": ""}, "verified": {"checks": []},
                "host": {"name": "", "kernel": "", "machine": "", "cpu": ""}, "fixes": fixes,
            }));
            read.unwrap()
        };
        let builds = [
            build("90b61a0bd726c6ae", Some(8827), &["86", "90"], &["graph-cache-cap", "pool-purge"]),
            build("3a37063580c49344", None, &[], &[]),
        ];
        let in_use: BuildId = "3a37063580c49344".parse().unwrap();
        insta::assert_snapshot!(table(&builds, |id| default_state(
            id,
            Some(&in_use),
            &BuildChoices::default(),
            id.as_str() == "90b61a0bd726c6ae"
        )));
    }
}
