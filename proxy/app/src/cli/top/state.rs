//! State of the screen, its inputs and its effects, as plain values that tests can replay.

use std::collections::VecDeque;
use std::time::Duration;

use crossterm::event::KeyEvent;
use ratatui_core::style::Color;

use super::columns::{SORT_ORDERS, compare_rows};
use super::picture::{EventLine, InstancePicture, ModelRow, RateCounters};
use super::plot::{MemoryHistory, SPANS, TimeSpan};
use super::recording::PlayedRecording;

pub(super) const MESSAGE_DURATION: Duration = Duration::from_secs(8);

/// Times are since 1970, by a clock that never jumps.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum ScreenInput {
    Key(KeyEvent),
    Tick(Duration),
    Picture(Duration, Box<InstancePicture>),
    /// The instance sent no picture; the text is the reason.
    Silent(Duration, String),
    Event(EventLine),
    History(Box<MemoryHistory>),
    Log(String),
    /// The instance sends the log from its beginning.
    LogBegins,
    /// The terminal delivers no more keys.
    KeysGone,
    Message(String, Color),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ScreenEffect {
    Quit,
    Suspend,
    Redraw,
    /// Ends the program, because it can no longer receive a key.
    KeysGone,
    Act(&'static ModelAction, String),
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct ModelAction {
    pub(super) key: char,
    pub(super) route: &'static str,
    pub(super) words: &'static str,
}

const fn action(key: char, route: &'static str, words: &'static str) -> ModelAction {
    ModelAction { key, route, words }
}

pub(super) static MODEL_ACTIONS: [ModelAction; 5] = [
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
    Model(String),
    /// The flag is true if the operator opened the log from the model's view.
    Log(String, bool),
}

/// A box over the view, which receives all keys.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum ScreenOverlay {
    #[default]
    Nothing,
    Help,
    /// The terminal is too small for the view.
    TooSmall,
    Filter,
    Sort(usize),
    Actions(usize),
    Confirm(&'static ModelAction, String),
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum WatchedDetail {
    #[default]
    Nothing,
    Memory(String, TimeSpan),
    Log(String),
}

#[derive(Debug, Default)]
pub(super) struct InstanceData {
    /// Time of the first missing picture, and the reason.
    pub(super) silent: Option<(Duration, String)>,
    pub(super) picture: InstancePicture,
    pub(super) rates: RateCounters,
    /// Oldest first.
    pub(super) events: VecDeque<EventLine>,
    /// Lines of the followed log, oldest first.
    pub(super) log: VecDeque<String>,
}

#[derive(Debug, Default)]
pub(super) struct TableView {
    /// Shows models whose name, state or verdict contains this text.
    pub(super) filter: String,
    /// Index in [`SORT_ORDERS`].
    pub(super) order: usize,
    pub(super) reversed: bool,
    /// Name of the selected model, which `cursor` points to.
    pub(super) selected: Option<String>,
    pub(super) cursor: usize,
    /// First visible row.
    pub(super) first: usize,
}

impl TableView {
    fn rows<'a>(&self, all: &'a [ModelRow]) -> Vec<&'a ModelRow> {
        let wanted = self.filter.to_lowercase();
        let passes = |row: &&ModelRow| {
            let texts = [row.shown.to_lowercase().as_str(), row.state.0, row.growth.verdict.as_str()]
                .map(|text| text.contains(&wanted));
            texts.contains(&true)
        };
        let mut rows: Vec<&ModelRow> = all.iter().filter(passes).collect();
        rows.sort_by(|a, b| compare_rows(SORT_ORDERS[self.order], a, b));
        if self.reversed {
            rows.reverse();
        }
        rows
    }

    fn choose(&mut self, all: &[ModelRow], place: usize) {
        let rows = self.rows(all);
        let place = place.min(rows.len().saturating_sub(1));
        let name = rows.get(place).map(|row| row.name.clone());
        (self.cursor, self.selected) = (place, name);
    }
}

#[derive(Debug, Default)]
pub(super) struct HistoryView {
    /// Index in [`SPANS`].
    pub(super) span: usize,
    pub(super) history: Option<MemoryHistory>,
    /// Index of the drawn memory among the model's memories.
    pub(super) series: usize,
}

#[derive(Debug, Default)]
pub(super) struct ScreenState {
    /// Time since 1970.
    pub(super) at: Duration,
    pub(super) data: InstanceData,
    pub(super) view: ScreenView,
    pub(super) overlay: ScreenOverlay,
    pub(super) table: TableView,
    /// Number of hidden lines: above the visible ones in a model's view, below them in a log.
    pub(super) scroll: usize,
    pub(super) page: usize,
    pub(super) memory: HistoryView,
    /// Message, with the time at which it disappears.
    pub(super) message: Option<(Duration, String, Color)>,
    pub(super) read_only: bool,
    /// The command prints the screen once as text, without keys and events.
    pub(super) once: bool,
    /// Replaces the instance while a recording is played.
    pub(super) recording: Option<PlayedRecording>,
}

impl ScreenState {
    pub(super) fn rows(&self) -> Vec<&ModelRow> {
        self.table.rows(&self.data.picture.rows)
    }

    pub(super) fn row(&self, model: &str) -> Option<&ModelRow> {
        self.data.picture.rows.iter().find(|row| row.name == model)
    }

    pub(super) fn chosen(&self) -> Option<&str> {
        match &self.view {
            ScreenView::Overview => self.table.selected.as_deref(),
            ScreenView::Model(model) | ScreenView::Log(model, _) => Some(model),
        }
    }

    pub(super) fn watched(&self) -> WatchedDetail {
        match &self.view {
            ScreenView::Overview => WatchedDetail::Nothing,
            ScreenView::Model(model) => WatchedDetail::Memory(model.clone(), SPANS[self.memory.span]),
            ScreenView::Log(model, _) => WatchedDetail::Log(model.clone()),
        }
    }

    pub(super) fn history_of(&self, model: &str) -> MemoryHistory {
        let known = match &self.recording {
            Some(recording) => Some(recording.history()),
            None => self.memory.history.clone().filter(|history| history.model == model),
        };
        known.unwrap_or_default()
    }

    /// Newest first; of a recording, only events up to the shown moment.
    pub(super) fn events_of<'a>(&'a self, model: &'a str) -> impl Iterator<Item = &'a EventLine> {
        let until = self.recording.as_ref().map_or(f64::MAX, PlayedRecording::seconds);
        let wanted = move |one: &&EventLine| one.model.as_deref() == Some(model) && one.at <= until;
        self.data.events.iter().rev().filter(wanted)
    }

    /// Keeps the selected model, or selects its neighbour if the model is gone. Removes an expired message.
    pub(super) fn settle(&mut self) {
        let rows = self.rows();
        let place =
            self.table.selected.as_ref().and_then(|name| rows.iter().position(|row| row.name == *name));
        let cursor = place.unwrap_or(self.table.cursor);
        self.choose(cursor);
        if self.message.as_ref().is_some_and(|(until, ..)| *until <= self.at) {
            self.message = None;
        }
    }

    pub(super) fn choose(&mut self, place: usize) {
        self.table.choose(&self.data.picture.rows, place);
    }

    pub(super) fn say(&mut self, text: impl Into<String>, tone: Color) {
        self.message = Some((self.at + MESSAGE_DURATION, text.into(), tone));
    }
}
