//! Quotes the words of a POSIX shell's command line.

/// Quotes a word for a shell. NUL has no quoted form and is left out.
pub fn quote_word(word: &str) -> String {
    let word = word.replace('\0', "");
    match shlex::try_quote(&word) {
        Ok(quoted) => quoted.into_owned(),
        Err(_) => String::new(),
    }
}

/// Quotes the value of an assignment for a shell.
pub fn quote_assignment(name: &str, value: &str) -> String {
    format!("{name}={}", quote_word(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_quoted_is_read_as_it_was() {
        for word in ["plain-1.2/a", "a b", "it's", "$(x) `y` \\ \"z\"", "", "#", "*", "ä\nb", "!1"] {
            assert_eq!(shlex::split(&quote_word(word)), Some(vec![word.to_owned()]), "{word}");
        }
        assert_eq!(quote_word("a\0b"), "ab");
        assert_eq!(quote_assignment("A", "b c"), "A='b c'");
    }
}
