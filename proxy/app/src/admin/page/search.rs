//! Word search of the page. Pure.

/// Returns whether a text contains all of `words`, ignoring case.
pub(crate) fn has_words(words: &str, text: &str) -> bool {
    let text = text.to_lowercase();
    words.split_whitespace().all(|word| text.contains(&word.to_lowercase()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_found_in_any_order_and_case() {
        assert!(has_words("", "anything") && has_words(" B  a ", "xAyb"));
        assert!(!has_words("a c", "ab"));
    }
}
