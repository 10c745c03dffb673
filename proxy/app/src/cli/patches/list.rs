//! `patches list`: lists the patch sets and their fixes.

use clap::Args;
use serde_json::{Value, json};
use warden_patches::set::{AffectedBuilds, UpstreamStatus};
use warden_patches::{PatchSet, SetCatalogue, SetFix};

use super::CatalogueArgs;
use crate::cli::ConfigArgs;
use crate::config::machine::HostMachine;
use crate::exit::CommandError;
use crate::out;

#[derive(Debug, Args)]
pub(crate) struct PatchListArgs {
    #[command(flatten)]
    catalogue: CatalogueArgs,
    /// Prints JSON, for programs.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    config: ConfigArgs,
}

pub(super) fn run(args: &PatchListArgs) -> Result<(), CommandError> {
    let machine = HostMachine::read();
    let loaded = args.config.load(&machine, Vec::new())?;
    let catalogue = args.catalogue.load(&loaded, &machine)?;
    if args.json {
        return out::print_json(&catalogue.sets().iter().map(set_json).collect::<Vec<_>>());
    }
    if catalogue.sets().is_empty() {
        return out::print_line("no patch sets");
    }
    out::print_text(&out::format_table(&rows(&catalogue)))
}

fn rows(catalogue: &SetCatalogue) -> Vec<Vec<String>> {
    let mut rows = vec![["PATCH", "AFFECTS", "UPSTREAM", "TITLE"].map(str::to_owned).to_vec()];
    for set in catalogue.sets() {
        let backends =
            if set.backends.is_empty() { "every backend".to_owned() } else { set.backends.join(", ") };
        rows.push(vec![set.id.clone(), backends, String::new(), set.title.clone()]);
        for fix in &set.fixes {
            rows.push(vec![
                format!("{}/{}", set.id, fix.id),
                affected_text(&fix.affects),
                upstream_text(fix),
                fix.title.clone(),
            ]);
        }
    }
    rows
}

/// Summarises the versions and backends that have the defect.
pub(super) fn affected_text(affects: &AffectedBuilds) -> String {
    let builds = match (affects.first.as_str(), affects.last.as_str()) {
        ("", "") => String::new(),
        (first, last) => format!("{first}..{last}"),
    };
    let parts = [affects.backends.join(", "), builds];
    let told: Vec<&str> = parts.iter().map(String::as_str).filter(|part| !part.is_empty()).collect();
    if told.is_empty() { "all".to_owned() } else { told.join(" ") }
}

/// Summarises upstream's state of the fix.
pub(super) fn upstream_text(fix: &SetFix) -> String {
    match (fix.upstream.status, fix.upstream.since.as_str()) {
        (UpstreamStatus::Open, _) => "open".to_owned(),
        (UpstreamStatus::Superseded, "") => "superseded".to_owned(),
        (UpstreamStatus::Superseded, since) => format!("superseded since {since}"),
    }
}

fn set_json(set: &PatchSet) -> Value {
    let fixes = set.fixes.iter().map(|fix| {
        json!({
            "id": fix.id,
            "title": fix.title,
            "affects": fix.affects,
            "upstream": fix.upstream,
        })
    });
    json!({
        "id": set.id,
        "title": set.title,
        "backends": set.backends,
        "first": set.first,
        "origin": set.origin.to_string(),
        "fixes": fixes.collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_set_is_listed_with_its_fixes() {
        insta::assert_snapshot!(out::format_table(&rows(&SetCatalogue::embedded().unwrap())));
    }
}
