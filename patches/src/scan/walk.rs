//! Walks the braces of a text, and names the blocks that they enclose.

use super::ContainerKind;
use super::header::{BlockKind, classify};
use super::mask::after_closing;

/// Maximum nesting of scopes; no real source has more.
const MAX_SCOPE_DEPTH: usize = 300;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ScannedItem {
    pub(super) kind: ContainerKind,
    /// Name, with the names of enclosing scopes.
    pub(super) path: Vec<String>,
    /// First byte of the item's head.
    pub(super) start: usize,
    /// Beginning of the item's name, or of the keyword `struct`.
    pub(super) name: usize,
    pub(super) open: usize,
    pub(super) end: usize,
}

#[derive(Debug, Default)]
pub(super) struct BraceWalk {
    pub(super) items: Vec<ScannedItem>,
    /// Offset of the first unbalanced brace, with a description.
    pub(super) trouble: Option<(usize, &'static str)>,
}

struct ScopeFrame {
    names: usize,
    /// Index of the item that the closing brace ends.
    item: Option<usize>,
    open: usize,
}

pub(super) fn walk_braces(text: &str) -> BraceWalk {
    let mut walker = BraceWalker { text, ..BraceWalker::default() };
    if walker.run().is_none() {
        return walker.walk;
    }
    let mut walk = walker.walk;
    if let Some(frame) = walker.frames.last() {
        walk.trouble = walk.trouble.or(Some((frame.open, UNCLOSED)));
    }
    walk.items.retain(|item| item.end > 0);
    walk
}

const UNCLOSED: &str = "nothing closes this brace";

/// Methods return `None` if the rest cannot be interpreted; [`BraceWalk::trouble`] has the reason.
#[derive(Default)]
struct BraceWalker<'a> {
    text: &'a str,
    walk: BraceWalk,
    path: Vec<String>,
    frames: Vec<ScopeFrame>,
    /// Offset where the head of the next block begins.
    head: usize,
    at: usize,
}

impl BraceWalker<'_> {
    fn run(&mut self) -> Option<()> {
        let mut parens = 0usize;
        while let Some(&byte) = self.text.as_bytes().get(self.at) {
            self.at += 1;
            match byte {
                b'(' => parens += 1,
                b')' => parens = parens.saturating_sub(1),
                b';' if parens == 0 => self.head = self.at,
                b'{' => self.open_block(parens > 0)?,
                b'}' => {
                    parens = 0;
                    self.close_scope();
                }
                _ => {}
            }
        }
        Some(())
    }

    fn open_block(&mut self, in_parens: bool) -> Option<()> {
        let open = self.at - 1;
        let head = self.text.get(self.head..open).unwrap_or_default();
        let opens = if in_parens { BlockKind::Member } else { classify(head) };
        let (kind, name, place) = match opens {
            BlockKind::Scope { name } => {
                self.push_scope(name, None, open)?;
                self.head = self.at;
                return Some(());
            }
            BlockKind::Struct { name, at } => (ContainerKind::Struct, name, at),
            BlockKind::Function { name, at } => (ContainerKind::Function, name, at),
            BlockKind::Member | BlockKind::Other => {
                self.at = self.end_of_block(open)?;
                if opens == BlockKind::Other {
                    self.head = self.at;
                }
                return Some(());
            }
        };
        let blanks = head.bytes().take_while(u8::is_ascii_whitespace).count();
        let start = skip_labels(self.text, self.head + blanks, open);
        let path = [self.path.as_slice(), &name].concat();
        let mut item = ScannedItem { kind, path, start, name: self.head + place, open, end: 0 };
        if kind == ContainerKind::Struct {
            self.push_scope(name, Some(self.walk.items.len()), open)?;
        } else {
            item.end = self.end_of_block(open)?;
            self.at = item.end;
        }
        self.walk.items.push(item);
        self.head = self.at;
        Some(())
    }

    fn push_scope(&mut self, name: Vec<String>, item: Option<usize>, open: usize) -> Option<()> {
        if self.frames.len() >= MAX_SCOPE_DEPTH {
            self.walk.trouble = Some((open, "scopes are nested too deep"));
            return None;
        }
        self.frames.push(ScopeFrame { names: name.len(), item, open });
        self.path.extend(name);
        Some(())
    }

    fn end_of_block(&mut self, open: usize) -> Option<usize> {
        let end = after_closing(self.text.as_bytes(), open, b'{', b'}');
        if end.is_none() {
            self.walk.trouble = self.walk.trouble.or(Some((open, UNCLOSED)));
        }
        end
    }

    fn close_scope(&mut self) {
        self.head = self.at;
        let Some(frame) = self.frames.pop() else {
            let trouble = (self.at - 1, "nothing opened what this brace closes");
            self.walk.trouble = self.walk.trouble.or(Some(trouble));
            return;
        };
        self.path.truncate(self.path.len() - frame.names);
        if let Some(item) = frame.item.and_then(|item| self.walk.items.get_mut(item)) {
            item.end = self.at;
        }
    }
}

fn skip_labels(text: &str, mut start: usize, end: usize) -> usize {
    loop {
        let head = text.get(start..end).unwrap_or_default();
        let label = ["public", "private", "protected"].into_iter().find_map(|label| {
            let tail = head.strip_prefix(label)?.trim_start();
            let tail = tail.strip_prefix(':').filter(|tail| !tail.starts_with(':'))?;
            Some(end - tail.trim_start().len())
        });
        match label {
            Some(behind) => start = behind,
            None => return start,
        }
    }
}
