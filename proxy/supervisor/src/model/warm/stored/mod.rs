//! Conversations of a model on disk (`warm = "disk"`). They outlive its processes, this program and reboots.
//!
//! ```text
//!     process ends: drained -- save prompts -- pack -- attach slots -- TERM
//!     next process: ready -- load -- unpack -- gate opens
//! ```
//!
//! Each conversation has up to three files in a directory of its model, which only our user can enter:
//!
//! ```text
//!   NAME.json               last request with its answer, and checksums of the other files
//!   NAME.slot               state of its slot, if the process could save the slot
//!   NAME.slot.checkpoints   checkpoints of the slot, with the fix `slot-checkpoints`
//! ```
//!
//! A conversation is removed when a later version has its slot on disk, when it is too old, damaged or beyond
//! the bytes, when it has no slot and is older than `warm_away`, or after two deaths during its restore. A
//! conversation that one process cannot use is kept, because the next process may be able to.
//!
//! | file | job |
//! |---|---|
//! | `record` | content of the JSON file, and checksums |
//! | `restoring` | remembers conversations that may have killed a process |
//! | `save` | saves the conversations of an ending process |

mod record;
mod restoring;
pub(crate) mod save;

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sha2::{Digest as _, Sha256};
use tokio::time::Instant;
use warden_policies::modes::WarmMode;
use warden_policies::{GenerationId, ModelName};

use self::record::ConversationRecord;
use crate::clock;
use crate::lease::turns::{KeptConversation, StoredAs};
use crate::process::conversation_name::{ConversationName, RECORD_SUFFIX};
use crate::process::directories::file_safe_name;
use crate::process::needs::AnswerIdentity;
use crate::process::regular_file;
use crate::process::slot_files::{self, FILE_SUFFIX};
use crate::sync::lock;
use crate::worker_threads::{WorkKind, run_detached};

/// Another instance may still be writing younger incomplete files.
const INCOMPLETE_FOR: Duration = Duration::from_secs(3600);

const MAX_CLOCK_LEAD_MS: u64 = 3_600_000;

/// Conversations of one model on disk.
#[derive(Debug)]
pub(crate) struct StoredConversations {
    directory: PathBuf,
    /// True if the conversations were removed and no more may be saved. Locked while files are written.
    is_closed: Mutex<bool>,
}

/// Bounds of a model's conversations on disk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StoreLimits {
    pub(crate) bytes: u64,
    pub(crate) age: Duration,
    /// Greatest age at which a prompt is evaluated again. Older conversations are loaded only with a usable
    /// slot, and removed if they have no slot file.
    pub(crate) fresh_for: Duration,
}

/// Conversations on disk for a new process.
#[derive(Debug)]
pub(crate) struct StoredSource {
    pub(crate) store: Arc<StoredConversations>,
    pub(crate) replica: u32,
    pub(crate) replicas: u32,
    pub(crate) limits: StoreLimits,
}

/// What a new process can use of its model's conversations.
#[derive(Clone, Debug)]
pub(crate) struct LoadQuery {
    pub(crate) replica: u32,
    pub(crate) replicas: u32,
    /// Number of slots; at most one conversation is restored in each.
    pub(crate) slots: u32,
    /// Identity of the process; `None` if unknown, so that it can use no slot file.
    pub(crate) kin: Option<AnswerIdentity>,
    pub(crate) limits: StoreLimits,
    /// Time limit for reading slot files.
    pub(crate) deadline: Instant,
}

/// A conversation read from disk.
#[derive(Debug)]
pub(crate) struct StoredConversation {
    pub(crate) conversation: Arc<KeptConversation>,
    /// Name of an undamaged slot file that the process can use, and its number of tokens.
    pub(crate) slot: Option<(String, u64)>,
}

/// Generation under which conversations from disk wait for the replica's next process.
pub(crate) fn stored_generation(replica: u32) -> GenerationId {
    GenerationId(u64::MAX - u64::from(replica))
}

impl StoredConversations {
    /// `parent`: directory with the conversations of all models.
    pub(crate) fn new(parent: &Path, model: &ModelName) -> Self {
        Self { directory: parent.join(directory_name(model)), is_closed: Mutex::default() }
    }

    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Reads the latest conversations of a replica, latest first. Blocks.
    pub(crate) fn load(&self, query: &LoadQuery) -> Vec<StoredConversation> {
        self.remove_suspects(query.replica);
        let now = clock::unix_now_ms();
        let mut all: Vec<StoredConversation> = Vec::new();
        for name in self.names().into_iter().rev() {
            if all.len() as u64 >= u64::from(query.slots) {
                break;
            }
            if name.replica % query.replicas.max(1) != query.replica || query.limits.is_old(&name, now) {
                continue;
            }
            let Some(record) = self.read_record(&name) else { continue };
            let slot = record.slot.clone().filter(|slot| Some(slot.kin) == query.kin);
            let is_fresh = now.saturating_sub(name.saved) < clock::millis(query.limits.fresh_for);
            let stored_as = slot.as_ref().map(|slot| StoredAs::new(name.clone(), slot.kin));
            let conversation = KeptConversation::from_disk(record.into_turn(), stored_as, name.clone());
            if let Some(newer) = all.iter().find(|newer| newer.conversation.continues(&conversation)) {
                // Without its slot, the later version might be of no use to the next process.
                if newer.slot.is_some() {
                    self.remove(&name);
                }
                continue;
            }
            let file = slot_file(&name);
            let slot = slot.and_then(|slot| {
                match slot.is_intact(&self.directory, &file, query.deadline) {
                    Ok(true) => return Some((file, slot.tokens)),
                    Ok(false) => {
                        tracing::warn!(file, "a slot file is damaged; its conversation is removed from disk");
                        self.remove(&name);
                    }
                    Err(error) => tracing::warn!(file, %error, "cannot read a slot file; it is not restored"),
                }
                None
            });
            if slot.is_some() || is_fresh {
                all.push(StoredConversation { conversation: Arc::new(conversation), slot });
            }
        }
        self.note_restoring(query.replica, all.iter().filter_map(|stored| stored.slot.as_ref()));
        all
    }

    /// Returns `None` if the record cannot be read. Removes damaged records.
    fn read_record(&self, name: &ConversationName) -> Option<ConversationRecord> {
        let file = record_file(name);
        let limit = warden_policies::defaults().warmth.kept_bytes.0.saturating_mul(2);
        let read = regular_file::open_unlinked(&self.directory.join(&file))
            .and_then(|open| regular_file::read_bounded(open, limit));
        let json = match read {
            Ok(json) => json,
            Err(error) => {
                tracing::warn!(file, %error, "a conversation on disk cannot be read");
                return None;
            }
        };
        let record = ConversationRecord::parse(&json);
        if record.is_none() {
            tracing::warn!(file, "a conversation on disk is damaged or of another version, and is removed");
            self.remove(name);
        }
        record
    }

    /// Writes a record. It has mode 0600, and no other process sees half of it.
    fn write_record(&self, name: &ConversationName, record: &ConversationRecord) -> io::Result<u64> {
        let bytes = serde_json::to_vec(record)?;
        let path = self.directory.join(record_file(name));
        let draft = self.directory.join(format!("{}.tmp", record_file(name)));
        let write = || {
            let mut file = fs::File::options().write(true).create_new(true).mode(0o600).open(&draft)?;
            io::Write::write_all(&mut file, &bytes)?;
            fs::rename(&draft, &path)
        };
        write().inspect_err(|_| drop(fs::remove_file(&draft)))?;
        Ok(bytes.len() as u64)
    }

    /// Removes old conversations, and those beyond the limits, in the background.
    pub(crate) fn begin_sweep(self: &Arc<Self>, limits: StoreLimits) {
        let store = Arc::clone(self);
        run_in_background(move || store.remove_excess(limits));
    }

    /// Removes all conversations of the model in the background, and lets none be saved any more.
    pub(crate) fn begin_removal(self: &Arc<Self>) {
        let store = Arc::clone(self);
        run_in_background(move || {
            let mut is_closed = lock(&store.is_closed);
            *is_closed = true;
            remove_all(&store.directory);
        });
    }

    /// Names of all complete conversations, earliest first.
    fn names(&self) -> Vec<ConversationName> {
        conversation_names(&self.directory)
    }

    fn remove(&self, name: &ConversationName) {
        remove_conversation(&self.directory, name);
    }

    /// Removes conversations that are too old. Keeps the latest of the others that fit into the bytes.
    fn remove_excess(&self, limits: StoreLimits) {
        let now = clock::unix_now_ms();
        remove_leftovers(&self.directory);
        let mut bytes = 0_u64;
        for name in self.names().into_iter().rev() {
            let sizes = part_files(&name).map(|file| fs::symlink_metadata(self.directory.join(file)));
            let size: u64 = sizes.into_iter().flatten().map(|facts| facts.len()).sum();
            let without_slot = !self.directory.join(slot_file(&name)).exists();
            let is_useless = without_slot && now.saturating_sub(name.saved) > clock::millis(limits.fresh_for);
            if limits.is_old(&name, now) || is_useless || bytes.saturating_add(size) > limits.bytes {
                self.remove(&name);
            } else {
                bytes = bytes.saturating_add(size);
            }
        }
    }
}

impl StoreLimits {
    fn is_old(&self, name: &ConversationName, now: u64) -> bool {
        // A time in the future was written by a clock that was wrong.
        name.saved > now.saturating_add(MAX_CLOCK_LEAD_MS)
            || name.saved.saturating_add(clock::millis(self.age)) <= now
    }
}

/// Removes, in the background, all conversations of models whose `warm` is not `"disk"`, and the expired
/// conversations of models that are not configured. `parent`: directory with all models.
pub(crate) fn begin_general_sweep<'a>(
    parent: &Path,
    models: impl Iterator<Item = (&'a ModelName, WarmMode)>,
) {
    let parent = parent.to_owned();
    let by_directory: BTreeMap<PathBuf, WarmMode> =
        models.map(|(model, mode)| (parent.join(directory_name(model)), mode)).collect();
    run_in_background(move || {
        let now = clock::unix_now_ms();
        for entry in fs::read_dir(&parent).into_iter().flatten().flatten() {
            if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                continue;
            }
            let path = entry.path();
            match by_directory.get(&path) {
                // The model's task removes old conversations.
                Some(WarmMode::Disk) => {}
                Some(WarmMode::Auto | WarmMode::Off) => remove_all(&path),
                None => {
                    // Another configuration that uses the same directory may have the model.
                    let names = conversation_names(&path);
                    names
                        .iter()
                        .filter(|name| name.until <= now)
                        .for_each(|name| remove_conversation(&path, name));
                    remove_leftovers(&path);
                    // Fails if conversations are left.
                    drop(fs::remove_dir(&path));
                }
            }
        }
    });
}

fn run_in_background(job: impl FnOnce() + Send + 'static) {
    if let Err(error) = run_detached(WorkKind::Conversations, job) {
        tracing::warn!(%error, "cannot clean up conversations on disk now");
    }
}

/// Removes all conversations of a directory, and the directory. Slot files that a running process saves for
/// its successor stay.
fn remove_all(directory: &Path) {
    for name in conversation_names(directory) {
        remove_conversation(directory, &name);
    }
    let parts = files_in(directory).into_iter().filter(|file| ConversationName::of_part(file).is_some());
    let markers = files_in(directory).into_iter().filter(|file| restoring::is_marker(file));
    parts.chain(markers).for_each(|file| drop(fs::remove_file(file)));
    slot_files::sweep_directory(directory);
    // Fails if other files are there.
    drop(fs::remove_dir(directory));
}

/// Removes files of killed processes and instances.
fn remove_leftovers(directory: &Path) {
    let is_complete = |name: &ConversationName| directory.join(record_file(name)).exists();
    for file in files_in(directory) {
        let is_part = ConversationName::of_part(&file).is_some_and(|name| !is_complete(&name));
        let is_slot = file.file_name().and_then(|name| name.to_str()).is_some_and(slot_files::is_slot_file);
        if (is_part || is_slot) && is_older(&file, INCOMPLETE_FOR) {
            drop(fs::remove_file(file));
        }
    }
}

/// Names of all complete conversations of a directory, earliest first.
fn conversation_names(directory: &Path) -> Vec<ConversationName> {
    let files = files_in(directory);
    let mut names: Vec<ConversationName> =
        files.iter().filter_map(|file| ConversationName::of_record(file)).collect();
    names.sort();
    names
}

/// Removes the record first: files without one are incomplete.
fn remove_conversation(directory: &Path, name: &ConversationName) {
    for file in part_files(name) {
        drop(fs::remove_file(directory.join(file)));
    }
}

fn part_files(name: &ConversationName) -> [String; 3] {
    let slot = slot_file(name);
    [record_file(name), slot_files::checkpoint_name(&slot), slot]
}

fn record_file(name: &ConversationName) -> String {
    format!("{name}{RECORD_SUFFIX}")
}

fn slot_file(name: &ConversationName) -> String {
    format!("{name}{FILE_SUFFIX}")
}

fn files_in(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let is_file = |entry: &fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_file());
    entries.filter(is_file).map(|entry| entry.path()).collect()
}

fn is_older(file: &Path, age: Duration) -> bool {
    let Ok(facts) = fs::symlink_metadata(file) else { return false };
    let modified_ms = u64::try_from(facts.mtime()).unwrap_or(0).saturating_mul(1000);
    clock::unix_now_ms().saturating_sub(modified_ms) > clock::millis(age)
}

/// Directory name of a model: the readable part of its name, and a hash of the whole name.
fn directory_name(model: &ModelName) -> String {
    const MAX_CHARS: usize = 40;
    let readable = file_safe_name(model.as_str(), MAX_CHARS);
    let hash = Sha256::digest(model.as_str().as_bytes());
    format!("{}-{}", readable.trim_start_matches('.'), hex::encode(&hash[..4]))
}

#[cfg(test)]
mod tests;
