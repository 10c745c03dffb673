//! Instructions of a small request in user space, counted by valgrind's callgrind. A busy machine does not change
//! them, so a feature that makes each request dearer is seen in CI.
//!
//! Two runs differ only by the number of requests, so the start and the end of the program cancel out. The
//! upstream is a remote: callgrind of Debian 12 does not know a system call that the start of a process needs.

use std::collections::BTreeMap;
use std::path::Path;

use warden_rig::{Context as _, Trouble};

use crate::figures::Figures;
use crate::load::requests::{Until, closed};
use crate::machine::float;
use crate::metrics as m;
use crate::stage::Stage;
use crate::warden::NAME;

/// Requests of the first run, in which everything is used once.
const FEW: usize = 300;
const MANY: usize = 1300;
/// Crates named in the note.
const NAMED: usize = 12;

/// Counts the instructions of llama-warden, and notes the share of each crate.
pub(crate) fn count(figures: &mut Figures, stage: &Stage) -> Result<(), Trouble> {
    let few = counted_run(stage, FEW)?;
    let many = counted_run(stage, MANY)?;
    let requests = float((MANY - FEW) as u64);
    let of_request = |name: &str| {
        let earlier = few.get(name).copied().unwrap_or_default();
        float(many.get(name).copied().unwrap_or_default().saturating_sub(earlier)) / requests
    };
    let mut shares: Vec<(f64, &String)> = many.keys().map(|name| (of_request(name), name)).collect();
    shares.sort_by(|one, other| other.0.total_cmp(&one.0));
    let all: f64 = shares.iter().map(|(count, _)| count).sum();
    figures.add(m::INSTRUCTIONS, NAME, all);
    let named = shares.iter().take(NAMED).map(|(count, name)| format!("{name} {:.0} %", 100.0 * count / all));
    let named: Vec<String> = named.collect();
    figures.notes.push(format!("{NAME}, {}: {}", m::INSTRUCTIONS, named.join(", ")));
    Ok(())
}

/// Sends requests to a llama-warden that callgrind runs. Returns the instructions of each crate.
fn counted_run(stage: &Stage, requests: usize) -> Result<BTreeMap<String, u64>, Trouble> {
    let folder = tempfile::tempdir()?;
    let report = folder.path().join("callgrind.out");
    let peer = stage.warden_in_callgrind(&report)?;
    closed(&peer.target, &peer.target.small(), 1, Until::Answers(requests))?;
    peer.finish()?;
    let text = std::fs::read_to_string(&report).context(report.display())?;
    let counts = counts_by_crate(&text);
    let all: u64 = counts.values().sum();
    // A report that is read wrongly must not pass as a figure.
    if total(&text) == Some(all) { Ok(counts) } else { Err(unreadable(&report, all)) }
}

fn unreadable(report: &Path, all: u64) -> Trouble {
    Trouble::new(format!(
        "{}: its functions have {all} instructions, and its total is another",
        report.display()
    ))
}

fn total(report: &str) -> Option<u64> {
    let line = report.lines().find_map(|line| line.strip_prefix("totals: "))?;
    line.trim().parse().ok()
}

/// Reads the own instructions of each function from a report of callgrind.
///
/// `fn=(3) name` begins a function, later `fn=(3)`. A line of numbers has a position and a count. The line after
/// `calls=` has the count of the called function, which that function has itself.
fn counts_by_crate(report: &str) -> BTreeMap<String, u64> {
    let mut names: BTreeMap<&str, &str> = BTreeMap::new();
    let mut counts = BTreeMap::new();
    let (mut current, mut is_call) = ("", false);
    for line in report.lines() {
        if let Some((key, function)) = line.split_once("fn=(")
            && matches!(key, "" | "c")
            && let Some((id, name)) = function.split_once(')')
        {
            if !name.is_empty() {
                names.insert(id, name.trim());
            }
            if key.is_empty() {
                current = id;
            }
        } else if line.starts_with("calls=") {
            is_call = true;
        } else if line.starts_with(|first: char| first.is_ascii_digit() || "+-*".contains(first)) {
            let count = line.rsplit(' ').next().and_then(|count| count.parse::<u64>().ok());
            if !std::mem::take(&mut is_call) {
                let name = names.get(current).copied().unwrap_or_default();
                *counts.entry(crate_of(name).to_owned()).or_default() += count.unwrap_or_default();
            }
        }
    }
    counts
}

/// Returns the crate of a Rust function, or the function of a C library.
fn crate_of(name: &str) -> &str {
    let start = name.find(|letter: char| letter.is_ascii_alphanumeric() || letter == '_').unwrap_or(0);
    let path = &name[start..];
    path.split("::").next().unwrap_or(path)
}
