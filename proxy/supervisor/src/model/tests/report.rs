//! Memory reports: the file of a generation, its view, and its removal.

use std::path::{Path, PathBuf};

use warden_sensors::CudaReport;
use warden_sensors::report::{ContextCounts, ContextReport, FixSettings, REPORT_VARIABLE};

use super::script::Role;
use super::*;
use crate::process::group::ProcessExit;
use crate::process::report_file;

fn published(graphs_live: u64) -> CudaReport {
    let counts =
        ContextCounts { graphs_live, graphs_evicted: 3, pool_bytes: MIB, ..ContextCounts::default() };
    CudaReport {
        pid: 1000,
        started_unix_ms: 1,
        active: std::collections::BTreeSet::default(),
        settings: FixSettings::default(),
        contexts: vec![ContextReport { context: 0, device: 0, live: true, counts, updated_unix_ms: 2 }],
    }
}

/// Report path in the environment of the last process.
fn told(rig: &Rig) -> Option<PathBuf> {
    let command = &rig.script.last().request.command;
    command.env.iter().find(|(name, _)| name == REPORT_VARIABLE).map(|(_, path)| path.into())
}

fn shown(rig: &Rig) -> Option<u64> {
    let view = rig.fleet.view();
    view.models[0].backends[0].report.as_ref().map(|report| report.totals().counts.graphs_live)
}

fn reports_in(directory: &Path) -> usize {
    let names = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name());
    names.filter(|name| name.to_str().unwrap().ends_with(".report")).count()
}

#[tokio::test(start_paused = true)]
async fn each_generation_has_a_file_of_its_own_that_goes_with_it() {
    let rig = Rig::new(|_, _| {}).await;
    drop(rig.lease().await.unwrap());
    let first = told(&rig).unwrap();
    assert_eq!(first, report_file::report_path(&rig.script.last().socket));
    std::fs::write(&first, "whatever the process wrote").unwrap();
    rig.fleet.restart("m").await.unwrap();
    let second = told(&rig).unwrap();
    assert!(first != second && !first.exists(), "{} is left", first.display());
    std::fs::write(&second, "").unwrap();
    // The process dies without output, and so does the next one during its start.
    rig.script.next(Role::failing(ProcessExit::Signal(9), ""));
    rig.script.last().crash();
    pass(secs(1)).await;
    assert!(!second.exists(), "{} is left", second.display());
    let directory = rig.config.runtime_dir.clone();
    rig.fleet.shutdown(secs(30)).await;
    assert_eq!(reports_in(&directory), 0);
    rig.script.assert_all_reaped();
}

#[tokio::test(start_paused = true)]
async fn what_an_earlier_process_of_the_same_name_left_is_not_taken_for_a_report() {
    let rig = Rig::new(|_, _| {}).await;
    // In a container, each run of the supervisor has the same PID.
    let name = ModelName::new("m");
    let socket = crate::process::directories::socket_path(&rig.config.runtime_dir, &name, GenerationId(1));
    std::fs::write(report_file::report_path(&socket), "stale").unwrap();
    drop(rig.lease().await.unwrap());
    assert_eq!(told(&rig), Some(report_file::report_path(&socket)));
    assert_eq!(reports_in(&rig.config.runtime_dir), 0);
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn the_last_report_is_shown_and_a_replacement_is_entered_with_its_sums() {
    let rig = Rig::new(|_, _| {}).await;
    drop(rig.lease().await.unwrap());
    pass(secs(6)).await;
    assert_eq!(shown(&rig), None, "a plain build reports nothing");
    rig.script.last().set_report(Some(published(12)));
    pass(secs(6)).await;
    assert_eq!(shown(&rig), Some(12));
    rig.script.last().set_report(None);
    pass(secs(6)).await;
    assert_eq!(shown(&rig), Some(12), "the last one stays");
    let entries = rig.fleet.restart("m").await.unwrap();
    let totals = entries[0].evidence.report.unwrap();
    assert_eq!((totals.contexts, totals.counts.graphs_live, totals.counts.pool_bytes), (1, 12, MIB));
    assert_eq!(rig.ledger(), entries);
    assert_eq!(shown(&rig), None, "the next generation has reported nothing");
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_slow_reading_does_not_take_back_what_a_later_one_showed() {
    let rig = Rig::new(|_, _| {}).await;
    drop(rig.lease().await.unwrap());
    pass(secs(6)).await;
    let process = rig.script.last();
    process.set_report(Some(published(3)));
    process.set_anon(300 * MIB);
    process.set_reading_takes(secs(2));
    let before = process.readings();
    while process.readings() == before {
        pass(Duration::from_millis(100)).await;
    }
    // A request comes and goes during the reading.
    process.set_reading_takes(Duration::ZERO);
    process.set_report(Some(published(5)));
    process.set_anon(500 * MIB);
    drop(rig.lease().await.unwrap());
    pass(secs(1)).await;
    let held = || rig.fleet.view().models[0].backends[0].host.map(|host| host.anon);
    assert_eq!((shown(&rig), held()), (Some(5), Some(500 * MIB)));
    pass(secs(2)).await;
    assert_eq!((shown(&rig), held()), (Some(5), Some(500 * MIB)), "the slow one has come");
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn a_report_is_read_at_the_idle_edge_too() {
    let rig = Rig::new(|config, _| config.watch.sensors.interval = secs(3600)).await;
    let lease = rig.lease().await.unwrap();
    pass(secs(60)).await;
    rig.script.last().set_report(Some(published(5)));
    drop(lease);
    pass(secs(1)).await;
    assert_eq!(shown(&rig), Some(5));
    rig.end().await;
}

#[tokio::test(start_paused = true)]
async fn the_variable_is_set_only_when_wanted_and_a_change_takes_a_new_process() {
    let mut rig = Rig::new(|config, _| config.models[0].run.memory_report = false).await;
    drop(rig.lease().await.unwrap());
    assert_eq!(told(&rig), None);
    assert_eq!(rig.script.last().request.command.env_remove, [REPORT_VARIABLE], "nor is ours inherited");
    let report = rig.apply(|config| config.models[0].run.memory_report = true).await;
    assert_eq!(report.restarted.len(), 1);
    pass(secs(1)).await;
    assert_eq!(rig.script.children().len(), 2);
    assert!(told(&rig).is_some());
    let report = rig.apply(|_| {}).await;
    assert_eq!(report.unchanged.len(), 1, "the file's name is no change of the command");
    rig.end().await;
}
