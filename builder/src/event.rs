//! Progress events of long operations. Nothing here prints; callers that show progress hold the receiver.

use std::fmt;
use std::path::PathBuf;

use tokio::sync::mpsc;

use crate::plan::BuildPlan;
use crate::store::BuildId;

/// Phases of a build, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BuildPhase {
    /// Fetching a commit from a server; only before a build.
    Fetch,
    /// Judging patch sets at many revisions; never part of a build.
    Check,
    /// Copying or unpacking the source into the work folder.
    Unpack,
    /// Making the web page with npm.
    Page,
    /// Running cmake.
    Configure,
    /// Running the compilers.
    Compile,
    /// Starting the binary and sending it test requests.
    Verify,
    /// Moving the build into the store.
    Install,
}

impl fmt::Display for BuildPhase {
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

/// A progress event, without a time.
#[derive(Clone, Debug)]
pub enum BuildEvent {
    /// A missing file or tool is being obtained.
    Obtaining {
        /// The thing obtained, such as `cmake and ninja`.
        what: String,
        /// Origin of the thing in words, such as `PyPI`.
        from: &'static str,
        /// Folder that receives the thing.
        into: PathBuf,
    },
    /// The plan is made; it has source, revision and options.
    Planned(Box<BuildPlan>),
    /// The store has the build already.
    Hit(BuildId),
    /// Another process builds the same plan; this build waits for the other process.
    Waiting(BuildId),
    /// A decision to report, such as the number of jobs with the reason.
    Note(String),
    /// Path of the log with the full output.
    Log(PathBuf),
    /// A phase of the build begins.
    Phase(BuildPhase),
    /// Progress within a phase.
    Progress {
        /// Steps done; never above `total`.
        done: u32,
        /// Steps in all; may shrink or grow a little while compiling.
        total: u32,
        /// The step completed last, such as a source file.
        item: String,
    },
    /// A check of the verification passed.
    Checked(&'static str),
    /// The build is in the store.
    Installed(BuildId),
}

/// Sender of events. Cloning is cheap; a closed receiver is no error.
#[derive(Clone, Debug, Default)]
pub struct EventReporter {
    listener: Option<mpsc::UnboundedSender<BuildEvent>>,
}

impl EventReporter {
    /// A reporter without a receiver.
    pub const fn silent() -> Self {
        Self { listener: None }
    }

    /// A reporter with its receiver. The channel is unbounded, as a build has only some hundred events.
    pub fn channel() -> (Self, mpsc::UnboundedReceiver<BuildEvent>) {
        let (sender, receiver) = mpsc::unbounded_channel();
        (Self { listener: Some(sender) }, receiver)
    }

    pub(crate) fn note(&self, text: impl Into<String>) {
        self.report(BuildEvent::Note(text.into()));
    }

    /// Sends an event, if there is a receiver.
    pub fn report(&self, event: BuildEvent) {
        if let Some(sender) = &self.listener {
            // A closed receiver does not stop the work.
            sender.send(event).ok();
        }
    }
}
