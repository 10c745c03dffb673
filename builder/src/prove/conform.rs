//! Compiles the conformance program of a patch set with a tree's own code, and runs its scenarios.
//!
//! Each scenario is a process in its own folder, with only those of our variables that it names. If the
//! compiler supports them, sanitizers check addresses and undefined behaviour.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::process::Command;
use tokio_util::sync::CancellationToken;
use warden_patches::prove::{ConformanceProgram, ProofStep, StepResult};
use warden_patches::set::conformance::{ConformanceScenario, ConformanceSpec, NOT_HERE_STATUS};

use crate::builder::Builder;
use crate::environment::{private_folder, remove_variables};
use crate::error::{BuilderError, Result, io_error};
use crate::process::{self, ChildExit};

/// Time limit of a scenario: the longest takes some seconds, and more under a sanitizer or on a busy machine.
const SCENARIO_TIMEOUT: Duration = Duration::from_secs(180);
const COMPILE_TIMEOUT: Duration = Duration::from_secs(300);
const MAX_SHOWN_LINES: usize = 6;

const COMPILER_FLAGS: [&str; 6] = ["-std=c++17", "-O1", "-g", "-pthread", "-Wall", "-Wno-unused-function"];
const SANITIZER_FLAGS: [&str; 2] = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"];

/// Compiles and runs all scenarios. Returns one result per step, and the tools used.
///
/// # Errors
/// Fails without a C++ compiler, if a file cannot be written, or on cancellation; failed steps are no errors.
pub async fn run_conformance(
    builder: &Builder,
    conformance: &ConformanceSpec,
    harness: &ConformanceProgram,
) -> Result<(Vec<ProofStep>, Vec<String>)> {
    let mut all = Vec::new();
    let what = |text: &str| format!("compiles with the tree's own code {text}");
    if !harness.missing.is_empty() {
        let text = format!("not in this tree: {}", harness.missing.join("; "));
        all.push(ProofStep::new(what(""), StepResult::Failed, text));
        return Ok((all, Vec::new()));
    }
    let compiler = find_compiler(builder)?;
    let folder = private_folder("llama-warden-prove-", std::env::temp_dir())?;
    for (name, content) in &harness.files {
        let path = folder.path().join(name);
        std::fs::write(&path, content).map_err(io_error("writing", path))?;
    }
    let watched = supports_sanitizers(&compiler, folder.path(), &builder.cancel).await?;
    let mut tools = vec![compiler_version(&compiler, &builder.cancel).await?];
    if watched {
        tools.push("address and undefined behaviour sanitizers".to_owned());
    }
    let mut programs = Vec::new();
    for (number, flags) in conformance.variants().iter().enumerate() {
        let name = if flags.is_empty() { "with no option".to_owned() } else { flags.join(" ") };
        let title = what(&format!("({name})"));
        let program = folder.path().join(format!("way-{number}"));
        let mut command = Command::new(&compiler);
        command.args(COMPILER_FLAGS).args(if watched { &SANITIZER_FLAGS[..] } else { &[] }).args(flags);
        command.arg(&harness.main).arg("-o").arg(&program).current_dir(folder.path());
        let (code, output) = run(command, COMPILE_TIMEOUT, &builder.cancel).await?;
        if code == Some(0) {
            programs.push((name, program));
            all.push(ProofStep::new(title, StepResult::Shown, ""));
        } else {
            all.push(ProofStep::new(title, StepResult::Failed, compiler_errors(&output)));
        }
    }
    if programs.is_empty() {
        return Ok((all, tools));
    }
    for scenario in &conformance.scenarios {
        builder.reporter.note(format!("plays {}: {}", scenario.id, scenario.text));
        all.push(run_scenario(scenario, &programs, folder.path(), &builder.cancel).await?);
    }
    Ok((all, tools))
}

/// Runs a scenario in each compiled variant until the first failure.
async fn run_scenario(
    scenario: &ConformanceScenario,
    programs: &[(String, PathBuf)],
    folder: &Path,
    cancel: &CancellationToken,
) -> Result<ProofStep> {
    let done = |how, text: String| ProofStep::new(format!("{}: {}", scenario.id, scenario.text), how, text);
    let (mut shown, mut not_here) = (0, String::new());
    for (name, program) in programs {
        let own = tempfile::Builder::new()
            .prefix("scenario-")
            .tempdir_in(folder)
            .map_err(io_error("creating a folder in", folder))?;
        let mut command = Command::new(program);
        remove_variables(&mut command, |name| name.starts_with("LLAMA_") || name.starts_with("GGML_"));
        let place = own.path().to_string_lossy();
        command
            .arg(&scenario.id)
            .envs(scenario.env.iter().map(|(name, value)| (name, value.replace("{folder}", &place))))
            // The set's code keeps some memory until exit on purpose; the program checks what must be freed.
            .env("ASAN_OPTIONS", "detect_leaks=0")
            .current_dir(own.path());
        let (code, output) = run(command, SCENARIO_TIMEOUT, cancel).await?;
        match code {
            Some(0) => shown += 1,
            Some(NOT_HERE_STATUS) => output.lines().last().unwrap_or_default().clone_into(&mut not_here),
            Some(code) => {
                let text = format!("{name}: it ended with {code}: {}", last_lines(&output));
                return Ok(done(StepResult::Failed, text));
            }
            None => return Ok(done(StepResult::Failed, format!("{name}: {}", last_lines(&output)))),
        }
    }
    Ok(match shown {
        0 => done(StepResult::NotHere, not_here),
        1 if programs.len() == 1 => done(StepResult::Shown, String::new()),
        shown => done(StepResult::Shown, format!("in {shown} of {} ways", programs.len())),
    })
}

fn find_compiler(builder: &Builder) -> Result<PathBuf> {
    let wish = builder.env.cxx.clone().unwrap_or_else(|| "c++".into());
    builder.env.find(&wish).ok_or_else(|| BuilderError::MissingProgram {
        program: format!("{} (a C++ compiler)", wish.to_string_lossy()),
        package: "g++",
    })
}

async fn compiler_version(compiler: &Path, cancel: &CancellationToken) -> Result<String> {
    let mut command = Command::new(compiler);
    command.arg("--version");
    let (_, output) = run(command, COMPILE_TIMEOUT, cancel).await?;
    Ok(output.lines().next().unwrap_or_default().to_owned())
}

/// Returns true if the compiler can build programs with sanitizers, and if they start here.
async fn supports_sanitizers(compiler: &Path, folder: &Path, cancel: &CancellationToken) -> Result<bool> {
    let (source, program) = (folder.join("empty.cpp"), folder.join("empty"));
    std::fs::write(&source, "int main() { return 0; }\n").map_err(io_error("writing", &source))?;
    let mut command = Command::new(compiler);
    command.args(SANITIZER_FLAGS).arg(&source).arg("-o").arg(&program).current_dir(folder);
    if run(command, COMPILE_TIMEOUT, cancel).await?.0 != Some(0) {
        return Ok(false);
    }
    Ok(run(Command::new(&program), SCENARIO_TIMEOUT, cancel).await?.0 == Some(0))
}

/// Runs a program within a time limit. The exit code is `None` after a signal or a timeout.
async fn run(command: Command, limit: Duration, cancel: &CancellationToken) -> Result<(Option<i32>, String)> {
    let shown = command.as_std().get_program().to_string_lossy().into_owned();
    let Ok(ended) = tokio::time::timeout(limit, process::output(command, cancel)).await else {
        return Ok((None, format!("it was not at its end after {} s", limit.as_secs())));
    };
    match ended.map_err(io_error("running", shown))? {
        (ChildExit::Cancelled, _) => Err(BuilderError::Cancelled),
        (ChildExit::Exited(status), output) => {
            let output = if status.code().is_none() { format!("{output}{status}") } else { output };
            Ok((status.code(), output))
        }
    }
}

/// A compiler's error lines, else its last lines.
fn compiler_errors(output: &str) -> String {
    let errors: Vec<&str> =
        output.lines().filter(|line| line.contains("error")).take(MAX_SHOWN_LINES).collect();
    if errors.is_empty() { last_lines(output) } else { errors.join("; ") }
}

fn last_lines(output: &str) -> String {
    let lines: Vec<&str> = output.lines().filter(|line| !line.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(MAX_SHOWN_LINES)..].join("; ")
}
