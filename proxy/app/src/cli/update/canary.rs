//! Tries a new build on a share of the conversations of a running instance, before it is brought in.

use reqwest::Method;
use tokio::time::{Instant, sleep};
use warden_builder::BuildId;
use warden_policies::canary::CanaryVerdict;
use warden_policies::defaults::Update;
use warden_supervisor::{CanaryState, CanaryView};

use super::live::LiveInstance;
use crate::exit::CommandError;
use crate::out;
use crate::serve::SignalHandlers;

/// Tries the build with each model of an instance, one after the other. Returns the reason if the build is
/// worse with a model, and notes about the other models. Skips models that cannot have a canary now (no
/// memory, not loaded, another canary).
pub(super) async fn try_canaries(
    live: &LiveInstance,
    build: &BuildId,
    numbers: &Update,
    notes: &mut Vec<String>,
    signals: &mut SignalHandlers,
) -> Result<Option<String>, CommandError> {
    for model in &live.models {
        let path = ["models", model, "canary"];
        let begun =
            live.client.json_with::<CanaryView>(Method::POST, &path, &[("build", build.to_string())]).await;
        let begun = match begun {
            Ok(begun) => begun,
            Err(failure) => match live.client.json::<CanaryView>(Method::GET, &path).await {
                // The canary may have ended already, or an interrupted update may have left one of this
                // build.
                Ok(view) if view.build.as_deref() == Some(build.as_str()) => view,
                _ => {
                    notes.push(format!("`{model}` had no canary: {}", failure.lines().join("; ")));
                    continue;
                }
            },
        };
        out::error_line(&format!("update: {}", crate::cli::canary::summary_line(&begun)));
        let view = tokio::select! {
            view = wait_for_end(live, &path, numbers) => view?,
            () = signals.wait_leave() => {
                drop(live.client.json::<CanaryView>(Method::DELETE, &path).await);
                return Err(CommandError::INTERRUPTED);
            }
        };
        let requests = view.report.canary.requests;
        match view.verdict {
            CanaryVerdict::Worse { reasons } => {
                return Ok(Some(format!(
                    "canary of `{model}` after {requests} requests: {}",
                    reasons.join("; ")
                )));
            }
            CanaryVerdict::BetterOrEqual => {
                notes.push(format!("`{model}`: as good on {requests} requests of clients"));
            }
            CanaryVerdict::Undecided { missing } => {
                notes.push(format!(
                    "`{model}`: not worse on {requests} requests of clients ({})",
                    missing.join("; ")
                ));
            }
        }
    }
    Ok(None)
}

/// Waits until a canary has ended, or ends it after the time limit.
async fn wait_for_end(
    live: &LiveInstance,
    path: &[&str],
    numbers: &Update,
) -> Result<CanaryView, CommandError> {
    let until = Instant::now() + numbers.canary;
    loop {
        // Ignore a lost answer: it does not end the canary.
        if let Ok(view) = live.client.json::<CanaryView>(Method::GET, path).await
            && view.state == CanaryState::Ended
        {
            return Ok(view);
        }
        if Instant::now() >= until {
            return live.client.json(Method::DELETE, path).await;
        }
        sleep(numbers.look).await;
    }
}
