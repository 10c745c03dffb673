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

/// Time limit for waiting for the old program. The old program has its own deadline and kills this program
/// after it; this limit only ends the new program if the old one is gone.
const PREDECESSOR_WAIT: Duration = Duration::from_secs(600);
/// Longest useful time limit of an upgrade.
const MAX_UPGRADE_WAIT: Duration = Duration::from_secs(7 * 24 * 3600);
/// Interval of checks for changes to report to the old program, in addition to checks after each wake-up.
const NEWS_INTERVAL: Duration = Duration::from_millis(200);
/// Time limit for sending a message; beyond it, the old program counts as gone.
const SEND_LIMIT: Duration = Duration::from_secs(5);

#[derive(Clone, Debug)]
pub(in crate::serve) struct PredecessorLink {
    talk: UpgradeChannel,
}

#[derive(Debug)]
pub(in crate::serve) struct ReceivedHandover {
    pub(in crate::serve) sockets: InheritedSockets,
    /// The predecessor was leaving a group of instances.
    pub(in crate::serve) is_leaving: bool,
    pub(in crate::serve) lock: OwnedFd,
    pub(in crate::serve) will: FleetWill,
    /// Cancelled when this program has taken over completely.
    pub(in crate::serve) begun: CancellationToken,
}

#[derive(Debug)]
pub(in crate::serve) struct InheritedSockets {
    pub(in crate::serve) public: Vec<OwnedFd>,
    pub(in crate::serve) admin: InheritedAdmin,
    pub(in crate::serve) probes: Vec<OwnedFd>,
}

#[derive(Debug)]
pub(in crate::serve) struct InheritedAdmin {
    pub(in crate::serve) socket: OwnedFd,
    /// TCP socket of `admin.address`.
    pub(in crate::serve) address: Option<OwnedFd>,
    /// The service manager made the Unix socket.
    pub(in crate::serve) from_manager: bool,
}

impl PredecessorLink {
    pub(in crate::serve) fn new(stream: UnixStream) -> Self {
        Self { talk: UpgradeChannel::new(stream) }
    }

    /// Reports to the predecessor why this program cannot take over, so that the predecessor continues.
    pub(in crate::serve) async fn report_failure(&self, problem: &CommandError) {
        let message = problem.lines().join("; ");
        let message = message.strip_prefix("error: ").unwrap_or(&message).to_owned();
        // The predecessor accepts this message whenever it waits for one. An error means that it is gone.
        let _said = self.talk.send(UpgradeHello::CannotCome { message }, Vec::new(), wait_deadline()).await;
    }

    /// Announces this program to the predecessor, and receives the handover.
    pub(in crate::serve) async fn receive_handover(
        &self,
        place: InstancePlace,
    ) -> Result<ReceivedHandover, CommandError> {
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let hello = UpgradeHello::Comes { protocol: PROTOCOL, version, place };
        let lost = |error| CommandError::failed(format!("the previous program does not hand over: {error}"));
        self.talk.send(hello, Vec::new(), wait_deadline()).await.map_err(lost)?;
        // Wait long: the predecessor first waits for tasks in progress, as long as the order allows. If the
        // predecessor ends, this program notices the closed connection at once.
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
        // Restore the order: if the system chose the ports of both, the first is the probe listener.
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
    ) -> Result<SlotShares, CommandError> {
        let lost = |error| CommandError::failed(format!("the previous program does not hand over: {error}"));
        let unclaimed = fleet.handover().unclaimed_models();
        let fit = if let Some(name) = unclaimed.first() {
            Err(format!(
                "the model `{name}` runs, and the configuration that the next program has read does not have it: \
                 reload first, which ends it"
            ))
        } else if fleet.handover().has_adopted(wait_deadline()).await {
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
        let mut shares = fleet.handover().share_slots();
        shares.update(&remains);
        fleet.handover().begin_deciding();
        begun.cancel();
        self.talk.send(SuccessorMessage::Serves, Vec::new(), wait_deadline()).await.map_err(lost)?;
        Ok(shares)
    }

    /// Frees slots as requests end in the predecessor, and reports models' open gates to the predecessor,
    /// until the predecessor has no request left or is gone.
    pub(in crate::serve) async fn follow_requests(self, kept: SlotShares, fleet: Fleet) {
        tokio::select! {
            () = self.free_slots(kept) => {}
            () = self.report_gates(&fleet) => {}
        }
    }

    async fn report_gates(&self, fleet: &Fleet) {
        let mut views = fleet.subscribe();
        // The first list is reported even if it is empty.
        let mut told = None;
        loop {
            let gates = GateReport {
                gates: fleet.handover().open_gates(),
                refusals: fleet.handover().recent_refusals(),
            };
            if told.as_ref() != Some(&gates) {
                told = Some(gates.clone());
                let until = Instant::now() + SEND_LIMIT;
                if self.talk.send(gates, Vec::new(), until).await.is_err() {
                    // The predecessor is gone or does not read, so do not wait for its requests.
                    // `free_slots` notices that the connection is closed.
                    self.talk.close();
                    return std::future::pending().await;
                }
            }
            // After a further upgrade, the reported gates are those of this program's successor.
            tokio::select! {
                changed = views.changed() => if changed.is_err() {
                    return std::future::pending().await;
                },
                () = fleet.handover().gates_followed() => {}
                // Check at intervals, too: refusals can change without a wake-up, for example when another
                // request begins to wait in the predecessor.
                () = tokio::time::sleep(NEWS_INTERVAL) => {}
            }
            views.mark_unchanged();
        }
    }

    async fn free_slots(&self, mut kept: SlotShares) {
        loop {
            match self.talk.receive::<RemainingWork>(wait_deadline()).await {
                Ok((remains, _)) => kept.update(&remains),
                Err(error) if error.kind() == std::io::ErrorKind::TimedOut => {}
                Err(_) => {
                    tracing::info!("the previous program has nothing left to do");
                    return;
                }
            }
        }
    }
}

fn wait_deadline() -> Instant {
    Instant::now() + PREDECESSOR_WAIT
}
