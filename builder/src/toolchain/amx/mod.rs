//! Detects compilers that drop the tile configuration of Intel's AMX.
//!
//! `_tile_loadconfig` reads 64 bytes. The optimiser of GCC before 13 assumes that only 8 are read, so it
//! drops the writes of the other 56. The processor rejects the uninitialised bytes, and a server with AMX
//! dies while it loads its first quantised model.
//!
//! The check works on any x86-64 machine: it compiles a small program to assembly, replaces its `ldtilecfg`
//! by code that copies the 64 bytes, and runs the program, which compares them.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;

use crate::builder::Builder;
use crate::error::{BuilderError, Result, io_error, program_error};
use crate::plan::CpuTarget;
use crate::process::{ChildExit, output};

use super::found::BuildCompilers;

const PROBE_SOURCE: &str = include_str!("probe.cpp");
/// Macro that ggml requires to compile its AMX kernels.
const AMX_MACRO: &str = "#define __AMX_INT8__ ";
/// Exit status of the probe if the system grants no tiles.
const NO_TILES_STATUS: i32 = 3;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TileCode {
    Kept,
    Dropped,
    Unknown(String),
}

/// Returns true if these compilers, with the user's flags, would compile ggml's AMX kernels.
pub(crate) async fn compiles_amx(
    builder: &Builder,
    compilers: &BuildCompilers,
    arch: CpuTarget,
    flags: &str,
) -> Result<bool> {
    if !compilers.target.starts_with("x86_64") {
        return Ok(false);
    }
    let mut arguments: Vec<&str> = match arch {
        CpuTarget::Native => vec!["-march=native"],
        CpuTarget::Portable => Vec::new(),
        // The flags of upstream's variant with AMX.
        CpuTarget::Any => vec!["-mamx-tile", "-mamx-int8"],
    };
    arguments.extend(flags.split_whitespace());
    arguments.extend(["-dM", "-E", "-x", "c++", "/dev/null"]);
    match builder.program_output(&compilers.cxx.path, &arguments, "asking for AMX").await {
        Ok(macros) => Ok(macros.lines().any(|line| line.starts_with(AMX_MACRO))),
        Err(BuilderError::Cancelled) => Err(BuilderError::Cancelled),
        // The compiler does not support the user's flags: cmake reports that.
        Err(_) => Ok(false),
    }
}

/// Tests if the compiler drops tile configurations, in a temporary folder below the cache.
pub(crate) async fn check_tile_code(builder: &Builder, cxx: &Path) -> Result<TileCode> {
    let folder = &builder.dirs.cache;
    std::fs::create_dir_all(folder).map_err(io_error("creating", folder))?;
    let work = tempfile::Builder::new()
        .prefix("amx-probe-")
        .tempdir_in(folder)
        .map_err(io_error("creating a folder in", folder))?;
    match run_check(builder, cxx, work.path()).await {
        Err(BuilderError::Program { why, .. }) => Ok(TileCode::Unknown(why)),
        other => other,
    }
}

async fn run_check(builder: &Builder, cxx: &Path, work: &Path) -> Result<TileCode> {
    let path = |name: &str| work.join(name).to_string_lossy().into_owned();
    let (source, code, reading) = (path("probe.cpp"), path("probe.s"), path("reading.s"));
    std::fs::write(&source, PROBE_SOURCE).map_err(io_error("writing", &source))?;
    // The flags of ggml's release build, and the headers of its AMX files.
    let compile = ["-O3", "-mamx-tile", "-S", &source, "-o", &code];
    builder.program_output(cxx, &compile, "compiling a probe for AMX").await?;
    let text = std::fs::read_to_string(&code).map_err(io_error("reading", &code))?;
    let Some(text) = replace_tile_loads(&text) else {
        return Ok(TileCode::Unknown("its code for AMX is in a form that is not known".to_owned()));
    };
    std::fs::write(&reading, text).map_err(io_error("writing", &reading))?;

    let (reads, loads) = (path("reads"), path("loads"));
    builder.program_output(cxx, &[&reading, "-o", &reads], "assembling a probe for AMX").await?;
    match run_probe(builder, &reads, &[]).await? {
        (Some(0), _) => {}
        (Some(1), _) => return Ok(TileCode::Dropped),
        (code, signal) => return Ok(unknown_end(code, signal)),
    }
    builder.program_output(cxx, &[&code, "-o", &loads], "assembling a probe for AMX").await?;
    match run_probe(builder, &loads, &["load"]).await? {
        (Some(0 | NO_TILES_STATUS), _) => Ok(TileCode::Kept),
        // All bytes were written, but the processor rejects them: the kernels would crash, too.
        (None, Some(_)) => Ok(TileCode::Dropped),
        (code, signal) => Ok(unknown_end(code, signal)),
    }
}

async fn run_probe(
    builder: &Builder,
    program: &str,
    arguments: &[&str],
) -> Result<(Option<i32>, Option<i32>)> {
    let mut command = builder.env.command(Path::new(program));
    command.args(arguments);
    match output(command, &builder.cancel).await {
        Ok((ChildExit::Exited(status), _)) => Ok((status.code(), status.signal())),
        Ok((ChildExit::Cancelled, _)) => Err(BuilderError::Cancelled),
        Err(error) => Err(program_error(program, "running a probe for AMX", error.to_string())),
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
