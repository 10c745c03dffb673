//! Functions and structs in C++ that no parser likes.
//!
//! CUDA sources are no C++ that a grammar accepts, and patched ones even less. What is needed of them is little: which
//! text is code, where a named function or struct begins and ends, and whether that is certain. So comments and strings
//! are blanked, `#if` is looked at, and braces are counted.
//!
//! A name is looked for as the end of the full name: `b` finds `a::b`, whether it is written inside of `struct a` or as
//! `a::b` outside. Declarations, calls, macros and what stands in `#if 0` are not found. Whatever cannot be told for
//! certain is an answer of its own, [`Finding::Unsure`]: nothing is guessed.

mod condition;
mod conditional;
mod container;
mod errors;
mod header;
mod mask;
pub(crate) mod normal;
#[cfg(test)]
mod tests;
mod walk;

use std::ops::Range;

pub(crate) use condition::Macro;
use walk::{Item, Walk};

pub use container::{Container, ContainerKind};
pub(crate) use errors::met;
pub(crate) use mask::BOM;

/// A source file that was looked through.
#[derive(Debug)]
pub struct Source {
    raw: Vec<u8>,
    code: String,
    comments: Vec<Range<usize>>,
    directives: Vec<Range<usize>>,
    /// As [`Source::code`], without directives, as far as braces count.
    structure: Vec<u8>,
    walks: Vec<Walk>,
    doubtful: Vec<Range<usize>>,
    broken: Option<(usize, &'static str)>,
    alternatives: Vec<conditional::Alternative>,
    /// Where each line begins.
    lines: Vec<usize>,
}

/// A container in a file: places in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The first byte of its head.
    pub start: usize,
    /// Where the name of a function, or the word `struct`, begins: what is fingerprinted begins here.
    pub name: usize,
    /// The opening brace.
    pub open: usize,
    /// Behind the closing brace.
    pub end: usize,
    /// Its full name.
    pub path: String,
}

/// The answer to a search for a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finding {
    /// All definitions, in their order; none is an answer too.
    All(Vec<Found>),
    /// Nothing certain can be said.
    Unsure {
        /// The line where that begins, from 1.
        line: usize,
        /// Why.
        why: String,
    },
}

impl Source {
    /// Looks through a file. Any bytes will do.
    pub fn new(raw: Vec<u8>) -> Self {
        let mut masked = mask::mask(&raw);
        let mut ways = conditional::ways(&mut masked);
        let walks = ways.texts.iter().map(|text| walk::walk(&String::from_utf8_lossy(text))).collect();
        let lines = std::iter::once(0).chain(memchr_lines(&raw)).collect();
        Self {
            // The mask made it ASCII.
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

    /// The file as it is.
    pub fn raw(&self) -> &[u8] {
        &self.raw
    }

    /// The file with comments, strings, what is never compiled, and lines of ours blanked. ASCII, and as long as the
    /// file.
    pub fn code(&self) -> &str {
        &self.code
    }

    /// As [`Self::code`], without preprocessor lines.
    pub(crate) fn structure(&self) -> &[u8] {
        &self.structure
    }

    /// Comments and lines of ours, in order.
    pub(crate) fn comments(&self) -> &[Range<usize>] {
        &self.comments
    }

    /// Preprocessor lines with their continuations, in order.
    pub(crate) fn directives(&self) -> &[Range<usize>] {
        &self.directives
    }

    /// Whether the first of two places is in an alternative of a conditional that ends before the second.
    pub(crate) fn leaves_alternative(&self, from: usize, to: usize) -> bool {
        let between = self.directives.iter().filter(|range| from <= range.start && range.start < to);
        conditional::leave(between.filter_map(|range| self.code.as_bytes().get(range.clone())))
    }

    /// The conditionals within which a byte stands, outer ones first: the directives that lead there, as in `#ifdef A #else`.
    /// What is always compiled, and a header's guard, are none.
    pub(crate) fn conditions(&self, at: usize) -> impl Iterator<Item = &str> {
        let around = self.alternatives.iter().filter(move |one| one.range.contains(&at));
        around.map(|one| one.condition.as_str())
    }

    /// The number of the line on which a byte stands, from 1.
    pub fn line(&self, at: usize) -> usize {
        self.lines.partition_point(|start| *start <= at)
    }

    /// Where the line of a byte begins.
    pub(crate) fn line_start(&self, at: usize) -> usize {
        self.lines.get(self.line(at).saturating_sub(1)).copied().unwrap_or(0)
    }

    /// Where the line after that of a byte begins; none for the last one without a line end.
    pub(crate) fn next_line(&self, at: usize) -> Option<usize> {
        self.lines.get(self.line(at)).copied()
    }

    /// All definitions of a container.
    pub fn find(&self, container: &Container) -> Finding {
        let unsure = |at: usize, why: &str| Finding::Unsure { line: self.line(at), why: why.to_owned() };
        if let Some((at, why)) = self.broken {
            return unsure(at, why);
        }
        let wanted: Vec<&str> = container.name.split("::").collect();
        let mut ways = self.walks.iter().map(|walk| {
            let is_meant = |item: &&Item| {
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
        Finding::All(first.into_iter().map(Self::found).collect())
    }

    /// The full names of everything of this kind.
    pub fn names(&self, kind: ContainerKind) -> impl Iterator<Item = (String, usize)> {
        let items = self.walks.first().map(|walk| walk.items.as_slice()).unwrap_or_default();
        items
            .iter()
            .filter(move |item| item.kind == kind)
            .map(|item| (item.path.join("::"), self.line(item.start)))
    }

    fn found(item: &Item) -> Found {
        Found {
            start: item.start,
            name: item.name,
            open: item.open,
            end: item.end,
            path: item.path.join("::"),
        }
    }
}

fn memchr_lines(raw: &[u8]) -> impl Iterator<Item = usize> {
    raw.iter().enumerate().filter(|(_, byte)| **byte == b'\n').map(|(at, _)| at + 1)
}

/// Whether nothing that this line opens, with a mark of ours at its end, reaches into the mark or beyond.
pub(crate) fn ends_with_mark(line: &str) -> bool {
    let masked = mask::mask(format!("{line}\nX").as_bytes());
    let whole = |comment: &Range<usize>| *comment == (0..line.len());
    masked.code.last() == Some(&b'X') && masked.comments.iter().any(whole)
}
