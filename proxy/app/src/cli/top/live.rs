//! The running screen: one loop takes keys, answers and signals, owns the state and writes cells. Restores
//! the terminal at the end, also after a panic.
//!
//! Writes only the cells that have changed, in one write, so that a slow connection suffices.

use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crossterm::event::Event;
use crossterm::style::{Attribute, SetAttribute};
use crossterm::terminal::{
    Clear, ClearType, DisableLineWrap, EnableLineWrap, EnterAlternateScreen, LeaveAlternateScreen,
    disable_raw_mode, enable_raw_mode,
};
use crossterm::{cursor, queue};
use ratatui_core::buffer::{Buffer, Cell};
use ratatui_core::layout::Rect;
use ratatui_core::style::{Color, Modifier};
use rustix::process::{Signal, kill_current_process_group};
use rustix::termios::tcgetwinsize;
use tokio::signal::unix::{Signal as Signals, SignalKind, signal};
use tokio::sync::mpsc::{Receiver, Sender};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};

use super::draw::draw_screen;
use super::feed::{InstanceAsker, ScreenClock};
use super::look::{TerminalLook, text_width};
use super::state::{ScreenEffect, ScreenInput, ScreenState};
use super::step::step;
use crate::exit::{self, CommandError};

/// Faster drawing could saturate a slow connection.
const MIN_FRAME_TIME: Duration = Duration::from_millis(50);
/// Ticks redraw the parts that change with time alone.
const TICK_INTERVAL: Duration = Duration::from_millis(500);

/// Columns and rows: a program may set any terminal size, and cells take memory.
const MAX_SCREEN_SIZE: (u16, u16) = (1000, 500);

pub(super) async fn run(
    state: ScreenState,
    look: TerminalLook,
    clock: ScreenClock,
    asker: InstanceAsker,
    keys: Sender<ScreenInput>,
    mut inputs: Receiver<ScreenInput>,
) -> Result<(), CommandError> {
    let mut ends = [listen(Signal::TERM)?, listen(Signal::HUP)?, listen(Signal::INT)?];
    give_back_at_panic();
    let mut screen = TerminalScreen::new(io::stdout());
    screen.take().map_err(cannot_use)?;
    read_keys(keys).map_err(cannot_use)?;
    let mut show = LiveScreen { screen, look, state, asker, end: None };
    let mut ticks = interval(TICK_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    show.draw()?;
    let mut drawn = Instant::now();
    let mut dirty = false;
    loop {
        let [term, hup, int] = &mut ends;
        tokio::select! {
            biased;
            _ = term.recv() => return Err(CommandError::INTERRUPTED),
            _ = hup.recv() => return Err(CommandError::INTERRUPTED),
            _ = int.recv() => return Err(CommandError::INTERRUPTED),
            Some(input) = inputs.recv() => show.step(input),
            _ = ticks.tick() => show.step(ScreenInput::Tick(clock.now())),
            () = sleep_until(drawn + MIN_FRAME_TIME), if dirty => {}
        }
        if let Some(end) = show.end.take() {
            return end;
        }
        dirty = true;
        if drawn.elapsed() >= MIN_FRAME_TIME {
            show.draw()?;
            (drawn, dirty) = (Instant::now(), false);
        }
    }
}

#[expect(clippy::needless_pass_by_value, reason = "`map_err` gives it")]
fn cannot_use(problem: io::Error) -> CommandError {
    CommandError::hinted(
        format!("the terminal cannot be used: {problem}"),
        "`llama-warden status` writes lines",
    )
}

fn listen(wanted: Signal) -> Result<Signals, CommandError> {
    signal(SignalKind::from_raw(wanted.as_raw()))
        .map_err(|problem| CommandError::failed(format!("cannot listen for signals: {problem}")))
}

/// Returns columns and rows; (0, 0) if the terminal is gone, 80 and 24 if it does not know its size, like a
/// serial console.
pub(super) fn size() -> (u16, u16) {
    match tcgetwinsize(io::stdout()) {
        Ok(size) if size.ws_col == 0 || size.ws_row == 0 => (80, 24),
        Ok(size) => (size.ws_col.min(MAX_SCREEN_SIZE.0), size.ws_row.min(MAX_SCREEN_SIZE.1)),
        Err(_gone) => (0, 0),
    }
}

/// The thread ends with the process, because reading a terminal cannot be cancelled. The drawing code detects
/// a terminal that is gone.
fn read_keys(inputs: Sender<ScreenInput>) -> io::Result<()> {
    std::thread::Builder::new().name("keys".to_owned()).spawn(move || {
        while let Ok(event) = crossterm::event::read() {
            let input =
                if let Event::Key(key) = event { ScreenInput::Key(key) } else { ScreenInput::Resized };
            drop(inputs.blocking_send(input));
        }
        drop(inputs.blocking_send(ScreenInput::KeysGone));
    })?;
    Ok(())
}

struct LiveScreen {
    screen: TerminalScreen<io::Stdout>,
    look: TerminalLook,
    state: ScreenState,
    asker: InstanceAsker,
    end: Option<Result<(), CommandError>>,
}

impl LiveScreen {
    fn step(&mut self, input: ScreenInput) {
        match step(&mut self.state, input) {
            None => {}
            Some(ScreenEffect::Quit) => self.end = Some(Ok(())),
            Some(ScreenEffect::KeysGone) => {
                self.end = Some(Err(CommandError::failed("the terminal's input has ended")));
            }
            Some(ScreenEffect::Redraw) => self.screen.forget(),
            Some(ScreenEffect::Suspend) => {
                drop(give_back(&mut self.screen.out));
                // Stops the whole job, as the terminal would. The kernel ignores the signal if no shell could
                // continue the job, as in `ssh -t HOST llama-warden top`.
                kill_current_process_group(Signal::TSTP).ok();
                self.end = self.screen.take().map_err(cannot_use).err().map(Err);
            }
            Some(ScreenEffect::Act(action, model)) => self.asker.run_action(action, model),
        }
    }

    fn draw(&mut self) -> Result<(), CommandError> {
        if !is_ours() {
            // The panic hook has restored the terminal and reported the panic.
            return Err(CommandError::Reported { code: exit::FAILURE_CODE });
        }
        let size = size();
        if size == (0, 0) {
            return Err(CommandError::Pipe);
        }
        let mut buffer = Buffer::empty(Rect::new(0, 0, size.0, size.1));
        draw_screen(&mut self.state, self.look, &mut buffer);
        self.screen.show(&buffer).map_err(|_gone| CommandError::Pipe)
    }
}

/// Set while a panic must restore the terminal.
static TERMINAL_TAKEN: AtomicBool = AtomicBool::new(false);

/// Restores the terminal on drop.
struct TerminalScreen<W: Write> {
    out: W,
    shown: Buffer,
}

/// Without this hook, the report of a panic would vanish with the screen.
fn give_back_at_panic() {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        drop(give_back(&mut io::stdout()));
        before(info);
    }));
}

/// A panic in another thread restores the terminal.
fn is_ours() -> bool {
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

impl<W: Write> TerminalScreen<W> {
    fn new(out: W) -> Self {
        Self { out, shown: Buffer::empty(Rect::ZERO) }
    }

    /// Keys arrive unbuffered and without an echo. The terminal keeps its old content.
    fn take(&mut self) -> io::Result<()> {
        TERMINAL_TAKEN.store(true, Ordering::SeqCst);
        enable_raw_mode()?;
        enter(&mut self.out)?;
        self.forget();
        Ok(())
    }

    /// Makes the next drawing write all cells.
    fn forget(&mut self) {
        self.shown = Buffer::empty(Rect::ZERO);
    }

    fn show(&mut self, next: &Buffer) -> io::Result<()> {
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

fn write_changes(from: &Buffer, to: &Buffer, out: &mut Vec<u8>) -> io::Result<()> {
    let mut style = None;
    let mut place = None;
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
        // Terminals disagree on the width of a wide letter, so set the position after it.
        place = (text_width(cell.symbol()) == 1 && cell.symbol().chars().count() == 1).then_some((x + 1, y));
    }
    if style.is_some() {
        queue!(out, SetAttribute(Attribute::Reset))?;
    }
    Ok(())
}

/// Returns `SGR` parameters: modifiers, and colours of the terminal's theme.
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
    use ratatui_core::style::Style;

    use super::*;

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
