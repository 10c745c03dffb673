//! Name patterns: `*` matches any text, including none.

/// Returns true if a model name is a pattern.
pub fn is_pattern(name: &str) -> bool {
    name.contains('*')
}

/// Returns true if a pattern matches a name, in time at most proportional to the product of both lengths.
pub fn pattern_matches(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let (Some(head), Some(tail)) = (parts.next(), parts.next_back()) else { return pattern == name };
    let inner = name.strip_prefix(head).and_then(|rest| rest.strip_suffix(tail));
    // The first match of each part leaves the most text for later parts.
    let mut rest = inner;
    for part in parts {
        rest = rest.and_then(|rest| rest.split_once(part)).map(|(_, after)| after);
    }
    rest.is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_stands_for_any_letters_and_for_none() {
        for (pattern, name, wanted) in [
            ("*", "", true),
            ("*", "any/thing", true),
            ("claude-*", "claude-", true),
            ("claude-*", "claude", false),
            ("*-latest", "gpt-latest", true),
            ("a*a", "a", false),
            ("a*a", "aa", true),
            ("a*b*c", "a-b-b-c", true),
            ("a*b*c", "a-c-b", false),
            ("a**c", "ac", true),
            ("plain", "plain", true),
            ("plain", "plainer", false),
            ("ä*", "ä-ö", true),
        ] {
            assert_eq!(pattern_matches(pattern, name), wanted, "{pattern} {name}");
        }
        let (pattern, name) = ("a*".repeat(1000) + "b", "a".repeat(1 << 20));
        assert!(!pattern_matches(&pattern, &name));
    }
}
