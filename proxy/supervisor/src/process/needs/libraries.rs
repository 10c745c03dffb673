//! Checks before a start that a program's libraries are where its loader looks for them. Supports C
//! libraries whose loader uses `ld.so.cache`; for other C libraries nothing is reported.
//!
//! A library is reported missing only if no loader could find it.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use crate::error::FailureKind;
use crate::process::needs::elf;
use crate::process::needs::missing::MissingNeed;
use crate::spec::ServerCommand;

/// Directories that the loader searches by default.
const DEFAULT_DIRECTORIES: [&str; 4] = ["/lib64", "/usr/lib64", "/lib", "/usr/lib"];
/// The loader's cache: an index of libraries in all other directories.
pub(crate) const LD_CACHE: &str = "/etc/ld.so.cache";
/// Maximum size of the cache that is read; usual ones have some hundred kilobytes.
const MAX_CACHE_BYTES: u64 = 64 << 20;
/// Maximum number of library names that are checked.
const MAX_LIBRARIES: usize = 256;

/// First library that a command's binary, or one of its libraries, needs and that does not exist. Existing
/// libraries are added to `used`.
pub(crate) fn missing_library(command: &ServerCommand, used: &mut Vec<PathBuf>) -> Option<MissingNeed> {
    let binary = command.binary.is_absolute().then_some(command.binary.as_path())?;
    let cache = fs::metadata(LD_CACHE).ok().filter(|data| data.len() <= MAX_CACHE_BYTES);
    let cache = cache.and_then(|_| fs::read(LD_CACHE).ok());
    find_missing(binary, &library_path(command), cache.as_deref(), used)
}

fn find_missing(
    binary: &Path,
    listed: &[PathBuf],
    cache: Option<&[u8]>,
    used: &mut Vec<PathBuf>,
) -> Option<MissingNeed> {
    let program = elf::read_elf(binary)?;
    let interpreter = program.interpreter.as_ref()?;
    if !interpreter.exists() {
        let message = format!(
            "cannot run {}: its loader {} is not there: install it, or build the binary for this system",
            binary.display(),
            interpreter.display()
        );
        return Some(MissingNeed { kind: FailureKind::NotExecutable, message });
    }
    let loader = interpreter.file_name()?.to_str()?;
    // Report nothing for another C library, or without a cache: then the search paths are unknown.
    let cache = cache.filter(|_| loader.starts_with("ld-linux") || loader.starts_with("ld64"))?;
    let mut places: Vec<PathBuf> = listed.to_vec();
    let mut seen = BTreeSet::new();
    let mut next = vec![(binary.to_owned(), program)];
    while let Some((path, elf)) = next.pop() {
        for place in &elf.search_paths {
            places.push(expand_origin(place, &path)?);
        }
        for name in elf.needed {
            if seen.len() >= MAX_LIBRARIES || !seen.insert(name.clone()) {
                continue;
            }
            let Some(found) = find_library(&name, &places, cache) else {
                let message = format!(
                    "the shared library {name}, which {} needs, is in none of the places where it is looked for: install \
                     it or put it back, or name its directory in `env.LD_LIBRARY_PATH`",
                    path.display()
                );
                return Some(MissingNeed { kind: FailureKind::MissingLibrary, message });
            };
            used.push(found.clone());
            // Skip the needs of a library that cannot be read.
            next.extend(elf::read_elf(&found).map(|elf| (found, elf)));
        }
    }
    None
}

/// Finds a library in these directories or in the loader's cache.
fn find_library(name: &str, places: &[PathBuf], cache: &[u8]) -> Option<PathBuf> {
    if name.contains('/') {
        return Some(PathBuf::from(name)).filter(|path| path.exists());
    }
    let cached = cache.split(|byte| *byte == 0).filter_map(|text| {
        let path = std::str::from_utf8(text).ok()?;
        // Begin at the first slash: binary data of the cache may precede the first path.
        let path = path.get(path.find('/')?..)?;
        (path.rsplit('/').next() == Some(name)).then(|| PathBuf::from(path))
    });
    let beside =
        places.iter().cloned().chain(DEFAULT_DIRECTORIES.map(PathBuf::from)).map(|place| place.join(name));
    beside.chain(cached).find(|path| path.exists())
}

/// Directories in `LD_LIBRARY_PATH` of a process with this command.
fn library_path(command: &ServerCommand) -> Vec<PathBuf> {
    const LIBRARY_PATH_VARIABLE: &str = "LD_LIBRARY_PATH";
    let own =
        command.env.iter().rfind(|(name, _)| name == LIBRARY_PATH_VARIABLE).map(|(_, value)| value.into());
    let inherited = || {
        std::env::var_os(LIBRARY_PATH_VARIABLE)
            .filter(|_| !command.env_remove.iter().any(|name| name == LIBRARY_PATH_VARIABLE))
    };
    let value: std::ffi::OsString = own.or_else(inherited).unwrap_or_default();
    std::env::split_paths(&value).filter(|path| !path.as_os_str().is_empty()).collect()
}

/// Expands `$ORIGIN` in a search path; `None` if the path has another variable of the loader.
fn expand_origin(place: &str, of: &Path) -> Option<PathBuf> {
    let real = fs::canonicalize(of).ok()?;
    let folder = real.parent()?.to_str()?;
    let text = place.replace("${ORIGIN}", folder).replace("$ORIGIN", folder);
    (!text.contains('$')).then(|| PathBuf::from(text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::needs::elf::tests::made;

    /// A folder with a loader of the usual C library, which all files name.
    struct Home {
        folder: tempfile::TempDir,
        loader: String,
    }

    impl Home {
        fn new(loader: &str) -> Self {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join(loader);
            fs::write(&path, "").unwrap();
            Self { loader: path.to_str().unwrap().to_owned(), folder }
        }

        fn at(&self, name: &str) -> PathBuf {
            self.folder.path().join(name)
        }

        fn file(&self, name: &str, needed: &[&str], runpath: &str) -> PathBuf {
            let path = self.at(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, made(&self.loader, needed, runpath)).unwrap();
            path
        }
    }

    fn message(binary: &Path, listed: &[PathBuf], cache: &[u8]) -> Option<String> {
        find_missing(binary, listed, Some(cache), &mut Vec::new()).map(|missing| missing.message)
    }

    #[test]
    fn a_library_that_is_nowhere_is_missed_by_name_wherever_it_is_named() {
        let home = Home::new("ld-linux-x86-64.so.2");
        let binary = home.file("bin/server", &["libown.so.1"], "$ORIGIN/../lib");
        let told = message(&binary, &[], b"").unwrap();
        assert!(told.contains("libown.so.1, which") && told.contains("bin/server needs"), "{told}");
        // The library is found by the runpath, and then its own needs are checked.
        home.file("lib/libown.so.1", &["libdeep.so.2"], "");
        let told = message(&binary, &[], b"").unwrap();
        assert!(told.contains("libdeep.so.2, which") && told.contains("lib/libown.so.1 needs"), "{told}");
        let deep = home.file("deep/libdeep.so.2", &["libown.so.1"], "");
        let cache = format!("glibc-ld.so.cache1.1\u{1}\0libdeep.so.2\0{}\0", deep.display());
        assert_eq!(message(&binary, &[], cache.as_bytes()), None, "in the loader's list");
        assert_eq!(message(&binary, &[home.at("deep")], b""), None, "in LD_LIBRARY_PATH");
        fs::remove_file(deep).unwrap();
        assert!(message(&binary, &[], cache.as_bytes()).is_some(), "the list is older than the disk");
    }

    #[test]
    fn what_is_not_sure_is_not_missed() {
        let home = Home::new("ld-musl-x86_64.so.1");
        let binary = home.file("server", &["libnowhere.so"], "");
        assert_eq!(message(&binary, &[], b""), None, "another loader");
        let home = Home::new("ld-linux-x86-64.so.2");
        let binary = home.file("server", &["libnowhere.so"], "");
        assert_eq!(find_missing(&binary, &[], None, &mut Vec::new()), None, "no list");
        let binary = home.file("server", &["libnowhere.so"], "/opt/$LIB");
        assert_eq!(message(&binary, &[], b""), None, "a place that nobody knows here");
        fs::write(home.at("script"), "#!/bin/sh\n").unwrap();
        assert_eq!(message(&home.at("script"), &[], b""), None);
    }

    #[test]
    fn a_loader_that_is_not_there_is_named() {
        let home = Home::new("ld-linux-x86-64.so.2");
        let binary = home.file("server", &[], "");
        fs::remove_file(&home.loader).unwrap();
        let missing = find_missing(&binary, &[], None, &mut Vec::new()).unwrap();
        assert_eq!(missing.kind, FailureKind::NotExecutable);
        assert!(missing.message.contains(&home.loader), "{}", missing.message);
    }

    #[test]
    fn programs_of_this_machine_miss_nothing() {
        let cache = fs::read(LD_CACHE).unwrap_or_default();
        for program in ["/bin/sh", "/usr/bin/env", "/usr/bin/c++"] {
            assert_eq!(message(Path::new(program), &[], &cache), None, "{program}");
        }
    }
}
