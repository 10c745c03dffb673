//! Models that come and go in folders: they are looked at now and then, and what has changed is taken over like a new configuration.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use tokio::time::Instant;

use crate::config::model_files::Stamp;
use crate::config::source::folder;

/// All files of all folders.
type Files = BTreeMap<PathBuf, Stamp>;

/// Watches folders.
pub(super) struct Folders {
    dirs: Vec<PathBuf>,
    every: Duration,
    /// When they are looked at next.
    next: Instant,
    /// As they were when they were taken over.
    taken: Files,
    /// As they were when they were looked at last.
    seen: Files,
}

impl Folders {
    /// What was read of the folders just now is taken over.
    pub(super) async fn new(dirs: Vec<PathBuf>, every: Duration) -> Self {
        let taken = look(dirs.clone()).await.unwrap_or_default();
        Self { dirs, every, next: Instant::now() + every, seen: taken.clone(), taken }
    }

    /// Resolves when models have come or gone, and the folders have come to rest: a file that is being written is not whole yet.
    pub(super) async fn changed(&mut self) {
        if self.dirs.is_empty() {
            return std::future::pending().await;
        }
        loop {
            tokio::time::sleep_until(self.next).await;
            // What cannot be read now says nothing of what is there.
            let now = look(self.dirs.clone()).await;
            self.next = Instant::now() + self.every;
            let Some(now) = now else { continue };
            let rests = now == self.seen;
            self.seen = now;
            if rests && self.seen != self.taken {
                self.taken = self.seen.clone();
                return;
            }
        }
    }

    /// The folders from now on.
    pub(super) fn set(&mut self, dirs: &[PathBuf]) {
        if self.dirs != dirs {
            self.dirs = dirs.to_vec();
            // Looked at anew: at worst one reload that changes nothing.
            (self.taken, self.seen) = (Files::new(), Files::new());
        }
    }
}

async fn look(dirs: Vec<PathBuf>) -> Option<Files> {
    // Disks may hang, and then nothing changes.
    tokio::task::spawn_blocking(move || folder::files(&dirs).ok()).await.ok()?
}
