//! To stop as a job of a shell does, and only where somebody can let us go on: behind `ssh -t HOST llama-warden top` nobody could.

use rustix::process::{Signal, getpid, kill_process};

/// What `/proc/PID/stat` says of a process: its parent, its group, its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stat {
    parent: i32,
    group: i32,
    session: i32,
}

/// Stops this process until it is continued. Returns at once, with `false`, if nobody would do that.
pub(super) fn stop() -> bool {
    let read = |pid: i32| parse(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?);
    has_shell(getpid().as_raw_nonzero().get(), read) && kill_process(getpid(), Signal::STOP).is_ok()
}

fn parse(text: &str) -> Option<Stat> {
    // The name of a program may have anything in it, brackets too.
    let mut fields = text.get(text.rfind(')')? + 1..)?.split_ascii_whitespace().skip(1);
    let mut next = || fields.next()?.parse().ok();
    Some(Stat { parent: next()?, group: next()?, session: next()? })
}

/// Whether somebody above is of our session and of another group: that is who put us into one.
fn has_shell(own: i32, read: impl Fn(i32) -> Option<Stat>) -> bool {
    let Some(own) = read(own) else { return false };
    let mut pid = own.parent;
    for _ in 0..100 {
        match read(pid) {
            Some(above) if above.session != own.session => return false,
            Some(above) if above.group != own.group => return true,
            Some(above) => pid = above.parent,
            None => return false,
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_of_a_shell_may_stop_and_a_session_of_its_own_may_not() {
        let of = |all: &'static [(i32, i32, i32, i32)]| {
            move |pid: i32| {
                let found = all.iter().find(|one| one.0 == pid)?;
                Some(Stat { parent: found.1, group: found.2, session: found.3 })
            }
        };
        // pid, parent, group, session
        assert!(has_shell(30, of(&[(30, 20, 30, 20), (20, 10, 20, 20)])));
        assert!(has_shell(31, of(&[(31, 30, 30, 20), (30, 20, 30, 20), (20, 10, 20, 20)])), "below `sh -c`");
        assert!(!has_shell(20, of(&[(20, 10, 20, 20), (10, 1, 10, 10)])), "first of its session");
        assert!(!has_shell(21, of(&[(21, 20, 20, 20), (20, 10, 20, 20), (10, 1, 10, 10)])));
        assert!(!has_shell(20, of(&[])));
        let text = "42 (a) b (c)) S 7 8 9 34816 42 4194304";
        assert_eq!(parse(text), Some(Stat { parent: 7, group: 8, session: 9 }));
        assert_eq!(parse("nonsense"), None);
    }
}
