//! A run of `llama-warden diagnose`: its server, its experiment and the lab.

use tokio_util::sync::CancellationToken;
use warden_admin::instance;
use warden_config::machine::HostMachine;
use warden_config::resolve::ResolvedConfig;
use warden_diagnose::{Experiment, Lab};
use warden_policies::defaults::Diagnose;
use warden_policies::lifecycle::LifecyclePolicy;
use warden_supervisor::nursery::NurseryHandle;
use warden_supervisor::{PrivateDir, SoloStarter};

use super::args::DiagnoseArgs;
use super::target::DiagnoseTarget;
use crate::exit::CommandError;
use crate::serve::SignalHandlers;

pub(super) struct DiagnosisRun<'a> {
    pub(super) args: &'a DiagnoseArgs,
    pub(super) machine: HostMachine,
    pub(super) target: DiagnoseTarget,
    pub(super) experiment: Experiment,
    pub(super) lab: Lab,
    pub(super) stop: CancellationToken,
}

/// Also returns the private directory of the sockets, which is removed on drop.
pub(super) fn open_lab(
    nursery: NurseryHandle,
    resolved: &ResolvedConfig,
    lifecycle: &LifecyclePolicy,
    numbers: Diagnose,
) -> Result<(Lab, PrivateDir), CommandError> {
    let sockets = instance::private_dir(&resolved.dirs.runtime)?;
    let starter = SoloStarter::new(nursery, sockets.path(), lifecycle, resolved.fleet.watch)?;
    let proof = resolved.settings.proof.clone();
    Ok((Lab { numbers, proof, ..Lab::new(starter, resolved.fleet.growth.clone()) }, sockets))
}

/// The first signal cancels `stop`; the second returns at once, which ends the program and its servers.
pub(super) async fn wait_or_interrupt<T>(
    signals: &mut SignalHandlers,
    stop: &CancellationToken,
    running: impl Future<Output = T>,
) -> Result<T, CommandError> {
    tokio::pin!(running);
    loop {
        tokio::select! {
            done = &mut running => return Ok(done),
            () = signals.wait_leave() => {
                if stop.is_cancelled() {
                    return Err(CommandError::INTERRUPTED);
                }
                stop.cancel();
            }
        }
    }
}
