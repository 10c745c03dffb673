//! Splits a command line into words, like a shell.

use crate::exit::CommandError;

/// Splits a command into words. The text may span several lines, with or without `\` at their ends, and with
/// comment lines.
pub(super) fn split_words(text: &str, from: &str) -> Result<Vec<String>, CommandError> {
    let told = text.lines().filter(|line| !line.trim_start().starts_with('#'));
    let joined: Vec<&str> = told.map(|line| line.trim_end().strip_suffix('\\').unwrap_or(line)).collect();
    let joined = joined.join("\n");
    let split = if joined.split_whitespace().any(is_windows_path) {
        windows_words(&joined)
    } else {
        shlex::split(&joined)
    };
    split.ok_or_else(|| {
        CommandError::usage(
            format!("{from}: {}", unclosed_quote_line(text)),
            "close the quote, or write `\\'` or `\\\"` for one that belongs to the word",
        )
    })
}

/// Returns whether a word contains a Windows path; in such a path, `\` is an ordinary character.
pub(super) fn is_windows_path(word: &str) -> bool {
    let bytes = word.as_bytes();
    let drive = |at: usize| {
        bytes[at].is_ascii_alphabetic()
            && bytes.get(at + 1..at + 3) == Some(b":\\")
            && at.checked_sub(1).is_none_or(|before| !bytes[before].is_ascii_alphanumeric())
    };
    (0..bytes.len()).any(drive) || (word.contains(".exe") && word.contains('\\'))
}

/// Splits like Windows: only `"` quotes, and `\` is an ordinary character, except before a `"`.
fn windows_words(text: &str) -> Option<Vec<String>> {
    let (mut words, mut word, mut quoted) = (Vec::new(), None::<String>, false);
    let mut letters = text.chars().peekable();
    while let Some(letter) = letters.next() {
        match letter {
            '\\' if letters.peek() == Some(&'"') => word.get_or_insert_default().extend(letters.next()),
            '"' => {
                quoted = !quoted;
                word.get_or_insert_default();
            }
            letter if letter.is_whitespace() && !quoted => words.extend(word.take()),
            letter => word.get_or_insert_default().push(letter),
        }
    }
    words.extend(word);
    (!quoted).then_some(words)
}

/// The line in which a quote is opened and never closed.
fn unclosed_quote_line(text: &str) -> String {
    let (mut open, mut line, mut at) = (None, 1, 1);
    let mut letters = text.chars();
    while let Some(letter) = letters.next() {
        match (letter, open) {
            ('\n', _) => line += 1,
            ('\\', None | Some('"')) => line += usize::from(letters.next() == Some('\n')),
            ('\'' | '"', None) => (open, at) = (Some(letter), line),
            (_, Some(quote)) if quote == letter => open = None,
            _ => {}
        }
    }
    match open {
        Some(quote) => format!("line {at} of the command opens a quote {quote} that nothing closes"),
        None => "the command ends within a word".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_joined_and_comments_left_out() {
        let text = "llama-server \\\n  # the model\n  -m 'a b.gguf'\n  -c 1\n";
        assert_eq!(split_words(text, "x").unwrap(), ["llama-server", "-m", "a b.gguf", "-c", "1"]);
    }

    #[test]
    fn backslashes_of_windows_paths_stay() {
        let text =
            "C:\\llama\\llama-server.exe -m \"D:\\my models\\a.gguf\" --kwargs \"{\\\"a\\\": 1}\" \\\n -c 1";
        let wanted = [
            "C:\\llama\\llama-server.exe",
            "-m",
            "D:\\my models\\a.gguf",
            "--kwargs",
            "{\"a\": 1}",
            "-c",
            "1",
        ];
        assert_eq!(split_words(text, "x").unwrap(), wanted);
        assert_eq!(split_words("llama-server -m /my\\ models/a", "x").unwrap()[2], "/my models/a");
        assert!(
            !is_windows_path("http://x/y")
                && is_windows_path("--x=c:\\y")
                && is_windows_path("bin\\llama-server.exe")
        );
    }

    #[test]
    fn a_quote_that_nothing_closes_is_told_with_its_line() {
        let told = split_words("llama-server \\\n -m \"a", "run.sh").unwrap_err().lines();
        assert!(told[0].starts_with("error: run.sh: line 2 of the command opens a quote \""), "{told:?}");
    }
}
