//! `llama-warden builds list|show|rm|gc`.

use clap::Subcommand;
use warden_builder::{BuildId, Keep, Provenance, Store};
use warden_policies::ByteSize;

use super::{ConfigArgs, build::dirs};
use crate::config::machine::Machine;
use crate::exit::Failure;
use crate::out;

/// What can be done with the builds in the store.
#[derive(Debug, Subcommand)]
pub(crate) enum BuildsCommand {
    /// Lists them, newest first.
    List {
        /// JSON, for programs.
        #[arg(long)]
        json: bool,
        #[command(flatten)]
        config: ConfigArgs,
    },
    /// Shows all that is known about one.
    Show {
        /// Its id, or the beginning of it.
        id: String,
        #[command(flatten)]
        config: ConfigArgs,
    },
    /// Removes some.
    Rm {
        /// Their ids, or the beginnings of them.
        #[arg(required = true)]
        ids: Vec<String>,
        #[command(flatten)]
        config: ConfigArgs,
    },
    /// Removes all but the newest, and those that the configuration names.
    Gc {
        /// How many of the newest stay (`build.keep`).
        #[arg(long, value_name = "N")]
        keep: Option<usize>,
        /// Only says what would go.
        #[arg(long)]
        dry_run: bool,
        #[command(flatten)]
        config: ConfigArgs,
    },
}

/// Does it.
pub(crate) fn run(command: BuildsCommand) -> Result<(), Failure> {
    match command {
        BuildsCommand::List { json, config } => list(&store(&config)?.0, json),
        BuildsCommand::Show { id, config } => {
            let (store, _) = store(&config)?;
            let id = store.resolve(&id)?;
            out::json(&store.show(&id)?)
        }
        BuildsCommand::Rm { ids, config } => {
            let (store, _) = store(&config)?;
            // All names first: a wrong one must not leave the job half done.
            let ids = ids.iter().map(|id| store.resolve(id)).collect::<Result<Vec<_>, _>>()?;
            ids.iter().try_for_each(|id| {
                store.remove(id)?;
                out::line(&format!("removed {id}"))
            })
        }
        BuildsCommand::Gc { keep, dry_run, config } => {
            let (store, loaded) = store(&config)?;
            let keep =
                Keep { newest: keep.unwrap_or(loaded.settings.build.keep), ids: named(&store, &loaded) };
            let (gone, verb) = if dry_run {
                (store.superfluous(&keep)?, "would remove")
            } else {
                (store.gc(&keep)?, "removed")
            };
            for id in &gone {
                out::line(&format!("{verb} {id}"))?;
            }
            if gone.is_empty() { out::line("nothing to remove") } else { Ok(()) }
        }
    }
}

fn store(config: &ConfigArgs) -> Result<(Store, crate::config::layers::Loaded), Failure> {
    let machine = Machine::read();
    let loaded = config.load(&machine, Vec::new())?;
    Ok((Store::new(&dirs(&loaded, &machine).data), loaded))
}

/// Builds that the configuration names.
fn named(store: &Store, loaded: &crate::config::layers::Loaded) -> Vec<BuildId> {
    let all = std::iter::once(&loaded.defaults).chain(loaded.models.iter().map(|(_, model, _)| model));
    all.filter_map(|model| store.resolve(model.build.as_deref()?).ok()).collect()
}

fn list(store: &Store, json: bool) -> Result<(), Failure> {
    let listing = store.list()?;
    if json {
        return out::json(&listing.builds);
    }
    for (path, why) in &listing.damaged {
        out::error_line(&format!("warning: {} cannot be used: {why}", path.display()));
    }
    if listing.builds.is_empty() {
        return out::line(&format!("no builds in {}", store.root().display()));
    }
    let mut rows =
        vec![["ID", "BUILT", "LLAMA.CPP", "BACKEND", "ARCH", "FIXES", "SIZE"].map(str::to_owned).to_vec()];
    rows.extend(listing.builds.iter().map(row));
    out::write(&out::table(&rows))
}

fn row(build: &Provenance) -> Vec<String> {
    let recipe = &build.plan.recipe;
    vec![
        build.id.to_string(),
        build.built_at.clone(),
        build.plan.source.revision.to_string(),
        recipe.backend.to_string(),
        recipe.arch(),
        if build.fixes().is_empty() { "none".to_owned() } else { build.fixes().join(",") },
        ByteSize(build.binary.size).to_string(),
    ]
}
