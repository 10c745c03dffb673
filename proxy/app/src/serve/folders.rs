//! Watches folders of models: reads them at intervals, and reports changes, which are applied like a changed
//! configuration.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use warden_config::model_files::ModelFileStamp;
use warden_config::source::folder;
use warden_supervisor::{PendingWork, WorkKind, run_job};

type FolderFiles = BTreeMap<PathBuf, ModelFileStamp>;

/// Function that reads folders; returns `None` if they cannot be read.
type FolderReader = Arc<dyn Fn(&[PathBuf]) -> Option<FolderFiles> + Send + Sync>;

pub(super) struct FolderWatch {
    dirs: Vec<PathBuf>,
    look: FolderReader,
    every: Duration,
    next: Instant,
    /// A read in progress. While it hangs, no second read is started.
    looking: Option<PendingWork<Option<FolderFiles>>>,
    /// Files when they were last applied.
    applied: FolderFiles,
    last_read: FolderFiles,
}

impl FolderWatch {
    /// Creates the watch. The current content counts as applied.
    pub(super) async fn new(dirs: Vec<PathBuf>, every: Duration) -> Self {
        Self::with_reader(dirs, every, Arc::new(|dirs| folder::list_files(dirs).ok())).await
    }

    async fn with_reader(dirs: Vec<PathBuf>, every: Duration, look: FolderReader) -> Self {
        let next = Instant::now() + every;
        let nothing = FolderFiles::new();
        let mut new =
            Self { dirs, look, every, next, looking: None, applied: nothing.clone(), last_read: nothing };
        new.applied = new.start_read().await.ok().flatten().unwrap_or_default();
        Self { next: Instant::now() + every, last_read: new.applied.clone(), ..new }
    }

    /// Resolves when files have changed and are stable, so that no file is used half-written. Cancel-safe.
    pub(super) async fn wait_changed(&mut self) {
        if self.dirs.is_empty() {
            return std::future::pending().await;
        }
        loop {
            tokio::time::sleep_until(self.next).await;
            // A failed read shows nothing about the files.
            let looking = self.looking.take().unwrap_or_else(|| self.start_read());
            let now = self.looking.insert(looking).await.ok().flatten();
            self.looking = None;
            self.next = Instant::now() + self.every;
            let Some(now) = now else { continue };
            let rests = now == self.last_read;
            self.last_read = now;
            if rests && self.last_read != self.applied {
                self.applied = self.last_read.clone();
                return;
            }
        }
    }

    /// Starts a read on another thread. A disk may hang; then no change is reported.
    fn start_read(&self) -> PendingWork<Option<FolderFiles>> {
        let look = self.look.clone();
        let dirs = self.dirs.clone();
        run_job(WorkKind::ModelFiles, move || look(&dirs))
    }

    pub(super) fn set_dirs(&mut self, dirs: &[PathBuf]) {
        if self.dirs != dirs {
            self.dirs = dirs.to_vec();
            self.looking = None;
            // Forget the files: at worst this causes one reload without changes.
            (self.applied, self.last_read) = (FolderFiles::new(), FolderFiles::new());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::time::timeout;

    use super::*;
    use warden_supervisor::sync::lock;

    #[tokio::test]
    #[expect(clippy::await_holding_lock, reason = "nobody waits for it but the look that hangs")]
    async fn a_disk_that_hangs_is_looked_at_once_however_often_the_loop_turns() {
        let (looks, hangs) = (Arc::new(AtomicUsize::new(0)), Arc::new(Mutex::new(())));
        let look: FolderReader = {
            let (looks, hangs) = (looks.clone(), hangs.clone());
            Arc::new(move |_| {
                looks.fetch_add(1, Ordering::SeqCst);
                drop(lock(&hangs));
                Some(FolderFiles::new())
            })
        };
        let every = Duration::from_millis(1);
        let mut folders = FolderWatch::with_reader(vec![PathBuf::from("/models")], every, look).await;
        let looked = |so_far| {
            let looks = looks.clone();
            async move {
                while looks.load(Ordering::SeqCst) < so_far {
                    tokio::task::yield_now().await;
                }
            }
        };
        let hung = lock(&hangs);
        // The future is dropped and polled again and again.
        for _ in 0..20 {
            let turned = timeout(Duration::from_millis(5), folders.wait_changed()).await;
            assert!(turned.is_err(), "nothing has changed");
        }
        looked(2).await;
        assert_eq!(looks.load(Ordering::SeqCst), 2, "the first, and the one that hangs");
        drop(hung);
        tokio::select! {
            () = folders.wait_changed() => panic!("nothing has changed"),
            () = looked(4) => {}
        }
    }
}
