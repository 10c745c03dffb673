//! Running instances: which of them use a build, and how they come to use another.

use std::path::{Path, PathBuf};
use std::time::Duration;

use reqwest::Method;
use rustix::process::{Pid, Signal, kill_process};
use tokio::time::{Instant, sleep};
use warden_policies::defaults::Update;
use warden_supervisor::ModelState;

use crate::admin::answer::{Instance, Status};
use crate::admin::client::Client;
use crate::admin::instance;
use crate::config::machine::Machine;
use crate::config::resolve::dirs::Dirs;
use crate::exit::Failure;
use crate::out;

/// An instance some of whose models use the build that nobody names.
pub(super) struct Live {
    instance: Instance,
    pub(super) client: Client,
    /// Those models.
    pub(super) models: Vec<String>,
}

/// Instances that use this store, and models whose next process would be `binary`. One that does not answer is named: nobody knows what it
/// needs.
pub(super) async fn using(dirs: &Dirs, machine: &Machine, binary: &Path) -> Result<Vec<Live>, Failure> {
    let mut all = Vec::new();
    for instance in instance::everywhere(&dirs.state, &machine.meeting_places()) {
        if !instance.data_dir.is_empty() && Path::new(&instance.data_dir) != dirs.data {
            continue;
        }
        let client = Client::new(PathBuf::from(&instance.admin_socket))?;
        let Some(status) = asked(&client).await else {
            return Err(Failure::hinted(
                format!(
                    "the llama-warden with pid {} does not answer on {}",
                    instance.pid, instance.admin_socket
                ),
                "end it, or wait until it answers",
            ));
        };
        let uses = |binaries: &Vec<PathBuf>| binaries.iter().any(|own| own == binary);
        let binaries = status.binaries.unwrap_or_default();
        let models = binaries.iter().filter(|(_, own)| uses(own)).map(|(name, _)| name.clone()).collect();
        all.push(Live { instance, client, models });
    }
    all.retain(|live| !live.models.is_empty());
    Ok(all)
}

/// What an instance says within a reasonable time.
async fn asked(client: &Client) -> Option<Status> {
    let limit = warden_policies::defaults().child.version_timeout;
    let asking = client.json::<Status>(Method::GET, &["status"]);
    tokio::time::timeout(limit, asking).await.ok()?.ok()
}

impl Live {
    /// As people know it.
    pub(super) fn name(&self) -> String {
        format!("pid {} ({})", self.instance.pid, self.models.join(", "))
    }

    /// Has it read its configuration again, and waits until all of its models run `binary` and nothing else. Why not, if they do not.
    pub(super) async fn takes(&self, binary: &Path, numbers: &Update) -> Result<(), String> {
        let before = asked(&self.client).await.map_or(0, |status| self.newest_generation(&status));
        self.reload()?;
        out::error_line(&format!("update: {} takes the build; nothing is cut", self.name()));
        let until = Instant::now() + numbers.within;
        let crashes = self.crashes().await;
        loop {
            if let Some(status) = asked(&self.client).await {
                if let Some(why) = self.wrong(&status, crashes) {
                    return Err(why);
                }
                if self.has_taken(&status, binary, before) {
                    return Ok(());
                }
            }
            if Instant::now() >= until {
                return Err(format!(
                    "{} still ran other processes {} after it was told",
                    self.name(),
                    warden_policies::units::span(numbers.within)
                ));
            }
            sleep(numbers.look).await;
        }
    }

    /// Looks at it for some time. What went wrong, if something did.
    pub(super) async fn watch(&self, time: Duration, numbers: &Update) -> Result<(), String> {
        let (until, crashes) = (Instant::now() + time, self.crashes().await);
        while Instant::now() < until {
            if let Some(status) = asked(&self.client).await
                && let Some(why) = self.wrong(&status, crashes)
            {
                return Err(why);
            }
            sleep(numbers.look).await;
        }
        Ok(())
    }

    /// Whether all of its models are to be started as `binary`, and no process of before is left. What a process is cannot be told from its
    /// program, which may have become another.
    fn has_taken(&self, status: &Status, binary: &Path, before: u64) -> bool {
        let next = |name: &String| status.binaries.as_ref().and_then(|all| all.get(name)?.first());
        let is_next = self.models.iter().all(|name| next(name).is_some_and(|own| own == binary));
        let own = || status.fleet.models.iter().filter(|model| self.is_own(model.name.as_str()));
        let mut backends = own().flat_map(|model| &model.backends);
        let is_new =
            backends.all(|backend| backend.generation.is_none_or(|generation| generation.0 > before));
        is_next
            && is_new
            && own().all(|model| matches!(model.state, ModelState::Loaded | ModelState::Unloaded))
    }

    fn newest_generation(&self, status: &Status) -> u64 {
        let own = status.fleet.models.iter().filter(|model| self.is_own(model.name.as_str()));
        let all = own.flat_map(|model| model.backends.iter().filter_map(|backend| backend.generation));
        all.map(|generation| generation.0).max().unwrap_or(0)
    }

    fn reload(&self) -> Result<(), String> {
        let pid = i32::try_from(self.instance.pid).ok().and_then(Pid::from_raw);
        let told = pid.ok_or(rustix::io::Errno::SRCH).and_then(|pid| kill_process(pid, Signal::HUP));
        told.map_err(|error| {
            format!("{} cannot be told to read its configuration again: {error}", self.name())
        })
    }

    /// Deaths of its models so far.
    async fn crashes(&self) -> u64 {
        asked(&self.client).await.map_or(0, |status| self.deaths(&status))
    }

    fn deaths(&self, status: &Status) -> u64 {
        let own = status.fleet.models.iter().filter(|model| self.is_own(model.name.as_str()));
        own.map(|model| model.crashes).sum()
    }

    fn is_own(&self, name: &str) -> bool {
        self.models.iter().any(|own| own == name)
    }

    /// What is wrong with its models, since they had died so often.
    fn wrong(&self, status: &Status, crashes: u64) -> Option<String> {
        let own = || status.fleet.models.iter().filter(|model| self.is_own(model.name.as_str()));
        let why = |model: &warden_supervisor::ModelView| {
            model.last_failure.as_ref().map_or_else(String::new, |failure| format!(": {}", failure.message))
        };
        let down = own().find(|model| model.outage.is_some() || model.state == ModelState::Failed);
        if let Some(model) = down {
            return Some(format!("`{}` of {} does not start{}", model.name, self.name(), why(model)));
        }
        if self.deaths(status) > crashes {
            let model = own().find(|model| model.last_failure.is_some())?;
            return Some(format!("`{}` of {} died{}", model.name, self.name(), why(model)));
        }
        None
    }
}
