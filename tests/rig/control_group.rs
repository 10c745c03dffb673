//! Control group of version 2 in which a llama-warden runs and may make its own groups. Needs root; without
//! it, tests print a line and are skipped.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::home::Home;
use crate::scarcity::skipped;
use crate::{Context as _, Trouble, binaries};

/// Mounts the hierarchy at `$0` in a mount namespace of this process alone.
const MOUNT: &str = "mount -t cgroup2 none \"$0\"";

/// Rights of a llama-warden in its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupRights {
    /// Make groups.
    Write,
    /// Look only: all mounts of the hierarchy are read-only.
    Read,
}

/// Group that is removed on drop, with its processes. Declare it before them.
#[derive(Debug)]
pub struct OuterGroup {
    mount: tempfile::TempDir,
    name: String,
}

impl OuterGroup {
    /// Creates a group for a test; `None` if the machine does not allow that.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn new() -> Result<Option<Self>, Trouble> {
        let mount = tempfile::tempdir()?;
        let name = format!("warden-test-{}-{:08x}", std::process::id(), rand::random::<u32>());
        let made = Self { mount, name };
        let empties = "test \"$(cat \"$0/cgroup.subtree_control\")\" = ''";
        if made.shell(&format!("{empties} && mkdir \"$0/$1\"")).is_none() {
            skipped("no control group of version 2 can be made here");
            return Ok(None);
        }
        Ok(Some(made))
    }

    /// Writes a program that runs llama-warden in this group.
    ///
    /// # Errors
    /// The program cannot be written.
    pub fn program(&self, home: &Home, rights: GroupRights) -> Result<PathBuf, Trouble> {
        let read_only = "grep \" - cgroup2 \" /proc/self/mountinfo | while read -r _ _ _ _ place _; do \
                         mount -o remount,bind,ro \"$place\"; done\n";
        let name = if rights == GroupRights::Read { "warden-without-groups" } else { "warden-with-groups" };
        let limits = if rights == GroupRights::Read { read_only } else { "" };
        let text = format!(
            "#!/bin/sh\nexec unshare -m sh -c 'set -e\n{MOUNT}\necho $$ > \"$0/{}/cgroup.procs\"\n\
             {limits}exec \"{}\" \"$@\"' '{}' \"$@\"\n",
            self.name,
            binaries::llama_warden()?.display(),
            self.mount.path().display(),
        );
        home.program(name, text)
    }

    /// Returns the names of the groups in this group.
    ///
    /// # Errors
    /// The groups cannot be listed.
    pub fn inner(&self) -> Result<Vec<String>, Trouble> {
        let listed = self.shell("cd \"$0/$1\" && find . -mindepth 1 -maxdepth 1 -type d");
        let listed = listed.context("the groups cannot be listed")?;
        Ok(listed.lines().map(|line| line.trim_start_matches("./").to_owned()).collect())
    }

    /// Returns the output of a script, with the hierarchy as `$0` and this group as `$1`; `None` if it fails.
    fn shell(&self, script: &str) -> Option<String> {
        let ran = Command::new("unshare")
            .args(["-m", "sh", "-c"])
            .arg(format!("{MOUNT} && {script}"))
            .arg(self.mount.path())
            .arg(&self.name)
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .output()
            .ok()?;
        ran.status.success().then(|| String::from_utf8_lossy(&ran.stdout).into_owned())
    }
}

impl Drop for OuterGroup {
    fn drop(&mut self) {
        let script = "cd \"$0/$1\" && echo 1 > cgroup.kill; for n in 1 2 3 4 5 6 7 8 9 10; do \
                      find . -mindepth 1 -depth -type d -exec rmdir {} +; \
                      cd \"$0\" && rmdir \"$1\" && break; sleep 0.1; cd \"$0/$1\"; done";
        let _removed = self.shell(script);
    }
}
