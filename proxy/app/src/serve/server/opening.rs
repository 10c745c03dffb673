//! Opens directories, files and sockets of an instance, or takes those of the predecessor.

use std::io;

use tokio_util::sync::CancellationToken;
use warden_admin::access_log::AccessLog;
use warden_admin::instance::InstanceDirs;
use warden_admin::probe::listen::ProbeListeners;
use warden_admin::server::{AdminListeners, GivenSockets, bind_listeners, inherit_listeners};
use warden_config::resolve::ResolvedConfig;
use warden_gateway::{BoundGateway, Gateway, GatewayConfig};
use warden_supervisor::FleetWill;

use super::InstanceAddresses;
use super::succession::HandoverSockets;
use crate::exit::CommandError;
use crate::serve::manager::ActivatedSockets;
use crate::serve::upgrade::new::{InheritedAdmin, InheritedSockets, ReceivedHandover};

/// Everything that is opened before the fleet starts, so that a failure is cheap.
pub(super) struct OpenedInstance {
    pub(super) claim: InstanceDirs,
    pub(super) access: AccessLog,
    pub(super) gateway: BoundGateway,
    pub(super) listeners: AdminListeners,
    pub(super) probe: ProbeListeners,
    pub(super) sockets: HandoverSockets,
    pub(super) take_over: TakeOver,
}

/// State with which this program begins to serve.
pub(super) struct TakeOver {
    /// Cancelled when this program has taken over completely.
    pub(super) begun: CancellationToken,
    /// The instance is leaving a group of instances.
    pub(super) leaves: bool,
    /// Processes and state of the predecessor's fleet.
    pub(super) will: Option<FleetWill>,
}

impl OpenedInstance {
    pub(super) async fn open(
        resolved: &ResolvedConfig,
        given: ActivatedSockets,
        inheritance: Option<ReceivedHandover>,
    ) -> Result<Self, CommandError> {
        let (claim, take_over, public, admin, probes) = if let Some(handover) = inheritance {
            let ReceivedHandover { begun, lock, sockets, is_leaving, will } = handover;
            let InheritedSockets { public, admin, probes } = sockets;
            let take_over = TakeOver { begun, leaves: is_leaving, will: Some(will) };
            let claim = InstanceDirs::inherit(&resolved.dirs, lock);
            (claim, take_over, Some(public), Some(admin), probes)
        } else {
            let begun = CancellationToken::new();
            begun.cancel();
            let take_over = TakeOver { begun, leaves: false, will: None };
            (InstanceDirs::take(&resolved.dirs)?, take_over, None, None, Vec::new())
        };
        if !given.is_empty() {
            tracing::info!("serving on sockets that the service manager has opened");
        }
        let access = AccessLog::start(resolved.access_log.as_deref(), &resolved.settings.log)?;
        let mut config = GatewayConfig::new(&resolved.settings.server, &resolved.settings.upstream);
        if let Some(collector) = &resolved.collector {
            config = config.with_traces(collector.numbers.ratio);
        }
        let gateway = match public {
            Some(public) => Gateway::inherit(config, public),
            None => Gateway::bind_or_adopt(config, given.public).await,
        };
        let gateway = gateway.map_err(|error| CommandError::failed(error.to_string()))?;
        let pause = resolved.settings.server.accept_pause;
        let listeners = if let Some(InheritedAdmin { socket, address, from_manager }) = admin {
            inherit_listeners(socket, address, from_manager, pause).map_err(|error| socket_failure(&error))?
        } else {
            let given = GivenSockets { unix: given.admin, tcp: given.admin_tcp };
            bind_listeners(&resolved.addresses.admin_socket, resolved.addresses.admin, given, pause).await?
        };
        let probe = ProbeListeners::bind(resolved.addresses.probe, resolved.addresses.agent, probes)?;
        let sockets = HandoverSockets::duplicate(&gateway, &listeners, &probe);
        Ok(Self {
            claim,
            access,
            sockets: sockets.map_err(|error| socket_failure(&error))?,
            gateway,
            listeners,
            probe,
            take_over,
        })
    }
}

pub(super) fn bound_addresses(
    gateway: &BoundGateway,
    listeners: &AdminListeners,
    probe: &ProbeListeners,
) -> InstanceAddresses {
    let (probe, agent) = probe.addresses();
    InstanceAddresses {
        public: gateway.local_addrs().to_vec(),
        admin_socket: listeners.path().to_owned(),
        admin: listeners.address(),
        probe,
        agent,
    }
}

fn socket_failure(error: &io::Error) -> CommandError {
    CommandError::failed(format!("cannot use or copy a listening socket: {error}"))
}
