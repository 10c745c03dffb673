//! Checks a patched tree line by line: each inserted line has the right place.

use std::collections::BTreeMap;
use std::path::Path;

use warden_patches::marker::{MARKER_PREFIX, marker, parse_marker};
use warden_patches::scan::{ContainerSearch, FoundContainer, ScannedSource};
use warden_patches::set::HookPosition;
use warden_patches::{PatchSet, SetHook};
use warden_rig::{Context as _, Outcome, Trouble};

use super::Snapshot;

/// Defines that the probes of `cuda-memory` find in upstream's builds.
pub(super) fn cuda_defines(build: u32) -> Vec<&'static str> {
    let has = |name, condition: bool| condition.then_some(name);
    [has("LLAMA_WARDEN_HAS_GRAPH_LOCK", build >= 5717), has("LLAMA_WARDEN_HAS_NO_GRAPH_LOCK", build < 5717)]
        .into_iter()
        .flatten()
        .collect()
}

/// Checks that every line and every sidecar of a set is in its place; returns the changed files.
pub(super) fn in_place(root: &Path, set: &PatchSet, defines: &[&str]) -> Result<Vec<String>, Trouble> {
    let mut files = BTreeMap::new();
    for hook in &set.hooks {
        let path = hook.files.iter().find(|path| root.join(path).exists()).context("a file")?;
        let source = ScannedSource::new(std::fs::read(root.join(path))?);
        if one_hook(set, hook, &source).context(format!("hook {} in {path}", hook.id))? {
            files.insert(hook.id.as_str(), path.clone());
        }
    }
    assert!(set.sidecars.iter().any(|sidecar| files.contains_key(sidecar.beside.as_str())), "{files:?}");
    let mut all: Vec<String> = files.values().cloned().collect();
    for sidecar in &set.sidecars {
        // A sidecar goes in only with its hook's lines.
        let Some(beside) = files.get(sidecar.beside.as_str()) else { continue };
        let (folder, _) = beside.rsplit_once('/').context("a folder")?;
        let path = format!("{folder}/{}", sidecar.file);
        let content = std::fs::read(root.join(&path)).context(&path)?;
        let head = content.strip_suffix(sidecar.content.as_slice()).context("our text, whole, at the end")?;
        let head = std::str::from_utf8(head)?;
        let is_comment = |line: Option<&str>| line.is_some_and(|line| line.starts_with("// llama-warden "));
        assert!(is_comment(head.lines().next()) && is_comment(head.lines().next_back()), "{head}");
        let found: Vec<&str> = head
            .lines()
            .filter(|line| !is_comment(Some(line)))
            .map(|line| {
                line.strip_prefix("#define ").and_then(|rest| rest.strip_suffix(" 1")).unwrap_or(line)
            })
            .collect();
        assert_eq!(found, defines, "{path}");
        all.push(path);
    }
    Ok(all)
}

/// Returns true if the hook has lines here; fails if they are wrong.
fn one_hook(set: &PatchSet, hook: &SetHook, source: &ScannedSource) -> Result<bool, Trouble> {
    let text = String::from_utf8_lossy(source.raw()).into_owned();
    let lines: Vec<&str> = text.lines().collect();
    let mark = marker(&set.id, &hook.id);
    let at: Vec<usize> = (0..lines.len()).filter(|at| lines[*at].trim_end().ends_with(&mark)).collect();
    let container = match &hook.container {
        None => None,
        Some(container) => match source.find(container) {
            ContainerSearch::All(found) if found.is_empty() && hook.optional => {
                assert!(at.is_empty(), "{at:?}");
                return Ok(false);
            }
            ContainerSearch::All(found) => match found.as_slice() {
                [one] => Some(one.clone()),
                several => return Err(Trouble::new(format!("{container}: {} times", several.len()))),
            },
            ContainerSearch::Unsure { line, why } => return Err(Trouble::new(format!("line {line}: {why}"))),
        },
    };
    if let (Some(when), Some(found)) = (&hook.when, &container)
        && !when.0.is_match(source.code().get(found.start..found.end).unwrap_or_default())
    {
        assert!(at.is_empty(), "{at:?}");
        return Ok(false);
    }
    let placed: Vec<&str> = at.iter().map(|at| lines[*at].trim()).collect();
    let expected: Vec<String> = hook.insert.iter().map(|line| format!("{line} {mark}")).collect();
    assert_eq!(placed, expected, "each line once, in their order");
    let (first, last) = (*at.first().context("a line")?, *at.last().context("a line")?);
    assert_eq!(last - first + 1, at.len(), "one below the other");
    inside(hook, source, container.as_ref(), &lines, first, last)?;
    Ok(true)
}

/// Lines count from 0 here, and from 1 in the scanner.
fn inside(
    hook: &SetHook,
    source: &ScannedSource,
    container: Option<&FoundContainer>,
    lines: &[&str],
    first: usize,
    last: usize,
) -> Outcome {
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let has_anchor = |line: Option<&&str>| {
        let anchor = hook.anchor.as_deref().map(words).unwrap_or_default();
        line.is_some_and(|line| words(line).contains(&anchor))
    };
    let others = |line: &&&str| !line.contains(MARKER_PREFIX);
    let above = lines[..first].iter().rfind(others);
    let below = lines[last + 1..].iter().find(others);
    if let (Some(found), true) = (container, hook.at != HookPosition::BeforeContainer) {
        let (opens, closes) = (source.line(found.open) - 1, source.line(found.end - 1) - 1);
        assert!(lines[opens].contains('{') && lines[closes].trim().starts_with('}'), "{found:?}");
        assert!(opens < first && last < closes, "{opens} < {first}..={last} < {closes}");
    }
    match hook.at {
        HookPosition::BeforeContainer => {
            let found = container.context("a container")?;
            assert_eq!(last + 1, source.line(found.start) - 1, "on the line above");
            let name = &hook.container.as_ref().context("a container")?.name;
            assert!(below.is_some_and(|line| line.contains(name)), "{below:?}");
        }
        HookPosition::Before => assert!(has_anchor(below), "{below:?}"),
        HookPosition::After => assert!(has_anchor(above), "{above:?}"),
    }
    Ok(())
}

/// Checks that only hooks have inserted lines.
pub(super) fn no_other_marks(tree: &Snapshot, sets: &[PatchSet]) -> Outcome {
    for (path, (_, content)) in tree {
        for line in String::from_utf8_lossy(content).lines().filter(|line| line.contains(MARKER_PREFIX)) {
            let (set, hook) = parse_marker(line).context(format!("{path}: {line}"))?;
            let set = sets.iter().find(|one| one.id == set).context(format!("{path}: {line}"))?;
            let hook = set.hook(hook).context(format!("{path}: {line}"))?;
            assert!(hook.files.contains(path), "{path}: {line}");
        }
    }
    Ok(())
}
