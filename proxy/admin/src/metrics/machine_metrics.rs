//! Metrics of the machine: memory and GPUs, as last read. A metric whose value is unknown has no line.

use prometheus_client::encoding::{EncodeLabelSet, LabelSetEncoder};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Unit;
use warden_supervisor::{DeviceView, FleetView};

use super::families::to_gauge;
use super::families::{ClearGauges as _, families, labels};
#[cfg(test)]
use super::metrics_page_tests::LabelNames;

labels! {
    GpuLabels { gpu: u32 }
}

/// An empty set of labels, for a metric with at most one line.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct NoLabels;

#[cfg(test)]
impl LabelNames for NoLabels {
    const NAMES: &'static [&'static str] = &[];
}

impl EncodeLabelSet for NoLabels {
    fn encode(&self, _: &mut LabelSetEncoder<'_>) -> std::fmt::Result {
        Ok(())
    }
}

families! {
    pub(super) struct MachineMetrics () {
        host_total: Family<NoLabels, Gauge>
            = "host_memory" in Unit::Bytes, "Memory of the machine, or of the container of llama-warden.";
        host_available: Family<NoLabels, Gauge>
            = "host_memory_available" in Unit::Bytes, "Memory of the machine that is available without swapping.";
        gpu_total: Family<GpuLabels, Gauge>
            = "gpu_memory" in Unit::Bytes, "Memory of a GPU. Values that its driver does not report have no line.";
        gpu_used: Family<GpuLabels, Gauge>
            = "gpu_memory_used" in Unit::Bytes, "Memory of the GPU in use by all processes.";
        gpu_free: Family<GpuLabels, Gauge>
            = "gpu_memory_free" in Unit::Bytes, "Memory of the GPU that is available.";
        gpu_temperature: Family<GpuLabels, Gauge>
            = "gpu_temperature" in Unit::Celsius, "Temperature of the GPU.";
        gpu_xid: Family<GpuLabels, Gauge>
            = "gpu_last_xid",
            "The last Xid error (a fault of GPU or driver) since llama-warden started.";
    }
}

impl MachineMetrics {
    /// Clears all gauges and sets the known ones again, so that unknown values have no line.
    pub(super) fn read(&self, view: &FleetView) {
        self.clear_gauges();
        if let Some(host) = view.host {
            self.host_total.get_or_create(&NoLabels).set(to_gauge(host.total));
            self.host_available.get_or_create(&NoLabels).set(to_gauge(host.available));
        }
        for device in &view.devices {
            self.read_device(device);
        }
    }

    fn read_device(&self, device: &DeviceView) {
        let labels = GpuLabels { gpu: device.gpu.0 };
        let known = [
            (&self.gpu_total, device.total),
            (&self.gpu_used, device.used),
            (&self.gpu_free, device.free),
            (&self.gpu_temperature, device.temperature.map(u64::from)),
            (&self.gpu_xid, device.xid),
        ];
        for (gauge, value) in known {
            if let Some(value) = value {
                gauge.get_or_create(&labels).set(to_gauge(value));
            }
        }
    }
}
