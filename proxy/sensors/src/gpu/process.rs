//! Finds the process behind a pid that a driver reports, in our own `/proc` and in the host's.
//!
//! In a container the driver may report the host's pids. If the host's `/proc` is readable (at `/host/proc`,
//! or mounted in place of ours), `NSpid` and `NSpgid` translate them. Equal pids occur in many containers, so
//! a match counts only if the namespaces or start times prove it.

use std::fs;
use std::path::{Path, PathBuf};

use super::ladder::ProcessOwner;

/// Link text of the first pid namespace: the kernel fixes its number (`PROC_PID_INIT_INO`).
const FIRST_NAMESPACE: &str = "pid:[4026531836]";

/// A `/proc` directory, with the pids of one namespace.
#[derive(Clone, Debug)]
struct ProcView {
    root: PathBuf,
    /// Depth of our pid namespace below the namespace of this view; 1 if both are the same.
    depth: usize,
    namespace: Option<PathBuf>,
}

#[derive(Clone, Debug)]
pub(super) struct ProcViews {
    own: PathBuf,
    views: Vec<ProcView>,
    contained: bool,
}

impl ProcViews {
    pub(super) fn open(proc: &Path, host: &Path) -> Self {
        let views: Vec<ProcView> = [proc, host].into_iter().filter_map(ProcView::open).collect();
        let namespace = fs::read_link(proc.join("self/ns/pid")).ok();
        // A sandbox that hides its namespace counts as a container.
        let contained = namespace.is_none_or(|namespace| namespace != Path::new(FIRST_NAMESPACE));
        Self { own: proc.to_owned(), views, contained }
    }

    pub(super) fn is_contained(&self) -> bool {
        self.contained
    }

    pub(super) fn identify(&self, pid: u32) -> ProcessOwner {
        let seen = self.views.iter().map(|view| self.identify_in(view, pid));
        seen.reduce(|first, second| if first == ProcessOwner::Unseen { second } else { first })
            .unwrap_or(ProcessOwner::Unseen)
    }

    fn identify_in(&self, view: &ProcView, pid: u32) -> ProcessOwner {
        let Some(ids) = NamespaceIds::read(&view.root, &pid.to_string()) else { return ProcessOwner::Unseen };
        let level = view.depth - 1;
        let (Some(&inner), Some(&group)) = (ids.pids.get(level), ids.groups.get(level)) else {
            return ProcessOwner::Other;
        };
        let proved = level == 0 || self.is_proved(view, pid, inner);
        if proved { ProcessOwner::Seen { pid: inner, group } } else { ProcessOwner::Other }
    }

    /// Returns whether pid `pid` of this view is certainly pid `inner` of our own view.
    fn is_proved(&self, view: &ProcView, pid: u32, inner: u32) -> bool {
        let namespace = fs::read_link(view.root.join(format!("{pid}/ns/pid"))).ok();
        if namespace.is_some() && namespace == view.namespace {
            return true;
        }
        // Start times count from the boot in every view.
        let start = start_ticks(&view.root, pid);
        view.root != self.own && start.is_some() && start == start_ticks(&self.own, inner)
    }
}

impl ProcView {
    fn open(root: &Path) -> Option<Self> {
        let depth = NamespaceIds::read(root, "self")?.pids.len();
        (depth > 0).then(|| Self {
            root: root.to_owned(),
            depth,
            namespace: fs::read_link(root.join("self/ns/pid")).ok(),
        })
    }
}

/// The ids of a process in each namespace, outermost first.
struct NamespaceIds {
    pids: Vec<u32>,
    groups: Vec<u32>,
}

impl NamespaceIds {
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
        // Some sandboxes (gVisor) omit these lines, and have only one namespace.
        let group = stat_field(root, pid, 5).and_then(|group| u32::try_from(group).ok());
        Some(Self { pids: ids("Tgid:"), groups: group.into_iter().collect() })
    }
}

fn start_ticks(root: &Path, pid: u32) -> Option<u64> {
    stat_field(root, &pid.to_string(), 22)
}

/// Numbered as in `proc(5)`; counted after the program's name, which may contain any character.
fn stat_field(root: &Path, pid: &str, field: usize) -> Option<u64> {
    let text = fs::read_to_string(root.join(pid).join("stat")).ok()?;
    text.rsplit_once(')')?.1.split_ascii_whitespace().nth(field.checked_sub(3)?)?.parse().ok()
}
