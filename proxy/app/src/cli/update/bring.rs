//! Brings a build into use or back: makes it the default, reloads every instance, watches the instances, and
//! rolls back.

use std::path::PathBuf;
use std::time::Duration;

use warden_builder::{BuildId, BuildMove, BuildStore};

use super::told::{UpdateOutcome, UpdateReport};
use super::{RollbackArgs, UpdateRun, bound_models, live, lock_updates, resolve_configured};
use crate::exit::CommandError;
use crate::out;
use crate::serve::SignalHandlers;

/// Windows of the day open and close on the minute.
const WINDOW_POLL_INTERVAL: Duration = Duration::from_secs(20);

impl UpdateRun<'_> {
    async fn wait_for_window(&self) -> Result<(), CommandError> {
        let Some(resolved) = resolve_configured(&self.args.config, self.loaded, self.machine)? else {
            return Ok(());
        };
        let windows = || resolved.fleet.models.iter().map(|model| &model.recycle.only);
        while windows().any(|only| !only.is_open(warden_admin::clock::minute_of_day())) {
            tokio::time::sleep(WINDOW_POLL_INTERVAL).await;
        }
        Ok(())
    }

    /// A scheduled update waits for an allowed time of day.
    async fn wait_if_scheduled(&self, signals: &mut SignalHandlers) -> Result<(), CommandError> {
        if !self.args.scheduled {
            return Ok(());
        }
        tokio::select! {
            quiet = self.wait_for_window() => quiet,
            () = signals.wait_leave() => Err(CommandError::INTERRUPTED),
        }
    }

    /// Rolls back if a model dies.
    pub(super) async fn bring_in(
        &self,
        mut report: UpdateReport,
        instances: &[live::LiveInstance],
        id: &BuildId,
        signals: &mut SignalHandlers,
    ) -> Result<UpdateReport, CommandError> {
        self.wait_if_scheduled(signals).await?;
        self.store.begin_rollout(id, &report.summary())?;
        match self.told(instances, id, signals).await? {
            BringInResult::Holds(by) => {
                report.used_by = by;
                Ok(report.with_outcome(UpdateOutcome::InUse))
            }
            BringInResult::RolledBack { outcome, reasons } => {
                report.reasons.extend(reasons);
                Ok(report.with_outcome(outcome))
            }
        }
    }

    async fn told(
        &self,
        instances: &[live::LiveInstance],
        id: &BuildId,
        signals: &mut SignalHandlers,
    ) -> Result<BringInResult, CommandError> {
        let numbers = &self.loaded.settings.update;
        let binary = self.store.binary(id)?;
        let mut by = Vec::new();
        for live in instances {
            let taking = async {
                let before = live.switch_to(&binary, false, numbers).await?;
                live.watch(&before, numbers.watch, numbers).await
            };
            let taken = tokio::select! {
                taken = taking => taken,
                () = signals.wait_leave() => Err(live::SwitchFailure::Interrupted),
            };
            let Err(wrong) = taken else {
                by.push(live.name());
                continue;
            };
            let outcome = match wrong {
                live::SwitchFailure::BuildFault(_) => UpdateOutcome::TakenBack,
                live::SwitchFailure::NotSwitched(_) => UpdateOutcome::Unknown,
                live::SwitchFailure::Interrupted => UpdateOutcome::Interrupted,
            };
            let why = wrong.into_reason();
            let back =
                self.store.roll_back(id, (outcome == UpdateOutcome::TakenBack).then_some(why.as_str()))?;
            let mut reasons = vec![why];
            let wrong = self.roll_back_instances(instances, &back, signals).await?;
            reasons.extend(wrong.into_iter().map(|why| format!("while rolling back: {why}")));
            return Ok(BringInResult::RolledBack { outcome, reasons });
        }
        self.store.finish_move()?;
        Ok(BringInResult::Holds(by))
    }

    /// Waits until the instances run the previous build, and returns the failures. If a signal cancels this,
    /// the next update continues.
    async fn roll_back_instances(
        &self,
        instances: &[live::LiveInstance],
        back: &BuildId,
        signals: &mut SignalHandlers,
    ) -> Result<Vec<String>, CommandError> {
        let numbers = &self.loaded.settings.update;
        let binary = self.store.binary(back)?;
        // Reload all instances first, because a signal may end this loop. Instances not reached so far may
        // also have reloaded by themselves.
        for live in instances {
            drop(live.reload().await);
        }
        let mut wrong = Vec::new();
        for live in instances {
            let taken = tokio::select! {
                taken = live.switch_to(&binary, true, numbers) => taken,
                () = signals.wait_leave() => return Err(CommandError::INTERRUPTED),
            };
            wrong.extend(taken.err().map(live::SwitchFailure::into_reason));
        }
        // Record the end, because another attempt would have the same result.
        self.store.finish_move()?;
        Ok(wrong)
    }

    /// Completes an update that was killed after its choice of a build, or during the rollback. Returns a
    /// sentence about the completed update, if there was one.
    pub(super) async fn finish(&self, signals: &mut SignalHandlers) -> Result<Option<String>, CommandError> {
        let (Some(moving), Some(in_use)) = (self.store.pending_move(), self.store.default_build()?) else {
            return Ok(None);
        };
        let BuildMove { build, back } = moving;
        out::error_line(&format!(
            "update: build {build} was {} by an update that did not finish; this one continues it",
            if back { "taken back" } else { "chosen" }
        ));
        let pinned = bound_models(&self.args.config, self.loaded, self.machine)?;
        let late = if back { vec![build.clone()] } else { self.store.kept_by_choice() };
        let binaries: Vec<PathBuf> = late.iter().filter_map(|id| self.store.binary(id).ok()).collect();
        let instances = live::find_instances(self.dirs, self.machine, &binaries, &pinned, true).await?;
        if back {
            let wrong = self.roll_back_instances(&instances, &in_use.id, signals).await?;
            let all: Vec<String> = instances.iter().map(live::LiveInstance::name).collect();
            return match wrong.first() {
                None if all.is_empty() => Ok(None),
                None => Ok(Some(format!(
                    "Build {build}, which was taken back, is not run by {} any more",
                    all.join("; ")
                ))),
                Some(_) => Err(CommandError::hinted(
                    format!("build {build}, which was taken back, is still run: {}", wrong.join("; ")),
                    "restart that llama-warden, or see what its log says",
                )),
            };
        }
        self.wait_if_scheduled(signals).await?;
        match self.told(&instances, &build, signals).await? {
            BringInResult::Holds(by) if by.is_empty() => Ok(Some(format!(
                "Build {build}, which an earlier update had chosen, is used by no running instance"
            ))),
            BringInResult::Holds(by) => Ok(Some(format!(
                "Build {build}, which an earlier update had chosen, is in use by {}",
                by.join("; ")
            ))),
            BringInResult::RolledBack { outcome, reasons } => {
                let text = format!(
                    "build {build}, which an earlier update had chosen, was taken back: {}",
                    reasons.join("; ")
                );
                out::error_line(&format!("update: {text}"));
                if self.args.json {
                    out::print_json(&serde_json::json!({ "outcome": outcome, "reasons": reasons }))?;
                }
                Err(CommandError::Reported { code: outcome.exit_code() })
            }
        }
    }
}

enum BringInResult {
    Holds(Vec<String>),
    RolledBack { outcome: UpdateOutcome, reasons: Vec<String> },
}

pub(crate) fn rollback(args: &RollbackArgs) -> Result<(), CommandError> {
    crate::cli::shared::block_on(async {
        let (machine, loaded) = args.config.read()?;
        let dirs = loaded.dirs(&machine)?;
        let store = BuildStore::with_bundled(&dirs.data);
        let _only = lock_updates(&dirs)?;
        let numbers = &loaded.settings.update;
        let pinned = bound_models(&args.config, &loaded, &machine)?;
        // Complete an interrupted rollback first: instances still run the abandoned build, so go no further
        // back.
        let no_way_back = || warden_builder::BuilderError::NoWayBack { store: store.root().to_owned() };
        let in_use = store.default_build()?.ok_or_else(no_way_back)?.id;
        let left = store
            .pending_move()
            .filter(|moving| moving.back)
            .and_then(|moving| store.binary(&moving.build).ok());
        let late = live::find_instances(&dirs, &machine, left.as_slice(), &pinned, false).await?;
        if args.plan {
            return plan_rollback(&store, &in_use, late.len());
        }
        let (instances, back) = if late.is_empty() {
            let binary = store.binary(&in_use).ok();
            let instances = live::find_instances(&dirs, &machine, binary.as_slice(), &pinned, false).await?;
            let back = store.roll_back(&in_use, Some("it was taken back by hand"))?;
            out::print_line(&format!("build {back} is in use{}", revision_text(&store, &back)))?;
            (instances, back)
        } else {
            out::print_line(&format!("build {in_use} is in use already; not all run it yet"))?;
            (late, in_use)
        };
        let binary = store.binary(&back)?;
        let mut failed = Ok(());
        for live in &instances {
            match live.switch_to(&binary, true, numbers).await {
                Ok(_) => out::print_line(&format!("{} runs it", live.name()))?,
                // The other instances can still switch.
                Err(wrong) => failed = failed.and(Err(CommandError::failed(wrong.into_reason()))),
            }
        }
        // Record the end: an instance that did not switch would not switch next time either. The next
        // `rollback` goes further back.
        store.finish_move()?;
        failed
    })?
}

/// `late`: number of instances that an interrupted rollback has not switched yet.
fn plan_rollback(store: &BuildStore, in_use: &BuildId, late: usize) -> Result<(), CommandError> {
    if late > 0 {
        out::print_line(&format!("build {in_use} is in use already; {late} instance(s) would change to it"))?;
        return Ok(());
    }
    let back = store.build_before(in_use)?;
    out::print_line(&format!("from build {in_use}{}", revision_text(store, in_use)))?;
    out::print_line(&format!("back to build {back}{}", revision_text(store, &back)))?;
    Ok(())
}

/// Returns a text such as `, build 8827, commit 1234abcd`.
fn revision_text(store: &BuildStore, id: &BuildId) -> String {
    store.show(id).map_or_else(|_| String::new(), |build| format!(", {}", build.plan.source.revision))
}
