//! The running screen: takes keys, answers and signals, and writes cells. One loop owns the state and the
//! terminal.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use crossterm::event::Event;
use ratatui_core::buffer::Buffer;
use ratatui_core::layout::Rect;
use rustix::process::{Signal, getpid, kill_current_process_group, kill_process};
use rustix::termios::tcgetwinsize;
use tokio::signal::unix::{Signal as Signals, SignalKind, signal};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};

use super::draw::draw_screen;
use super::feed::{InputQueue, InstanceFeed, ScreenClock};
use super::look::{PLAIN, TerminalLook};
use super::screen::{self, TerminalScreen};
use super::state::{ScreenEffect, ScreenInput, ScreenState};
use super::step::step;
use crate::exit::{self, CommandError};

/// Minimum time between two drawings, so that a slow connection is not saturated.
const MIN_FRAME_TIME: Duration = Duration::from_millis(50);
/// Interval of ticks, for parts that change with time alone.
const TICK_INTERVAL: Duration = Duration::from_millis(500);

/// Maximum columns and rows: the size may be set arbitrarily, and cells take memory.
const MAX_SCREEN_SIZE: (u16, u16) = (1000, 500);

/// Minimum duration of a stop. A shorter stop means that the kernel ignored the signal.
const MIN_STOP_TIME: Duration = Duration::from_millis(50);

/// Runs the screen until a key or a signal ends it.
pub(super) async fn run(
    state: ScreenState,
    look: TerminalLook,
    clock: ScreenClock,
    queue: Arc<InputQueue>,
    feed: Option<InstanceFeed>,
) -> Result<(), CommandError> {
    let mut ends = [listen(Signal::TERM)?, listen(Signal::HUP)?, listen(Signal::INT)?];
    let (mut stops, mut continues) = (listen(Signal::TSTP)?, listen(Signal::CONT)?);
    screen::give_back_at_panic();
    let screen = screen::take_terminal().map_err(cannot_use)?;
    read_keys(Arc::clone(&queue)).map_err(cannot_use)?;
    let mut show = LiveScreen { screen, look, state, feed, away: false, end: None };
    let mut ticks = interval(TICK_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    show.draw()?;
    let (mut drawn, mut dirty) = (Instant::now(), false);
    loop {
        let [term, hup, int] = &mut ends;
        tokio::select! {
            biased;
            _ = term.recv() => return Err(CommandError::INTERRUPTED),
            _ = hup.recv() => return Err(CommandError::INTERRUPTED),
            _ = int.recv() => return Err(CommandError::INTERRUPTED),
            _ = stops.recv() => show.stop(),
            _ = continues.recv() => show.retake()?,
            inputs = queue.take_all() => inputs.into_iter().for_each(|input| show.step(input)),
            _ = ticks.tick() => show.step(ScreenInput::Tick(clock.now())),
            () = sleep_until(drawn + MIN_FRAME_TIME), if dirty && !show.away => {}
        }
        if let Some(end) = show.end.take() {
            return end;
        }
        dirty = true;
        if !show.away && drawn.elapsed() >= MIN_FRAME_TIME {
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

/// Columns and rows of the terminal; (0, 0) if it is gone. A terminal of unknown size, such as a serial
/// console, counts as 80 columns and 24 rows.
pub(super) fn size() -> (u16, u16) {
    match tcgetwinsize(io::stdout()) {
        Ok(size) if size.ws_col == 0 || size.ws_row == 0 => (80, 24),
        Ok(size) => (size.ws_col.min(MAX_SCREEN_SIZE.0), size.ws_row.min(MAX_SCREEN_SIZE.1)),
        Err(_gone) => (0, 0),
    }
}

/// Reads keys on a thread that ends with the process, because reading a terminal cannot be cancelled. The
/// drawing code detects a terminal that is gone.
fn read_keys(queue: Arc<InputQueue>) -> io::Result<()> {
    std::thread::Builder::new().name("keys".to_owned()).spawn(move || {
        while let Ok(event) = crossterm::event::read() {
            match event {
                Event::Key(key) => queue.push(ScreenInput::Key(key)),
                // Redraw: the size may have changed.
                _ => queue.wake(),
            }
        }
        queue.push(ScreenInput::KeysGone);
    })?;
    Ok(())
}

struct LiveScreen {
    screen: TerminalScreen<io::Stdout>,
    look: TerminalLook,
    state: ScreenState,
    feed: Option<InstanceFeed>,
    /// Another program has the terminal for now.
    away: bool,
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
            // Stop the whole job, as the terminal would. This process receives the signal, too.
            Some(ScreenEffect::Suspend) => drop(kill_current_process_group(Signal::TSTP)),
            Some(ScreenEffect::Act(action, model)) => {
                if let Some(feed) = &self.feed {
                    feed.run_action(action, model);
                }
            }
        }
        if let Some(feed) = &mut self.feed {
            feed.watch(self.state.watched());
        }
    }

    fn draw(&mut self) -> Result<(), CommandError> {
        if !screen::is_ours() {
            // A panic has given the terminal back and reported itself.
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

    /// Gives the terminal back and stops, like a job of a shell. The kernel ignores SIGTTOU if no process
    /// could continue this one, as behind `ssh -t HOST llama-warden top`; the terminal is then taken again
    /// at once.
    fn stop(&mut self) {
        drop(self.screen.give_back());
        self.away = true;
        let before = Instant::now();
        let sent = kill_process(getpid(), Signal::TTOU);
        if sent.is_err() || before.elapsed() < MIN_STOP_TIME {
            self.state.say("there is no shell to go back to", PLAIN);
            self.end = self.retake().err().map(Err);
        }
    }

    /// Takes the terminal again, whatever its settings are now.
    fn retake(&mut self) -> Result<(), CommandError> {
        drop(self.screen.give_back());
        self.screen.retake().map_err(cannot_use)?;
        self.away = false;
        Ok(())
    }
}
