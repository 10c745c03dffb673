//! Talks to the service manager that started us (systemd or a compatible one): reports our state, and takes
//! over its sockets. Without a manager nothing of this happens.
//!
//! ```text
//!   listening              READY=1      models load afterwards, and requests wait for them
//!   HUP                    RELOADING=1 … READY=1
//!   each second            STATUS=…     if it has changed
//!   all loops responsive   WATCHDOG=1   (`watchdog`)
//!   TERM                   STOPPING=1, then EXTEND_TIMEOUT_USEC= as long as requests may still end
//! ```
//!
//! Ready does not mean that preloaded models are ready: large ones take minutes, longer than a manager
//! waits. Also, one broken model would keep the others from being served.

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
use warden_gateway::GatewayGauges;
use warden_supervisor::Fleet;

use self::notify::NotifySocket;
pub(crate) use self::sockets::ActivatedSockets;
use self::status::{status_line, to_single_line};
pub(crate) use self::watchdog::{LoopAnswers, run_watchdog};
use crate::config::machine::HostMachine;
use crate::exit::CommandError;

/// Interval of status updates: faster ones are not read, and would burden the manager.
const STATUS_INTERVAL: Duration = Duration::from_secs(1);
/// Extension requested during a drain, every [`EXTENSION_INTERVAL`]. Two such messages may be lost.
const TIMEOUT_EXTENSION: Duration = Duration::from_secs(15);
const EXTENSION_INTERVAL: Duration = Duration::from_secs(5);

/// The manager that started us, if it wants notifications.
#[derive(Debug, Default)]
pub(crate) struct ServiceManager {
    socket: Option<NotifySocket>,
    /// Why its socket cannot be used.
    socket_error: Option<String>,
    /// The manager ends us if the watchdog is not fed for this long.
    watchdog: Option<Duration>,
    /// The last status sent. Locked while one is sent.
    last_status: Mutex<String>,
    /// True if the last message failed, which was logged.
    send_failed: AtomicBool,
    /// True if the instance is stopping.
    ending: AtomicBool,
}

impl ServiceManager {
    /// Reads the environment. `main`: PID of the process that the manager started.
    pub(crate) fn from_environment(machine: &HostMachine, main: u32) -> Self {
        let Some(name) = machine.var("NOTIFY_SOCKET") else { return Self::default() };
        let socket = NotifySocket::open(name);
        let trouble = socket.as_ref().err().map(|error| format!("NOTIFY_SOCKET={}: {error}", name.display()));
        let number = |name| machine.var(name)?.to_str()?.parse::<u64>().ok();
        let is_ours = machine.var("WATCHDOG_PID").is_none_or(|_| number("WATCHDOG_PID") == Some(main.into()));
        let watchdog =
            number("WATCHDOG_USEC").filter(|&limit| is_ours && limit > 0).map(Duration::from_micros);
        Self { socket: socket.ok(), socket_error: trouble, watchdog, ..Self::default() }
    }

    /// Reports that we serve, at the start and after a reload.
    pub(crate) async fn report_ready(&self) {
        if let Some(trouble) = &self.socket_error {
            tracing::warn!("{trouble}; the service manager gets no status from llama-warden");
        }
        self.send("READY=1").await;
    }

    /// Reports that the configuration is read again; [`Self::report_ready`] reports the end of it.
    pub(crate) async fn report_reloading(&self) {
        let now = clock_gettime(ClockId::Monotonic);
        let micros = i128::from(now.tv_sec) * 1_000_000 + i128::from(now.tv_nsec) / 1000;
        self.send_status("reads the configuration again", &format!("RELOADING=1\nMONOTONIC_USEC={micros}\n"))
            .await;
    }

    /// Reports that we are stopping. Never resolves, and requests more time until it is dropped. `longest`:
    /// limit of the drain.
    pub(crate) async fn report_stopping(&self, in_flight: usize, longest: Duration) {
        self.ending.store(true, Ordering::Relaxed);
        let text = format!("stopping: {in_flight} requests in flight may end");
        self.send_status(
            &text,
            &format!("STOPPING=1\nEXTEND_TIMEOUT_USEC={}\n", TIMEOUT_EXTENSION.as_micros()),
        )
        .await;
        // Loops end one after the other now, each within its deadline, so the watchdog is fed
        // unconditionally.
        let fed = if self.watchdog.is_some() { "\nWATCHDOG=1" } else { "" };
        let pause = self.watchdog.map_or(EXTENSION_INTERVAL, |limit| EXTENSION_INTERVAL.min(limit / 4));
        let mut left = longest;
        while !left.is_zero() {
            self.send(&format!("EXTEND_TIMEOUT_USEC={}{fed}", TIMEOUT_EXTENSION.as_micros())).await;
            tokio::time::sleep(pause).await;
            left = left.saturating_sub(pause);
        }
        // The drain is overdue: no more time is requested, so that the manager kills us.
        std::future::pending::<()>().await;
    }

    /// Reports the error that ends us.
    pub(crate) async fn report_failure(&self, failure: &CommandError) {
        let lines = failure.lines();
        if let Some(first) = lines.first() {
            self.send_status(first, "").await;
        }
    }

    /// Reports our status until `stop`.
    pub(crate) async fn report_status(
        self: Arc<Self>,
        fleet: Fleet,
        gauges: Arc<GatewayGauges>,
        stop: CancellationToken,
    ) {
        if self.socket.is_none() {
            return;
        }
        let tell = async {
            loop {
                let mut text = status_line(&fleet.view(), gauges.in_flight.load(Ordering::Relaxed));
                if self.ending.load(Ordering::Relaxed) {
                    text.insert_str(0, "stopping: ");
                }
                if *self.last_status.lock().await != text {
                    self.send_status(&text, "").await;
                }
                tokio::time::sleep(STATUS_INTERVAL).await;
            }
        };
        stop.run_until_cancelled(tell).await;
    }

    /// Feeds the watchdog, if there is one, as long as all loops that `ask` asks are responsive, until
    /// `stop`.
    pub(crate) async fn feed_watchdog(
        self: Arc<Self>,
        ask: impl Fn() -> LoopAnswers,
        stop: CancellationToken,
    ) {
        let (Some(limit), Some(_)) = (self.watchdog, &self.socket) else { return };
        let fed = || async { self.send("WATCHDOG=1").await };
        run_watchdog(limit, "the watchdog keep-alive to the service manager is withheld", ask, fed, stop)
            .await;
    }

    /// Sends `before` and a status.
    async fn send_status(&self, text: &str, before: &str) {
        let mut said = self.last_status.lock().await;
        text.clone_into(&mut said);
        self.send(&format!("{before}STATUS={}", to_single_line(text))).await;
    }

    async fn send(&self, message: &str) {
        let Some(socket) = &self.socket else { return };
        match socket.send(message).await {
            Ok(()) => self.send_failed.store(false, Ordering::Relaxed),
            Err(error) if !self.send_failed.swap(true, Ordering::Relaxed) => {
                tracing::warn!(%error, "cannot send status to the service manager (NOTIFY_SOCKET)");
            }
            Err(_) => {}
        }
    }
}
