//! What the command line writes: the only module that prints. Results go to standard output, all else to standard error.

use std::io::{self, IsTerminal, Write};

use warden_policies::secrets;

use crate::exit::Failure;

/// A line of a result. Flushed, because programs wait for it.
pub(crate) fn line(text: &str) -> Result<(), Failure> {
    write(&format!("{text}\n"))
}

/// Text of a result as it is.
pub(crate) fn write(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(|_| Failure::Pipe)
}

/// A result in the place of the last one: on a terminal alone on the screen, else behind it and an empty line.
pub(crate) fn picture(text: &str) -> Result<(), Failure> {
    if io::stdout().is_terminal() {
        // From the top, each line to its end, and what is left of the last picture below: no flicker.
        let lines: String = text.lines().flat_map(|line| [line, "\x1b[K\n"]).collect();
        return write(&format!("\x1b[H{lines}\x1b[J"));
    }
    write(&format!("{text}\n"))
}

/// A result for programs, without secrets: it is kept and shown to others as any other.
pub(crate) fn json(value: &impl serde::Serialize) -> Result<(), Failure> {
    let shown = serde_json::to_value(value).map(secrets::json);
    let text = shown.and_then(|shown| serde_json::to_string_pretty(&shown));
    line(&text.map_err(|error| Failure::failed(format!("cannot write the result as JSON: {error}")))?)
}

/// A line for people. If nobody reads it, nothing is lost.
pub(crate) fn error_line(text: &str) {
    let mut out = io::stderr().lock();
    drop(writeln!(out, "{text}"));
}

/// Text for people, as it is: progress on one line.
pub(crate) fn error_text(text: &str) {
    let mut out = io::stderr().lock();
    drop(out.write_all(text.as_bytes()).and_then(|()| out.flush()));
}

/// Whether a person watches standard error.
pub(crate) fn stderr_is_terminal() -> bool {
    io::stderr().is_terminal()
}

/// A table with columns as wide as their widest cell; the first row is the head.
pub(crate) fn table(rows: &[Vec<String>]) -> String {
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

/// `1 probe`, `2 probes`.
pub(crate) fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_aligned_columns_and_no_trailing_space() {
        let rows = [["MODEL", "STATE"], ["a-long-name", "loaded"], ["b", ""]];
        let rows: Vec<Vec<String>> =
            rows.iter().map(|row| row.iter().map(|&cell| cell.to_owned()).collect()).collect();
        assert_eq!(table(&rows), "MODEL        STATE\na-long-name  loaded\nb\n");
    }
}
