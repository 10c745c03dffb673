//! Puts the models' pictures together into one numbered picture of the fleet.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use tokio::sync::watch;
use warden_policies::ModelName;
use warden_sensors::HostTotals;

use crate::sync::lock;
use crate::view::{DeviceView, FleetView, ModelView};

#[derive(Debug, Default)]
pub(crate) struct Publisher {
    desk: Mutex<Desk>,
    sender: watch::Sender<Arc<FleetView>>,
}

#[derive(Debug, Default)]
struct Desk {
    number: u64,
    order: Vec<ModelName>,
    /// Models that clients cannot ask for.
    canaries: Vec<ModelName>,
    models: HashMap<ModelName, Arc<ModelView>>,
    devices: Vec<DeviceView>,
    host: Option<HostTotals>,
}

impl Publisher {
    /// The models that are shown, in this order. Others are forgotten.
    pub(crate) fn set_order(&self, order: Vec<ModelName>, canaries: Vec<ModelName>) {
        let mut desk = lock(&self.desk);
        desk.models.retain(|name, _| order.contains(name) || canaries.contains(name));
        (desk.order, desk.canaries) = (order, canaries);
        self.publish(&mut desk);
    }

    pub(crate) fn update(&self, view: ModelView) {
        let mut desk = lock(&self.desk);
        if desk.order.contains(&view.name) || desk.canaries.contains(&view.name) {
            desk.models.insert(view.name.clone(), Arc::new(view));
            self.publish(&mut desk);
        }
    }

    /// The machine as it was read last; shown with the next change of a model.
    pub(crate) fn set_machine(&self, devices: Vec<DeviceView>, host: Option<HostTotals>) {
        let mut desk = lock(&self.desk);
        desk.devices = devices;
        desk.host = host.or(desk.host);
    }

    /// Under the lock of the desk, so that numbers go out in order.
    fn publish(&self, desk: &mut Desk) {
        desk.number += 1;
        let shown = |names: &[ModelName]| {
            names.iter().filter_map(|name| desk.models.get(name)).map(|view| (**view).clone()).collect()
        };
        let (models, canaries) = (shown(&desk.order), shown(&desk.canaries));
        self.sender.send_replace(Arc::new(FleetView {
            number: desk.number,
            models,
            canaries,
            devices: desk.devices.clone(),
            host: desk.host,
        }));
    }

    pub(crate) fn view(&self) -> Arc<FleetView> {
        Arc::clone(&self.sender.borrow())
    }

    pub(crate) fn subscribe(&self) -> watch::Receiver<Arc<FleetView>> {
        self.sender.subscribe()
    }
}
