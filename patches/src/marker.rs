//! The marker comment at the end of every line that a hook inserted.

/// Prefix of every marker.
pub const MARKER_PREFIX: &str = "// llama-warden:";

/// The marker of a hook.
pub fn marker(set: &str, hook: &str) -> String {
    format!("{MARKER_PREFIX}{set}/{hook}")
}

/// Parses the marker at the end of a line into set and hook.
pub fn parse_marker(line: &str) -> Option<(&str, &str)> {
    let (_, tail) = line.rsplit_once(MARKER_PREFIX)?;
    let (set, hook) = tail.trim_end().split_once('/')?;
    (is_id(set) && is_id(hook)).then_some((set, hook))
}

/// Returns true for the id of a set, hook, mitigation or leak: `[a-z0-9-]+`.
pub(crate) fn is_id(text: &str) -> bool {
    !text.is_empty()
        && text.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_marked_line_says_which_hook_of_which_set_placed_it() {
        let line = format!("    call(); {}\r", marker("cuda-memory", "end"));
        assert_eq!(parse_marker(&line), Some(("cuda-memory", "end")));
        assert_eq!(parse_marker("    call(); // llama-warden: is good"), None);
        assert_eq!(parse_marker("    call();"), None);
    }
}
