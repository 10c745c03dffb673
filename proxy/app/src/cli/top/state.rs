//! The state of the screen, its inputs and its requests: values, so that a test can play them.

use std::collections::VecDeque;
use std::time::Duration;

use crossterm::event::KeyEvent;

use super::columns::{ORDERS, compare_rows};
use super::memory::{MemoryHistory, SPANS, TimeSpan};
use super::picture::{EventLine, InstancePicture, ModelRow};
use super::rates::RateCounters;
use super::recording::PlayedRecording;
use ratatui_core::style::Color;

/// For how long a message stays.
pub(super) const MESSAGE: Duration = Duration::from_secs(8);

/// An input from outside. Times are since 1970, by a clock that never jumps.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum ScreenInput {
    Key(KeyEvent),
    /// Time has passed.
    Tick(Duration),
    Picture(Duration, Box<InstancePicture>),
    /// The instance gave no picture, and why.
    Silent(Duration, String),
    Event(EventLine),
    /// The memory of the model that is viewed.
    History(Box<MemoryHistory>),
    /// A line of the log that is followed.
    Log(String),
    /// The log is followed from its beginning again.
    LogBegins,
    /// The terminal gives no keys any more.
    KeysGone,
    /// A sentence for some seconds.
    Message(String, Color),
}

/// A request by a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ScreenEffect {
    Quit,
    /// To be stopped as a shell stops a job.
    Suspend,
    /// To draw all of the screen again.
    Redraw,
    /// To end, because no key can end it.
    KeysGone,
    Act(&'static ModelAction, String),
}

/// An action on a model.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ModelAction {
    pub(super) key: char,
    /// The last part of its route.
    pub(super) route: &'static str,
    pub(super) words: &'static str,
}

const fn action(key: char, route: &'static str, words: &'static str) -> ModelAction {
    ModelAction { key, route, words }
}

pub(super) static ACTIONS: [ModelAction; 5] = [
    action('r', "restart", "Replace its processes; requests wait or go to the next one"),
    action('d', "drain", "Drain and stop it; the next request starts it again"),
    action('c', "reclaim", "Ask its processes to give back unused memory, while they serve"),
    action('p', "pin", "Never unload it for another model, until llama-warden restarts"),
    action('u', "unpin", "Let it be unloaded for another model, whatever is configured"),
];

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum ScreenView {
    #[default]
    Overview,
    /// One model and its memory.
    Model(String),
    /// Its log, and whether it was opened in the view of the model.
    Log(String, bool),
}

/// A box over the view, which takes the keys.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum ScreenOverlay {
    #[default]
    Nothing,
    Help,
    /// A sentence in the place of everything: the terminal is too small.
    TooSmall,
    /// The filter is typed.
    Filter,
    /// A menu, and its chosen line.
    Sort(usize),
    Actions(usize),
    /// Asks for a confirmation of an action on a model.
    Confirm(&'static ModelAction, String),
}

/// Data that the instance is asked for in addition to pictures and events.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum WatchedDetail {
    #[default]
    Nothing,
    Memory(String, TimeSpan),
    Log(String),
}

#[derive(Debug, Default)]
pub(super) struct ScreenState {
    /// Time since 1970.
    pub(super) at: Duration,
    /// Since when the instance has given no picture, and why.
    pub(super) silent: Option<(Duration, String)>,
    pub(super) picture: InstancePicture,
    pub(super) rates: RateCounters,
    /// Oldest first.
    pub(super) events: VecDeque<EventLine>,
    /// Lines of the log that is followed, oldest first.
    pub(super) log: VecDeque<String>,
    pub(super) view: ScreenView,
    pub(super) overlay: ScreenOverlay,
    /// Part of the name, the state or the verdict of the models that are shown.
    pub(super) filter: String,
    /// The order of the rows, by its number in [`ORDERS`].
    pub(super) order: usize,
    pub(super) reversed: bool,
    /// The name of the chosen model, and its row.
    pub(super) selected: Option<String>,
    pub(super) cursor: usize,
    /// The first row on the screen.
    pub(super) first: usize,
    /// Lines out of sight: above in the view of a model, below in a log.
    pub(super) scroll: usize,
    /// Rows or lines of the view that were on the screen when it was drawn last.
    pub(super) page: usize,
    /// The time that is shown of a memory, by its number in [`SPANS`].
    pub(super) span: usize,
    pub(super) history: Option<MemoryHistory>,
    /// The memory of a model that is drawn, by its number.
    pub(super) series: usize,
    /// Until when, and what.
    pub(super) message: Option<(Duration, String, Color)>,
    pub(super) read_only: bool,
    /// The screen is text for a script: without keys and events.
    pub(super) once: bool,
    /// Played in the place of an instance.
    pub(super) recording: Option<PlayedRecording>,
}

impl ScreenState {
    /// The rows that pass the filter, sorted.
    pub(super) fn rows(&self) -> Vec<&ModelRow> {
        let wanted = self.filter.to_lowercase();
        let passes = |row: &&ModelRow| {
            let texts = [row.shown.to_lowercase().as_str(), row.state.0, row.verdict.as_str()]
                .map(|text| text.contains(&wanted));
            texts.contains(&true)
        };
        let mut rows: Vec<&ModelRow> = self.picture.rows.iter().filter(passes).collect();
        rows.sort_by(|a, b| compare_rows(ORDERS[self.order], a, b));
        if self.reversed {
            rows.reverse();
        }
        rows
    }

    pub(super) fn row(&self, model: &str) -> Option<&ModelRow> {
        self.picture.rows.iter().find(|row| row.name == model)
    }

    /// The model that keys act on.
    pub(super) fn chosen(&self) -> Option<&str> {
        match &self.view {
            ScreenView::Overview => self.selected.as_deref(),
            ScreenView::Model(model) | ScreenView::Log(model, _) => Some(model),
        }
    }

    pub(super) fn watched(&self) -> WatchedDetail {
        match &self.view {
            ScreenView::Overview => WatchedDetail::Nothing,
            ScreenView::Model(model) => WatchedDetail::Memory(model.clone(), SPANS[self.span]),
            ScreenView::Log(model, _) => WatchedDetail::Log(model.clone()),
        }
    }

    /// The memories of a model, as far as they are known.
    pub(super) fn history_of(&self, model: &str) -> MemoryHistory {
        let known = match &self.recording {
            Some(recording) => Some(recording.history()),
            None => self.history.clone().filter(|history| history.model == model),
        };
        known.unwrap_or_default()
    }

    /// Events of one model that have happened by now, newest first.
    pub(super) fn events_of<'a>(&'a self, model: &'a str) -> impl Iterator<Item = &'a EventLine> {
        let until = self.recording.as_ref().map_or(f64::MAX, PlayedRecording::seconds);
        let wanted = move |one: &&EventLine| one.model.as_deref() == Some(model) && one.at <= until;
        self.events.iter().rev().filter(wanted)
    }

    /// Keeps the chosen model chosen, or its neighbour when it is gone; removes an old message.
    pub(super) fn settle(&mut self) {
        let rows = self.rows();
        let place = self.selected.as_ref().and_then(|name| rows.iter().position(|row| row.name == *name));
        let cursor = place.unwrap_or(self.cursor);
        self.choose(cursor);
        if self.message.as_ref().is_some_and(|(until, ..)| *until <= self.at) {
            self.message = None;
        }
    }

    /// Chooses a row, or the last one if there are fewer.
    pub(super) fn choose(&mut self, place: usize) {
        let rows = self.rows();
        let place = place.min(rows.len().saturating_sub(1));
        let name = rows.get(place).map(|row| row.name.clone());
        (self.cursor, self.selected) = (place, name);
    }

    pub(super) fn say(&mut self, text: impl Into<String>, tone: Color) {
        self.message = Some((self.at + MESSAGE, text.into(), tone));
    }
}
