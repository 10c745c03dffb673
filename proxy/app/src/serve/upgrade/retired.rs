//! What is left for the old program: its requests end, the new one hears how many there still are, and if it was the first of
//! all it stays, because the kernel ends the llama-servers with it.

use std::time::Duration;

use tokio::time::Instant;
use warden_supervisor::nursery::NurseryHandle;
use warden_supervisor::{Exit, Fleet, Remains};

use super::ending::{Ending, Step, Times};
use super::talk::{Gates, Talk};
use crate::exit::Failure;
use crate::serve::Server;
use crate::serve::signals::{Asked, Signals};

/// How often the new program hears what still runs here: its queue moves by that.
const TELLS: Duration = Duration::from_millis(50);
/// A word is not waited for any longer.
const TAKES: Duration = Duration::from_secs(1);
/// Others need this long to end, once what ran in them has had its time.
const LAST: Duration = Duration::from_secs(1);
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
        mut server: Server,
        deadline: Duration,
        signals: &mut Signals,
    ) -> Result<(), Failure> {
        // However we end from here on, what lies there is another's.
        server.leave_directories();
        let nursery = server.nursery().clone();
        if let Some(talk) = self.talk.clone() {
            server.beside(follow(talk, server.fleet().clone()));
        }
        let times = server.stop_times(deadline);
        let mut ending: Option<Ending> = None;
        // Whoever served has ended as it was to.
        let mut is_over = false;
        let mut told = Remains::default();
        // What is to be done in the program before us, if there is one, counts here, too: whoever comes after us hears of it through us.
        while !server.has_ended() || !server.fleet().remains().is_nothing() {
            tokio::select! {
                () = server.gateway_ended(), if !server.has_ended() => {}
                () = tokio::time::sleep(TELLS) => self.tell(&server, &mut told).await,
                () = at(ending.as_ref().and_then(Ending::next)) => {
                    match ending.as_mut().and_then(|ending| ending.take(Instant::now())) {
                        Some(Step::Stop) => server.stop_accepting(),
                        Some(Step::Refuse) => server.fleet().close_queues(),
                        Some(Step::Cut) => break,
                        None => {}
                    }
                }
                exit = nursery.successor_ended(), if !is_over => {
                    if exit != Exit::Code(0) {
                        return ended(exit);
                    }
                    // A remote model's stream, or the last bytes to a slow client, need none of the processes that ended with it.
                    is_over = true;
                    let now = Instant::now();
                    if ending.is_none() {
                        // Somebody has stopped the serving program directly, so we pass the word on to the others.
                        nursery.end_successors();
                    }
                    ending.get_or_insert_with(|| Ending::new(now, times)).hurry(now);
                }
                asked = signals.next() => match asked {
                    Asked::End if ending.is_some() => return Err(Failure::failed("ended at once by a second signal")),
                    Asked::End => {
                        tracing::info!("stopping: what still runs here may end, as in the program that serves");
                        nursery.end_successors();
                        server.leave();
                        ending = Some(Ending::new(Instant::now(), times));
                    }
                    Asked::Reload => {
                        // The lines of what still runs here belong into the new file, too.
                        drop(server.reopen_logs());
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
        let cut = ending.map(|ending| ending.cut().unwrap_or_else(Instant::now));
        Stay { nursery, times, cut, is_over }.stay(signals).await
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
            Ok((told, _)) => fleet.follow_gates(&told.gates, &told.refusals),
            Err(error) if error.kind() == std::io::ErrorKind::TimedOut => {}
            Err(_) => return,
        }
    }
}

/// The root without anything of its own to do.
struct Stay {
    nursery: NurseryHandle,
    times: Times,
    /// When what runs in others has had its time, once they were told to end.
    cut: Option<Instant>,
    /// Whoever served has ended as it was to.
    is_over: bool,
}

impl Stay {
    /// Passes on what we are told, until whoever serves has ended, and those between, which end with us.
    async fn stay(mut self, signals: &mut Signals) -> Result<(), Failure> {
        loop {
            tokio::select! {
                exit = self.nursery.successor_ended(), if !self.is_over => {
                    if exit != Exit::Code(0) {
                        return ended(exit);
                    }
                    self.is_over = true;
                    if self.cut.is_none() {
                        self.end();
                    }
                }
                () = self.nursery.retired_ended(), if self.is_over => return Ok(()),
                () = at(self.cut.map(|cut| cut + LAST)), if self.is_over => return Ok(()),
                asked = signals.next() => match asked {
                    Asked::End if self.cut.is_some() => return Err(Failure::failed("ended at once by a second signal")),
                    Asked::End => {
                        tracing::info!("stopping: the program that serves is told, and those before it");
                        self.end();
                    }
                    Asked::Reload => self.nursery.reload_successors(),
                    Asked::Upgrade => self.nursery.upgrade_successor(),
                },
            }
        }
    }

    fn end(&mut self) {
        self.cut = Some(Instant::now() + self.times.all());
        self.nursery.end_successors();
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
