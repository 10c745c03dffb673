//! The new program's side: receives the handover, tests itself, waits for `go`.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use warden_supervisor::{Fleet, FleetWill, RemainingWork, SlotShares, WillPiece};

use super::talk::{
    GateReport, HandoverHeader, InstancePlace, PROTOCOL, SuccessorMessage, UpgradeChannel, UpgradeHello,
};
use crate::exit::CommandError;

/// Limit of waits. The old program has a deadline of its own and kills us after it; this only ends us if it
/// is gone.
const PREDECESSOR_WAIT: Duration = Duration::from_secs(600);
/// Longest useful limit of an upgrade.
const MAX_UPGRADE_WAIT: Duration = Duration::from_secs(7 * 24 * 3600);
/// Interval of checks for news to send to the old program, even if nothing wakes us.
const NEWS_INTERVAL: Duration = Duration::from_millis(200);
/// Limit for sending a message; beyond it, the old program counts as gone.
const SEND_LIMIT: Duration = Duration::from_secs(5);

/// The connection to our predecessor.
#[derive(Clone, Debug)]
pub(in crate::serve) struct PredecessorLink {
    talk: UpgradeChannel,
}

/// Everything that the predecessor handed over.
#[derive(Debug)]
pub(in crate::serve) struct ReceivedHandover {
    pub(in crate::serve) sockets: InheritedSockets,
    /// True if the predecessor was leaving a group of instances.
    pub(in crate::serve) is_leaving: bool,
    pub(in crate::serve) lock: OwnedFd,
    pub(in crate::serve) will: FleetWill,
    /// Cancelled when all of it is ours.
    pub(in crate::serve) begun: CancellationToken,
}

/// The predecessor's listening sockets.
#[derive(Debug)]
pub(in crate::serve) struct InheritedSockets {
    pub(in crate::serve) public: Vec<OwnedFd>,
    pub(in crate::serve) admin: InheritedAdmin,
    pub(in crate::serve) probes: Vec<OwnedFd>,
}

/// Sockets of the admin routes.
#[derive(Debug)]
pub(in crate::serve) struct InheritedAdmin {
    pub(in crate::serve) socket: OwnedFd,
    /// Socket of `admin.address`.
    pub(in crate::serve) address: Option<OwnedFd>,
    /// True if the service manager made the Unix socket.
    pub(in crate::serve) from_manager: bool,
}

impl PredecessorLink {
    pub(in crate::serve) fn new(stream: UnixStream) -> Self {
        Self { talk: UpgradeChannel::new(stream) }
    }

    /// Reports why the predecessor has to continue.
    pub(in crate::serve) async fn report_failure(&self, problem: &CommandError) {
        let message = problem.lines().join("; ");
        let message = message.strip_prefix("error: ").unwrap_or(&message).to_owned();
        // Accepted in both places where the predecessor waits; it may also be gone.
        let _said = self.talk.send(UpgradeHello::CannotCome { message }, Vec::new(), wait_deadline()).await;
    }

    /// Announces us, and receives the handover.
    pub(in crate::serve) async fn receive_handover(
        &self,
        place: InstancePlace,
    ) -> Result<ReceivedHandover, CommandError> {
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let hello = UpgradeHello::Comes { protocol: PROTOCOL, version, place };
        let lost = |error| CommandError::failed(format!("the previous program does not hand over: {error}"));
        self.talk.send(hello, Vec::new(), wait_deadline()).await.map_err(lost)?;
        // The predecessor first waits for tasks in progress, as long as the order allows; its end is
        // noticed at once.
        let long = Instant::now() + MAX_UPGRADE_WAIT;
        let (legacy, files) = self.talk.receive::<HandoverHeader>(long).await.map_err(lost)?;
        let mut pieces = Vec::new();
        for _ in 0..legacy.pieces {
            pieces.push(self.talk.receive::<WillPiece>(wait_deadline()).await.map_err(lost)?);
        }
        let strange = || CommandError::failed("what the previous program hands over cannot be understood");
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
        Ok(ReceivedHandover {
            sockets: InheritedSockets {
                public: files,
                admin: InheritedAdmin { socket, address: rest.next(), from_manager: legacy.admin_given },
                probes,
            },
            is_leaving: legacy.leaves,
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
    ) -> Result<ReservedSlots, CommandError> {
        let lost = |error| CommandError::failed(format!("the previous program does not hand over: {error}"));
        let unclaimed = fleet.unclaimed_models();
        let fit = if let Some(name) = unclaimed.first() {
            Err(format!(
                "the model `{name}` runs, and the configuration that the next program has read does not have it: reload first, which ends it"
            ))
        } else if fleet.has_adopted(wait_deadline()).await {
            answers.await.map_err(|why| format!("the next program is not fit: {why}"))
        } else {
            Err("not all llama-servers answer the next program".to_owned())
        };
        if let Err(message) = fit {
            let _said = self
                .talk
                .send(SuccessorMessage::Cannot { message: message.clone() }, Vec::new(), wait_deadline())
                .await;
            return Err(CommandError::failed(message));
        }
        self.talk.send(SuccessorMessage::Ready, Vec::new(), wait_deadline()).await.map_err(lost)?;
        let (remains, _) = self.talk.receive::<RemainingWork>(wait_deadline()).await.map_err(lost)?;
        let mut shares = fleet.share_slots();
        shares.update(&remains);
        fleet.begin_deciding();
        begun.cancel();
        self.talk.send(SuccessorMessage::Serves, Vec::new(), wait_deadline()).await.map_err(lost)?;
        Ok(ReservedSlots { shares })
    }

    /// Frees slots as requests end in the predecessor, and reports open gates to it, until none is left or
    /// it is gone.
    pub(in crate::serve) async fn follow_requests(self, kept: ReservedSlots, fleet: Fleet) {
        tokio::select! {
            () = self.free_slots(kept) => {}
            () = self.report_gates(&fleet) => {}
        }
    }

    async fn report_gates(&self, fleet: &Fleet) {
        let mut views = fleet.subscribe();
        // An empty list is reported, too.
        let mut told = None;
        loop {
            let gates = GateReport { gates: fleet.open_gates(), refusals: fleet.recent_refusals() };
            if told.as_ref() != Some(&gates) {
                told = Some(gates.clone());
                let until = Instant::now() + SEND_LIMIT;
                if self.talk.send(gates, Vec::new(), until).await.is_err() {
                    // The predecessor is gone or does not read: its requests are not waited for. `hear_of`
                    // notices its end.
                    self.talk.close();
                    return std::future::pending().await;
                }
            }
            // Once we have let go in our turn, the gates are those of our successor.
            tokio::select! {
                changed = views.changed() => if changed.is_err() {
                    return std::future::pending().await;
                },
                () = fleet.gates_followed() => {}
                // Refusals change without a wake, for example for a request that came to wait in the
                // predecessor.
                () = tokio::time::sleep(NEWS_INTERVAL) => {}
            }
            views.mark_unchanged();
        }
    }

    async fn free_slots(&self, mut kept: ReservedSlots) {
        loop {
            match self.talk.receive::<RemainingWork>(wait_deadline()).await {
                Ok((remains, _)) => kept.shares.update(&remains),
                Err(error) if error.kind() == std::io::ErrorKind::TimedOut => {}
                Err(_) => {
                    tracing::info!("the previous program has nothing left to do");
                    return;
                }
            }
        }
    }
}

/// Slots reserved for the predecessor's requests.
#[derive(Debug)]
pub(in crate::serve) struct ReservedSlots {
    shares: SlotShares,
}

fn wait_deadline() -> Instant {
    Instant::now() + PREDECESSOR_WAIT
}
