//! The terminal: takes it, draws on it, and restores it, also after a panic.
//!
//! Writes only cells that differ from the previous screen, in one write. An unchanged screen costs nothing,
//! also over a slow connection.

use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use crossterm::style::{Attribute, SetAttribute};
use crossterm::terminal::{
    Clear, ClearType, DisableLineWrap, EnableLineWrap, EnterAlternateScreen, LeaveAlternateScreen,
    disable_raw_mode, enable_raw_mode,
};
use crossterm::{cursor, queue};
use ratatui_core::buffer::{Buffer, Cell};
use ratatui_core::layout::Rect;
use ratatui_core::style::{Color, Modifier};

use super::text::text_width;

/// The terminal is taken, and a panic must give it back.
static TERMINAL_TAKEN: AtomicBool = AtomicBool::new(false);

/// A taken terminal. Dropping this value gives the terminal back.
pub(super) struct TerminalScreen<W: Write> {
    out: W,
    shown: Buffer,
}

/// Takes the terminal: keys arrive unbuffered and without an echo. The terminal keeps its old content.
pub(super) fn take_terminal() -> io::Result<TerminalScreen<io::Stdout>> {
    let mut screen = TerminalScreen::new(io::stdout());
    screen.retake()?;
    Ok(screen)
}

/// Gives the terminal back before a panic is reported; otherwise the report would vanish with the screen.
pub(super) fn give_back_at_panic() {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        drop(give_back(&mut io::stdout()));
        before(info);
    }));
}

/// Returns whether the terminal is still taken; a panic in another thread gives it back.
pub(super) fn is_ours() -> bool {
    TERMINAL_TAKEN.load(Ordering::SeqCst)
}

fn give_back(out: &mut impl Write) -> io::Result<()> {
    if !TERMINAL_TAKEN.swap(false, Ordering::SeqCst) {
        return Ok(());
    }
    let written = leave(out);
    disable_raw_mode().and(written)
}

fn enter(out: &mut impl Write) -> io::Result<()> {
    queue!(out, EnterAlternateScreen, DisableLineWrap, cursor::Hide, Clear(ClearType::All))?;
    out.flush()
}

fn leave(out: &mut impl Write) -> io::Result<()> {
    queue!(out, SetAttribute(Attribute::Reset), EnableLineWrap, cursor::Show, LeaveAlternateScreen)?;
    out.flush()
}

impl TerminalScreen<io::Stdout> {
    /// Takes the terminal again.
    pub(super) fn retake(&mut self) -> io::Result<()> {
        TERMINAL_TAKEN.store(true, Ordering::SeqCst);
        enable_raw_mode()?;
        enter(&mut self.out)?;
        self.shown = Buffer::empty(Rect::ZERO);
        Ok(())
    }
}

impl<W: Write> TerminalScreen<W> {
    fn new(out: W) -> Self {
        Self { out, shown: Buffer::empty(Rect::ZERO) }
    }

    /// Gives the terminal back, for good or for a while.
    pub(super) fn give_back(&mut self) -> io::Result<()> {
        give_back(&mut self.out)
    }

    /// Forgets the shown cells, so that the whole screen is drawn again.
    pub(super) fn forget(&mut self) {
        self.shown = Buffer::empty(Rect::ZERO);
    }

    /// Draws the screen.
    pub(super) fn show(&mut self, next: &Buffer) -> io::Result<()> {
        let mut bytes = Vec::new();
        if self.shown.area() != next.area() {
            queue!(bytes, SetAttribute(Attribute::Reset), Clear(ClearType::All))?;
            self.shown = Buffer::empty(*next.area());
        }
        write_changes(&self.shown, next, &mut bytes)?;
        if !bytes.is_empty() {
            self.out.write_all(&bytes)?;
            self.out.flush()?;
        }
        self.shown.clone_from(next);
        Ok(())
    }
}

impl<W: Write> Drop for TerminalScreen<W> {
    fn drop(&mut self) {
        drop(give_back(&mut self.out));
    }
}

/// Writes the control sequences that turn one screen into the other.
fn write_changes(from: &Buffer, to: &Buffer, out: &mut Vec<u8>) -> io::Result<()> {
    let (mut style, mut place) = (None, None);
    for (x, y, cell) in from.diff(to) {
        if place != Some((x, y)) {
            queue!(out, cursor::MoveTo(x, y))?;
        }
        let now = (cell.fg, cell.modifier);
        if style != Some(now) {
            write!(out, "\x1b[{}m", sgr_parameters(cell))?;
            style = Some(now);
        }
        out.write_all(cell.symbol().as_bytes())?;
        // Set the position after a wide letter, because terminals disagree on its width.
        place = (text_width(cell.symbol()) == 1 && cell.symbol().chars().count() == 1).then_some((x + 1, y));
    }
    if style.is_some() {
        queue!(out, SetAttribute(Attribute::Reset))?;
    }
    Ok(())
}

/// `SGR` parameters of a cell: modifiers, and colours of the terminal's theme.
fn sgr_parameters(cell: &Cell) -> String {
    let modifiers = [(Modifier::BOLD, ";1"), (Modifier::DIM, ";2"), (Modifier::REVERSED, ";7")];
    let set = modifiers.iter().filter(|(modifier, _)| cell.modifier.contains(*modifier));
    let colour = match cell.fg {
        Color::Red => ";31",
        Color::Green => ";32",
        Color::Yellow => ";33",
        Color::Cyan => ";36",
        _ => "",
    };
    std::iter::once("0").chain(set.map(|(_, code)| *code)).chain([colour]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratatui_core::style::Style;

    fn buffer(lines: &[&str]) -> Buffer {
        let mut buffer = Buffer::empty(Rect::new(0, 0, 20, 3));
        for (y, line) in (0..).zip(lines) {
            buffer.set_string(0, y, line, Style::new());
        }
        buffer
    }

    fn written(from: &[&str], to: &[&str]) -> String {
        let mut out = Vec::new();
        write_changes(&buffer(from), &buffer(to), &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn only_what_differs_is_written_and_nothing_where_nothing_does() {
        assert_eq!(written(&["one", "two"], &["one", "two"]), "");
        assert_eq!(written(&["up 1m", "two"], &["up 2m", "two"]), "\x1b[1;4H\x1b[0m2\x1b[0m");
        assert!(written(&["模型 a"], &["模型 b"]).ends_with("\x1b[1;6H\x1b[0mb\x1b[0m"));
    }

    #[test]
    fn a_screen_of_another_size_is_drawn_again_and_one_without_changes_is_not() {
        let mut screen = TerminalScreen::new(Vec::new());
        screen.show(&buffer(&["one"])).unwrap();
        let first = String::from_utf8(screen.out.clone()).unwrap();
        assert!(first.contains("\x1b[2J") && first.contains("one"), "{first:?}");
        screen.out.clear();
        screen.show(&buffer(&["one"])).unwrap();
        assert!(screen.out.is_empty());
        let mut larger = buffer(&["one"]);
        larger.resize(Rect::new(0, 0, 30, 3));
        screen.show(&larger).unwrap();
        assert!(String::from_utf8_lossy(&screen.out).contains("\x1b[2J"));
    }

    #[test]
    fn what_is_taken_is_given_back_whole() {
        let (mut entered, mut left) = (Vec::new(), Vec::new());
        enter(&mut entered).unwrap();
        leave(&mut left).unwrap();
        let (entered, left) = (String::from_utf8(entered).unwrap(), String::from_utf8(left).unwrap());
        for (on, off) in
            [("\x1b[?1049h", "\x1b[?1049l"), ("\x1b[?25l", "\x1b[?25h"), ("\x1b[?7l", "\x1b[?7h")]
        {
            assert!(entered.contains(on) && left.contains(off), "{entered:?} {left:?}");
        }
    }
}
