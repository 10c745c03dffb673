//! Methods of a running instance for an upgrade: taking over from the predecessor, and handing over to the
//! successor.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Mutex;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use warden_admin::probe::listen::ProbeListeners;
use warden_admin::series::SeriesStore;
use warden_admin::server::{AdminListeners, RestoredSocket};
use warden_gateway::BoundGateway;
use warden_supervisor::nursery::NurseryHandle;
use warden_supervisor::sync::lock;
use warden_supervisor::{StateKind, StateWriter};

use super::RunningInstance;
use crate::serve::upgrade::ending::StopTimes;
use crate::serve::upgrade::talk::{HandoverHeader, InstancePlace};

pub(super) struct HandoverSockets {
    /// Empty if no upgrade is possible any more, or it has taken place.
    copies: Mutex<SocketCopies>,
    /// The service manager made the admin socket.
    admin_given: bool,
    /// Duplicate of the admin socket, if the socket had to be created again.
    restored_admin: RestoredSocket,
    /// Cancelled when the successor has the admin sockets.
    admin_handed_over: CancellationToken,
}

/// Duplicates of the listening sockets: for clients, for operators, for probes and load balancers.
#[derive(Debug, Default)]
struct SocketCopies {
    public: Vec<OwnedFd>,
    operators: Vec<OwnedFd>,
    probes: Vec<OwnedFd>,
}

impl HandoverSockets {
    pub(super) fn duplicate(
        gateway: &BoundGateway,
        listeners: &AdminListeners,
        probe: &ProbeListeners,
    ) -> io::Result<Self> {
        let copies = SocketCopies {
            public: gateway.sockets()?,
            operators: listeners.sockets()?,
            probes: probe.sockets()?,
        };
        Ok(Self {
            copies: Mutex::new(copies),
            admin_given: listeners.given(),
            restored_admin: listeners.restored(),
            admin_handed_over: listeners.handed_over(),
        })
    }

    fn duplicate_all(&self, leaves: bool) -> io::Result<(HandoverHeader, Vec<OwnedFd>)> {
        let own = lock(&self.copies);
        let restored = lock(&self.restored_admin);
        // The first operators' socket is the Unix socket, for which the restored one is used if there is one.
        let operators = restored.iter().chain(own.operators.iter().skip(usize::from(restored.is_some())));
        let all = own.public.iter().chain(operators).chain(&own.probes);
        let header = HandoverHeader {
            public: own.public.len(),
            pieces: 0,
            admin_given: self.admin_given,
            probes: own.probes.len(),
            leaves,
        };
        Ok((header, all.map(OwnedFd::try_clone).collect::<io::Result<_>>()?))
    }

    /// A socket listens while any duplicate is open, and clients would wait there without an answer.
    pub(super) fn forget(&self) {
        drop(std::mem::take(&mut *lock(&self.copies)));
        drop(lock(&self.restored_admin).take());
    }
}

impl RunningInstance {
    pub(in crate::serve) const fn upgrade_wait(&self) -> Duration {
        self.resolved.settings.server.upgrade_wait
    }

    pub(in crate::serve) const fn version_timeout(&self) -> Duration {
        self.resolved.settings.child.version_timeout
    }

    pub(in crate::serve) const fn nursery(&self) -> &NurseryHandle {
        &self.nursery
    }

    pub(in crate::serve) fn instance_place(&self) -> InstancePlace {
        InstancePlace::from_configuration(&self.resolved)
    }

    /// Returns the header of the handover, with all sockets and the lock of the directory.
    pub(in crate::serve) fn handover_files(&self) -> io::Result<(HandoverHeader, Vec<OwnedFd>)> {
        let (header, mut files) = self.sockets.duplicate_all(self.gateway.leaving.is_begun())?;
        files.push(self.claim.lock()?);
        Ok((header, files))
    }

    pub(in crate::serve) fn take_ownership(&mut self) {
        self.claim.take_ownership();
    }

    /// Runs the self-test, before the predecessor hands over.
    pub(in crate::serve) async fn check_answers(&self) -> Result<(), String> {
        self.inquiry.run(self.resolved.settings.server.upgrade_answer).await
    }

    /// Spawns a task for which the end of the program waits.
    pub(in crate::serve) fn spawn_task(&self, task: impl Future<Output = ()> + Send + 'static) {
        drop(self.tasks.tracker.spawn(task));
    }

    /// Stops recording the fleet, because the successor records it.
    pub(in crate::serve) async fn stop_recording(&self) {
        self.tasks.books.close(self.resolved.settings.upstream.connect_timeout).await;
    }

    /// Stops accepting clients and operators, whom the successor serves now.
    pub(in crate::serve) fn retire(&self) {
        self.sockets.forget();
        self.gateway.ends.retire.cancel();
        self.tasks.retiring.cancel();
        self.sockets.admin_handed_over.cancel();
        self.tasks.stop.cancel();
    }

    /// Closes connections after their current request.
    pub(in crate::serve) fn stop_accepting(&self) {
        self.gateway.ends.stop.cancel();
    }

    /// Returns the times of a stop of this program. `delay` is the whole `probe.drain_delay`: the serving
    /// program knows how much of it has passed, and accepts requests no longer than that.
    pub(in crate::serve) const fn stop_times(&self, deadline: Duration) -> StopTimes {
        let delay = self.resolved.settings.probe.drain_delay;
        StopTimes { delay, grace: self.resolved.settings.server.stopped_keep_alive, deadline }
    }

    pub(in crate::serve) fn release_directories(&mut self) {
        self.claim.release_ownership();
    }

    pub(in crate::serve) fn has_ended(&self) -> bool {
        self.gateway.done.is_cancelled()
    }

    pub(in crate::serve) async fn gateway_ended(&self) {
        self.gateway.done.cancelled().await;
    }

    /// Ends all tasks after the last request, without removing any file.
    pub(in crate::serve) async fn disband(self) {
        self.tasks.tracker.close();
        let limit = self.resolved.settings.upstream.connect_timeout;
        let tasks = tokio::time::timeout(limit, self.tasks.tracker.wait());
        let fleet = tokio::time::timeout(limit, self.fleet.handover().disband());
        let _ = tokio::join!(tasks, fleet, self.tasks.exporting.end());
        self.tasks.books.finish().await;
        self.access.flush();
        self.claim.remove().await;
    }
}

/// Tasks that record the fleet; only one program at a time may run such tasks.
pub(super) struct RecordingTasks {
    pub(super) tasks: TaskTracker,
    pub(super) closed: CancellationToken,
    pub(super) series: SeriesStore,
    state: StateWriter,
}

/// Time limit of the last writes, longer than any working disk needs.
const LAST_WRITES_LIMIT: Duration = Duration::from_secs(1);

impl RecordingTasks {
    pub(super) fn new(stop: &CancellationToken, series: SeriesStore, state: StateWriter) -> Self {
        Self { tasks: TaskTracker::new(), closed: stop.child_token(), series, state }
    }

    async fn close(&self, limit: Duration) {
        self.closed.cancel();
        self.tasks.close();
        if tokio::time::timeout(limit, self.tasks.wait()).await.is_err() {
            tracing::warn!("some memory readings could not be written in time");
        }
        let series = self.series.clone();
        // Queue this after the writes in progress, so that a disk that hangs does not delay the successor.
        self.state.write(StateKind::Series, 0, move || {
            series.hand_over_files();
            Ok(())
        });
        let _late = self.state.wait_written(limit).await;
    }

    /// Waits a short time for writes in progress, at the end of the program.
    pub(super) async fn finish(&self) {
        if !self.state.wait_written(LAST_WRITES_LIMIT).await {
            let waiting = self.state.view().waiting;
            tracing::warn!(waiting, "the state directory does not answer: entries for it are lost");
        }
    }
}
