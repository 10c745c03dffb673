//! Resolves the names in a set to places in a tree; on failure, suggests similar names.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use crate::error::Result;
use crate::scan::{CodeContainer, ContainerSearch, FoundContainer, ScannedSource};
use crate::set::PatchSet;
use crate::tree::SourceTree;

/// Minimum similarity of a suggested name; 1.0 is equal.
const MIN_SIMILARITY: f64 = 0.88;
const MAX_SUGGESTIONS: usize = 3;
const MOVED_HINT: &str = "look where it went: a new file belongs into `files`, a new name into `container`";

/// Reads and scans each file once.
pub(super) struct SourceReader<'a> {
    tree: &'a dyn SourceTree,
    files: RefCell<BTreeMap<String, Option<Rc<ScannedSource>>>>,
}

#[derive(Clone)]
pub(super) struct ScannedFile {
    pub(super) path: String,
    pub(super) source: Rc<ScannedSource>,
}

pub(super) enum ResolvedPlace {
    Whole(ScannedFile),
    /// Definitions of the container, at least one.
    Containers(ScannedFile, Vec<FoundContainer>),
    NoFile,
    NoContainer(ScannedFile),
    /// The scanner is unsure from this line on, with the reason.
    Unsure(ScannedFile, usize, String),
}

impl<'a> SourceReader<'a> {
    pub(super) fn new(tree: &'a dyn SourceTree) -> Self {
        Self { tree, files: RefCell::default() }
    }

    pub(super) fn tree(&self) -> &dyn SourceTree {
        self.tree
    }

    pub(super) fn file(&self, path: &str) -> Result<Option<ScannedFile>> {
        let known = self.files.borrow().get(path).cloned();
        let source = if let Some(source) = known {
            source
        } else {
            let source = self.tree.read(path)?.map(|raw| Rc::new(ScannedSource::new(raw)));
            self.files.borrow_mut().insert(path.to_owned(), source.clone());
            source
        };
        Ok(source.map(|source| ScannedFile { path: path.to_owned(), source }))
    }

    /// Returns the first of `files` that exists, and the container in it.
    pub(super) fn resolve(
        &self,
        files: &[String],
        container: Option<&CodeContainer>,
    ) -> Result<ResolvedPlace> {
        let first = files.iter().find_map(|path| self.file(path).transpose()).transpose()?;
        let Some(file) = first else { return Ok(ResolvedPlace::NoFile) };
        let Some(container) = container else { return Ok(ResolvedPlace::Whole(file)) };
        Ok(match file.source.find(container) {
            ContainerSearch::All(found) if found.is_empty() => ResolvedPlace::NoContainer(file),
            ContainerSearch::All(found) => ResolvedPlace::Containers(file, found),
            ContainerSearch::Unsure { line, why } => ResolvedPlace::Unsure(file, line, why),
        })
    }

    /// Suggests other places of a container that is missing in `path`, as the end of a sentence.
    pub(super) fn suggest_places(
        &self,
        set: &PatchSet,
        path: Option<&str>,
        container: Option<&CodeContainer>,
    ) -> Result<String> {
        let Some(container) = container else { return Ok(String::new()) };
        // Each hint is preceded by `; `.
        let mut hints = vec![String::new()];
        for other in named_files(set) {
            if Some(other) == path {
                continue;
            }
            let Some(file) = self.file(other)? else { continue };
            if let ContainerSearch::All(found) = file.source.find(container)
                && let Some(first) = found.first()
            {
                hints.push(format!(
                    "it is in {other}:{}: name that file first",
                    file.source.line(first.start)
                ));
            }
        }
        if let Some(file) = path.map(|path| self.file(path)).transpose()?.flatten() {
            let alike = similar_names(&file.source, container);
            if !alike.is_empty() {
                hints.push(format!("similar names there: {}", alike.join(", ")));
            }
        }
        if !hints.iter().any(|hint| hint.starts_with("it is in ")) {
            hints.push(MOVED_HINT.to_owned());
        }
        Ok(hints.join("; "))
    }
}

pub(super) fn named_files(set: &PatchSet) -> BTreeSet<&str> {
    let hooks = set.hooks.iter().flat_map(|hook| &hook.files);
    let probes = set.probes.iter().flat_map(|probe| &probe.files);
    let seams = set.seams.iter().flat_map(|seam| &seam.files);
    hooks.chain(probes).chain(seams).map(String::as_str).collect()
}

fn similar_names(source: &ScannedSource, container: &CodeContainer) -> Vec<String> {
    let last = |name: &str| name.rsplit("::").next().unwrap_or(name).to_owned();
    let wanted = last(&container.name);
    let mut names: Vec<(f64, String, usize)> = source
        .names(container.kind)
        .map(|(name, line)| {
            let own = last(&name);
            let inside =
                wanted.len() > 3 && own.len() > 3 && (own.contains(&wanted) || wanted.contains(&own));
            let score = if inside { 1.0 } else { strsim::jaro_winkler(&own, &wanted) };
            (score, name, line)
        })
        .filter(|(score, ..)| *score >= MIN_SIMILARITY)
        .collect();
    names.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.2.cmp(&b.2)));
    names
        .into_iter()
        .take(MAX_SUGGESTIONS)
        .map(|(_, name, line)| format!("`{name}` in line {line}"))
        .collect()
}

/// Formats line numbers, such as `lines 3, 7 and 9`.
pub(super) fn format_lines(numbers: &[usize]) -> String {
    match numbers {
        [] => "no line".to_owned(),
        [one] => format!("line {one}"),
        [first @ .., last] => {
            let first: Vec<String> = first.iter().take(8).map(ToString::to_string).collect();
            format!("lines {} and {last}", first.join(", "))
        }
    }
}
