//! Finds functions and structs in C++ without a full parser.
//!
//! CUDA sources, and patched ones even more, do not follow a plain C++ grammar. The scanner needs only the
//! code, and the beginning and end of each named function or struct. So the scanner blanks comments and
//! strings, evaluates `#if`, and counts braces.
//!
//! A name matches the end of the full name: `b` finds `a::b`, both inside `struct a` and written as `a::b`
//! outside. Declarations, calls, macros and code in `#if 0` are not found. Uncertain results are a separate
//! answer, [`ContainerSearch::Unsure`]; nothing is guessed.

mod condition;
mod conditional;
mod errors;
mod header;
mod mask;
pub(crate) mod normal;
#[cfg(test)]
mod tests;
mod walk;

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};

pub(crate) use condition::MacroValue;
use walk::{BraceWalk, ScannedItem};

pub(crate) use errors::reached_errors;
pub(crate) use mask::UTF8_BOM;

/// A named piece of a source file.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CodeContainer {
    /// Kind of container.
    pub kind: ContainerKind,
    /// Name, possibly qualified as in `A::b` or `A::~A`.
    pub name: String,
}

impl fmt::Display for CodeContainer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            ContainerKind::Function => write!(f, "function `{}`", self.name),
            ContainerKind::Struct => write!(f, "struct `{}`", self.name),
        }
    }
}

/// Kinds of C++ definition that the scanner finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ContainerKind {
    /// A function definition, from its return type to its closing brace.
    Function,
    /// A struct, class or union definition, from that keyword to its closing brace.
    Struct,
}

/// A scanned source file.
#[derive(Debug)]
pub struct ScannedSource {
    raw: Vec<u8>,
    code: String,
    comments: Vec<Range<usize>>,
    directives: Vec<Range<usize>>,
    structure: Vec<u8>,
    walks: Vec<BraceWalk>,
    doubtful: Vec<Range<usize>>,
    broken: Option<(usize, &'static str)>,
    alternatives: Vec<conditional::ConditionalAlternative>,
    lines: Vec<usize>,
}

/// A container in a file, by byte offsets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundContainer {
    /// First byte of the container's head.
    pub start: usize,
    /// Beginning of a function's name, or of the keyword `struct`; the fingerprint begins here.
    pub name: usize,
    /// Opening brace.
    pub open: usize,
    /// End: after the closing brace.
    pub end: usize,
    /// Full name.
    pub path: String,
}

/// Result of searching for a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ContainerSearch {
    /// All definitions in order; may be empty.
    All(Vec<FoundContainer>),
    /// The file cannot be scanned with certainty.
    Unsure {
        /// Line where the uncertainty begins, from 1.
        line: usize,
        /// Reason.
        why: String,
    },
}

impl ScannedSource {
    /// Scans a file with any content.
    pub fn new(raw: Vec<u8>) -> Self {
        let mut masked = mask::mask_text(&raw);
        let mut ways = conditional::find_variants(&mut masked);
        let walks = ways.texts.iter().map(|text| walk::walk_braces(&String::from_utf8_lossy(text))).collect();
        let lines = std::iter::once(0).chain(memchr::memchr_iter(b'\n', &raw).map(|at| at + 1)).collect();
        Self {
            // The masked text is ASCII.
            code: String::from_utf8_lossy(&masked.code).into_owned(),
            comments: masked.comments,
            directives: masked.directives,
            structure: ways.texts.swap_remove(0),
            walks,
            doubtful: ways.doubtful,
            broken: ways.broken,
            alternatives: ways.alternatives,
            lines,
            raw,
        }
    }

    /// Content of the file.
    pub fn raw(&self) -> &[u8] {
        &self.raw
    }

    /// The file with comments, strings, disabled code and our lines blanked. ASCII, and as long as the file.
    pub fn code(&self) -> &str {
        &self.code
    }

    pub(crate) fn structure(&self) -> &[u8] {
        &self.structure
    }

    /// Ranges of comments and of our lines, in order.
    pub(crate) fn comments(&self) -> &[Range<usize>] {
        &self.comments
    }

    pub(crate) fn directives(&self) -> &[Range<usize>] {
        &self.directives
    }

    /// Returns true if `from` is in an alternative of a conditional that ends before `to`.
    pub(crate) fn leaves_alternative(&self, from: usize, to: usize) -> bool {
        let between = self.directives.iter().filter(|range| from <= range.start && range.start < to);
        conditional::leaves_alternative(between.filter_map(|range| self.code.as_bytes().get(range.clone())))
    }

    /// Directives that select the code at `at` (`#ifdef A #else`), outer ones first; without include guards.
    pub(crate) fn conditions(&self, at: usize) -> impl Iterator<Item = &str> {
        let around = self.alternatives.iter().filter(move |one| one.range.contains(&at));
        around.map(|one| one.condition.as_str())
    }

    /// Line number of a byte, from 1.
    pub fn line(&self, at: usize) -> usize {
        self.lines.partition_point(|start| *start <= at)
    }

    pub(crate) fn line_start(&self, at: usize) -> usize {
        self.lines.get(self.line(at).saturating_sub(1)).copied().unwrap_or(0)
    }

    /// Offset of the next line; `None` in a last line without line end.
    pub(crate) fn next_line(&self, at: usize) -> Option<usize> {
        self.lines.get(self.line(at)).copied()
    }

    /// Finds all definitions of a container.
    pub fn find(&self, container: &CodeContainer) -> ContainerSearch {
        let unsure =
            |at: usize, why: &str| ContainerSearch::Unsure { line: self.line(at), why: why.to_owned() };
        if let Some((at, why)) = self.broken {
            return unsure(at, why);
        }
        let wanted: Vec<&str> = container.name.split("::").collect();
        let mut ways = self.walks.iter().map(|walk| {
            let is_meant = |item: &&ScannedItem| {
                item.kind == container.kind
                    && item.path.len() >= wanted.len()
                    && item.path.iter().rev().zip(wanted.iter().rev()).all(|(a, b)| a == b)
            };
            walk.items.iter().filter(is_meant).collect::<Vec<_>>()
        });
        let first = ways.next().unwrap_or_default();
        if ways.any(|other| other != first) {
            let at = self.doubtful.first().map_or(0, |range| range.start);
            let lines: Vec<String> = self
                .doubtful
                .iter()
                .take(4)
                .map(|range| format!("{}-{}", self.line(range.start), self.line(range.end)))
                .collect();
            return unsure(
                at,
                &format!(
                    "where {container} begins or ends depends on conditionals that open or close a brace in one \
                     alternative only (lines {})",
                    lines.join(", ")
                ),
            );
        }
        if let Some((at, why)) = self.walks.iter().find_map(|walk| walk.trouble) {
            return unsure(at, why);
        }
        let found = |item: &ScannedItem| FoundContainer {
            start: item.start,
            name: item.name,
            open: item.open,
            end: item.end,
            path: item.path.join("::"),
        };
        ContainerSearch::All(first.into_iter().map(found).collect())
    }

    /// Full names of all containers of this kind.
    pub fn names(&self, kind: ContainerKind) -> impl Iterator<Item = (String, usize)> {
        let items = self.walks.first().map(|walk| walk.items.as_slice()).unwrap_or_default();
        items
            .iter()
            .filter(move |item| item.kind == kind)
            .map(|item| (item.path.join("::"), self.line(item.start)))
    }
}

/// Returns true if a marker at the end of this line stays a comment of its own: no string or comment of the
/// line extends into it.
pub(crate) fn keeps_marker(line: &str) -> bool {
    let masked = mask::mask_text(format!("{line}\nX").as_bytes());
    let whole = |comment: &Range<usize>| *comment == (0..line.len());
    masked.code.last() == Some(&b'X') && masked.comments.iter().any(whole)
}
