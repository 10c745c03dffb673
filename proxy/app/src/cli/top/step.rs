//! Steps of the screen: an input changes the state, and may request something. Pure.

use std::time::Duration;

use crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::look::{BUSY, PLAIN, WARN, sanitize};
use super::picture::{InstancePicture, RateCounters};
use super::state::{MODEL_ACTIONS, ModelAction, ScreenEffect, ScreenInput, ScreenState, ScreenView};

const MAX_KEPT_EVENTS: usize = 500;

pub(super) fn step(state: &mut ScreenState, input: ScreenInput) -> Option<ScreenEffect> {
    let mut effect = None;
    match input {
        ScreenInput::Key(key) => effect = press_key(state, key),
        ScreenInput::Resized => {}
        ScreenInput::Tick(at) => state.at = at,
        ScreenInput::Picture(at, picture) => take_picture(state, at, *picture),
        ScreenInput::Silent(at, why) => {
            state.at = at;
            let since = state.data.silent.as_ref().map_or(at, |(since, _)| *since);
            state.data.silent = Some((since, why));
        }
        ScreenInput::Event(event) => {
            if state.data.events.len() >= MAX_KEPT_EVENTS {
                state.data.events.pop_front();
            }
            state.data.events.push_back(event);
        }
        ScreenInput::KeysGone => effect = Some(ScreenEffect::KeysGone),
        ScreenInput::Message(text, tone) => state.say(text, tone),
    }
    state.settle();
    effect
}

fn take_picture(state: &mut ScreenState, at: Duration, mut picture: InstancePicture) {
    if let (Some(_), Some((pid, _))) = (state.data.picture.instance, picture.instance)
        && state.data.picture.instance != picture.instance
    {
        // The new instance counts from zero.
        state.data.rates = RateCounters::default();
        // The question is about the previous instance.
        state.asked = None;
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
        return match letter.to_ascii_lowercase() {
            'c' => Some(ScreenEffect::Quit),
            'z' => Some(ScreenEffect::Suspend),
            'l' => Some(ScreenEffect::Redraw),
            _ => None,
        };
    }
    if key.code == KeyCode::F(10) {
        return Some(ScreenEffect::Quit);
    }
    if state.too_small {
        // Ignore all other keys, because the operator could not see their effects.
        return (key.code == KeyCode::Char('q')).then_some(ScreenEffect::Quit);
    }
    // Every other key than `y` declines, so that pasted text never reaches a later `y`.
    if let Some((action, model)) = state.asked.take() {
        if !matches!(key.code, KeyCode::Char('y' | 'Y')) {
            return None;
        }
        state.say(format!("{} of {}: requested", action.route, sanitize(&model)), BUSY);
        return Some(ScreenEffect::Act(action, model));
    }
    press_in_view(state, key.code)
}

fn press_in_view(state: &mut ScreenState, code: KeyCode) -> Option<ScreenEffect> {
    let is_overview = state.view == ScreenView::Overview;
    let place = if is_overview { state.table.cursor } else { state.scroll };
    if let Some(place) = moved_position(code, place, state.page) {
        if is_overview {
            state.choose(place);
        } else {
            state.scroll = place;
        }
        return None;
    }
    match code {
        KeyCode::Char('q') => return Some(ScreenEffect::Quit),
        KeyCode::Enter if is_overview => {
            if let Some(model) = state.table.selected.clone() {
                (state.view, state.scroll) = (ScreenView::Model(model), 0);
            }
        }
        KeyCode::Esc | KeyCode::Backspace => state.view = ScreenView::Overview,
        code => {
            if let Some(action) = action_of(code) {
                ask_to_confirm(state, action);
            }
        }
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

fn action_of(code: KeyCode) -> Option<&'static ModelAction> {
    MODEL_ACTIONS.iter().find(|action| code == KeyCode::Char(action.key))
}

fn ask_to_confirm(state: &mut ScreenState, action: &'static ModelAction) {
    match state.chosen() {
        _ if state.read_only => state.say("this screen only shows (--read-only)", PLAIN),
        Some(model) => state.asked = Some((action, model.to_owned())),
        None => state.say("there is no model", PLAIN),
    }
}

#[cfg(test)]
#[path = "step_tests.rs"]
mod tests;
