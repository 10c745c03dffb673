//! Removes secrets from the output of a process, which may print secrets that were given to it.

use warden_policies::own_variables::is_own_variable;
use warden_policies::secrets::{self, KnownSecrets};

use crate::spec::ServerCommand;

/// Secrets in the arguments, variables and inherited variables of a process.
pub(crate) fn known_secrets(command: &ServerCommand) -> KnownSecrets {
    let inherited = std::env::vars_os().filter_map(|(name, value)| {
        let pair = (name.into_string().ok()?, value.into_string().ok()?);
        (!is_own_variable(&pair.0) && !command.env_remove.contains(&pair.0)).then_some(pair)
    });
    let all: Vec<(String, String)> = inherited.chain(command.env.iter().cloned()).collect();
    KnownSecrets::from_command(&command.args, all.iter().map(|(name, value)| (name.as_str(), value.as_str())))
}

pub(crate) fn without_secrets(lines: &[String]) -> Vec<String> {
    lines.iter().map(|line| secrets::redact_text(line)).collect()
}
