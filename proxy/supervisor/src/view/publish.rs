//! Combines the models' views into one numbered view of the fleet.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};

use tokio::sync::watch;
use warden_policies::{GpuIndex, ModelName};
use warden_sensors::HostTotals;

use crate::sync::lock;
use crate::view::{DeviceView, FleetView, ModelView};

#[derive(Debug, Default)]
pub(crate) struct ViewPublisher {
    desk: Mutex<PublisherState>,
    sender: watch::Sender<Arc<FleetView>>,
}

#[derive(Debug, Default)]
struct PublisherState {
    number: u64,
    order: Vec<ModelName>,
    /// Models that clients cannot request.
    canaries: Vec<ModelName>,
    /// Views that changed since the last publication.
    pending: HashMap<ModelName, Arc<ModelView>>,
    devices: Vec<DeviceView>,
    /// Descriptions of memory that was not freed after a process ended, by GPU.
    leaks: BTreeMap<GpuIndex, String>,
    host: Option<HostTotals>,
    /// The machine was read since the last publication.
    machine_is_new: bool,
    /// True while updates are collected and not published.
    is_paused: bool,
}

impl ViewPublisher {
    /// Sets the models to show, in this order. Views of other models are dropped.
    pub(crate) fn set_order(&self, order: Vec<ModelName>, canaries: Vec<ModelName>) {
        let mut desk = lock(&self.desk);
        (desk.order, desk.canaries) = (order, canaries);
        self.publish(&mut desk);
    }

    pub(crate) fn update(&self, view: ModelView) {
        let mut desk = lock(&self.desk);
        // A task reports its view in its first turn even if nothing has changed.
        let is_shown = desk.order.contains(&view.name) || desk.canaries.contains(&view.name);
        let published = self.view();
        let mut all = published.models.iter().chain(&published.canaries);
        let known = desk.pending.get(&view.name).or_else(|| all.find(|known| known.name == view.name));
        let is_new = desk.machine_is_new || known.is_none_or(|known| **known != view);
        if is_shown && is_new {
            desk.pending.insert(view.name.clone(), Arc::new(view));
            if !desk.is_paused {
                self.publish(&mut desk);
            }
        }
    }

    /// Pauses publication while many models are added. Each publication lists all models, so 1,000 models
    /// would otherwise produce 500,000 list entries.
    pub(crate) fn set_paused(&self, is_paused: bool) {
        let mut desk = lock(&self.desk);
        desk.is_paused = is_paused;
        if !is_paused {
            self.publish(&mut desk);
        }
    }

    /// Sets the last reading of the machine. It is published with the next change of a model.
    pub(crate) fn set_machine(&self, mut devices: Vec<DeviceView>, host: Option<HostTotals>) {
        let mut desk = lock(&self.desk);
        for device in &mut devices {
            device.leak = desk.leaks.get(&device.gpu).cloned();
        }
        desk.devices = devices;
        desk.host = host.or(desk.host);
        desk.machine_is_new = true;
    }

    /// Sets or clears the description of memory that was not freed, shown from the next reading on.
    pub(crate) fn set_leak(&self, gpu: GpuIndex, message: Option<String>) {
        let leaks = &mut lock(&self.desk).leaks;
        match message {
            Some(message) => leaks.insert(gpu, message),
            None => leaks.remove(&gpu),
        };
    }

    /// The caller holds the lock, so that numbers ascend.
    fn publish(&self, desk: &mut PublisherState) {
        desk.number += 1;
        desk.machine_is_new = false;
        let published = self.view();
        let all = published.models.iter().chain(&published.canaries);
        let known: HashMap<&ModelName, &Arc<ModelView>> = all.map(|view| (&view.name, view)).collect();
        let mut pending = std::mem::take(&mut desk.pending);
        let mut shown = |names: &[ModelName]| {
            let mut views = Vec::with_capacity(names.len());
            views.extend(names.iter().filter_map(|name| {
                pending.remove(name).or_else(|| known.get(name).map(|view| Arc::clone(view)))
            }));
            views
        };
        let models = shown(&desk.order);
        let canaries = shown(&desk.canaries);
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
