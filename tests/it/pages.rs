//! What commands print, as pages to be compared: without the folder of the test and without figures that differ from run to run.

use std::path::Path;

use warden_rig::home::Ran;

/// What a command said: its output, its errors behind `!`, its exit code. The home of the test is `~`.
pub(crate) fn page(home: &Path, ran: &Ran) -> String {
    let home = home.display().to_string();
    let errors = ran.stderr.lines().map(|line| format!("! {line}\n"));
    let text = format!("{}{}", ran.stdout, errors.collect::<String>()).replace(&home, "~");
    format!("{text}= {}\n", ran.code)
}

/// The text with an `N` for each number.
pub(crate) fn without_figures(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '0'..='9' if out.ends_with('N') => {}
            '0'..='9' => out.push('N'),
            other => out.push(other),
        }
    }
    out.replace("N.N", "N")
}

#[test]
fn figures_are_left_out_and_words_are_not() {
    assert_eq!(without_figures("removed b1, 12.5 MiB of 300"), "removed bN, N MiB of N");
}
