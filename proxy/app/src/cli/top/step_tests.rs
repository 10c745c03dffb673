//! Tests every key in every view, and all inputs from the instance.

use std::time::Duration;

use KeyCode::{Char, Down, End, Enter, Esc, F, Home, PageDown, PageUp, Tab, Up};
use ratatui_core::buffer::Buffer;
use ratatui_core::layout::Rect;
use warden_policies::WorkDone;
use warden_policies::growth::GrowthVerdict;

use super::super::draw::draw_screen;
use super::super::look::{GOOD, PLAIN, TerminalLook};
use super::super::picture::{EventLine, MemoryShare, ModelRow, RowGrowth};
use super::super::plot::MemoryHistory;
use super::super::state::{InstanceData, MESSAGE_DURATION, WatchedDetail};
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

fn names(state: &ScreenState) -> String {
    state.rows().iter().map(|row| row.name.as_str()).collect::<Vec<_>>().join(" ")
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
    let effects = press(&mut none, &[Down, PageDown, End, Enter, Char('r'), Char('l'), F(9), Tab]);
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
fn rows_are_sorted_by_keys_and_by_the_menu_and_turned() {
    let sorted = |all: &[KeyCode]| names(&pressed(all));
    assert_eq!(sorted(&[]), "beta alpha gamma");
    assert_eq!(sorted(&[Char('>')]), "alpha beta gamma", "by name");
    assert_eq!(sorted(&[Char('>'), Char('I')]), "gamma beta alpha");
    assert_eq!(sorted(&[Char('.'), Char(',')]), "beta alpha gamma");
    let order = |all: &[KeyCode]| SORT_ORDERS[pressed(all).table.order];
    assert_eq!(order(&[Char('<')]), "LEFT");
    assert_eq!(order(&[Char('<'), Char('>')]), "", "as configured");
    let by_verdict = [F(6), End, Up, Up, Enter];
    assert_eq!((order(&by_verdict), sorted(&by_verdict).as_str()), ("VERDICT", "alpha beta gamma"));
    let by_memory = [F(6), Home, Char('j'), Down, Down, Down, Down, Down, Enter];
    assert_eq!((order(&by_memory), sorted(&by_memory).as_str()), ("HOST", "beta gamma alpha"));
    let mut state = pressed(&[F(6), Down, Char('x')]);
    assert_eq!(state.overlay, ScreenOverlay::Sort(1));
    press(&mut state, &[Esc]);
    assert_eq!((state.overlay, state.table.order), (ScreenOverlay::Nothing, 0));
    // Every sort order is total, also for a model without readings.
    for order in 0..SORT_ORDERS.len() {
        let mut state = shown();
        state.data.picture.rows.push(ModelRow { name: "empty".to_owned(), ..ModelRow::default() });
        state.table.order = order;
        assert_eq!(state.rows().len(), 4, "{order}");
    }
}

#[test]
fn a_filter_is_written_kept_and_cleared() {
    let mut state = pressed(&[Char('/'), Char('L'), Char('E'), Char('a'), Char('x'), KeyCode::Backspace]);
    assert_eq!((state.table.filter.as_str(), names(&state).as_str()), ("LEa", "alpha"), "by verdict");
    assert_eq!(state.table.selected.as_deref(), Some("alpha"));
    let effects = press(&mut state, &[Char('q'), KeyCode::Backspace, Enter]);
    assert_eq!((&state.overlay, effects), (&ScreenOverlay::Nothing, vec![]));
    press(&mut state, &[Esc]);
    assert_eq!(state.rows().len(), 3);
    press(&mut state, &[F(4), Char('a')]);
    assert_eq!(control(&mut state, 'u'), None);
    press(&mut state, &[Char('m'), Down, Up]);
    assert_eq!(state.table.filter, "m");
    press(&mut state, &[Esc]);
    assert_eq!((state.table.filter.as_str(), state.overlay), ("", ScreenOverlay::Nothing));
    let long = pressed(&[&[Char('/')], [Char('x'); 100].as_slice()].concat());
    assert_eq!((long.table.filter.len(), long.rows().len()), (MAX_FILTER_CHARS, 0));
    assert_eq!(pressed(&[Char('/'), Char('\u{202e}')]).table.filter, "?");
}

#[test]
fn t_goes_through_the_times_of_a_memory_and_leaving_it_ends_the_asking() {
    let mut state = pressed(&[Down, Enter]);
    let asked = |span: usize| WatchedDetail::Memory("alpha".to_owned(), SPANS[span]);
    assert_eq!(state.watched(), asked(0));
    press(&mut state, &[Char('t')]);
    assert_eq!(state.watched(), asked(1));
    let history = MemoryHistory { model: "alpha".to_owned(), from: 5.0, ..MemoryHistory::default() };
    step(&mut state, ScreenInput::History(Box::new(history.clone())));
    assert_eq!((&state.history_of("alpha"), state.history_of("beta").from), (&history, 0.0));
    press(&mut state, &[Char('t')]);
    assert_eq!(state.watched(), asked(2));
    press(&mut state, &[Esc]);
    assert_eq!((state.watched(), &state.memory.history), (WatchedDetail::Nothing, &None));
    press(&mut state, &[Enter]);
    assert_eq!(state.watched(), asked(0));
}

#[test]
fn a_model_is_opened_its_log_followed_and_every_way_leads_back() {
    let mut state = pressed(&[Down, Enter]);
    let (model, log) = (ScreenView::Model("alpha".to_owned()), WatchedDetail::Log("alpha".to_owned()));
    assert_eq!(state.view, model);
    press(&mut state, &[Char('l')]);
    assert_eq!((&state.view, state.watched()), (&ScreenView::Log("alpha".to_owned(), true), log));
    press(&mut state, &[Esc]);
    assert_eq!(state.view, model);
    press(&mut state, &[KeyCode::Backspace]);
    assert_eq!(state.view, ScreenView::Overview);
    press(&mut state, &[Char('l')]);
    assert_eq!(state.view, ScreenView::Log("alpha".to_owned(), false));
    press(&mut state, &[Char('l')]);
    assert_eq!((&state.view, state.watched()), (&ScreenView::Overview, WatchedDetail::Nothing));
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
fn a_log_is_bounded_and_a_reader_of_older_lines_keeps_them_in_sight() {
    let mut state = pressed(&[Char('l')]);
    for n in 0..MAX_LOG_LINES + 10 {
        step(&mut state, ScreenInput::Log(format!("line {n}")));
    }
    assert_eq!((state.data.log.len(), state.scroll), (MAX_LOG_LINES, 0));
    press(&mut state, &[Up, PageUp]);
    let before = state.scroll;
    assert_eq!(before, 1 + state.page);
    step(&mut state, ScreenInput::Log("new".to_owned()));
    assert_eq!(state.scroll, before + 1);
    press(&mut state, &[Home]);
    assert_eq!(state.scroll, state.data.log.len() - state.page);
    press(&mut state, &[Down, PageDown, End, Char('k'), Char('j')]);
    assert_eq!(state.scroll, 0);
}

#[test]
fn an_action_needs_a_confirmation_and_only_yes_does_it() {
    let confirm = |key, model: &str| ScreenOverlay::Confirm(action(key), model.to_owned());
    for key in ['r', 'd', 'c', 'p', 'u'] {
        let mut state = pressed(&[Down, Char(key)]);
        assert_eq!(state.overlay, confirm(key, "alpha"));
        let effects = press(&mut state, &[Char('Y')]);
        assert_eq!(effects, [ScreenEffect::Act(action(key), "alpha".to_owned())]);
        assert_eq!(state.overlay, ScreenOverlay::Nothing);
        assert!(state.message.unwrap().1.contains("alpha"));
        // Any other key declines, too: pasted text would reach a `y` sooner or later.
        for no in [Char('n'), Char('N'), Esc, Char('q'), Char('x'), Enter] {
            let mut state = shown();
            let effects = press(&mut state, &[Char(key), no, Char('y')]);
            assert_eq!((state.overlay, effects), (ScreenOverlay::Nothing, vec![]), "{no:?}");
        }
    }
    assert_eq!(pressed(&[F(9), Down, Enter]).overlay, confirm('d', "beta"));
    assert_eq!(pressed(&[F(9), Char('c')]).overlay, confirm('c', "beta"));
    assert_eq!(pressed(&[Enter, Char('r')]).overlay, confirm('r', "beta"), "also in the view of a model");
    // The confirmation applies to the model that was selected when it opened.
    let mut state = pressed(&[Down, Char('r')]);
    see(&mut state, 2, picture(Vec::new()));
    let effects = press(&mut state, &[Char('y')]);
    assert_eq!(effects, [ScreenEffect::Act(action('r'), "alpha".to_owned())]);
}

#[test]
fn read_only_nothing_is_done_whatever_is_pressed() {
    for all in [[Char('r'), Char('y')], [Char('d'), Char('y')], [Char('c'), Char('y')], [F(9), Char('r')]] {
        let mut state = shown();
        state.read_only = true;
        let effects = press(&mut state, &all);
        assert_eq!((state.overlay, effects), (ScreenOverlay::Nothing, vec![]), "{all:?}");
        assert!(state.message.unwrap().1.contains("--read-only"));
    }
}

#[test]
fn it_is_quit_suspended_and_drawn_again_in_every_view() {
    let places: [&[KeyCode]; 7] = [&[], &[Enter], &[Char('l')], &[F(1)], &[F(6)], &[F(9)], &[Char('/')]];
    for place in places {
        let mut state = pressed(place);
        for (letter, effect) in
            [('c', ScreenEffect::Quit), ('Z', ScreenEffect::Suspend), ('l', ScreenEffect::Redraw)]
        {
            assert_eq!(control(&mut state, letter), Some(effect), "{place:?} {letter}");
        }
        assert_eq!(press(&mut state, &[F(10)]), [ScreenEffect::Quit], "{place:?}");
    }
    for place in &places[..3] {
        assert_eq!(press(&mut pressed(place), &[Char('q')]), [ScreenEffect::Quit], "{place:?}");
    }
    for key in [F(1), Char('?'), Char('h')] {
        let mut state = pressed(&[key]);
        assert_eq!(state.overlay, ScreenOverlay::Help);
        let effects = press(&mut state, &[Char('q')]);
        assert_eq!((state.overlay, effects), (ScreenOverlay::Nothing, vec![]), "any key closes it");
    }
}

#[test]
fn keys_with_alt_and_those_that_are_released_do_nothing() {
    let mut state = shown();
    let mut key = KeyEvent::new(Char('r'), KeyModifiers::ALT);
    step(&mut state, ScreenInput::Key(key));
    (key.modifiers, key.kind) = (KeyModifiers::NONE, KeyEventKind::Release);
    step(&mut state, ScreenInput::Key(key));
    assert_eq!(state.overlay, ScreenOverlay::Nothing);
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
        let event = EventLine { time, at: 0.0, model, text: n.to_string(), tone, leaks: false };
        step(&mut state, ScreenInput::Event(event));
    }
    assert_eq!(state.data.events.len(), MAX_KEPT_EVENTS);
    assert_eq!(state.events_of("alpha").next().unwrap().text, (MAX_KEPT_EVENTS + 4).to_string());
    assert_eq!(state.events_of("alpha").count(), MAX_KEPT_EVENTS / 2);
}

#[test]
fn a_recording_has_its_own_keys_and_no_actions() {
    let line = |t: u32| format!("{{\"t\":{t},\"requests\":{t},\"rss_anon_kib\":1000,\"vram_mib\":5}}\n");
    let text = (0..=100).map(line).collect::<Vec<_>>().concat();
    let samples = warden_policies::trace::parse_recording(&text).unwrap();
    let (recording, _) = PlayedRecording::open("a.jsonl", &samples, &warden_policies::defaults().growth);
    let mut state = ScreenState {
        data: InstanceData { picture: recording.picture(), ..InstanceData::default() },
        recording: Some(recording),
        view: ScreenView::Model("a.jsonl".to_owned()),
        ..ScreenState::default()
    };
    let words = |state: &ScreenState| state.recording.as_ref().unwrap().words();
    step(&mut state, ScreenInput::Tick(Duration::from_secs(5)));
    assert_eq!(words(&state), "10s of 1m40s, 2x");
    assert!(state.row("a.jsonl").unwrap().words[0].contains("10s since its start: 10 requests answered"));
    let (left, right) = (KeyCode::Left, KeyCode::Right);
    press(&mut state, &[right, left, right, Char(' '), Char('+'), Char('='), Char('-')]);
    assert_eq!(words(&state), "15s of 1m40s, 5x, paused");
    press(&mut state, &[End]);
    assert_eq!(words(&state), "1m40s of 1m40s, 5x, over");
    press(&mut state, &[Home, Tab]);
    assert_eq!((words(&state).as_str(), state.memory.series), ("0s of 1m40s, 5x, paused", 1));
    let effects = press(&mut state, &[Char('r'), Char('y'), Char('t'), Char('l'), F(9), Char('y')]);
    assert_eq!((state.overlay, effects), (ScreenOverlay::Nothing, vec![]));
}
