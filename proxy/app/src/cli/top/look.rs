//! How things look: colours that a terminal's own theme decides, or none, and letters that its locale can show. A colour never says
//! anything alone: the word stands beside it.

use ratatui_core::style::{Color, Modifier, Style};

/// What a thing means to whoever looks after it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Tone {
    #[default]
    Plain,
    /// Nothing to do, and nothing to see.
    Quiet,
    Good,
    /// Something happens.
    Busy,
    /// Look at it.
    Warn,
    /// It is down, or will be.
    Bad,
}

/// What the terminal can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Look {
    pub(super) colour: bool,
    /// Letters beyond ASCII.
    pub(super) unicode: bool,
}

impl Look {
    /// By the environment: `NO_COLOR` takes the colours, a locale that is not UTF-8 the letters.
    pub(super) fn of(variable: impl Fn(&str) -> Option<String>) -> Self {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        let locale = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().find_map(set).unwrap_or_default();
        let locale = locale.to_ascii_lowercase();
        Self {
            colour: set("NO_COLOR").is_none(),
            unicode: locale.contains("utf-8") || locale.contains("utf8"),
        }
    }

    pub(super) fn of_tone(self, tone: Tone) -> Style {
        let style = Style::new();
        match (tone, self.colour) {
            (Tone::Plain, _) | (Tone::Good | Tone::Busy, false) => style,
            (Tone::Quiet, _) => style.add_modifier(Modifier::DIM),
            (Tone::Good, true) => style.fg(Color::Green),
            (Tone::Busy, true) => style.fg(Color::Cyan),
            (Tone::Warn, true) => style.fg(Color::Yellow),
            (Tone::Bad, true) => style.fg(Color::Red).add_modifier(Modifier::BOLD),
            (Tone::Warn | Tone::Bad, false) => style.add_modifier(Modifier::BOLD),
        }
    }

    /// A bar across the screen: heads, and the row that is chosen.
    pub(super) const fn bar() -> Style {
        Style::new().add_modifier(Modifier::REVERSED)
    }

    pub(super) const fn strong() -> Style {
        Style::new().add_modifier(Modifier::BOLD)
    }

    /// A full and an empty place of a bar.
    pub(super) const fn filled(self) -> (&'static str, &'static str) {
        if self.unicode { ("█", "░") } else { ("#", ".") }
    }

    /// A line across, a line up, and what separates facts in a line.
    pub(super) const fn lines(self) -> (&'static str, &'static str, &'static str) {
        if self.unicode { ("─", "┊", " · ") } else { ("-", "|", ", ") }
    }

    /// A text with nothing but ASCII where nothing else can be shown.
    pub(super) fn shown(self, text: &str) -> String {
        if self.unicode || text.is_ascii() {
            return text.to_owned();
        }
        let plain = |letter: char| match letter {
            '…' => '~',
            '–' | '—' | '─' => '-',
            '°' => ' ',
            letter if letter.is_ascii() => letter,
            _ => '?',
        };
        text.chars().map(plain).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_decides_on_colours_and_letters() {
        let look = |pairs: &[(&str, &str)]| {
            let found = |name: &str| {
                let pair = pairs.iter().find(|(own, _)| *own == name);
                pair.map(|(_, value)| (*value).to_owned())
            };
            let Look { colour, unicode } = Look::of(found);
            (colour, unicode)
        };
        assert_eq!(look(&[]), (true, false));
        assert_eq!(look(&[("LANG", "C.UTF-8"), ("NO_COLOR", "")]), (true, true));
        assert_eq!(look(&[("LANG", "de_DE.utf8"), ("NO_COLOR", "1")]), (false, true));
        assert_eq!(look(&[("LANG", "C.UTF-8"), ("LC_ALL", "C")]), (true, false));
        assert_eq!(look(&[("LC_ALL", ""), ("LC_CTYPE", "en_US.UTF-8")]), (true, true));
    }

    #[test]
    fn without_colours_what_matters_is_bold_and_nothing_is_coloured() {
        let plain = Look { colour: false, unicode: true };
        for tone in [Tone::Plain, Tone::Quiet, Tone::Good, Tone::Busy, Tone::Warn, Tone::Bad] {
            assert_eq!(plain.of_tone(tone).fg, None, "{tone:?}");
        }
        assert!(plain.of_tone(Tone::Bad).add_modifier.contains(Modifier::BOLD));
        assert_eq!(Look { colour: true, unicode: false }.shown("3 °C – 模…"), "3  C - ?~");
    }
}
