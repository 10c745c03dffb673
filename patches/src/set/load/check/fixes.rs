//! Checks a fix and its variables.

use std::collections::BTreeSet;

use super::SetCheckResult;
use super::words::{check_backends, check_builds, check_id, check_not_empty, is_constant_name};
use crate::builds::parse_build;
use crate::set::life::{EvidenceKind, LifeStatement};
use crate::set::load::position::ValuePath;
use crate::set::{FixValue, FixVariable, PatchSet, SetFix, UpstreamStatus, VariableKind};

pub(super) fn check_fix<'a>(
    set: &PatchSet,
    fix: &'a SetFix,
    at: &ValuePath,
    variables: &mut BTreeSet<&'a str>,
) -> SetCheckResult {
    check_id(&fix.id, &at.key("id"))?;
    check_not_empty(&fix.title, &at.key("title"))?;
    check_not_empty(&fix.symptom, &at.key("symptom"))?;
    let affects = at.key("affects");
    check_backends(&fix.affects.backends, &affects.key("backends"))?;
    check_builds(&fix.affects.first, &fix.affects.last, &affects)?;
    if fix.upstream.status == UpstreamStatus::Superseded && fix.upstream.since.is_empty() {
        return at.key("upstream").key("since").fault("say since when it is superseded");
    }
    for (number, life) in fix.life.iter().enumerate() {
        check_life(set, life, &at.element("life", number))?;
    }
    for (number, variable) in fix.variables.iter().enumerate() {
        let at = at.element("variable", number);
        check_variable(variable, &at)?;
        if !variables.insert(&variable.name) {
            return at.key("name").fault(format!("{} is set by two variables", variable.name));
        }
    }
    Ok(())
}

fn check_life(set: &PatchSet, life: &LifeStatement, at: &ValuePath) -> SetCheckResult {
    check_not_empty(&life.text, &at.key("text"))?;
    check_builds(&life.first, &life.last, at)?;
    if let (Some(first), Some(last)) = (parse_build(&life.first), parse_build(&life.last))
        && last < first
    {
        return at.key("last").fault(format!("b{last} comes before b{first}"));
    }
    for (key, probes) in [("holds", &life.holds), ("fails", &life.fails)] {
        for (number, probe) in probes.iter().enumerate() {
            if !set.probes.iter().any(|known| known.id == *probe) {
                return at.element(key, number).fault(format!("there is no probe `{probe}`"));
            }
        }
    }
    if life.by == EvidenceKind::Measurement && (life.hardware.is_empty() || life.build.is_empty()) {
        return at.key("by").fault("what was measured says on which `hardware` and with which `build`");
    }
    Ok(())
}

fn check_variable(variable: &FixVariable, at: &ValuePath) -> SetCheckResult {
    if !is_constant_name(&variable.name) {
        let why = format!("`{}` is not the name of an environment variable: [A-Z][A-Z0-9_]*", variable.name);
        return at.key("name").fault(why);
    }
    let is_number = matches!(variable.kind, VariableKind::Integer | VariableKind::Number);
    for (key, bound) in [("min", variable.min), ("max", variable.max)] {
        if bound.is_some() && !is_number {
            return at.key(key).fault("only a number has bounds");
        }
        if bound.is_some_and(|bound| !bound.is_finite()) {
            return at.key(key).fault("this is no number");
        }
    }
    if let (Some(min), Some(max)) = (variable.min, variable.max)
        && min > max
    {
        return at.key("min").fault(format!("at least {min} and at most {max} is impossible"));
    }
    let Some(default) = &variable.default else { return Ok(()) };
    let at = at.key("default");
    #[expect(clippy::cast_precision_loss, reason = "compared with bounds that are written by hand")]
    let number = match (variable.kind, default) {
        (VariableKind::Integer | VariableKind::Number, FixValue::Integer(number)) => Some(*number as f64),
        (VariableKind::Number, FixValue::Number(number)) if number.is_finite() => Some(*number),
        (VariableKind::Flag, FixValue::Flag(_)) | (VariableKind::Path, FixValue::Text(_)) => None,
        (kind, _) => return at.fault(format!("`{default}` is no {kind:?}").to_lowercase()),
    };
    if let Some(number) = number
        && (variable.min.is_some_and(|min| number < min) || variable.max.is_some_and(|max| number > max))
    {
        return at.fault(format!("{number} is outside of `min` and `max`"));
    }
    Ok(())
}
