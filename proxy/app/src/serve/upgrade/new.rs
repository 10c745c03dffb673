//! The new program's side: receives the handover, tests itself, waits for `go`.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use warden_supervisor::{Fleet, FleetWill, Remains, Shares, WillPiece};

use super::talk::{Gates, Hello, Legacy, PROTOCOL, Place, Talk, Word};
use crate::exit::Failure;

/// Limit of waits. The old program has a deadline of its own and kills us after it; this only ends us if it
/// is gone.
const PATIENCE: Duration = Duration::from_secs(600);
/// Longest useful limit of an upgrade.
const LONGEST: Duration = Duration::from_secs(7 * 24 * 3600);
/// Interval of checks for news to send to the old program, even if nothing wakes us.
const LOOKS: Duration = Duration::from_millis(200);
/// Limit for sending a message; beyond it, the old program counts as gone.
const TAKES: Duration = Duration::from_secs(5);

/// The connection to our predecessor.
#[derive(Clone, Debug)]
pub(in crate::serve) struct Predecessor {
    talk: Talk,
}

/// Everything that the predecessor handed over.
#[derive(Debug)]
pub(in crate::serve) struct Inheritance {
    pub(in crate::serve) sockets: Left,
    /// True if the predecessor was leaving a group of instances.
    pub(in crate::serve) leaves: bool,
    pub(in crate::serve) lock: OwnedFd,
    pub(in crate::serve) will: FleetWill,
    /// Cancelled when all of it is ours.
    pub(in crate::serve) begun: CancellationToken,
}

/// The predecessor's listening sockets.
#[derive(Debug)]
pub(in crate::serve) struct Left {
    pub(in crate::serve) public: Vec<OwnedFd>,
    pub(in crate::serve) admin: LeftAdmin,
    pub(in crate::serve) probes: Vec<OwnedFd>,
}

/// Sockets of the admin routes.
#[derive(Debug)]
pub(in crate::serve) struct LeftAdmin {
    pub(in crate::serve) socket: OwnedFd,
    /// Socket of `admin.address`.
    pub(in crate::serve) address: Option<OwnedFd>,
    /// True if the service manager made the Unix socket.
    pub(in crate::serve) given: bool,
}

impl Predecessor {
    pub(in crate::serve) fn new(stream: UnixStream) -> Self {
        Self { talk: Talk::new(stream) }
    }

    /// Reports why the predecessor has to continue.
    pub(in crate::serve) async fn disappoint(&self, problem: &Failure) {
        let message = problem.lines().join("; ");
        let message = message.strip_prefix("error: ").unwrap_or(&message).to_owned();
        // Accepted in both places where the predecessor waits; it may also be gone.
        let _said = self.talk.say(Hello::CannotCome { message }, Vec::new(), soon()).await;
    }

    /// Announces us, and receives the handover.
    pub(in crate::serve) async fn greet(&self, place: Place) -> Result<Inheritance, Failure> {
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let hello = Hello::Comes { protocol: PROTOCOL, version, place };
        let lost = |error| Failure::failed(format!("the program before us does not hand over: {error}"));
        self.talk.say(hello, Vec::new(), soon()).await.map_err(lost)?;
        // The predecessor first waits for tasks in progress, as long as the order allows; its end is
        // noticed at once.
        let long = Instant::now() + LONGEST;
        let (legacy, files) = self.talk.hear::<Legacy>(long).await.map_err(lost)?;
        let mut pieces = Vec::new();
        for _ in 0..legacy.pieces {
            pieces.push(self.talk.hear::<WillPiece>(soon()).await.map_err(lost)?);
        }
        let strange = || Failure::failed("what the program before us hands over cannot be understood");
        let will = FleetWill::from_pieces(pieces).ok_or_else(strange)?;
        let mut files = files;
        if files.len() < legacy.public.saturating_add(legacy.probes).saturating_add(2) {
            return Err(strange());
        }
        let mut rest = files.split_off(legacy.public).into_iter();
        let socket = rest.next().ok_or_else(strange)?;
        let lock = rest.next_back().ok_or_else(strange)?;
        let mut probes: Vec<OwnedFd> = rest.by_ref().rev().take(legacy.probes).collect();
        // Restores their order: where the system chose the ports of both, the first one is the probe
        // listener.
        probes.reverse();
        Ok(Inheritance {
            sockets: Left {
                public: files,
                admin: LeftAdmin { socket, address: rest.next(), given: legacy.admin_given },
                probes,
            },
            leaves: legacy.leaves,
            lock,
            will,
            begun: CancellationToken::new(),
        })
    }

    /// After the handover: runs the self-test `answers`, waits for `go`, and takes over. Returns the slots
    /// reserved for requests that still run in the predecessor.
    pub(in crate::serve) async fn take_over(
        &self,
        fleet: &Fleet,
        begun: &CancellationToken,
        answers: impl Future<Output = Result<(), String>>,
    ) -> Result<Kept, Failure> {
        let lost = |error| Failure::failed(format!("the program before us does not hand over: {error}"));
        let unclaimed = fleet.unclaimed();
        let fit = if let Some(name) = unclaimed.first() {
            Err(format!(
                "the model `{name}` runs, and the configuration that the next program has read does not have it: reload first, which ends it"
            ))
        } else if fleet.has_adopted(soon()).await {
            answers.await.map_err(|why| format!("the next program is not fit: {why}"))
        } else {
            Err("not all llama-servers answer the next program".to_owned())
        };
        if let Err(message) = fit {
            let _said = self.talk.say(Word::Cannot { message: message.clone() }, Vec::new(), soon()).await;
            return Err(Failure::failed(message));
        }
        self.talk.say(Word::Ready, Vec::new(), soon()).await.map_err(lost)?;
        let (remains, _) = self.talk.hear::<Remains>(soon()).await.map_err(lost)?;
        let mut shares = fleet.shares();
        shares.update(&remains);
        fleet.begin();
        begun.cancel();
        self.talk.say(Word::Serves, Vec::new(), soon()).await.map_err(lost)?;
        Ok(Kept { shares })
    }

    /// Frees slots as requests end in the predecessor, and reports open gates to it, until none is left or
    /// it is gone.
    pub(in crate::serve) async fn follow(self, kept: Kept, fleet: Fleet) {
        tokio::select! {
            () = self.hear_of(kept) => {}
            () = self.tell_of(&fleet) => {}
        }
    }

    async fn tell_of(&self, fleet: &Fleet) {
        let mut views = fleet.subscribe();
        // An empty list is reported, too.
        let mut told = None;
        loop {
            let gates = Gates { gates: fleet.gates(), refusals: fleet.refusals() };
            if told.as_ref() != Some(&gates) {
                told = Some(gates.clone());
                let until = Instant::now() + TAKES;
                if self.talk.say(gates, Vec::new(), until).await.is_err() {
                    // The predecessor is gone or does not read: its requests are not waited for. `hear_of`
                    // notices its end.
                    self.talk.end();
                    return std::future::pending().await;
                }
            }
            // Once we have let go in our turn, the gates are those of our successor.
            tokio::select! {
                changed = views.changed() => if changed.is_err() {
                    return std::future::pending().await;
                },
                () = fleet.followed() => {}
                // Refusals change without a wake, for example for a request that came to wait in the
                // predecessor.
                () = tokio::time::sleep(LOOKS) => {}
            }
            views.mark_unchanged();
        }
    }

    async fn hear_of(&self, mut kept: Kept) {
        loop {
            match self.talk.hear::<Remains>(soon()).await {
                Ok((remains, _)) => kept.shares.update(&remains),
                Err(error) if error.kind() == std::io::ErrorKind::TimedOut => {}
                Err(_) => {
                    tracing::info!("the program before us has nothing left to do");
                    return;
                }
            }
        }
    }
}

/// Slots reserved for the predecessor's requests.
#[derive(Debug)]
pub(in crate::serve) struct Kept {
    shares: Shares,
}

fn soon() -> Instant {
    Instant::now() + PATIENCE
}
