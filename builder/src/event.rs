//! What a long operation tells while it runs. Nothing here prints: who wants to show progress holds the receiver.

use std::fmt;
use std::path::PathBuf;

use tokio::sync::mpsc;

use crate::plan::Plan;
use crate::store::id::BuildId;

/// The parts of a build, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Taking a commit from a server; only before a build.
    Fetch,
    /// Judging patch sets at many revisions; never part of a build.
    Check,
    /// Copying or unpacking the source into the work folder.
    Unpack,
    /// npm, which makes the web page.
    Page,
    /// cmake.
    Configure,
    /// The compilers.
    Compile,
    /// Starting the binary and asking it things.
    Verify,
    /// Moving it into the store.
    Install,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fetch => "fetching",
            Self::Check => "checking",
            Self::Unpack => "unpacking",
            Self::Page => "making the web page",
            Self::Configure => "configuring",
            Self::Compile => "compiling",
            Self::Verify => "verifying",
            Self::Install => "installing",
        })
    }
}

/// One thing that happened. Times are left to the listener.
#[derive(Clone, Debug)]
pub enum Event {
    /// Something is missing and is being obtained.
    Obtaining {
        /// What, such as `cmake and ninja`.
        what: String,
        /// From where, in words, such as `PyPI`.
        from: &'static str,
        /// The folder that it goes into.
        into: PathBuf,
    },
    /// It is known what will be built; the plan tells source, revision and options.
    Planned(Box<Plan>),
    /// The store has it already.
    Hit(BuildId),
    /// Somebody else builds the same plan; waiting for that to end.
    Waiting(BuildId),
    /// A decision worth a line, such as the number of jobs and why.
    Note(String),
    /// The full output goes into this file.
    Log(PathBuf),
    /// A part of the build begins.
    Phase(Phase),
    /// Work done within a phase.
    Progress {
        /// Steps done; never above `total`.
        done: u32,
        /// Steps in all; may shrink or grow a little while compiling.
        total: u32,
        /// The step that ended last, such as a source file.
        item: String,
    },
    /// One check of the verification passed.
    Checked(&'static str),
    /// The build is in the store.
    Installed(BuildId),
}

/// The sending side. Cloning is cheap; a listener that went away is no error.
#[derive(Clone, Debug, Default)]
pub struct Reporter {
    listener: Option<mpsc::UnboundedSender<Event>>,
}

impl Reporter {
    /// Tells nobody.
    pub const fn silent() -> Self {
        Self { listener: None }
    }

    /// A reporter and what hears it. Events are few (some hundreds per build), so the channel has no bound.
    pub fn channel() -> (Self, mpsc::UnboundedReceiver<Event>) {
        let (sender, receiver) = mpsc::unbounded_channel();
        (Self { listener: Some(sender) }, receiver)
    }

    /// Tells it to whoever listens.
    pub fn tell(&self, event: Event) {
        if let Some(sender) = &self.listener {
            // Nobody listens any more: the work goes on all the same.
            sender.send(event).ok();
        }
    }
}
