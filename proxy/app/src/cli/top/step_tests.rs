//! Every key in every view, and what comes from the instance.

use std::time::Duration;

use warden_policies::growth::Verdict;

use super::super::input::Told;
use super::super::picture::{Done, Row, Used, Who};
use super::super::state::MESSAGE;
use super::super::stored::{Span, Stored};
use super::*;

fn row(name: &str, verdict: Verdict, host: u64) -> Row {
    Row {
        name: name.to_owned(),
        shown: tame(name),
        state: ("loaded", Tone::Good),
        verdict,
        host: Some(host),
        fill: Some(Used { used: host, total: 1000 }),
        work: vec![Done { replica: 0, generation: Some(1), requests: 10, tokens: 100 }],
        ..Row::default()
    }
}

fn picture(rows: Vec<Row>) -> Picture {
    let who = Who { pid: Some(7), started_at: "2026-01-01T00:00:00Z".to_owned(), ..Who::default() };
    Picture { who, rows, ..Picture::default() }
}

fn three() -> Picture {
    picture(vec![
        row("beta", Verdict::Steady, 300),
        row("alpha", Verdict::Leaking, 100),
        row("gamma", Verdict::Warming, 200),
    ])
}

/// A screen of 80 by 24 that shows three models.
fn shown() -> State {
    let state = step(State::default(), Input::Size(80, 24)).0;
    step(state, Input::Picture(Duration::from_secs(1), Box::new(three()))).0
}

fn keys(state: State, all: &[Key]) -> (State, Vec<Effect>) {
    all.iter().fold((state, Vec::new()), |(state, mut effects), key| {
        let (state, more) = step(state, Input::Key(*key));
        effects.extend(more);
        (state, effects)
    })
}

fn names(state: &State) -> Vec<&str> {
    state.rows().iter().map(|row| row.name.as_str()).collect()
}

use Key::{Char, Ctrl, Down, End, Enter, Esc, F, Home, PageDown, PageUp, Tab, Up};

#[test]
fn keys_choose_a_model_and_never_one_that_is_not_there() {
    let chosen = |all: &[Key]| keys(shown(), all).0.selected.unwrap();
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
    let (none, effects) =
        keys(State::default(), &[Down, PageDown, End, Enter, Char('r'), Char('l'), F(9), Tab]);
    assert_eq!((none.selected, none.view, effects), (None, View::Overview, vec![]));
}

#[test]
fn the_choice_follows_its_model_and_goes_to_a_neighbour_when_it_is_gone() {
    let (state, _) = keys(shown(), &[Down]);
    let mut other = three();
    other.rows.reverse();
    let state = step(state, Input::Picture(Duration::from_secs(2), Box::new(other))).0;
    assert_eq!((state.selected.as_deref(), state.cursor), (Some("alpha"), 1));
    let mut less = three();
    less.rows.remove(1);
    let state = step(state, Input::Picture(Duration::from_secs(3), Box::new(less))).0;
    assert_eq!(state.selected.as_deref(), Some("gamma"));
    let state = step(state, Input::Picture(Duration::from_secs(4), Box::new(picture(Vec::new())))).0;
    assert_eq!((state.selected.as_deref(), state.cursor, state.first), (None, 0, 0));
}

#[test]
fn the_chosen_row_stays_on_the_screen() {
    let many = (0..50).map(|n| row(&format!("m{n:02}"), Verdict::Steady, 1)).collect();
    let state = step(State::default(), Input::Size(60, 10)).0;
    let mut state = step(state, Input::Picture(Duration::ZERO, Box::new(picture(many)))).0;
    for key in [End, Up, PageUp, PageUp, Down, Home, PageDown, PageDown, PageDown] {
        state = step(state, Input::Key(key)).0;
        let page = layout::page(&state);
        assert!(
            (state.first..state.first + page).contains(&state.cursor),
            "{key:?}: {} {}",
            state.first,
            state.cursor
        );
    }
    // A larger screen is filled from the end.
    let (state, _) = keys(state, &[End]);
    let state = step(state, Input::Size(60, 40)).0;
    assert_eq!(state.first + layout::page(&state), 50);
}

#[test]
fn rows_are_sorted_by_keys_and_by_the_menu_and_turned() {
    let sorted = |all: &[Key]| {
        let (state, _) = keys(shown(), all);
        names(&state).join(" ")
    };
    assert_eq!(sorted(&[]), "beta alpha gamma");
    assert_eq!(sorted(&[Char('>')]), "alpha beta gamma", "by name");
    assert_eq!(sorted(&[Char('>'), Char('I')]), "gamma beta alpha");
    assert_eq!(sorted(&[Char('.'), Char(',')]), "beta alpha gamma");
    assert_eq!(sorted(&[F(6), End, Up, Enter]), "alpha beta gamma", "by verdict");
    assert_eq!(
        sorted(&[F(6), Home, Char('j'), Char('j'), Char('j'), Char('j'), Char('j'), Char('j'), Enter]),
        "beta gamma alpha",
        "by memory"
    );
    let (state, _) = keys(shown(), &[F(6), Char('k')]);
    assert_eq!(state.over, Over::Sort(Sort::ALL.len() - 1));
    let (state, _) = keys(state, &[Char('x'), Esc]);
    assert_eq!((state.over, state.sort), (Over::Nothing, Sort::Configured));
    // Each order is one, whatever is not known of a model.
    for sort in Sort::ALL {
        let mut state = shown();
        state.picture.rows.push(Row { name: "empty".to_owned(), ..Row::default() });
        state.sort = sort;
        assert_eq!(state.rows().len(), 4, "{sort:?}");
    }
}

#[test]
fn a_filter_is_written_kept_and_cleared() {
    let (state, _) = keys(shown(), &[Char('/'), Char('L'), Char('E'), Char('a'), Char('x'), Key::Backspace]);
    assert_eq!((state.filter.as_str(), names(&state).join(" ").as_str()), ("LEa", "alpha"), "by verdict");
    assert_eq!(state.selected.as_deref(), Some("alpha"));
    let (state, effects) = keys(state, &[Char('q'), Key::Backspace, Enter]);
    assert_eq!((&state.over, effects), (&Over::Nothing, vec![]));
    let (state, _) = keys(state, &[Esc]);
    assert_eq!(names(&state).len(), 3);
    let (state, _) = keys(state, &[F(4), Char('a'), Ctrl('u'), Char('m'), Down, Up, Esc]);
    assert_eq!((state.filter.as_str(), state.over), ("", Over::Nothing));
    let long = vec![Char('x'); 500];
    let (state, _) = keys(shown(), &[&[Char('/')], long.as_slice()].concat());
    assert_eq!((state.filter.len(), names(&state).len()), (FILTER, 0));
    let (state, _) = keys(shown(), &[Char('/'), Char('\u{202e}')]);
    assert_eq!(state.filter, "?");
}

#[test]
fn t_goes_through_the_times_of_a_memory_and_leaving_it_ends_the_asking() {
    let (state, _) = keys(shown(), &[Down, Enter]);
    let asked = |span| vec![Effect::Recall("alpha".to_owned(), span)];
    let (state, effects) = keys(state, &[Char('t')]);
    assert_eq!(effects, asked(Span::Hour));
    let stored = Stored { model: "alpha".to_owned(), span: Span::Hour, ..Stored::default() };
    let (state, _) = step(state, Input::Stored(Box::new(stored)));
    assert!(state.stored_of("alpha").is_some() && state.stored_of("beta").is_none());
    let (state, effects) = keys(state, &[Char('t')]);
    assert_eq!((effects, state.stored_of("alpha")), (asked(Span::Day), None));
    let (state, effects) = keys(state.clone(), &[Esc]);
    assert_eq!((effects, state.span), (asked(Span::Live), Span::Live));
    let (_, effects) = keys(state, &[Enter, Char('t'), Char('t'), Char('t'), Esc]);
    assert_eq!(effects.last(), asked(Span::Live).last(), "and nothing more");
    assert_eq!(effects.len(), 3);
}

#[test]
fn a_model_is_opened_its_log_followed_and_every_way_leads_back() {
    let (state, effects) = keys(shown(), &[Down, Enter]);
    assert_eq!((&state.view, effects), (&View::Model("alpha".to_owned()), vec![]));
    let (state, effects) = keys(state, &[Char('l')]);
    assert_eq!(state.view, View::Log("alpha".to_owned(), true));
    assert_eq!(effects, [Effect::Follow("alpha".to_owned())]);
    let (state, effects) = keys(state, &[Esc]);
    assert_eq!((&state.view, effects), (&View::Model("alpha".to_owned()), vec![Effect::Unfollow]));
    let (state, _) = keys(state, &[Key::Backspace]);
    assert_eq!(state.view, View::Overview);
    let (state, _) = keys(state, &[Char('l')]);
    assert_eq!(state.view, View::Log("alpha".to_owned(), false));
    let (state, effects) = keys(state, &[Char('l')]);
    assert_eq!((state.view, effects), (View::Overview, vec![Effect::Unfollow]));
}

#[test]
fn text_is_scrolled_no_farther_than_it_goes() {
    let mut long = three();
    long.rows[0].words = (0..100).map(|n| format!("line {n}")).collect();
    let state = step(shown(), Input::Picture(Duration::from_secs(2), Box::new(long))).0;
    let (state, _) = keys(state, &[Enter, Up, Char('j'), Down]);
    assert_eq!(state.scroll, 2);
    let down = vec![PageDown; 50];
    let (state, _) = keys(state, &down);
    assert_eq!(state.scroll, 100 - layout::text(&state, false));
    let (state, _) = keys(state, &[Char('k'), PageUp, Char('g')]);
    assert_eq!(state.scroll, 0);
}

#[test]
fn a_log_is_bounded_and_who_reads_older_lines_keeps_them_in_sight() {
    let (mut state, _) = keys(shown(), &[Char('l')]);
    for n in 0..LINES + 10 {
        state = step(state, Input::Log(format!("line {n}"))).0;
    }
    assert_eq!((state.log.len(), state.scroll), (LINES, 0));
    let (state, _) = keys(state, &[Up, PageUp]);
    let (before, page) = (state.scroll, layout::text(&state, false));
    assert_eq!(before, 1 + page);
    let mut state = step(state, Input::Log("new".to_owned())).0;
    assert_eq!(state.scroll, before + 1);
    state = step(state, Input::Missed(3)).0;
    assert!(state.log.back().unwrap().contains("3 lines"));
    let (state, _) = keys(state, &[Home]);
    assert_eq!(state.scroll, state.log.len() - page);
    let (state, _) = keys(state, &[Down, PageDown, End, Char('k'), Char('j')]);
    assert_eq!(state.scroll, 0);
}

#[test]
fn an_action_is_asked_for_and_only_yes_does_it() {
    for (key, action) in [('r', Action::Restart), ('d', Action::Drain), ('c', Action::Reclaim)] {
        let (state, effects) = keys(shown(), &[Down, Char(key)]);
        assert_eq!((&state.over, effects), (&Over::Ask(action, "alpha".to_owned()), vec![]));
        let (state, effects) = keys(state, &[Enter, Char('x'), Char('Y')]);
        assert_eq!((&state.over, effects), (&Over::Nothing, vec![Effect::Do(action, "alpha".to_owned())]));
        assert!(state.message.unwrap().text.contains("alpha"));
        for no in [Char('n'), Char('N'), Esc, Char('q')] {
            let (state, effects) = keys(shown(), &[Char(key), no, Char('y')]);
            assert_eq!((state.over, effects), (Over::Nothing, vec![]), "{no:?}");
        }
    }
    let (state, _) = keys(shown(), &[F(9), Down, Enter]);
    assert_eq!(state.over, Over::Ask(Action::Drain, "beta".to_owned()));
    let (state, _) = keys(shown(), &[F(9), Char('c')]);
    assert_eq!(state.over, Over::Ask(Action::Reclaim, "beta".to_owned()));
    let (state, _) = keys(shown(), &[Enter, Char('r')]);
    assert_eq!(state.over, Over::Ask(Action::Restart, "beta".to_owned()), "also in the view of a model");
    // The question is about the model that was chosen then.
    let (state, _) = keys(shown(), &[Down, Char('r')]);
    let state = step(state, Input::Picture(Duration::from_secs(2), Box::new(picture(Vec::new())))).0;
    let (_, effects) = keys(state, &[Char('y')]);
    assert_eq!(effects, [Effect::Do(Action::Restart, "alpha".to_owned())]);
}

#[test]
fn read_only_nothing_is_done_whatever_is_pressed() {
    let state = State { read_only: true, ..shown() };
    for all in [[Char('r'), Char('y')], [Char('d'), Char('y')], [Char('c'), Char('y')], [F(9), Char('r')]] {
        let (after, effects) = keys(state.clone(), &all);
        assert_eq!((after.over, effects), (Over::Nothing, vec![]), "{all:?}");
        assert!(after.message.unwrap().text.contains("--read-only"));
    }
}

#[test]
fn it_is_quit_suspended_and_drawn_anew_wherever_one_is() {
    let places: [&[Key]; 7] = [&[], &[Enter], &[Char('l')], &[F(1)], &[F(6)], &[F(9)], &[Char('/')]];
    for place in places {
        let (state, _) = keys(shown(), place);
        for (key, effect) in [
            (Ctrl('c'), Effect::Quit),
            (F(10), Effect::Quit),
            (Ctrl('z'), Effect::Suspend),
            (Ctrl('l'), Effect::Redraw),
        ] {
            assert_eq!(keys(state.clone(), &[key]).1, [effect], "{place:?} {key:?}");
        }
    }
    for place in &places[..3] {
        let (state, _) = keys(shown(), place);
        assert_eq!(keys(state, &[Char('q')]).1, [Effect::Quit], "{place:?}");
    }
    for key in [F(1), Char('?'), Char('h')] {
        let (state, _) = keys(shown(), &[key]);
        assert_eq!(state.over, Over::Help);
        let (state, effects) = keys(state, &[Char('q')]);
        assert_eq!((state.over, effects), (Over::Nothing, vec![]), "any key closes it");
    }
}

#[test]
fn an_instance_that_is_silent_keeps_its_picture_and_one_that_was_restarted_is_told() {
    let silent = |at: u64, state| step(state, Input::Silent(Duration::from_secs(at), "frozen".to_owned())).0;
    let state = silent(9, silent(5, shown()));
    assert_eq!(state.link, Link::Silent(Duration::from_secs(5), "frozen".to_owned()));
    assert_eq!(state.picture.rows.len(), 3);
    let mut other = three();
    other.who.pid = Some(8);
    other.rows[0].work[0].requests = 12;
    let state = step(state, Input::Picture(Duration::from_secs(10), Box::new(other))).0;
    assert_eq!(state.link, Link::Live);
    assert!(state.message.as_ref().unwrap().text.contains("process 8"));
    assert_eq!(state.picture.rows[0].rate, None, "its counters are others");
    let state = step(state, Input::Tick(Duration::from_secs(10) + MESSAGE)).0;
    assert_eq!(state.message, None);
}

#[test]
fn events_are_bounded_and_known_by_their_model() {
    let mut state = shown();
    for n in 0..EVENTS + 5 {
        let model = Some(if n.is_multiple_of(2) { "alpha" } else { "beta" }.to_owned());
        let told = Told { time: String::new(), at: 0.0, model, text: n.to_string(), mark: None };
        state = step(state, Input::Told(told)).0;
    }
    assert_eq!(state.told.len(), EVENTS);
    assert_eq!(state.told_of("alpha").next().unwrap().text, (EVENTS + 4).to_string());
    assert_eq!(state.told_of("alpha").count(), EVENTS / 2);
}

#[test]
fn a_recording_has_its_own_keys_and_no_actions() {
    let line = |t: u32| format!("{{\"t\":{t},\"requests\":{t},\"rss_anon_kib\":1000,\"vram_mib\":5}}\n");
    let text = (0..=100).map(line).collect::<Vec<_>>().concat();
    let samples = warden_policies::trace::parse(&text).unwrap();
    let (film, _) = Film::new("a.jsonl", samples, &warden_policies::defaults().growth);
    let view = View::Model("a.jsonl".to_owned());
    let state = State { picture: film.picture(), film: Some(film), view, ..State::default() };
    let state = step(state, Input::Size(80, 24)).0;
    let words = |state: &State| state.film.as_ref().unwrap().words();
    let state = step(state, Input::Tick(Duration::from_secs(5))).0;
    assert_eq!(words(&state), "10s of 1m40s, 2x");
    assert_eq!(state.row("a.jsonl").unwrap().work[0].requests, 10);
    let (state, _) =
        keys(state, &[Key::Right, Key::Left, Key::Right, Char(' '), Char('+'), Char('='), Char('-')]);
    assert_eq!(words(&state), "15s of 1m40s, 5x, paused");
    let (state, _) = keys(state, &[End]);
    assert_eq!(words(&state), "1m40s of 1m40s, 5x, over");
    let (state, _) = keys(state, &[Home, Tab]);
    assert_eq!((words(&state).as_str(), state.series), ("0s of 1m40s, 5x, paused", 1));
    let (state, effects) = keys(state, &[Char('r'), Char('y'), Char('l'), F(9), Char('y')]);
    assert_eq!((state.over, effects), (Over::Nothing, vec![]));
}
