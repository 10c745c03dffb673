//! The screen while it runs: keys, pictures and signals in, cells out. One loop owns the state and the terminal.

use std::io;
use std::time::Duration;

use crossterm::event::Event;
use ratatui_core::buffer::Buffer;
use ratatui_core::layout::Rect;
use rustix::process::{Signal, kill_current_process_group};
use rustix::termios::tcgetwinsize;
use tokio::signal::unix::{Signal as Signals, SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};

use super::draw::draw;
use super::feed::{Began, Feed};
use super::input::{Effect, Input};
use super::look::{Look, Tone};
use super::screen::{self, Screen};
use super::state::State;
use super::step::step;
use super::{keys, suspend};
use crate::exit::{self, Failure};

/// Between two drawings: however much comes, the line to the terminal is not filled.
const FRAME: Duration = Duration::from_millis(50);
/// How often time passes on the screen, for what nobody else tells.
const TICK: Duration = Duration::from_millis(500);
/// Keys that wait, at most.
const KEYS: usize = 64;
/// Inputs that are taken in before the screen is drawn.
const BATCH: usize = 512;

/// Shows until somebody wants it to end.
///
/// # Errors
/// The terminal cannot be taken, or is gone; a signal ended it.
pub(super) async fn run(
    state: State,
    look: Look,
    began: &Began,
    feed: Option<(Feed, mpsc::Receiver<Input>)>,
) -> Result<(), Failure> {
    let (feed, mut inputs) = feed.unzip();
    let mut signals = Caught::listen()?;
    screen::give_back_at_panic();
    let screen = screen::take().map_err(cannot)?;
    let mut pressed = read_keys().map_err(cannot)?;
    let mut show = Show { screen, look, state, feed, away: false, ends: None };
    show.step(Input::Size(size().0, size().1));
    let mut clock = interval(TICK);
    clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut drawn = Instant::now();
    show.draw()?;
    let mut batch = Vec::new();
    let mut dirty = false;
    loop {
        tokio::select! {
            biased;
            () = ended(&mut signals.ends) => return Err(Failure::INTERRUPTED),
            _ = signals.stop.recv() => show.stop(),
            _ = signals.go_on.recv() => show.come_back()?,
            event = pressed.recv() => match event {
                Some(Event::Key(event)) => keys::key(event).into_iter().for_each(|key| show.step(Input::Key(key))),
                Some(_) => {}
                None => return Err(Failure::Pipe),
            },
            count = next(inputs.as_mut(), &mut batch) => {
                if count == 0 {
                    return Err(Failure::failed("what asks llama-warden has ended"));
                }
                batch.drain(..).for_each(|input| show.step(input));
            }
            _ = clock.tick() => show.step(Input::Tick(began.since())),
            () = sleep_until(drawn + FRAME), if dirty && !show.away => {}
        }
        if let Some(end) = show.ends.take() {
            return end;
        }
        dirty = true;
        if !show.away && drawn.elapsed() >= FRAME {
            show.draw()?;
            (drawn, dirty) = (Instant::now(), false);
        }
    }
}

/// Waits for what comes next, and takes along what is there already; for ever if nobody asks.
async fn next(inputs: Option<&mut mpsc::Receiver<Input>>, batch: &mut Vec<Input>) -> usize {
    match inputs {
        Some(inputs) => inputs.recv_many(batch, BATCH).await,
        None => std::future::pending().await,
    }
}

#[expect(clippy::needless_pass_by_value, reason = "`map_err` gives it")]
fn cannot(problem: io::Error) -> Failure {
    Failure::hinted(format!("the terminal cannot be used: {problem}"), "`llama-warden status` writes lines")
}

/// Columns and rows of the terminal.
pub(super) fn size() -> (u16, u16) {
    tcgetwinsize(io::stdout()).map_or((0, 0), |size| (size.ws_col, size.ws_row))
}

/// Keys, from a thread that ends with the process: reading a terminal cannot be broken off.
fn read_keys() -> io::Result<mpsc::Receiver<Event>> {
    let (sender, receiver) = mpsc::channel(KEYS);
    std::thread::Builder::new().name("keys".to_owned()).spawn(move || {
        while let Ok(event) = crossterm::event::read() {
            if sender.blocking_send(event).is_err() {
                return;
            }
        }
    })?;
    Ok(receiver)
}

/// The signals that concern a program on a terminal.
struct Caught {
    ends: [Signals; 3],
    stop: Signals,
    go_on: Signals,
}

impl Caught {
    fn listen() -> Result<Self, Failure> {
        let listen = |kind: SignalKind| {
            signal(kind).map_err(|problem| Failure::failed(format!("cannot listen for signals: {problem}")))
        };
        let number = |signal: Signal| SignalKind::from_raw(signal.as_raw());
        Ok(Self {
            ends: [
                listen(SignalKind::terminate())?,
                listen(SignalKind::hangup())?,
                listen(SignalKind::interrupt())?,
            ],
            stop: listen(number(Signal::TSTP))?,
            go_on: listen(number(Signal::CONT))?,
        })
    }
}

async fn ended([term, hup, int]: &mut [Signals; 3]) {
    tokio::select! {
        _ = term.recv() => {}
        _ = hup.recv() => {}
        _ = int.recv() => {}
    }
}

/// What the loop owns.
struct Show {
    screen: Screen<io::Stdout>,
    look: Look,
    state: State,
    feed: Option<Feed>,
    /// The terminal is somebody else's for now.
    away: bool,
    ends: Option<Result<(), Failure>>,
}

impl Show {
    fn step(&mut self, input: Input) {
        if let (Input::Done(..), Some(feed)) = (&input, &mut self.feed) {
            feed.done();
        }
        let (state, effects) = step(std::mem::take(&mut self.state), input);
        self.state = state;
        for effect in effects {
            self.carry_out(effect);
        }
    }

    fn carry_out(&mut self, effect: Effect) {
        match (effect, &mut self.feed) {
            (Effect::Quit, _) => self.ends = Some(Ok(())),
            (Effect::Redraw, _) => self.screen.forget(),
            // All of the job, as the terminal itself would do it; ours comes back as a signal.
            (Effect::Suspend, _) => drop(kill_current_process_group(Signal::TSTP)),
            (Effect::Do(action, model), Some(feed)) => {
                if let Err(why) = feed.act(action, model) {
                    self.state.say(why, Tone::Warn);
                }
            }
            (Effect::Follow(model), Some(feed)) => feed.follow(model),
            (Effect::Unfollow, Some(feed)) => feed.unfollow(),
            (Effect::Recall(model, span), Some(feed)) => feed.recall(model, span),
            (Effect::Do(..) | Effect::Follow(_) | Effect::Unfollow | Effect::Recall(..), None) => {}
        }
    }

    fn draw(&mut self) -> Result<(), Failure> {
        if !screen::is_ours() {
            // What panicked has told it.
            return Err(Failure::Told { code: exit::FAILURE });
        }
        // A change of the size may come without a word.
        let now = size();
        if now == (0, 0) {
            return Err(Failure::Pipe);
        }
        if now != self.state.size {
            self.step(Input::Size(now.0, now.1));
        }
        let mut buffer = Buffer::empty(Rect::new(0, 0, now.0, now.1));
        draw(&self.state, self.look, &mut buffer);
        self.screen.show(&buffer).map_err(|_gone| Failure::Pipe)
    }

    /// Gives the terminal back and stops. Where nobody would let us go on, we do at once.
    fn stop(&mut self) {
        drop(self.screen.give_back());
        self.away = true;
        if !suspend::stop() {
            self.state.say("there is no shell to go back to", Tone::Plain);
            self.ends = self.come_back().err().map(Err);
        }
    }

    /// What the terminal was set to meanwhile is not ours.
    fn come_back(&mut self) -> Result<(), Failure> {
        drop(self.screen.give_back());
        self.screen.retake().map_err(cannot)?;
        self.away = false;
        Ok(())
    }
}
