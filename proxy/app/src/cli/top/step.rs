//! Steps of the screen: an input changes the state, and may request something. Pure.
//!
//! ```text
//!             Enter           l
//!  Overview ────────> Model ────> Log        over each: help, filter, menus, a confirmation
//!      ^  <─── Esc ──── │ <─ Esc ─ │
//!      └────────────── Esc ────────┘ (where `l` was pressed there)
//! ```

use std::collections::VecDeque;
use std::time::Duration;

use crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::columns::SORT_ORDERS;
use super::look::{BUSY, PLAIN, WARN, sanitize};
use super::picture::{InstancePicture, RateCounters};
use super::plot::SPANS;
use super::recording::PlayedRecording;
use super::state::{
    HistoryView, MODEL_ACTIONS, ModelAction, ScreenEffect, ScreenInput, ScreenOverlay, ScreenState,
    ScreenView,
};

const MAX_FILTER_CHARS: usize = 60;
const MAX_KEPT_EVENTS: usize = 500;
const MAX_LOG_LINES: usize = 2000;

pub(super) fn step(state: &mut ScreenState, input: ScreenInput) -> Option<ScreenEffect> {
    let mut effect = None;
    match input {
        ScreenInput::Key(key) => effect = press_key(state, key),
        ScreenInput::Tick(at) => {
            let passed = at.saturating_sub(state.at);
            state.at = at;
            if let Some(recording) = &mut state.recording {
                recording.advance(passed);
                state.data.picture = recording.picture();
            }
        }
        ScreenInput::Picture(at, picture) => take_picture(state, at, *picture),
        ScreenInput::Silent(at, why) => {
            state.at = at;
            let since = state.data.silent.as_ref().map_or(at, |(since, _)| *since);
            state.data.silent = Some((since, why));
        }
        ScreenInput::Event(event) => keep_last(&mut state.data.events, event, MAX_KEPT_EVENTS),
        ScreenInput::History(history) => state.memory.history = Some(*history),
        ScreenInput::Log(line) => {
            keep_last(&mut state.data.log, line, MAX_LOG_LINES);
            // Keep the visible older lines in place while the operator reads them.
            if state.scroll > 0 && matches!(state.view, ScreenView::Log(..)) {
                state.scroll = state.scroll.saturating_add(1);
            }
        }
        ScreenInput::LogBegins => state.data.log.clear(),
        ScreenInput::KeysGone => effect = Some(ScreenEffect::KeysGone),
        ScreenInput::Message(text, tone) => state.say(text, tone),
    }
    state.settle();
    effect
}

fn keep_last<T>(kept: &mut VecDeque<T>, one: T, most: usize) {
    if kept.len() >= most {
        kept.pop_front();
    }
    kept.push_back(one);
}

fn take_picture(state: &mut ScreenState, at: Duration, mut picture: InstancePicture) {
    if let (Some(_), Some((pid, _))) = (state.data.picture.instance, picture.instance)
        && state.data.picture.instance != picture.instance
    {
        // The new instance counts from zero.
        state.data.rates = RateCounters::default();
        // The box asks about the previous instance, so close it.
        if matches!(state.overlay, ScreenOverlay::Confirm(..) | ScreenOverlay::Actions(_)) {
            state.overlay = ScreenOverlay::Nothing;
        }
        state.say(format!("llama-warden was restarted: its PID is {pid} now"), WARN);
    }
    state.data.rates.update_rates(at, &mut picture.rows);
    (state.at, state.data.silent, state.data.picture) = (at, None, picture);
}

fn press_key(state: &mut ScreenState, key: KeyEvent) -> Option<ScreenEffect> {
    if key.kind == KeyEventKind::Release || key.modifiers.contains(KeyModifiers::ALT) {
        return None;
    }
    if let (KeyCode::Char(letter), true) = (key.code, key.modifiers.contains(KeyModifiers::CONTROL)) {
        match letter.to_ascii_lowercase() {
            'c' => return Some(ScreenEffect::Quit),
            'z' => return Some(ScreenEffect::Suspend),
            'l' => return Some(ScreenEffect::Redraw),
            'u' if state.overlay == ScreenOverlay::Filter => state.table.filter.clear(),
            _ => {}
        }
        return None;
    }
    if key.code == KeyCode::F(10) {
        return Some(ScreenEffect::Quit);
    }
    match state.overlay.clone() {
        ScreenOverlay::Nothing => return press_in_view(state, key.code),
        // Ignore all other keys, because the operator could not see their effects.
        ScreenOverlay::TooSmall => return (key.code == KeyCode::Char('q')).then_some(ScreenEffect::Quit),
        ScreenOverlay::Help => state.overlay = ScreenOverlay::Nothing,
        ScreenOverlay::Filter => edit_filter(state, key.code),
        ScreenOverlay::Sort(line) => {
            if press_in_menu(state, key.code, line, SORT_ORDERS.len(), ScreenOverlay::Sort) {
                state.table.order = line;
            }
        }
        ScreenOverlay::Actions(line) => {
            if press_in_menu(state, key.code, line, MODEL_ACTIONS.len(), ScreenOverlay::Actions) {
                ask_to_confirm(state, &MODEL_ACTIONS[line]);
            } else if let Some(action) = action_of(key.code) {
                ask_to_confirm(state, action);
            }
        }
        ScreenOverlay::Confirm(action, model) => match key.code {
            KeyCode::Char('y' | 'Y') => {
                state.say(format!("{} of {}: requested", action.route, sanitize(&model)), BUSY);
                state.overlay = ScreenOverlay::Nothing;
                return Some(ScreenEffect::Act(action, model));
            }
            // Every other key closes the box, so that pasted text never reaches a later `y`.
            _ => state.overlay = ScreenOverlay::Nothing,
        },
    }
    None
}

/// Returns the new position; `None` if the key moves nothing.
fn moved_position(code: KeyCode, place: usize, page: usize) -> Option<usize> {
    Some(match code {
        KeyCode::Up | KeyCode::Char('k') => place.saturating_sub(1),
        KeyCode::Down | KeyCode::Char('j') => place.saturating_add(1),
        KeyCode::PageUp => place.saturating_sub(page),
        KeyCode::PageDown => place.saturating_add(page),
        KeyCode::Home | KeyCode::Char('g') => 0,
        KeyCode::End | KeyCode::Char('G') => usize::MAX,
        _ => return None,
    })
}

/// Returns whether the key chose the line.
fn press_in_menu(
    state: &mut ScreenState,
    code: KeyCode,
    line: usize,
    lines: usize,
    menu: fn(usize) -> ScreenOverlay,
) -> bool {
    if let Some(line) = moved_position(code, line, lines) {
        state.overlay = menu(line.min(lines - 1));
    } else if matches!(code, KeyCode::Enter | KeyCode::Esc | KeyCode::Char('q')) {
        state.overlay = ScreenOverlay::Nothing;
    }
    code == KeyCode::Enter
}

fn edit_filter(state: &mut ScreenState, code: KeyCode) {
    match code {
        KeyCode::Char(letter) if state.table.filter.chars().count() < MAX_FILTER_CHARS => {
            state.table.filter.push_str(&sanitize(letter.encode_utf8(&mut [0; 4])));
        }
        KeyCode::Backspace => drop(state.table.filter.pop()),
        KeyCode::Enter => state.overlay = ScreenOverlay::Nothing,
        KeyCode::Esc => {
            state.table.filter.clear();
            state.overlay = ScreenOverlay::Nothing;
        }
        KeyCode::Up => state.choose(state.table.cursor.saturating_sub(1)),
        KeyCode::Down => state.choose(state.table.cursor + 1),
        _ => {}
    }
}

fn action_of(code: KeyCode) -> Option<&'static ModelAction> {
    MODEL_ACTIONS.iter().find(|action| code == KeyCode::Char(action.key))
}

fn press_in_view(state: &mut ScreenState, code: KeyCode) -> Option<ScreenEffect> {
    if play_recording(state, code) {
        return None;
    }
    match code {
        KeyCode::Char('q') => return Some(ScreenEffect::Quit),
        KeyCode::F(1) | KeyCode::Char('?' | 'h') => state.overlay = ScreenOverlay::Help,
        KeyCode::F(9) if may_act(state) => state.overlay = ScreenOverlay::Actions(0),
        code => {
            if let Some(action) = action_of(code) {
                ask_to_confirm(state, action);
                return None;
            }
            match state.view.clone() {
                ScreenView::Overview => press_in_overview(state, code),
                ScreenView::Model(model) => press_in_model(state, code, model),
                ScreenView::Log(model, within) => press_in_log(state, code, model, within),
            }
        }
    }
    None
}

fn press_in_overview(state: &mut ScreenState, code: KeyCode) {
    if let Some(place) = moved_position(code, state.table.cursor, state.page) {
        return state.choose(place);
    }
    match (code, state.table.selected.clone()) {
        (KeyCode::Enter, Some(model)) => open_view(state, ScreenView::Model(model)),
        (KeyCode::Char('l'), Some(model)) => open_log(state, model, false),
        (KeyCode::F(4) | KeyCode::Char('/'), _) => state.overlay = ScreenOverlay::Filter,
        (KeyCode::F(6), _) => state.overlay = ScreenOverlay::Sort(state.table.order),
        (KeyCode::Char('>' | '.'), _) => state.table.order = (state.table.order + 1) % SORT_ORDERS.len(),
        (KeyCode::Char('<' | ','), _) => {
            state.table.order = (state.table.order + SORT_ORDERS.len() - 1) % SORT_ORDERS.len();
        }
        (KeyCode::Char('I'), _) => state.table.reversed = !state.table.reversed,
        (KeyCode::Esc, _) => state.table.filter.clear(),
        _ => {}
    }
}

fn open_view(state: &mut ScreenState, view: ScreenView) {
    (state.view, state.scroll) = (view, 0);
    state.data.log.clear();
}

fn press_in_model(state: &mut ScreenState, code: KeyCode, model: String) {
    if let Some(place) = moved_position(code, state.scroll, state.page) {
        state.scroll = place;
        return;
    }
    match code {
        KeyCode::Esc | KeyCode::Backspace => {
            open_view(state, ScreenView::Overview);
            state.memory = HistoryView::default();
        }
        KeyCode::Char('t') if state.recording.is_some() => {
            state.say("a recording has only its own time", PLAIN);
        }
        KeyCode::Char('t') => state.memory.span = (state.memory.span + 1) % SPANS.len(),
        KeyCode::Tab => {
            let count = state.history_of(&model).lines.len().max(1);
            state.memory.series = (state.memory.series + 1) % count;
        }
        KeyCode::Char('l') => open_log(state, model, true),
        _ => {}
    }
}

fn open_log(state: &mut ScreenState, model: String, within: bool) {
    if state.recording.is_some() {
        return state.say("a recording has no log", PLAIN);
    }
    open_view(state, ScreenView::Log(model, within));
}

fn press_in_log(state: &mut ScreenState, code: KeyCode, model: String, within: bool) {
    let lines = state.data.log.len();
    if let Some(place) = moved_position(code, lines.saturating_sub(state.scroll), state.page) {
        state.scroll = lines.saturating_sub(place);
    } else if matches!(code, KeyCode::Esc | KeyCode::Backspace | KeyCode::Char('l')) {
        open_view(state, if within { ScreenView::Model(model) } else { ScreenView::Overview });
    }
}

/// Returns whether the key belongs to the playback.
fn play_recording(state: &mut ScreenState, code: KeyCode) -> bool {
    let Some(recording) = &mut state.recording else { return false };
    match code {
        KeyCode::Char(' ') => recording.toggle_pause(),
        KeyCode::Char('+' | '=') => recording.change_speed(1),
        KeyCode::Char('-') => recording.change_speed(-1),
        KeyCode::Left => recording.seek(-PlayedRecording::SEEK),
        KeyCode::Right => recording.seek(PlayedRecording::SEEK),
        KeyCode::Home => recording.seek(-1.0),
        KeyCode::End => recording.seek(1.0),
        _ => return false,
    }
    state.data.picture = recording.picture();
    true
}

/// Returns whether keys may act on the selected model, and shows the reason if not.
fn may_act(state: &mut ScreenState) -> bool {
    let why = if state.recording.is_some() {
        "a recording cannot be changed"
    } else if state.read_only {
        "this screen only shows (--read-only)"
    } else if state.chosen().is_none() {
        "there is no model"
    } else {
        return true;
    };
    state.say(why, PLAIN);
    false
}

fn ask_to_confirm(state: &mut ScreenState, action: &'static ModelAction) {
    state.overlay = ScreenOverlay::Nothing;
    if may_act(state)
        && let Some(model) = state.chosen()
    {
        state.overlay = ScreenOverlay::Confirm(action, model.to_owned());
    }
}

#[cfg(test)]
#[path = "step_tests.rs"]
mod tests;
