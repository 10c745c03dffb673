//! A command line's words, as a shell would split them.

use crate::exit::Failure;

/// Words of a text that may go over several lines, with `\` at their ends or without, and lines of comments between them.
pub(super) fn words(text: &str, from: &str) -> Result<Vec<String>, Failure> {
    let told = text.lines().filter(|line| !line.trim_start().starts_with('#'));
    let joined: Vec<&str> = told.map(|line| line.trim_end().strip_suffix('\\').unwrap_or(line)).collect();
    shlex::split(&joined.join("\n")).ok_or_else(|| {
        Failure::usage(
            format!("{from}: {}", unfinished(text)),
            "close the quote, or write `\\'` or `\\\"` for one that belongs to the word",
        )
    })
}

/// The line in which a quote is opened and never closed.
fn unfinished(text: &str) -> String {
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
        assert_eq!(words(text, "x").unwrap(), ["llama-server", "-m", "a b.gguf", "-c", "1"]);
    }

    #[test]
    fn a_quote_that_nothing_closes_is_told_with_its_line() {
        let told = words("llama-server \\\n -m \"a", "run.sh").unwrap_err().lines();
        assert!(told[0].starts_with("error: run.sh: line 2 of the command opens a quote \""), "{told:?}");
    }
}
