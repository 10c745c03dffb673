//! Loads `patches/mitigations.toml`; errors name file, line and key.

use serde::Deserialize;

use super::entry::{LeakMemory, MitigationAction, MitigationEntry, ServerFlag};
use super::leak::{KnownLeak, WORK_UNITS};
use super::value::{ValueKind, ValueSpec};
use crate::builds::check_range;
use crate::error::{PatchError, Result};
use crate::marker::is_id;
use crate::set::FixEvidence;
use crate::set::life::{EvidenceKind, LifeStatement};

pub(super) const MITIGATIONS_FILE: &str = "patches/mitigations.toml";

const MITIGATIONS_SCHEMA: u32 = 1;

#[derive(Debug)]
pub(super) struct LoadedMitigations {
    pub(super) mitigations: Vec<MitigationEntry>,
    pub(super) pairs: Vec<RedundantPair>,
    pub(super) leaks: Vec<KnownLeak>,
    pub(super) start: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawCatalogue {
    schema: u32,
    #[serde(default)]
    start: Vec<String>,
    #[serde(default)]
    mitigation: Vec<toml::Spanned<RawMitigation>>,
    #[serde(default)]
    pair: Vec<RedundantPair>,
    #[serde(default)]
    leak: Vec<toml::Spanned<KnownLeak>>,
}

/// Two mitigations, one of which makes the other useless.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RedundantPair {
    pub(super) ids: [String; 2],
    pub(super) why: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawMitigation {
    id: String,
    title: String,
    text: String,
    #[serde(default)]
    memory: Vec<LeakMemory>,
    #[serde(default)]
    backends: Vec<String>,
    #[serde(default)]
    first: String,
    #[serde(default)]
    last: String,
    cost: String,
    #[serde(default)]
    risk: String,
    confidence: String,
    references: Vec<String>,
    #[serde(default)]
    evidence: Vec<FixEvidence>,
    #[serde(default)]
    life: Vec<LifeStatement>,
    set: Option<RawVariable>,
    unset: Option<RawUnset>,
    flags: Option<Vec<ServerFlag>>,
    option: Option<RawOption>,
    value: Option<ValueSpec>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawVariable {
    name: String,
    value: Option<String>,
    #[serde(default)]
    presence: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawUnset {
    names: Vec<String>,
    #[serde(default)]
    flags: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawOption {
    name: String,
    value: String,
}

pub(super) fn load_mitigations(file: &str, text: &str) -> Result<LoadedMitigations> {
    let wrong = |at: Option<usize>, key: &str, why: String| PatchError::Set {
        file: file.to_owned(),
        line: at.and_then(|byte| text.get(..byte)).map(|before| before.matches('\n').count() + 1),
        key: key.to_owned(),
        why,
    };
    let raw: RawCatalogue = toml::from_str(text)
        .map_err(|error| wrong(error.span().map(|span| span.start), "", error.message().to_owned()))?;
    if raw.schema != MITIGATIONS_SCHEMA {
        let why = format!("is {}, and this program reads {MITIGATIONS_SCHEMA}", raw.schema);
        return Err(wrong(None, "schema", why));
    }
    let mut mitigations = Vec::new();
    for one in raw.mitigation {
        let at = one.span().start;
        let one = one.into_inner();
        let key = format!("mitigation `{}`", one.id);
        mitigations.push(parse_mitigation(one).map_err(|why| wrong(Some(at), &key, why))?);
    }
    let mut leaks = Vec::new();
    for one in raw.leak {
        let at = one.span().start;
        let leak = one.into_inner();
        let key = format!("leak `{}`", leak.id);
        check_range(&leak.first, &leak.last).map_err(|why| wrong(Some(at), &key, why))?;
        if !is_id(&leak.id) {
            return Err(wrong(Some(at), &key, "an id has small letters, digits and dashes".to_owned()));
        }
        if !leak.cures.iter().all(super::leak::LeakCure::is_one_thing) {
            let why =
                "each cure says exactly one of mitigation, upgrade, restart, monitor, advice".to_owned();
            return Err(wrong(Some(at), &key, why));
        }
        check_signs(&leak).map_err(|why| wrong(Some(at), &key, why))?;
        leaks.push(leak);
    }
    Ok(LoadedMitigations { mitigations, pairs: raw.pair, leaks, start: raw.start })
}

/// Checks a leak's signs; the catalogue checks their ids of mitigations.
fn check_signs(leak: &KnownLeak) -> std::result::Result<(), String> {
    if !leak.signs.is_empty() && !leak.kind.grows() {
        let kind = serde_json::json!(leak.kind);
        return Err(format!("a `{}` does not grow: it has no `signs`", kind.as_str().unwrap_or_default()));
    }
    for sign in &leak.signs {
        if sign.grows.is_empty() || sign.still.iter().any(|memory| sign.grows.contains(memory)) {
            return Err("a sign says which memory `grows`, and names none of it in `still`".to_owned());
        }
        if let Some(unit) = sign.units.iter().find(|unit| !WORK_UNITS.contains(&unit.as_str())) {
            return Err(format!("`{unit}` is no unit of work: they are {}", WORK_UNITS.join(", ")));
        }
        if !(0.0..=1.0).contains(&sign.confidence) {
            return Err("the `confidence` of a sign goes from 0 to 1".to_owned());
        }
    }
    Ok(())
}

fn parse_mitigation(raw: RawMitigation) -> std::result::Result<MitigationEntry, String> {
    if !is_id(&raw.id) {
        return Err("an id has small letters, digits and dashes".to_owned());
    }
    check_range(&raw.first, &raw.last)?;
    for life in &raw.life {
        check_range(&life.first, &life.last)?;
        if !(life.holds.is_empty() && life.fails.is_empty()) {
            return Err("only a fix of a patch set has probes: a `life` here goes by builds".to_owned());
        }
        if life.by == EvidenceKind::Measurement && (life.hardware.is_empty() || life.build.is_empty()) {
            return Err("what was measured says on which `hardware` and with which `build`".to_owned());
        }
    }
    let takes_value = raw.value.is_some();
    let action = match (raw.set, raw.unset, raw.flags, raw.option) {
        (Some(set), None, None, None) if set.value.is_some() == takes_value => {
            return Err("`set.value` is fixed, or there is a `value` to be given: one of them".to_owned());
        }
        (Some(set), None, None, None) => {
            MitigationAction::Variable { name: set.name, fixed: set.value, presence: set.presence }
        }
        (None, Some(unset), None, None) if !takes_value => {
            MitigationAction::Unset { names: unset.names, flags: unset.flags }
        }
        (None, None, Some(flags), None) => {
            let given = flags.iter().filter(|flag| flag.value.as_deref() == Some("{}")).count();
            if flags.is_empty() || (given > 0) != takes_value {
                return Err("a `value` belongs to flags with `value = \"{}\"`, and they to it".to_owned());
            }
            if flags.iter().any(|flag| !flag.names.contains(&flag.write)) {
                return Err("a flag's `names` have the one that is written, too".to_owned());
            }
            MitigationAction::Flags { flags }
        }
        (None, None, None, Some(option)) if !takes_value => {
            MitigationAction::BuildOption { name: option.name, setting: option.value }
        }
        _ => return Err("it has exactly one of `set`, `unset`, `flags`, `option`".to_owned()),
    };
    if let Some(value) = &raw.value {
        if (value.kind == ValueKind::Choice) == value.choices.is_empty() {
            return Err("`choices` belong to the type `choice`".to_owned());
        }
        for limit in &value.limits {
            check_range(&limit.first, &limit.last)?;
            if !value.choices.contains(&limit.choice) {
                return Err(format!("`limits` names `{}`, which is no choice", limit.choice));
            }
        }
        if let Some(default) = &value.default {
            value.check(&default.to_string()).map_err(|why| format!("its default: {why}"))?;
        }
    }
    Ok(MitigationEntry {
        id: raw.id,
        title: raw.title,
        text: raw.text,
        action,
        value: raw.value,
        parts: Vec::new(),
        own: None,
        memory: raw.memory,
        backends: raw.backends,
        first: raw.first,
        last: raw.last,
        cost: raw.cost,
        risk: raw.risk,
        confidence: raw.confidence,
        evidence: raw.evidence,
        references: raw.references,
        life: raw.life,
        upstream: None,
        cures: Vec::new(),
        symptoms: Vec::new(),
    })
}
