//! Facts about the machine in the report of `diagnose`, and the shareable folder. Checks its path before the
//! experiment starts.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;
use std::process::Stdio;

use warden_diagnose::proof::PublishedRequest;
use warden_diagnose::report::ReportFolder;
use warden_diagnose::{DiagnoseReport, ExperimentOutcome};
use warden_supervisor::{ServerCommand, ServerProps};

use super::DiagnoseArgs;
use super::target::DiagnoseTarget;
use crate::exit::CommandError;

pub(super) fn check_outputs(args: &DiagnoseArgs) -> Result<(), CommandError> {
    if let Some(path) = &args.report {
        if let Some(file) = warden_diagnose::report::foreign_file_in(path, true) {
            return Err(CommandError::usage(
                format!(
                    "--report {}: {} is there, and llama-warden did not write it",
                    path.display(),
                    file.display()
                ),
                "choose a folder of its own for the report",
            ));
        }
        // Make the folder private at first: a report contains server log lines and requests.
        let made = DirBuilder::new().recursive(true).mode(0o700).create(path);
        let tried = made.and_then(|()| tempfile::tempfile_in(path));
        tried.map_err(|error| {
            CommandError::usage(
                format!("--report {}: {error}", path.display()),
                "choose a folder that can be written",
            )
        })?;
    }
    Ok(())
}

/// Returns the first failure. Passes the lines of each later failure to `tell`.
pub(super) fn first_failure(
    all: impl IntoIterator<Item = Result<(), CommandError>>,
    mut tell: impl FnMut(&str),
) -> Result<(), CommandError> {
    let mut first = Ok(());
    for failure in all.into_iter().filter_map(Result::err) {
        if first.is_ok() {
            first = Err(failure);
        } else {
            failure.lines().iter().for_each(|line| tell(line));
        }
    }
    first
}

/// `here`: the directory in which the command runs. `visit`: requests that show a symptom which no workload
/// shows.
pub(super) fn write_report_folder(
    path: &Path,
    report: &DiagnoseReport,
    outcome: &ExperimentOutcome,
    target: &DiagnoseTarget,
    here: &Path,
    visit: &[PublishedRequest],
) -> Result<(), CommandError> {
    let command = &target.spec.command;
    let props = first_props(outcome);
    let folder = ReportFolder {
        numbers: &target.resolved.settings.diagnose,
        removed: &command.env_remove,
        directory: command.directory.as_deref().unwrap_or(here),
        slots: props.slots.unwrap_or(1),
        n_ctx: props.n_ctx,
        tokens_per_word: outcome.legs.first().map_or(0.0, |leg| leg.tokens_per_word),
        visit,
    };
    report.write_folder(path, &folder).map_err(|error| {
        CommandError::hinted(
            format!("--report {}: {error}", path.display()),
            "choose a folder that can be written",
        )
    })
}

pub(super) fn first_props(outcome: &ExperimentOutcome) -> ServerProps {
    outcome.legs.first().map(|leg| leg.props).unwrap_or_default()
}

pub(super) async fn describe_system(target: &DiagnoseTarget, props: ServerProps) -> Vec<(String, String)> {
    let mut all = vec![("llama-server says".to_owned(), server_version(&target.spec.command).await)];
    let known = [("slots", props.slots.map(u64::from)), ("context of a slot", props.n_ctx)];
    all.extend(known.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?.to_string()))));
    all.extend(describe_machine());
    all.retain(|(_, value)| !value.is_empty());
    all
}

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

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct OutputsTestCli {
        #[command(flatten)]
        args: DiagnoseArgs,
    }

    #[test]
    fn a_place_that_cannot_be_written_is_told_before_the_work() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, "mine").unwrap();
        let prepared = |path: &Path| {
            let words = ["diagnose", "--report", path.to_str().unwrap(), "--", "-m", "a"];
            check_outputs(&OutputsTestCli::parse_from(words).args)
        };
        for path in [file.join("in"), file.clone()] {
            let failure = prepared(&path).unwrap_err();
            assert!(failure.code() == 2 && failure.to_string().starts_with("--report"), "{failure}");
        }
        let new = folder.path().join("a/b");
        prepared(&new).unwrap();
        assert_eq!(std::fs::read_dir(&new).unwrap().count(), 0);
        for name in ["report.md", "findings.json", "requests/0.json"] {
            let own = folder.path().join("theirs");
            let theirs = own.join(name);
            std::fs::create_dir_all(theirs.parent().unwrap()).unwrap();
            std::fs::write(&theirs, "mine").unwrap();
            let failure = prepared(&own).unwrap_err();
            assert!(failure.to_string().contains(name), "{failure}");
            std::fs::remove_file(&theirs).unwrap();
        }
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "mine");
    }

    #[test]
    fn the_first_failure_is_the_result_and_the_others_are_told() {
        let mut told = Vec::new();
        let all =
            [Ok(()), Err(CommandError::usage("one", "x")), Ok(()), Err(CommandError::hinted("two", "y"))];
        let failure = first_failure(all, |line| told.push(line.to_owned())).unwrap_err();
        assert_eq!((failure.to_string().as_str(), failure.code()), ("one", 2));
        assert_eq!(told, ["error: two", "hint: y"]);
        assert!(first_failure([Ok(())], |_| ()).is_ok());
    }
}
