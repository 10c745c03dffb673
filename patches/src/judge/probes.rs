//! Evaluates probes by counting their matches.

use std::collections::BTreeSet;

use super::hooks::PlacedHooks;
use super::place::{ResolvedPlace, SourceReader, format_lines};
use crate::error::Result;
use crate::judgement::{JudgementReason, PatchStatus};
use crate::scan::CodeContainer;
use crate::scan::ContainerSearch;
use crate::set::{PatchSet, ProbeConsequence, SetProbe};

/// Maximum number of lines mentioned.
const MAX_SHOWN_LINES: usize = 4;

/// Results of a set's probes in a tree.
#[derive(Default)]
pub(super) struct ProbeResults {
    /// Macros of the probes that hold.
    pub(super) defines: Vec<String>,
    /// Ids of the probes that hold.
    pub(super) hold: BTreeSet<String>,
    /// Reasons given by the probes that do not hold.
    pub(super) reasons: Vec<JudgementReason>,
}

/// Evaluates all probes. `placed`: the placed hooks.
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

fn evaluate_probe(
    set: &PatchSet,
    probe: &SetProbe,
    reader: &SourceReader<'_>,
    placed: &PlacedHooks,
) -> Result<Option<JudgementReason>> {
    let reason = |status, file: Option<String>, line, text| {
        Some(JudgementReason {
            status,
            part: format!("probe `{}`", probe.id),
            fix: probe.fix.clone(),
            file,
            line,
            text,
        })
    };
    let failed = match probe.on_fail {
        ProbeConsequence::NotApplicable => PatchStatus::NotApplicable,
        ProbeConsequence::Superseded => PatchStatus::Superseded,
        ProbeConsequence::Refused | ProbeConsequence::Ignore => PatchStatus::Refused,
    };
    let (least, most) = probe.bounds();
    let holds = |count: usize| (least..=most).contains(&count);
    let expected = match (least, most) {
        (_, 0) => "not to be there".to_owned(),
        (least, most) if least == most => format!("{} exactly", format_count(least)),
        (least, usize::MAX) => format!("at least {}", format_count(least)),
        (0, most) => format!("at most {}", format_count(most)),
        (least, most) => format!("{least} to {}", format_count(most)),
    };
    let mut inside = probe.container.as_ref().map(|container| format!(" in {container}")).unwrap_or_default();
    let outside = skipped_containers(set, probe, placed);
    if !outside.is_empty() {
        let names: Vec<&str> = outside.iter().map(|container| container.name.as_str()).collect();
        inside = format!(" outside of {}", names.join(", "));
    }
    let expected = format!("`{}` is expected {expected}{inside}", probe.pattern);
    let (file, found) = match reader.resolve(&probe.files, probe.container.as_ref())? {
        ResolvedPlace::Whole(file) => (file, None),
        ResolvedPlace::Containers(file, found) => match found.as_slice() {
            [one] => (file, Some(one.clone())),
            several => {
                let at: Vec<usize> = several.iter().map(|found| file.source.line(found.start)).collect();
                let text = format!("{expected}; there are {} of that, in {}", at.len(), format_lines(&at));
                return Ok(reason(PatchStatus::Refused, Some(file.path), at.first().copied(), text));
            }
        },
        ResolvedPlace::Unsure(file, line, why) => {
            return Ok(reason(
                PatchStatus::Refused,
                Some(file.path),
                Some(line),
                format!("{expected}; {why}"),
            ));
        }
        ResolvedPlace::NoFile | ResolvedPlace::NoContainer(_) if holds(0) => return Ok(None),
        ResolvedPlace::NoFile => {
            let text =
                format!("{expected}; none of its files exists: {}; {}", probe.files.join(", "), probe.why);
            return Ok(reason(failed, None, None, text));
        }
        ResolvedPlace::NoContainer(file) => {
            let hint = match &probe.container {
                Some(container) => reader.suggest_places(set, Some(&file.path), container)?,
                None => String::new(),
            };
            let text = format!("{expected}, which is not there{hint}; {}", probe.why);
            return Ok(reason(failed, Some(file.path), None, text));
        }
    };
    let code = file.source.code();
    let (start, end) = found.as_ref().map_or((0, code.len()), |found| (found.start, found.end));
    let text = code.get(start..end).unwrap_or_default();
    if let Some(finds) = probe.finds.as_ref().filter(|finds| !finds.0.is_match(code)) {
        let text = format!("it can find nothing here: `{finds}` is not in the file any more; {}", probe.why);
        return Ok(reason(failed, Some(file.path), None, text));
    }
    let mut left_out: Vec<std::ops::Range<usize>> = Vec::new();
    for container in outside {
        match file.source.find(container) {
            ContainerSearch::All(found) => left_out.extend(found.iter().map(|found| found.start..found.end)),
            ContainerSearch::Unsure { line, why } => {
                return Ok(reason(
                    PatchStatus::Refused,
                    Some(file.path),
                    Some(line),
                    format!("{expected}; {why}"),
                ));
            }
        }
    }
    let matches = probe.pattern.0.find_iter(text).map(|found| start + found.start());
    let at: Vec<usize> = matches
        .filter(|place| !left_out.iter().any(|range| range.contains(place)))
        .map(|place| file.source.line(place))
        .collect();
    if holds(at.len()) {
        return Ok(None);
    }
    let found_at = match at.len() {
        0 => "found: none".to_owned(),
        count if count > MAX_SHOWN_LINES => {
            format!("found: {count}, first in line {}", at.first().copied().unwrap_or(0))
        }
        count => format!("found: {count}, in {}", format_lines(&at)),
    };
    let line = at.last().copied().or(found.map(|found| file.source.line(found.start)));
    Ok(reason(failed, Some(file.path.clone()), line, format!("{expected}; {found_at}; {}", probe.why)))
}

fn format_count(count: usize) -> String {
    match count {
        1 => "once".to_owned(),
        2 => "twice".to_owned(),
        count => format!("{count} times"),
    }
}
