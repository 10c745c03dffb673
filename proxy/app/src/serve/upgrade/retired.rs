//! Remaining work of the old program: its requests finish, and their number is reported to the new program.
//! The first program of all stays, because the kernel ends the llama-servers with it.

use std::time::Duration;

use tokio::time::Instant;
use warden_supervisor::nursery::NurseryHandle;
use warden_supervisor::{Fleet, InstanceOrder, ProcessExit, RemainingWork};

use super::ending::{StopSchedule, StopStep, StopTimes};
use super::talk::{GateReport, UpgradeChannel};
use crate::exit::CommandError;
use crate::serve::RunningInstance;
use crate::serve::signals::{SignalHandlers, SignalRequest, second_signal_error};

/// Interval of reports on remaining requests: the new program's queue advances with them.
const REMAINS_INTERVAL: Duration = Duration::from_millis(50);
const SEND_LIMIT: Duration = Duration::from_secs(1);
/// Extra time for other programs to end after their requests were cut.
const SUCCESSOR_END_MARGIN: Duration = Duration::from_secs(1);
/// Limit of one call that waits for a message. Any time may pass between two messages.
const RETIRED_POLL_INTERVAL: Duration = Duration::from_secs(3);

/// The old program after the handover, with its connection to the new one.
pub(in crate::serve) struct RetiredProgram {
    talk: Option<UpgradeChannel>,
}

impl RetiredProgram {
    pub(super) fn new(talk: UpgradeChannel) -> Self {
        Self { talk: Some(talk) }
    }

    /// Runs until this program's last request has ended; in the first program, until all programs have.
    pub(in crate::serve) async fn run_to_end(
        mut self,
        mut server: RunningInstance,
        deadline: Duration,
        signals: &mut SignalHandlers,
    ) -> Result<(), CommandError> {
        // From here on the directories belong to the successor, even if this program fails.
        server.release_directories();
        let nursery = server.nursery().clone();
        if let Some(talk) = self.talk.clone() {
            server.spawn_task(follow_gates(talk, server.fleet().clone()));
        }
        let times = server.stop_times(deadline);
        let mut ending: Option<StopSchedule> = None;
        // Set once the serving program has ended with exit code 0.
        let mut is_over = false;
        let mut told = RemainingWork::default();
        // Wait for the predecessor's requests, too: only this program reports them to the successor.
        while !server.has_ended() || !server.fleet().handover().remaining_work().is_done() {
            tokio::select! {
                () = server.gateway_ended(), if !server.has_ended() => {}
                () = tokio::time::sleep(REMAINS_INTERVAL) => self.report_remains(&server, &mut told).await,
                () = sleep_until_some(ending.as_ref().and_then(StopSchedule::next_time)) => {
                    match ending.as_mut().and_then(|ending| ending.take_due(Instant::now())) {
                        Some(StopStep::Stop) => server.stop_accepting(),
                        Some(StopStep::Refuse) => server.fleet().handover().close_queues(),
                        Some(StopStep::Cut) => break,
                        None => {}
                    }
                }
                exit = nursery.successor_ended(), if !is_over => {
                    if exit != ProcessExit::Code(0) {
                        return exit_result(exit);
                    }
                    // Let running answers finish: a remote model's stream, or the last bytes to a slow
                    // client, need no process that has ended.
                    is_over = true;
                    let now = Instant::now();
                    if ending.is_none() {
                        // The serving program was stopped directly, so the others have to be stopped, too.
                        nursery.pass_on(InstanceOrder::End);
                    }
                    ending.get_or_insert_with(|| StopSchedule::new(now, times)).stop_now(now);
                }
                asked = signals.next() => match asked {
                    SignalRequest::End if ending.is_some() => return Err(second_signal_error()),
                    SignalRequest::End => {
                        tracing::info!("stopping: what still runs here may end, as in the program that serves");
                        nursery.pass_on(InstanceOrder::End);
                        server.announce_stop();
                        ending = Some(StopSchedule::new(Instant::now(), times));
                    }
                    SignalRequest::Reload => {
                        // Log lines of requests that still run belong into the new file, too.
                        drop(server.reopen_logs());
                        nursery.pass_on(InstanceOrder::Reload);
                    }
                    SignalRequest::Upgrade => nursery.pass_on(InstanceOrder::Upgrade),
                },
            }
        }
        self.report_remains(&server, &mut told).await;
        // The end of the connection tells the successor that no request is left here.
        if let Some(talk) = self.talk.take() {
            talk.close();
        }
        server.disband().await;
        if !nursery.is_root() {
            tracing::info!("the last request has ended; the next program serves");
            return Ok(());
        }
        tracing::info!(
            "the last request has ended; the next program serves, and this one stays for its processes"
        );
        let cut = ending.map(|ending| ending.cut_time().unwrap_or_else(Instant::now));
        RootProgram { nursery, times, cut, is_over }.run(signals).await
    }

    async fn report_remains(&mut self, server: &RunningInstance, told: &mut RemainingWork) {
        let remains = server.fleet().handover().remaining_work();
        if remains == *told {
            return;
        }
        let Some(talk) = &self.talk else { return };
        let said = talk.send(remains.clone(), Vec::new(), Instant::now() + SEND_LIMIT).await;
        if said.is_err() {
            // The successor is gone or does not read, so requests here continue. Closing the connection ends
            // `follow_gates`, and the successor frees their slots.
            talk.close();
            self.talk = None;
        }
        *told = remains;
    }
}

/// Applies the gates and refusals that the successor reports, so that requests here and in our predecessor
/// use the successor's processes. Ends with the connection.
async fn follow_gates(talk: UpgradeChannel, fleet: Fleet) {
    loop {
        match talk.receive::<GateReport>(Instant::now() + RETIRED_POLL_INTERVAL).await {
            Ok((told, _)) => fleet.handover().follow_gates(&told.gates, &told.refusals),
            Err(error) if error.kind() == std::io::ErrorKind::TimedOut => {}
            Err(_) => return,
        }
    }
}

/// The first program, after its own last request has ended.
struct RootProgram {
    nursery: NurseryHandle,
    times: StopTimes,
    /// Time by which the other programs have cut their requests; `None` before a stop.
    cut: Option<Instant>,
    /// True if the serving program has ended with exit code 0.
    is_over: bool,
}

impl RootProgram {
    /// Passes signals on until the serving program and all programs between it and this one have ended, or
    /// until a limit after a stop.
    async fn run(mut self, signals: &mut SignalHandlers) -> Result<(), CommandError> {
        loop {
            tokio::select! {
                exit = self.nursery.successor_ended(), if !self.is_over => {
                    if exit != ProcessExit::Code(0) {
                        return exit_result(exit);
                    }
                    self.is_over = true;
                    if self.cut.is_none() {
                        self.stop_others();
                    }
                }
                () = self.nursery.retired_ended(), if self.is_over => return Ok(()),
                () = sleep_until_some(self.cut.map(|cut| cut + SUCCESSOR_END_MARGIN)), if self.is_over => return Ok(()),
                asked = signals.next() => match asked {
                    SignalRequest::End if self.cut.is_some() => return Err(second_signal_error()),
                    SignalRequest::End => {
                        tracing::info!("stopping: the serving program and earlier ones are notified");
                        self.stop_others();
                    }
                    SignalRequest::Reload => self.nursery.pass_on(InstanceOrder::Reload),
                    SignalRequest::Upgrade => self.nursery.pass_on(InstanceOrder::Upgrade),
                },
            }
        }
    }

    fn stop_others(&mut self) {
        self.cut = Some(Instant::now() + self.times.total());
        self.nursery.pass_on(InstanceOrder::End);
    }
}

/// The serving program's exit becomes this program's, because a service manager sees only this one.
fn exit_result(exit: ProcessExit) -> Result<(), CommandError> {
    match exit {
        ProcessExit::Code(0) => Ok(()),
        ProcessExit::Code(code) => Err(CommandError::Reported { code: u8::try_from(code).unwrap_or(1) }),
        exit => Err(CommandError::failed(format!(
            "the serving program has ended ({exit}), and its llama-servers end with this one"
        ))),
    }
}

async fn sleep_until_some(time: Option<Instant>) {
    match time {
        Some(time) => tokio::time::sleep_until(time).await,
        None => std::future::pending().await,
    }
}
