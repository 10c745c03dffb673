//! The configuration file of the demonstration. The file is kept as a working example.

use std::path::{Path, PathBuf};

use warden_policies::ByteSize;
use warden_policies::units::MIB;

use super::model::DemoModel;
use crate::exit::CommandError;

/// First line of the file.
const FILE_HEADER: &str = "# Written by `llama-warden quickstart`";

pub(super) struct DemoConfigFile {
    pub(super) path: PathBuf,
    pub(super) port: u16,
    pub(super) binary: PathBuf,
    pub(super) model: DemoModel,
    /// Hard budget, set only during the demonstration.
    pub(super) hard: Option<ByteSize>,
}

impl DemoConfigFile {
    fn text(&self) -> String {
        let text = |path: &Path| toml::Value::String(path.display().to_string());
        let budget = self.hard.map_or_else(String::new, |hard| {
            format!(
                "# Above this the backend is drained and replaced.\nhost.hard = \"{}MiB\"\n\
                 # For the demonstration: no pause between replacements.\nmin_interval_hard = \"0s\"\n",
                hard.0 / MIB
            )
        });
        let name = self.model.name;
        format!(
            "{FILE_HEADER}; every key: docs/configuration.md.\n\
             [server]\nport = {}\n\n[log]\nlevel = \"warn\"\n\n[sensors]\ninterval = \"500ms\"\n\n\
             [models.{name}]\nbinary = {}\nmodel = {}\n\
             args = [\"-c\", \"4096\", \"-np\", \"2\", \"-t\", \"1\", \"--cache-ram\", \"2048\"]\n\
             preload = true\n\n[models.{name}.policy]\n\
             # It shows a replacement, so memory is not asked for first. From the start, because another value is another process.\n\
             reclaim = false\n{budget}",
            self.port,
            text(&self.binary),
            text(&self.model.path),
        )
    }

    pub(super) fn write(&self) -> Result<(), CommandError> {
        let failed = |error| CommandError::failed(format!("writing {}: {error}", self.path.display()));
        if let Some(folder) = self.path.parent() {
            std::fs::create_dir_all(folder).map_err(failed)?;
        }
        let there = std::fs::read_to_string(&self.path).unwrap_or_default();
        if !there.is_empty() && !there.starts_with(FILE_HEADER) {
            return Err(CommandError::usage(
                format!("{} is there, and `quickstart` did not write it", self.path.display()),
                "move it away, or set `paths.state_dir`",
            ));
        }
        std::fs::write(&self.path, self.text()).map_err(failed)
    }
}
