//! Imports `bash -c "source FILE && exec llama-server FLAGS"`: the commands before the server become a
//! wrapper script that runs the server at its end.

use super::command::{ParsedCommand, parse_command as take_command};

/// Separators of consecutive commands in a script.
const COMMAND_SEPARATORS: [&str; 3] = ["&&", ";", "\n"];

/// Returns whether only a shell can interpret this word.
pub(super) fn is_operator(word: &str) -> bool {
    let redirects = word.trim_start_matches(|c: char| c.is_ascii_digit() || c == '&');
    matches!(word, "|" | "||" | "&&" | ";" | "&") || redirects.starts_with('>') && !word.contains('=')
}

/// Parses the command of a shell. `shell` is the program and its flag, `before` the words before it.
pub(super) fn parse_shell_command(
    shell: &[&String; 2],
    script: &str,
    before: ParsedCommand,
) -> Result<ParsedCommand, String> {
    let (preamble, command) =
        split_last_command(script).ok_or("a quote in the shell's command is never closed")?;
    let words = shlex::split(command).ok_or("a quote in the shell's command is never closed")?;
    let (words, redirected) = split_redirections(words);
    let mut taken = take_command(&words)?;
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
        (_, Some(folder)) => taken.model.directory = Some(folder),
        // Wrap the preamble in a function, so that it does not see the server's words as its positional
        // parameters.
        (preamble, None) => {
            let (lines, then) = match preamble.strip_suffix("&&") {
                Some(lines) => (lines, " &&"),
                None => (preamble.trim_end_matches(';'), ";"),
            };
            let lines = format!("prepare() {{ {}; }}; prepare{then} exec \"$@\"", lines.trim());
            model.wrapper.extend([shell[0].clone(), shell[1].clone(), lines, shell[0].clone()]);
        }
    }
    model.wrapper.append(&mut taken.model.wrapper);
    model.env.append(&mut taken.model.env);
    (taken.model.wrapper, taken.model.env) = (model.wrapper, model.env);
    Ok(taken)
}

/// Splits redirections of output (`>> FILE 2>&1`) off the end of a command.
fn split_redirections(mut words: Vec<String>) -> (Vec<String>, Option<String>) {
    let sign = |word: &str| {
        let word = word.trim_start_matches(|c: char| c.is_ascii_digit() || c == '&');
        word.starts_with('>').then(|| word.trim_start_matches(['>', '&', '|']).to_owned())
    };
    let mut end = words.len();
    while end > 1 {
        match (sign(&words[end - 1]), sign(&words[end - 2])) {
            // Drop the redirection with its file, written as one word or as two.
            (Some(file), _) if !file.is_empty() => end -= 1,
            (None, Some(file)) if file.is_empty() => end -= 2,
            _ => break,
        }
    }
    let rest = words.split_off(end);
    (words, (!rest.is_empty()).then(|| rest.join(" ")))
}

/// The folder of a preamble that only changes directory.
fn cd_target(preamble: &str) -> Option<String> {
    let words = shlex::split(preamble.trim_end_matches(['&', ';', '\n', ' ']))?;
    match words.as_slice() {
        [cd, folder] if cd == "cd" && folder.starts_with('/') && expanded_word(preamble).is_none() => {
            Some(folder.clone())
        }
        _ => None,
    }
}

/// Splits a script into the part before its last command, with the separator, and that command. `None` if a
/// quote is never closed.
fn split_last_command(script: &str) -> Option<(&str, &str)> {
    let script = script.trim().trim_end_matches(';').trim_end();
    let (mut quote, mut at, mut end) = (None, 0, 0);
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

/// The first word that a shell would expand (a variable or a command).
fn expanded_word(command: &str) -> Option<&str> {
    let (mut quote, mut escaped) = (None, false);
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
}
