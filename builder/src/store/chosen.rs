//! Records the default build of a store, and the builds to roll back to.
//!
//! ```text
//!  builds/.chosen.json    chosen:   chosen builds; the last is the default, the one before it for rollbacks
//!                         rejected: builds found worse, which are never chosen automatically
//!  builds/.chosen.json.move   a choice or rollback that has not reached all instances yet
//! ```
//!
//! Without this file the newest build is the default. A new build of a fork, of an older revision, or without
//! the GPU does not become the default automatically; the previous default stays until a suitable successor
//! or the user's choice. After an explicit choice, newer builds have to be chosen explicitly, too.

use std::path::PathBuf;
use std::{fs, io};

use serde::{Deserialize, Serialize};

use super::lineage::{SuccessorObstacle, check_successor};
use super::{BuildId, BuildStore, CHOICES_FILE, MOVE_FILE, Provenance};
use crate::clock;
use crate::error::{BuilderError, Result, io_error};
use warden_patches::whole::{self, LossTolerance};

/// Maximum entries per list; older builds are no useful rollback target.
const MAX_DECISIONS: usize = 20;
const CHOICES_SCHEMA: u32 = 1;

/// A decision about a build.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BuildDecision {
    /// The build.
    pub build: BuildId,
    /// Time of the decision, RFC 3339 in UTC.
    pub at: String,
    /// Reason as a sentence.
    pub why: String,
    /// Recorded by the store, not chosen by the user; the next suitable successor becomes the default.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub held: bool,
}

/// Decisions about the builds of a store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BuildChoices {
    schema: u32,
    /// Chosen builds, oldest first.
    pub chosen: Vec<BuildDecision>,
    /// Rejected builds, oldest first.
    pub rejected: Vec<BuildDecision>,
}

impl Default for BuildChoices {
    fn default() -> Self {
        Self { schema: CHOICES_SCHEMA, chosen: Vec::new(), rejected: Vec::new() }
    }
}

/// A rollout or rollback in progress; another program can finish it if the first one was killed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BuildMove {
    /// The build.
    pub build: BuildId,
    /// A rollback: some instances may still run the build. Otherwise a rollout: some may not run it yet.
    pub back: bool,
}

impl BuildChoices {
    /// The rejection of a build, if there is one.
    pub fn rejected(&self, build: &BuildId) -> Option<&BuildDecision> {
        self.rejected.iter().rev().find(|one| one.build == *build)
    }
}

impl BuildStore {
    /// Reads the decisions.
    ///
    /// # Errors
    /// Fails if the file exists and cannot be read or parsed.
    pub fn choices(&self) -> Result<BuildChoices> {
        let path = self.root.join(CHOICES_FILE);
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BuildChoices::default()),
            Err(error) => return Err(io_error("reading", path)(error)),
        };
        match serde_json::from_slice::<BuildChoices>(&text) {
            Ok(choices) if choices.schema == CHOICES_SCHEMA => Ok(choices),
            Ok(choices) => Err(BuilderError::DamagedChoices {
                path,
                why: format!("it is of version {}", choices.schema),
            }),
            Err(error) => Err(BuilderError::DamagedChoices { path, why: error.to_string() }),
        }
    }

    /// The default build: the last usable chosen one, else the newest. Unreadable decisions count as none.
    ///
    /// # Errors
    /// Fails if the store cannot be read.
    pub fn default_build(&self) -> Result<Option<Provenance>> {
        let choices = self.choices().unwrap_or_default();
        if let Some(build) = choices.chosen.iter().rev().find_map(|one| self.show(&one.build).ok()) {
            return Ok(Some(build));
        }
        let mut all = self.list()?.builds;
        let sound = all.iter().position(|build| choices.rejected(&build.id).is_none());
        // A rejected build is better than none.
        Ok(if all.is_empty() { None } else { Some(all.swap_remove(sound.unwrap_or(0))) })
    }

    /// Chooses a build. The build chosen before becomes the rollback target.
    ///
    /// # Errors
    /// Fails if the build does not exist, or if the file of decisions cannot be read or written.
    pub fn choose(&self, build: &BuildId, why: &str) -> Result<()> {
        self.choose_as(build, why, None)
    }

    /// Chooses a build for a caller that then notifies all instances. Until [`BuildStore::finish_move`],
    /// other programs see the rollout as unfinished.
    ///
    /// # Errors
    /// Fails like [`BuildStore::choose`].
    pub fn begin_rollout(&self, build: &BuildId, why: &str) -> Result<()> {
        self.choose_as(build, why, Some(&BuildMove { build: build.clone(), back: false }))
    }

    fn choose_as(&self, build: &BuildId, why: &str, moving: Option<&BuildMove>) -> Result<()> {
        self.show(build)?;
        let _lock = self.lock()?;
        let mut choices = self.choices()?;
        if choices.chosen.last().is_none_or(|last| last.build != *build || last.held) {
            // An earlier choice of the same build would be a rollback to itself.
            choices.chosen.retain(|one| one.build != *build);
            choices.chosen.push(new_decision(build, why));
        }
        choices.rejected.retain(|one| one.build != *build);
        // Write the move first: if writing the choice then fails, the build is not the default, and the
        // move is ignored.
        self.write_move(moving)?;
        self.write_choices(choices)
    }

    /// Returns the reason why a new build does not become the default automatically; `None` if the build is
    /// the default, or a suitable successor of the default.
    ///
    /// # Errors
    /// Fails if the build does not exist, or if the store cannot be read.
    pub fn successor_obstacle(&self, build: &BuildId) -> Result<Option<SuccessorObstacle>> {
        let new = self.show(build)?;
        let in_use = self.default_build()?.filter(|in_use| in_use.id != *build);
        Ok(in_use.and_then(|in_use| check_successor(&in_use.plan, &new.plan).err()))
    }

    /// Records `before`, the previous default, as the default if the new build is no suitable successor. If
    /// this function recorded `before` earlier and the new build is a suitable successor, records the new
    /// build. The caller holds the store's lock.
    pub(super) fn hold_previous(&self, before: Option<Provenance>, new: &Provenance) -> Result<()> {
        let Some(before) = before.filter(|before| before.id != new.id) else { return Ok(()) };
        // Ignore an unreadable file of decisions here: choosing a build reports it.
        let Ok(mut choices) = self.choices() else { return Ok(()) };
        if choices.rejected(&new.id).is_some() {
            return Ok(());
        }
        let held = match (choices.chosen.last(), check_successor(&before.plan, &new.plan)) {
            (None, Err(why)) => (&before.id, format!("it was in use when build {} was made: {why}", new.id)),
            (Some(last), Ok(())) if last.held && last.build == before.id => {
                (&new.id, format!("it was made after build {}, which was in use", before.id))
            }
            _ => return Ok(()),
        };
        let (build, why) = held;
        choices.chosen.retain(|one| one.build != *build);
        choices.chosen.push(BuildDecision { held: true, ..new_decision(build, &why) });
        self.write_choices(choices)
    }

    /// Rolls back from `left`, the default build, to the build chosen before it, and records the rollback as
    /// unfinished. Rejects `left` if a reason is given. Returns the new default. If another build was chosen
    /// meanwhile, returns that build.
    ///
    /// # Errors
    /// Fails if there is no usable build before `left`, or if the decisions cannot be read or written.
    pub fn roll_back(&self, left: &BuildId, why: Option<&str>) -> Result<BuildId> {
        let _lock = self.lock()?;
        let mut choices = self.choices()?;
        let back = self.step_back(&mut choices, left)?;
        if let Some(why) = why {
            choices.rejected.retain(|one| one.build != *left);
            choices.rejected.push(new_decision(left, why));
        }
        self.write_move(Some(&BuildMove { build: left.clone(), back: true }))?;
        self.write_choices(choices)?;
        Ok(back)
    }

    /// The build that [`Self::roll_back`] from `left` would return. Changes nothing.
    ///
    /// # Errors
    /// Fails if there is no usable build before `left`, or if the file of decisions cannot be read.
    pub fn build_before(&self, left: &BuildId) -> Result<BuildId> {
        self.step_back(&mut self.choices()?, left)
    }

    /// Removes the choices after the last usable build other than `left`, and returns that build.
    fn step_back(&self, choices: &mut BuildChoices, left: &BuildId) -> Result<BuildId> {
        let usable = |one: &BuildDecision| self.show(&one.build).is_ok();
        let last = choices.chosen.iter().rposition(usable);
        match last.map(|last| choices.chosen[last].build.clone()) {
            Some(other) if other != *left => Ok(other),
            _ => {
                let before = last.and_then(|last| choices.chosen[..last].iter().rposition(usable));
                let before = before.ok_or_else(|| BuilderError::NoWayBack { store: self.root.clone() })?;
                choices.chosen.truncate(before + 1);
                Ok(choices.chosen[before].build.clone())
            }
        }
    }

    /// The unfinished rollout or rollback, if there is one. An unreadable file counts as none.
    pub fn pending_move(&self) -> Option<BuildMove> {
        let moving: BuildMove = serde_json::from_slice(&fs::read(self.move_path()).ok()?).ok()?;
        let in_use = self.default_build().ok()??.id;
        // A rollout's build is the default; a rollback's build is not any more.
        (moving.back != (moving.build == in_use)).then_some(moving)
    }

    /// Marks the rollout or rollback as finished: all instances run the right build.
    ///
    /// # Errors
    /// Fails if the file cannot be removed.
    pub fn finish_move(&self) -> Result<()> {
        let _lock = self.lock()?;
        self.write_move(None)
    }

    fn move_path(&self) -> PathBuf {
        self.root.join(MOVE_FILE)
    }

    fn write_move(&self, moving: Option<&BuildMove>) -> Result<()> {
        let path = self.move_path();
        let write = || match moving {
            Some(moving) => {
                whole::write_atomically(&path, &serde_json::to_vec(moving)?, LossTolerance::Irreplaceable)
            }
            None => match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
                _ => Ok(()),
            },
        };
        write().map_err(io_error("writing", &path))
    }

    /// Records that a build was found worse.
    ///
    /// # Errors
    /// Fails if the file of decisions cannot be read or written.
    pub fn reject(&self, build: &BuildId, why: &str) -> Result<()> {
        let _lock = self.lock()?;
        let mut choices = self.choices()?;
        choices.rejected.retain(|one| one.build != *build);
        choices.rejected.push(new_decision(build, why));
        // The build may have been chosen, removed and made again: forget that choice.
        choices.chosen.retain(|one| one.build != *build);
        self.write_choices(choices)
    }

    /// The default build and the rollback target, which are never removed by age.
    pub fn kept_by_choice(&self) -> Vec<BuildId> {
        let choices = self.choices().unwrap_or_default();
        let usable = choices.chosen.into_iter().rev().filter(|one| self.show(&one.build).is_ok());
        usable.take(2).map(|one| one.build).collect()
    }

    fn write_choices(&self, mut choices: BuildChoices) -> Result<()> {
        for list in [&mut choices.chosen, &mut choices.rejected] {
            let old = list.len().saturating_sub(MAX_DECISIONS);
            list.drain(..old);
        }
        let path = self.root.join(CHOICES_FILE);
        let write = || {
            let mut text = serde_json::to_vec_pretty(&choices)?;
            text.push(b'\n');
            whole::write_atomically(&path, &text, LossTolerance::Irreplaceable)
        };
        write().map_err(io_error("writing", &path))
    }
}

fn new_decision(build: &BuildId, why: &str) -> BuildDecision {
    BuildDecision { build: build.clone(), at: clock::utc_now(), why: why.to_owned(), held: false }
}
