//! The memory limits of our control groups, which in a container are lower than the host's totals. Reads both
//! versions, from our own group up to the visible root. A group without a readable limit counts as unlimited.

use std::fs;
use std::path::{Path, PathBuf};

use crate::files::{number_field, read_number};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CgroupAllowance {
    pub(crate) limit: u64,
    /// Smallest number of bytes left under any limit; file pages that the kernel would reclaim count as left.
    pub(crate) left: u64,
}

/// Names of the files and fields of one control group version.
pub(crate) struct CgroupNames {
    limit: &'static str,
    used: &'static str,
    /// Fields for file pages, which the kernel reclaims before an allocation fails. Recently used pages
    /// count, too, as in `MemAvailable`: a mapped model consists of file pages.
    files: [&'static str; 2],
    /// File with the line `oom_kill 3`.
    pub(crate) kills: &'static str,
}

const V1: CgroupNames = CgroupNames {
    limit: "memory.limit_in_bytes",
    used: "memory.usage_in_bytes",
    files: ["total_inactive_file", "total_active_file"],
    kills: "memory.oom_control",
};

const V2: CgroupNames = CgroupNames {
    limit: "memory.max",
    used: "memory.current",
    files: ["inactive_file", "active_file"],
    kills: "memory.events",
};

/// Returns the memory that our groups permit; `None` if no limit is below `total`.
pub(crate) fn cgroup_allowance(total: u64) -> Option<CgroupAllowance> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    tightest_allowance(&groups, Path::new("/sys/fs/cgroup"), total)
}

fn tightest_allowance(groups: &str, root: &Path, total: u64) -> Option<CgroupAllowance> {
    let limits = groups.lines().flat_map(|line| group_levels(line, root)).filter_map(|(directory, names)| {
        let limit = read_number(&directory.join(names.limit)).filter(|limit| *limit < total)?;
        let used = read_number(&directory.join(names.used))?;
        let statistics = fs::read_to_string(directory.join("memory.stat")).unwrap_or_default();
        let files = names.files.iter().filter_map(|name| number_field(&statistics, name));
        let given_back = files.fold(0, u64::saturating_add);
        Some(CgroupAllowance { limit, left: limit.saturating_sub(used.saturating_sub(given_back)) })
    });
    limits.reduce(|a, b| CgroupAllowance { limit: a.limit.min(b.limit), left: a.left.min(b.left) })
}

/// Returns the directories of a group and of all groups above it, from a line of `/proc/PID/cgroup`.
pub(crate) fn group_levels(line: &str, root: &Path) -> Vec<(PathBuf, &'static CgroupNames)> {
    let mut fields = line.splitn(3, ':');
    let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else {
        return Vec::new();
    };
    let (root, names) = if controllers.is_empty() {
        (root.to_owned(), &V2)
    } else if controllers.split(',').any(|controller| controller == "memory") {
        (root.join("memory"), &V1)
    } else {
        return Vec::new();
    };
    // A path with `..` is outside of our cgroup namespace.
    if path.split('/').any(|part| part == "..") {
        return vec![(root, names)];
    }
    let relative = Path::new(path.trim_start_matches('/'));
    relative.ancestors().map(|part| (root.join(part), names)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOTAL: u64 = 1 << 40;

    fn write(root: &Path, files: &[(&str, &str)]) {
        for (name, text) in files {
            let path = root.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
    }

    #[test]
    fn the_tightest_level_counts_and_file_pages_count_as_left() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        write(
            root,
            &[
                ("a/memory.max", "8000\n"),
                ("a/memory.current", "7000\n"),
                ("a/memory.stat", "anon 10\ninactive_file 2000\nfile 9\n"),
                ("a/b/memory.max", "max\n"),
                ("a/b/memory.current", "100\n"),
                ("memory.max", "5000\n"),
                ("memory.current", "500\n"),
            ],
        );
        assert_eq!(
            tightest_allowance("0::/a/b\n", root, TOTAL),
            Some(CgroupAllowance { limit: 5000, left: 3000 })
        );
    }

    #[test]
    fn pages_of_a_mapped_model_are_left_though_they_are_in_use() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        let stat = "anon 1500\nfile 7500\nshmem 300\ninactive_file 200\nactive_file 7000\nunevictable 9\n";
        write(root, &[("memory.max", "10000\n"), ("memory.current", "9900\n"), ("memory.stat", stat)]);
        assert_eq!(
            tightest_allowance("0::/\n", root, TOTAL),
            Some(CgroupAllowance { limit: 10_000, left: 7300 })
        );
    }

    #[test]
    fn the_first_version_is_read_by_its_own_names() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        write(
            root,
            &[
                ("memory/c/memory.limit_in_bytes", "4000"),
                ("memory/c/memory.usage_in_bytes", "1000"),
                ("memory/c/memory.stat", "total_inactive_file 200\n"),
                ("memory/memory.limit_in_bytes", "9223372036854771712"),
                ("memory/memory.usage_in_bytes", "1000"),
            ],
        );
        let groups = "9:name=systemd:/\n4:cpu,memory:/c\n0::/\n";
        assert_eq!(
            tightest_allowance(groups, root, TOTAL),
            Some(CgroupAllowance { limit: 4000, left: 3200 })
        );
    }

    #[test]
    fn without_limits_nothing_is_limited() {
        let root = tempfile::tempdir().unwrap();
        assert_eq!(tightest_allowance("0::/x\nnonsense\n", root.path(), TOTAL), None);
    }
}
