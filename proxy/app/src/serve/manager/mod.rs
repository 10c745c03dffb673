//! The service manager that has started us (systemd, or whatever speaks as it does): it is told how we are, and hands over sockets.
//! Without one nothing of this happens.
//!
//! ```text
//!   listening          READY=1      models load behind it: requests wait for them, so there is nothing to wait for
//!   HUP                RELOADING=1 … READY=1
//!   each second        STATUS=…     if it has changed
//!   all loops turn     WATCHDOG=1   (`watchdog`)
//!   TERM               STOPPING=1, then EXTEND_TIMEOUT_USEC= as long as requests may still end
//! ```
//!
//! Ready does not mean that preloaded models are: that takes minutes for large ones, for which a manager has no patience, and a broken
//! model would keep the others from being served.

mod notify;
mod sockets;
mod status;
mod watchdog;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use tokio::sync::Mutex;
use tokio_util::sync::CancellationToken;
use warden_gateway::Gauges;
use warden_supervisor::Fleet;

use self::notify::Socket;
pub(crate) use self::sockets::Sockets;
use self::status::{line, one_line};
pub(crate) use self::watchdog::{Asked, watch};
use crate::config::machine::Machine;
use crate::exit::Failure;

/// Nobody reads faster, and a manager has other things to do.
const STATUS: Duration = Duration::from_secs(1);
/// While a drain goes on: so much more time is asked for, so often. Two of these may be lost.
const MORE: Duration = Duration::from_secs(15);
const ASK_MORE: Duration = Duration::from_secs(5);

/// The manager that has started us, if one wants to be told.
#[derive(Debug, Default)]
pub(crate) struct Manager {
    socket: Option<Socket>,
    /// Why there is none although one was named.
    trouble: Option<String>,
    /// It ends us if the watchdog is not fed for so long.
    watchdog: Option<Duration>,
    /// What it was told last of how we are. Held while it is told.
    said: Mutex<String>,
    /// It could not be told, which was told in our log.
    deaf: AtomicBool,
    /// The end has begun.
    ending: AtomicBool,
}

impl Manager {
    /// As our environment has it. `main`: the process that it has started.
    pub(crate) fn of(machine: &Machine, main: u32) -> Self {
        let Some(name) = machine.var("NOTIFY_SOCKET") else { return Self::default() };
        let socket = Socket::open(name);
        let trouble = socket.as_ref().err().map(|error| format!("NOTIFY_SOCKET={}: {error}", name.display()));
        let number = |name| machine.var(name)?.to_str()?.parse::<u64>().ok();
        let is_ours = machine.var("WATCHDOG_PID").is_none_or(|_| number("WATCHDOG_PID") == Some(main.into()));
        let watchdog =
            number("WATCHDOG_USEC").filter(|&limit| is_ours && limit > 0).map(Duration::from_micros);
        Self { socket: socket.ok(), trouble, watchdog, ..Self::default() }
    }

    /// We serve, or serve with a new configuration.
    pub(crate) async fn ready(&self) {
        if let Some(trouble) = &self.trouble {
            tracing::warn!("{trouble}; the service manager cannot be told how we are");
        }
        self.tell("READY=1").await;
    }

    /// The configuration is read again; [`Self::ready`] tells the end of it.
    pub(crate) async fn reloading(&self) {
        let now = clock_gettime(ClockId::Monotonic);
        let micros = i128::from(now.tv_sec) * 1_000_000 + i128::from(now.tv_nsec) / 1000;
        self.say("reads the configuration again", &format!("RELOADING=1\nMONOTONIC_USEC={micros}\n")).await;
    }

    /// The end has begun; resolves never, and asks for time until it is dropped. `longest`: what the drain may take in all.
    pub(crate) async fn stopping(&self, in_flight: usize, longest: Duration) {
        self.ending.store(true, Ordering::Relaxed);
        let text = format!("stopping: {in_flight} requests in flight may end");
        self.say(&text, &format!("STOPPING=1\nEXTEND_TIMEOUT_USEC={}\n", MORE.as_micros())).await;
        // Loops end one after the other now, and what takes too long ends by its deadline: there is nothing left to watch over.
        let fed = if self.watchdog.is_some() { "\nWATCHDOG=1" } else { "" };
        let pause = self.watchdog.map_or(ASK_MORE, |limit| ASK_MORE.min(limit / 4));
        let mut left = longest;
        while !left.is_zero() {
            self.tell(&format!("EXTEND_TIMEOUT_USEC={}{fed}", MORE.as_micros())).await;
            tokio::time::sleep(pause).await;
            left = left.saturating_sub(pause);
        }
        // Whoever has not ended by now will not: the manager shall see to it.
        std::future::pending::<()>().await;
    }

    /// We end because of this.
    pub(crate) async fn failed(&self, failure: &Failure) {
        let lines = failure.lines();
        if let Some(first) = lines.first() {
            self.say(first, "").await;
        }
    }

    /// Tells how we are, until `stop`.
    pub(crate) async fn follow(self: Arc<Self>, fleet: Fleet, gauges: Arc<Gauges>, stop: CancellationToken) {
        if self.socket.is_none() {
            return;
        }
        let tell = async {
            loop {
                let mut text = line(&fleet.view(), gauges.in_flight.load(Ordering::Relaxed));
                if self.ending.load(Ordering::Relaxed) {
                    text.insert_str(0, "stopping: ");
                }
                if *self.said.lock().await != text {
                    self.say(&text, "").await;
                }
                tokio::time::sleep(STATUS).await;
            }
        };
        stop.run_until_cancelled(tell).await;
    }

    /// Feeds the watchdog, if there is one, as long as all that `ask` asks turn, until `stop`.
    pub(crate) async fn feed(self: Arc<Self>, ask: impl Fn() -> Asked, stop: CancellationToken) {
        let (Some(limit), Some(_)) = (self.watchdog, &self.socket) else { return };
        let fed = || async { self.tell("WATCHDOG=1").await };
        watch(limit, "the service manager is not told that all is well", ask, fed, stop).await;
    }

    /// Tells this, and how we are.
    async fn say(&self, text: &str, before: &str) {
        let mut said = self.said.lock().await;
        text.clone_into(&mut said);
        self.tell(&format!("{before}STATUS={}", one_line(text))).await;
    }

    async fn tell(&self, message: &str) {
        let Some(socket) = &self.socket else { return };
        match socket.send(message).await {
            Ok(()) => self.deaf.store(false, Ordering::Relaxed),
            Err(error) if !self.deaf.swap(true, Ordering::Relaxed) => {
                tracing::warn!(%error, "the service manager cannot be told how we are (NOTIFY_SOCKET)");
            }
            Err(_) => {}
        }
    }
}
