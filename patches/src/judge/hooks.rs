//! Places hooks and sidecars: exactly once, or not at all and with a reason.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use super::anchor::{self, InsertPosition};
use super::edit::{HookInsertion, insert_lines};
use super::place::{ResolvedPlace, ScannedFile, SourceReader, format_lines};
use crate::error::Result;
use crate::judgement::{FileEdit, JudgementReason, PatchStatus};
use crate::scan::{FoundContainer, MacroValue, ScannedSource, reached_errors};
use crate::set::{HookPosition, PatchSet, SetHook, SetSidecar};

/// Placed hooks of a set.
#[derive(Default)]
pub(super) struct PlacedHooks {
    set: String,
    /// Files by path, with their insertions.
    files: BTreeMap<String, (Rc<ScannedSource>, Vec<HookInsertion>)>,
    /// Path of each hook's file, placed or not.
    paths: BTreeMap<String, String>,
    /// Ids of placed hooks.
    ids: BTreeSet<String>,
}

impl PlacedHooks {
    /// Returns true if the hook is placed.
    pub(super) fn has(&self, hook: &str) -> bool {
        self.ids.contains(hook)
    }

    pub(super) fn into_edits(self) -> Vec<FileEdit> {
        let set = self.set;
        self.files
            .into_iter()
            .map(|(path, (source, insertions))| insert_lines(&set, &path, source.raw(), insertions))
            .collect()
    }
}

/// Finds the position of every hook.
pub(super) fn place_hooks(
    set: &PatchSet,
    reader: &SourceReader<'_>,
) -> Result<(PlacedHooks, Vec<JudgementReason>)> {
    let mut placed = PlacedHooks { set: set.id.clone(), ..PlacedHooks::default() };
    let mut reasons = Vec::new();
    for hook in &set.hooks {
        let refused = |file: Option<&ScannedFile>, line: Option<usize>, text: String| JudgementReason {
            status: PatchStatus::Refused,
            part: format!("hook `{}`", hook.id),
            fix: None,
            file: file.map(|file| file.path.clone()),
            line,
            text,
        };
        let (file, found) = match reader.resolve(&hook.files, hook.container.as_ref())? {
            ResolvedPlace::Whole(file) => (file, None),
            ResolvedPlace::Containers(file, found) => match found.as_slice() {
                [one] => (file, Some(one.clone())),
                several => {
                    let at: Vec<usize> = several.iter().map(|found| file.source.line(found.start)).collect();
                    let text = format!(
                        "expected once, found {} times{}, in {}",
                        at.len(),
                        container_suffix(hook),
                        format_lines(&at)
                    );
                    reasons.push(refused(Some(&file), at.first().copied(), text));
                    placed.paths.insert(hook.id.clone(), file.path);
                    continue;
                }
            },
            ResolvedPlace::NoFile => {
                let hint = match &hook.container {
                    Some(container) => reader.suggest_places(set, None, container)?,
                    None => String::new(),
                };
                let text = format!("none of its files exists: {}{hint}", hook.files.join(", "));
                reasons.push(refused(None, None, text));
                continue;
            }
            ResolvedPlace::NoContainer(_) if hook.optional => continue,
            ResolvedPlace::NoContainer(file) => {
                let hint = match &hook.container {
                    Some(container) => reader.suggest_places(set, Some(&file.path), container)?,
                    None => String::new(),
                };
                reasons.push(refused(
                    Some(&file),
                    None,
                    format!("not found{}{hint}", container_suffix(hook)),
                ));
                placed.paths.insert(hook.id.clone(), file.path);
                continue;
            }
            ResolvedPlace::Unsure(file, line, why) => {
                reasons.push(refused(Some(&file), Some(line), why));
                placed.paths.insert(hook.id.clone(), file.path);
                continue;
            }
        };
        if let (Some(when), Some(found)) = (&hook.when, &found)
            && !when.0.is_match(file.source.code().get(found.start..found.end).unwrap_or_default())
        {
            continue;
        }
        placed.paths.insert(hook.id.clone(), file.path.clone());
        if let Some(line) = find_own_marker(set, &file.source) {
            let text = format!("a line of the set `{}` is here already: take it out first", set.id);
            reasons.push(refused(Some(&file), Some(line), text));
            continue;
        }
        match hook_position(hook, &file.source, found.as_ref()) {
            Ok(spot) => {
                if let Some((line, text)) = unreviewed_conditional(set, hook, &file.source, spot) {
                    reasons.push(JudgementReason {
                        status: PatchStatus::Unverified,
                        ..refused(Some(&file), Some(line), text)
                    });
                }
                let insertion = HookInsertion {
                    offset: spot.offset,
                    after: hook.at == HookPosition::After,
                    lines: hook.insert.clone(),
                    indent: indent(&file.source, spot.adjacent),
                    end: line_end(&file.source, spot.adjacent),
                    hook: hook.id.clone(),
                };
                let entry = placed.files.entry(file.path).or_insert_with(|| (file.source, Vec::new()));
                entry.1.push(insertion);
                placed.ids.insert(hook.id.clone());
            }
            Err((line, text)) => reasons.push(refused(Some(&file), line, text)),
        }
    }
    Ok((placed, reasons))
}

/// Suffix ``: function `f` `` for a hook with a container.
fn container_suffix(hook: &SetHook) -> String {
    hook.container.as_ref().map(|container| format!(": {container}")).unwrap_or_default()
}

/// Returns the reason why it is unknown if a hook's lines are compiled: the lines are within a preprocessor
/// conditional, and no seam covers the container.
fn unreviewed_conditional(
    set: &PatchSet,
    hook: &SetHook,
    source: &ScannedSource,
    spot: InsertPosition,
) -> Option<(usize, String)> {
    let looked_at = |container| set.seams.iter().any(|seam| &seam.container == container);
    if hook.container.as_ref().is_some_and(looked_at) {
        return None;
    }
    let condition = source.conditions(spot.adjacent).last()?;
    let text = format!(
        "the line beside it is only compiled under `{condition}`, and no seam{} says that this was reviewed",
        container_suffix(hook)
    );
    Some((source.line(spot.adjacent), text))
}

/// Number of the first line with a marker of this set.
fn find_own_marker(set: &PatchSet, source: &ScannedSource) -> Option<usize> {
    source.comments().iter().find_map(|comment| {
        let text = std::str::from_utf8(source.raw().get(comment.clone())?).ok()?;
        let (of, _) = crate::marker::parse_marker(text)?;
        (of == set.id).then(|| source.line(comment.start))
    })
}

/// The unique position of a hook in a file, or a line and the reason why there is none.
fn hook_position(
    hook: &SetHook,
    source: &ScannedSource,
    found: Option<&FoundContainer>,
) -> std::result::Result<InsertPosition, (Option<usize>, String)> {
    let inside = hook.container.as_ref().map(|container| format!(" in {container}")).unwrap_or_default();
    let anchor = match (&hook.anchor, found) {
        (Some(anchor), _) => anchor,
        (None, Some(found)) => {
            let at = source.line_start(found.start);
            let line = Some(source.line(found.start));
            let lead = source.raw().get(at..found.start).unwrap_or_default();
            if lead.iter().any(|byte| !byte.is_ascii_whitespace()) {
                return Err((
                    line,
                    format!("something stands before{} on its first line", inside.replace(" in", "")),
                ));
            }
            if source.leaves_alternative(found.start, found.end) {
                let text = format!(
                    "the line before{} would only be there in one alternative of a conditional",
                    inside.replace(" in", "")
                );
                return Err((line, text));
            }
            anchor::check_is_code(source, at).map_err(|why| (line, why))?;
            return Ok(InsertPosition { offset: at, adjacent: found.start });
        }
        (None, None) => return Err((None, "it has neither container nor anchor".to_owned())),
    };
    let (start, end) = found.map_or((0, source.code().len()), |found| (found.start, found.end));
    let places = anchor::find_anchor(source, anchor, start, end);
    match places.as_slice() {
        [one] => anchor::insert_position(source, hook.at, *one, start).map_err(|why| {
            (Some(source.line(one.0)), format!("the anchor `{anchor}`{inside} is no place for a line: {why}"))
        }),
        [] => {
            let mut hints = vec![format!("the anchor `{anchor}` is expected once{inside}, found: none")];
            let mut line = found.map(|found| source.line(found.start));
            let other: Vec<usize> = anchor::find_anchor(source, anchor, 0, source.code().len())
                .into_iter()
                .map(|(at, _)| source.line(at))
                .collect();
            if let Some(at) = anchor::find_outside_of_code(source, anchor, start, end) {
                let number = source.line(at);
                hints.push(format!("in line {number} it is a comment, a string or never compiled"));
                line = Some(number);
            } else if !other.is_empty() {
                hints.push(format!("elsewhere in this file it is in {}", format_lines(&other)));
            }
            let word = longest_word(anchor);
            let mut near: Vec<usize> = anchor::find_anchor(source, word, start, end)
                .into_iter()
                .map(|(at, _)| source.line(at))
                .collect();
            near.dedup();
            if !word.is_empty() && !near.is_empty() {
                hints.push(format!("`{word}` is in {}", format_lines(&near)));
            }
            Err((line, hints.join("; ")))
        }
        several => {
            let at: Vec<usize> = several.iter().map(|(at, _)| source.line(*at)).collect();
            let text = format!(
                "the anchor `{anchor}` is expected once{inside}, found: {}, in {}: make the anchor longer, or add a hook",
                at.len(),
                format_lines(&at)
            );
            Err((at.last().copied(), text))
        }
    }
}

fn longest_word(anchor: &str) -> &str {
    let is_part = |sign: char| sign.is_ascii_alphanumeric() || sign == '_';
    anchor.split(|sign| !is_part(sign)).max_by_key(|word| word.len()).unwrap_or_default()
}

fn indent(source: &ScannedSource, beside: usize) -> Vec<u8> {
    let line = source.raw().get(source.line_start(beside)..).unwrap_or_default();
    line.iter().copied().take_while(|byte| matches!(byte, b' ' | b'\t')).collect()
}

fn line_end(source: &ScannedSource, beside: usize) -> &'static [u8] {
    let end = source.next_line(beside).unwrap_or(source.raw().len());
    let line = source.raw().get(..end).unwrap_or_default();
    if line.ends_with(b"\r\n") { b"\r\n" } else { b"\n" }
}

/// Path of a file in the same folder as another one.
pub(super) fn sibling_path(path: &str, file: &str) -> String {
    match path.rsplit_once('/') {
        Some((folder, _)) => format!("{folder}/{file}"),
        None => file.to_owned(),
    }
}

/// Places our source files next to the files of their hooks, with the macros that probes define.
pub(super) fn place_sidecars(
    set: &PatchSet,
    reader: &SourceReader<'_>,
    placed: &PlacedHooks,
    defines: &[String],
) -> Result<(Vec<FileEdit>, Vec<JudgementReason>)> {
    let mut edits = Vec::new();
    let mut reasons = Vec::new();
    for sidecar in &set.sidecars {
        // The hook has no file: the reason was reported for the hook itself.
        let Some(hook) = placed.paths.get(&sidecar.beside) else { continue };
        let path = sibling_path(hook, &sidecar.file);
        if reader.tree().read(&path)?.is_some() {
            reasons.push(JudgementReason {
                status: PatchStatus::Refused,
                part: format!("sidecar `{}`", sidecar.file),
                fix: None,
                file: Some(path),
                line: None,
                text: "a file of this name is there already".to_owned(),
            });
            continue;
        }
        reasons.extend(sidecar_errors(set, sidecar, defines));
        let after = render_sidecar(&set.id, &sidecar.content, defines);
        edits.push(FileEdit { path, before: None, after, inserted: Vec::new() });
    }
    Ok((edits, reasons))
}

/// The `#error` lines of a sidecar that a compiler would reach in this tree: reported now instead of after
/// minutes of compilation. Macros of probes are known; those of the compiler are not.
fn sidecar_errors(set: &PatchSet, sidecar: &SetSidecar, defines: &[String]) -> Vec<JudgementReason> {
    let known = |name: &str| {
        let is = |define: &String| define == name;
        if defines.iter().any(is) {
            MacroValue::Defined(1)
        } else if set.probes.iter().filter_map(|probe| probe.define.as_ref()).any(is) {
            MacroValue::Undefined
        } else {
            MacroValue::Unknown
        }
    };
    let reason = |line, said| JudgementReason {
        status: PatchStatus::Refused,
        part: format!("sidecar `{}`", sidecar.file),
        fix: None,
        file: None,
        line: None,
        text: format!("it does not compile with what the probes find here: its line {line} says: {said}"),
    };
    let source = ScannedSource::new(sidecar.content.clone());
    reached_errors(&source, &known).into_iter().map(|met| reason(met.line, met.text)).collect()
}

/// Content of a sidecar with the probes' macros.
fn render_sidecar(set: &str, content: &[u8], defines: &[String]) -> Vec<u8> {
    let defines: String = defines.iter().flat_map(|define| ["#define ", define, " 1\n"]).collect();
    let head = format!(
        "// llama-warden {set}: what its probes found in this tree\n{defines}\
         // llama-warden {set}: end of what its probes found\n"
    );
    [head.as_bytes(), content].concat()
}
