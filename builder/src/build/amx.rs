//! Disables the kernels for Intel's AMX where they are known to crash: if the compiler drops a part of the
//! tile configuration, or if an earlier build crashed with these kernels on this machine.

use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::builder::{BuildRequest, Builder};
use crate::error::{Result, io_error};
use crate::plan::{AmxKernels, is_on, option_value};
use crate::toolchain::BuildCompilers;
use crate::toolchain::amx::{TileCode, check_tile_code, compiles_amx};
use warden_patches::whole::{self, LossTolerance};

const AMX_CMAKE_OPTIONS: [&str; 2] = ["GGML_AMX_TILE", "GGML_AMX_INT8"];

/// Decides if a build of this source has the AMX kernels; `None` if it would not compile them anyway.
pub(super) async fn decide_amx_kernels(
    builder: &Builder,
    request: &BuildRequest,
    compilers: &BuildCompilers,
    source: &str,
) -> Result<Option<AmxKernels>> {
    let options = &request.options;
    let asked = AMX_CMAKE_OPTIONS.map(|name| option_value(options, name).map(is_on));
    let mut flags = option_value(options, "CMAKE_CXX_FLAGS").unwrap_or_default().to_owned();
    if asked.contains(&Some(true)) {
        flags.push_str(" -mamx-tile -mamx-int8");
    }
    if !compiles_amx(builder, compilers, request.arch.cpu, &flags).await? {
        return Ok(None);
    }
    let left_out = |why: String| Ok(Some(AmxKernels::LeftOut(why)));
    if asked.contains(&Some(false)) {
        return left_out("an option of yours says so".to_owned());
    }
    if let Some(why) = read_crash_note(&note_path(&builder.dirs.cache, compilers, source)) {
        return left_out(why);
    }
    let cxx = &compilers.cxx;
    match tile_code(builder, compilers).await? {
        TileCode::Kept => {}
        TileCode::Dropped => {
            return left_out(format!(
                "{} drops a part of the tile configuration, so that quantised weights would crash; GCC from 13 on \
                 and clang keep it (CC and CXX)",
                cxx.version
            ));
        }
        TileCode::Unknown(why) => builder
            .reporter
            .note(format!("whether {} keeps the tile configuration of AMX is not known: {why}", cxx.version)),
    }
    Ok(Some(AmxKernels::Compiled))
}

/// Checks the compiler's code for tiles, or reads the result of an earlier check: `diagnose --between` plans a
/// build for each commit, and each check compiles for some seconds.
async fn tile_code(builder: &Builder, compilers: &BuildCompilers) -> Result<TileCode> {
    let cxx = &compilers.cxx;
    let file = note_path(&builder.dirs.cache, compilers, &format!("tiles\0{}", cxx.path.display()));
    match std::fs::read_to_string(&file).as_deref() {
        Ok(KEPT) => return Ok(TileCode::Kept),
        Ok(DROPPED) => return Ok(TileCode::Dropped),
        _ => {}
    }
    let code = check_tile_code(builder, &cxx.path).await?;
    let note = match &code {
        TileCode::Kept => KEPT,
        TileCode::Dropped => DROPPED,
        TileCode::Unknown(_) => return Ok(code),
    };
    write_note(&file, note)?;
    Ok(code)
}

/// Notes of checks that had a result.
const KEPT: &str = "kept";
const DROPPED: &str = "dropped";

/// Records that a build with the AMX kernels crashes, so that the next plan disables them at once.
pub(super) fn remember_crash(
    cache: &Path,
    compilers: &BuildCompilers,
    source: &str,
    why: &str,
) -> Result<()> {
    write_note(&note_path(cache, compilers, source), why)
}

fn write_note(file: &Path, note: &str) -> Result<()> {
    whole::write_atomically(file, note.as_bytes(), LossTolerance::Replaceable)
        .map_err(io_error("writing", file))
}

fn read_crash_note(file: &Path) -> Option<String> {
    std::fs::read_to_string(file).ok().filter(|why| !why.is_empty())
}

/// Path of a note on a source or a check, with these compilers and this CPU.
fn note_path(cache: &Path, compilers: &BuildCompilers, subject: &str) -> PathBuf {
    let shaped = format!("{subject}\0{}\0{}\0{}", compilers.cxx.version, compilers.c.version, compilers.cpu);
    cache.join("amx").join(hex::encode(&Sha256::digest(shaped)[..8]))
}
