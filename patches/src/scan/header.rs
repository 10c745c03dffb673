//! Classifies the text before an opening brace: head of a function, struct or namespace, or something else.

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Opens {
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
const NO_FUNCTIONS: [&str; 20] = [
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
enum Token<'a> {
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
pub(super) fn classify(head: &str) -> Opens {
    let tokens = tokens(head);
    let mut rest = tokens.as_slice();
    loop {
        rest = match rest {
            [(Token::Word("public" | "private" | "protected"), _), (Token::Colon, _), tail @ ..] => tail,
            [(Token::Word("template"), _), (Token::Other(b'<'), _), tail @ ..] => behind_angles(tail),
            _ => break,
        };
    }
    if let [(Token::Word("extern"), _), (Token::Other(b'"'), _), (Token::Other(b'"'), _)] = rest {
        return Opens::Scope { name: Vec::new() };
    }
    if let Some(place) = rest.iter().position(|(token, _)| *token == Token::Word("namespace"))
        && place <= 1
    {
        let names = rest.iter().skip(place + 1).filter_map(|(token, _)| match token {
            Token::Word(word) => Some((*word).to_owned()),
            _ => None,
        });
        return Opens::Scope { name: names.collect() };
    }
    structure(rest).or_else(|| function(rest)).unwrap_or(Opens::Other)
}

fn structure(tokens: &[(Token<'_>, usize)]) -> Option<Opens> {
    let place =
        tokens.iter().position(|(token, _)| matches!(token, Token::Word("struct" | "class" | "union")))?;
    let before = tokens.get(..place)?;
    if before.iter().any(|(token, _)| !matches!(token, Token::Word(_)) || *token == Token::Word("enum")) {
        return None;
    }
    let (_, at) = tokens.get(place)?;
    let mut name: Vec<String> = Vec::new();
    let mut scope = false;
    let mut left = tokens.get(place + 1..)?;
    loop {
        left = match left {
            [
                (Token::Word("alignas" | "__attribute__" | "__declspec" | "__align__"), _),
                (Token::Group, _),
                tail @ ..,
            ]
            | [(Token::Word("final"), _), tail @ ..] => tail,
            [(Token::Word(word), _), tail @ ..] => {
                // The last word is the name: words before it are macros.
                if !scope {
                    name.clear();
                }
                name.push((*word).to_owned());
                scope = false;
                tail
            }
            [(Token::Scope, _), tail @ ..] => {
                scope = true;
                tail
            }
            [(Token::Other(b'<'), _), tail @ ..] => behind_angles(tail),
            [] | [(Token::Colon, _), ..] => break,
            // A function that returns a struct, or a variable.
            _ => return None,
        };
    }
    // `struct a b {`, without bases: a variable with an initializer, or a macro; the last word counts.
    (!name.is_empty()).then_some(Opens::Struct { name, at: *at })
}

fn function(tokens: &[(Token<'_>, usize)]) -> Option<Opens> {
    let mut found: Option<(usize, Vec<String>, usize)> = None;
    for (place, (token, _)) in tokens.iter().enumerate() {
        match token {
            Token::Assign if found.is_none() => return None,
            Token::Group => {
                let before = tokens.get(..place)?;
                // `operator()` is a name; its parameters follow.
                let is_name = matches!(before.last(), Some((Token::Word("operator"), _)));
                if is_name && matches!(tokens.get(place + 1), Some((Token::Group, _))) {
                    continue;
                }
                let Some((name, at)) = qualified(before) else { continue };
                let last = name.last()?.as_str();
                if NO_FUNCTIONS.contains(&last) {
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
            Token::Colon if found.is_some() => break,
            _ => {}
        }
    }
    let (place, name, at) = found?;
    let tail = tokens.get(place + 1..)?;
    if let Some(colon) = tail.iter().position(|(token, _)| *token == Token::Colon) {
        let members = tail.get(colon + 1..)?;
        // `a{`, `a<b>{`: the brace belongs to the member, unless a group or a member's brace precedes it.
        if matches!(
            members.last(),
            None | Some((Token::Word(_) | Token::Other(b'>' | b',') | Token::Scope, _))
        ) {
            return Some(Opens::Member);
        }
    }
    Some(Opens::Function { name, at })
}

/// The qualified name at the end of these tokens, and its offset.
fn qualified(tokens: &[(Token<'_>, usize)]) -> Option<(Vec<String>, usize)> {
    let mut left = tokens;
    let mut name = Vec::new();
    let mut at;
    // `operator` with its symbol or type.
    if let Some(place) = left.iter().rposition(|(token, _)| *token == Token::Word("operator")) {
        let signs = left.get(place + 1..)?;
        if signs.len() <= 4 {
            let mut text = String::from("operator");
            for (token, _) in signs {
                match token {
                    Token::Word(word) => {
                        text.push(' ');
                        text.push_str(word);
                    }
                    Token::Group => text.push_str("()"),
                    Token::Assign => text.push('='),
                    Token::Tilde => text.push('~'),
                    Token::Other(byte) => text.push(char::from(*byte)),
                    Token::Colon | Token::Scope => return None,
                }
            }
            name.push(text);
            at = left.get(place)?.1;
            left = left.get(..place)?;
            return Some(qualifiers(left, name, at));
        }
    }
    // The last token may close template arguments: `name<int>(…)`.
    if let Some((Token::Other(b'>'), _)) = left.last() {
        left = before_angles(left)?;
    }
    let (Token::Word(word), place) = left.last()? else { return None };
    at = *place;
    left = left.get(..left.len() - 1)?;
    if let Some((Token::Tilde, place)) = left.last() {
        at = *place;
        left = left.get(..left.len() - 1)?;
        name.push(format!("~{word}"));
    } else {
        name.push((*word).to_owned());
    }
    Some(qualifiers(left, name, at))
}

fn qualifiers(mut left: &[(Token<'_>, usize)], mut name: Vec<String>, mut at: usize) -> (Vec<String>, usize) {
    while let [before @ .., (Token::Scope, _)] = left {
        left = match before.last() {
            Some((Token::Other(b'>'), _)) => before_angles(before).unwrap_or_default(),
            _ => before,
        };
        let [before @ .., (Token::Word(word), place)] = left else { break };
        name.push((*word).to_owned());
        at = *place;
        left = before;
    }
    name.reverse();
    (name, at)
}

/// Tokens after the `>` that matches a `<` just before these tokens.
fn behind_angles<'t, 'a>(tokens: &'t [(Token<'a>, usize)]) -> &'t [(Token<'a>, usize)] {
    let mut depth = 1usize;
    for (place, (token, _)) in tokens.iter().enumerate() {
        match token {
            Token::Other(b'<') => depth += 1,
            Token::Other(b'>') => {
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
fn before_angles<'t, 'a>(tokens: &'t [(Token<'a>, usize)]) -> Option<&'t [(Token<'a>, usize)]> {
    let mut depth = 0usize;
    for (place, (token, _)) in tokens.iter().enumerate().rev() {
        match token {
            Token::Other(b'>') => depth += 1,
            Token::Other(b'<') => {
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

fn tokens(head: &str) -> Vec<(Token<'_>, usize)> {
    let bytes = head.as_bytes();
    let mut tokens = Vec::new();
    let mut at = 0;
    while let Some(&byte) = bytes.get(at) {
        let start = at;
        at += 1;
        let token = match byte {
            _ if byte.is_ascii_whitespace() => continue,
            b'(' => {
                at = behind(bytes, start, b'(', b')');
                Token::Group
            }
            b'[' => {
                at = behind(bytes, start, b'[', b']');
                Token::Other(b'[')
            }
            // Skip a member initializer.
            b'{' => {
                at = behind(bytes, start, b'{', b'}');
                Token::Group
            }
            b':' if bytes.get(at) == Some(&b':') => {
                at += 1;
                Token::Scope
            }
            b':' => Token::Colon,
            b'~' => Token::Tilde,
            b'=' if bytes.get(at) != Some(&b'=') && !ends_operator(head, start) => Token::Assign,
            _ if super::mask::is_word(byte) => {
                while bytes.get(at).is_some_and(|byte| super::mask::is_word(*byte)) {
                    at += 1;
                }
                Token::Word(head.get(start..at).unwrap_or_default())
            }
            other => Token::Other(other),
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

fn behind(bytes: &[u8], start: usize, open: u8, close: u8) -> usize {
    let mut depth = 0usize;
    for (at, &byte) in bytes.iter().enumerate().skip(start) {
        if byte == open {
            depth += 1;
        } else if byte == close {
            depth -= 1;
            if depth == 0 {
                return at + 1;
            }
        }
    }
    bytes.len()
}

#[cfg(test)]
mod tests;
