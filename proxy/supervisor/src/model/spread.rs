//! What a client has set in one process is set in the model's others, and in a new one before anybody uses that.
//!
//! ```text
//!   client ── POST /lora-adapters ──> replica 0        kept ──> replica 1, 2, …        (at once)
//!                                                          └──> the next generation    (before its gate opens)
//! ```
//!
//! Between the answer to the client and the end of the second step another client may still meet a replica that lacks it: one
//! lock over all processes would make every request wait for a setting.

use std::sync::Arc;
use std::time::Duration;

use warden_policies::GenerationId;
use warden_policies::lifecycle::Phase;

use super::{Model, Report};
use crate::lease::queue::Leases;
use crate::process::Process;
use crate::process::settings::{Setting, Settings};

/// Rounds for what is set while other things are: more only where somebody sets things all the time.
const ROUNDS: usize = 8;

impl Model {
    /// Sets in the other processes what was set in one.
    pub(super) fn spread_settings(&mut self) {
        let timeout = self.spec.lifecycle.probe_timeout;
        for (from, path) in self.leases.settings.take_fresh() {
            let others: Vec<(GenerationId, Arc<dyn Process>, bool)> = self
                .units
                .iter()
                .filter_map(|unit| {
                    let live = unit.live.as_ref().filter(|live| live.id != from)?;
                    let process = live.process.clone()?;
                    // One that starts has it set by its probe, unless that has just ended: trying costs nothing.
                    let counts = unit.phase() != Phase::Starting;
                    Some((live.id, process, counts))
                })
                .collect();
            for (generation, process, counts) in others {
                let (leases, path) = (Arc::clone(&self.leases), path.clone());
                self.help(generation, async move {
                    let unset = set(process.as_ref(), &leases.settings, timeout, |setting| setting.path == path).await;
                    let told = unset.into_iter().filter(|_| counts);
                    Report::Unset(told.map(|(path, why)| {
                        format!("what was set by `POST {path}` is not set in another process of the model: {why}; set it again")
                    }).collect())
                });
            }
        }
    }
}

/// Sets everything in a process that is about to be used; what could not be set, in words.
pub(super) async fn set_all(process: &dyn Process, leases: &Leases, timeout: Duration) -> Vec<String> {
    let unset = set(process, &leases.settings, timeout, |_| true).await;
    let told = unset.into_iter().map(|(path, why)| {
        format!("what was set by `POST {path}` is not set in the process that follows: {why}; set it again")
    });
    told.collect()
}

/// Sets what is wanted, until nothing newer has come meanwhile. What could not be set, by its route, and why.
async fn set(
    process: &dyn Process,
    settings: &Settings,
    timeout: Duration,
    wanted: impl Fn(&Setting) -> bool,
) -> Vec<(String, String)> {
    let (mut done, mut unset) = (Vec::<Setting>::new(), Vec::new());
    for _ in 0..ROUNDS {
        let all = settings.all().into_iter().filter(|setting| wanted(setting) && !done.contains(setting));
        let missing: Vec<Setting> = all.collect();
        if missing.is_empty() {
            break;
        }
        for setting in missing {
            let path = setting.path.clone();
            done.retain(|known| known.path != path);
            unset.retain(|(known, _)| *known != path);
            done.push(setting.clone());
            if let Err(why) = process.set(setting, timeout).await {
                unset.push((path, why));
            }
        }
    }
    unset
}
