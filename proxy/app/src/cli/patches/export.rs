//! `patches export`: writes an ordinary series of patches for one revision.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::json;
use warden_patches::export::{PatchFile, export};
use warden_patches::{PatchSeries, PatchSet};

use super::source::{SourceArgs, run_blocking};
use super::{SetArgs, check_admitted};
use crate::cli::build::with_builder;
use crate::cli::{ConfigArgs, block_on};
use crate::config::machine::HostMachine;
use crate::config::resolve::proofs;
use crate::exit::CommandError;
use crate::out;

#[derive(Debug, Args)]
pub(crate) struct PatchExportArgs {
    /// Exports only this set, or one fix as SET/FIX, for instance to send it upstream.
    #[arg(value_name = "SET[/FIX]", conflicts_with_all = ["patch_set", "backend"])]
    patch: Option<String>,
    #[command(flatten)]
    source: SourceArgs,
    #[command(flatten)]
    sets: SetArgs,
    /// Exports sets also where nobody has reviewed them against this version of the code.
    #[arg(long)]
    allow_unverified: bool,
    /// Output folder, created if missing.
    #[arg(long, short, visible_alias = "out", value_name = "DIR")]
    output: PathBuf,
    /// Prints JSON, for programs.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    config: ConfigArgs,
}

pub(super) fn run(args: &PatchExportArgs) -> Result<(), CommandError> {
    block_on(export_series(args))?
}

async fn export_series(args: &PatchExportArgs) -> Result<(), CommandError> {
    let machine = HostMachine::read();
    let loaded = args.config.load(&machine, Vec::new())?;
    let mut sets = args.sets.load(&loaded, &machine)?;
    let mut only = None;
    if let Some(patch) = &args.patch {
        let (set, fix) = find_set(sets, patch)?;
        (sets, only) = (vec![set], fix);
    }
    let numbers = &loaded.settings.build;
    let proofs = proofs::load_proofs(&loaded, &machine)?;
    let (series, files, label, shown) = with_builder(&loaded, &machine, async |builder| {
        let found = args.source.open(&builder, numbers).await?;
        run_blocking(move || {
            let sets: Vec<&PatchSet> = sets.iter().collect();
            let series = PatchSeries::judge(&sets, found.tree.as_ref())?.accept(&sets, &proofs);
            let files = export(&series, &sets, found.tree.as_ref(), only.as_deref())?;
            Ok((series, files, found.label, found.shown))
        })
        .await
    })
    .await?;
    check_admitted(&series, args.allow_unverified, "exported")?;
    let paths = write_patches(&args.output, &files)?;
    if args.json {
        let list = files.iter().zip(&paths).map(|(file, path)| {
            let page = args.output.join(&file.page_name);
            json!({ "set": file.set, "path": path, "rationale": page, "crlf": file.crlf })
        });
        return out::print_json(&json!({
            "revision": label,
            "source": shown,
            "patch_set": series.id(),
            "patches": list.collect::<Vec<_>>(),
        }));
    }
    for (file, path) in files.iter().zip(&paths) {
        out::print_line(&path.to_string_lossy())?;
        out::print_line(&args.output.join(&file.page_name).to_string_lossy())?;
    }
    if files.is_empty() {
        return out::print_line(&format!("no set changes anything in {label}"));
    }
    if files.iter().any(|file| file.crlf) {
        out::error_line("note: files with CRLF line ends are changed; git am needs --keep-cr for them");
    }
    Ok(())
}

/// Finds the selected set, and its selected fix if there is one.
fn find_set(sets: Vec<PatchSet>, patch: &str) -> Result<(PatchSet, Option<String>), CommandError> {
    let (id, fix) = match patch.split_once('/') {
        Some((set, fix)) => (Some(set), Some(fix)),
        None if sets.iter().any(|set| set.id == patch) => (Some(patch), None),
        None => (None, Some(patch)),
    };
    let fits =
        |set: &PatchSet| id.is_none_or(|id| set.id == id) && fix.is_none_or(|fix| set.fix(fix).is_some());
    let found = sets.into_iter().find(fits).ok_or_else(|| {
        CommandError::usage(
            format!("there is no patch set and no fix `{patch}`"),
            "`llama-warden patches list` shows what there is; sets of your own come with --patches DIR",
        )
    })?;
    Ok((found, fix.map(str::to_owned)))
}

/// Writes all files, each patch with its page. Writes nothing if an existing file has other content.
fn write_patches(folder: &Path, files: &[PatchFile]) -> Result<Vec<PathBuf>, CommandError> {
    let trouble = |path: &Path, error: &dyn std::fmt::Display| {
        CommandError::hinted(
            format!("cannot write {}: {error}", path.display()),
            "choose another folder with -o",
        )
    };
    std::fs::create_dir_all(folder).map_err(|error| trouble(folder, &error))?;
    let paths: Vec<PathBuf> = files.iter().map(|file| folder.join(&file.name)).collect();
    let patches = files.iter().map(|file| (folder.join(&file.name), file.content.as_slice()));
    let pages = files.iter().map(|file| (folder.join(&file.page_name), file.page.as_bytes()));
    let all: Vec<(PathBuf, &[u8])> = patches.chain(pages).collect();
    for (path, wanted) in &all {
        match std::fs::read(path) {
            Ok(content) if content != *wanted => {
                return Err(trouble(path, &"a file with other content is there"));
            }
            _ => {}
        }
    }
    for (path, content) in &all {
        let mut new = tempfile::NamedTempFile::new_in(folder).map_err(|error| trouble(path, &error))?;
        let written = new.write_all(content).and_then(|()| new.as_file().sync_all());
        written.map_err(|error| trouble(path, &error))?;
        make_readable(&new).map_err(|error| trouble(path, &error))?;
        new.persist(path).map_err(|error| trouble(path, &error.error))?;
    }
    Ok(paths)
}

/// Makes a temporary file readable for all, because a patch is shared.
fn make_readable(file: &tempfile::NamedTempFile) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    file.as_file().set_permissions(std::fs::Permissions::from_mode(0o644))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_there_with_other_content_is_not_overwritten() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, content: &str| PatchFile {
            name: name.into(),
            set: "s".into(),
            page_name: name.replace(".patch", ".md"),
            page: "page".into(),
            content: content.into(),
            crlf: false,
        };
        let (first, second) = (file("0001-a.patch", "a"), file("0002-b.patch", "b"));
        write_patches(folder.path(), std::slice::from_ref(&first)).unwrap();
        write_patches(folder.path(), &[first.clone(), second.clone()]).unwrap();
        std::fs::write(folder.path().join("0002-b.patch"), "mine").unwrap();
        std::fs::remove_file(folder.path().join("0001-a.patch")).unwrap();
        std::fs::remove_file(folder.path().join("0001-a.md")).unwrap();
        std::fs::remove_file(folder.path().join("0002-b.md")).unwrap();
        let failure = write_patches(folder.path(), &[first, second]).unwrap_err();
        assert!(failure.to_string().contains("0002-b.patch"), "{failure}");
        assert!(!folder.path().join("0001-a.patch").exists());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
