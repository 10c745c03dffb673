//! Records which conversations are being restored, in a marker file that survives a crash of this program. If
//! two processes die during the restore, one of the conversations may be the cause, and all of them are removed.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{StoredConversations, remove_conversation, run_in_background};
use crate::process::conversation_name::ConversationName;
use crate::process::regular_file;

const MARKER_PREFIX: &str = "restoring-";
const MAX_BYTES: u64 = 1 << 16;
const MAX_ATTEMPTS: u32 = 2;

#[derive(Debug, Default, Serialize, Deserialize)]
struct RestoreAttempts {
    attempts: u32,
    slot_files: Vec<String>,
}

impl StoredConversations {
    fn marker(&self, replica: u32) -> PathBuf {
        self.directory.join(format!("{MARKER_PREFIX}{replica}"))
    }

    fn read_marker(&self, replica: u32) -> Option<RestoreAttempts> {
        let file = regular_file::open_unlinked(&self.marker(replica)).ok()?;
        serde_json::from_slice(&regular_file::read_bounded(file, MAX_BYTES).ok()?).ok()
    }

    /// Removes conversations during whose restore processes died.
    pub(super) fn remove_suspects(&self, replica: u32) {
        let Some(marker) = self.read_marker(replica).filter(|marker| marker.attempts >= MAX_ATTEMPTS) else {
            return;
        };
        tracing::warn!(
            directory = %self.directory.display(),
            "processes died while these conversations were restored; the conversations are removed: {}",
            marker.slot_files.join(", ")
        );
        let names = marker.slot_files.iter().filter_map(|file| ConversationName::of_part(Path::new(file)));
        names.for_each(|name| remove_conversation(&self.directory, &name));
        drop(fs::remove_file(self.marker(replica)));
    }

    /// Notes that the conversations with these slot files are about to be restored.
    pub(super) fn note_restoring<'a>(&self, replica: u32, slots: impl Iterator<Item = &'a (String, u64)>) {
        let slot_files: Vec<String> = slots.map(|(file, _)| file.clone()).collect();
        if slot_files.is_empty() {
            return;
        }
        let before = self.read_marker(replica).unwrap_or_default();
        let marker = RestoreAttempts { attempts: before.attempts + 1, slot_files };
        let written = serde_json::to_vec(&marker).map_err(std::io::Error::other);
        if let Err(error) = written.and_then(|json| fs::write(self.marker(replica), json)) {
            tracing::warn!(%error, "cannot write a marker: a crash during this restore is not counted");
        }
    }

    /// Removes the marker in the background: the process is ready, or this program has stopped it.
    pub(crate) fn note_restored(self: &Arc<Self>, replica: u32) {
        let marker = self.marker(replica);
        run_in_background(move || drop(fs::remove_file(marker)));
    }
}

pub(super) fn is_marker(file: &Path) -> bool {
    file.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with(MARKER_PREFIX))
}
