//! Checks that a build supports a mitigation.

use std::path::{Path, PathBuf};

use super::catalogue::MitigationCatalogue;
use super::entry::{MitigationAction, MitigationEntry};
use super::resolve::{BuildNeed, MitigationEffect};
use crate::binary::{TextPresence, find_text};
use crate::builds::{format_range, in_range, parse_build};
use crate::error::Result;
use crate::set::SetFix;
use crate::set::life::{FixStanding, LifeState};

/// Known facts about a model's llama-server.
#[derive(Clone, Debug, PartialEq)]
pub struct BuildFacts {
    /// Path of the binary.
    pub binary: PathBuf,
    /// llama.cpp's build number; `None` if unknown.
    pub number: Option<u32>,
    /// Facts from the binary's provenance; `None` for a binary that we did not build.
    pub provenance: Option<ProvenanceFacts>,
}

/// Facts from the provenance of one of our builds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ProvenanceFacts {
    /// Id of the build.
    pub id: String,
    /// Compute backend, such as `cuda`.
    pub backend: String,
    /// Ids of the fixes in the binary; `None` if the provenance has no list, and then the binary is searched.
    pub fixes: Option<Vec<String>>,
    /// Fixes of the user's own applied sets, each with its set's id.
    pub own: Vec<(String, SetFix)>,
    /// State of the judged fixes in the build's source: needed, superseded, harmful.
    pub fix_states: Vec<(String, FixStanding)>,
    /// cmake options by name; later ones win.
    pub options: Vec<(String, String)>,
}

impl ProvenanceFacts {
    fn option(&self, name: &str) -> Option<&str> {
        self.options.iter().rev().find(|(own, _)| own == name).map(|(_, value)| value.as_str())
    }
}

/// Result of checking a mitigation against a build.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MitigationFit {
    /// The build supports the mitigation.
    Fits,
    /// The mitigation is set, with a remark for the user.
    Note(String),
    /// The mitigation is for another backend and is not set.
    LeftOut(String),
    /// The build does not support the mitigation.
    Missing {
        /// Description of the missing requirement.
        message: String,
        /// Remedy.
        hint: String,
    },
}

impl BuildFacts {
    /// Facts about a foreign binary; `version` is its `--version` output.
    pub fn from_binary(binary: &Path, version: &str) -> Self {
        Self { binary: binary.to_owned(), number: parse_version_output(version), provenance: None }
    }

    /// State of a mitigation in this build: needed, superseded or harmful; `None` if unknown.
    pub fn mitigation_state(&self, mitigation: &MitigationEntry) -> Option<FixStanding> {
        let seen = self.provenance.as_ref().map(|provenance| provenance.fix_states.as_slice());
        mitigation.state_in(self.number, seen.unwrap_or_default())
    }

    fn name(&self) -> String {
        match &self.provenance {
            Some(provenance) => format!("build {}", provenance.id),
            None => self.binary.display().to_string(),
        }
    }
}

/// Parses `version: 8827 (abcdef)`, or in newer servers `version: 1.2.3 (build 8827, commit abcdef)`. Numbers
/// below 1000 come from builds that did not know their number.
fn parse_version_output(version: &str) -> Option<u32> {
    let line = version.lines().find_map(|line| line.trim().strip_prefix("version:"))?.trim();
    let digits = line.split_once("(build ").map_or(line, |(_, rest)| rest);
    let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
    digits[..end].parse().ok().filter(|number| *number >= 1000)
}

impl MitigationEffect {
    /// Checks that a build supports this effect, if necessary by a fix's marker in the binary.
    pub fn fit(&self, build: &BuildFacts) -> MitigationFit {
        let (name, who) = (&self.name, build.name());
        if let Some(provenance) =
            build.provenance.as_ref().filter(|provenance| !self.mitigation.is_for(&provenance.backend))
        {
            let backends = self.mitigation.backends.join(", ");
            return MitigationFit::LeftOut(format!(
                "mitigation {name} is for {backends}, and {who} computes on {}: it is left out",
                provenance.backend
            ));
        }
        let life = build.mitigation_state(&self.mitigation);
        if let Some(life) = life.as_ref().filter(|life| life.is == LifeState::Harmful && life.by_source) {
            return MitigationFit::Missing {
                message: format!("mitigation {name} is harmful in {who}: {}", life.reason()),
                hint: "remove it, or choose another build".to_owned(),
            };
        }
        let fit = match &self.need {
            Some(BuildNeed::Fix { set, fix, marker }) => self.fit_of_fix(build, set, fix, marker),
            Some(BuildNeed::Option { name: option, value }) => self.check_option(build, option, value),
            None => self.fit_of_choice(build).unwrap_or_else(|| self.check_number(build)),
        };
        match (fit, life) {
            (MitigationFit::Fits, Some(life)) if life.is == LifeState::Superseded => {
                MitigationFit::Note(format!("mitigation {name} is superseded in {who}: {}", life.reason()))
            }
            (MitigationFit::Fits, Some(life)) if life.is == LifeState::Harmful => MitigationFit::Note(
                format!("mitigation {name} is harmful in {who}, as its number says: {}", life.reason()),
            ),
            (fit, _) => fit,
        }
    }

    fn fit_of_fix(&self, build: &BuildFacts, set: &str, fix: &str, marker: &str) -> MitigationFit {
        let (name, who) = (&self.name, build.name());
        let needs = format!("mitigation {name} needs a llama-server built with the patch set {set}");
        let hint = match &self.mitigation.own {
            None => format!(
                "run `llama-warden build`, which applies {set} where it fits; `llama-warden patches show {set}` \
                 says more"
            ),
            Some(origin) => format!(
                "run `llama-warden build` with the set's folder in `paths.patches`, or --patches DIR; the set was \
                 read from {origin}"
            ),
        };
        let fixes = build.provenance.as_ref().and_then(|provenance| provenance.fixes.as_deref());
        if fixes.is_some_and(|fixes| fixes.iter().any(|own| own == fix)) {
            return MitigationFit::Fits;
        }
        if marker.is_empty() && fixes.is_none() {
            return MitigationFit::Note(format!("{needs}; whether {who} is one cannot be told"));
        }
        // Search the binary even if the provenance lacks the fix: the source may have been patched earlier.
        let found = if marker.is_empty() { Ok(TextPresence::No) } else { find_text(&build.binary, marker) };
        match (found, fixes) {
            (Ok(TextPresence::Yes), _) => MitigationFit::Fits,
            (_, Some([])) => MitigationFit::Missing { message: format!("{needs}; {who} has none"), hint },
            (_, Some(fixes)) => {
                let has = fixes.join(", ");
                MitigationFit::Missing {
                    message: format!("{needs} and its fix {fix}; {who} has {has}"),
                    hint,
                }
            }
            (found, None) => unproven_fit(found, &needs, &who, marker, hint),
        }
    }

    fn check_option(&self, build: &BuildFacts, option: &str, value: &str) -> MitigationFit {
        let (name, who) = (&self.name, build.name());
        let needs = format!("mitigation {name} needs a llama-server built with -D{option}={value}");
        let Some(provenance) = &build.provenance else {
            return MitigationFit::Note(format!("{needs}; whether {who} is one cannot be told"));
        };
        let hint = format!("run `llama-warden build -D{option}={value}`");
        match provenance.option(option) {
            Some(own) if normalize_value(own) == normalize_value(value) => MitigationFit::Fits,
            Some(own) => {
                MitigationFit::Missing { message: format!("{needs}; {who} has -D{option}={own}"), hint }
            }
            None => MitigationFit::Missing { message: format!("{needs}; {who} was built without it"), hint },
        }
    }

    /// Checks that the build supports the chosen value. Forks count differently, so only our own builds are
    /// refused by number.
    fn fit_of_choice(&self, build: &BuildFacts) -> Option<MitigationFit> {
        let choice = self.flags.iter().find_map(|flag| flag.words.get(1))?;
        let message = self.mitigation.outside_limits(choice, build)?;
        let message = format!("mitigation {}={choice}: {message}", self.name);
        let hint = "choose another value, or another build".to_owned();
        Some(if build.provenance.is_some() {
            MitigationFit::Missing { message, hint }
        } else {
            MitigationFit::Note(message)
        })
    }

    /// Checks the build number. Forks count differently, so a mismatch yields a warning, never a refusal.
    fn check_number(&self, build: &BuildFacts) -> MitigationFit {
        let (entry, who) = (&self.mitigation, build.name());
        let Some(number) = build.number else { return MitigationFit::Fits };
        let consequence = match entry.action {
            MitigationAction::Flags { .. } => "llama-server may refuse to start",
            _ => "it may have no effect",
        };
        let MitigationEntry { first, last, .. } = &**entry;
        let range = if parse_build(first).is_some_and(|first| number < first) {
            format!("from {first} on")
        } else if parse_build(last).is_some_and(|last| number > last) {
            format!("up to {last}")
        } else {
            return MitigationFit::Fits;
        };
        MitigationFit::Note(format!(
            "mitigation {} is understood {range}, and {who} says that it is b{number}: {consequence}",
            self.name
        ))
    }
}

impl MitigationEntry {
    /// Returns the reason why a build does not support a value; `None` if the value is supported, or unknown.
    fn outside_limits(&self, choice: &str, build: &BuildFacts) -> Option<String> {
        let number = build.number?;
        let limits = self.value.iter().flat_map(|value| &value.limits);
        let limit = limits.into_iter().find(|limit| limit.choice == choice)?;
        let backend = build.provenance.as_ref().map(|provenance| &provenance.backend);
        if !limit.backends.is_empty() && backend.is_some_and(|backend| !limit.backends.contains(backend)) {
            return None;
        }
        let range = format_range(&limit.first, &limit.last);
        let on = if limit.backends.is_empty() || backend.is_some() {
            String::new()
        } else {
            format!(" where it computes on {}", limit.backends.join(" or "))
        };
        (!in_range(number, &limit.first, &limit.last)).then(|| {
            format!("`{choice}` is for builds {range}, and {} is b{number}: {}{on}", build.name(), limit.why)
        })
    }
}

impl MitigationCatalogue {
    /// Values in `args` that this build does not support, each with its index in `args` and the reason.
    pub fn refused_values(&self, args: &[String], build: &BuildFacts) -> Vec<(usize, String)> {
        let mut found = Vec::new();
        for entry in self.mitigations() {
            let MitigationAction::Flags { flags } = &entry.action else { continue };
            for (at, pair) in args.windows(2).enumerate() {
                let [flag, choice] = pair else { continue };
                if flags.iter().any(|own| own.names.contains(flag))
                    && let Some(why) = entry.outside_limits(choice, build)
                {
                    found.push((at + 1, format!("`{flag} {choice}`: {why}")));
                }
            }
        }
        found
    }
}

/// Result for a binary without provenance in which the text was not found.
fn unproven_fit(
    found: Result<TextPresence>,
    needs: &str,
    who: &str,
    marker: &str,
    hint: String,
) -> MitigationFit {
    match found {
        Ok(TextPresence::Script) => {
            MitigationFit::Note(format!("{needs}; {who} is a script, so that cannot be checked"))
        }
        Err(error) => MitigationFit::Note(format!("{needs}; {who} cannot be searched for it: {error}")),
        Ok(_) => MitigationFit::Missing {
            message: format!("{needs}; the text `{marker}` is neither in {who} nor in a library beside it"),
            hint,
        },
    }
}

/// Normalizes cmake's many spellings of on and off.
fn normalize_value(value: &str) -> String {
    match value.to_ascii_uppercase().as_str() {
        "ON" | "1" | "YES" | "TRUE" | "Y" => "ON".to_owned(),
        "OFF" | "0" | "NO" | "FALSE" | "N" => "OFF".to_owned(),
        other => other.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_build_tells_its_number_in_either_form() {
        assert_eq!(parse_version_output("load...\nversion: 8827 (abc)\nbuilt with"), Some(8827));
        assert_eq!(parse_version_output("version: 1.2.3 (build 10587, commit abc)"), Some(10587));
        assert_eq!(parse_version_output("version: 1 (unknown)"), None);
        assert_eq!(parse_version_output("hello"), None);
    }
}
