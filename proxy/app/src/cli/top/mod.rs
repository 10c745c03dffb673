//! `llama-warden top`: shows models and their memory on a terminal, like `top` and `htop` show processes.
//!
//! ```text
//!  GET /status, /events ─ feed ┐
//!  keys of the terminal ───────┼─> ScreenInput ──> step(state) ──> draw(state) ──> cells ──> screen
//!  time ───────────────────────┘                    └──> ScreenEffect ──> POST /models/NAME/restart …
//! ```
//!
//! [`step`] and [`draw`] are pure: they read no clock and write nothing.

use std::io;
use std::time::Duration;

use clap::Args;
use ratatui_core::buffer::{Buffer, Cell};
use ratatui_core::layout::Rect;
use rustix::termios::isatty;
use tokio::sync::mpsc;
use warden_policies::defaults::parse_duration;

use super::control::InstanceArgs;
use crate::exit::CommandError;
use crate::out;
use feed::{InstanceAsker, ScreenClock};
use look::TerminalLook;
use state::{ScreenState, ScreenView};

mod columns;
mod draw;
mod feed;
mod live;
mod look;
mod picture;
mod state;
mod step;

/// Used by `--once` without a terminal and without `COLUMNS`.
const DEFAULT_COLUMNS: u16 = 120;

const MAX_WAITING_INPUTS: usize = 4096;

/// Arguments of `top`.
#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    /// Starts with this model.
    #[arg(value_name = "MODEL")]
    model: Option<String>,
    /// Time between two updates: 100ms to 1h.
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = parse_interval)]
    interval: Duration,
    /// Disables the keys that restart, drain or reclaim.
    #[arg(long)]
    read_only: bool,
    /// Prints one screen as text and ends, for scripts.
    #[arg(long)]
    once: bool,
    #[command(flatten)]
    instance: InstanceArgs,
}

fn parse_interval(text: &str) -> Result<Duration, String> {
    let time = parse_duration(text).map_err(|error| error.to_string())?;
    if (Duration::from_millis(100)..=Duration::from_secs(3600)).contains(&time) {
        Ok(time)
    } else {
        Err("it is 100ms to 1h".to_owned())
    }
}

pub(crate) fn run(args: TopArgs) -> Result<(), CommandError> {
    let look = TerminalLook::from_env(|name| std::env::var(name).ok());
    if !args.once {
        check_terminal(std::env::var("TERM").ok().as_deref(), isatty(io::stdin()) && isatty(io::stdout()))?;
    }
    let clock = ScreenClock::start();
    let (keys, inputs) = mpsc::channel(MAX_WAITING_INPUTS);
    let TopArgs { model, interval, read_only, once, instance } = args;
    let mut state = ScreenState { at: clock.now(), read_only, once, ..ScreenState::default() };
    let asker = InstanceAsker::new(instance.client()?, clock, keys.clone());
    super::shared::block_on(async {
        // Report a missing instance or model before taking the terminal.
        step::step(&mut state, asker.picture().await?);
        if let Some(model) = model {
            check_model(&state, &model)?;
            state.view = ScreenView::Model(model);
        }
        if !once {
            asker.start(instance, interval);
            return live::run(state, look, clock, asker, keys, inputs).await;
        }
        // Rates need a second picture.
        tokio::time::sleep(interval).await;
        step::step(&mut state, asker.picture().await?);
        write_once(&mut state, look)
    })?
}

fn check_terminal(term: Option<&str>, terminal: bool) -> Result<(), CommandError> {
    let hint = "`llama-warden status` writes lines, and so does `llama-warden top --once`";
    if !terminal {
        return Err(CommandError::usage("top needs a terminal for keys and screen", hint));
    }
    match term {
        None | Some("" | "dumb") => {
            let term = term.unwrap_or_default();
            Err(CommandError::usage(format!("this terminal can only write lines (TERM is `{term}`)"), hint))
        }
        Some(_) => Ok(()),
    }
}

fn check_model(state: &ScreenState, model: &str) -> Result<(), CommandError> {
    if state.row(model).is_some() {
        return Ok(());
    }
    let names: Vec<&str> = state.data.picture.rows.iter().map(|row| row.shown.as_str()).collect();
    Err(CommandError::usage(
        format!("there is no model `{model}`"),
        format!("there are {}", names.join(", ")),
    ))
}

fn write_once(state: &mut ScreenState, look: TerminalLook) -> Result<(), CommandError> {
    let columns = match live::size().0 {
        0 => {
            std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok()).unwrap_or(DEFAULT_COLUMNS)
        }
        columns => columns,
    };
    out::print_text(&render_page(state, look, columns.max(draw::MIN_SCREEN_SIZE.0)))
}

fn render_page(state: &mut ScreenState, look: TerminalLook, columns: u16) -> String {
    state.table.selected = None;
    let rows = match &state.view {
        ScreenView::Model(model) => draw::model_words(state, model, usize::from(columns)).len() + 2,
        ScreenView::Overview => state.data.picture.rows.len() + state.data.picture.gauges.len() + 6,
    };
    let rows = u16::try_from(rows).unwrap_or(u16::MAX / 4).max(draw::MIN_SCREEN_SIZE.1);
    let mut buffer = Buffer::empty(Rect::new(0, 0, columns, rows));
    draw::draw_screen(state, look, &mut buffer);
    screen_lines(&buffer).join("\n").trim_end().to_owned() + "\n"
}

fn screen_lines(buffer: &Buffer) -> Vec<String> {
    let line = |cells: &[Cell]| {
        let mut letters = String::new();
        let mut next = 0;
        while let Some(cell) = cells.get(next) {
            letters.push_str(cell.symbol());
            next += look::text_width(cell.symbol()).max(1);
        }
        letters.trim_end().to_owned()
    };
    buffer.content().chunks(usize::from(buffer.area().width.max(1))).map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_no_screen_can_be_drawn_the_hint_names_commands_that_write_lines() {
        assert!(check_terminal(Some("xterm-256color"), true).is_ok());
        for (term, terminal) in [(Some("dumb"), true), (None, true), (Some(""), true), (Some("xterm"), false)]
        {
            let failure = check_terminal(term, terminal).unwrap_err();
            assert_eq!(failure.code(), 2);
            assert!(failure.lines()[1].contains("llama-warden status"), "{:?}", failure.lines());
        }
    }

    #[test]
    fn intervals_have_bounds() {
        assert_eq!(parse_interval("250ms"), Ok(Duration::from_millis(250)));
        for text in ["10ms", "2h", "often"] {
            assert!(parse_interval(text).is_err(), "{text}");
        }
    }
}
