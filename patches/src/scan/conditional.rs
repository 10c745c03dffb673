//! Handles `#if` and the like: finds code that is never compiled, and alternatives that leave braces open.
//!
//! If each alternative closes the braces that it opens, all are kept: both versions of a function are then
//! visible, and two matches where one is expected are refused. Alternatives that leave braces open but
//! agree on their number count once. If they disagree, like a lone `#ifdef` around half a block, the file
//! is read in several variants. Each variant takes the first, second, … alternative of every such place,
//! and only results common to all variants are trusted.

use std::ops::Range;

use super::condition;
use super::mask::{MaskedText, blank_range, join_continued, split_directive};

const MAX_VARIANTS: usize = 8;
/// Maximum nesting of conditionals; no real source has more.
const MAX_CONDITIONAL_DEPTH: usize = 200;

#[derive(Debug)]
pub(super) struct FileVariants {
    /// Text of each variant for counting braces, without directives and excluded alternatives.
    pub(super) texts: Vec<Vec<u8>>,
    /// Ranges from `#if` to `#endif` in which alternatives disagree.
    pub(super) doubtful: Vec<Range<usize>>,
    /// Offset of the first unmatched directive, with a description.
    pub(super) broken: Option<(usize, &'static str)>,
    /// Alternatives that depend on an unknown macro, outer ones first.
    pub(super) alternatives: Vec<ConditionalAlternative>,
}

/// The text between two directives of a conditional.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ConditionalAlternative {
    pub(super) range: Range<usize>,
    /// Directives that select this alternative, such as `#if A #else`.
    pub(super) condition: String,
}

#[derive(Debug)]
struct ConditionalChain {
    range: Range<usize>,
    branches: Vec<ConditionalBranch>,
    /// Every configuration takes a branch: there is an `#else`, or a condition is always true.
    has_else: bool,
}

#[derive(Debug, Default)]
struct ConditionalBranch {
    range: Range<usize>,
    chains: Vec<ConditionalChain>,
    dead: bool,
    /// Directives that select this branch; empty if the branch is always compiled.
    condition: String,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum DirectiveWord {
    /// `dead`: true if never compiled, false if always, `None` if unknown.
    If {
        dead: Option<bool>,
    },
    Elif {
        dead: Option<bool>,
    },
    Else,
    End,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct BraceEffect {
    net: isize,
    lowest: isize,
}

impl BraceEffect {
    fn of_text(text: &[u8]) -> Self {
        let mut effect = Self::default();
        for byte in text {
            match byte {
                b'{' => effect.net += 1,
                b'}' => effect.net -= 1,
                _ => continue,
            }
            effect.lowest = effect.lowest.min(effect.net);
        }
        effect
    }
}

/// Blanks code that is never compiled in `masked.code`, and finds the variants of the rest.
pub(super) fn find_variants(masked: &mut MaskedText) -> FileVariants {
    let ParsedConditionals { chains, dead, broken } = parse_conditionals(masked);
    for range in dead {
        blank_range(&mut masked.code, range);
    }
    let mut plain = masked.code.clone();
    for range in &masked.directives {
        blank_range(&mut plain, range.clone());
    }
    let mut doubtful = Vec::new();
    let mut first = plain.clone();
    select_variant(&mut first, &chains, 0, &mut doubtful);
    let mut texts = vec![first];
    let ways = doubtful.iter().map(|(_, ways)| *ways).max().unwrap_or(1).min(MAX_VARIANTS);
    for way in 1..ways {
        let mut text = plain.clone();
        select_variant(&mut text, &chains, way, &mut Vec::new());
        texts.push(text);
    }
    let doubtful = doubtful.into_iter().map(|(range, _)| range).collect();
    let mut alternatives = Vec::new();
    collect_alternatives(&chains, &mut alternatives);
    FileVariants { texts, doubtful, broken, alternatives }
}

fn collect_alternatives(chains: &[ConditionalChain], all: &mut Vec<ConditionalAlternative>) {
    for branch in chains.iter().flat_map(|chain| &chain.branches) {
        if !branch.condition.is_empty() {
            all.push(ConditionalAlternative {
                range: branch.range.clone(),
                condition: branch.condition.clone(),
            });
        }
        collect_alternatives(&branch.chains, all);
    }
}

/// Blanks the alternatives that a variant does not take. Collects doubtful chains with their number of
/// alternatives.
fn select_variant(
    text: &mut [u8],
    chains: &[ConditionalChain],
    way: usize,
    doubtful: &mut Vec<(Range<usize>, usize)>,
) {
    for chain in chains {
        let effects: Vec<BraceEffect> = chain
            .branches
            .iter()
            .filter(|branch| !branch.dead)
            .map(|branch| {
                select_variant(text, &branch.chains, way, doubtful);
                BraceEffect::of_text(text.get(branch.range.clone()).unwrap_or_default())
            })
            .collect();
        if effects.iter().all(|effect| *effect == BraceEffect::default()) {
            continue;
        }
        let agree = chain.has_else && effects.windows(2).all(|pair| pair.first() == pair.last());
        let keep = if agree {
            0
        } else {
            let ways = effects.len() + usize::from(!chain.has_else);
            doubtful.push((chain.range.clone(), ways));
            way.min(ways - 1)
        };
        for (number, branch) in chain.branches.iter().filter(|branch| !branch.dead).enumerate() {
            if number != keep {
                blank_range(text, branch.range.clone());
            }
        }
    }
}

#[derive(Default)]
struct ParsedConditionals {
    chains: Vec<ConditionalChain>,
    dead: Vec<Range<usize>>,
    broken: Option<(usize, &'static str)>,
}

struct OpenConditional {
    start: usize,
    branches: Vec<ConditionalBranch>,
    branch: ConditionalBranch,
    led: String,
    has_else: bool,
    /// An earlier branch is always compiled.
    decided: bool,
    /// An earlier branch depends on a macro.
    unsure: bool,
}

impl OpenConditional {
    /// Begins a conditional; `guard` is true for an include guard.
    fn new(directive: &Range<usize>, text: String, dead: Option<bool>, guard: bool) -> Self {
        let branch = ConditionalBranch {
            range: directive.end..directive.end,
            chains: Vec::new(),
            dead: dead == Some(true),
            condition: if dead.is_some() || guard { String::new() } else { text.clone() },
        };
        Self {
            start: directive.start,
            branches: Vec::new(),
            branch,
            led: text,
            // After a branch that is always taken, the others never are.
            has_else: dead == Some(false),
            decided: dead == Some(false),
            unsure: dead.is_none(),
        }
    }

    /// Ends the current branch before an offset; returns its range if it is never compiled.
    fn end_branch(&mut self, end: usize) -> Option<Range<usize>> {
        let mut branch = std::mem::take(&mut self.branch);
        branch.range.end = end;
        let dead = branch.dead.then(|| branch.range.clone());
        if branch.dead {
            // Conditionals inside a dead branch are irrelevant.
            branch.chains.clear();
        }
        self.branches.push(branch);
        dead
    }

    fn begin_branch(&mut self, directive: &Range<usize>, word: DirectiveWord, text: &str) {
        self.led = format!("{} {text}", self.led);
        self.branch.range = directive.end..directive.end;
        self.branch.dead = self.decided;
        let mut always = word == DirectiveWord::Else;
        if let DirectiveWord::Elif { dead } = word {
            self.branch.dead |= dead == Some(true);
            self.decided |= dead == Some(false);
            always = dead == Some(false);
        }
        self.branch.condition = if always && !self.unsure { String::new() } else { self.led.clone() };
        self.unsure |= word == DirectiveWord::Elif { dead: None };
        self.has_else |= word == DirectiveWord::Else || self.decided;
    }
}

fn parse_conditionals(masked: &MaskedText) -> ParsedConditionals {
    let mut all = ParsedConditionals::default();
    let mut open: Vec<OpenConditional> = Vec::new();
    for directive in &masked.directives {
        let text = join_continued(masked.code.get(directive.clone()).unwrap_or_default());
        let Some(word) = directive_word(&text) else { continue };
        let words = text.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty());
        let text = String::from_utf8_lossy(&words.collect::<Vec<_>>().join(&b' ')).into_owned();
        if let DirectiveWord::If { dead } = word {
            if open.len() >= MAX_CONDITIONAL_DEPTH {
                let broken = Some((directive.start, "conditionals are nested too deep"));
                return ParsedConditionals { broken, ..ParsedConditionals::default() };
            }
            open.push(OpenConditional::new(directive, text, dead, is_include_guard(masked, directive)));
            continue;
        }
        let Some(mut last) = open.pop() else {
            all.broken = all.broken.or(Some((directive.start, "there is no #if that this belongs to")));
            continue;
        };
        all.dead.extend(last.end_branch(directive.start));
        if word == DirectiveWord::End {
            let chain = ConditionalChain {
                range: last.start..directive.end,
                branches: last.branches,
                has_else: last.has_else,
            };
            open.last_mut().map_or(&mut all.chains, |outer| &mut outer.branch.chains).push(chain);
        } else {
            last.begin_branch(directive, word, &text);
            open.push(last);
        }
    }
    if let Some(last) = open.first() {
        all.broken = all.broken.or(Some((last.start, "there is no #endif for this")));
    }
    all
}

fn directive_word(directive: &[u8]) -> Option<DirectiveWord> {
    let (word, rest) = split_directive(directive)?;
    match word.as_str() {
        "if" => Some(DirectiveWord::If { dead: condition::evaluate(&rest).map(|holds| !holds) }),
        "ifdef" | "ifndef" => Some(DirectiveWord::If { dead: None }),
        "elif" => Some(DirectiveWord::Elif { dead: condition::evaluate(&rest).map(|holds| !holds) }),
        "elifdef" | "elifndef" => Some(DirectiveWord::Elif { dead: None }),
        "else" => Some(DirectiveWord::Else),
        "endif" => Some(DirectiveWord::End),
        _ => None,
    }
}

/// Returns true if these directives end the alternative in which their lines begin.
pub(super) fn leaves_alternative<'a>(directives: impl Iterator<Item = &'a [u8]>) -> bool {
    let mut depth = 0usize;
    for word in directives.filter_map(directive_word) {
        match word {
            DirectiveWord::If { .. } => depth += 1,
            _ if depth == 0 => return true,
            DirectiveWord::End => depth -= 1,
            DirectiveWord::Elif { .. } | DirectiveWord::Else => {}
        }
    }
    false
}

/// Recognizes an include guard: `#ifndef NAME` followed by `#define NAME`.
fn is_include_guard(masked: &MaskedText, directive: &Range<usize>) -> bool {
    let text = |range: &Range<usize>| join_continued(masked.code.get(range.clone()).unwrap_or_default());
    let after = |text: &[u8], word: &str| {
        let rest = text.strip_prefix(b"#")?.trim_ascii_start().strip_prefix(word.as_bytes())?;
        rest.first().is_some_and(u8::is_ascii_whitespace).then(|| rest.trim_ascii().to_vec())
    };
    let next = masked.directives.partition_point(|other| other.start <= directive.start);
    let Some(next) = masked.directives.get(next) else { return false };
    let between = masked.code.get(directive.end..next.start).unwrap_or_default();
    let name = after(&text(directive), "ifndef");
    name.is_some() && name == after(&text(next), "define") && between.trim_ascii().is_empty()
}
