//! Talks to the service manager that started the program (systemd or a compatible one): reports the
//! program's state, and takes over sockets. Does nothing without a service manager.
//!
//! ```text
//!   sockets listen         READY=1      models load afterwards, and requests wait for them
//!   SIGHUP                 RELOADING=1 … READY=1
//!   each second            STATUS=…     if the status has changed
//!   all loops respond      WATCHDOG=1   (`watchdog`)
//!   SIGTERM                STOPPING=1, then EXTEND_TIMEOUT_USEC= while requests may still finish
//! ```
//!
//! Readiness does not include preloaded models: large models take minutes to load, longer than a manager
//! waits. Also, one broken model would keep the others from being served.

mod notify;
mod sockets;
mod status;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use tokio::sync::Mutex;
use tokio_util::sync::CancellationToken;
use warden_admin::probe::watchdog::{LoopAnswers, run_watchdog};
use warden_config::machine::HostMachine;
use warden_gateway::GatewayGauges;
use warden_supervisor::Fleet;

use self::notify::NotifySocket;
pub(crate) use self::sockets::ActivatedSockets;
use self::status::{status_line, to_single_line};
use crate::exit::CommandError;

/// Interval of status updates. Faster updates would only burden the manager.
const STATUS_INTERVAL: Duration = Duration::from_secs(1);
/// Extension requested during a drain, every [`EXTENSION_INTERVAL`]. Two such messages may be lost.
const TIMEOUT_EXTENSION: Duration = Duration::from_secs(15);
const EXTENSION_INTERVAL: Duration = Duration::from_secs(5);

/// The service manager that started the program, if it wants notifications.
#[derive(Debug, Default)]
pub(crate) struct ServiceManager {
    socket: Option<NotifySocket>,
    socket_error: Option<String>,
    /// Time after which the manager ends the program if the watchdog is not fed.
    watchdog: Option<Duration>,
    /// The last status sent. Locked while a status is being sent.
    last_status: Mutex<String>,
    /// The last message could not be sent, and this was logged.
    send_failed: AtomicBool,
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

    /// Reports that the program serves, at the start and after a reload.
    pub(crate) async fn report_ready(&self) {
        if let Some(trouble) = &self.socket_error {
            tracing::warn!("{trouble}; the service manager gets no status from llama-warden");
        }
        self.send("READY=1").await;
    }

    /// Reports that a reload begins; [`Self::report_ready`] reports its end.
    pub(crate) async fn report_reloading(&self) {
        let now = clock_gettime(ClockId::Monotonic);
        let micros = i128::from(now.tv_sec) * 1_000_000 + i128::from(now.tv_nsec) / 1000;
        self.send_status("reads the configuration again", &format!("RELOADING=1\nMONOTONIC_USEC={micros}\n"))
            .await;
    }

    /// Reports that the program is stopping, then requests more time until the future is dropped; never
    /// resolves. `longest`: time limit of the drain.
    pub(crate) async fn report_stopping(&self, in_flight: usize, longest: Duration) {
        self.ending.store(true, Ordering::Relaxed);
        let text = format!("stopping: {in_flight} requests in flight may end");
        self.send_status(
            &text,
            &format!("STOPPING=1\nEXTEND_TIMEOUT_USEC={}\n", TIMEOUT_EXTENSION.as_micros()),
        )
        .await;
        // Event loops now end one after the other, each within its deadline, so always feed the watchdog.
        let fed = if self.watchdog.is_some() { "\nWATCHDOG=1" } else { "" };
        let pause = self.watchdog.map_or(EXTENSION_INTERVAL, |limit| EXTENSION_INTERVAL.min(limit / 4));
        let mut left = longest;
        while !left.is_zero() {
            self.send(&format!("EXTEND_TIMEOUT_USEC={}{fed}", TIMEOUT_EXTENSION.as_micros())).await;
            tokio::time::sleep(pause).await;
            left = left.saturating_sub(pause);
        }
        // The drain is overdue: request no more time, so that the manager kills the program.
        std::future::pending::<()>().await;
    }

    pub(crate) async fn report_failure(&self, failure: &CommandError) {
        let lines = failure.lines();
        if let Some(first) = lines.first() {
            self.send_status(first, "").await;
        }
    }

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

    /// Feeds the watchdog while all event loops respond to `ask`, until `stop` is cancelled.
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

    /// Sends the lines `before`, followed by a status.
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
