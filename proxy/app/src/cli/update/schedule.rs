//! What `serve` needs to run updates at intervals: the command, and the time of the last run.

use std::path::Path;
use std::time::Duration;

use crate::cli::shared::ConfigArgs;

/// Written to the state directory when an update begins, but not by `--plan`.
pub(super) const LAST_RUN_FILE: &str = "update.last";

pub(super) fn config_words(config: &ConfigArgs) -> Vec<String> {
    let file = config.config.iter().flat_map(|path| ["--config".to_owned(), path.display().to_string()]);
    file.chain(config.set.iter().flat_map(|set| ["--set".to_owned(), set.clone()])).collect()
}

pub(crate) fn scheduled_command(config: &ConfigArgs) -> Vec<String> {
    let own = ["update".to_owned(), "--scheduled".to_owned()];
    own.into_iter().chain(config_words(config)).collect()
}

pub(crate) fn last_run(state: &Path) -> Option<Duration> {
    std::fs::metadata(state.join(LAST_RUN_FILE)).ok()?.modified().ok()?.elapsed().ok()
}
