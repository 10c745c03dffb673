//! Classifies the text before an opening brace: head of a function, struct or namespace, or something else.

use super::mask::{after_closing, is_word_byte};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum BlockKind {
    /// The body of a function. `at`: offset of the name in the head.
    Function { name: Vec<String>, at: usize },
    /// A struct, class or union. `at`: offset of that keyword in the head.
    Struct { name: Vec<String>, at: usize },
    /// A namespace, whose name may be empty, or `extern "C"`.
    Scope { name: Vec<String> },
    /// A member initializer in a constructor's head: the head continues after it.
    Member,
    /// Anything else: an enum, an array, a lambda.
    Other,
}

/// Words before parentheses that do not hold parameters of a function definition.
const NON_FUNCTION_WORDS: [&str; 20] = [
    "if",
    "for",
    "while",
    "switch",
    "catch",
    "return",
    "sizeof",
    "alignas",
    "alignof",
    "decltype",
    "noexcept",
    "requires",
    "explicit",
    "throw",
    "static_assert",
    "__attribute__",
    "__declspec",
    "__launch_bounds__",
    "__align__",
    "asm",
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HeadToken<'a> {
    Word(&'a str),
    /// A whole parenthesized group.
    Group,
    Colon,
    Scope,
    Assign,
    Tilde,
    Other(u8),
}

/// Classifies the text between the end of the previous item and a `{`.
pub(super) fn classify(head: &str) -> BlockKind {
    let tokens = tokenize(head);
    let mut rest = tokens.as_slice();
    loop {
        rest = match rest {
            [(HeadToken::Word("public" | "private" | "protected"), _), (HeadToken::Colon, _), tail @ ..] => {
                tail
            }
            [(HeadToken::Word("template"), _), (HeadToken::Other(b'<'), _), tail @ ..] => after_angles(tail),
            _ => break,
        };
    }
    if let [(HeadToken::Word("extern"), _), (HeadToken::Other(b'"'), _), (HeadToken::Other(b'"'), _)] = rest {
        return BlockKind::Scope { name: Vec::new() };
    }
    if let Some(place) = rest.iter().position(|(token, _)| *token == HeadToken::Word("namespace"))
        && place <= 1
    {
        let names = rest.iter().skip(place + 1).filter_map(|(token, _)| match token {
            HeadToken::Word(word) => Some((*word).to_owned()),
            _ => None,
        });
        return BlockKind::Scope { name: names.collect() };
    }
    parse_struct(rest).or_else(|| parse_function(rest)).unwrap_or(BlockKind::Other)
}

fn parse_struct(tokens: &[(HeadToken<'_>, usize)]) -> Option<BlockKind> {
    let place = tokens
        .iter()
        .position(|(token, _)| matches!(token, HeadToken::Word("struct" | "class" | "union")))?;
    let before = tokens.get(..place)?;
    if before
        .iter()
        .any(|(token, _)| !matches!(token, HeadToken::Word(_)) || *token == HeadToken::Word("enum"))
    {
        return None;
    }
    let (_, at) = tokens.get(place)?;
    let mut name: Vec<String> = Vec::new();
    let mut scope = false;
    let mut left = tokens.get(place + 1..)?;
    loop {
        left = match left {
            [
                (HeadToken::Word("alignas" | "__attribute__" | "__declspec" | "__align__"), _),
                (HeadToken::Group, _),
                tail @ ..,
            ]
            | [(HeadToken::Word("final"), _), tail @ ..] => tail,
            [(HeadToken::Word(word), _), tail @ ..] => {
                // The last word is the name: words before it are macros.
                if !scope {
                    name.clear();
                }
                name.push((*word).to_owned());
                scope = false;
                tail
            }
            [(HeadToken::Scope, _), tail @ ..] => {
                scope = true;
                tail
            }
            [(HeadToken::Other(b'<'), _), tail @ ..] => after_angles(tail),
            [] | [(HeadToken::Colon, _), ..] => break,
            // No definition of a struct: a function that returns a struct, or a variable.
            _ => return None,
        };
    }
    // `struct a b {`, without bases: a variable with an initializer, or a macro; the last word counts.
    (!name.is_empty()).then_some(BlockKind::Struct { name, at: *at })
}

fn parse_function(tokens: &[(HeadToken<'_>, usize)]) -> Option<BlockKind> {
    let mut found: Option<(usize, Vec<String>, usize)> = None;
    for (place, (token, _)) in tokens.iter().enumerate() {
        match token {
            HeadToken::Assign if found.is_none() => return None,
            HeadToken::Group => {
                let before = tokens.get(..place)?;
                // `operator()` is a name; its parameters follow.
                let is_name = matches!(before.last(), Some((HeadToken::Word("operator"), _)));
                if is_name && matches!(tokens.get(place + 1), Some((HeadToken::Group, _))) {
                    continue;
                }
                let Some((name, at)) = qualified_name(before) else { continue };
                let last = name.last()?.as_str();
                if NON_FUNCTION_WORDS.contains(&last) {
                    if matches!(last, "if" | "for" | "while" | "switch" | "catch" | "return") {
                        return None;
                    }
                    continue;
                }
                // A macro with arguments before the actual head: `EXPORT(x) static void name(…)`.
                let is_macro = found.as_ref().is_some_and(|(_, name, _)| {
                    name.len() == 1
                        && name.iter().all(|word| word.bytes().all(|byte| !byte.is_ascii_lowercase()))
                });
                if found.is_none() || is_macro {
                    found = Some((place, name, at));
                }
            }
            // Member initializers follow.
            HeadToken::Colon if found.is_some() => break,
            _ => {}
        }
    }
    let (place, name, at) = found?;
    let tail = tokens.get(place + 1..)?;
    if let Some(colon) = tail.iter().position(|(token, _)| *token == HeadToken::Colon) {
        let members = tail.get(colon + 1..)?;
        // In `a{` and `a<b>{`, the brace initializes the member `a`. After a parenthesized group or a closing
        // brace, the brace opens the function's body.
        if matches!(
            members.last(),
            None | Some((HeadToken::Word(_) | HeadToken::Other(b'>' | b',') | HeadToken::Scope, _))
        ) {
            return Some(BlockKind::Member);
        }
    }
    Some(BlockKind::Function { name, at })
}

/// The qualified name at the end of these tokens, and its offset.
fn qualified_name(tokens: &[(HeadToken<'_>, usize)]) -> Option<(Vec<String>, usize)> {
    let mut left = tokens;
    let mut name = Vec::new();
    let mut at;
    // `operator` with its symbol or type.
    if let Some(place) = left.iter().rposition(|(token, _)| *token == HeadToken::Word("operator")) {
        let signs = left.get(place + 1..)?;
        if signs.len() <= 4 {
            let mut text = String::from("operator");
            for (token, _) in signs {
                match token {
                    HeadToken::Word(word) => {
                        text.push(' ');
                        text.push_str(word);
                    }
                    HeadToken::Group => text.push_str("()"),
                    HeadToken::Assign => text.push('='),
                    HeadToken::Tilde => text.push('~'),
                    HeadToken::Other(byte) => text.push(char::from(*byte)),
                    HeadToken::Colon | HeadToken::Scope => return None,
                }
            }
            name.push(text);
            at = left.get(place)?.1;
            left = left.get(..place)?;
            return Some(qualifiers(left, name, at));
        }
    }
    // The last token may close template arguments: `name<int>(…)`.
    if let Some((HeadToken::Other(b'>'), _)) = left.last() {
        left = before_angles(left)?;
    }
    let (HeadToken::Word(word), place) = left.last()? else { return None };
    at = *place;
    left = left.get(..left.len() - 1)?;
    if let Some((HeadToken::Tilde, place)) = left.last() {
        at = *place;
        left = left.get(..left.len() - 1)?;
        name.push(format!("~{word}"));
    } else {
        name.push((*word).to_owned());
    }
    Some(qualifiers(left, name, at))
}

fn qualifiers(
    mut left: &[(HeadToken<'_>, usize)],
    mut name: Vec<String>,
    mut at: usize,
) -> (Vec<String>, usize) {
    while let [before @ .., (HeadToken::Scope, _)] = left {
        left = match before.last() {
            Some((HeadToken::Other(b'>'), _)) => before_angles(before).unwrap_or_default(),
            _ => before,
        };
        let [before @ .., (HeadToken::Word(word), place)] = left else { break };
        name.push((*word).to_owned());
        at = *place;
        left = before;
    }
    name.reverse();
    (name, at)
}

/// Tokens after the `>` that matches a `<` just before these tokens.
fn after_angles<'t, 'a>(tokens: &'t [(HeadToken<'a>, usize)]) -> &'t [(HeadToken<'a>, usize)] {
    let mut depth = 1usize;
    for (place, (token, _)) in tokens.iter().enumerate() {
        match token {
            HeadToken::Other(b'<') => depth += 1,
            HeadToken::Other(b'>') => {
                depth -= 1;
                if depth == 0 {
                    return tokens.get(place + 1..).unwrap_or_default();
                }
            }
            _ => {}
        }
    }
    &[]
}

/// Tokens before the `<` that matches the `>` at the end of these tokens.
fn before_angles<'t, 'a>(tokens: &'t [(HeadToken<'a>, usize)]) -> Option<&'t [(HeadToken<'a>, usize)]> {
    let mut depth = 0usize;
    for (place, (token, _)) in tokens.iter().enumerate().rev() {
        match token {
            HeadToken::Other(b'>') => depth += 1,
            HeadToken::Other(b'<') => {
                depth -= 1;
                if depth == 0 {
                    return tokens.get(..place);
                }
            }
            _ => {}
        }
    }
    None
}

fn tokenize(head: &str) -> Vec<(HeadToken<'_>, usize)> {
    let bytes = head.as_bytes();
    let mut tokens = Vec::new();
    let mut at = 0;
    while let Some(&byte) = bytes.get(at) {
        let start = at;
        at += 1;
        let token = match byte {
            _ if byte.is_ascii_whitespace() => continue,
            b'(' => {
                at = after_closing(bytes, start, b'(', b')').unwrap_or(bytes.len());
                HeadToken::Group
            }
            b'[' => {
                at = after_closing(bytes, start, b'[', b']').unwrap_or(bytes.len());
                HeadToken::Other(b'[')
            }
            // Skip a member initializer.
            b'{' => {
                at = after_closing(bytes, start, b'{', b'}').unwrap_or(bytes.len());
                HeadToken::Group
            }
            b':' if bytes.get(at) == Some(&b':') => {
                at += 1;
                HeadToken::Scope
            }
            b':' => HeadToken::Colon,
            b'~' => HeadToken::Tilde,
            b'=' if bytes.get(at) != Some(&b'=') && !ends_operator(head, start) => HeadToken::Assign,
            _ if is_word_byte(byte) => {
                while bytes.get(at).is_some_and(|byte| is_word_byte(*byte)) {
                    at += 1;
                }
                HeadToken::Word(head.get(start..at).unwrap_or_default())
            }
            other => HeadToken::Other(other),
        };
        tokens.push((token, start));
    }
    tokens
}

/// Returns true if a `=` at this offset belongs to `operator=`, `operator==`, `operator+=` or the like.
fn ends_operator(head: &str, at: usize) -> bool {
    let before = head.get(..at).unwrap_or_default();
    before.trim_end_matches(|sign: char| "=<>!+-*/%&|^ ".contains(sign)).ends_with("operator")
}

#[cfg(test)]
mod tests;
