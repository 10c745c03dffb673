//! Builds that running instances need: the binaries of their processes and of the next ones. An instance
//! that does not answer is named, because its builds are unknown.

use std::path::Path;

use warden_builder::{BuildId, BuildStore};

use super::block_on;
use crate::admin::client::AdminClient;
use crate::admin::instance::{self, LocatedInstance};
use crate::config::machine::HostMachine;
use crate::exit::CommandError;

#[derive(Debug, Default)]
pub(super) struct BuildsInUse {
    /// Each build with a description of its user.
    pub(super) builds: Vec<(BuildId, String)>,
    /// Running instances that did not answer.
    pub(super) unanswered: Vec<String>,
}

impl BuildsInUse {
    /// Asks all instances that this user's state directory and the common places list.
    pub(super) fn query_instances(
        store: &BuildStore,
        data: &Path,
        state: &Path,
        machine: &HostMachine,
    ) -> Result<Self, CommandError> {
        let mut found = Self::default();
        for instance in instance::all_instances(state, &machine.registration_dirs()) {
            let binaries = query_binaries(&instance)?;
            let instance = instance.instance;
            match binaries {
                Some(binaries) => {
                    for (model, binary) in binaries {
                        if let Some(id) = store.find_by_file(&binary) {
                            found.builds.push((id, format!("model `{model}` of pid {}", instance.pid)));
                        }
                    }
                }
                // The instance uses another store, according to its own record.
                None if !instance.data_dir.is_empty() && Path::new(&instance.data_dir) != data => {}
                None => found.unanswered.push(format!("pid {} on {}", instance.pid, instance.admin_socket)),
            }
        }
        found.builds.dedup();
        Ok(found)
    }

    /// Users of a build.
    pub(super) fn users_of(&self, id: &BuildId) -> Vec<&str> {
        self.builds.iter().filter(|(used, _)| used == id).map(|(_, who)| who.as_str()).collect()
    }

    /// Refuses while a running instance has not answered.
    pub(super) fn check_all_answered(&self) -> Result<(), CommandError> {
        if self.unanswered.is_empty() {
            return Ok(());
        }
        Err(CommandError::hinted(
            format!(
                "nothing was removed: a running llama-warden does not say which builds it needs: {}",
                self.unanswered.join(", ")
            ),
            "ask again where it can be reached, or use --force",
        ))
    }
}

/// The binaries of an instance, by model; `None` if it does not answer.
fn query_binaries(
    instance: &LocatedInstance,
) -> Result<Option<Vec<(String, std::path::PathBuf)>>, CommandError> {
    let Some(status) = block_on(AdminClient::from_located(instance).status())? else { return Ok(None) };
    let each = |(model, binaries): (String, Vec<std::path::PathBuf>)| {
        binaries.into_iter().map(move |binary| (model.clone(), binary))
    };
    Ok(status.binaries.map(|all| all.into_iter().flat_map(each).collect()))
}
