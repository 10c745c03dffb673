//! Maps addresses of a process to files.

use std::path::{Path, PathBuf};

use procfs::process::{MMPermissions, MMapPath, Process};

#[derive(Clone, Debug, PartialEq, Eq)]
struct CodeRegion {
    start: u64,
    end: u64,
    offset: u64,
    path: PathBuf,
}

/// Files whose code a process has mapped.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcessModules {
    regions: Vec<CodeRegion>,
    /// Root folder of the process, if it runs in another mount namespace.
    root: Option<PathBuf>,
}

impl ProcessModules {
    /// Reads the mappings of a running process; empty if they are not readable.
    pub fn read(pid: u32) -> Self {
        let maps = i32::try_from(pid).ok().and_then(|pid| Process::new(pid).ok()?.maps().ok());
        let regions = maps.into_iter().flatten().filter_map(|map| match map.pathname {
            MMapPath::Path(path) if map.perms.contains(MMPermissions::EXECUTE) => {
                Some(CodeRegion { start: map.address.0, end: map.address.1, offset: map.offset, path })
            }
            _ => None,
        });
        let mut modules =
            Self { regions: regions.collect(), root: Some(PathBuf::from(format!("/proc/{pid}/root"))) };
        modules.regions.sort_by_key(|region| region.start);
        modules
    }

    /// Returns the file of an address, with the offset in the file.
    pub fn find(&self, address: u64) -> Option<(&Path, u64)> {
        let next = self.regions.partition_point(|region| region.start <= address);
        let region = self.regions.get(next.checked_sub(1)?)?;
        (address < region.end).then(|| (region.path.as_path(), address - region.start + region.offset))
    }

    /// Returns the path under which llama-warden can read a file of the process.
    pub(crate) fn readable_path(&self, path: &Path) -> PathBuf {
        let inside = self.root.as_deref().map(|root| root.join(path.strip_prefix("/").unwrap_or(path)));
        inside.filter(|inside| inside.exists()).unwrap_or_else(|| path.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_between_two_files_is_of_none() {
        let region =
            |start, path: &str| CodeRegion { start, end: start + 100, offset: 4096, path: path.into() };
        let modules = ProcessModules { regions: vec![region(1000, "/a"), region(5000, "/b")], root: None };
        assert_eq!(modules.find(1000), Some((Path::new("/a"), 4096)));
        assert_eq!(modules.find(5099), Some((Path::new("/b"), 4195)));
        assert_eq!([modules.find(999), modules.find(1100), modules.find(5100)], [None; 3]);
    }

    #[test]
    fn this_very_function_is_in_this_very_program() {
        let modules = ProcessModules::read(std::process::id());
        let address = this_very_function_is_in_this_very_program as fn() as usize as u64;
        let (path, _) = modules.find(address).unwrap();
        assert_eq!(path, std::env::current_exe().unwrap());
        assert!(modules.readable_path(path).exists());
    }
}
