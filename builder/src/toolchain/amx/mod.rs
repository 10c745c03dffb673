//! Detects compilers that drop the tile configuration of Intel's AMX.
//!
//! `_tile_loadconfig` reads 64 bytes. The optimiser of GCC before 13 assumes that only 8 are read, so the other 56
//! are not written. The processor rejects the random bytes, and a server with AMX dies while it loads its
//! first quantised model.
//!
//! The check works on any x86-64 machine: it compiles a small program to assembly, replaces its `ldtilecfg`
//! by code that copies the 64 bytes, and runs the program, which compares them. On a processor with AMX,
//! the unmodified program runs, too.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;

use tokio_util::sync::CancellationToken;

use crate::environment::BuildEnvironment;
use crate::error::{BuilderError, Result, io_error};
use crate::plan::target::CpuTarget;
use crate::process::{ChildExit, output};

use super::asking::program_output;
use super::found::BuildCompilers;

/// Source of the test program.
const PROBE_SOURCE: &str = include_str!("probe.cpp");
/// Macro that ggml requires to compile its AMX kernels.
const AMX_MACRO: &str = "#define __AMX_INT8__ ";
/// Exit status of the probe if the system grants no tiles.
const NO_TILES_STATUS: i32 = 3;

/// Result of the check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TileCode {
    /// The compiler writes the whole configuration.
    Kept,
    /// The compiler drops a part of the configuration.
    Dropped,
    /// The check failed, with the reason.
    Unknown(String),
}

/// Returns true if these compilers would compile ggml's AMX kernels: for this machine's processor, or
/// because of the user's flags.
pub(crate) async fn compiles_amx(
    env: &BuildEnvironment,
    compilers: &BuildCompilers,
    arch: CpuTarget,
    flags: &str,
    cancel: &CancellationToken,
) -> Result<bool> {
    if !compilers.target.starts_with("x86_64") {
        return Ok(false);
    }
    let native = if arch == CpuTarget::Native { "-march=native" } else { "" };
    let mut arguments: Vec<&str> = [native].into_iter().filter(|flag| !flag.is_empty()).collect();
    arguments.extend(flags.split_whitespace());
    arguments.extend(["-dM", "-E", "-x", "c++", "/dev/null"]);
    match program_output(env, &compilers.cxx.path, &arguments, "asking for AMX", cancel).await {
        Ok(macros) => Ok(macros.lines().any(|line| line.starts_with(AMX_MACRO))),
        Err(BuilderError::Cancelled) => Err(BuilderError::Cancelled),
        // The compiler does not support the user's flags: cmake reports that.
        Err(_) => Ok(false),
    }
}

/// Runs the check. `folder` receives a temporary folder.
pub(crate) async fn check_tile_code(
    env: &BuildEnvironment,
    cxx: &Path,
    folder: &Path,
    cancel: &CancellationToken,
) -> Result<TileCode> {
    std::fs::create_dir_all(folder).map_err(io_error("creating", folder))?;
    let work = tempfile::Builder::new()
        .prefix("amx-probe-")
        .tempdir_in(folder)
        .map_err(io_error("creating a folder in", folder))?;
    match run_check(env, cxx, work.path(), cancel).await {
        Err(BuilderError::Program { why, .. }) => Ok(TileCode::Unknown(why)),
        other => other,
    }
}

async fn run_check(
    env: &BuildEnvironment,
    cxx: &Path,
    work: &Path,
    cancel: &CancellationToken,
) -> Result<TileCode> {
    let path = |name: &str| work.join(name).to_string_lossy().into_owned();
    let (source, code, reading) = (path("probe.cpp"), path("probe.s"), path("reading.s"));
    std::fs::write(&source, PROBE_SOURCE).map_err(io_error("writing", &source))?;
    // The flags of ggml's release build, and the headers of its AMX files.
    let compile = ["-O3", "-mamx-tile", "-S", &source, "-o", &code];
    program_output(env, cxx, &compile, "compiling a probe for AMX", cancel).await?;
    let text = std::fs::read_to_string(&code).map_err(io_error("reading", &code))?;
    let Some(text) = replace_tile_loads(&text) else {
        return Ok(TileCode::Unknown("its code for AMX is in a form that is not known".to_owned()));
    };
    std::fs::write(&reading, text).map_err(io_error("writing", &reading))?;

    let (reads, loads) = (path("reads"), path("loads"));
    program_output(env, cxx, &[&reading, "-o", &reads], "assembling a probe for AMX", cancel).await?;
    match run_probe(env, &reads, &[], cancel).await? {
        (Some(0), _) => {}
        (Some(1), _) => return Ok(TileCode::Dropped),
        (code, signal) => return Ok(unknown_end(code, signal)),
    }
    program_output(env, cxx, &[&code, "-o", &loads], "assembling a probe for AMX", cancel).await?;
    match run_probe(env, &loads, &["load"], cancel).await? {
        (Some(0 | NO_TILES_STATUS), _) => Ok(TileCode::Kept),
        // The processor rejects the configuration for another reason.
        (None, Some(_)) => Ok(TileCode::Dropped),
        (code, signal) => Ok(unknown_end(code, signal)),
    }
}

/// Runs a probe; returns its exit status, or the signal that ended it.
async fn run_probe(
    env: &BuildEnvironment,
    program: &str,
    arguments: &[&str],
    cancel: &CancellationToken,
) -> Result<(Option<i32>, Option<i32>)> {
    let mut command = env.command(Path::new(program));
    command.args(arguments);
    match output(command, cancel).await {
        Ok((ChildExit::Exited(status), _)) => Ok((status.code(), status.signal())),
        Ok((ChildExit::Cancelled, _)) => Err(BuilderError::Cancelled),
        Err(error) => {
            let doing = "running a probe for AMX".to_owned();
            Err(BuilderError::Program { command: program.to_owned(), doing, why: error.to_string() })
        }
    }
}

fn unknown_end(code: Option<i32>, signal: Option<i32>) -> TileCode {
    TileCode::Unknown(format!("the probe ended with status {code:?}, signal {signal:?}"))
}

/// Replaces each `ldtilecfg` by code that copies the 64 bytes to `seen`, preserves all registers and does
/// not touch the stack. `None` if the code has no `ldtilecfg`.
fn replace_tile_loads(code: &str) -> Option<String> {
    let mut out = String::with_capacity(2 * code.len());
    let mut found = false;
    for line in code.lines() {
        let place = line.trim_start().strip_prefix("ldtilecfg").filter(|rest| rest.starts_with([' ', '\t']));
        let Some(place) = place else {
            out.push_str(line);
            out.push('\n');
            continue;
        };
        found = true;
        let copies: Vec<String> = (0..64)
            .step_by(8)
            .map(|at| format!("\tmovq {at}(%rax), %rcx\n\tmovq %rcx, seen+{at}(%rip)\n"))
            .collect();
        out.extend([
            "\tmovq %rax, kept_rax(%rip)\n\tmovq %rcx, kept_rcx(%rip)\n\tleaq ",
            place.trim(),
            ", %rax\n",
            &copies.concat(),
            "\tmovq kept_rax(%rip), %rax\n\tmovq kept_rcx(%rip), %rcx\n",
        ]);
    }
    found.then_some(out)
}

#[cfg(test)]
mod tests;
