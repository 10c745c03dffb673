//! Walks the braces of a text, and names the blocks that they enclose.

use super::container::ContainerKind;
use super::header::{BlockKind, classify};

/// Maximum nesting of scopes; no real source has more.
const MAX_SCOPE_DEPTH: usize = 300;

/// A function or struct.
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
    /// End: after the closing brace.
    pub(super) end: usize,
}

#[derive(Debug, Default)]
pub(super) struct BraceWalk {
    pub(super) items: Vec<ScannedItem>,
    /// Offset of the first unbalanced brace, with a description.
    pub(super) trouble: Option<(usize, &'static str)>,
}

struct ScopeFrame {
    /// Number of names added to the path.
    names: usize,
    /// Index of the item that the closing brace ends.
    item: Option<usize>,
    open: usize,
}

pub(super) fn walk_braces(text: &str) -> BraceWalk {
    let bytes = text.as_bytes();
    let mut walk = BraceWalk::default();
    let mut path: Vec<String> = Vec::new();
    let mut frames: Vec<ScopeFrame> = Vec::new();
    let mut head = 0;
    let mut parens = 0usize;
    let mut at = 0;
    while let Some(&byte) = bytes.get(at) {
        at += 1;
        match byte {
            b'(' => parens += 1,
            b')' => parens = parens.saturating_sub(1),
            b';' if parens == 0 => head = at,
            b'{' => {
                let open = at - 1;
                let opens = if parens > 0 {
                    BlockKind::Member
                } else {
                    classify(text.get(head..open).unwrap_or_default())
                };
                let (kind, name, place) = match opens {
                    BlockKind::Scope { name } => {
                        if frames.len() >= MAX_SCOPE_DEPTH {
                            walk.trouble = Some((open, "scopes are nested too deep"));
                            return walk;
                        }
                        frames.push(ScopeFrame { names: name.len(), item: None, open });
                        path.extend(name);
                        head = at;
                        continue;
                    }
                    BlockKind::Struct { name, at } => (ContainerKind::Struct, name, at),
                    BlockKind::Function { name, at } => (ContainerKind::Function, name, at),
                    BlockKind::Member | BlockKind::Other => {
                        let Some(end) = after_closing(bytes, open) else {
                            walk.trouble = walk.trouble.or(Some((open, "nothing closes this brace")));
                            return walk;
                        };
                        at = end;
                        if opens == BlockKind::Other {
                            head = at;
                        }
                        continue;
                    }
                };
                let blanks =
                    bytes.get(head..open).unwrap_or_default().iter().take_while(|b| b.is_ascii_whitespace());
                let start = skip_labels(text, head + blanks.count(), open);
                let mut full = path.clone();
                full.extend(name.iter().cloned());
                let item = ScannedItem { kind, path: full, start, name: head + place, open, end: 0 };
                if kind == ContainerKind::Struct {
                    if frames.len() >= MAX_SCOPE_DEPTH {
                        walk.trouble = Some((open, "scopes are nested too deep"));
                        return walk;
                    }
                    frames.push(ScopeFrame { names: name.len(), item: Some(walk.items.len()), open });
                    path.extend(name);
                    walk.items.push(item);
                } else {
                    let Some(end) = after_closing(bytes, open) else {
                        walk.trouble = walk.trouble.or(Some((open, "nothing closes this brace")));
                        return walk;
                    };
                    walk.items.push(ScannedItem { end, ..item });
                    at = end;
                }
                head = at;
            }
            b'}' => {
                head = at;
                parens = 0;
                match frames.pop() {
                    Some(frame) => {
                        path.truncate(path.len() - frame.names);
                        if let Some(item) = frame.item.and_then(|item| walk.items.get_mut(item)) {
                            item.end = at;
                        }
                    }
                    None => {
                        walk.trouble =
                            walk.trouble.or(Some((at - 1, "nothing opened what this brace closes")));
                    }
                }
            }
            _ => {}
        }
    }
    if let Some(frame) = frames.last() {
        walk.trouble = walk.trouble.or(Some((frame.open, "nothing closes this brace")));
    }
    walk.items.retain(|item| item.end > 0);
    walk
}

/// Offset after the brace that closes the one at `open`.
fn after_closing(bytes: &[u8], open: usize) -> Option<usize> {
    let mut depth = 0usize;
    for (at, &byte) in bytes.iter().enumerate().skip(open) {
        match byte {
            b'{' => depth += 1,
            b'}' => {
                depth -= 1;
                if depth == 0 {
                    return Some(at + 1);
                }
            }
            _ => {}
        }
    }
    None
}

/// Skips access labels such as `public:`.
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
