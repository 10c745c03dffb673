//! Compiles the program of a set's conformance with a tree's own code, and plays its scenarios.
//!
//! Each scenario is a process of its own in a folder of its own, with none of our variables but those that it names. Where the
//! compiler has them, sanitizers watch addresses and undefined behaviour.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tempfile::TempDir;
use tokio::process::Command;
use tokio_util::sync::CancellationToken;
use warden_patches::prove::{Done, Harness, How};
use warden_patches::set::conformance::{Conformance, NOT_HERE, Scenario};

use crate::build::Builder;
use crate::environment::without;
use crate::error::{Error, Result, io_error};
use crate::event::Event;
use crate::process::{self, Ended};

/// How long one scenario may take: the longest waits for some seconds, under a sanitizer and on a busy machine for some more.
const SCENARIO: Duration = Duration::from_secs(180);
/// How long the compiler may take for one program.
const COMPILE: Duration = Duration::from_secs(300);
/// Lines of a compiler, or of a program that failed, that are shown.
const LINES: usize = 6;

/// Flags that are always given.
const FLAGS: [&str; 6] = ["-std=c++17", "-O1", "-g", "-pthread", "-Wall", "-Wno-unused-function"];
/// What watches addresses and undefined behaviour.
const WATCH: [&str; 2] = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"];

/// Compiles and plays. Returns what was shown, and the tools that were used.
///
/// # Errors
///
/// There is no C++ compiler, a file cannot be written, or it was cancelled. What does not compile, or does not behave, is no error:
/// its step is listed as failed.
pub async fn conform(
    builder: &Builder,
    conformance: &Conformance,
    harness: &Harness,
) -> Result<(Vec<Done>, Vec<String>)> {
    let mut all = Vec::new();
    let what = |text: &str| format!("compiles with the tree's own code {text}");
    if !harness.missing.is_empty() {
        let text = format!("not in this tree: {}", harness.missing.join("; "));
        all.push(Done { what: what(""), how: How::Failed, text });
        return Ok((all, Vec::new()));
    }
    let compiler = compiler(builder)?;
    let folder = folder()?;
    for (name, content) in &harness.files {
        let path = folder.path().join(name);
        std::fs::write(&path, content).map_err(io_error("writing", path))?;
    }
    let watched = watches(&compiler, folder.path(), &builder.cancel).await?;
    let mut tools = vec![version(&compiler, &builder.cancel).await?];
    if watched {
        tools.push("address and undefined behaviour sanitizers".to_owned());
    }
    let mut programs = Vec::new();
    for (number, flags) in conformance.ways().iter().enumerate() {
        let name = if flags.is_empty() { "with no option".to_owned() } else { flags.join(" ") };
        let program = folder.path().join(format!("way-{number}"));
        let mut command = Command::new(&compiler);
        command.args(FLAGS).args(if watched { &WATCH[..] } else { &[] }).args(flags);
        command.arg(&harness.main).arg("-o").arg(&program).current_dir(folder.path());
        let (code, output) = run(command, COMPILE, &builder.cancel).await?;
        if code == Some(0) {
            programs.push((name.clone(), program));
            all.push(Done { what: what(&format!("({name})")), how: How::Shown, text: String::new() });
        } else {
            let text = errors_of(&output);
            all.push(Done { what: what(&format!("({name})")), how: How::Failed, text });
        }
    }
    if programs.is_empty() {
        return Ok((all, tools));
    }
    for scenario in &conformance.scenarios {
        builder.reporter.tell(Event::Note(format!("plays {}: {}", scenario.id, scenario.text)));
        all.push(played(scenario, &programs, folder.path(), &builder.cancel).await?);
    }
    Ok((all, tools))
}

/// Plays one scenario in each way in which the tree was compiled. The first that fails counts.
async fn played(
    scenario: &Scenario,
    programs: &[(String, PathBuf)],
    folder: &Path,
    cancel: &CancellationToken,
) -> Result<Done> {
    let done = |how, text| Done { what: format!("{}: {}", scenario.id, scenario.text), how, text };
    let (mut shown, mut not_here) = (0, String::new());
    for (name, program) in programs {
        let own = tempfile::Builder::new()
            .prefix("scenario-")
            .tempdir_in(folder)
            .map_err(io_error("creating a folder in", folder))?;
        let mut command = Command::new(program);
        without(&mut command, |name| name.starts_with("LLAMA_") || name.starts_with("GGML_"));
        let place = own.path().to_string_lossy();
        command
            .arg(&scenario.id)
            .envs(scenario.env.iter().map(|(name, value)| (name, value.replace("{folder}", &place))))
            // What is kept for good on purpose is no leak; what has to go is counted by the program itself.
            .env("ASAN_OPTIONS", "detect_leaks=0")
            .current_dir(own.path());
        let (code, output) = run(command, SCENARIO, cancel).await?;
        match code {
            Some(0) => shown += 1,
            Some(NOT_HERE) => output.lines().last().unwrap_or_default().clone_into(&mut not_here),
            Some(code) => {
                return Ok(done(How::Failed, format!("{name}: it ended with {code}: {}", end_of(&output))));
            }
            None => return Ok(done(How::Failed, format!("{name}: {}", end_of(&output)))),
        }
    }
    Ok(match shown {
        0 => done(How::NotHere, not_here),
        1 if programs.len() == 1 => done(How::Shown, String::new()),
        shown => done(How::Shown, format!("in {shown} of {} ways", programs.len())),
    })
}

/// The C++ compiler that builds take, too.
fn compiler(builder: &Builder) -> Result<PathBuf> {
    let wish = builder.env.cxx.clone().unwrap_or_else(|| "c++".into());
    builder.env.find(&wish).ok_or_else(|| Error::MissingProgram {
        program: format!("{} (a C++ compiler)", wish.to_string_lossy()),
        package: "g++",
    })
}

fn folder() -> Result<TempDir> {
    let base = std::env::temp_dir();
    let private = std::os::unix::fs::PermissionsExt::from_mode(0o700);
    let made = tempfile::Builder::new().prefix("llama-warden-prove-").permissions(private).tempdir_in(&base);
    made.map_err(io_error("creating a folder in", base))
}

/// The first line of what it says of itself.
async fn version(compiler: &Path, cancel: &CancellationToken) -> Result<String> {
    let mut command = Command::new(compiler);
    command.arg("--version");
    let (_, output) = run(command, COMPILE, cancel).await?;
    Ok(output.lines().next().unwrap_or_default().to_owned())
}

/// Whether programs with sanitizers can be made here, and started.
async fn watches(compiler: &Path, folder: &Path, cancel: &CancellationToken) -> Result<bool> {
    let (source, program) = (folder.join("empty.cpp"), folder.join("empty"));
    std::fs::write(&source, "int main() { return 0; }\n").map_err(io_error("writing", &source))?;
    let mut command = Command::new(compiler);
    command.args(WATCH).arg(&source).arg("-o").arg(&program).current_dir(folder);
    if run(command, COMPILE, cancel).await?.0 != Some(0) {
        return Ok(false);
    }
    Ok(run(Command::new(&program), SCENARIO, cancel).await?.0 == Some(0))
}

/// Runs a program to its end, or to that of its time. The code is none where a signal or the time ended it.
async fn run(command: Command, limit: Duration, cancel: &CancellationToken) -> Result<(Option<i32>, String)> {
    let shown = command.as_std().get_program().to_string_lossy().into_owned();
    let Ok(ended) = tokio::time::timeout(limit, process::output(command, cancel)).await else {
        return Ok((None, format!("it was not at its end after {} s", limit.as_secs())));
    };
    match ended.map_err(io_error("running", shown))? {
        (Ended::Cancelled, _) => Err(Error::Cancelled),
        (Ended::Exited(status), output) => {
            let output = if status.code().is_none() { format!("{output}{status}") } else { output };
            Ok((status.code(), output))
        }
    }
}

/// What a compiler says is wrong: its errors, else its last lines.
fn errors_of(output: &str) -> String {
    let errors: Vec<&str> = output.lines().filter(|line| line.contains("error")).take(LINES).collect();
    if errors.is_empty() { end_of(output) } else { errors.join("; ") }
}

fn end_of(output: &str) -> String {
    let lines: Vec<&str> = output.lines().filter(|line| !line.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(LINES)..].join("; ")
}
