//! Warns of places that lose data.

use std::path::{Path, PathBuf};

use super::dirs::WardenDirs;
use super::resolver::ConfigResolver;

impl ConfigResolver<'_> {
    /// Warns if data that should survive a reboot would be kept in a file system in memory.
    pub(crate) fn check_state_dir(&mut self, dirs: &WardenDirs) {
        let paths = &self.loaded.settings.paths;
        let state = "the ledger and what is known of the models' memory";
        for (key, named, dir, what) in [
            ("state_dir", &paths.state_dir, &dirs.state, state),
            ("data_dir", &paths.data_dir, &dirs.data, "builds"),
        ] {
            if named.is_none() || !is_in_memory(&resolve_links(dir)) {
                continue;
            }
            let message = format!(
                "`paths.{key}`: {} is in the machine's memory (tmpfs), and a restart of it takes {what} away",
                dir.display()
            );
            let hint = format!("name a directory on a disk, like `/var/lib/llama-warden` (`{key}`)");
            self.warn(&["paths", key], message, hint);
        }
    }
}

/// Returns true if a path, or the part of it that exists, is in a file system in memory.
#[cfg(target_os = "linux")]
fn is_in_memory(path: &Path) -> bool {
    // TMPFS_MAGIC, see statfs(2).
    const TMPFS: rustix::fs::FsWord = 0x0102_1994;
    let there = path.ancestors().find(|path| path.exists());
    there.and_then(|path| rustix::fs::statfs(path).ok()).is_some_and(|facts| facts.f_type == TMPFS)
}

#[cfg(not(target_os = "linux"))]
fn is_in_memory(_: &Path) -> bool {
    false
}

/// Resolves symbolic links in the part of a path that exists.
fn resolve_links(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    path.canonicalize().unwrap_or_else(|_| match (path.parent(), path.file_name()) {
        (Some(parent), Some(name)) => resolve_links(parent).join(name),
        _ => path.clone(),
    })
}

#[cfg(test)]
mod tests {
    use crate::machine::HostMachine;
    use crate::resolve::resolve_config;
    use crate::source::layers::{ConfigSources, load_config};

    #[test]
    fn without_any_home_a_place_for_the_state_has_to_be_named() {
        let mut machine = HostMachine::read();
        machine.env.clear();
        let loaded = load_config(ConfigSources::default()).unwrap();
        for listed in [None, Some("/")] {
            machine.listed_home = listed.map(Into::into);
            let refused = loaded.dirs(&machine).unwrap_err().to_string();
            assert!(refused.contains("HOME"), "{refused}");
        }
        machine.listed_home = Some("/home/me".into());
        let dirs = loaded.dirs(&machine).unwrap();
        assert_eq!(dirs.state, std::path::Path::new("/home/me/.local/state/llama-warden"));
        let flags =
            vec![crate::source::layers::FlagSetting::raw("--set", &["paths", "state_dir"], "/srv/state")];
        let named = load_config(ConfigSources { flags, ..ConfigSources::default() }).unwrap();
        machine.listed_home = None;
        let dirs = named.dirs(&machine).unwrap();
        assert_eq!((dirs.state, dirs.cache), ("/srv/state".into(), "/srv/state/cache".into()));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn what_is_to_outlast_a_restart_of_the_machine_is_not_kept_in_its_memory() {
        // On Linux, `/dev/shm` is usually a file system in memory.
        let in_memory = std::path::Path::new("/dev/shm");
        if !super::is_in_memory(in_memory) {
            return;
        }
        let dir = tempfile::tempdir_in(in_memory).unwrap();
        std::fs::write(dir.path().join("m.gguf"), "").unwrap();
        let file = dir.path().join("w.toml");
        let text =
            "paths = { state_dir = 'not/there/yet' }\n[models.m]\nmodel = 'm.gguf'\nbinary = '/bin/true'\n";
        std::fs::write(&file, text).unwrap();
        let machine = HostMachine::read();
        let loaded = load_config(ConfigSources { file: Some(file), ..ConfigSources::default() }).unwrap();
        let warnings = resolve_config(&loaded, &machine, false).unwrap().warnings;
        let said: Vec<String> = warnings.iter().map(ToString::to_string).collect();
        assert!(
            said.len() == 1 && said[0].contains("`paths.state_dir`") && said[0].contains("tmpfs"),
            "{said:?}"
        );
    }
}
