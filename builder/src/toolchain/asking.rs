//! Runs small programs for their output.

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;

use tokio_util::sync::CancellationToken;

use super::found::BuildTool;
use crate::environment::BuildEnvironment;
use crate::error::{BuilderError, Result};
use crate::process::{ChildExit, output};

/// A program with the first line of its `--version`.
pub(super) async fn tool_with_version(
    env: &BuildEnvironment,
    path: PathBuf,
    cancel: &CancellationToken,
) -> Result<BuildTool> {
    let text = program_output(env, &path, &["--version"], "asking for its version", cancel).await?;
    let version = text.lines().next().unwrap_or_default().trim().to_owned();
    Ok(BuildTool { path, version })
}

/// Output of a program; an error if it fails.
pub(super) async fn program_output(
    env: &BuildEnvironment,
    program: &Path,
    arguments: &[&str],
    doing: &str,
    cancel: &CancellationToken,
) -> Result<String> {
    let mut command = env.command(program);
    command.args(arguments);
    finish_program(program, doing, output(command, cancel).await)
}

/// Converts the result of running a small program into its output or an error.
pub(crate) fn finish_program(
    program: &Path,
    doing: &str,
    end: io::Result<(ChildExit, String)>,
) -> Result<String> {
    let failed = |why: String| {
        let command = program.display().to_string();
        Err(BuilderError::Program { command, doing: doing.to_owned(), why })
    };
    match end {
        Ok((ChildExit::Exited(status), text)) if status.success() => Ok(text),
        Ok((ChildExit::Exited(status), text)) => failed(last_words(status, &text)),
        Ok((ChildExit::Cancelled, _)) => Err(BuilderError::Cancelled),
        Err(error) => failed(error.to_string()),
    }
}

/// Last lines of a failed program's output.
fn last_words(status: ExitStatus, text: &str) -> String {
    const LINES: usize = 8;
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    let tail = &lines[lines.len().saturating_sub(LINES)..];
    if tail.is_empty() { status.to_string() } else { format!("{status}\n{}", tail.join("\n")) }
}
