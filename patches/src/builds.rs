//! Ranges of llama.cpp builds. Each end is a text such as `b8832`; an empty text sets no limit.

pub(crate) fn parse_build(text: &str) -> Option<u32> {
    text.strip_prefix('b')?.parse().ok()
}

/// Formats a range: `b8832..b10587`, `to b8862`, `from b8832`, or empty if both ends are unknown.
pub(crate) fn format_range(first: &str, last: &str) -> String {
    match (first, last) {
        ("", "") => String::new(),
        ("", last) => format!("to {last}"),
        (first, "") => format!("from {first}"),
        (first, last) => format!("{first}..{last}"),
    }
}

pub(crate) fn in_range(build: u32, first: &str, last: &str) -> bool {
    parse_build(first).is_none_or(|first| first <= build)
        && parse_build(last).is_none_or(|last| build <= last)
}

/// Fails if a text is neither empty nor a build such as `b8832`, or if the range is empty.
pub(crate) fn check_range(first: &str, last: &str) -> Result<(), String> {
    for text in [first, last] {
        if !text.is_empty() && parse_build(text).is_none() {
            return Err(format!("`{text}` is no build like `b8832`"));
        }
    }
    match (parse_build(first), parse_build(last)) {
        (Some(first), Some(last)) if last < first => Err(format!("b{last} comes before b{first}")),
        _ => Ok(()),
    }
}
