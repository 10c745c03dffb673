//! Facts about this machine: program version, effective configuration, kernel, memory, GPUs, and provenance
//! of builds.

use std::fmt::Write as _;
use std::path::Path;

use warden_builder::{BuildId, BuildStore};
use warden_policies::ByteSize;
use warden_sensors::gpu::GpuSensors;

use super::contents::ReportContents;
use crate::admin::answer::AdminStatus;
use crate::cli::diagnose::machine_facts;
use crate::config::machine::HostMachine;
use crate::config::show::print_config;
use crate::config::source::layers::LoadedConfig;
use crate::exit::CommandError;

pub(super) fn gather_machine(
    contents: &mut ReportContents,
    loaded: Result<&LoadedConfig, &CommandError>,
    machine: &HostMachine,
) {
    contents.add_text(
        "machine.txt",
        "version, kernel, processor, memory, driver, GPUs",
        &machine_text(machine),
    );
    match loaded {
        Ok(loaded) => {
            let text = print_config(loaded, machine, false);
            contents.add_text(
                "config.toml",
                "the configuration in force, with the place of each value, without secrets",
                &text,
            );
            if loaded.file.is_none() {
                contents.add_note("config.toml: no file is named; give --config as `serve` gets it");
            }
        }
        Err(error) => {
            contents.add_note(&format!("config.toml: it cannot be read: {}", error.lines().join(" ")));
        }
    }
}

fn machine_text(machine: &HostMachine) -> String {
    let mut text = String::new();
    let mut row = |name: &str, value: &dyn std::fmt::Display| {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{name}: {value}");
    };
    row("llama-warden", &env!("CARGO_PKG_VERSION"));
    row("made for", &format_args!("{} {}", std::env::consts::OS, std::env::consts::ARCH));
    for (name, value) in machine_facts() {
        row(&name, &value);
    }
    row("processors for us", &std::thread::available_parallelism().map_or(0, std::num::NonZero::get));
    row("memory for us", &machine.memory);
    if let Ok(totals) = warden_sensors::host_totals() {
        row("memory available", &ByteSize(totals.available));
    }
    if let Ok(group) = warden_sensors::cgroup_memory(machine.pid) {
        row("control group", &json_line(&group));
    }
    let gpus = GpuSensors::open();
    for device in gpus.devices() {
        row("GPU", &json_line(device));
    }
    for note in gpus.notes() {
        row("GPUs", note);
    }
    text
}

/// Formats a value in one line, with the names of its fields.
fn json_line(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

/// Adds the provenance of the builds in use and of the chosen one; without an instance, of the chosen and
/// the newest one.
pub(super) fn add_builds(contents: &mut ReportContents, data: &Path, status: Option<&AdminStatus>) {
    let store = BuildStore::new(data);
    let used = status.and_then(|status| status.binaries.as_ref());
    let mut ids: Vec<BuildId> = used
        .into_iter()
        .flat_map(|all| all.values().flatten())
        .filter_map(|file| store.find_by_file(file))
        .collect();
    ids.extend(store.default_build().ok().flatten().map(|build| build.id));
    if status.is_none() {
        ids.extend(store.newest().ok().flatten().map(|build| build.id));
    }
    ids.sort();
    ids.dedup();
    for id in ids {
        match store.show(&id).map(serde_json::to_value) {
            Ok(Ok(papers)) => {
                contents.add_json(
                    &format!("builds/{id}.json"),
                    "what a build was made of, and what it was tried with",
                    papers,
                );
            }
            Ok(Err(error)) => contents.add_note(&format!("builds/{id}.json: {error}")),
            Err(error) => contents.add_note(&format!("builds/{id}.json: {error}")),
        }
    }
}
