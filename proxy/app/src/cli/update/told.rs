//! Report of an update, as text and as JSON.

use serde::Serialize;
use warden_builder::git::RevisionInfo;
use warden_builder::{BuildId, BuildPlan, Provenance};
use warden_diagnose::report::ProofReport;

use super::source::NewSource;
use crate::exit::CommandError;
use crate::out;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum UpdateOutcome {
    InUse,
    /// The build in use is as new as the source, or newer.
    NothingNew,
    Planned,
    Rejected,
    /// An earlier proof rejected the new build, or an earlier update rolled it back.
    WasRejected,
    Unknown,
    /// The new build was brought into use and rolled back.
    TakenBack,
    Interrupted,
}

impl UpdateOutcome {
    pub(super) fn exit_code(self) -> u8 {
        match self {
            Self::InUse | Self::NothingNew | Self::Planned => 0,
            Self::Rejected | Self::WasRejected | Self::TakenBack => crate::exit::LEAKS_CODE,
            Self::Unknown => crate::exit::UNDECIDED_CODE,
            Self::Interrupted => crate::exit::INTERRUPTED_CODE,
        }
    }
}

#[derive(Clone, Debug, Serialize)]
pub(super) struct UpdateReport {
    outcome: Option<UpdateOutcome>,
    old: ReportedBuild,
    new: ReportedBuild,
    #[serde(flatten)]
    source: SourceChange,
    #[serde(flatten)]
    fixes: FixChange,
    pub(super) reasons: Vec<String>,
    pub(super) notes: Vec<String>,
    pub(super) used_by: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    proof: Option<ProofReport>,
    #[serde(skip)]
    plan: String,
}

#[derive(Clone, Debug, Serialize)]
struct SourceChange {
    follows: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    commits: Option<usize>,
    /// Newest commits, such as `b1234 subject`.
    subjects: Vec<String>,
}

#[derive(Clone, Debug, Serialize)]
struct FixChange {
    /// Fixes that only the build in use has.
    fixes_lost: Vec<String>,
    /// Fixes that only the new build has.
    fixes_new: Vec<String>,
}

#[derive(Clone, Debug, Serialize)]
struct ReportedBuild {
    build: BuildId,
    revision: String,
}

impl UpdateReport {
    pub(super) fn new(old: &Provenance, plan: &BuildPlan, new: &NewSource, listed: usize) -> Self {
        let fixes = plan.fixes();
        let without = |these: &[String], those: &[String]| -> Vec<String> {
            these.iter().filter(|one| !those.contains(one)).cloned().collect()
        };
        let commits = new.commits.as_deref();
        let told = |info: &RevisionInfo| format!("{} {}", info.label, info.subject);
        Self {
            outcome: None,
            old: ReportedBuild { build: old.id.clone(), revision: old.plan.source.revision.to_string() },
            new: ReportedBuild { build: plan.id.clone(), revision: plan.source.revision.to_string() },
            source: SourceChange {
                follows: new.follows.clone(),
                commits: commits.map(<[RevisionInfo]>::len),
                subjects: commits.into_iter().flatten().rev().take(listed).map(told).collect(),
            },
            fixes: FixChange {
                fixes_lost: without(old.fixes(), &fixes),
                fixes_new: without(&fixes, old.fixes()),
            },
            reasons: Vec::new(),
            notes: Vec::new(),
            used_by: Vec::new(),
            proof: None,
            plan: plan.to_string(),
        }
    }

    pub(super) fn with_outcome(mut self, outcome: UpdateOutcome) -> Self {
        self.outcome = Some(outcome);
        self
    }

    pub(super) fn add_proof(&mut self, proof: ProofReport) {
        self.reasons.clone_from(&proof.reasons);
        self.proof = Some(proof);
    }

    pub(super) fn reasons_line(&self) -> String {
        self.reasons.join("; ")
    }

    /// Returns a text such as `build 8827, commit … to build 8840, commit …: 13 commits (b8840 of
    /// https://…)`.
    pub(super) fn summary(&self) -> String {
        let commits = self
            .source
            .commits
            .map_or_else(String::new, |count| format!(": {}", out::count_noun(count, "commit")));
        format!("{} to {}{commits} ({})", self.old.revision, self.new.revision, self.source.follows)
    }

    fn paragraph(&self) -> String {
        let old = &self.old;
        let new = &self.new;
        let mut text = match self.outcome {
            Some(UpdateOutcome::NothingNew) => {
                let mut text = if self.reasons.is_empty() {
                    format!(
                        "nothing is new: build {} is what {} gives ({})",
                        old.build, self.source.follows, old.revision
                    )
                } else {
                    format!(
                        "nothing is new: {} gives {}, and build {}, which is in use, is of {}: {}; to go back to it \
                         all the same, name it with `--to` or `--source`",
                        self.source.follows,
                        new.revision,
                        old.build,
                        old.revision,
                        self.reasons_line()
                    )
                };
                text.extend(self.notes.iter().map(|note| format!(". {note}")));
                return text;
            }
            Some(UpdateOutcome::InUse) if self.used_by.is_empty() => {
                format!(
                    "build {} is in use from now on; no running instance used build {}",
                    new.build, old.build
                )
            }
            Some(UpdateOutcome::InUse) => {
                format!("build {} is in use by {}", new.build, self.used_by.join("; "))
            }
            Some(UpdateOutcome::Rejected) => format!("build {} is worse and is not used", new.build),
            Some(UpdateOutcome::WasRejected) => {
                format!("build {} was found worse before and is not tried again (--again)", new.build)
            }
            Some(UpdateOutcome::Unknown) => {
                format!("it is not known whether build {} is as good; build {} stays", new.build, old.build)
            }
            Some(UpdateOutcome::TakenBack) => {
                format!("build {} was brought in and taken back; build {} is in use", new.build, old.build)
            }
            Some(UpdateOutcome::Interrupted) => {
                format!(
                    "interrupted while build {} was brought in: build {} is in use again",
                    new.build, old.build
                )
            }
            Some(UpdateOutcome::Planned) | None => format!("build {} would be made", new.build),
        };
        text.extend([format!(". It goes from {}.", self.summary())]);
        let list = |text: &mut String, what: &str, names: &[String]| {
            if !names.is_empty() {
                text.extend([format!(" {what}: {}.", names.join(", "))]);
            }
        };
        list(&mut text, "Fixes that are gone", &self.fixes.fixes_lost);
        list(&mut text, "New fixes", &self.fixes.fixes_new);
        if let Some(proof) = &self.proof {
            text.extend([format!(" Proof: {}.", proof.summary())]);
        }
        if !self.reasons.is_empty() {
            text.extend([format!(" Because: {}.", self.reasons_line())]);
        }
        text.extend(self.notes.iter().map(|note| format!(" {note}.")));
        if self.outcome == Some(UpdateOutcome::InUse) {
            text += " The way back: `llama-warden rollback`.";
        }
        text
    }

    pub(super) fn show(&self, json: bool) -> Result<(), CommandError> {
        if json {
            return out::print_json(self);
        }
        let mut text = format!("{}\n", self.paragraph());
        if self.outcome == Some(UpdateOutcome::Planned) {
            let more = self.source.commits.unwrap_or(0).saturating_sub(self.source.subjects.len());
            text.extend(self.source.subjects.iter().map(|line| format!("  {line}\n")));
            if more > 0 {
                text.extend([format!("  and {}\n", out::count_noun(more, "older commit"))]);
            }
            text.extend([format!("\n{}\n", self.plan)]);
        }
        if let Some(proof) = &self.proof {
            text.extend([format!("\n{}", out::format_table(&proof.rows()))]);
            text.extend(proof.notes.iter().map(|note| format!("note: {note}\n")));
        }
        out::print_text(&text)
    }

    /// Returns an error unless the exit code is 0.
    pub(super) fn check_exit(&self) -> Result<(), CommandError> {
        let code = self.outcome.map_or(crate::exit::UNDECIDED_CODE, UpdateOutcome::exit_code);
        if code == 0 {
            return Ok(());
        }
        let code = if self.proof.as_ref().is_some_and(|proof| proof.proof.interrupted) {
            crate::exit::INTERRUPTED_CODE
        } else {
            code
        };
        Err(CommandError::Reported { code })
    }
}
