//! `diagnose --report DIR`: the folder for others, with what is known of the machine.

use std::path::Path;
use std::process::Stdio;

use warden_diagnose::{Outcome, Report};

use super::target::Target;
use crate::exit::Failure;

/// Writes it.
pub(super) async fn write(
    folder: &Path,
    report: &Report,
    outcome: &Outcome,
    target: &Target,
) -> Result<(), Failure> {
    let command = &target.spec.command;
    let mut system = vec![("llama-server says".to_owned(), version(&command.binary).await)];
    system.extend(machine());
    let props = outcome.legs.first().map(|leg| leg.props).unwrap_or_default();
    let numbers = &target.resolved.diagnose;
    report
        .write_folder(folder, numbers, &system, &command.env_remove, props.slots.unwrap_or(1), props.n_ctx)
        .map_err(|error| {
            Failure::hinted(
                format!("--report {}: {error}", folder.display()),
                "choose a folder that can be written",
            )
        })
}

/// What it says to `--version`, in one line.
async fn version(binary: &Path) -> String {
    let mut command = tokio::process::Command::new(binary);
    command.arg("--version").stdin(Stdio::null()).kill_on_drop(true);
    let limit = warden_policies::defaults().child.version_timeout;
    let Ok(Ok(output)) = tokio::time::timeout(limit, command.output()).await else { return String::new() };
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    let line = text.lines().map(str::trim).find(|line| line.starts_with("version:"));
    line.unwrap_or_default().to_owned()
}

/// Kernel, driver and processor, as far as they tell.
fn machine() -> Vec<(String, String)> {
    let name = rustix::system::uname();
    let text = |part: &std::ffi::CStr| part.to_string_lossy().into_owned();
    let first = |path: &str| {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        text.lines().next().unwrap_or_default().trim().to_owned()
    };
    let cpus = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpus.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let model = model.map(|(_, name)| name.to_owned()).unwrap_or_default();
    let all = [
        ("system", format!("{} {} {}", text(name.sysname()), text(name.release()), text(name.machine()))),
        ("NVIDIA driver", first("/proc/driver/nvidia/version")),
        ("processor", model),
    ];
    all.into_iter()
        .filter(|(_, value)| !value.is_empty())
        .map(|(name, value)| (name.to_owned(), value))
        .collect()
}
