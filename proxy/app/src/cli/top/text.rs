//! Makes untrusted text safe for a terminal: it cannot move the cursor, change the direction of a line or
//! grow without bounds. Also short formats for sizes and rates. Pure.

use ratatui_core::text::Span;
use warden_policies::ByteSize;
use warden_policies::units::ByteAmount;

/// Maximum characters of one text: no screen shows more, and a log line may have any length.
const MAX_TEXT_CHARS: usize = 2000;
/// Maximum combining marks on one letter (accents). Thousands of them would cost more than the whole screen.
const MAX_COMBINING_MARKS: usize = 2;

/// Replaces characters that control a terminal by `?`: control characters (C0 and C1), and marks that
/// change the direction of a line. Removes zero-width characters beyond a few accents.
pub(super) fn sanitize(text: &str) -> String {
    let mut tamed = String::with_capacity(text.len().min(MAX_TEXT_CHARS));
    let mut marks = 0;
    for letter in text.chars().take(MAX_TEXT_CHARS) {
        let letter = match letter {
            '\t' => ' ',
            letter if letter.is_control() || is_invisible_control(letter) => '?',
            letter => letter,
        };
        marks = if is_mark(letter) { marks + 1 } else { 0 };
        if marks <= MAX_COMBINING_MARKS {
            tamed.push(letter);
        }
    }
    tamed
}

/// Returns whether a character changes the direction of a line, separates lines, or is invisible.
const fn is_invisible_control(letter: char) -> bool {
    matches!(letter, '\u{61c}' | '\u{200b}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}'
        | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e0fff}')
}

fn is_mark(letter: char) -> bool {
    !letter.is_ascii() && text_width(letter.encode_utf8(&mut [0; 4])) == 0
}

/// Number of columns that a text takes.
pub(super) fn text_width(text: &str) -> usize {
    Span::raw(text).width()
}

/// Cuts a text to this many columns; a shortened one ends in `~`.
pub(super) fn cut_to_width(text: &str, columns: usize) -> String {
    if text_width(text) <= columns {
        return text.to_owned();
    }
    let mut kept = String::new();
    for letter in text.chars() {
        kept.push(letter);
        if text_width(&kept) > columns.saturating_sub(1) {
            kept.pop();
            break;
        }
    }
    if columns > 0 {
        kept.push('~');
    }
    kept
}

/// Wraps a text at this many columns, at words if possible.
pub(super) fn wrap_text(text: &str, columns: usize) -> Vec<String> {
    let columns = columns.max(1);
    let mut lines = Vec::new();
    let mut line = String::new();
    for word in text.split(' ') {
        if !line.is_empty() && text_width(&line) + 1 + text_width(word) > columns {
            lines.push(std::mem::take(&mut line));
        }
        if !line.is_empty() {
            line.push(' ');
        }
        for letter in word.chars() {
            line.push(letter);
            if text_width(&line) > columns {
                line.pop();
                lines.push(std::mem::take(&mut line));
                line.push(letter);
            }
        }
    }
    lines.push(line);
    lines
}

/// Formats bytes briefly: `3.0G`, `812.0M`, `900B`.
pub(super) fn short_bytes(bytes: u64) -> String {
    compact_size(&ByteSize(bytes).to_string())
}

/// Formats a change of bytes, with a sign: `+4.4M`.
pub(super) fn signed_bytes(bytes: f64) -> String {
    compact_size(&format!("{:+}", ByteAmount(bytes)))
}

/// Removes blanks and `iB` from a size.
pub(super) fn compact_size(size: &str) -> String {
    size.replace(' ', "").replace("iB", "")
}

/// Formats a rate: `0`, `0.5`, `12.3`.
pub(super) fn short_rate(each_second: f64) -> String {
    if each_second < 0.05 { "0".to_owned() } else { format!("{each_second:.1}") }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::cli::status::short_age;

    #[test]
    fn nothing_that_a_terminal_obeys_is_left() {
        let evil = "a\x1b]0;title\x07b\x1b[2Jc\u{9b}31md\r\ne\u{202e}f\u{200b}g\th\u{7f}\u{e0041}";
        let tamed = sanitize(evil);
        assert_eq!(tamed, "a?]0;title?b?[2Jc?31md??e?f?g h??");
        assert!(tamed.chars().all(|letter| !letter.is_control()));
    }

    #[test]
    fn accents_stay_and_a_tower_of_them_does_not() {
        assert_eq!(sanitize("e\u{301}te\u{301}"), "e\u{301}te\u{301}");
        assert_eq!(
            sanitize(&format!("a{}b", "\u{301}".repeat(5000))).chars().count(),
            1 + MAX_COMBINING_MARKS
        );
        assert_eq!(sanitize(&format!("a{}b", "\u{301}".repeat(50))), "a\u{301}\u{301}b");
        assert_eq!(sanitize(&"x".repeat(9000)).len(), MAX_TEXT_CHARS);
    }

    #[test]
    fn what_is_cut_says_so_and_wide_letters_are_never_halved() {
        assert_eq!(cut_to_width("abc", 3), "abc");
        assert_eq!(cut_to_width("abcd", 3), "ab~");
        assert_eq!(cut_to_width("模型模型", 5), "模型~");
        assert_eq!(cut_to_width("模型", 1), "~");
        assert_eq!(cut_to_width("abc", 0), "");
        assert_eq!(wrap_text("one two three", 7), ["one two", "three"]);
        assert_eq!(wrap_text("abcdefgh", 3), ["abc", "def", "gh"]);
        assert_eq!(wrap_text("模型模", 4), ["模型", "模"]);
        assert_eq!(wrap_text("", 4), [""]);
    }

    #[test]
    fn numbers_take_few_letters() {
        let all = [0, 900, 1023, 1 << 20, 4_613_734, 3 << 30, 812 << 20];
        assert_eq!(all.map(short_bytes), ["0B", "900B", "1023B", "1.0M", "4.4M", "3.0G", "812.0M"]);
        assert_eq!([-4.5e6, 0.0, 4.5e6].map(signed_bytes), ["-4.3M", "+0B", "+4.3M"]);
        assert_eq!([0.0, 0.04, 0.5, 12.34, 345.6].map(short_rate), ["0", "0", "0.5", "12.3", "345.6"]);
        assert_eq!(
            [5, 125, 11_220, 439_200].map(|seconds| short_age(Duration::from_secs(seconds))),
            ["5s", "2m05s", "3h07m", "5d02h"]
        );
    }
}
