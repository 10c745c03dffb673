//! How many builds run at a time: all that are certainly needed, where the machine has cores and memory for them, and beside them such as may
//! not be needed, where a build alone would leave cores idle for longer than it keeps them busy.
//!
//! A build is work of `W` core-seconds that any number of cores share, and a time `L` in which hardly more than one core has something to do:
//! configuring, the few files that take longest, linking, verifying. With `C` cores one build takes `W/C + L`, and `n` at a time take
//! `nW/C + L`. For that each of them may begin as many compilers as there are cores: the kernel shares the cores, and what one build leaves idle
//! while it waits another one has. What has to be divided is memory.
//!
//! - **Two that are both needed** take `2W/C + 2L` one after the other: at a time is always shorter, by `L`.
//! - **One, and both of those that may be next** take `3W/C + L`, and are two steps of a search, which else take `2W/C + 2L`: that is shorter
//!   if `W/C < L`. With one of the two it is three builds in two steps of three, and the same condition. So below some number of cores
//!   each build that is not needed costs more than what it saves. That number is an estimate, and stands in the defaults.
//! - **One step farther ahead** (seven builds for three steps) is shorter than that only from `5W/C < L` on, with five times the cores: three are
//!   the most, unless more are asked for.

/// Cores, with memory for a compiler on each, that each of two builds has at least that are both needed. On fewer cores the work is most of what a build takes, so there is little
/// to gain, and whether the first of them can be built at all would be known twice as late.
const LEAST: usize = 2;
/// Builds that run at a time without being asked for: one, and both that may be next.
const MOST: usize = 3;

/// What the machine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Machine {
    /// Cores.
    pub cores: usize,
    /// Memory that is available, in bytes; `None` if that is not known.
    pub memory: Option<u64>,
    /// Disk that is free, in bytes.
    pub disk: u64,
}

/// What builds take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Takes {
    /// Memory of one compiler at its peak, in bytes.
    pub memory_per_job: u64,
    /// Disk of one build, in bytes.
    pub disk: u64,
    /// Cores for each build, with memory for a compiler on each, from which on one that may not be needed pays.
    pub jobs_to_spare: usize,
}

/// Which builds there are to be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Needed in any case.
    pub certain: usize,
    /// May be needed.
    pub likely: usize,
    /// So many at a time, if somebody said so.
    pub at_a_time: Option<usize>,
}

/// Builds at a time, with up to so many compilers each. Both are at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Split {
    /// Builds.
    pub builds: usize,
    /// Compilers of each of them: as many as there are cores, and of all together no more than fit into memory.
    pub jobs: usize,
}

/// How many of the wanted builds run at a time. A wish is granted as far as each of them has memory for one compiler and disk; without one
/// it is decided by what is to be gained.
pub fn at_a_time(machine: Machine, takes: Takes, wanted: Wanted) -> Split {
    let times = |has: u64, each: u64| {
        has.checked_div(each).map_or(usize::MAX, |n| usize::try_from(n).unwrap_or(usize::MAX))
    };
    let fitting = machine.memory.map(|memory| times(memory, takes.memory_per_job));
    let jobs = fitting.unwrap_or(usize::MAX).min(machine.cores).max(1);
    let builds = match (wanted.at_a_time, fitting) {
        (Some(asked), fitting) => asked.min(fitting.unwrap_or(usize::MAX)),
        // What is not known to fit is not tried by itself.
        (None, None) => 1,
        (None, Some(_)) => {
            let spared = jobs.checked_div(takes.jobs_to_spare).unwrap_or(1);
            spared.max(wanted.certain.min(jobs / LEAST)).min(MOST)
        }
    };
    let all = wanted.certain.saturating_add(wanted.likely);
    let builds = builds.min(times(machine.disk, takes.disk)).min(all).max(1);
    // Of memory that nobody knows no more is taken than by one build.
    let all = fitting.unwrap_or(machine.cores);
    Split { builds, jobs: (all / builds).min(machine.cores).max(1) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    const CPU: Takes = Takes { memory_per_job: 700 << 20, disk: 2 * GIB, jobs_to_spare: 12 };
    const CUDA: Takes = Takes { memory_per_job: 2 * GIB, disk: 2 * GIB, jobs_to_spare: 28 };
    const ENDS: Wanted = Wanted { certain: 2, likely: 3, at_a_time: None };
    const STEP: Wanted = Wanted { certain: 1, likely: 6, at_a_time: None };

    fn machine(cores: usize, gib: u64) -> Machine {
        Machine { cores, memory: Some(gib * GIB), disk: 100 * GIB }
    }

    fn split(machine: Machine, takes: Takes, wanted: Wanted) -> (usize, usize) {
        let split = at_a_time(machine, takes, wanted);
        (split.builds, split.jobs)
    }

    #[test]
    fn a_small_machine_builds_one_after_the_other() {
        for wanted in [ENDS, STEP] {
            assert_eq!(split(machine(2, 64), CPU, wanted), (1, 2));
            assert_eq!(split(machine(3, 64), CPU, wanted), (1, 3));
            assert_eq!(split(machine(64, 2), CPU, wanted), (1, 2), "little memory");
            assert_eq!(split(machine(64, 0), CPU, wanted), (1, 1), "none");
        }
    }

    #[test]
    fn both_ends_are_built_at_a_time_where_each_has_two_cores() {
        assert_eq!(split(machine(4, 64), CPU, ENDS), (2, 4), "they share the cores");
        assert_eq!(split(machine(16, 64), CUDA, ENDS), (2, 16));
        assert_eq!(split(machine(16, 14), CPU, ENDS), (2, 10), "memory for twenty in all");
        assert_eq!(split(machine(16, 9), CUDA, ENDS), (2, 2), "memory for four");
        assert_eq!(split(machine(16, 7), CUDA, ENDS), (1, 3), "for three");
        let one = Wanted { certain: 1, likely: 0, ..ENDS };
        assert_eq!(split(machine(16, 64), CPU, one), (1, 16), "one alone has all");
    }

    #[test]
    fn what_may_not_be_needed_is_built_only_where_cores_would_be_idle() {
        assert_eq!(split(machine(16, 64), CPU, STEP), (1, 16));
        assert_eq!(split(machine(24, 64), CPU, STEP), (2, 24));
        assert_eq!(split(machine(24, 12), CPU, STEP), (1, 17), "memory for seventeen");
        assert_eq!(split(machine(24, 64), CUDA, STEP), (1, 24), "more work");
        assert_eq!(split(machine(64, 256), CUDA, STEP), (2, 64));
        assert_eq!(split(machine(192, 999), CPU, STEP), (3, 192), "and no farther ahead");
        assert_eq!(split(machine(192, 999), CPU, Wanted { likely: 1, ..STEP }), (2, 192), "as there are");
    }

    #[test]
    fn a_wish_is_granted_as_far_as_memory_and_disk_reach() {
        let wish = |builds| Wanted { at_a_time: Some(builds), ..STEP };
        assert_eq!(split(machine(2, 64), CPU, wish(2)), (2, 2));
        assert_eq!(split(machine(2, 64), CPU, wish(3)), (3, 2));
        assert_eq!(split(machine(16, 64), CPU, wish(99)), (7, 13));
        assert_eq!(split(machine(64, 999), CPU, wish(1)), (1, 64));
        assert_eq!(split(machine(16, 5), CUDA, wish(7)), (2, 1));
        assert_eq!(split(machine(16, 1), CUDA, wish(7)), (1, 1));
        let full = Machine { disk: 5 * GIB, ..machine(16, 64) };
        assert_eq!(split(full, CPU, wish(7)), (2, 16));
        assert_eq!(split(Machine { disk: 0, ..full }, CPU, wish(7)), (1, 16), "the build itself says so");
    }

    #[test]
    fn what_is_not_known_bounds_a_wish_by_nothing_and_nothing_is_tried_without_one() {
        let unknown = Machine { memory: None, ..machine(64, 0) };
        assert_eq!(split(unknown, CPU, ENDS), (1, 64));
        assert_eq!(split(unknown, CPU, Wanted { at_a_time: Some(2), ..ENDS }), (2, 32));
        let free = Takes { memory_per_job: 0, disk: 0, jobs_to_spare: 0 };
        assert_eq!(split(machine(8, 0), free, ENDS), (2, 8));
    }
}
