//! The terminal: taken, drawn on, and given back as it was, however this ends.
//!
//! Only cells that differ from the screen before are written, in one piece, and nothing where none does: over a slow line a screen
//! that stands still costs nothing.

use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use crossterm::style::{
    Attribute, Color as Ink, Print, SetAttribute, SetBackgroundColor, SetForegroundColor,
};
use crossterm::terminal::{
    Clear, ClearType, DisableLineWrap, EnableLineWrap, EnterAlternateScreen, LeaveAlternateScreen,
    disable_raw_mode, enable_raw_mode,
};
use crossterm::{cursor, queue};
use ratatui_core::buffer::{Buffer, Cell};
use ratatui_core::layout::Rect;
use ratatui_core::style::{Color, Modifier};

/// Whether the terminal is ours now, so that a panic knows whether to give it back.
static TAKEN: AtomicBool = AtomicBool::new(false);

/// The terminal while it is ours. Dropping it gives it back.
pub(super) struct Screen<W: Write> {
    out: W,
    shown: Buffer,
}

/// Takes the terminal: keys come one by one and unseen, and what was on it waits behind ours.
///
/// # Errors
/// It is gone, or cannot be set.
pub(super) fn take() -> io::Result<Screen<io::Stdout>> {
    let mut screen = Screen::on(io::stdout());
    screen.retake()?;
    Ok(screen)
}

/// Before what a panic says: else it is said on a screen that is taken away with it.
pub(super) fn give_back_at_panic() {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        drop(give_back(&mut io::stdout()));
        before(info);
    }));
}

/// Whether it is ours still: a panic beside us has given it back.
pub(super) fn is_ours() -> bool {
    TAKEN.load(Ordering::SeqCst)
}

fn give_back(out: &mut impl Write) -> io::Result<()> {
    if !TAKEN.swap(false, Ordering::SeqCst) {
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

impl Screen<io::Stdout> {
    /// The same after it was given back for a while.
    ///
    /// # Errors
    /// As [`take`].
    pub(super) fn retake(&mut self) -> io::Result<()> {
        TAKEN.store(true, Ordering::SeqCst);
        enable_raw_mode()?;
        enter(&mut self.out)?;
        self.shown = Buffer::empty(Rect::ZERO);
        Ok(())
    }
}

impl<W: Write> Screen<W> {
    fn on(out: W) -> Self {
        Self { out, shown: Buffer::empty(Rect::ZERO) }
    }

    /// Gives it back, for good or for a while.
    ///
    /// # Errors
    /// It is gone.
    pub(super) fn give_back(&mut self) -> io::Result<()> {
        give_back(&mut self.out)
    }

    /// Forgets what is shown, so that all of it is drawn anew.
    pub(super) fn forget(&mut self) {
        self.shown = Buffer::empty(Rect::ZERO);
    }

    /// Shows this.
    ///
    /// # Errors
    /// It is gone.
    pub(super) fn show(&mut self, next: &Buffer) -> io::Result<()> {
        let mut bytes = Vec::new();
        if self.shown.area() != next.area() {
            queue!(bytes, SetAttribute(Attribute::Reset), Clear(ClearType::All))?;
            self.shown = Buffer::empty(*next.area());
        }
        changes(&self.shown, next, &mut bytes)?;
        if !bytes.is_empty() {
            self.out.write_all(&bytes)?;
            self.out.flush()?;
        }
        self.shown.clone_from(next);
        Ok(())
    }
}

impl<W: Write> Drop for Screen<W> {
    fn drop(&mut self) {
        drop(give_back(&mut self.out));
    }
}

/// What has to be written so that one screen becomes the other.
fn changes(from: &Buffer, to: &Buffer, out: &mut Vec<u8>) -> io::Result<()> {
    let mut style = None;
    let mut place = None;
    for (x, y, cell) in from.diff(to) {
        if place != Some((x, y)) {
            queue!(out, cursor::MoveTo(x, y))?;
        }
        let now = (cell.fg, cell.bg, cell.modifier);
        if style != Some(now) {
            ink(out, cell)?;
            style = Some(now);
        }
        queue!(out, Print(cell.symbol()))?;
        let wide = u16::try_from(super::text::width(cell.symbol())).unwrap_or(1);
        // Terminals do not agree on the width of what is wide: after it the place is told anew.
        place = (wide == 1 && cell.symbol().chars().count() == 1).then_some((x + 1, y));
    }
    if style.is_some() {
        queue!(out, SetAttribute(Attribute::Reset))?;
    }
    Ok(())
}

fn ink(out: &mut Vec<u8>, cell: &Cell) -> io::Result<()> {
    queue!(out, SetAttribute(Attribute::Reset))?;
    let attributes = [
        (Modifier::BOLD, Attribute::Bold),
        (Modifier::DIM, Attribute::Dim),
        (Modifier::REVERSED, Attribute::Reverse),
    ];
    for (_, attribute) in attributes.iter().filter(|(modifier, _)| cell.modifier.contains(*modifier)) {
        queue!(out, SetAttribute(*attribute))?;
    }
    if let Some(colour) = of(cell.fg) {
        queue!(out, SetForegroundColor(colour))?;
    }
    if let Some(colour) = of(cell.bg) {
        queue!(out, SetBackgroundColor(colour))?;
    }
    Ok(())
}

/// The colours that we use, by the names of the terminal's own theme.
const fn of(colour: Color) -> Option<Ink> {
    match colour {
        Color::Green => Some(Ink::DarkGreen),
        Color::Cyan => Some(Ink::DarkCyan),
        Color::Yellow => Some(Ink::DarkYellow),
        Color::Red => Some(Ink::DarkRed),
        _ => None,
    }
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
        changes(&buffer(from), &buffer(to), &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn only_what_differs_is_written_and_nothing_where_nothing_does() {
        assert_eq!(written(&["one", "two"], &["one", "two"]), "");
        assert_eq!(written(&["up 1m", "two"], &["up 2m", "two"]), "\x1b[1;4H\x1b[0m2\x1b[0m");
        assert!(written(&["模型 a"], &["模型 b"]).ends_with("\x1b[1;6H\x1b[0mb\x1b[0m"));
    }

    #[test]
    fn a_screen_of_another_size_is_drawn_anew_and_one_that_stands_still_is_not() {
        let mut screen = Screen::on(Vec::new());
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
