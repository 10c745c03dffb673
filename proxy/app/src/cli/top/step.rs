//! One step: what was on the screen and what happened become what is on the screen, and what is asked for. Pure.
//!
//! ```text
//!             Enter           l
//!  Overview ────────> Model ────> Log        over each: help, filter, menus, a question
//!      ^  <─── Esc ──── │ <─ Esc ─ │
//!      └────────────── Esc ────────┘ (where `l` was pressed there)
//! ```

use super::film::Film;
use super::input::{Action, Effect, Input, Key};
use super::layout;
use super::look::Tone;
use super::picture::Picture;
use super::state::{EVENTS, LINES, Link, Over, Sort, State, View};
use super::stored::Span;
use super::text::tame;

/// Letters of a filter.
const FILTER: usize = 60;

pub(super) fn step(mut state: State, input: Input) -> (State, Vec<Effect>) {
    let mut effects = Vec::new();
    match input {
        Input::Key(key) => press(&mut state, key, &mut effects),
        Input::Size(columns, rows) => state.size = (columns, rows),
        Input::Tick(at) => {
            let passed = at.saturating_sub(state.at);
            state.at = at;
            if let Some(film) = &mut state.film {
                film.pass(passed);
                state.picture = film.picture();
            }
        }
        Input::Picture(at, picture) => see(&mut state, at, *picture),
        Input::Silent(at, why) => {
            state.at = at;
            if !matches!(state.link, Link::Silent(..)) {
                state.link = Link::Silent(at, why);
            } else if let Link::Silent(_, before) = &mut state.link {
                *before = why;
            }
        }
        Input::Told(told) => {
            if state.told.len() >= EVENTS {
                state.told.pop_front();
            }
            state.told.push_back(told);
        }
        Input::Stored(stored) => state.stored = Some(*stored),
        Input::Log(line) => log(&mut state, line),
        Input::Missed(lines) => log(&mut state, format!("({lines} lines came too fast to be shown)")),
        Input::Said(text, tone) | Input::Done(text, tone) => state.say(text, tone),
    }
    state.settle();
    (state, effects)
}

fn log(state: &mut State, line: String) {
    if state.log.len() >= LINES {
        state.log.pop_front();
    }
    state.log.push_back(line);
    // Who reads older lines keeps them in sight.
    if matches!(state.view, View::Log(..)) && state.scroll > 0 {
        state.scroll = (state.scroll + 1).min(state.log.len());
    }
}

fn see(state: &mut State, at: std::time::Duration, picture: Picture) {
    state.at = at;
    let before = state.picture.who.pid.zip(Some(&state.picture.who.started_at));
    let now = picture.who.pid.zip(Some(&picture.who.started_at));
    if before.is_some() && before != now {
        // Its counters, processes and events begin anew.
        state.rates.forget();
        let pid = picture.who.pid.unwrap_or_default();
        state.say(format!("llama-warden was started again: it is process {pid} now"), Tone::Warn);
    }
    state.rates.see(at, &picture.rows);
    state.history.see(at, &picture.rows);
    state.picture = picture;
    for row in &mut state.picture.rows {
        row.rate = state.rates.of(&row.name);
    }
    state.link = Link::Live;
}

fn press(state: &mut State, key: Key, effects: &mut Vec<Effect>) {
    match key {
        Key::Ctrl('c') | Key::F(10) => return effects.push(Effect::Quit),
        Key::Ctrl('z') => return effects.push(Effect::Suspend),
        Key::Ctrl('l') => return effects.push(Effect::Redraw),
        _ => {}
    }
    match state.over.clone() {
        Over::Nothing => view(state, key, effects),
        Over::Help => state.over = Over::Nothing,
        Over::Filter => filter(state, key),
        Over::Sort(line) => {
            if let Some(line) = menu(state, key, line, Sort::ALL.len(), Over::Sort) {
                state.sort = Sort::ALL[line];
                state.over = Over::Nothing;
            }
        }
        Over::Actions(line) => {
            let by_letter = Action::ALL.iter().position(|action| Key::Char(action.key()) == key);
            let chosen = by_letter.or_else(|| menu(state, key, line, Action::ALL.len(), Over::Actions));
            if let Some(action) = chosen.and_then(|line| Action::ALL.get(line)) {
                ask(state, *action);
            }
        }
        Over::Ask(action, model) => match key {
            Key::Char('y' | 'Y') => {
                state.say(format!("{} of {}: asked for", action.route(), tame(&model)), Tone::Busy);
                effects.push(Effect::Do(action, model));
                state.over = Over::Nothing;
            }
            Key::Char('n' | 'N' | 'q') | Key::Esc => state.over = Over::Nothing,
            _ => {}
        },
    }
}

/// Moves in a menu; the line when it is chosen.
fn menu(state: &mut State, key: Key, line: usize, lines: usize, over: fn(usize) -> Over) -> Option<usize> {
    state.over = match key {
        Key::Up | Key::Char('k') => over((line + lines - 1) % lines),
        Key::Down | Key::Char('j') => over((line + 1) % lines),
        Key::Home => over(0),
        Key::End => over(lines - 1),
        Key::Enter => return Some(line),
        Key::Esc | Key::Char('q') => Over::Nothing,
        _ => return None,
    };
    None
}

fn filter(state: &mut State, key: Key) {
    match key {
        Key::Char(letter) if state.filter.chars().count() < FILTER => {
            state.filter.push_str(&tame(letter.encode_utf8(&mut [0; 4])));
        }
        Key::Backspace => drop(state.filter.pop()),
        Key::Ctrl('u') => state.filter.clear(),
        Key::Enter => state.over = Over::Nothing,
        Key::Esc => {
            state.filter.clear();
            state.over = Over::Nothing;
        }
        Key::Up => state.choose(state.cursor.saturating_sub(1)),
        Key::Down => state.choose(state.cursor + 1),
        _ => {}
    }
}

fn view(state: &mut State, key: Key, effects: &mut Vec<Effect>) {
    if state.film.is_some() && play(state, key) {
        return;
    }
    match key {
        Key::Char('q') => return effects.push(Effect::Quit),
        Key::F(1) | Key::Char('?' | 'h') => return state.over = Over::Help,
        Key::F(9) => {
            state.over = if may(state) { Over::Actions(0) } else { Over::Nothing };
            return;
        }
        Key::Char(letter) => {
            if let Some(action) = Action::ALL.into_iter().find(|action| action.key() == letter) {
                return ask(state, action);
            }
        }
        _ => {}
    }
    match state.view.clone() {
        View::Overview => overview(state, key, effects),
        View::Model(model) => of_model(state, key, &model, effects),
        View::Log(model, within) => of_log(state, key, &model, within, effects),
    }
}

fn overview(state: &mut State, key: Key, effects: &mut Vec<Effect>) {
    let page = layout::page(state);
    match key {
        Key::Up | Key::Char('k') => state.choose(state.cursor.saturating_sub(1)),
        Key::Down | Key::Char('j') => state.choose(state.cursor + 1),
        Key::PageUp => state.choose(state.cursor.saturating_sub(page)),
        Key::PageDown => state.choose(state.cursor + page),
        Key::Home | Key::Char('g') => state.choose(0),
        Key::End | Key::Char('G') => state.choose(usize::MAX),
        Key::Enter => {
            if let Some(model) = state.selected.clone() {
                (state.view, state.scroll, state.series) = (View::Model(model), 0, 0);
            }
        }
        Key::F(4) | Key::Char('/') => state.over = Over::Filter,
        Key::F(6) => state.over = Over::Sort(place(state.sort)),
        Key::Char('>' | '.') => state.sort = Sort::ALL[(place(state.sort) + 1) % Sort::ALL.len()],
        Key::Char('<' | ',') => {
            state.sort = Sort::ALL[(place(state.sort) + Sort::ALL.len() - 1) % Sort::ALL.len()];
        }
        Key::Char('I') => state.turned = !state.turned,
        Key::Char('l') => {
            if let Some(model) = state.selected.clone() {
                follow(state, model, false, effects);
            }
        }
        Key::Esc => state.filter.clear(),
        _ => {}
    }
}

fn place(sort: Sort) -> usize {
    Sort::ALL.iter().position(|one| *one == sort).unwrap_or(0)
}

fn of_model(state: &mut State, key: Key, model: &str, effects: &mut Vec<Effect>) {
    let page = layout::text(state, !state.keys(model).is_empty());
    match key {
        Key::Esc | Key::Backspace => {
            (state.view, state.scroll) = (View::Overview, 0);
            if state.span != Span::Live {
                forget(state);
                effects.push(Effect::Recall(model.to_owned(), Span::Live));
            }
        }
        Key::Up | Key::Char('k') => state.scroll = state.scroll.saturating_sub(1),
        Key::Down | Key::Char('j') => state.scroll += 1,
        Key::PageUp => state.scroll = state.scroll.saturating_sub(page),
        Key::PageDown => state.scroll += page,
        Key::Home | Key::Char('g') => state.scroll = 0,
        Key::Char('t') => recall(state, model, effects),
        Key::Tab => state.series = (state.series + 1) % state.keys(model).len().max(1),
        Key::Char('l') => follow(state, model.to_owned(), true, effects),
        _ => {}
    }
    // It cannot be scrolled away.
    let lines = super::draw::words(state, model, usize::from(state.size.0)).len();
    state.scroll = state.scroll.min(lines.saturating_sub(page));
}

/// The next time of which a memory is shown.
fn recall(state: &mut State, model: &str, effects: &mut Vec<Effect>) {
    if state.film.is_some() {
        return state.say("a recording has only what is in it", Tone::Plain);
    }
    let next = state.span.next();
    forget(state);
    state.span = next;
    effects.push(Effect::Recall(model.to_owned(), next));
}

/// A time that was looked at is not of the next model.
fn forget(state: &mut State) {
    (state.span, state.stored, state.series) = (Span::Live, None, 0);
}

fn follow(state: &mut State, model: String, within: bool, effects: &mut Vec<Effect>) {
    if state.film.is_some() {
        return state.say("a recording has no log", Tone::Plain);
    }
    state.log.clear();
    (state.view, state.scroll) = (View::Log(model.clone(), within), 0);
    effects.push(Effect::Follow(model));
}

fn of_log(state: &mut State, key: Key, model: &str, within: bool, effects: &mut Vec<Effect>) {
    let page = layout::text(state, false);
    match key {
        Key::Esc | Key::Backspace | Key::Char('l') => {
            state.view = if within { View::Model(model.to_owned()) } else { View::Overview };
            state.scroll = 0;
            state.log.clear();
            effects.push(Effect::Unfollow);
        }
        Key::Up | Key::Char('k') => state.scroll += 1,
        Key::Down | Key::Char('j') => state.scroll = state.scroll.saturating_sub(1),
        Key::PageUp => state.scroll += page,
        Key::PageDown => state.scroll = state.scroll.saturating_sub(page),
        Key::Home | Key::Char('g') => state.scroll = usize::MAX,
        Key::End | Key::Char('G') => state.scroll = 0,
        _ => {}
    }
    state.scroll = state.scroll.min(state.log.len().saturating_sub(page));
}

/// Keys that only a recording has; whether it was one.
fn play(state: &mut State, key: Key) -> bool {
    let Some(film) = &mut state.film else { return false };
    match key {
        Key::Char(' ') => film.pause(),
        Key::Char('+' | '=') => film.faster(),
        Key::Char('-') => film.slower(),
        Key::Left => film.seek(-Film::SEEK),
        Key::Right => film.seek(Film::SEEK),
        Key::Home => film.seek(-1.0),
        Key::End => film.seek(1.0),
        _ => return false,
    }
    state.picture = film.picture();
    true
}

/// Whether anything may be done to the chosen model; says why not.
fn may(state: &mut State) -> bool {
    let why = if state.film.is_some() {
        "a recording cannot be changed"
    } else if state.read_only {
        "this screen only shows (--read-only)"
    } else if state.chosen().is_none() {
        "there is no model"
    } else {
        return true;
    };
    state.say(why, Tone::Plain);
    false
}

fn ask(state: &mut State, action: Action) {
    state.over = Over::Nothing;
    if may(state)
        && let Some(model) = state.chosen()
    {
        state.over = Over::Ask(action, model.to_owned());
    }
}

#[cfg(test)]
#[path = "step_tests.rs"]
mod tests;
