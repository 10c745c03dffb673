//! Checks that no other user of the machine can exchange a path.
//!
//! Each name of the path has to belong to our user or to root. Each directory must not be writable for other
//! users, unless it is sticky: there, others can rename or remove only their own names. So a checked path
//! stays valid. sudo and ssh apply the same rule.
//!
//! ```text
//!     /              root's, 0755
//!     /tmp           root's, 1777    others create names here
//!     /tmp/alice     alice's, 0700   and cannot remove this one
//! ```
//!
//! In containers there are no other users, but volumes often belong to root and are writable for all (as each
//! Kubernetes `emptyDir` is). So in a container, a directory of root is accepted with any mode.
//!
//! If this process runs as root, a directory of another user inside a directory of root is accepted too: root
//! gave it to that user, as `/var/lib/llama-warden` to the service. See [`path_owner`].

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs::{self, DirBuilder, File, Metadata, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Component, Path, PathBuf};
use std::sync::OnceLock;

use rustix::fs::OFlags;
use rustix::process::geteuid;

/// Limit of symbolic links in a path, as in the kernel.
const MAX_LINKS: usize = 40;
/// Limit of attempts to create a directory while others create and remove it.
const MAX_ATTEMPTS: usize = 100;
const ROOT_UID: u32 = 0;
const WRITABLE_FOR_GROUP: u32 = 0o020;
const WRITABLE_FOR_ALL: u32 = 0o002;
const STICKY: u32 = 0o1000;

/// User who controls a path: our user, root, or a user to whom root gave a directory.
///
/// # Errors
/// Another user can exchange a part of the path, or a part is missing or cannot be read.
pub fn path_owner(path: &Path) -> io::Result<u32> {
    PathWalk::walk_path(path, false).map(|place| place.owner)
}

/// Creates a directory (mode 0700) with missing parents, and checks the whole path.
///
/// # Errors
/// Another user can exchange a part of the path, or a part is no directory or cannot be created.
pub fn make_dir(path: &Path) -> io::Result<()> {
    PathWalk::walk_path(path, true).map(drop)
}

/// Opens a directory, creates it if missing, and sets mode 0700.
///
/// # Errors
/// The errors of [`make_dir`], or the directory belongs to another user.
pub fn make_private_dir(path: &Path) -> io::Result<File> {
    make_dir(path)?;
    let directory = open_dir(path)?;
    let facts = directory.metadata()?;
    if facts.uid() != geteuid().as_raw() {
        return Err(foreign_error(path, facts.uid()));
    }
    if facts.mode() & 0o7777 != 0o700 {
        directory.set_permissions(fs::Permissions::from_mode(0o700))?;
    }
    Ok(directory)
}

/// Opens a directory, but no symbolic link.
///
/// # Errors
/// The path is missing, is no directory, or cannot be read.
pub fn open_dir(path: &Path) -> io::Result<File> {
    let flags = (OFlags::DIRECTORY | OFlags::NOFOLLOW).bits();
    OpenOptions::new().read(true).custom_flags(flags.cast_signed()).open(path)
}

/// Owner of the last directory that was followed, and write permission of other users.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PathPlace {
    owner: u32,
    shared: bool,
}

/// Owner and mode of one name.
#[derive(Clone, Copy, Debug)]
struct PathFacts {
    uid: u32,
    gid: u32,
    mode: u32,
    is_dir: bool,
}

impl PathFacts {
    fn new(metadata: &Metadata) -> Self {
        let (uid, gid, mode) = (mapped_uid(metadata.uid()), mapped_uid(metadata.gid()), metadata.mode());
        Self { uid, gid, mode, is_dir: metadata.is_dir() }
    }

    /// True if other users can write. A group with the user's number has no other members: many systems
    /// create one for each user.
    fn is_writable_for_others(self) -> bool {
        let by_group = self.mode & WRITABLE_FOR_GROUP != 0 && self.gid != self.uid;
        self.mode & WRITABLE_FOR_ALL != 0 || by_group
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PathDistrust {
    Foreign(u32),
    Writable,
}

impl PathPlace {
    /// `own`: our user.
    fn follow_name(self, own: u32, in_container: bool, facts: PathFacts) -> Result<Self, PathDistrust> {
        let given_by_root = own == ROOT_UID && self.owner == ROOT_UID && !self.shared;
        let owner = match facts.uid {
            // The owner of the directory above can rename a name of root.
            ROOT_UID => self.owner,
            uid if uid == own || uid == self.owner || given_by_root => uid,
            uid => return Err(PathDistrust::Foreign(uid)),
        };
        let writable = facts.is_dir && facts.is_writable_for_others();
        if writable && facts.mode & STICKY == 0 && !(in_container && facts.uid == ROOT_UID) {
            return Err(PathDistrust::Writable);
        }
        Ok(Self { owner, shared: writable })
    }
}

struct PathWalk {
    at: PathBuf,
    /// Results for `at` and all directories above it.
    places: Vec<PathPlace>,
    rest: VecDeque<OsString>,
    links: usize,
    /// Owner of a followed symbolic link, who controls the rest of the path.
    link_owner: u32,
}

impl PathWalk {
    fn walk_path(path: &Path, make: bool) -> io::Result<PathPlace> {
        let own = geteuid().as_raw();
        let (places, rest) = (Vec::new(), VecDeque::new());
        let mut walk = Self { at: "/".into(), places, rest, links: 0, link_owner: ROOT_UID };
        walk.begin_at_root(own)?;
        walk.prepend_path(&std::path::absolute(path)?);
        while let Some(name) = walk.rest.pop_front() {
            if name == ".." {
                if walk.at.pop() {
                    walk.places.pop();
                }
                continue;
            }
            let next = walk.at.join(&name);
            let metadata = if make { find_or_create(&next)? } else { fs::symlink_metadata(&next)? };
            let place = walk.follow_name(own, &next, &metadata)?;
            if make && place.owner != ROOT_UID && place.owner != own {
                return Err(foreign_error(&next, place.owner));
            }
            if make && !metadata.is_dir() && !metadata.is_symlink() {
                return Err(io::Error::other(format!("{} is no directory", next.display())));
            }
            if metadata.is_symlink() {
                walk.links += 1;
                if walk.links > MAX_LINKS {
                    return Err(io::Error::other(format!("{} leads through too many links", path.display())));
                }
                walk.link_owner = place.owner;
                let target = fs::read_link(&next)?;
                if target.is_absolute() {
                    walk.begin_at_root(own)?;
                }
                walk.prepend_path(&target);
            } else {
                walk.at = next;
                walk.places.push(place);
            }
        }
        Ok(walk.current_place())
    }

    fn begin_at_root(&mut self, own: u32) -> io::Result<()> {
        self.at = "/".into();
        self.places.clear();
        let metadata = fs::symlink_metadata(&self.at)?;
        let place = self.follow_name(own, &self.at, &metadata)?;
        self.places.push(place);
        Ok(())
    }

    fn current_place(&self) -> PathPlace {
        let place = self.places.last().copied().unwrap_or(PathPlace { owner: ROOT_UID, shared: false });
        if place.owner == ROOT_UID { PathPlace { owner: self.link_owner, ..place } } else { place }
    }

    fn follow_name(&self, own: u32, path: &Path, metadata: &Metadata) -> io::Result<PathPlace> {
        self.current_place().follow_name(own, in_container(), PathFacts::new(metadata)).map_err(|distrust| {
            match distrust {
                PathDistrust::Foreign(uid) => foreign_error(path, uid),
                PathDistrust::Writable => {
                    denied_error(format!("other users can write to {}", path.display()))
                }
            }
        })
    }

    fn prepend_path(&mut self, path: &Path) {
        for part in path.components().rev() {
            match part {
                Component::Normal(name) => self.rest.push_front(name.to_owned()),
                Component::ParentDir => self.rest.push_front("..".into()),
                Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
            }
        }
    }
}

/// Reads the metadata of a name, or creates a directory there if the name is missing. The caller checks the
/// owner.
fn find_or_create(path: &Path) -> io::Result<Metadata> {
    for _ in 0..MAX_ATTEMPTS {
        match fs::symlink_metadata(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            found => return found,
        }
        match DirBuilder::new().mode(0o700).create(path) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
    }
    Err(io::Error::other(format!("another program makes and removes {} all the time", path.display())))
}

fn foreign_error(path: &Path, uid: u32) -> io::Error {
    denied_error(format!("{} belongs to user {uid}, who can exchange what is in it", path.display()))
}

fn denied_error(why: String) -> io::Error {
    io::Error::new(ErrorKind::PermissionDenied, why)
}

/// True in a container. Other users cannot fake this: root owns the checked files, and the variable is in our
/// own environment.
fn in_container() -> bool {
    static IS: OnceLock<bool> = OnceLock::new();
    *IS.get_or_init(|| {
        ["/.dockerenv", "/run/.containerenv"].iter().any(|mark| Path::new(mark).exists())
            || std::env::var_os("KUBERNETES_SERVICE_HOST").is_some()
    })
}

/// Maps a user number: in a user namespace without root, files of root show the number of unmapped users.
fn mapped_uid(id: u32) -> u32 {
    static STANDS_FOR_ROOT: OnceLock<Option<u32>> = OnceLock::new();
    let stands = STANDS_FOR_ROOT.get_or_init(|| {
        let map = fs::read_to_string("/proc/self/uid_map").ok()?;
        let other = fs::read_to_string("/proc/sys/kernel/overflowuid").ok()?;
        if has_root(&map) { None } else { other.trim().parse().ok() }
    });
    if *stands == Some(id) { ROOT_UID } else { id }
}

fn has_root(uid_map: &str) -> bool {
    uid_map.trim().is_empty() || uid_map.lines().any(|line| line.split_whitespace().next() == Some("0"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALICE: u32 = 1000;
    const MALLORY: u32 = 1001;

    fn dir(uid: u32, mode: u32) -> PathFacts {
        PathFacts { uid, gid: uid, mode, is_dir: true }
    }

    /// Owner of a chain of directories, for a user.
    fn chain(own: u32, in_container: bool, chain: &[PathFacts]) -> Result<u32, PathDistrust> {
        let root = PathPlace { owner: ROOT_UID, shared: false };
        let place =
            chain.iter().try_fold(root, |place, facts| place.follow_name(own, in_container, *facts))?;
        Ok(place.owner)
    }

    #[test]
    fn a_path_is_followed_only_where_no_other_user_can_exchange_a_part() {
        let (top, tmp) = (dir(ROOT_UID, 0o755), dir(ROOT_UID, 0o1777));
        let link = |uid| PathFacts { uid, gid: uid, mode: 0o777, is_dir: false };
        let shared = PathFacts { gid: 5000, ..dir(ALICE, 0o775) };
        let (foreign, writable) = (Err(PathDistrust::Foreign(MALLORY)), Err(PathDistrust::Writable));
        for (own, path, wanted) in [
            (ALICE, vec![top, tmp, dir(ALICE, 0o700)], Ok(ALICE)),
            (ALICE, vec![top, tmp], Ok(ROOT_UID)),
            (ALICE, vec![top, top, dir(ALICE, 0o775)], Ok(ALICE)),
            (ALICE, vec![top, top, shared], writable),
            (ALICE, vec![top, dir(ROOT_UID, 0o777)], writable),
            (ALICE, vec![top, tmp, dir(ALICE, 0o777)], writable),
            (ALICE, vec![top, tmp, dir(ALICE, 0o1777), dir(MALLORY, 0o700)], foreign),
            (ALICE, vec![top, tmp, dir(MALLORY, 0o700)], foreign),
            (ALICE, vec![top, top, dir(MALLORY, 0o755), dir(ALICE, 0o700)], foreign),
            (ALICE, vec![top, tmp, link(MALLORY)], foreign),
            (ALICE, vec![top, tmp, link(ALICE)], Ok(ALICE)),
            (ROOT_UID, vec![top, tmp, dir(ROOT_UID, 0o700)], Ok(ROOT_UID)),
            (ROOT_UID, vec![top, tmp, dir(MALLORY, 0o755)], foreign),
            // Root gave this directory away, and paths below belong to its user.
            (ROOT_UID, vec![top, top, dir(ALICE, 0o750), dir(ALICE, 0o700)], Ok(ALICE)),
            (ROOT_UID, vec![top, top, dir(ALICE, 0o750), dir(ROOT_UID, 0o700)], Ok(ALICE)),
            (ROOT_UID, vec![top, top, dir(ALICE, 0o750), dir(MALLORY, 0o700)], foreign),
        ] {
            assert_eq!(chain(own, false, &path), wanted, "{own}: {path:?}");
        }
        let volume = [top, dir(ROOT_UID, 0o777), dir(ALICE, 0o700)];
        assert_eq!(chain(ALICE, true, &volume), Ok(ALICE));
        assert_eq!(chain(ALICE, true, &[top, dir(ROOT_UID, 0o777), dir(MALLORY, 0o700)]), foreign);
        assert_eq!(chain(ALICE, true, &[top, tmp, dir(ALICE, 0o777)]), writable);
    }

    #[test]
    fn behind_a_link_its_owner_decides() {
        if !geteuid().is_root() {
            return;
        }
        let base = tempfile::tempdir().unwrap();
        fs::set_permissions(base.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let (theirs, ours) = (base.path().join("theirs"), base.path().join("ours"));
        fs::create_dir(&theirs).unwrap();
        fs::create_dir(&ours).unwrap();
        std::os::unix::fs::symlink(&ours, theirs.join("link")).unwrap();
        for path in [theirs.join("link"), theirs.clone()] {
            std::os::unix::fs::lchown(&path, Some(ALICE), None).unwrap();
        }
        assert_eq!(path_owner(&ours).unwrap(), ROOT_UID);
        assert_eq!(path_owner(&theirs.join("link")).unwrap(), ALICE);
        let refused = make_dir(&theirs.join("link/new")).unwrap_err().to_string();
        assert!(refused.contains("belongs to user 1000") && !ours.join("new").exists(), "{refused}");
    }

    #[test]
    fn a_path_is_made_level_by_level_and_links_of_ours_are_followed() {
        let base = tempfile::tempdir().unwrap();
        let path = base.path().join("a/b/../c");
        make_dir(&path).unwrap();
        assert_eq!(fs::metadata(base.path().join("a")).unwrap().mode() & 0o777, 0o700);
        assert!(base.path().join("a/b").is_dir() && base.path().join("a/c").is_dir());
        std::os::unix::fs::symlink("a", base.path().join("link")).unwrap();
        make_dir(&base.path().join("link/d")).unwrap();
        assert!(base.path().join("a/d").is_dir());
        std::os::unix::fs::symlink("round", base.path().join("round")).unwrap();
        assert!(make_dir(&base.path().join("round/d")).unwrap_err().to_string().contains("links"));
        fs::write(base.path().join("file"), "").unwrap();
        assert!(make_private_dir(&base.path().join("file")).is_err());
    }

    #[test]
    fn a_directory_that_others_can_write_to_is_refused_by_name() {
        let base = tempfile::tempdir().unwrap();
        if in_container() && geteuid().is_root() {
            return;
        }
        let open = base.path().join("open");
        fs::create_dir(&open).unwrap();
        fs::set_permissions(&open, fs::Permissions::from_mode(0o777)).unwrap();
        let refused = make_private_dir(&open.join("mine")).unwrap_err().to_string();
        assert!(refused.contains(&format!("write to {}", open.display())), "{refused}");
        assert!(!open.join("mine").exists());
        fs::set_permissions(&open, fs::Permissions::from_mode(0o1777)).unwrap();
        make_private_dir(&open.join("mine")).unwrap();
        assert_eq!(fs::metadata(open.join("mine")).unwrap().mode() & 0o777, 0o700);
    }

    #[test]
    fn a_namespace_without_a_root_is_known_by_its_map() {
        for (map, is) in [
            ("         0          0 4294967295\n", true),
            ("         0       1000          1\n         1     100000      65536\n", true),
            ("      1000       1000          1\n", false),
        ] {
            assert_eq!(has_root(map), is, "{map}");
        }
    }
}
