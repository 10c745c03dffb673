//! The new program's side: it gets all it needs, sees whether that answers, and waits to be told to go.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use warden_supervisor::{Fleet, FleetWill, Remains, Shares, WillPiece};

use super::talk::{Gates, Hello, Legacy, PROTOCOL, Place, Talk, Word};
use crate::exit::Failure;

/// The old program has a deadline of its own, and kills us when that is over: this only keeps us from staying if it is gone.
const PATIENCE: Duration = Duration::from_secs(600);
/// Nobody waits longer for an upgrade.
const LONGEST: Duration = Duration::from_secs(7 * 24 * 3600);
/// How often we look for news to tell the old program, even if nothing wakes us.
const LOOKS: Duration = Duration::from_millis(200);
/// It takes a word within this time, or is gone.
const TAKES: Duration = Duration::from_secs(5);

/// A conversation with the program before us.
#[derive(Clone, Debug)]
pub(in crate::serve) struct Predecessor {
    talk: Talk,
}

/// What it left.
#[derive(Debug)]
pub(in crate::serve) struct Inheritance {
    pub(in crate::serve) sockets: Left,
    /// It was leaving a group of instances.
    pub(in crate::serve) leaves: bool,
    pub(in crate::serve) lock: OwnedFd,
    pub(in crate::serve) will: FleetWill,
    /// Cancelled when all of it is ours.
    pub(in crate::serve) begun: CancellationToken,
}

/// Its sockets that listen.
#[derive(Debug)]
pub(in crate::serve) struct Left {
    pub(in crate::serve) public: Vec<OwnedFd>,
    pub(in crate::serve) admin: LeftAdmin,
    pub(in crate::serve) probes: Vec<OwnedFd>,
}

/// Those of the admin routes.
#[derive(Debug)]
pub(in crate::serve) struct LeftAdmin {
    pub(in crate::serve) socket: OwnedFd,
    /// That of `admin.address`.
    pub(in crate::serve) address: Option<OwnedFd>,
    /// Whoever started the first program made the Unix socket.
    pub(in crate::serve) given: bool,
}

impl Predecessor {
    pub(in crate::serve) fn new(stream: UnixStream) -> Self {
        Self { talk: Talk::new(stream) }
    }

    /// Tells it why it has to go on.
    pub(in crate::serve) async fn disappoint(&self, problem: &Failure) {
        let message = problem.lines().join("; ");
        let message = message.strip_prefix("error: ").unwrap_or(&message).to_owned();
        // Either word is understood where it waits for one; it may be gone, too.
        let _said = self.talk.say(Hello::CannotCome { message }, Vec::new(), soon()).await;
    }

    /// Tells that we could take over, and gets what there is.
    pub(in crate::serve) async fn greet(&self, place: Place) -> Result<Inheritance, Failure> {
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let hello = Hello::Comes { protocol: PROTOCOL, version, place };
        let lost = |error| Failure::failed(format!("the program before us does not hand over: {error}"));
        self.talk.say(hello, Vec::new(), soon()).await.map_err(lost)?;
        // It waits for what is under way there as long as somebody has said; if it is gone, that is heard at once.
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
        // As they were given: where both addresses leave the port to the system, the first one is that for probes.
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

    /// All is there: sees whether it `answers`, waits to be told to go, and takes over. Returns the places that are kept for what runs in
    /// the program before us.
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

    /// Gives places free as requests end there, and tells where what is there may go, until none is left or the program is gone.
    pub(in crate::serve) async fn follow(self, kept: Kept, fleet: Fleet) {
        tokio::select! {
            () = self.hear_of(kept) => {}
            () = self.tell_of(&fleet) => {}
        }
    }

    async fn tell_of(&self, fleet: &Fleet) {
        let mut views = fleet.subscribe();
        // That there is none is to be told, too.
        let mut told = None;
        loop {
            let gates = Gates { gates: fleet.gates(), refusals: fleet.refusals() };
            if told.as_ref() != Some(&gates) {
                told = Some(gates.clone());
                let until = Instant::now() + TAKES;
                if self.talk.say(gates, Vec::new(), until).await.is_err() {
                    // It is gone, or does not listen: what it has is not waited for. Heard of beside.
                    self.talk.end();
                    return std::future::pending().await;
                }
            }
            // Once we have let go in our turn, the gates are those that we follow.
            tokio::select! {
                changed = views.changed() => if changed.is_err() {
                    return std::future::pending().await;
                },
                () = fleet.followed() => {}
                // Whoever came to wait there meanwhile may be one who is turned away.
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

/// Places in slots.
#[derive(Debug)]
pub(in crate::serve) struct Kept {
    shares: Shares,
}

fn soon() -> Instant {
    Instant::now() + PATIENCE
}
