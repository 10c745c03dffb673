//! What reaches the screen from outside, and what it asks for: values, so that a test can play them.

use std::time::Duration;

use super::look::Tone;
use super::picture::Picture;
use super::stored::{Span, Stored};

/// A key, whatever the terminal calls it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Key {
    Char(char),
    Ctrl(char),
    F(u8),
    Up,
    Down,
    Left,
    Right,
    PageUp,
    PageDown,
    Home,
    End,
    Enter,
    Esc,
    Backspace,
    Tab,
}

/// What happened. Times are since `top` was started.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Input {
    Key(Key),
    /// Columns and rows of the terminal.
    Size(u16, u16),
    /// Time has passed.
    Tick(Duration),
    /// The instance answered.
    Picture(Duration, Box<Picture>),
    /// It did not, and why.
    Silent(Duration, String),
    /// Something happened to a model.
    Told(Told),
    /// What was kept of the memories of a model.
    Stored(Box<Stored>),
    /// A line of the log of the model that is followed.
    Log(String),
    /// So many lines were not shown, because they came faster than they could be.
    Missed(u64),
    /// Something to say that is not the end of an action.
    Said(String, Tone),
    /// What came of an action, in words.
    Done(String, Tone),
}

/// An event, as it is shown.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Told {
    /// When, in the viewer's zone.
    pub(super) time: String,
    /// When, in seconds since `top` was started; below 0: before.
    pub(super) at: f64,
    /// The model, as routes know it.
    pub(super) model: Option<String>,
    pub(super) text: String,
    /// How it is marked in the line of the memory.
    pub(super) mark: Option<(char, Tone)>,
}

/// What can be done to a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Restart,
    Drain,
    Reclaim,
    Pin,
    Unpin,
}

impl Action {
    pub(super) const ALL: [Self; 5] = [Self::Restart, Self::Drain, Self::Reclaim, Self::Pin, Self::Unpin];

    /// The last part of its route.
    pub(super) const fn route(self) -> &'static str {
        match self {
            Self::Restart => "restart",
            Self::Drain => "drain",
            Self::Reclaim => "reclaim",
            Self::Pin => "pin",
            Self::Unpin => "unpin",
        }
    }

    pub(super) const fn key(self) -> char {
        match self {
            Self::Restart => 'r',
            Self::Drain => 'd',
            Self::Reclaim => 'c',
            Self::Pin => 'p',
            Self::Unpin => 'u',
        }
    }

    pub(super) const fn words(self) -> &'static str {
        match self {
            Self::Restart => "Replace its processes; requests wait or go to the next one",
            Self::Drain => "Drain and stop it; the next request starts it again",
            Self::Reclaim => "Ask its processes to give back what they hoard; they serve on",
            Self::Pin => "It leaves for no other model, until llama-warden is started anew",
            Self::Unpin => "It may leave for another model again, whatever is configured",
        }
    }
}

/// What the screen asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    Quit,
    /// To be stopped as a shell stops a job.
    Suspend,
    /// All of the screen anew.
    Redraw,
    Do(Action, String),
    /// The lines of a model's log, from now on.
    Follow(String),
    Unfollow,
    /// What was kept of a model's memories in this time, from now on; nothing for [`Span::Live`].
    Recall(String, Span),
}
