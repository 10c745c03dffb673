//! State of the screen, its inputs and its effects, as plain values that tests can replay.

use std::collections::VecDeque;
use std::time::Duration;

use crossterm::event::KeyEvent;
use ratatui_core::style::Color;

use super::picture::{EventLine, InstancePicture, ModelRow, RateCounters};

pub(super) const MESSAGE_DURATION: Duration = Duration::from_secs(8);

/// Times are since 1970, by a clock that never jumps.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum ScreenInput {
    Key(KeyEvent),
    /// The size of the terminal may have changed.
    Resized,
    Tick(Duration),
    Picture(Duration, Box<InstancePicture>),
    /// The instance sent no picture; the text is the reason.
    Silent(Duration, String),
    Event(EventLine),
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
}

#[derive(Debug, Default)]
pub(super) struct InstanceData {
    /// Time of the first missing picture, and the reason.
    pub(super) silent: Option<(Duration, String)>,
    pub(super) picture: InstancePicture,
    pub(super) rates: RateCounters,
    /// Oldest first.
    pub(super) events: VecDeque<EventLine>,
}

#[derive(Debug, Default)]
pub(super) struct TableView {
    /// Name of the selected model, which `cursor` points to.
    pub(super) selected: Option<String>,
    pub(super) cursor: usize,
    /// First visible row.
    pub(super) first: usize,
}

#[derive(Debug, Default)]
pub(super) struct ScreenState {
    /// Time since 1970.
    pub(super) at: Duration,
    pub(super) data: InstanceData,
    pub(super) view: ScreenView,
    /// Action that the next key confirms or declines, and its model.
    pub(super) asked: Option<(&'static ModelAction, String)>,
    /// The terminal is too small for the view.
    pub(super) too_small: bool,
    pub(super) table: TableView,
    /// Number of hidden lines above the visible ones of a model's view.
    pub(super) scroll: usize,
    pub(super) page: usize,
    /// Message, with the time at which it disappears.
    pub(super) message: Option<(Duration, String, Color)>,
    pub(super) read_only: bool,
    /// The command prints the screen once as text, without keys and events.
    pub(super) once: bool,
}

impl ScreenState {
    pub(super) fn rows(&self) -> &[ModelRow] {
        &self.data.picture.rows
    }

    pub(super) fn row(&self, model: &str) -> Option<&ModelRow> {
        self.rows().iter().find(|row| row.name == model)
    }

    pub(super) fn chosen(&self) -> Option<&str> {
        match &self.view {
            ScreenView::Overview => self.table.selected.as_deref(),
            ScreenView::Model(model) => Some(model),
        }
    }

    /// Newest first.
    pub(super) fn events_of<'a>(&'a self, model: &'a str) -> impl Iterator<Item = &'a EventLine> {
        self.data.events.iter().rev().filter(move |one| one.model.as_deref() == Some(model))
    }

    /// Keeps the selected model, or selects its neighbour if the model is gone. Removes an expired message.
    pub(super) fn settle(&mut self) {
        let selected = self.table.selected.as_deref();
        let place = self.rows().iter().position(|row| Some(row.name.as_str()) == selected);
        self.choose(place.unwrap_or(self.table.cursor));
        if self.message.as_ref().is_some_and(|(until, ..)| *until <= self.at) {
            self.message = None;
        }
    }

    pub(super) fn choose(&mut self, place: usize) {
        let place = place.min(self.rows().len().saturating_sub(1));
        self.table.selected = self.rows().get(place).map(|row| row.name.clone());
        self.table.cursor = place;
    }

    pub(super) fn say(&mut self, text: impl Into<String>, tone: Color) {
        self.message = Some((self.at + MESSAGE_DURATION, text.into(), tone));
    }
}
