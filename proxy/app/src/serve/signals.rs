//! Maps signals to requests.
//!
//! | signal | meaning |
//! |---|---|
//! | TERM, INT | end |
//! | a second signal within a second | ignored as a duplicate: `timeout` and shells signal both process and group |
//! | a second signal later | end at once |
//! | HUP | reload; but if the program's terminal has just closed, end, as llama-server does |
//! | USR2 | upgrade to the program file now at this program's path, like `llama-warden upgrade` |
//!
//! A service has no terminal, so for it HUP is always a reload. The same holds under `nohup`, and for a HUP
//! sent by hand while the terminal is open.

use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{Mode, OFlags};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::Instant;

use crate::exit::CommandError;

/// Duplicate signals arrive within milliseconds; an impatient operator takes longer.
const DUPLICATE_SIGNAL_WINDOW: Duration = Duration::from_secs(1);
/// Limit between the end of a terminal and the HUP that its shell sends to its jobs.
const TERMINAL_END_WINDOW: Duration = Duration::from_secs(5);

pub(crate) enum SignalRequest {
    End,
    Reload,
    Upgrade,
}

pub(super) fn second_signal_error() -> CommandError {
    CommandError::failed("ended at once by a second signal")
}

pub(crate) struct SignalHandlers {
    term: Signal,
    int: Signal,
    hup: Signal,
    usr2: Signal,
    _child: Signal,
    terminal: Option<ControllingTerminal>,
    last: LastSignal,
}

impl SignalHandlers {
    /// Replaces the default actions. Must be called in a runtime.
    pub(crate) fn new() -> Result<Self, CommandError> {
        let listen = |kind| {
            signal(kind).map_err(|error| CommandError::failed(format!("cannot listen for signals: {error}")))
        };
        // Check this before a handler for HUP is installed.
        let ignored = is_hangup_ignored(&std::fs::read_to_string("/proc/self/status").unwrap_or_default());
        Ok(Self {
            terminal: if ignored { None } else { ControllingTerminal::open() },
            term: listen(SignalKind::terminate())?,
            int: listen(SignalKind::interrupt())?,
            hup: listen(SignalKind::hangup())?,
            usr2: listen(SignalKind::user_defined2())?,
            // Never awaited, but needed: if the parent ignored SIGCHLD, this process would inherit that. Then
            // the kernel would reap its children, and their exit status would be lost.
            _child: listen(SignalKind::child())?,
            last: LastSignal::default(),
        })
    }

    pub(crate) async fn wait_end(&mut self) {
        loop {
            tokio::select! {
                _ = self.term.recv() => {}
                _ = self.int.recv() => {}
            }
            if self.last.is_new(Instant::now()) {
                return;
            }
        }
    }

    /// Waits for TERM, INT, or the end of the terminal: for commands that have nothing to reload.
    pub(crate) async fn wait_leave(&mut self) {
        loop {
            tokio::select! {
                _ = self.term.recv() => {}
                _ = self.int.recv() => {}
                _ = self.hup.recv() => {}
            }
            if self.last.is_new(Instant::now()) {
                return;
            }
        }
    }

    pub(crate) async fn next(&mut self) -> SignalRequest {
        loop {
            let asked = tokio::select! {
                _ = self.term.recv() => SignalRequest::End,
                _ = self.int.recv() => SignalRequest::End,
                _ = self.usr2.recv() => SignalRequest::Upgrade,
                _ = self.hup.recv() => match &self.terminal {
                    Some(terminal) if terminal.has_just_gone(Instant::now()) => {
                        tracing::info!("the terminal is gone");
                        SignalRequest::End
                    }
                    _ => SignalRequest::Reload,
                },
                () = wait_terminal_end(self.terminal.as_ref()) => {
                    if let Some(terminal) = &mut self.terminal {
                        terminal.noticed = Some(Instant::now());
                    }
                    continue;
                }
            };
            if !matches!(asked, SignalRequest::End) || self.last.is_new(Instant::now()) {
                return asked;
            }
        }
    }
}

#[derive(Default)]
struct LastSignal(Option<Instant>);

impl LastSignal {
    fn is_new(&mut self, now: Instant) -> bool {
        let same = self.0.is_some_and(|last| now.saturating_duration_since(last) < DUPLICATE_SIGNAL_WINDOW);
        if !same {
            self.0 = Some(now);
        }
        !same
    }
}

/// The terminal on which the program was started.
struct ControllingTerminal {
    file: AsyncFd<OwnedFd>,
    /// Time at which the end of the terminal was noticed.
    noticed: Option<Instant>,
}

impl ControllingTerminal {
    /// `None` for a service, and where the terminal cannot be watched.
    fn open() -> Option<Self> {
        let flags = OFlags::RDONLY | OFlags::NOCTTY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = rustix::fs::open("/dev/tty", flags, Mode::empty()).ok()?;
        #[expect(
            deprecated,
            reason = "unsound only for types that lie about their descriptor; `OwnedFd` does not"
        )]
        let file = AsyncFd::with_interest(file, Interest::READABLE).ok()?;
        Some(Self { file, noticed: None })
    }

    fn is_gone(&self) -> bool {
        let mut asked = [PollFd::new(self.file.get_ref(), PollFlags::empty())];
        let polled = rustix::event::poll(&mut asked, Some(&Timespec::default()));
        polled.is_ok() && asked[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
    }

    /// A terminal that closed long ago (a disowned job) does not explain a HUP now.
    fn has_just_gone(&self, now: Instant) -> bool {
        self.is_gone()
            && self.noticed.is_none_or(|at| now.saturating_duration_since(at) < TERMINAL_END_WINDOW)
    }
}

/// Waits for the end of a terminal, unless it was already noticed.
async fn wait_terminal_end(terminal: Option<&ControllingTerminal>) {
    let Some(terminal) = terminal.filter(|terminal| terminal.noticed.is_none()) else {
        return std::future::pending().await;
    };
    while !terminal.is_gone() {
        match terminal.file.readable().await {
            // The terminal has input, which llama-warden does not read.
            Ok(mut guard) => guard.clear_ready(),
            Err(_) => return std::future::pending().await,
        }
    }
}

/// Returns whether the process was started with SIGHUP ignored, as by `nohup`.
fn is_hangup_ignored(status: &str) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_within_a_second_are_one_and_later_ones_are_not() {
        let (mut last, begun) = (LastSignal::default(), Instant::now());
        let mut at = |millis| last.is_new(begun + Duration::from_millis(millis));
        assert!(at(0));
        assert!(!at(20) && !at(999));
        assert!(at(1000));
        assert!(!at(1500));
    }

    #[test]
    fn nohup_is_seen() {
        assert!(is_hangup_ignored("Name:\tx\nSigIgn:\t0000000000001001\n"));
        assert!(!is_hangup_ignored("SigIgn:\t0000000000001000\n"));
        assert!(!is_hangup_ignored(""));
    }
}
