//! Colours and letters that the terminal can show. Each colour only repeats what a word next to it says.

use ratatui_core::buffer::Buffer;
use ratatui_core::style::{Color, Modifier, Style};

/// Meanings of a text for an operator, each mapped to a colour of the terminal's theme.
pub(super) const PLAIN: Color = Color::Reset;
/// Inactive and unimportant; drawn dim.
pub(super) const QUIET: Color = Color::DarkGray;
pub(super) const GOOD: Color = Color::Green;
/// Activity.
pub(super) const BUSY: Color = Color::Cyan;
/// Warning.
pub(super) const WARN: Color = Color::Yellow;
/// Failure, now or soon.
pub(super) const BAD: Color = Color::Red;

pub(super) const BOLD: Style = Style::new().add_modifier(Modifier::BOLD);
pub(super) const REVERSED: Style = Style::new().add_modifier(Modifier::REVERSED);

/// Abilities of the terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TerminalLook {
    pub(super) colour: bool,
    /// Supports letters beyond ASCII.
    pub(super) unicode: bool,
}

impl TerminalLook {
    /// Reads the environment: `NO_COLOR` forbids colours, a locale that is not UTF-8 forbids letters beyond
    /// ASCII.
    pub(super) fn from_env(variable: impl Fn(&str) -> Option<String>) -> Self {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        let locale = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().find_map(set).unwrap_or_default();
        let locale = locale.to_ascii_lowercase();
        Self {
            colour: set("NO_COLOR").is_none(),
            unicode: locale.contains("utf-8") || locale.contains("utf8"),
        }
    }

    /// Replaces colours and letters that the terminal cannot show.
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
        '│' | '┊' | '·' => '|',
        '─' | '–' | '—' => '-',
        '┌' | '┐' | '└' | '┘' => '+',
        '\u{2800}'..='\u{28ff}' => '*',
        '…' => '~',
        '°' => ' ',
        letter if letter.is_ascii() => letter,
        _ => '?',
    }
}

#[cfg(test)]
mod tests {
    use ratatui_core::layout::Rect;

    use super::*;

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
        buffer.set_string(0, 0, "3°C – 模█⣀…", WARN);
        TerminalLook { colour: false, unicode: false }.adapt_screen(&mut buffer);
        let shown: String = buffer.content.iter().map(ratatui_core::buffer::Cell::symbol).collect();
        assert_eq!(shown.trim_end(), "3 C - ? #*~");
        assert!(buffer.content.iter().all(|cell| (cell.fg, cell.bg) == (Color::Reset, Color::Reset)));
        assert!(buffer.content[0].modifier.contains(Modifier::BOLD));
    }
}
