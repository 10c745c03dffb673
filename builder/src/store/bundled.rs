//! Builds that a package installed next to this program, as `bin/llama-warden` and `lib/llama-warden/builds`.
//!
//! A Python wheel does so. The package manager owns these builds: the store reads them after its own, and they are
//! never preferred to one of its own automatically, changed or removed.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::{BuildId, BuildStore, StoreListing, ids_in};
use crate::environment::{self, is_kept_by};
use crate::store::Provenance;

/// Path of the bundled builds, relative to the folder above that of the program.
const BUNDLED_BUILDS: &str = "lib/llama-warden/builds";

impl BuildStore {
    /// The store under a data folder, with the builds that a package installed next to this program.
    pub fn with_bundled(data: &Path) -> Self {
        Self {
            bundled: environment::program_folder().and_then(|folder| find_bundled(&folder)),
            ..Self::new(data)
        }
    }

    /// Returns true if a package installed this build, and the store has none of this id itself.
    pub fn is_bundled(&self, id: &BuildId) -> bool {
        !self.folder(id).exists() && self.bundled_folder(id).is_some()
    }

    /// The newest usable bundled build, if there is one.
    pub fn newest_bundled(&self) -> Option<Provenance> {
        let builds = self.bundled.iter().flat_map(|folder| ids_in(folder));
        let usable = builds.filter(|id| self.is_bundled(id)).filter_map(|id| self.show(&id).ok());
        usable.max_by(|one, other| (&one.built_at, &one.id).cmp(&(&other.built_at, &other.id)))
    }

    /// The folder of a build for reading: that of the store, else the bundled one.
    pub(super) fn readable_folder(&self, id: &BuildId) -> PathBuf {
        let own = self.folder(id);
        if own.exists() { own } else { self.bundled_folder(id).unwrap_or(own) }
    }

    pub(super) fn bundled_folder(&self, id: &BuildId) -> Option<PathBuf> {
        self.bundled.as_ref().map(|folder| folder.join(id.as_str())).filter(|folder| folder.exists())
    }

    pub(super) fn append_bundled(&self, listing: &mut StoreListing) {
        let mut found = Vec::new();
        for id in self.bundled.iter().flat_map(|folder| ids_in(folder)).filter(|id| self.is_bundled(id)) {
            match self.show(&id) {
                Ok(build) => found.push(build),
                Err(error) => listing.damaged.push((self.readable_folder(&id), error.to_string())),
            }
        }
        found.sort_by(|one, other| (&other.built_at, &other.id).cmp(&(&one.built_at, &one.id)));
        listing.bundled = found.iter().map(|build| build.id.clone()).collect();
        listing.builds.extend(found);
    }
}

/// Returns the folder of bundled builds of a program in `bin`. In a shared place such as `/tmp`, any user could
/// create it or a part of its path, so each part must belong to root or to the owner of `bin`.
fn find_bundled(bin: &Path) -> Option<PathBuf> {
    let owner = fs::metadata(bin).ok()?.uid();
    let prefix = bin.parent()?;
    let folder = prefix.join(BUNDLED_BUILDS);
    let mut parts = folder.ancestors().take_while(|part| *part != prefix);
    parts.all(|part| is_kept_by(owner, part)).then_some(folder)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::error::BuilderError;
    use crate::store::GcKeep;
    use crate::store::tests::provenance;

    /// Installs a build with a library into a store, and returns its id.
    fn install(store: &BuildStore, folder: &Path, time: &str) -> BuildId {
        let mut made = provenance(&[&format!("TIME={time}")], time, 5);
        made.libraries.insert("libggml-cpu-haswell.so".into(), made.binary.clone());
        for name in ["binary", "libggml-cpu-haswell.so"] {
            fs::write(folder.join(name), "12345").unwrap();
        }
        store.install(&folder.join("binary"), &made).unwrap();
        made.id
    }

    #[test]
    fn a_bundled_build_is_used_until_there_is_another_and_is_never_removed() {
        let folder = tempfile::tempdir().unwrap();
        let (prefix, data) = (folder.path().join("prefix"), folder.path().join("data"));
        fs::create_dir_all(prefix.join("bin")).unwrap();
        let package = BuildStore::new(&prefix.join("lib/llama-warden"));
        // The bundled build is newer than the user's own.
        let bundled = install(&package, folder.path(), "2026-02-01T00:00:00Z");
        let store = BuildStore { bundled: find_bundled(&prefix.join("bin")), ..BuildStore::new(&data) };
        let in_use = || store.default_build().unwrap().unwrap().id;
        assert_eq!((in_use(), store.newest_bundled().unwrap().id), (bundled.clone(), bundled.clone()));
        let binary = store.binary(&bundled).unwrap();
        assert_eq!(store.find_by_file(&binary), Some(bundled.clone()));
        assert_eq!(store.resolve(&bundled.as_str()[..6]).unwrap(), bundled);

        let own = install(&store, folder.path(), "2026-01-01T00:00:00Z");
        assert_eq!(in_use(), own);
        let listing = store.list().unwrap();
        let ids: Vec<&BuildId> = listing.builds.iter().map(|build| &build.id).collect();
        assert_eq!((ids, listing.bundled), (vec![&own, &bundled], vec![bundled.clone()]));
        let error = store.remove(&bundled).unwrap_err();
        assert!(matches!(error, BuilderError::BundledBuild { .. }), "{error}");
        let sweep = store.plan_gc(&GcKeep::default()).unwrap();
        assert_eq!((sweep.builds.iter().map(|(id, _)| id).collect::<Vec<_>>(), sweep.left), (vec![&own], 1));
        store.gc(&sweep, |_, _| ()).unwrap();
        assert!(!store.root().join(own.as_str()).exists() && binary.exists());
        assert_eq!(in_use(), bundled);
    }

    #[test]
    fn bundled_builds_that_another_user_could_have_put_there_are_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let bin = folder.path().join("bin");
        fs::create_dir_all(&bin).unwrap();
        fs::create_dir_all(folder.path().join("lib/llama-warden")).unwrap();
        let builds = folder.path().join(BUNDLED_BUILDS);
        std::os::unix::fs::symlink(std::env::temp_dir(), &builds).unwrap();
        assert_eq!(find_bundled(&bin), None, "a link to a folder of root");
        fs::remove_file(&builds).unwrap();
        fs::create_dir(&builds).unwrap();
        assert_eq!(find_bundled(&bin), Some(builds.clone()));
        let parent = folder.path().join("lib/llama-warden");
        for changed in [&builds, &parent] {
            fs::set_permissions(changed, fs::Permissions::from_mode(0o777)).unwrap();
            assert_eq!(find_bundled(&bin), None, "{}", changed.display());
            fs::set_permissions(changed, fs::Permissions::from_mode(0o755)).unwrap();
        }
    }

    #[test]
    fn a_build_without_one_of_its_libraries_is_damaged() {
        let folder = tempfile::tempdir().unwrap();
        let store = BuildStore::new(folder.path());
        let id = install(&store, folder.path(), "2026-01-01T00:00:00Z");
        store.binary(&id).unwrap();
        fs::write(store.folder(&id).join("libggml-cpu-haswell.so"), "1").unwrap();
        let error = store.binary(&id).unwrap_err().to_string();
        assert!(error.contains("libggml-cpu-haswell.so has not the size"), "{error}");
        store.remove(&id).unwrap();
    }
}
