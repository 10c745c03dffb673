//! Detects kills for lack of memory, from the kernel's counters before and after a process's end.
//!
//! A control group counts the kills in itself and below (`memory.events` of version 2, `memory.oom_control`
//! of version 1). A limit of a higher group kills, too, so all groups up to the root are read. If no group
//! has a counter, the whole machine's counter in `/proc/vmstat` is used.

use std::fs;
use std::path::{Path, PathBuf};

use crate::cgroup::group_levels;
use crate::files::number_field;

/// Counters of out-of-memory kills at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OomKills {
    /// Counter files and their values, from the process's own group upwards.
    groups: Vec<(PathBuf, u64)>,
    vmstat: PathBuf,
    machine: Option<u64>,
}

/// Counters that have increased.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OomChange {
    /// No counter has increased.
    Nowhere,
    /// The counter of the process's group, or of a group above it, has increased.
    InGroup,
    /// The counter of the machine has increased.
    OnMachine,
}

impl OomKills {
    /// Reads the counters for a live process; empty if none is readable.
    pub fn read(pid: u32) -> Self {
        Self::read_from(Path::new("/proc"), Path::new("/sys/fs/cgroup"), pid)
    }

    fn read_from(proc: &Path, root: &Path, pid: u32) -> Self {
        let listed = fs::read_to_string(proc.join(format!("{pid}/cgroup"))).unwrap_or_default();
        let groups = listed.lines().flat_map(|line| group_levels(line, root));
        let groups = groups
            .map(|(folder, names)| folder.join(names.kills))
            .filter_map(|file| read_count(&file).map(|kills| (file, kills)))
            .collect();
        let vmstat = proc.join("vmstat");
        Self { groups, machine: read_count(&vmstat), vmstat }
    }

    /// Returns the counters that have increased since `self` was read; `None` if none is readable now.
    pub fn compare(&self) -> Option<OomChange> {
        let more = |file: &Path, before: u64| read_count(file).map(|now| now > before);
        let groups: Vec<bool> = self.groups.iter().filter_map(|(file, before)| more(file, *before)).collect();
        if groups.contains(&true) {
            return Some(OomChange::InGroup);
        }
        match self.machine.and_then(|before| more(&self.vmstat, before)) {
            Some(true) => Some(OomChange::OnMachine),
            Some(false) => Some(OomChange::Nowhere),
            None => (!groups.is_empty()).then_some(OomChange::Nowhere),
        }
    }
}

/// Reads the number from a line such as `oom_kill 3`, which all counter files have.
fn read_count(file: &Path) -> Option<u64> {
    number_field(&fs::read_to_string(file).ok()?, "oom_kill")
}

#[cfg(test)]
mod tests {
    use super::*;

    struct OomMachine(tempfile::TempDir);

    impl OomMachine {
        fn new(group: &str) -> Self {
            let machine = Self(tempfile::tempdir().unwrap());
            machine.write("proc/7/cgroup", group);
            machine
        }

        fn write(&self, path: &str, text: &str) {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }

        fn read(&self) -> OomKills {
            OomKills::read_from(&self.0.path().join("proc"), &self.0.path().join("cgroup"), 7)
        }
    }

    #[test]
    fn a_kill_is_seen_in_the_group_around_it_in_version_1_and_on_the_machine() {
        let events = |kills| format!("low 0\nhigh 0\nmax 9\noom 1\noom_kill {kills}\noom_group_kill 0\n");
        let machine = OomMachine::new("0::/slice/unit\n");
        machine.write("proc/vmstat", "nr_free_pages 5\noom_kill 2\n");
        machine.write("cgroup/slice/unit/memory.events", &events(0));
        machine.write("cgroup/slice/memory.events", &events(4));
        let before = machine.read();
        assert_eq!(before.compare(), Some(OomChange::Nowhere));
        machine.write("proc/vmstat", "oom_kill 3\n");
        assert_eq!(before.compare(), Some(OomChange::OnMachine));
        machine.write("cgroup/slice/memory.events", &events(5));
        assert_eq!(before.compare(), Some(OomChange::InGroup));

        let machine = OomMachine::new("5:cpu,cpuacct:/a\n4:memory:/docker/x\n");
        machine.write(
            "cgroup/memory/docker/x/memory.oom_control",
            "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n",
        );
        let before = machine.read();
        machine.write(
            "cgroup/memory/docker/x/memory.oom_control",
            "oom_kill_disable 0\nunder_oom 1\noom_kill 1\n",
        );
        assert_eq!(before.compare(), Some(OomChange::InGroup));
    }

    #[test]
    fn where_nothing_counts_nothing_is_said() {
        let machine = OomMachine::new("0::/../../outside\n");
        assert_eq!(machine.read().compare(), None);
        machine.write("proc/vmstat", "oom_kill 2\n");
        assert_eq!(machine.read().compare(), Some(OomChange::Nowhere));
    }
}
