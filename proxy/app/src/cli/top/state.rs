//! All that is on the screen, and what it is made of. Changed by [`super::step`] alone.

use std::cmp::Ordering;
use std::collections::VecDeque;
use std::time::Duration;

use super::film::Film;
use super::history::{History, Key};
use super::input::{Action, Told};
use super::layout;
use super::look::Tone;
use super::picture::{Picture, Row};
use super::rates::Rates;
use super::stored::{Span, Stored};

/// Events that are kept.
pub(super) const EVENTS: usize = 500;
/// Lines of a log that are kept.
pub(super) const LINES: usize = 2000;
/// For how long a message stays.
pub(super) const MESSAGE: Duration = Duration::from_secs(8);

#[derive(Clone, Debug, Default)]
pub(super) struct State {
    /// Columns and rows.
    pub(super) size: (u16, u16),
    /// When `top` was started, in seconds since 1970.
    pub(super) began: i64,
    /// Time since then.
    pub(super) at: Duration,
    pub(super) link: Link,
    pub(super) picture: Picture,
    pub(super) rates: Rates,
    pub(super) history: History,
    /// Events, oldest first.
    pub(super) told: VecDeque<Told>,
    /// Lines of the log that is followed, oldest first.
    pub(super) log: VecDeque<String>,
    pub(super) view: View,
    pub(super) over: Over,
    /// Models whose name, state or verdict has this in it.
    pub(super) filter: String,
    pub(super) sort: Sort,
    /// The other way round.
    pub(super) turned: bool,
    /// The model that is chosen, by its name, and which row it is.
    pub(super) selected: Option<String>,
    pub(super) cursor: usize,
    /// The first row on the screen.
    pub(super) first: usize,
    /// Lines of text that are scrolled out of sight: from the top in the view of a model, from the end in a log.
    pub(super) scroll: usize,
    /// Which time of it.
    pub(super) span: Span,
    /// What was kept of that, once it has come.
    pub(super) stored: Option<Stored>,
    /// Which memory of a model is drawn.
    pub(super) series: usize,
    pub(super) message: Option<Message>,
    pub(super) read_only: bool,
    /// The recording that is played instead of an instance.
    pub(super) film: Option<Film>,
}

/// Something to say for some seconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Message {
    pub(super) until: Duration,
    pub(super) text: String,
    pub(super) tone: Tone,
}

/// How it stands with the instance.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum Link {
    /// Nothing has come yet.
    #[default]
    Looking,
    Live,
    /// It has not answered since then, and why.
    Silent(Duration, String),
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum View {
    #[default]
    Overview,
    /// One model and its memory.
    Model(String),
    /// Its log; whether one comes back to the view of the model.
    Log(String, bool),
}

/// What lies over the view and takes the keys.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum Over {
    #[default]
    Nothing,
    Help,
    /// The filter is written.
    Filter,
    /// A menu, and its line that is chosen.
    Sort(usize),
    Actions(usize),
    /// Whether it is meant: the action and its model.
    Ask(Action, String),
}

/// What rows are sorted by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Sort {
    /// As they are configured.
    #[default]
    Configured,
    Name,
    State,
    Requests,
    Tokens,
    Waiting,
    Memory,
    Budget,
    Growth,
    Vram,
    Verdict,
    Left,
}

impl Sort {
    pub(super) const ALL: [Self; 12] = [
        Self::Configured,
        Self::Name,
        Self::State,
        Self::Requests,
        Self::Tokens,
        Self::Waiting,
        Self::Memory,
        Self::Budget,
        Self::Growth,
        Self::Vram,
        Self::Verdict,
        Self::Left,
    ];

    pub(super) const fn words(self) -> &'static str {
        match self {
            Self::Configured => "as configured",
            Self::Name => "name",
            Self::State => "state",
            Self::Requests => "requests/s",
            Self::Tokens => "tokens/s",
            Self::Waiting => "queue",
            Self::Memory => "host memory",
            Self::Budget => "share of its budget",
            Self::Growth => "growth per request",
            Self::Vram => "VRAM",
            Self::Verdict => "verdict",
            Self::Left => "time left to a limit",
        }
    }

    /// The most first, but names and times from the smallest.
    fn order(self, a: &Row, b: &Row) -> Ordering {
        let most = |of: fn(&Row) -> f64| of(b).total_cmp(&of(a));
        match self {
            Self::Configured => Ordering::Equal,
            Self::Name => a.shown.to_lowercase().cmp(&b.shown.to_lowercase()),
            Self::State => a.state.0.cmp(b.state.0),
            Self::Requests => most(|row| row.rate.map_or(-1.0, |rate| rate.requests)),
            Self::Tokens => most(|row| row.rate.map_or(-1.0, |rate| rate.tokens)),
            Self::Waiting => b.waiting.cmp(&a.waiting),
            Self::Memory => b.host.cmp(&a.host),
            Self::Budget => most(|row| row.fill.map_or(-1.0, super::picture::Used::share)),
            Self::Growth => most(|row| row.slope.unwrap_or(f64::MIN)),
            Self::Vram => vram(b).cmp(&vram(a)),
            Self::Verdict => b.verdict.cmp(&a.verdict),
            Self::Left => a.left.unwrap_or(f64::MAX).total_cmp(&b.left.unwrap_or(f64::MAX)),
        }
    }
}

fn vram(row: &Row) -> u64 {
    row.vram.iter().fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
}

impl State {
    /// The rows that are wanted, in their order.
    pub(super) fn rows(&self) -> Vec<&Row> {
        let wanted = self.filter.to_lowercase();
        let has = |row: &&Row| {
            wanted.is_empty()
                || [row.shown.to_lowercase().as_str(), row.state.0, row.verdict.as_str()]
                    .iter()
                    .any(|text| text.contains(&wanted))
        };
        let mut rows: Vec<&Row> = self.picture.rows.iter().filter(has).collect();
        rows.sort_by(|a, b| self.sort.order(a, b));
        if self.turned {
            rows.reverse();
        }
        rows
    }

    pub(super) fn row(&self, model: &str) -> Option<&Row> {
        self.picture.rows.iter().find(|row| row.name == model)
    }

    /// The model that keys act on.
    pub(super) fn chosen(&self) -> Option<&str> {
        match &self.view {
            View::Overview => self.selected.as_deref(),
            View::Model(model) | View::Log(model, _) => Some(model),
        }
    }

    /// The memories of a model that can be drawn.
    pub(super) fn keys(&self, model: &str) -> Vec<Key> {
        if let Some(film) = &self.film {
            return film.keys();
        }
        match self.stored_of(model) {
            // One that is not loaded has a past.
            Some(stored) => stored.keys(),
            None => self.history.keys(model),
        }
    }

    /// What was kept of a model's memories in the time that is wanted, if that has come.
    pub(super) fn stored_of(&self, model: &str) -> Option<&Stored> {
        let wanted = |stored: &&Stored| stored.model == model && stored.span == self.span;
        self.stored.as_ref().filter(|_| self.span != Span::Live).filter(wanted)
    }

    /// Events of one model, newest first.
    pub(super) fn told_of<'a>(&'a self, model: &'a str) -> impl Iterator<Item = &'a Told> {
        self.told.iter().rev().filter(move |told| told.model.as_deref() == Some(model))
    }

    /// Keeps the choice, the scrolling and the message where they can be.
    pub(super) fn settle(&mut self) {
        let (page, visible) = (layout::page(self), self.rows());
        let count = visible.len();
        let place = self.selected.as_ref().and_then(|name| visible.iter().position(|row| row.name == *name));
        let cursor = place.unwrap_or_else(|| self.cursor.min(count.saturating_sub(1)));
        let selected = visible.get(cursor).map(|row| row.name.clone());
        let first = self.first.min(cursor).max((cursor + 1).saturating_sub(page));
        (self.cursor, self.selected) = (cursor, selected);
        self.first = first.min(count.saturating_sub(page));
        if self.message.as_ref().is_some_and(|message| message.until <= self.at) {
            self.message = None;
        }
    }

    /// Chooses another row, `by` rows down or up.
    pub(super) fn choose(&mut self, place: usize) {
        let visible = self.rows();
        let place = place.min(visible.len().saturating_sub(1));
        let name = visible.get(place).map(|row| row.name.clone());
        (self.cursor, self.selected) = (place, name);
    }

    pub(super) fn say(&mut self, text: impl Into<String>, tone: Tone) {
        self.message = Some(Message { until: self.at + MESSAGE, text: text.into(), tone });
    }
}
