//! Evaluates probes by counting their matches.

use std::collections::BTreeSet;
use std::ops::Range;

use super::hooks::PlacedHooks;
use super::place::{ResolvedPlace, ScannedFile, SourceReader, format_lines};
use crate::error::Result;
use crate::judgement::{JudgementReason, PatchStatus};
use crate::scan::{CodeContainer, ContainerSearch};
use crate::set::{PatchSet, ProbeConsequence, SetProbe};

const MAX_SHOWN_LINES: usize = 4;

#[derive(Default)]
pub(super) struct ProbeResults {
    pub(super) defines: Vec<String>,
    pub(super) hold: BTreeSet<String>,
    pub(super) reasons: Vec<JudgementReason>,
}

pub(super) fn evaluate_probes(
    set: &PatchSet,
    reader: &SourceReader<'_>,
    placed: &PlacedHooks,
) -> Result<ProbeResults> {
    let mut asked = ProbeResults::default();
    for probe in &set.probes {
        match evaluate_probe(set, probe, reader, placed)? {
            None => {
                asked.defines.extend(probe.define.clone());
                asked.hold.insert(probe.id.clone());
            }
            Some(reason) if probe.on_fail != ProbeConsequence::Ignore => asked.reasons.push(reason),
            Some(_) => {}
        }
    }
    Ok(asked)
}

/// Containers that a probe skips: those it names, and those guarded by a placed hook.
fn skipped_containers<'a>(
    set: &'a PatchSet,
    probe: &'a SetProbe,
    placed: &PlacedHooks,
) -> Vec<&'a CodeContainer> {
    let guards = probe.guarded.iter().filter(|hook| placed.has(hook)).filter_map(|hook| set.hook(hook));
    let mut all: Vec<&CodeContainer> =
        probe.outside.iter().chain(guards.filter_map(|hook| hook.container.as_ref())).collect();
    all.dedup();
    all
}

/// Returns the reason why a probe does not hold; `None` if it holds.
fn evaluate_probe(
    set: &PatchSet,
    probe: &SetProbe,
    reader: &SourceReader<'_>,
    placed: &PlacedHooks,
) -> Result<Option<JudgementReason>> {
    let reason = |status, text: String| {
        let reason = JudgementReason::new(status, format!("probe `{}`", probe.id), text);
        JudgementReason { fix: probe.fix.clone(), ..reason }
    };
    let unsure = |file: &ScannedFile, line: Option<usize>, text: String| {
        Ok(Some(reason(PatchStatus::Refused, text).at(&file.path, line)))
    };
    let failed = match probe.on_fail {
        ProbeConsequence::NotApplicable => PatchStatus::NotApplicable,
        ProbeConsequence::Superseded => PatchStatus::Superseded,
        ProbeConsequence::Refused | ProbeConsequence::Ignore => PatchStatus::Refused,
    };
    let (least, most) = probe.bounds();
    let holds = |count: usize| (least..=most).contains(&count);
    let outside = skipped_containers(set, probe, placed);
    let expected = describe_expectation(probe, &outside);
    let (file, found) = match reader.resolve(&probe.files, probe.container.as_ref())? {
        ResolvedPlace::Whole(file) => (file, None),
        ResolvedPlace::Containers(file, found) => match found.as_slice() {
            [one] => (file, Some(one.clone())),
            several => {
                let at: Vec<usize> = several.iter().map(|found| file.source.line(found.start)).collect();
                let text = format!("{expected}; there are {} of that, in {}", at.len(), format_lines(&at));
                return unsure(&file, at.first().copied(), text);
            }
        },
        ResolvedPlace::Unsure(file, line, why) => {
            return unsure(&file, Some(line), format!("{expected}; {why}"));
        }
        ResolvedPlace::NoFile | ResolvedPlace::NoContainer(_) if holds(0) => return Ok(None),
        ResolvedPlace::NoFile => {
            let text =
                format!("{expected}; none of its files exists: {}; {}", probe.files.join(", "), probe.why);
            return Ok(Some(reason(failed, text)));
        }
        ResolvedPlace::NoContainer(file) => {
            let hint = reader.suggest_places(set, Some(&file.path), probe.container.as_ref())?;
            let text = format!("{expected}, which is not there{hint}; {}", probe.why);
            return Ok(Some(reason(failed, text).at(&file.path, None)));
        }
    };
    let code = file.source.code();
    if let Some(finds) = probe.finds.as_ref().filter(|finds| !finds.0.is_match(code)) {
        let text = format!("it can find nothing here: `{finds}` is not in the file any more; {}", probe.why);
        return Ok(Some(reason(failed, text).at(&file.path, None)));
    }
    let mut left_out: Vec<Range<usize>> = Vec::new();
    for container in outside {
        match file.source.find(container) {
            ContainerSearch::All(found) => left_out.extend(found.iter().map(|found| found.start..found.end)),
            ContainerSearch::Unsure { line, why } => {
                return unsure(&file, Some(line), format!("{expected}; {why}"));
            }
        }
    }
    let (start, end) = found.as_ref().map_or((0, code.len()), |found| (found.start, found.end));
    let text = code.get(start..end).unwrap_or_default();
    let matches = probe.pattern.0.find_iter(text).map(|found| start + found.start());
    let at: Vec<usize> = matches
        .filter(|place| !left_out.iter().any(|range| range.contains(place)))
        .map(|place| file.source.line(place))
        .collect();
    if holds(at.len()) {
        return Ok(None);
    }
    let line = at.last().copied().or(found.map(|found| file.source.line(found.start)));
    let text = format!("{expected}; found: {}; {}", describe_matches(&at), probe.why);
    Ok(Some(reason(failed, text).at(&file.path, line)))
}

/// Describes a probe's expected count and place. `outside`: the containers that the probe skips.
fn describe_expectation(probe: &SetProbe, outside: &[&CodeContainer]) -> String {
    let count = match probe.bounds() {
        (_, 0) => "not to be there".to_owned(),
        (least, most) if least == most => format!("{} exactly", format_count(least)),
        (least, usize::MAX) => format!("at least {}", format_count(least)),
        (0, most) => format!("at most {}", format_count(most)),
        (least, most) => format!("{least} to {}", format_count(most)),
    };
    let place = match &probe.container {
        _ if !outside.is_empty() => {
            let names: Vec<&str> = outside.iter().map(|container| container.name.as_str()).collect();
            format!(" outside of {}", names.join(", "))
        }
        Some(container) => format!(" in {container}"),
        None => String::new(),
    };
    format!("`{}` is expected {count}{place}", probe.pattern)
}

fn describe_matches(lines: &[usize]) -> String {
    match lines {
        [] => "none".to_owned(),
        [first, ..] if lines.len() > MAX_SHOWN_LINES => format!("{}, first in line {first}", lines.len()),
        lines => format!("{}, in {}", lines.len(), format_lines(lines)),
    }
}

fn format_count(count: usize) -> String {
    match count {
        1 => "once".to_owned(),
        2 => "twice".to_owned(),
        count => format!("{count} times"),
    }
}
