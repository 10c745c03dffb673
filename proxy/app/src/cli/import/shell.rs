//! Imports `bash -c "source FILE && exec llama-server FLAGS"`: the commands before the server become a
//! wrapper script that ends by running the server. Also splits a command line into words, like a shell.

use super::command::{ParsedCommand, parse_command};
use super::imported::is_windows_path;
use crate::exit::CommandError;

/// Accepts several lines, with or without `\` at their ends, and comment lines.
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

/// Splits like Windows: only `"` quotes words, and `\` only escapes a `"`.
fn windows_words(text: &str) -> Option<Vec<String>> {
    let mut words = Vec::new();
    let mut word = None::<String>;
    let mut quoted = false;
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

fn unclosed_quote_line(text: &str) -> String {
    let mut open = None;
    let mut line = 1;
    let mut at = 1;
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

const COMMAND_SEPARATORS: [&str; 3] = ["&&", ";", "\n"];

pub(super) fn is_operator(word: &str) -> bool {
    let redirects = word.trim_start_matches(|c: char| c.is_ascii_digit() || c == '&');
    matches!(word, "|" | "||" | "&&" | ";" | "&") || redirects.starts_with('>') && !word.contains('=')
}

/// `shell`: the program and its flag. `before`: the settings of the words before the shell.
pub(super) fn parse_shell_command(
    shell: &[&String; 2],
    script: &str,
    before: ParsedCommand,
) -> Result<ParsedCommand, String> {
    let (preamble, command) =
        split_last_command(script).ok_or("a quote in the shell's command is never closed")?;
    let words = shlex::split(command).ok_or("a quote in the shell's command is never closed")?;
    let (words, redirected) = split_redirections(words);
    let mut taken = parse_command(&words)?;
    taken.unsupported.extend(redirected.map(|words| {
        (
            format!("`{words}` of its command"),
            "what a process says is in `llama-warden logs`, and in the log with `log.children`".to_owned(),
        )
    }));
    if let Some(word) = expanded_word(command) {
        return Err(format!("the shell puts something in the place of `{word}`: write out what it is"));
    }
    let mut model = before.model;
    match (preamble, cd_target(preamble)) {
        ("", _) => {}
        (_, Some(folder)) => taken.model.command.directory = Some(folder),
        // Wrap the preamble in a function, so that its positional parameters are not the server's words.
        (preamble, None) => {
            let (lines, then) = match preamble.strip_suffix("&&") {
                Some(lines) => (lines, " &&"),
                None => (preamble.trim_end_matches(';'), ";"),
            };
            let lines = format!("prepare() {{ {}; }}; prepare{then} exec \"$@\"", lines.trim());
            model.command.wrapper.extend([shell[0].clone(), shell[1].clone(), lines, shell[0].clone()]);
        }
    }
    model.command.wrapper.append(&mut taken.model.command.wrapper);
    model.command.env.append(&mut taken.model.command.env);
    (taken.model.command.wrapper, taken.model.command.env) = (model.command.wrapper, model.command.env);
    Ok(taken)
}

/// Splits output redirections (`>> FILE 2>&1`) off the end of a command.
fn split_redirections(mut words: Vec<String>) -> (Vec<String>, Option<String>) {
    let sign = |word: &str| {
        let word = word.trim_start_matches(|c: char| c.is_ascii_digit() || c == '&');
        word.starts_with('>').then(|| word.trim_start_matches(['>', '&', '|']).to_owned())
    };
    let mut end = words.len();
    while end > 1 {
        match (sign(&words[end - 1]), sign(&words[end - 2])) {
            // The redirection and its file may be one word or two.
            (Some(file), _) if !file.is_empty() => end -= 1,
            (None, Some(file)) if file.is_empty() => end -= 2,
            _ => break,
        }
    }
    let rest = words.split_off(end);
    (words, (!rest.is_empty()).then(|| rest.join(" ")))
}

/// Returns the folder if the preamble only changes the directory.
fn cd_target(preamble: &str) -> Option<String> {
    let words = shlex::split(preamble.trim_end_matches(['&', ';', '\n', ' ']))?;
    match words.as_slice() {
        [cd, folder] if cd == "cd" && folder.starts_with('/') && expanded_word(preamble).is_none() => {
            Some(folder.clone())
        }
        _ => None,
    }
}

/// Splits a script at its last command. `None` if a quote is not closed.
fn split_last_command(script: &str) -> Option<(&str, &str)> {
    let script = script.trim().trim_end_matches(';').trim_end();
    let mut quote = None;
    let mut at = 0;
    let mut end = 0;
    while let Some(letter) = script[at..].chars().next() {
        let next = at + letter.len_utf8();
        let separator = COMMAND_SEPARATORS.iter().find(|separator| script[at..].starts_with(**separator));
        at = match (quote, letter) {
            (None | Some('"'), '\\') => next + script[next..].chars().next().map_or(0, char::len_utf8),
            (None, '\'' | '"') => {
                quote = Some(letter);
                next
            }
            (Some(open), letter) if open == letter => {
                quote = None;
                next
            }
            (None, _) if separator.is_some() => {
                end = at + separator.map_or(0, |separator| separator.len());
                end
            }
            _ => next,
        };
    }
    quote.is_none().then(|| (script[..end].trim(), script[end..].trim()))
}

/// Returns the first word that a shell would expand, such as a variable.
fn expanded_word(command: &str) -> Option<&str> {
    let mut quote = None;
    let mut escaped = false;
    for (at, letter) in command.char_indices() {
        match (quote, letter) {
            _ if escaped => escaped = false,
            (None | Some('"'), '\\') => escaped = true,
            (None, '\'' | '"') => quote = Some(letter),
            (Some(open), letter) if open == letter => quote = None,
            (None | Some('"'), '$' | '`') => return command[at..].split_whitespace().next(),
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_is_split_before_its_last_command() {
        for (script, wanted) in [
            ("exec llama-server -m a", ("", "exec llama-server -m a")),
            ("a && b > /dev/null && c 'd && e' ;", ("a && b > /dev/null &&", "c 'd && e'")),
            ("a \"x;y\"\nb", ("a \"x;y\"", "b")),
            ("a\\;b; c", ("a\\;b;", "c")),
        ] {
            assert_eq!(split_last_command(script), Some(wanted), "{script}");
        }
        assert_eq!(split_last_command("a 'b"), None);
    }

    #[test]
    fn where_output_goes_is_taken_from_the_end() {
        for (words, rest) in [
            ("a -b c >> log 2>&1", "a -b c"),
            ("a >x 2>>y", "a"),
            ("a > b | c", "a > b | c"),
            ("a", "a"),
            ("a >", "a >"),
        ] {
            let (own, _) = split_redirections(words.split(' ').map(str::to_owned).collect());
            assert_eq!(own.join(" "), rest, "{words}");
        }
    }

    #[test]
    fn what_a_shell_puts_in_is_found_outside_of_single_quotes() {
        assert_eq!(expanded_word("a -t $(nproc) b"), Some("$(nproc)"));
        assert_eq!(expanded_word("a \"$HOME/x\""), Some("$HOME/x\""));
        assert_eq!(expanded_word(r#"a '$x' \$y '{"b": 1}'"#), None);
    }

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
