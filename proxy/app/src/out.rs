//! Output of the command line: the only module that prints. Results go to standard output, everything else to
//! standard error.
//!
//! Names and log lines are untrusted: llama-server prints texts from model files. On a terminal, control
//! characters and marks of text direction are replaced; files and programs get the text unchanged.

use std::borrow::Cow;
use std::io::{self, IsTerminal, Write};

use warden_policies::secrets;

use crate::exit::CommandError;

/// Prints a line of a result. The output is flushed, because programs may wait for the line.
pub(crate) fn print_line(text: &str) -> Result<(), CommandError> {
    print_text(&format!("{text}\n"))
}

pub(crate) fn print_text(text: &str) -> Result<(), CommandError> {
    write_raw(&make_safe(text, io::stdout().is_terminal()))
}

fn write_raw(text: &str) -> Result<(), CommandError> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(|_| CommandError::Pipe)
}

fn make_safe(text: &str, on_terminal: bool) -> Cow<'_, str> {
    if on_terminal && text.contains(is_unsafe) {
        Cow::Owned(text.replace(is_unsafe, "?"))
    } else {
        Cow::Borrowed(text)
    }
}

/// Control characters, and characters that change the text direction, can disguise a line.
fn is_unsafe(letter: char) -> bool {
    let turns = matches!(
        letter,
        '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}'
    );
    turns || (letter.is_control() && !matches!(letter, '\n' | '\t'))
}

pub(crate) fn terminal_safe(line: &str) -> Cow<'_, str> {
    make_safe(line, true)
}

/// Replaces the last result on a terminal; elsewhere prints an empty line and this result.
pub(crate) fn refresh_screen(text: &str) -> Result<(), CommandError> {
    if io::stdout().is_terminal() {
        // Write from the top, clear each line to its end, and then the rest of the screen, to avoid flicker.
        let text = terminal_safe(text);
        let lines: String = text.lines().flat_map(|line| [line, "\x1b[K\n"]).collect();
        return write_raw(&format!("\x1b[H{lines}\x1b[J"));
    }
    print_text(&format!("{text}\n"))
}

/// Prints a result for programs. Secrets are hidden, because the output may be kept and shared.
pub(crate) fn print_json(value: &impl serde::Serialize) -> Result<(), CommandError> {
    let shown = serde_json::to_value(value).map(secrets::redact_json);
    let text = shown.and_then(|shown| serde_json::to_string_pretty(&shown));
    print_line(
        &text.map_err(|error| CommandError::failed(format!("cannot write the result as JSON: {error}")))?,
    )
}

/// Prints a line for people. Write errors are ignored, because they mean that no reader is left.
pub(crate) fn error_line(text: &str) {
    let mut out = io::stderr().lock();
    let text = make_safe(text, out.is_terminal());
    drop(writeln!(out, "{text}"));
}

/// Prints progress on one line, unchanged. Callers apply [`terminal_safe`] to foreign text.
pub(crate) fn error_text(text: &str) {
    let mut out = io::stderr().lock();
    drop(out.write_all(text.as_bytes()).and_then(|()| out.flush()));
}

pub(crate) fn stderr_is_terminal() -> bool {
    io::stderr().is_terminal()
}

pub(crate) fn table<const N: usize>(head: [&str; N], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let head = head.map(str::to_owned).to_vec();
    format_table(&std::iter::once(head).chain(rows).collect::<Vec<_>>())
}

/// Formats a table with columns as wide as their widest cell; the first row is the head.
pub(crate) fn format_table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or_default();
    let width = |column: usize| {
        rows.iter()
            .filter_map(|row| row.get(column))
            .map(|cell| cell.chars().count())
            .max()
            .unwrap_or_default()
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for row in rows {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}"));
        text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        text.push('\n');
    }
    text
}

/// Formats a count with its noun: `1 probe`, `2 probes`.
pub(crate) fn count_noun(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_shows_what_it_would_obey_and_programs_get_it_as_it_is() {
        let evil = "a\x1b]0;title\x07 \x1b[2J\u{9b}31m b\rc\u{7f}\u{202e}d\n\te é 模";
        let tamed = make_safe(evil, true);
        assert_eq!(tamed, "a?]0;title? ?[2J?31m b?c??d\n\te é 模");
        assert_eq!(make_safe(evil, false), evil);
        assert_eq!(terminal_safe("plain"), "plain");
    }

    #[test]
    fn a_table_has_aligned_columns_and_no_trailing_space() {
        let rows = [["MODEL", "STATE"], ["a-long-name", "loaded"], ["b", ""]];
        let rows: Vec<Vec<String>> =
            rows.iter().map(|row| row.iter().map(|&cell| cell.to_owned()).collect()).collect();
        assert_eq!(format_table(&rows), "MODEL        STATE\na-long-name  loaded\nb\n");
    }
}
