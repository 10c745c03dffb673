//! docs/dependencies.md gives the user and purpose of every foreign crate in a release.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;

use cargo_metadata::{DependencyKind, Metadata, MetadataCommand, Package, TargetKind};
use warden_rig::{Context as _, Outcome, Trouble};

use crate::layout::{root, rust_files};

/// Excludes crates that only other systems need.
const SYSTEM: [&str; 4] = ["--filter-platform", "x86_64-unknown-linux-gnu", "--locked", "--offline"];

fn metadata() -> Result<Metadata, Trouble> {
    let mut command = MetadataCommand::new();
    command.manifest_path(root().join("Cargo.toml")).other_options(SYSTEM.map(str::to_owned).to_vec());
    Ok(command.exec()?)
}

/// Our crates that use a foreign crate, by its name.
fn users(metadata: &Metadata) -> BTreeMap<String, BTreeSet<String>> {
    let mut users = BTreeMap::<String, BTreeSet<String>>::new();
    for package in metadata.workspace_packages().into_iter().filter(|one| *one.name != "warden-tests") {
        let shipped = |kind| matches!(kind, DependencyKind::Normal | DependencyKind::Build);
        for used in package.dependencies.iter().filter(|one| one.path.is_none() && shipped(one.kind)) {
            let short = package.name.strip_prefix("warden-").unwrap_or(&package.name);
            users.entry(used.name.clone()).or_default().insert(short.to_owned());
        }
    }
    users
}

fn is_unsafe(package: &Package) -> Result<bool, Trouble> {
    let folder = Path::new(&package.manifest_path).parent().context("a manifest lies in a folder")?;
    for file in rust_files(&folder.join("src"))? {
        let text = std::fs::read(&file)?;
        let text = String::from_utf8_lossy(&text);
        let code = text.lines().map(|line| line.split("//").next().unwrap_or_default());
        let has = |line: &str| {
            line.contains("unsafe {") || line.contains("unsafe fn") || line.contains("unsafe impl")
        };
        if code.into_iter().any(has) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Names the parts of a crate that run while the program is compiled.
fn builds(package: &Package) -> &'static str {
    let is = |kind: &TargetKind| package.targets.iter().any(|target| target.kind.contains(kind));
    if is(&TargetKind::ProcMacro) {
        "macro"
    } else if is(&TargetKind::CustomBuild) {
        "script"
    } else {
        ""
    }
}

#[test]
fn each_crate_of_others_has_its_line_and_its_reason() -> Outcome {
    let file = root().join("docs/dependencies.md");
    let page = std::fs::read_to_string(&file)?;
    let (before, table) = page.split_once("|---|---|---|---|---|\n").context("there is no table")?;
    let reasons: BTreeMap<&str, &str> = table
        .lines()
        .filter_map(|line| {
            let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
            Some((*cells.first()?, *cells.last()?))
        })
        .collect();
    let metadata = metadata()?;
    let mut renewed = format!("{before}|---|---|---|---|---|\n");
    for (name, users) in users(&metadata) {
        // Of two versions, we depend on the later one.
        let package =
            metadata.packages.iter().filter(|one| *one.name == name).max_by(|a, b| a.version.cmp(&b.version));
        let package = package.context(&name)?;
        let (by, reason) = (users.into_iter().collect::<Vec<_>>().join(", "), reasons.get(&*name).copied());
        let reason = reason.unwrap_or("?");
        assert!(
            reason.len() > 3 || std::env::var_os("WARDEN_RENEW_DOCS").is_some(),
            "{name}: for what? say it in docs/dependencies.md"
        );
        let has_unsafe = if is_unsafe(package)? { "yes" } else { "" };
        writeln!(renewed, "| {name} | {by} | {has_unsafe} | {} | {reason} |", builds(package))?;
    }
    if std::env::var_os("WARDEN_RENEW_DOCS").is_some() {
        std::fs::write(&file, renewed)?;
    } else {
        assert!(
            page == renewed,
            "docs/dependencies.md is not what `cargo metadata` says: WARDEN_RENEW_DOCS=1 renews it"
        );
    }
    Ok(())
}
