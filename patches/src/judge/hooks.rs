//! Places hooks and sidecars: exactly once, or not at all and with a reason.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use super::anchor::{self, InsertPosition};
use super::place::{ResolvedPlace, ScannedFile, SourceReader, format_lines};
use crate::edits::{FileEdit, InsertedLine};
use crate::error::Result;
use crate::judgement::{JudgementReason, PatchStatus};
use crate::marker::{marker, parse_marker};
use crate::scan::{FoundContainer, MacroValue, ScannedSource, reached_errors};
use crate::set::{HookPosition, PatchSet, SetHook, SetSidecar};

#[derive(Default)]
pub(super) struct PlacedHooks {
    set: String,
    files: BTreeMap<String, (Rc<ScannedSource>, Vec<HookInsertion>)>,
    paths: BTreeMap<String, String>,
    ids: BTreeSet<String>,
}

impl PlacedHooks {
    pub(super) fn has(&self, hook: &str) -> bool {
        self.ids.contains(hook)
    }

    fn add(&mut self, hook: &SetHook, file: ScannedFile, spot: InsertPosition) {
        let insertion = HookInsertion {
            offset: spot.offset,
            after: hook.at == HookPosition::After,
            lines: hook.insert.clone(),
            indent: indent(&file.source, spot.adjacent),
            end: line_end(&file.source, spot.adjacent),
            hook: hook.id.clone(),
        };
        self.files.entry(file.path).or_insert_with(|| (file.source, Vec::new())).1.push(insertion);
        self.ids.insert(hook.id.clone());
    }

    pub(super) fn into_edits(self) -> Vec<FileEdit> {
        let set = self.set;
        self.files
            .into_iter()
            .map(|(path, (source, insertions))| insert_lines(&set, &path, source.raw(), insertions))
            .collect()
    }
}

type HookPlace = (ScannedFile, Option<FoundContainer>);

pub(super) fn place_hooks(
    set: &PatchSet,
    reader: &SourceReader<'_>,
) -> Result<(PlacedHooks, Vec<JudgementReason>)> {
    let mut placed = PlacedHooks { set: set.id.clone(), ..PlacedHooks::default() };
    let mut reasons = Vec::new();
    for hook in &set.hooks {
        let (file, found) = match find_place(set, hook, reader)? {
            Ok(Some(place)) => place,
            Ok(None) => continue,
            Err(reason) => {
                if let Some(file) = &reason.file {
                    placed.paths.insert(hook.id.clone(), file.clone());
                }
                reasons.push(reason);
                continue;
            }
        };
        placed.paths.insert(hook.id.clone(), file.path.clone());
        if let Some(line) = find_own_marker(set, &file.source) {
            let text = format!("a line of the set `{}` is here already: restore the file first", set.id);
            reasons.push(refused_hook(hook, text).at(&file.path, Some(line)));
            continue;
        }
        match hook_position(hook, &file.source, found.as_ref()) {
            Ok(spot) => {
                if let Some((line, text)) = unreviewed_conditional(set, hook, &file.source, spot) {
                    let reason = refused_hook(hook, text).at(&file.path, Some(line));
                    reasons.push(JudgementReason { status: PatchStatus::Unverified, ..reason });
                }
                placed.add(hook, file, spot);
            }
            Err((line, text)) => reasons.push(refused_hook(hook, text).at(&file.path, line)),
        }
    }
    Ok((placed, reasons))
}

fn refused_hook(hook: &SetHook, text: String) -> JudgementReason {
    JudgementReason::new(PatchStatus::Refused, format!("hook `{}`", hook.id), text)
}

/// Finds a hook's file and container; `None` if the tree does not need the hook. The inner error is the
/// reason why there is no unique place.
fn find_place(
    set: &PatchSet,
    hook: &SetHook,
    reader: &SourceReader<'_>,
) -> Result<std::result::Result<Option<HookPlace>, JudgementReason>> {
    let (file, found) = match reader.resolve(&hook.files, hook.container.as_ref())? {
        ResolvedPlace::Whole(file) => (file, None),
        ResolvedPlace::Containers(file, found) => match found.as_slice() {
            [one] => (file, Some(one.clone())),
            several => {
                let at: Vec<usize> = several.iter().map(|found| file.source.line(found.start)).collect();
                let (count, suffix, lines) = (at.len(), container_suffix(hook), format_lines(&at));
                let text = format!("expected once, found {count} times{suffix}, in {lines}");
                return Ok(Err(refused_hook(hook, text).at(&file.path, at.first().copied())));
            }
        },
        ResolvedPlace::NoFile => {
            let hint = reader.suggest_places(set, None, hook.container.as_ref())?;
            let text = format!("none of its files exists: {}{hint}", hook.files.join(", "));
            return Ok(Err(refused_hook(hook, text)));
        }
        ResolvedPlace::NoContainer(_) if hook.optional => return Ok(Ok(None)),
        ResolvedPlace::NoContainer(file) => {
            let hint = reader.suggest_places(set, Some(&file.path), hook.container.as_ref())?;
            let text = format!("not found{}{hint}", container_suffix(hook));
            return Ok(Err(refused_hook(hook, text).at(&file.path, None)));
        }
        ResolvedPlace::Unsure(file, line, why) => {
            return Ok(Err(refused_hook(hook, why).at(&file.path, Some(line))));
        }
    };
    let is_needed = match (&hook.when, &found) {
        (Some(when), Some(found)) => {
            when.0.is_match(file.source.code().get(found.start..found.end).unwrap_or_default())
        }
        _ => true,
    };
    Ok(Ok(is_needed.then_some((file, found))))
}

fn container_suffix(hook: &SetHook) -> String {
    hook.container.as_ref().map(|container| format!(": {container}")).unwrap_or_default()
}

/// Returns line and reason if a hook's lines are within a preprocessor conditional, and thus may not be
/// compiled, and no seam shows that the container was reviewed.
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

fn find_own_marker(set: &PatchSet, source: &ScannedSource) -> Option<usize> {
    source.comments().iter().find_map(|comment| {
        let text = std::str::from_utf8(source.raw().get(comment.clone())?).ok()?;
        let (of, _) = parse_marker(text)?;
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
                "the anchor `{anchor}` is expected once{inside}, found: {}, in {}: make the anchor longer, or \
                 add a hook",
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
            let text = "a file of this name is there already: remove it first".to_owned();
            reasons.push(refused_sidecar(sidecar, text).at(&path, None));
            continue;
        }
        reasons.extend(sidecar_errors(set, sidecar, defines));
        let after = render_sidecar(&set.id, &sidecar.content, defines);
        edits.push(FileEdit { path, before: None, after, inserted: Vec::new() });
    }
    Ok((edits, reasons))
}

/// The `#error` lines that a compiler would reach, reported before minutes of compilation. Macros of probes
/// are known; those of the compiler are not.
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
    let reason = |line, said| {
        let text =
            format!("it does not compile with what the probes find here: its line {line} says: {said}");
        refused_sidecar(sidecar, text)
    };
    let source = ScannedSource::new(sidecar.content.clone());
    reached_errors(&source, &known).into_iter().map(|met| reason(met.line, met.text)).collect()
}

fn refused_sidecar(sidecar: &SetSidecar, text: String) -> JudgementReason {
    JudgementReason::new(PatchStatus::Refused, format!("sidecar `{}`", sidecar.file), text)
}

fn render_sidecar(set: &str, content: &[u8], defines: &[String]) -> Vec<u8> {
    let defines: String = defines.iter().flat_map(|define| ["#define ", define, " 1\n"]).collect();
    let head = format!(
        "// llama-warden {set}: what its probes found in this tree\n{defines}\
         // llama-warden {set}: end of what its probes found\n"
    );
    [head.as_bytes(), content].concat()
}

#[derive(Clone, Debug)]
struct HookInsertion {
    /// Offset in the unchanged file: the beginning of a line.
    offset: usize,
    /// Belongs to the line above; precedes insertions at the same offset that belong to the line below.
    after: bool,
    lines: Vec<String>,
    indent: Vec<u8>,
    end: &'static [u8],
    hook: String,
}

/// The file with all insertions; those at the same position keep the order of the set.
fn insert_lines(set: &str, path: &str, raw: &[u8], mut insertions: Vec<HookInsertion>) -> FileEdit {
    insertions.sort_by_key(|insertion| (insertion.offset, !insertion.after));
    let mut after = Vec::with_capacity(raw.len() + 256 * insertions.len());
    let mut inserted = Vec::new();
    let mut line = 1;
    let mut done = 0;
    for insertion in insertions {
        let kept = raw.get(done..insertion.offset).unwrap_or_default();
        line += kept.split(|byte| *byte == b'\n').count() - 1;
        after.extend_from_slice(kept);
        done = insertion.offset;
        for text in &insertion.lines {
            let text = format!(
                "{}{text} {}",
                String::from_utf8_lossy(&insertion.indent),
                marker(set, &insertion.hook)
            );
            after.extend_from_slice(text.as_bytes());
            after.extend_from_slice(insertion.end);
            inserted.push(InsertedLine { line, text, hook: insertion.hook.clone() });
            line += 1;
        }
    }
    after.extend_from_slice(raw.get(done..).unwrap_or_default());
    FileEdit { path: path.to_owned(), before: Some(raw.to_vec()), after, inserted }
}
