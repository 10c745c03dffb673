//! Detects a starting process that makes no progress.

use std::time::Duration;

use tokio::time::Instant;
use warden_policies::standstill::StandstillWatch;

use super::BackendProcess;

/// Resolves when the process has made no progress for `limit`. The future may be dropped.
pub(crate) async fn until_stalled(process: &dyn BackendProcess, limit: Duration) {
    let (began, mut watch) = (Instant::now(), StandstillWatch::new(limit));
    loop {
        tokio::time::sleep(watch.pause()).await;
        let effort = process.read_effort().await;
        if watch.is_stalled(began.elapsed(), effort) {
            return;
        }
    }
}
