//! Applies a setting that a client made in one process to the model's other processes, and to new ones
//! before they serve.
//!
//! ```text
//!     client ── POST /lora-adapters ──> replica 0     stored ──> replica 1, 2, …      (at once)
//!                                                       └──────> the next generation  (before its gate opens)
//! ```
//!
//! Between the answer to the client and the last replica's update another client may meet a replica without
//! the setting. A lock over all processes would make every request wait for a setting.

use std::sync::Arc;
use std::time::Duration;

use warden_policies::GenerationId;
use warden_policies::lifecycle::BackendPhase;

use super::{HelperReport, ModelTask};
use crate::lease::queue::LeaseQueue;
use crate::process::BackendProcess;
use crate::process::settings::{ClientSetting, ClientSettings};

/// Limit of rounds for settings that change meanwhile. More are needed only if clients change settings all
/// the time.
const MAX_SETTING_ROUNDS: usize = 8;

impl ModelTask {
    /// Applies new settings to the other processes.
    pub(super) fn spread_settings(&mut self) {
        let timeout = self.spec.lifecycle.probe_timeout;
        for (from, path) in self.leases.settings.take_fresh() {
            let others: Vec<(GenerationId, Arc<dyn BackendProcess>, bool)> = self
                .units
                .iter()
                .filter_map(|unit| {
                    let live = unit.live.as_ref().filter(|live| live.id != from)?;
                    let process = live.process.clone()?;
                    // The probe of a starting process applies the setting, unless it has just ended; trying
                    // again does no harm.
                    let counts = unit.phase() != BackendPhase::Starting;
                    Some((live.id, process, counts))
                })
                .collect();
            for (generation, process, counts) in others {
                let (leases, path) = (Arc::clone(&self.leases), path.clone());
                self.spawn_helper(generation, async move {
                    let unset = apply_settings(process.as_ref(), &leases.settings, timeout, |setting| setting.path == path).await;
                    let told = unset.into_iter().filter(|_| counts);
                    HelperReport::SettingsFailed(told.map(|(path, why)| {
                        format!("what was set by `POST {path}` is not set in another process of the model: {why}; set it again")
                    }).collect())
                });
            }
        }
    }
}

/// Applies all settings to a process before it serves. Returns descriptions of those that failed.
pub(super) async fn apply_all_settings(
    process: &dyn BackendProcess,
    leases: &LeaseQueue,
    timeout: Duration,
) -> Vec<String> {
    let unset = apply_settings(process, &leases.settings, timeout, |_| true).await;
    let told = unset.into_iter().map(|(path, why)| {
        format!("what was set by `POST {path}` is not set in the process that follows: {why}; set it again")
    });
    told.collect()
}

/// Applies selected settings until no newer ones have come meanwhile. Returns routes and reasons of those
/// that failed.
async fn apply_settings(
    process: &dyn BackendProcess,
    settings: &ClientSettings,
    timeout: Duration,
    wanted: impl Fn(&ClientSetting) -> bool,
) -> Vec<(String, String)> {
    let (mut done, mut unset) = (Vec::<ClientSetting>::new(), Vec::new());
    for _ in 0..MAX_SETTING_ROUNDS {
        let all = settings.all().into_iter().filter(|setting| wanted(setting) && !done.contains(setting));
        let missing: Vec<ClientSetting> = all.collect();
        if missing.is_empty() {
            break;
        }
        for setting in missing {
            let path = setting.path.clone();
            done.retain(|known| known.path != path);
            unset.retain(|(known, _)| *known != path);
            done.push(setting.clone());
            if let Err(why) = process.apply_setting(setting, timeout).await {
                unset.push((path, why));
            }
        }
    }
    unset
}
