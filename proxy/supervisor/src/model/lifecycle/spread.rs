//! Applies a setting that a client made in one process to the model's other processes, and to new ones
//! before they serve.
//!
//! ```text
//!     client ── POST /lora-adapters ──> replica 0     stored ──> replica 1, 2, …      (at once)
//!                                                       └──────> the next generation  (before its gate opens)
//! ```
//!
//! For a moment after the client's answer, some replicas lack the setting. A lock over all processes would
//! prevent that, but delay every request.

use std::sync::Arc;
use std::time::Duration;

use warden_policies::lifecycle::BackendPhase;

use crate::lease::queue::LeaseQueue;
use crate::model::message::{HelperReport, TaskMail};
use crate::model::unit::UnitList;
use crate::process::BackendProcess;
use crate::process::settings::{ClientSetting, ClientSettings};

/// Limit of rounds for settings that change while they are applied.
const MAX_SETTING_ROUNDS: usize = 8;

impl UnitList {
    pub(crate) fn spread_settings(&self, leases: &Arc<LeaseQueue>, timeout: Duration, mail: &mut TaskMail) {
        for (from, path) in leases.settings.take_fresh() {
            for unit in &self.all {
                let Some(live) = unit.live.as_ref().filter(|live| live.id != from) else { continue };
                let Some(process) = live.child.process.clone() else { continue };
                // A starting process gets the settings before its gate opens. Its last probe may just have
                // ended, so apply them here too, but ignore failures.
                let counts = unit.phase() != BackendPhase::Starting;
                let leases = Arc::clone(leases);
                let path = path.clone();
                mail.spawn_helper(live.id, async move {
                    let is_wanted = |setting: &ClientSetting| setting.path == path;
                    let unset = apply_settings(process.as_ref(), &leases.settings, timeout, is_wanted).await;
                    let told = unset.into_iter().filter(|_| counts).map(|(path, why)| {
                        format!(
                            "what was set by `POST {path}` is not set in another process of the model: {why}; set it \
                             again"
                        )
                    });
                    HelperReport::SettingsFailed(told.collect())
                });
            }
        }
    }
}

/// Applies all settings before a process serves. Returns descriptions of failures.
pub(crate) async fn apply_all_settings(
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

/// Applies selected settings, and newer ones that arrive. Returns route and error of failed ones.
async fn apply_settings(
    process: &dyn BackendProcess,
    settings: &ClientSettings,
    timeout: Duration,
    wanted: impl Fn(&ClientSetting) -> bool,
) -> Vec<(String, String)> {
    let mut done = Vec::<ClientSetting>::new();
    let mut unset = Vec::new();
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
