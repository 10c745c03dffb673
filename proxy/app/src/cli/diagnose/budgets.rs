//! Budgets of the model of an experiment, for plots. Computed as for a server that settled at the same
//! memory.

use warden_diagnose::DiagnoseReport;
use warden_diagnose::report::SeriesBudget;
use warden_experiment::LegFinding;
use warden_experiment::SeriesFinding;
use warden_policies::MemoryKind;
use warden_policies::growth::SeriesGrowth;
use warden_policies::recycle::{RecyclePolicy, SeriesFacts};

use super::target::DiagnoseTarget;
use crate::config::machine::HostMachine;

/// Budgets of each memory that has one.
pub(super) fn model_budgets(
    target: &DiagnoseTarget,
    machine: &HostMachine,
    report: &DiagnoseReport,
) -> Vec<SeriesBudget> {
    let Some(model) = target.resolved.fleet.models.get(target.index) else { return Vec::new() };
    let mut all: Vec<SeriesBudget> = Vec::new();
    for leg in &report.legs {
        let allowed = leg.readings.last().map_or(0, |reading| reading.allowed);
        for found in new_series(&leg.finding, &all) {
            let facts = series_facts(&found, allowed, machine, report);
            all.extend(series_budget(&model.recycle, &facts));
        }
    }
    all
}

/// Memories of a leg that have no budget yet.
fn new_series(finding: &LegFinding, known: &[SeriesBudget]) -> Vec<SeriesFinding> {
    let is_known = |found: &&SeriesFinding| known.iter().any(|one| one.series == found.series);
    finding.series.iter().filter(|found| !is_known(found)).cloned().collect()
}

fn series_facts(
    found: &SeriesFinding,
    allowed: u64,
    machine: &HostMachine,
    report: &DiagnoseReport,
) -> SeriesFacts {
    let growth = SeriesGrowth { baseline: Some(found.first), ..SeriesGrowth::without_readings(found.series) };
    let facts =
        SeriesFacts { growth: Some(growth), ..SeriesFacts::from_bytes(found.series, Some(found.last)) };
    match found.series {
        MemoryKind::Host => SeriesFacts { total: Some(machine.memory.0), allowance: allowed, ..facts },
        MemoryKind::Vram(gpu) => {
            let device = report.devices.iter().find(|device| device.gpu == gpu);
            let (total, free) = device.map_or((None, None), |device| (device.total, device.free));
            SeriesFacts { total, free, ..facts }
        }
    }
}

fn series_budget(policy: &RecyclePolicy, facts: &SeriesFacts) -> Option<SeriesBudget> {
    let budget = policy.budget(facts);
    let any = budget.soft.is_some() || budget.hard.is_some();
    any.then_some(SeriesBudget { series: facts.series, budget })
}
