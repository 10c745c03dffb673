//! Colours and letters that the terminal can show, and short formats. Also makes untrusted text safe: it
//! cannot move the cursor, change the direction of a line or grow without bounds. Pure.

use ratatui_core::buffer::Buffer;
use ratatui_core::style::{Color, Modifier, Style};
use ratatui_core::text::Span;
use warden_policies::ByteSize;
use warden_policies::units::ByteAmount;

/// Ordinary text. This and the following constants map a meaning to a colour of the terminal's theme.
pub(super) const PLAIN: Color = Color::Reset;
/// Inactive or unimportant text, drawn dim.
pub(super) const QUIET: Color = Color::DarkGray;
pub(super) const GOOD: Color = Color::Green;
pub(super) const BUSY: Color = Color::Cyan;
pub(super) const WARN: Color = Color::Yellow;
pub(super) const BAD: Color = Color::Red;

pub(super) const BOLD: Style = Style::new().add_modifier(Modifier::BOLD);
pub(super) const REVERSED: Style = Style::new().add_modifier(Modifier::REVERSED);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TerminalLook {
    pub(super) colour: bool,
    /// The terminal shows letters beyond ASCII.
    pub(super) unicode: bool,
}

impl TerminalLook {
    /// `NO_COLOR` switches colours off; a locale other than UTF-8 limits letters to ASCII.
    pub(super) fn from_env(variable: impl Fn(&str) -> Option<String>) -> Self {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        let locale = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().find_map(set).unwrap_or_default();
        let locale = locale.to_ascii_lowercase();
        Self {
            colour: set("NO_COLOR").is_none(),
            unicode: locale.contains("utf-8") || locale.contains("utf8"),
        }
    }

    pub(super) fn adapt_screen(self, buffer: &mut Buffer) {
        for cell in &mut buffer.content {
            match cell.fg {
                QUIET => {
                    cell.modifier.insert(Modifier::DIM);
                    cell.fg = PLAIN;
                }
                BAD => cell.modifier.insert(Modifier::BOLD),
                WARN if !self.colour => cell.modifier.insert(Modifier::BOLD),
                _ => {}
            }
            if !self.colour {
                cell.fg = PLAIN;
            }
            if !self.unicode && !cell.symbol().is_ascii() {
                let letter = cell.symbol().chars().next().unwrap_or(' ');
                cell.set_char(to_ascii(letter));
            }
        }
    }
}

const fn to_ascii(letter: char) -> char {
    match letter {
        '█' => '#',
        '░' => '.',
        '·' => '|',
        '─' | '–' | '—' => '-',
        '…' => '~',
        '°' => ' ',
        letter if letter.is_ascii() => letter,
        _ => '?',
    }
}

/// No screen shows more, and the text of an event may have any length.
const MAX_TEXT_CHARS: usize = 2000;
/// Limit of accents on one letter: thousands of them would cost more than the whole screen.
const MAX_COMBINING_MARKS: usize = 2;

/// Replaces control characters, and marks that change the direction of a line, by `?`. Limits the accents on
/// a letter.
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

/// Returns whether a character is invisible, separates lines or changes the direction of a line.
const fn is_invisible_control(letter: char) -> bool {
    let is_direction = matches!(letter, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}');
    let is_invisible =
        matches!(letter, '\u{200b}' | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}');
    is_direction || is_invisible || matches!(letter, '\u{e0000}'..='\u{e0fff}')
}

fn is_mark(letter: char) -> bool {
    !letter.is_ascii() && text_width(letter.encode_utf8(&mut [0; 4])) == 0
}

pub(super) fn text_width(text: &str) -> usize {
    Span::raw(text).width()
}

/// A shortened text ends in `~`.
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

/// Breaks lines between words if possible.
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

/// Returns sizes such as `3.0G`, `812.0M`, `900B`.
pub(super) fn short_bytes(bytes: u64) -> String {
    compact_size(&ByteSize(bytes).to_string())
}

/// Returns changes such as `+4.4M`.
pub(super) fn signed_bytes(bytes: f64) -> String {
    compact_size(&format!("{:+}", ByteAmount(bytes)))
}

fn compact_size(size: &str) -> String {
    size.replace(' ', "").replace("iB", "")
}

/// Returns rates such as `0`, `0.5`, `12.3`.
pub(super) fn short_rate(each_second: f64) -> String {
    if each_second < 0.05 { "0".to_owned() } else { format!("{each_second:.1}") }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ratatui_core::layout::Rect;

    use super::*;
    use crate::cli::status::short_age;

    #[test]
    fn the_environment_decides_on_colours_and_letters() {
        let look = |pairs: &[(&str, &str)]| {
            let found = |name: &str| {
                let pair = pairs.iter().find(|(own, _)| *own == name);
                pair.map(|(_, value)| (*value).to_owned())
            };
            let TerminalLook { colour, unicode } = TerminalLook::from_env(found);
            (colour, unicode)
        };
        assert_eq!(look(&[]), (true, false));
        assert_eq!(look(&[("LANG", "C.UTF-8"), ("NO_COLOR", "")]), (true, true));
        assert_eq!(look(&[("LANG", "de_DE.utf8"), ("NO_COLOR", "1")]), (false, true));
        assert_eq!(look(&[("LANG", "C.UTF-8"), ("LC_ALL", "C")]), (true, false));
        assert_eq!(look(&[("LC_ALL", ""), ("LC_CTYPE", "en_US.UTF-8")]), (true, true));
    }

    #[test]
    fn without_colours_what_matters_is_bold_and_without_unicode_letters_have_a_likeness() {
        let mut buffer = Buffer::empty(Rect::new(0, 0, 20, 1));
        buffer.set_string(0, 0, "3°C – 模█─…", WARN);
        TerminalLook { colour: false, unicode: false }.adapt_screen(&mut buffer);
        let shown: String = buffer.content.iter().map(ratatui_core::buffer::Cell::symbol).collect();
        assert_eq!(shown.trim_end(), "3 C - ? #-~");
        assert!(buffer.content.iter().all(|cell| (cell.fg, cell.bg) == (Color::Reset, Color::Reset)));
        assert!(buffer.content[0].modifier.contains(Modifier::BOLD));
    }

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
