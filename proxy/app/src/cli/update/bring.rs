//! How a build comes into use, and how the one before it comes back: chosen, told to every instance, watched.

use std::path::PathBuf;
use std::time::Duration;

use warden_builder::{BuildId, Store};

use super::told::{Outcome, UpdateReport};
use super::{RollbackArgs, Run, configured, live, only_one, pinned};
use crate::config::machine::Machine;
use crate::exit::Failure;
use crate::out;
use crate::serve::Signals;

/// Windows of the day open and close with the minute.
const LOOK: Duration = Duration::from_secs(20);

impl Run<'_> {
    /// Waits until all models may be replaced at this time of the day.
    async fn until_quiet(&self) -> Result<(), Failure> {
        let Some(resolved) = configured(&self.args.config, self.loaded, self.machine)? else { return Ok(()) };
        let windows = || resolved.fleet.models.iter().map(|model| &model.recycle.only);
        while windows().any(|only| !only.open(crate::clock::minute())) {
            tokio::time::sleep(LOOK).await;
        }
        Ok(())
    }

    /// Chooses it, tells every instance, and watches; what dies is taken back.
    pub(super) async fn bring_in(
        &self,
        mut report: UpdateReport,
        instances: &[live::Live],
        id: &BuildId,
        signals: &mut Signals,
    ) -> Result<UpdateReport, Failure> {
        if self.args.scheduled {
            tokio::select! {
                quiet = self.until_quiet() => quiet?,
                () = signals.leave() => return Err(Failure::Told { code: crate::exit::INTERRUPTED }),
            }
        }
        self.store.choose_watched(id, &report.news())?;
        match self.told(instances, id, signals).await? {
            Told::Holds(by) => {
                report.used_by = by;
                Ok(report.ends(Outcome::InUse))
            }
            Told::Back { outcome, reasons } => {
                report.reasons.extend(reasons);
                Ok(report.ends(outcome))
            }
        }
    }

    /// Tells every instance of a build that is chosen, and watches; what dies is taken back.
    async fn told(
        &self,
        instances: &[live::Live],
        id: &BuildId,
        signals: &mut Signals,
    ) -> Result<Told, Failure> {
        let numbers = &self.loaded.settings.update;
        let binary = self.store.binary(id)?;
        let mut by = Vec::new();
        for live in instances {
            let taking = async {
                let before = live.takes(&binary, numbers).await?;
                live.watch(&before, numbers.watch, numbers).await
            };
            let taken = tokio::select! {
                taken = taking => taken,
                () = signals.leave() => Err(live::Wrong::Interrupted),
            };
            let Err(wrong) = taken else {
                by.push(live.name());
                continue;
            };
            let outcome = match wrong {
                live::Wrong::Ill(_) => Outcome::TakenBack,
                live::Wrong::NotTaken(_) => Outcome::Unknown,
                live::Wrong::Interrupted => Outcome::Interrupted,
            };
            let why = wrong.into_why();
            let back = self.store.go_back(Some(why.as_str()).filter(|_| outcome == Outcome::TakenBack))?;
            let back = self.store.binary(&back)?;
            let mut reasons = vec![why];
            // Also those that were not told yet: they may have read their configuration by themselves.
            for live in instances {
                if let Err(wrong) = live.takes(&back, numbers).await {
                    reasons.push(format!("on the way back: {}", wrong.into_why()));
                }
            }
            return Ok(Told::Back { outcome, reasons });
        }
        self.store.holds(id)?;
        Ok(Told::Holds(by))
    }

    /// Sees an update through that was killed when its build had been chosen. What became of it, if there was one.
    pub(super) async fn finish(
        &self,
        id: &BuildId,
        signals: &mut Signals,
    ) -> Result<Option<String>, Failure> {
        if self.store.choices()?.watched.as_ref() != Some(id) {
            return Ok(None);
        }
        out::error_line(&format!(
            "update: build {id} was chosen by one that did not see it through; it goes on"
        ));
        let both = self.store.kept_by_choice();
        let binaries = both.iter().map(|id| self.store.binary(id)).collect::<Result<Vec<_>, _>>()?;
        let pinned = pinned(&self.args.config, self.loaded, self.machine)?;
        let instances = live::using(self.dirs, self.machine, &binaries, &pinned, true).await?;
        match self.told(&instances, id, signals).await? {
            Told::Holds(by) if by.is_empty() => Ok(Some(format!(
                "Build {id}, which an earlier update had chosen, is used by no running instance"
            ))),
            Told::Holds(by) => Ok(Some(format!(
                "Build {id}, which an earlier update had chosen, is in use by {}",
                by.join("; ")
            ))),
            Told::Back { outcome, reasons } => {
                out::error_line(&format!(
                    "update: build {id}, which an earlier one had chosen, was taken back: {}",
                    reasons.join("; ")
                ));
                Err(Failure::Told { code: outcome.code() })
            }
        }
    }
}

/// What became of a build that was brought in.
enum Told {
    /// It holds, and these instances use it.
    Holds(Vec<String>),
    /// The build before it is in use.
    Back {
        /// How the update ends.
        outcome: Outcome,
        /// Why.
        reasons: Vec<String>,
    },
}

/// Goes back, and tells every instance.
pub(crate) fn rollback(args: &RollbackArgs) -> Result<(), Failure> {
    crate::cli::block_on(async {
        let machine = Machine::read();
        let loaded = args.config.load(&machine, Vec::new())?;
        let dirs = loaded.dirs(&machine)?;
        let _only = only_one(&dirs)?;
        let store = Store::new(&dirs.data);
        let numbers = &loaded.settings.update;
        let pinned = pinned(&args.config, &loaded, &machine)?;
        // One that was broken off, or was not heard by everybody: its instances still run what was left, and it goes no further back.
        let rejected = store.choices()?.rejected;
        let left: Vec<PathBuf> = rejected.iter().filter_map(|one| store.binary(&one.build).ok()).collect();
        let late = live::using(&dirs, &machine, &left, &pinned, false).await?;
        let in_use = store.in_use()?;
        let (instances, back) = match in_use {
            Some(in_use) if !late.is_empty() => {
                out::line(&format!("build {} is in use already; not all run it yet", in_use.id))?;
                (late, in_use.id)
            }
            in_use => {
                let binary = in_use.and_then(|build| store.binary(&build.id).ok());
                let instances = live::using(&dirs, &machine, binary.as_slice(), &pinned, false).await?;
                let back = store.go_back(Some("it was taken back by hand"))?;
                out::line(&format!("build {back} is in use{}", described(&store, &back)))?;
                (instances, back)
            }
        };
        let binary = store.binary(&back)?;
        let mut failed = Ok(());
        for live in &instances {
            match live.takes(&binary, numbers).await {
                Ok(_) => out::line(&format!("{} runs it", live.name()))?,
                // The other instances take it all the same.
                Err(wrong) => failed = failed.and(Err(Failure::failed(wrong.into_why()))),
            }
        }
        failed
    })?
}

/// `, build 8827, commit 1234abcd`
fn described(store: &Store, id: &BuildId) -> String {
    store.show(id).map_or_else(|_| String::new(), |build| format!(", {}", build.plan.source.revision))
}
