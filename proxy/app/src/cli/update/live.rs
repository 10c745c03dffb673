//! Running instances: finds those that use a build, and makes them switch to another.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::time::{Instant, sleep};
use warden_admin::client::AdminClient;
use warden_admin::instance;
use warden_admin::status::{AdminStatus, InstanceInfo};
use warden_config::machine::HostMachine;
use warden_config::resolve::dirs::WardenDirs;
use warden_policies::defaults::Update;
use warden_supervisor::{BackendView, ModelState, ModelView};

use crate::exit::CommandError;
use crate::out;

pub(super) struct LiveInstance {
    instance: InstanceInfo,
    pub(super) client: AdminClient,
    pub(super) models: Vec<String>,
}

/// Finds instances that use this store, with the models whose next process would run one of `binaries`.
/// Leaves out models with a configured build, which the instance or `pinned` names. An instance that does not
/// answer is an error if `strict`, else a warning.
pub(super) async fn find_instances(
    dirs: &WardenDirs,
    machine: &HostMachine,
    binaries: &[PathBuf],
    pinned: &[String],
    strict: bool,
) -> Result<Vec<LiveInstance>, CommandError> {
    let mut all = Vec::new();
    for found in instance::all_instances(&dirs.state, &machine.registration_dirs()) {
        let client = AdminClient::from_located(&found);
        let instance = found.instance;
        if !instance.data_dir.is_empty() && Path::new(&instance.data_dir) != dirs.data {
            continue;
        }
        let Some(status) = client.status().await else {
            let silent = format!(
                "the llama-warden with pid {} does not answer on {}",
                instance.pid, instance.admin_socket
            );
            if strict {
                return Err(CommandError::hinted(silent, "end it, or wait until it answers"));
            }
            out::error_line(&format!("warning: {silent}"));
            continue;
        };
        // These names include no canaries.
        let names = status.fleet.models.iter().map(|model| model.name.as_str());
        let is_bound = |name: &&str| pinned.iter().chain(&status.bound).any(|one| one == name);
        let own = names.filter(|name| !is_bound(name)).filter(|name| {
            status.next_binary(name).is_some_and(|next| binaries.iter().any(|binary| binary == next))
        });
        let models = own.map(str::to_owned).collect();
        all.push(LiveInstance { instance, client, models });
    }
    all.retain(|live| !live.models.is_empty());
    Ok(all)
}

pub(super) struct StateBeforeReload {
    /// Newest generation of all models, for instances that do not report the programs of processes.
    newest: u64,
    crashes: BTreeMap<String, u64>,
    down: Vec<String>,
}

pub(super) enum SwitchFailure {
    BuildFault(String),
    /// The build may not be the cause: no instance, no answer, an invalid configuration, or a drain that
    /// takes too long.
    NotSwitched(String),
    Interrupted,
}

impl SwitchFailure {
    pub(super) fn into_reason(self) -> String {
        match self {
            Self::BuildFault(why) | Self::NotSwitched(why) => why,
            Self::Interrupted => "it was interrupted".to_owned(),
        }
    }
}

impl LiveInstance {
    pub(super) fn name(&self) -> String {
        format!("pid {} ({})", self.instance.pid, self.models.join(", "))
    }

    /// Reloads the instance, and waits until all its models run `binary`. A model that was already down may
    /// stay down. If a model already had `binary` from an earlier update, it must start, unless `back` is
    /// set.
    pub(super) async fn switch_to(
        &self,
        binary: &Path,
        back: bool,
        numbers: &Update,
    ) -> Result<StateBeforeReload, SwitchFailure> {
        let before = self.state_before((!back).then_some(binary), numbers).await?;
        self.reload().await.map_err(SwitchFailure::NotSwitched)?;
        out::error_line(&format!("update: {} switches to the build; no request is cut", self.name()));
        let until = Instant::now() + numbers.within;
        let mut silent = 0;
        loop {
            if let Some(status) = self.client.status().await {
                silent = 0;
                if let Some(why) = self.new_faults(&status, &before) {
                    return Err(SwitchFailure::BuildFault(why));
                }
                if self.has_switched(&status, binary, before.newest) {
                    return Ok(before);
                }
            } else {
                silent += 1;
                if silent >= MAX_FAILED_QUERIES {
                    return Err(self.silent_failure());
                }
            }
            if Instant::now() >= until {
                return Err(SwitchFailure::NotSwitched(format!(
                    "{} still ran other processes {} after it was notified; its log says why",
                    self.name(),
                    warden_policies::units::format_span(numbers.within)
                )));
            }
            sleep(numbers.look).await;
        }
    }

    pub(super) async fn watch(
        &self,
        before: &StateBeforeReload,
        time: Duration,
        numbers: &Update,
    ) -> Result<(), SwitchFailure> {
        let until = Instant::now() + time;
        let mut looked = false;
        loop {
            if let Some(status) = self.client.status().await {
                looked = true;
                if let Some(why) = self.new_faults(&status, before) {
                    return Err(SwitchFailure::BuildFault(why));
                }
            }
            if Instant::now() >= until {
                break;
            }
            sleep(numbers.look).await;
        }
        if looked { Ok(()) } else { Err(self.silent_failure()) }
    }

    async fn state_before(
        &self,
        taken: Option<&Path>,
        numbers: &Update,
    ) -> Result<StateBeforeReload, SwitchFailure> {
        for _ in 0..MAX_FAILED_QUERIES {
            if let Some(status) = self.client.status().await {
                let crashes = self.own_models(&status).map(|model| (model.name.to_string(), model.crashes));
                let has_it =
                    |model: &ModelView| taken.is_some() && status.next_binary(model.name.as_str()) == taken;
                let down = self.own_models(&status).filter(|model| is_down(model) && !has_it(model));
                let down = down.map(|model| model.name.to_string());
                let all = self.own_models(&status).flat_map(|model| &model.backends);
                let newest =
                    all.filter_map(|backend| backend.generation).map(|generation| generation.0).max();
                return Ok(StateBeforeReload {
                    newest: newest.unwrap_or(0),
                    crashes: crashes.collect(),
                    down: down.collect(),
                });
            }
            sleep(numbers.look).await;
        }
        Err(self.silent_failure())
    }

    fn silent_failure(&self) -> SwitchFailure {
        SwitchFailure::NotSwitched(format!("{} does not answer any more", self.name()))
    }

    fn own_models<'a>(&'a self, status: &'a AdminStatus) -> impl Iterator<Item = &'a ModelView> {
        let all = status.fleet.models.iter().map(|model| &**model);
        all.filter(|model| self.models.iter().any(|own| own == model.name.as_str()))
    }

    fn has_switched(&self, status: &AdminStatus, binary: &Path, before: u64) -> bool {
        let is_next = self.models.iter().all(|name| status.next_binary(name) == Some(binary));
        // Older instances do not report the program, so compare generations.
        let is_its = |backend: &BackendView| match (&backend.program, backend.generation) {
            (Some(program), _) => program == binary,
            (None, generation) => generation.is_none_or(|generation| generation.0 > before),
        };
        is_next
            && self.own_models(status).flat_map(|model| &model.backends).all(is_its)
            && self
                .own_models(status)
                .all(|model| matches!(model.state, ModelState::Loaded | ModelState::Unloaded))
    }

    /// Sends SIGHUP. Finds the process through its socket, because a PID from a file may be reused or belong
    /// to another namespace.
    pub(super) async fn reload(&self) -> Result<(), String> {
        let gone = |error: &dyn std::fmt::Display| {
            format!("{} cannot be made to reload its configuration: {error}", self.name())
        };
        let stream = self.client.connect().await.map_err(|error| gone(&error))?;
        let peer = stream.peer_cred().map_err(|error| gone(&error))?;
        let pid = peer.pid().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(|| gone(&"its process cannot be seen from here"))?;
        let process = pidfd_open(pid, PidfdFlags::empty()).map_err(|error| gone(&error))?;
        // The process may have ended and its PID been reused, so check the user.
        if user_of(pid) != Some(peer.uid()) {
            return Err(gone(&"the process that made its socket has ended"));
        }
        pidfd_send_signal(process, Signal::HUP).map_err(|error| gone(&error))
    }

    fn new_faults(&self, status: &AdminStatus, before: &StateBeforeReload) -> Option<String> {
        let why = |model: &ModelView| {
            model.last_failure.as_ref().map_or_else(String::new, |failure| format!(": {}", failure.message))
        };
        let was_down = |model: &ModelView| before.down.iter().any(|name| name == model.name.as_str());
        if let Some(model) = self.own_models(status).find(|model| is_down(model) && !was_down(model)) {
            return Some(format!("`{}` of {} does not start{}", model.name, self.name(), why(model)));
        }
        let died = |model: &&ModelView| {
            model.crashes > before.crashes.get(model.name.as_str()).copied().unwrap_or(0)
        };
        let model = self.own_models(status).find(died)?;
        Some(format!("`{}` of {} died{}", model.name, self.name(), why(model)))
    }
}

fn user_of(pid: Pid) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero())).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// A model that is down will not soon recover by itself.
fn is_down(model: &ModelView) -> bool {
    model.outage.is_some() || model.state == ModelState::Failed
}

const MAX_FAILED_QUERIES: u32 = 5;
