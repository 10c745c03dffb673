//! Tests every key in every view, and all inputs from the instance.

use std::time::Duration;

use KeyCode::{Backspace, Char, Down, End, Enter, Esc, F, Home, PageDown, PageUp, Up};
use ratatui_core::buffer::Buffer;
use ratatui_core::layout::Rect;
use warden_policies::WorkDone;
use warden_policies::growth::GrowthVerdict;

use super::super::draw::draw_screen;
use super::super::look::{GOOD, PLAIN, TerminalLook};
use super::super::picture::{EventLine, MemoryShare, ModelRow, RowGrowth};
use super::super::state::MESSAGE_DURATION;
use super::*;

fn row(name: &str, verdict: GrowthVerdict, host: u64) -> ModelRow {
    ModelRow {
        name: name.to_owned(),
        shown: sanitize(name),
        state: ("loaded", GOOD),
        growth: RowGrowth { verdict, ..RowGrowth::default() },
        host: Some(host),
        fill: Some(MemoryShare { used: host, total: 1000 }),
        work: vec![((0, Some(1)), WorkDone { requests: 10, output_tokens: 100, ..WorkDone::default() })],
        ..ModelRow::default()
    }
}

fn picture(rows: Vec<ModelRow>) -> InstancePicture {
    InstancePicture { instance: Some((7, jiff::Timestamp::UNIX_EPOCH)), rows, ..InstancePicture::default() }
}

fn three() -> InstancePicture {
    picture(vec![
        row("beta", GrowthVerdict::Steady, 300),
        row("alpha", GrowthVerdict::Leaking, 100),
        row("gamma", GrowthVerdict::Warming, 200),
    ])
}

/// Three models on a screen of 80 by 24.
fn shown() -> ScreenState {
    let mut state = ScreenState::default();
    see(&mut state, 1, three());
    draw(&mut state, (80, 24));
    state
}

fn see(state: &mut ScreenState, second: u64, picture: InstancePicture) {
    step(state, ScreenInput::Picture(Duration::from_secs(second), Box::new(picture)));
}

fn draw(state: &mut ScreenState, (columns, rows): (u16, u16)) {
    let look = TerminalLook { colour: true, unicode: true };
    draw_screen(state, look, &mut Buffer::empty(Rect::new(0, 0, columns, rows)));
}

fn press(state: &mut ScreenState, all: &[KeyCode]) -> Vec<ScreenEffect> {
    let mut effects = Vec::new();
    for key in all {
        effects.extend(step(state, ScreenInput::Key(KeyEvent::new(*key, KeyModifiers::NONE))));
        draw(state, (80, 24));
    }
    effects
}

fn pressed(all: &[KeyCode]) -> ScreenState {
    let mut state = shown();
    press(&mut state, all);
    state
}

fn control(state: &mut ScreenState, letter: char) -> Option<ScreenEffect> {
    step(state, ScreenInput::Key(KeyEvent::new(Char(letter), KeyModifiers::CONTROL)))
}

fn action(key: char) -> &'static ModelAction {
    action_of(Char(key)).unwrap()
}

#[test]
fn keys_choose_a_model_and_never_one_that_is_not_there() {
    let chosen = |all: &[KeyCode]| pressed(all).table.selected.unwrap();
    assert_eq!(chosen(&[]), "beta");
    for (all, model) in [
        (&[Down][..], "alpha"),
        (&[Char('j'), Char('j')], "gamma"),
        (&[Down, Down, Down, Down], "gamma"),
        (&[Down, Up, Up], "beta"),
        (&[Down, Char('k')], "beta"),
        (&[PageDown], "gamma"),
        (&[End, PageUp], "beta"),
        (&[End], "gamma"),
        (&[Char('G'), Char('g')], "beta"),
        (&[End, Home], "beta"),
    ] {
        assert_eq!(chosen(all), model, "{all:?}");
    }
    let mut none = ScreenState::default();
    let effects = press(&mut none, &[Down, PageDown, End, Enter, Char('r')]);
    assert_eq!((none.table.selected, none.view, effects), (None, ScreenView::Overview, vec![]));
}

#[test]
fn the_choice_follows_its_model_and_goes_to_a_neighbour_when_it_is_gone() {
    let mut state = pressed(&[Down]);
    let mut other = three();
    other.rows.reverse();
    see(&mut state, 2, other);
    assert_eq!((state.table.selected.as_deref(), state.table.cursor), (Some("alpha"), 1));
    let mut less = three();
    less.rows.remove(1);
    see(&mut state, 3, less);
    assert_eq!(state.table.selected.as_deref(), Some("gamma"));
    see(&mut state, 4, picture(Vec::new()));
    assert_eq!((state.table.selected.as_deref(), state.table.cursor), (None, 0));
}

#[test]
fn the_chosen_row_stays_on_the_screen() {
    let mut state = ScreenState::default();
    see(
        &mut state,
        0,
        picture((0..50).map(|n| row(&format!("m{n:02}"), GrowthVerdict::Steady, 1)).collect()),
    );
    for key in [End, Up, PageUp, PageUp, Down, Home, PageDown, PageDown, PageDown] {
        step(&mut state, ScreenInput::Key(KeyEvent::new(key, KeyModifiers::NONE)));
        draw(&mut state, (60, 10));
        let (first, cursor) = (state.table.first, state.table.cursor);
        assert!((first..first + state.page).contains(&cursor), "{key:?}: {first} {cursor}");
    }
    // A larger screen is filled from the end.
    step(&mut state, ScreenInput::Key(KeyEvent::new(End, KeyModifiers::NONE)));
    draw(&mut state, (60, 40));
    assert_eq!(state.table.first + state.page, 50);
}

#[test]
fn a_model_is_opened_and_left() {
    for key in [Esc, Backspace] {
        let mut state = pressed(&[Down, Enter]);
        assert_eq!(state.view, ScreenView::Model("alpha".to_owned()));
        press(&mut state, &[key]);
        assert_eq!((state.view, state.table.cursor), (ScreenView::Overview, 1));
    }
}

#[test]
fn text_is_scrolled_no_farther_than_it_goes() {
    let mut state = shown();
    let mut long = three();
    long.rows[0].words = (0..100).map(|n| format!("line {n}")).collect();
    see(&mut state, 2, long);
    press(&mut state, &[Enter, Up, Char('j'), Down]);
    assert_eq!(state.scroll, 2);
    press(&mut state, &[PageDown; 50]);
    assert_eq!(state.scroll, 100 - state.page);
    press(&mut state, &[Char('k'), PageUp, Char('g')]);
    assert_eq!(state.scroll, 0);
}

#[test]
fn an_action_needs_a_confirmation_and_only_yes_does_it() {
    let confirm = |key, model: &str| Some((action(key), model.to_owned()));
    for key in ['r', 'd', 'c', 'p', 'u'] {
        let mut state = pressed(&[Down, Char(key)]);
        assert_eq!(state.asked, confirm(key, "alpha"));
        let effects = press(&mut state, &[Char('Y')]);
        assert_eq!(effects, [ScreenEffect::Act(action(key), "alpha".to_owned())]);
        assert_eq!(state.asked, None);
        assert!(state.message.unwrap().1.contains("alpha"));
        // Any other key declines, too: pasted text would reach a `y` sooner or later.
        for no in [Char('n'), Char('N'), Esc, Char('q'), Char('x'), Enter] {
            let mut state = shown();
            let effects = press(&mut state, &[Char(key), no, Char('y')]);
            assert_eq!((state.asked, effects), (None, vec![]), "{no:?}");
        }
    }
    assert_eq!(pressed(&[Enter, Char('r')]).asked, confirm('r', "beta"), "also in the view of a model");
    // The confirmation applies to the model that was selected when it opened.
    let mut state = pressed(&[Down, Char('r')]);
    see(&mut state, 2, picture(Vec::new()));
    let effects = press(&mut state, &[Char('y')]);
    assert_eq!(effects, [ScreenEffect::Act(action('r'), "alpha".to_owned())]);
}

#[test]
fn read_only_nothing_is_done_whatever_is_pressed() {
    for all in ['r', 'd', 'c', 'p', 'u'].map(|key| [Char(key), Char('y')]) {
        let mut state = shown();
        state.read_only = true;
        let effects = press(&mut state, &all);
        assert_eq!((state.asked, effects), (None, vec![]), "{all:?}");
        assert!(state.message.unwrap().1.contains("--read-only"));
    }
}

#[test]
fn it_is_quit_suspended_and_drawn_again_in_every_view() {
    let places: [&[KeyCode]; 3] = [&[], &[Enter], &[Char('r')]];
    for place in places {
        let mut state = pressed(place);
        for (letter, effect) in
            [('c', ScreenEffect::Quit), ('Z', ScreenEffect::Suspend), ('l', ScreenEffect::Redraw)]
        {
            assert_eq!(control(&mut state, letter), Some(effect), "{place:?} {letter}");
        }
        assert_eq!(press(&mut state, &[F(10)]), [ScreenEffect::Quit], "{place:?}");
    }
    for place in &places[..2] {
        assert_eq!(press(&mut pressed(place), &[Char('q')]), [ScreenEffect::Quit], "{place:?}");
    }
}

#[test]
fn keys_with_alt_and_those_that_are_released_do_nothing() {
    let mut state = shown();
    let mut key = KeyEvent::new(Char('r'), KeyModifiers::ALT);
    step(&mut state, ScreenInput::Key(key));
    (key.modifiers, key.kind) = (KeyModifiers::NONE, KeyEventKind::Release);
    step(&mut state, ScreenInput::Key(key));
    assert_eq!(state.asked, None);
    step(&mut state, ScreenInput::Key(KeyEvent::new(Char('G'), KeyModifiers::SHIFT)));
    assert_eq!(state.table.cursor, 2);
}

#[test]
fn an_instance_that_is_silent_keeps_its_picture_and_one_that_was_restarted_is_reported() {
    let mut state = shown();
    for second in [5, 9] {
        step(&mut state, ScreenInput::Silent(Duration::from_secs(second), "frozen".to_owned()));
    }
    assert_eq!(state.data.silent, Some((Duration::from_secs(5), "frozen".to_owned())));
    assert_eq!(state.data.picture.rows.len(), 3);
    let mut other = three();
    other.instance = Some((8, jiff::Timestamp::UNIX_EPOCH));
    other.rows[0].work[0].1.requests = 12;
    see(&mut state, 10, other);
    assert_eq!(state.data.silent, None);
    assert!(state.message.as_ref().unwrap().1.contains("PID is 8"));
    assert_eq!(state.data.picture.rows[0].load.rate, None, "its counters are others");
    step(&mut state, ScreenInput::Tick(Duration::from_secs(10) + MESSAGE_DURATION));
    assert_eq!(state.message, None);
}

#[test]
fn events_are_bounded_and_known_by_their_model() {
    let mut state = shown();
    for n in 0..MAX_KEPT_EVENTS + 5 {
        let model = Some(if n.is_multiple_of(2) { "alpha" } else { "beta" }.to_owned());
        let (time, tone) = (String::new(), PLAIN);
        let event = EventLine { time, at: 0.0, model, text: n.to_string(), tone };
        step(&mut state, ScreenInput::Event(event));
    }
    assert_eq!(state.data.events.len(), MAX_KEPT_EVENTS);
    assert_eq!(state.events_of("alpha").next().unwrap().text, (MAX_KEPT_EVENTS + 4).to_string());
    assert_eq!(state.events_of("alpha").count(), MAX_KEPT_EVENTS / 2);
}
