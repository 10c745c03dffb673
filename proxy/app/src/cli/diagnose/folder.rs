//! `diagnose --report DIR`: writes the shareable folder, with facts about the machine.

use std::path::Path;
use std::process::Stdio;

use warden_diagnose::proof::PublishedRequest;
use warden_diagnose::report::ReportFolder;
use warden_diagnose::{DiagnoseReport, ExperimentOutcome, RequestRecording};
use warden_supervisor::ServerCommand;

use super::target::DiagnoseTarget;
use crate::exit::CommandError;

/// Writes the folder. `here` is the directory of the command; `visit` holds requests that show the symptom
/// where no workload does.
pub(super) fn write_report_folder(
    path: &Path,
    report: &DiagnoseReport,
    outcome: &ExperimentOutcome,
    target: &DiagnoseTarget,
    here: &Path,
    replay: Option<&RequestRecording>,
    visit: &[PublishedRequest],
) -> Result<(), CommandError> {
    let command = &target.spec.command;
    let props = outcome.legs.first().map(|leg| leg.props).unwrap_or_default();
    let folder = ReportFolder {
        numbers: &target.resolved.settings.diagnose,
        removed: &command.env_remove,
        directory: command.directory.as_deref().unwrap_or(here),
        slots: props.slots.unwrap_or(1),
        n_ctx: props.n_ctx,
        tokens_per_word: outcome.legs.first().map_or(0.0, |leg| leg.tokens_per_word),
        replay,
        visit,
    };
    report.write_folder(path, &folder).map_err(|error| {
        CommandError::hinted(
            format!("--report {}: {error}", path.display()),
            "choose a folder that can be written",
        )
    })
}

/// Describes the machine and its software, one line each.
pub(super) async fn describe_system(
    target: &DiagnoseTarget,
    outcome: &ExperimentOutcome,
) -> Vec<(String, String)> {
    let mut all = vec![("llama-server says".to_owned(), server_version(&target.spec.command).await)];
    let props = outcome.legs.first().map(|leg| leg.props).unwrap_or_default();
    let known = [("slots", props.slots.map(u64::from)), ("context of a slot", props.n_ctx)];
    all.extend(known.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?.to_string()))));
    all.extend(describe_machine());
    all.retain(|(_, value)| !value.is_empty());
    all
}

/// Output of `llama-server --version` in one line.
async fn server_version(server: &ServerCommand) -> String {
    let mut words = server.program_words().into_iter();
    let mut command = tokio::process::Command::new(words.next().unwrap_or_default());
    command.args(words).arg("--version").stdin(Stdio::null()).kill_on_drop(true);
    let limit = warden_policies::defaults().child.version_timeout;
    let Ok(Ok(output)) = tokio::time::timeout(limit, command.output()).await else { return String::new() };
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    let tells = |line: &&str| line.starts_with("version:") || line.starts_with("built with");
    text.lines().map(str::trim).filter(tells).collect::<Vec<_>>().join(", ")
}

/// Kernel, driver and processor, as far as they are known.
pub(crate) fn describe_machine() -> Vec<(String, String)> {
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
