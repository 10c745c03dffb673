//! Which build is in use where nobody names one, and the way back.
//!
//! ```text
//!  builds/.chosen.json    chosen:   those that were brought in, the last one in use, the one before it the way back
//!                         rejected: those that were found worse, which nobody tries again by himself
//!  builds/.chosen.json.move   a build that is brought in, or taken back, while somebody still sees to it that everybody does it
//! ```
//!
//! Without such a file the newest build is in use. A build of a fork, of an older revision, or without the GPU, does
//! not come into use by being made: the one before is held, until one that continues its line is made, or one is
//! chosen. Once a build was chosen, a newer one waits until it is chosen, too: what is in use changes by a decision,
//! and not because somebody compiled something.

use std::fs;
use std::io;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::lineage::{NoSuccessor, succeeds};
use super::{BuildId, CHOSEN, MOVE, Provenance, Store};
use crate::clock;
use crate::error::{Error, Result, io_error};
use crate::whole::{self, Loss};

/// Builds that are remembered of each kind; older ones are no way back that anybody would take.
const REMEMBERED: usize = 20;
/// Raised when the file's shape changes.
const SCHEMA: u32 = 1;

/// A build, and when and why something was decided of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decided {
    /// The build.
    pub build: BuildId,
    /// When, RFC 3339 in UTC.
    pub at: String,
    /// Why, in a sentence.
    pub why: String,
    /// Nobody chose it: it was in use when a build was made that does not succeed it. The next build that does takes
    /// its place.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub held: bool,
}

/// What was decided of the builds of a store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Choices {
    schema: u32,
    /// Those that were brought in, the oldest first.
    pub chosen: Vec<Decided>,
    /// Those that were found worse, the oldest first.
    pub rejected: Vec<Decided>,
}

impl Default for Choices {
    fn default() -> Self {
        Self { schema: SCHEMA, chosen: Vec::new(), rejected: Vec::new() }
    }
}

/// A build that is brought in, or taken back. If nobody sees to it any more, because whoever did was killed, the next one can.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Move {
    /// The build.
    pub build: BuildId,
    /// It is taken back, and some may still run it; else it was chosen, and some may not run it yet.
    pub back: bool,
}

impl Choices {
    /// Why a build was found worse, if it was.
    pub fn rejected(&self, build: &BuildId) -> Option<&Decided> {
        self.rejected.iter().rev().find(|one| one.build == *build)
    }
}

impl Store {
    /// What was decided so far.
    ///
    /// # Errors
    /// The file is there and cannot be read or understood.
    pub fn choices(&self) -> Result<Choices> {
        let path = self.root.join(CHOSEN);
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Choices::default()),
            Err(error) => return Err(io_error("reading", path)(error)),
        };
        match serde_json::from_slice::<Choices>(&text) {
            Ok(choices) if choices.schema == SCHEMA => Ok(choices),
            Ok(choices) => {
                Err(Error::DamagedChoices { path, why: format!("it is of version {}", choices.schema) })
            }
            Err(error) => Err(Error::DamagedChoices { path, why: error.to_string() }),
        }
    }

    /// The build in use where nobody names one: the last that was chosen and is usable, else the newest; `None` if there is none. A file of
    /// choices that cannot be understood keeps no server down: the newest is taken.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn in_use(&self) -> Result<Option<Provenance>> {
        let choices = self.choices().unwrap_or_default();
        if let Some(build) = choices.chosen.iter().rev().find_map(|one| self.show(&one.build).ok()) {
            return Ok(Some(build));
        }
        let mut all = self.list()?.builds;
        let sound = all.iter().position(|build| choices.rejected(&build.id).is_none());
        // One that was found worse is better than none.
        Ok(if all.is_empty() { None } else { Some(all.swap_remove(sound.unwrap_or(0))) })
    }

    /// Brings a build in. The one that was chosen before it becomes the way back.
    ///
    /// # Errors
    /// There is no such build, or the file of choices cannot be read or written.
    pub fn choose(&self, build: &BuildId, why: &str) -> Result<()> {
        self.choose_as(build, why, None)
    }

    /// The same for one whose caller is going to tell everybody: until [`Store::moved`] the next one can see that it has to be seen through.
    ///
    /// # Errors
    /// As for [`Store::choose`].
    pub fn bring_in(&self, build: &BuildId, why: &str) -> Result<()> {
        self.choose_as(build, why, Some(&Move { build: build.clone(), back: false }))
    }

    fn choose_as(&self, build: &BuildId, why: &str, moving: Option<&Move>) -> Result<()> {
        self.show(build)?;
        let _lock = self.lock()?;
        let mut choices = self.choices()?;
        if choices.chosen.last().is_none_or(|last| last.build != *build || last.held) {
            // An earlier choice of the same build would be a way back to itself.
            choices.chosen.retain(|one| one.build != *build);
            choices.chosen.push(decided(build, why));
        }
        choices.rejected.retain(|one| one.build != *build);
        // First: one that comes to nothing is seen not to be the build in use.
        self.write_move(moving)?;
        self.write_choices(choices)
    }

    /// Why a build would not take the place of the one in use by being made; `None` if it is in use, or continues its
    /// line.
    ///
    /// # Errors
    /// There is no such build, or the store cannot be read.
    pub fn no_successor(&self, build: &BuildId) -> Result<Option<NoSuccessor>> {
        let new = self.show(build)?;
        let in_use = self.in_use()?.filter(|in_use| in_use.id != *build);
        Ok(in_use.and_then(|in_use| succeeds(&in_use.plan, &new.plan).err()))
    }

    /// After a build was made, `before` being in use until then: holds that one if the new one does not succeed it. The
    /// caller has the lock.
    pub(super) fn settle(&self, before: Option<Provenance>, new: &Provenance) -> Result<()> {
        let Some(before) = before.filter(|before| before.id != new.id) else { return Ok(()) };
        // A file that cannot be understood is told of where something is chosen.
        let Ok(mut choices) = self.choices() else { return Ok(()) };
        if choices.rejected(&new.id).is_some() {
            return Ok(());
        }
        let held = match (choices.chosen.last(), succeeds(&before.plan, &new.plan)) {
            (None, Err(why)) => (&before.id, format!("it was in use when build {} was made: {why}", new.id)),
            (Some(last), Ok(())) if last.held && last.build == before.id => {
                (&new.id, format!("it was made after build {}, which was in use", before.id))
            }
            _ => return Ok(()),
        };
        let (build, why) = held;
        choices.chosen.retain(|one| one.build != *build);
        choices.chosen.push(Decided { held: true, ..decided(build, &why) });
        self.write_choices(choices)
    }

    /// Goes back from `left`, the build in use, to the one before it, and remembers that everybody is to be told. `left` is rejected if it is
    /// said why. The build that is in use then: if another than `left` was chosen meanwhile, that one.
    ///
    /// # Errors
    /// There is no usable build before it, or the file of choices cannot be read or written.
    pub fn go_back(&self, left: &BuildId, why: Option<&str>) -> Result<BuildId> {
        let _lock = self.lock()?;
        let mut choices = self.choices()?;
        let back = self.step_back(&mut choices, left)?;
        if let Some(why) = why {
            choices.rejected.retain(|one| one.build != *left);
            choices.rejected.push(decided(left, why));
        }
        self.write_move(Some(&Move { build: left.clone(), back: true }))?;
        self.write_choices(choices)?;
        Ok(back)
    }

    /// The build to which [`Self::go_back`] from `left` would return. Changes nothing.
    ///
    /// # Errors
    /// There is no usable build before it, or the file of choices cannot be read.
    pub fn build_before(&self, left: &BuildId) -> Result<BuildId> {
        self.step_back(&mut self.choices()?, left)
    }

    /// Drops the choices that come after the last usable build other than `left`, and returns that build.
    fn step_back(&self, choices: &mut Choices, left: &BuildId) -> Result<BuildId> {
        let usable = |one: &Decided| self.show(&one.build).is_ok();
        let last = choices.chosen.iter().rposition(usable);
        match last.map(|last| choices.chosen[last].build.clone()) {
            Some(other) if other != *left => Ok(other),
            _ => {
                let before = last.and_then(|last| choices.chosen[..last].iter().rposition(usable));
                let before = before.ok_or_else(|| Error::NoWayBack { store: self.root.clone() })?;
                choices.chosen.truncate(before + 1);
                Ok(choices.chosen[before].build.clone())
            }
        }
    }

    /// A build that is brought in or taken back and was not seen through, if there is one. A file that cannot be understood is none.
    pub fn moving(&self) -> Option<Move> {
        let moving: Move = serde_json::from_slice(&fs::read(self.move_path()).ok()?).ok()?;
        let in_use = self.in_use().ok()??.id;
        // One that is brought in is in use; one that is taken back is not any more.
        (moving.back != (moving.build == in_use)).then_some(moving)
    }

    /// Everybody runs what he is to run.
    ///
    /// # Errors
    /// The file cannot be removed.
    pub fn moved(&self) -> Result<()> {
        let _lock = self.lock()?;
        self.write_move(None)
    }

    fn move_path(&self) -> PathBuf {
        self.root.join(MOVE)
    }

    fn write_move(&self, moving: Option<&Move>) -> Result<()> {
        let path = self.move_path();
        let write = || match moving {
            Some(moving) => whole::write(&path, &serde_json::to_vec(moving)?, Loss::Final),
            None => match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
                _ => Ok(()),
            },
        };
        write().map_err(io_error("writing", &path))
    }

    /// Remembers that a build was found worse.
    ///
    /// # Errors
    /// The file of choices cannot be read or written.
    pub fn reject(&self, build: &BuildId, why: &str) -> Result<()> {
        let _lock = self.lock()?;
        let mut choices = self.choices()?;
        choices.rejected.retain(|one| one.build != *build);
        choices.rejected.push(decided(build, why));
        // One that was chosen once, removed, and built again.
        choices.chosen.retain(|one| one.build != *build);
        self.write_choices(choices)
    }

    /// The builds that are in use or the way back: nobody removes them by age.
    pub fn kept_by_choice(&self) -> Vec<BuildId> {
        let choices = self.choices().unwrap_or_default();
        let usable = choices.chosen.into_iter().rev().filter(|one| self.show(&one.build).is_ok());
        usable.take(2).map(|one| one.build).collect()
    }

    fn write_choices(&self, mut choices: Choices) -> Result<()> {
        for list in [&mut choices.chosen, &mut choices.rejected] {
            let old = list.len().saturating_sub(REMEMBERED);
            list.drain(..old);
        }
        let path = self.root.join(CHOSEN);
        let write = || {
            let mut text = serde_json::to_vec_pretty(&choices)?;
            text.push(b'\n');
            whole::write(&path, &text, Loss::Final)
        };
        write().map_err(io_error("writing", &path))
    }
}

fn decided(build: &BuildId, why: &str) -> Decided {
    Decided { build: build.clone(), at: clock::now(), why: why.to_owned(), held: false }
}
