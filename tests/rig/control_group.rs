//! A control group of version 2 that a llama-warden is started in, and may make its own groups in. For root only; where
//! a machine does not give one, tests say so and are skipped.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::home::Home;
use crate::scarcity::skipped;
use crate::{Context as _, Trouble, binaries};

/// Mounts the hierarchy at `$0` in a mount namespace of this process alone.
const MOUNT: &str = "mount -t cgroup2 none \"$0\"";

/// What a llama-warden may do with its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupRights {
    /// Make groups in it.
    Write,
    /// Look at it: all mounts of the hierarchy are read-only.
    Read,
}

/// Such a group. Declare it before the processes in it: it is removed at the end, with what lives in it.
#[derive(Debug)]
pub struct OuterGroup {
    mount: tempfile::TempDir,
    name: String,
}

impl OuterGroup {
    /// A group of its own for a test; `None` where none can be made.
    ///
    /// # Errors
    /// Files cannot be made.
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

    /// A program that is llama-warden in this group.
    ///
    /// # Errors
    /// It cannot be written.
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

    /// The names of the groups in it.
    ///
    /// # Errors
    /// They cannot be listed.
    pub fn inner(&self) -> Result<Vec<String>, Trouble> {
        let listed = self.shell("cd \"$0/$1\" && find . -mindepth 1 -maxdepth 1 -type d");
        let listed = listed.context("the groups cannot be listed")?;
        Ok(listed.lines().map(|line| line.trim_start_matches("./").to_owned()).collect())
    }

    /// The output of a script that sees the hierarchy at `$0`, with our group as `$1`; `None` if it fails.
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
