//! What is left for the old program: its requests end, the new one hears how many there still are, and if it was the first of
//! all it stays, because the kernel ends the llama-servers with it.

use std::time::Duration;

use tokio::time::Instant;
use warden_supervisor::nursery::NurseryHandle;
use warden_supervisor::{Exit, Fleet, Remains};

use super::talk::{Gates, Talk};
use crate::exit::Failure;
use crate::serve::Server;
use crate::serve::signals::{Asked, Signals};

/// How often the new program hears what still runs here: its queue moves by that.
const TELLS: Duration = Duration::from_millis(50);
/// A word is not waited for any longer.
const TAKES: Duration = Duration::from_secs(1);
/// Between two words of the next program may be any time: this only says how long one call waits.
const HEARS: Duration = Duration::from_secs(3);

/// A conversation in which only one still speaks.
pub(in crate::serve) struct Retired {
    talk: Option<Talk>,
}

impl Retired {
    pub(super) fn new(talk: Talk) -> Self {
        Self { talk: Some(talk) }
    }

    /// Until our last request has ended; and if we are the root, until all has.
    pub(in crate::serve) async fn see_off(
        mut self,
        server: Server,
        deadline: Duration,
        signals: &mut Signals,
    ) -> Result<(), Failure> {
        let nursery = server.nursery().clone();
        if let Some(talk) = self.talk.clone() {
            server.beside(follow(talk, server.fleet().clone()));
        }
        let mut ends: Option<Instant> = None;
        let mut told = Remains::default();
        // What is to be done in the program before us, if there is one, counts here, too: whoever comes after us hears of it through us.
        while !server.has_ended() || !server.fleet().remains().is_nothing() {
            tokio::select! {
                () = server.gateway_ended(), if !server.has_ended() => {}
                () = tokio::time::sleep(TELLS) => self.tell(&server, &mut told).await,
                () = at(ends) => break,
                exit = nursery.successor_ended() => return ended(exit),
                asked = signals.next() => match asked {
                    Asked::End if ends.is_some() => return Err(Failure::failed("ended at once by a second signal")),
                    Asked::End => {
                        nursery.end_successors();
                        server.stop_accepting();
                        ends = Some(Instant::now() + deadline);
                    }
                    Asked::Reload => {
                        // The lines of what still runs here belong into the new file, too.
                        server.reopen_logs();
                        nursery.reload_successors();
                    }
                    Asked::Upgrade => nursery.upgrade_successor(),
                },
            }
        }
        self.tell(&server, &mut told).await;
        // The other side takes that for: nothing runs here any more.
        if let Some(talk) = self.talk.take() {
            talk.end();
        }
        server.disband().await;
        if !nursery.is_root() {
            tracing::info!("the last request has ended; the next program serves");
            return Ok(());
        }
        tracing::info!("the last request has ended; the next program serves, and we stay for its processes");
        stay(&nursery, ends.is_some(), signals).await
    }

    async fn tell(&mut self, server: &Server, told: &mut Remains) {
        let remains = server.fleet().remains();
        if remains == *told {
            return;
        }
        let Some(talk) = &self.talk else { return };
        let said = talk.say(remains.clone(), Vec::new(), Instant::now() + TAKES).await;
        if said.is_err() {
            // It is gone, or does not listen: what is here goes on. Whoever hears here ends, too, and the other side lets go of our places.
            talk.end();
            self.talk = None;
        }
        *told = remains;
    }
}

/// Where the next program sends requests, those go that are here, or in the program before us, and have to be sent again. Until the
/// conversation ends.
async fn follow(talk: Talk, fleet: Fleet) {
    loop {
        match talk.hear::<Gates>(Instant::now() + HEARS).await {
            Ok((told, _)) => fleet.follow_gates(&told.gates),
            Err(error) if error.kind() == std::io::ErrorKind::TimedOut => {}
            Err(_) => return,
        }
    }
}

/// Passes on what we are told, until whoever serves has ended.
async fn stay(nursery: &NurseryHandle, mut ending: bool, signals: &mut Signals) -> Result<(), Failure> {
    loop {
        tokio::select! {
            exit = nursery.successor_ended() => return ended(exit),
            asked = signals.next() => match asked {
                Asked::End if ending => return Err(Failure::failed("ended at once by a second signal")),
                Asked::End => {
                    ending = true;
                    nursery.end_successors();
                }
                Asked::Reload => nursery.reload_successors(),
                Asked::Upgrade => nursery.upgrade_successor(),
            },
        }
    }
}

/// We end as whoever served has ended: a service manager sees nobody but us.
fn ended(exit: Exit) -> Result<(), Failure> {
    match exit {
        Exit::Code(0) => Ok(()),
        Exit::Code(code) => Err(Failure::Told { code: u8::try_from(code).unwrap_or(1) }),
        exit => Err(Failure::failed(format!(
            "the program that served in our place has ended ({exit}), and its llama-servers end with us"
        ))),
    }
}

async fn at(time: Option<Instant>) {
    match time {
        Some(time) => tokio::time::sleep_until(time).await,
        None => std::future::pending().await,
    }
}
