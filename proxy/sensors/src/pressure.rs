//! Reads the control group (version 2) of a backend: memory in use, out-of-memory events, pressure stalls.
//!
//! `memory.current` includes the page cache of a mapped model, so it is shown but not used for decisions. The
//! kernel charges the memory of a group without a memory controller to the next group above that has one;
//! this module reads that group.

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::SensorError;
use crate::files::{field, number_field};

/// Memory of a backend's control group. A value is `None` if the group has no such file or access is denied.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CgroupMemory {
    /// Path of the group to which memory is charged, as in `/proc/<pid>/cgroup`.
    pub path: String,
    /// True if llama-warden itself is outside that group.
    pub own: bool,
    /// `memory.current`: bytes charged to the group, including file pages.
    pub current: Option<u64>,
    /// Counters from `memory.events`.
    pub events: Option<MemoryEvents>,
    /// Pressure stalls from `memory.pressure`.
    pub pressure: Option<MemoryPressure>,
}

/// Counters of `memory.events`, since the group was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryEvents {
    /// Number of times that the group exceeded `memory.high` and was throttled.
    pub high: u64,
    /// Number of times that the group was about to exceed `memory.max`.
    pub max: u64,
    /// Number of times that an allocation failed for lack of memory.
    pub oom: u64,
    /// Number of processes that the kernel killed for lack of memory.
    pub oom_kill: u64,
}

/// Pressure stalls: percent of time during which tasks waited for memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MemoryPressure {
    /// Percent of the last 10 seconds in which at least one task waited.
    pub some_avg10: f64,
    /// Percent of the last 60 seconds in which at least one task waited.
    pub some_avg60: f64,
    /// Percent of the last 10 seconds in which all tasks waited.
    pub full_avg10: f64,
    /// Percent of the last 60 seconds in which all tasks waited.
    pub full_avg60: f64,
}

/// Reads the control group of process `pid`. Without version 2, path and values are empty.
///
/// # Errors
///
/// The process is gone.
pub fn cgroup_memory(pid: u32) -> Result<CgroupMemory, SensorError> {
    read_group(Path::new("/proc"), Path::new("/sys/fs/cgroup"), pid)
}

fn read_group(proc: &Path, root: &Path, pid: u32) -> Result<CgroupMemory, SensorError> {
    let groups =
        fs::read_to_string(proc.join(format!("{pid}/cgroup"))).map_err(|_| SensorError::Ended { pid })?;
    let Some(path) = v2_path(&groups) else { return Ok(CgroupMemory::default()) };
    let ours = fs::read_to_string(proc.join("self/cgroup")).unwrap_or_default();
    // A path with `..` is outside of our cgroup namespace.
    let inside = !path.split('/').any(|part| part == "..");
    let folder = |path: &str| root.join(path.trim_start_matches('/'));
    let mut above = Path::new(path).ancestors().filter_map(Path::to_str);
    let is_charged = |path: &&str| folder(path).join("memory.current").exists();
    let path = if inside { above.find(is_charged).unwrap_or(path) } else { path };
    let file = |name: &str| {
        if inside { fs::read_to_string(folder(path).join(name)).ok() } else { None }
    };
    Ok(CgroupMemory {
        own: !v2_path(&ours).is_some_and(|ours| Path::new(ours).starts_with(path)),
        current: file("memory.current").and_then(|text| text.trim().parse().ok()),
        events: file("memory.events").as_deref().and_then(parse_events),
        pressure: file("memory.pressure").as_deref().and_then(parse_pressure),
        path: path.to_owned(),
    })
}

fn v2_path(groups: &str) -> Option<&str> {
    groups.lines().find_map(|line| line.strip_prefix("0::"))
}

fn parse_events(text: &str) -> Option<MemoryEvents> {
    Some(MemoryEvents {
        high: number_field(text, "high")?,
        max: number_field(text, "max")?,
        oom: number_field(text, "oom")?,
        oom_kill: number_field(text, "oom_kill")?,
    })
}

/// Parses the lines `some avg10=0.00 avg60=0.00 avg300=0.00 total=0` and `full …`.
fn parse_pressure(text: &str) -> Option<MemoryPressure> {
    let share = |who: &str, over: &str| -> Option<f64> {
        let mut parts = field(text, who, ' ')?.split_ascii_whitespace();
        let share = parts.find_map(|part| part.strip_prefix(over)?.strip_prefix('='))?;
        share.parse().ok().filter(|share: &f64| share.is_finite())
    };
    Some(MemoryPressure {
        some_avg10: share("some", "avg10")?,
        some_avg60: share("some", "avg60")?,
        full_avg10: share("full", "avg10")?,
        full_avg60: share("full", "avg60")?,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }

    fn of(root: &tempfile::TempDir) -> CgroupMemory {
        read_group(&root.path().join("proc"), &root.path().join("cg"), 7).unwrap()
    }

    #[test]
    fn a_group_of_its_own_is_read_in_full() {
        let root = tree(&[
            ("proc/self/cgroup", "0::/warden\n"),
            ("proc/7/cgroup", "0::/warden/seven\n"),
            ("cg/warden/seven/memory.current", "4096\n"),
            ("cg/warden/seven/memory.events", "low 0\nhigh 3\nmax 2\noom 1\noom_kill 4\noom_group_kill 0\n"),
            (
                "cg/warden/seven/memory.pressure",
                "some avg10=1.50 avg60=0.25 avg300=0.00 total=9\nfull avg10=0.75 avg60=0.10 avg300=0.00 total=1\n",
            ),
        ]);
        let expected = CgroupMemory {
            path: "/warden/seven".to_owned(),
            own: true,
            current: Some(4096),
            events: Some(MemoryEvents { high: 3, max: 2, oom: 1, oom_kill: 4 }),
            pressure: Some(MemoryPressure {
                some_avg10: 1.5,
                some_avg60: 0.25,
                full_avg10: 0.75,
                full_avg60: 0.1,
            }),
        };
        assert_eq!(of(&root), expected);
    }

    #[test]
    fn a_shared_group_says_so_and_missing_files_are_no_zeros() {
        let root = tree(&[("proc/self/cgroup", "0::/a\n"), ("proc/7/cgroup", "0::/a\n")]);
        let group = of(&root);
        assert!(!group.own);
        assert_eq!((group.current, group.events, group.pressure), (None, None, None));
    }

    #[test]
    fn a_group_without_memory_controller_has_the_figures_of_the_one_that_is_charged() {
        let root = tree(&[
            ("proc/self/cgroup", "0::/unit\n"),
            ("proc/7/cgroup", "0::/unit/child\n"),
            ("cg/unit/child/memory.pressure", "\n"),
            ("cg/unit/memory.current", "4096\n"),
            ("cg/unit/memory.events", "low 0\nhigh 0\nmax 0\noom 0\noom_kill 2\n"),
        ]);
        let group = of(&root);
        assert_eq!((group.path.as_str(), group.own, group.current), ("/unit", false, Some(4096)));
        assert_eq!(group.events.unwrap().oom_kill, 2);
    }

    #[test]
    fn groups_of_the_first_version_or_outside_of_our_view_tell_nothing() {
        let root = tree(&[("proc/7/cgroup", "4:memory:/a\n")]);
        assert_eq!(of(&root), CgroupMemory::default());
        let root = tree(&[("proc/7/cgroup", "0::/../b\n"), ("b/memory.current", "1")]);
        assert_eq!(of(&root).current, None);
        assert!(read_group(&root.path().join("proc"), root.path(), 8).is_err());
    }

    #[test]
    fn our_own_group_can_be_asked_for() {
        let group = cgroup_memory(std::process::id()).unwrap();
        assert!(!group.own);
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "\\PC*", line in "(some|full|oom|high) ?(avg10|avg60)?=?[ -~]{0,12}") {
            for text in [text, line] {
                let _read = (parse_events(&text), parse_pressure(&text), v2_path(&text));
            }
        }
    }
}
