//! Writes a folder for the maintainer who is to fix a leak: setup, findings, effects of switches, and a
//! script that reproduces the leak with plain llama-server and curl.
//!
//! | file | content |
//! |---|---|
//! | `report.md` | for people |
//! | `findings.json` | everything, for programs |
//! | `reproduce.sh`, `requests/` | the script, and its requests |

use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use warden_experiment::crash::CrashRecurrence;
use warden_policies::defaults::Diagnose;
use warden_policies::growth::GrowthVerdict;
use warden_policies::secrets;

use super::reproduce::{
    ScriptEnvironment, ScriptRequests, growth_script, isolation_script, request_script, workload_requests,
};
use super::{DiagnoseReport, LegReport};
use crate::proof::PublishedRequest;

const REPORT_FILES: [&str; 2] = ["report.md", "findings.json"];
const SCRIPT_FILE: &str = "reproduce.sh";
const REQUEST_SUFFIX: &str = ".json";

/// Inputs of a report folder in addition to the report.
#[derive(Clone, Copy, Debug)]
pub struct ReportFolder<'a> {
    /// Settings of the experiment.
    pub numbers: &'a Diagnose,
    /// Variables that the server must not inherit.
    pub removed: &'a [String],
    /// Working directory of the server's command; the script makes relative paths absolute.
    pub directory: &'a Path,
    /// Number of the server's slots.
    pub slots: u32,
    /// Tokens of context in a slot.
    pub n_ctx: Option<u64>,
    /// Tokens per word of generated texts; 0 if unknown.
    pub tokens_per_word: f64,
    /// Requests that reproduce the finding, if no workload does.
    pub visit: &'a [PublishedRequest],
}

#[derive(Clone, Copy, Debug)]
pub(super) enum ScriptSubject<'a> {
    Nothing,
    /// The finding on this leg.
    Leg(&'a LegReport),
    /// Answers to some requests, and their speed.
    Requests,
    /// Answers to requests of several conversations.
    Conversations,
}

/// Returns a file in the folder that a report would replace although it is not ours. `with_script` includes
/// the script.
pub fn foreign_file_in(path: &Path, with_script: bool) -> Option<PathBuf> {
    let ours = |file: &Path| {
        let text = std::fs::read(file).map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        text.is_ok_and(|text| text.contains("llama-warden") || text.contains("\"warden\""))
    };
    let foreign = |file: &PathBuf| std::fs::symlink_metadata(file).is_ok() && !ours(file);
    let script = with_script.then_some(SCRIPT_FILE);
    let found = REPORT_FILES.into_iter().chain(script).map(|name| path.join(name)).find(foreign);
    // Our request files lie next to our script.
    let first = path.join("requests").join(format!("0{REQUEST_SUFFIX}"));
    found.or_else(|| (with_script && first.exists() && !path.join(SCRIPT_FILE).exists()).then_some(first))
}

impl DiagnoseReport {
    /// Writes the folder; creates it if missing.
    ///
    /// # Errors
    /// A file cannot be written, or a file that is not ours would be replaced.
    pub fn write_folder(&self, path: &Path, folder: &ReportFolder<'_>) -> io::Result<()> {
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path)?;
        remove_script(path)?;
        let told = self.without_secrets();
        let leg = self.worst();
        let all = match leg {
            Some(leg) => workload_requests(leg.finding.workload, folder, leg.finding.crash.as_ref()),
            None => ScriptRequests::from(folder.visit),
        };
        let showing = match leg {
            _ if all.bodies.is_empty() => ScriptSubject::Nothing,
            Some(leg) => ScriptSubject::Leg(leg),
            None if self.isolation.is_some() => ScriptSubject::Conversations,
            None => ScriptSubject::Requests,
        };
        let is_shown = !matches!(showing, ScriptSubject::Nothing);
        if let Some(file) = foreign_file_in(path, is_shown) {
            return Err(io::Error::other(format!(
                "{} exists, and llama-warden did not write it",
                file.display()
            )));
        }
        if is_shown {
            let inner = path.join("requests");
            std::fs::create_dir_all(&inner)?;
            for (at, request) in all.bodies.iter().enumerate() {
                std::fs::write(inner.join(format!("{at}{REQUEST_SUFFIX}")), &request.body)?;
            }
            let setting = ScriptEnvironment { removed: folder.removed, directory: folder.directory };
            let text = match (leg, &told.isolation) {
                (Some(leg), _) => growth_script(&self.about, &leg.finding, &all, &setting),
                (None, Some(isolation)) => isolation_script(&self.about, isolation, &all, &setting),
                (None, None) => request_script(&self.about, self.between.as_ref(), &all, &setting),
            };
            std::fs::write(path.join(SCRIPT_FILE), text)?;
        }
        std::fs::write(path.join("report.md"), told.to_markdown(showing))?;
        let shown = serde_json::to_value(&told).map(secrets::redact_json);
        let mut json =
            shown.and_then(|shown| serde_json::to_string_pretty(&shown)).map_err(io::Error::other)?;
        json.push('\n');
        std::fs::write(path.join("findings.json"), json)
    }

    /// Returns the leg to reproduce: one that crashes, else the one with the largest leak or growth.
    fn worst(&self) -> Option<&LegReport> {
        let crashes = |again: CrashRecurrence| {
            self.legs.iter().find(|leg| leg.finding.crash.as_ref().is_some_and(|crash| crash.again == again))
        };
        let order = [CrashRecurrence::Always, CrashRecurrence::Sometimes, CrashRecurrence::Undecided];
        if let Some(leg) = order.into_iter().find_map(crashes) {
            return Some(leg);
        }
        let key = |leg: &&LegReport| {
            let of = |found: &warden_experiment::SeriesFinding| {
                (found.verdict, found.per_request.map_or(0.0, |slope| slope.value))
            };
            let all = leg.finding.series.iter().map(of);
            all.max_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)))
                .unwrap_or((GrowthVerdict::Warming, 0.0))
        };
        self.legs.iter().max_by(|a, b| {
            let one = key(a);
            let other = key(b);
            one.0.cmp(&other.0).then(one.1.total_cmp(&other.1))
        })
    }
}

/// Removes an older script of ours with its requests, which would not belong to the new report.
fn remove_script(path: &Path) -> io::Result<()> {
    let script = path.join(SCRIPT_FILE);
    let is_ours = std::fs::read_to_string(&script).is_ok_and(|text| text.contains("llama-warden diagnose"));
    if !is_ours {
        return Ok(());
    }
    let folder = path.join("requests");
    if let Ok(all) = std::fs::read_dir(&folder) {
        for file in all {
            let file = file?;
            let name = file.file_name().to_string_lossy().into_owned();
            if name.strip_suffix(REQUEST_SUFFIX).is_some_and(|number| number.parse::<usize>().is_ok()) {
                std::fs::remove_file(file.path())?;
            }
        }
    }
    // Removing the folder fails if other files are in it.
    drop(std::fs::remove_dir(&folder));
    std::fs::remove_file(script)
}
