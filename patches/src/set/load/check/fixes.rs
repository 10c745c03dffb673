//! Checks a fix and its variables.

use std::collections::BTreeSet;

use super::SetCheckResult;
use super::words::{check_backends, check_build, check_error, check_id, check_not_empty, extend_path};
use crate::set::life::{EvidenceKind, LifeStatement};
use crate::set::load::position::PathStep::{self, Item, Key};
use crate::set::{FixValue, FixVariable, PatchSet, SetFix, UpstreamStatus, VariableKind};

pub(super) fn check_fix<'a>(
    set: &PatchSet,
    fix: &'a SetFix,
    at: &[PathStep],
    variables: &mut BTreeSet<&'a str>,
) -> SetCheckResult {
    check_id(&fix.id, &extend_path(at, &[Key("id")]))?;
    check_not_empty(&fix.title, &extend_path(at, &[Key("title")]))?;
    check_not_empty(&fix.symptom, &extend_path(at, &[Key("symptom")]))?;
    check_backends(&fix.affects.backends, &extend_path(at, &[Key("affects"), Key("backends")]))?;
    for (key, bound) in [("first", &fix.affects.first), ("last", &fix.affects.last)] {
        if !bound.is_empty() {
            check_build(bound, &extend_path(at, &[Key("affects"), Key(key)]))?;
        }
    }
    if fix.upstream.status == UpstreamStatus::Superseded && fix.upstream.since.is_empty() {
        return check_error(
            &extend_path(at, &[Key("upstream"), Key("since")]),
            "say since when it is superseded".to_owned(),
        );
    }
    for (number, life) in fix.life.iter().enumerate() {
        check_life(set, life, &extend_path(at, &[Key("life"), Item(number)]))?;
    }
    for (number, variable) in fix.variables.iter().enumerate() {
        let at = extend_path(at, &[Key("variable"), Item(number)]);
        check_variable(variable, &at)?;
        if !variables.insert(&variable.name) {
            return check_error(
                &extend_path(&at, &[Key("name")]),
                format!("{} is set by two variables", variable.name),
            );
        }
    }
    Ok(())
}

fn check_life(set: &PatchSet, life: &LifeStatement, at: &[PathStep]) -> SetCheckResult {
    check_not_empty(&life.text, &extend_path(at, &[Key("text")]))?;
    let number = |text: &str| text.strip_prefix('b').and_then(|digits| digits.parse::<u32>().ok());
    for (key, bound) in [("first", &life.first), ("last", &life.last)] {
        if !bound.is_empty() {
            check_build(bound, &extend_path(at, &[Key(key)]))?;
        }
    }
    if let (Some(first), Some(last)) = (number(&life.first), number(&life.last))
        && last < first
    {
        return check_error(&extend_path(at, &[Key("last")]), format!("b{last} comes before b{first}"));
    }
    for (key, probes) in [("holds", &life.holds), ("fails", &life.fails)] {
        for (number, probe) in probes.iter().enumerate() {
            if !set.probes.iter().any(|known| known.id == *probe) {
                return check_error(
                    &extend_path(at, &[Key(key), Item(number)]),
                    format!("there is no probe `{probe}`"),
                );
            }
        }
    }
    if life.by == EvidenceKind::Measurement && (life.hardware.is_empty() || life.build.is_empty()) {
        let why = "what was measured says on which `hardware` and with which `build`".to_owned();
        return check_error(&extend_path(at, &[Key("by")]), why);
    }
    Ok(())
}

fn check_variable(variable: &FixVariable, at: &[PathStep]) -> SetCheckResult {
    let good = variable.name.starts_with(|sign: char| sign.is_ascii_uppercase())
        && variable
            .name
            .bytes()
            .all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_');
    if !good {
        return check_error(
            &extend_path(at, &[Key("name")]),
            format!("`{}` is not the name of an environment variable: [A-Z][A-Z0-9_]*", variable.name),
        );
    }
    let is_number = matches!(variable.kind, VariableKind::Integer | VariableKind::Number);
    for (key, bound) in [("min", variable.min), ("max", variable.max)] {
        if bound.is_some() && !is_number {
            return check_error(&extend_path(at, &[Key(key)]), "only a number has bounds".to_owned());
        }
        if bound.is_some_and(|bound| !bound.is_finite()) {
            return check_error(&extend_path(at, &[Key(key)]), "this is no number".to_owned());
        }
    }
    if let (Some(min), Some(max)) = (variable.min, variable.max)
        && min > max
    {
        return check_error(
            &extend_path(at, &[Key("min")]),
            format!("at least {min} and at most {max} is impossible"),
        );
    }
    let Some(default) = &variable.default else { return Ok(()) };
    let default_at = extend_path(at, &[Key("default")]);
    #[expect(clippy::cast_precision_loss, reason = "compared with bounds that are written by hand")]
    let number = match (variable.kind, default) {
        (VariableKind::Integer | VariableKind::Number, FixValue::Integer(number)) => Some(*number as f64),
        (VariableKind::Number, FixValue::Number(number)) if number.is_finite() => Some(*number),
        (VariableKind::Flag, FixValue::Flag(_)) | (VariableKind::Path, FixValue::Text(_)) => None,
        (kind, _) => return check_error(&default_at, format!("`{default}` is no {kind:?}").to_lowercase()),
    };
    if let Some(number) = number
        && (variable.min.is_some_and(|min| number < min) || variable.max.is_some_and(|max| number > max))
    {
        return check_error(&default_at, format!("{number} is outside of `min` and `max`"));
    }
    Ok(())
}
