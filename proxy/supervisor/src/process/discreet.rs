//! What a process said, as others may see it: without the secrets that the process was given, which it may repeat.

use warden_policies::own_variables::is_ours_alone;
use warden_policies::secrets::{self, Known};

use crate::spec::Command;

/// The secrets that a process gets: in its arguments, its variables, and those that it inherits.
pub(crate) fn known(command: &Command) -> Known {
    let inherited = std::env::vars_os().filter_map(|(name, value)| {
        let pair = (name.into_string().ok()?, value.into_string().ok()?);
        (!is_ours_alone(&pair.0) && !command.env_remove.contains(&pair.0)).then_some(pair)
    });
    let all: Vec<(String, String)> = inherited.chain(command.env.iter().cloned()).collect();
    Known::of(&command.args, all.iter().map(|(name, value)| (name.as_str(), value.as_str())))
}

/// Lines without what looks like a secret.
pub(crate) fn lines(lines: &[String]) -> Vec<String> {
    lines.iter().map(|line| secrets::text(line)).collect()
}
