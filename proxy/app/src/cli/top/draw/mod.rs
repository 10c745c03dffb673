//! Draws the whole screen: a state in, cells out. Pure; what differs from the screen before is found elsewhere.

use std::time::Duration;

use ratatui_core::buffer::Buffer;
use ratatui_core::layout::Rect;
use ratatui_core::style::Style;

use super::layout::{self, LEAST};
use super::look::{Look, Tone};
use super::state::{Link, State, View};
use super::text;
use crate::cli::status::age;

mod columns;
mod machine;
mod model;
mod overlay;
mod overview;
mod plot;

pub(super) use columns::whole as table;
pub(super) use model::words;

/// Draws all of it.
pub(super) fn draw(state: &State, look: Look, buffer: &mut Buffer) {
    buffer.reset();
    let mut pen = Pen { buffer, look };
    if layout::too_small(state.size) {
        let (columns, rows) = LEAST;
        let sentence =
            format!("top needs {columns} columns and {rows} rows: make the terminal larger, or press q");
        for (y, line) in (0..state.size.1).zip(text::wrapped(&sentence, usize::from(state.size.0))) {
            pen.text(0, y, state.size.0, &line, Style::new());
        }
        return;
    }
    match &state.view {
        View::Overview => overview::draw(state, &mut pen),
        View::Model(model) => model::draw(state, model, &mut pen),
        View::Log(model, _) => model::log(state, model, &mut pen),
    }
    overlay::draw(state, &mut pen);
}

/// Where text meets cells: nothing is written beyond its place, and nothing that the terminal cannot show.
struct Pen<'a> {
    buffer: &'a mut Buffer,
    look: Look,
}

impl Pen<'_> {
    /// Writes a text into so many columns; it ends where it ends. Returns the column after it.
    fn text(&mut self, x: u16, y: u16, columns: u16, text: &str, style: Style) -> u16 {
        let area = *self.buffer.area();
        if y >= area.height || x >= area.width || columns == 0 {
            return x;
        }
        let shown = text::cut(&self.look.shown(text), usize::from(columns.min(area.width - x)));
        self.buffer.set_stringn(x, y, shown, usize::from(columns), style).0
    }

    /// Writes a text that ends at a column.
    fn text_to(&mut self, end: u16, y: u16, columns: u16, text: &str, style: Style) {
        let shown = text::cut(&self.look.shown(text), usize::from(columns));
        let width = u16::try_from(text::width(&shown)).unwrap_or(columns);
        self.text(end.saturating_sub(width), y, width, &shown, style);
    }

    /// Gives all of a line a style.
    fn line(&mut self, y: u16, style: Style) {
        let width = self.buffer.area().width;
        self.buffer.set_style(Rect::new(0, y, width, 1).intersection(*self.buffer.area()), style);
    }

    /// A bar of so many columns, filled to a share of it; the mark of a limit beyond is no part of it.
    fn bar(&mut self, x: u16, y: u16, columns: u16, share: f64, tone: Tone) {
        let (full, empty) = self.look.filled();
        let share = if share.is_finite() { share.clamp(0.0, 1.0) } else { 0.0 };
        let filled =
            (1..=columns).filter(|cell| f64::from(*cell) <= share * f64::from(columns) + 0.5).count();
        let filled = u16::try_from(filled).unwrap_or(columns);
        let style = self.look.of_tone(tone);
        self.text(x, y, filled, &full.repeat(usize::from(filled)), style);
        let rest = columns - filled;
        let quiet = self.look.of_tone(Tone::Quiet);
        self.text(x + filled, y, rest, &empty.repeat(usize::from(rest)), quiet);
    }

    /// Keys and what they do, across the last line.
    fn keys(&mut self, state: &State, keys: &[(&str, &str)]) {
        let y = state.size.1.saturating_sub(1);
        let width = state.size.0;
        if let Some(message) = &state.message {
            let style = self.look.of_tone(message.tone).patch(Look::strong());
            self.text(0, y, width, &message.text, style);
            return;
        }
        let mut x = 0;
        for (key, what) in keys {
            let needed = u16::try_from(key.len() + what.len() + 1).unwrap_or(width);
            if x + needed > width {
                break;
            }
            x = self.text(x, y, width - x, key, Look::strong()) + 1;
            x = self.text(x, y, width.saturating_sub(x), what, Look::bar()) + 2;
        }
    }

    /// The first line: who is looked at, and whether it answers.
    fn title(&mut self, state: &State) {
        let width = state.size.0;
        let who = &state.picture.who;
        let separator = self.look.lines().2;
        let mut facts = vec![who.name.clone()];
        facts.extend((!who.address.is_empty()).then(|| who.address.clone()));
        facts.extend(uptime(state).map(|seconds| format!("up {}", calm(seconds))));
        facts.extend(who.own.map(|bytes| format!("itself {}", text::bytes(bytes))));
        facts.extend(state.film.as_ref().map(super::film::Film::words));
        facts.extend(state.read_only.then(|| "read only".to_owned()));
        let told = match &state.link {
            Link::Looking if state.film.is_none() => ("looking for llama-warden".to_owned(), Tone::Busy),
            Link::Silent(since, why) => {
                let silent = age(state.at.saturating_sub(*since));
                (format!("NO ANSWER for {silent}: {why}"), Tone::Bad)
            }
            Link::Looking | Link::Live => {
                self.text(0, 0, width, &facts.join(separator), Look::strong());
                return;
            }
        };
        // What is on the screen is old: that comes first.
        let x = self.text(0, 0, width, &told.0, self.look.of_tone(told.1).patch(Look::bar()));
        if !facts[0].is_empty() {
            let rest = format!("{separator}{}", facts.join(separator));
            self.text(x, 0, width.saturating_sub(x), &rest, Style::new());
        }
    }
}

/// Seconds since the instance was started, by the clock that it and we share.
fn uptime(state: &State) -> Option<u64> {
    let started: jiff::Timestamp = state.picture.who.started_at.parse().ok()?;
    u64::try_from(state.began.saturating_add_unsigned(state.at.as_secs()) - started.as_second()).ok()
}

/// A time that changes once a minute at most: an idle screen has nothing to draw.
fn calm(seconds: u64) -> String {
    match seconds {
        0..60 => "under 1m".to_owned(),
        60..3600 => format!("{}m", seconds / 60),
        _ => age(Duration::from_secs(seconds)),
    }
}

#[cfg(test)]
#[path = "../draw_tests.rs"]
mod tests;
