//! Output of commands for snapshots, without the test's folder and varying figures.

use std::path::Path;

use warden_rig::home::Ran;

/// Output, errors after `!`, and exit code of a command; `~` is the home of the test.
pub(crate) fn page(home: &Path, ran: &Ran) -> String {
    let home = home.display().to_string();
    let errors = ran.stderr.lines().map(|line| format!("! {line}\n"));
    let text = format!("{}{}", ran.stdout, errors.collect::<String>()).replace(&home, "~");
    format!("{text}= {}\n", ran.code)
}

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
