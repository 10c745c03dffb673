//! `llama-warden top`: the models and their memory on a terminal, as `top` and `htop` show processes.
//!
//! ```text
//!  GET /status, /events, /series ─ feed ┐
//!  recording ──> film                   ├─> Input ──> step(State) ──> draw(State) ──> cells ──> screen
//!  terminal ──> keys ───────────────────┘                └──> Effect ──> POST /models/NAME/restart …
//! ```
//!
//! Everything between the arrows is pure: [`step`] and [`draw`] read no clock and write nothing.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use ratatui_core::buffer::Buffer;
use ratatui_core::layout::Rect;
use rustix::termios::isatty;
use warden_policies::defaults::parse_duration;

use super::control::InstanceArgs;
use super::policy::readings;
use crate::exit::Failure;
use crate::out;
use feed::{Began, Feed};
use film::Film;
use input::Input;
use look::Look;
use state::{State, View};

mod draw;
mod feed;
mod film;
mod history;
mod input;
mod keys;
mod layout;
mod live;
mod look;
mod picture;
mod rates;
mod screen;
mod state;
mod step;
mod stored;
mod suspend;
mod text;
mod told;

/// Columns of `--once` where no terminal says how wide it is.
const COLUMNS: u16 = 120;

/// What `top` takes.
#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    /// Begins with this model and its memory.
    #[arg(value_name = "MODEL", conflicts_with = "file")]
    model: Option<String>,
    /// Between two looks: 100ms to 1h.
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = every)]
    interval: Duration,
    /// Only shows: no key restarts, drains or reclaims.
    #[arg(long)]
    read_only: bool,
    /// Writes one screen as text and ends: for scripts.
    #[arg(long)]
    once: bool,
    /// Plays a recording, as `record = true` writes them, instead of looking at an instance.
    #[arg(long, value_name = "FILE", conflicts_with = "read_only")]
    file: Option<PathBuf>,
    #[command(flatten)]
    instance: InstanceArgs,
}

fn every(text: &str) -> Result<Duration, String> {
    let time = parse_duration(text).map_err(|error| error.to_string())?;
    if (Duration::from_millis(100)..=Duration::from_secs(3600)).contains(&time) {
        Ok(time)
    } else {
        Err("it is 100ms to 1h".to_owned())
    }
}

pub(crate) fn run(args: TopArgs) -> Result<(), Failure> {
    let look = Look::of(|name| std::env::var(name).ok());
    if !args.once {
        is_usable(std::env::var("TERM").ok().as_deref(), isatty(io::stdin()) && isatty(io::stdout()))?;
    }
    let began = Began::now();
    let mut state = State { began: began.unix, read_only: args.read_only, ..State::default() };
    if let Some(path) = &args.file {
        let (film, told) = open(path)?;
        state.picture = film.picture();
        state.view = View::Model(state.picture.rows.first().map(|row| row.name.clone()).unwrap_or_default());
        (state.film, state.told) = (Some(film), told.into());
        if args.once {
            state.film.iter_mut().for_each(|film| film.seek(1.0));
            return once(step::step(state, Input::Tick(Duration::ZERO)).0, look);
        }
        return super::block_on(live::run(state, look, &began, None))?;
    }
    if let Some(model) = &args.model {
        state.view = View::Model(model.clone());
    }
    let client = args.instance.client()?;
    if args.once {
        return super::block_on(async {
            // Rates are known from two looks.
            for look in 0..2 {
                if look > 0 {
                    tokio::time::sleep(args.interval).await;
                }
                let picture = feed::picture(&client).await?;
                state = step::step(state, Input::Picture(began.since(), Box::new(picture))).0;
            }
            known(&state, args.model.as_deref())?;
            once(state, look)
        })?;
    }
    super::block_on(async {
        // An instance that does not run, or a model that it does not have, is told before the screen is taken.
        let picture = feed::picture(&client).await?;
        state = step::step(state, Input::Picture(began.since(), Box::new(picture))).0;
        known(&state, args.model.as_deref())?;
        let feed = Feed::begin(args.instance, client, args.interval, &began);
        live::run(state, look, &began, Some(feed)).await
    })?
}

/// Whether there is a terminal that a screen can be drawn on.
fn is_usable(term: Option<&str>, terminal: bool) -> Result<(), Failure> {
    let hint = "`llama-warden status` writes lines, and so does `llama-warden top --once`";
    if !terminal {
        return Err(Failure::usage("top needs a terminal for keys and screen", hint));
    }
    match term {
        None | Some("" | "dumb") => {
            let term = term.unwrap_or_default();
            Err(Failure::usage(format!("this terminal can only write lines (TERM is `{term}`)"), hint))
        }
        Some(_) => Ok(()),
    }
}

fn known(state: &State, model: Option<&str>) -> Result<(), Failure> {
    let Some(model) = model.filter(|model| state.row(model).is_none()) else { return Ok(()) };
    let names: Vec<&str> = state.picture.rows.iter().map(|row| row.shown.as_str()).collect();
    Err(Failure::usage(format!("there is no model `{model}`"), format!("there are {}", names.join(", "))))
}

fn open(path: &Path) -> Result<(Film, Vec<input::Told>), Failure> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let samples = readings(path)?;
    Ok(Film::new(&text::tame(&name), samples, &warden_policies::defaults().growth))
}

/// Writes the screen as text, as long as it has to be to show everything.
fn once(mut state: State, look: Look) -> Result<(), Failure> {
    let columns = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok()).unwrap_or(COLUMNS);
    let columns = match live::size().0 {
        0 => columns,
        columns => columns,
    };
    out::write(&page(&mut state, look, columns.max(layout::LEAST.0)))
}

fn page(state: &mut State, look: Look, columns: u16) -> String {
    // Twice: how much there is to show depends on the width.
    let (next, _) = step::step(std::mem::take(state), Input::Size(columns, layout::LEAST.1));
    *state = next;
    let rows = match &state.view {
        View::Model(model) => {
            let lines = draw::words(state, model, usize::from(columns)).len();
            u16::try_from(lines).unwrap_or(u16::MAX / 4).saturating_mul(2).saturating_add(4)
        }
        View::Overview | View::Log(..) => draw::table(state),
    };
    state.size = (columns, rows.max(layout::LEAST.1));
    state.settle();
    state.selected = None;
    let mut buffer = Buffer::empty(Rect::new(0, 0, state.size.0, state.size.1));
    draw::draw(state, look, &mut buffer);
    let mut lines = lines(&buffer);
    // Nobody can press keys here.
    lines.pop();
    while lines.last().is_some_and(String::is_empty) {
        lines.pop();
    }
    lines.join("\n") + "\n"
}

/// The letters of a screen, without what fills it up.
fn lines(buffer: &Buffer) -> Vec<String> {
    let width = usize::from(buffer.area().width.max(1));
    let line = |cells: &[ratatui_core::buffer::Cell]| {
        let mut letters = String::new();
        let mut hidden = 0;
        for cell in cells {
            if hidden == 0 {
                letters.push_str(cell.symbol());
                hidden = text::width(cell.symbol()).saturating_sub(1);
            } else {
                hidden -= 1;
            }
        }
        letters.trim_end().to_owned()
    };
    buffer.content().chunks(width).map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_no_screen_can_be_drawn_the_hint_says_what_writes_lines() {
        assert!(is_usable(Some("xterm-256color"), true).is_ok());
        for (term, terminal) in [(Some("dumb"), true), (None, true), (Some(""), true), (Some("xterm"), false)]
        {
            let failure = is_usable(term, terminal).unwrap_err();
            assert_eq!(failure.code(), 2);
            assert!(failure.lines()[1].contains("llama-warden status"), "{:?}", failure.lines());
        }
    }

    #[test]
    fn intervals_have_bounds() {
        assert_eq!(every("250ms"), Ok(Duration::from_millis(250)));
        for text in ["10ms", "2h", "often"] {
            assert!(every(text).is_err(), "{text}");
        }
    }
}
