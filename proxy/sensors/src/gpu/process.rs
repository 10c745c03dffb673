//! Whose a pid is that a driver names: found in `/proc`, in our own view of it and in the host's where that is visible.
//!
//! In a container the driver may name processes as the host does. Where the host's `/proc` can be read (at
//! `/host/proc`, or because it is mounted in place of ours), `NSpid` and `NSpgid` translate; a match counts only if the
//! namespaces or the start times prove it, because small process ids repeat from container to container.

use std::fs;
use std::path::{Path, PathBuf};

use super::ladder::Who;

/// The first namespace of process ids: its number is fixed in the kernel (`PROC_PID_INIT_INO`).
const FIRST: &str = "pid:[4026531836]";

/// One `/proc`.
#[derive(Clone, Debug)]
struct View {
    root: PathBuf,
    /// How many namespaces deep we are in it: 1 if our ids are its ids.
    depth: usize,
    namespace: Option<PathBuf>,
}

/// All views of processes that we have.
#[derive(Clone, Debug)]
pub(super) struct Processes {
    own: PathBuf,
    views: Vec<View>,
    contained: bool,
}

impl Processes {
    pub(super) fn open(proc: &Path, host: &Path) -> Self {
        let views: Vec<View> = [proc, host].into_iter().filter_map(View::open).collect();
        let namespace = fs::read_link(proc.join("self/ns/pid")).ok();
        // Sandboxes that do not say are no host either.
        let contained = namespace.is_none_or(|namespace| namespace != Path::new(FIRST));
        Self { own: proc.to_owned(), views, contained }
    }

    /// Whether we have process ids of our own.
    pub(super) fn contained(&self) -> bool {
        self.contained
    }

    pub(super) fn who(&self, pid: u32) -> Who {
        let seen = self.views.iter().map(|view| self.in_view(view, pid));
        seen.reduce(|first, second| if first == Who::Unseen { second } else { first }).unwrap_or(Who::Unseen)
    }

    fn in_view(&self, view: &View, pid: u32) -> Who {
        let Some(ids) = Ids::read(&view.root, &pid.to_string()) else { return Who::Unseen };
        let level = view.depth - 1;
        let (Some(&inner), Some(&group)) = (ids.pids.get(level), ids.groups.get(level)) else {
            return Who::Other;
        };
        let proved = level == 0 || self.proved(view, pid, inner);
        if proved { Who::Seen { pid: inner, group } } else { Who::Other }
    }

    /// Whether process `pid` of this view is `inner` of ours.
    fn proved(&self, view: &View, pid: u32, inner: u32) -> bool {
        let namespace = fs::read_link(view.root.join(format!("{pid}/ns/pid"))).ok();
        if namespace.is_some() && namespace == view.namespace {
            return true;
        }
        // Start times count from the boot in every view.
        let start = started(&view.root, pid);
        view.root != self.own && start.is_some() && start == started(&self.own, inner)
    }
}

impl View {
    fn open(root: &Path) -> Option<Self> {
        let depth = Ids::read(root, "self")?.pids.len();
        (depth > 0).then(|| Self {
            root: root.to_owned(),
            depth,
            namespace: fs::read_link(root.join("self/ns/pid")).ok(),
        })
    }
}

/// The ids of a process in each namespace, outermost first.
struct Ids {
    pids: Vec<u32>,
    groups: Vec<u32>,
}

impl Ids {
    fn read(root: &Path, pid: &str) -> Option<Self> {
        let text = fs::read_to_string(root.join(pid).join("status")).ok()?;
        let ids = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
            line.split_ascii_whitespace().map_while(|id| id.parse().ok()).collect()
        };
        let (pids, groups): (Vec<u32>, Vec<u32>) = (ids("NSpid:"), ids("NSpgid:"));
        if !pids.is_empty() {
            return Some(Self { pids, groups });
        }
        // Some sandboxes (gVisor) leave them out, and show one namespace only.
        let group = stat(root, pid, 5).and_then(|group| u32::try_from(group).ok());
        Some(Self { pids: ids("Tgid:"), groups: group.into_iter().collect() })
    }
}

/// Ticks since the boot.
fn started(root: &Path, pid: u32) -> Option<u64> {
    stat(root, &pid.to_string(), 22)
}

/// A field of `stat`, numbered as in its manual page: counted from behind the second, the name, which may contain
/// anything.
fn stat(root: &Path, pid: &str, field: usize) -> Option<u64> {
    let text = fs::read_to_string(root.join(pid).join("stat")).ok()?;
    text.rsplit_once(')')?.1.split_ascii_whitespace().nth(field.checked_sub(3)?)?.parse().ok()
}
