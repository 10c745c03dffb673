//! Whole screens, as people see them.

use std::sync::Arc;
use std::time::Duration;

use ratatui_core::backend::{Backend, TestBackend};
use ratatui_core::layout::Rect;
use ratatui_core::style::Color;
use warden_policies::growth::Verdict;
use warden_policies::sample::{HostMemory, Vram, VramSource};
use warden_policies::{ByteSize, GpuIndex, MemoryLimit, ModelName, Reason, Work};
use warden_sensors::HostTotals;
use warden_supervisor::{
    BackendView, DeviceView, Failure, FailureKind, FleetView, ModelState, ModelView, ReadySince,
};

use super::super::input::{Input, Key, Told};
use super::super::lines;
use super::super::picture::Picture;
use super::super::step::step;
use super::super::stored::{Span, Stored};
use super::super::text::tame;
use super::*;
use crate::admin::answer::{Budget, Instance, Status};
use crate::admin::growth_metrics::tests::{fleet, leaking};

const UNICODE: Look = Look { colour: true, unicode: true };
const ASCII: Look = Look { colour: false, unicode: false };
const GIB: u64 = 1 << 30;

/// A model with one process that is well.
fn model(name: &str, bytes: u64) -> ModelView {
    let mut backend = leaking();
    backend.memory.growth[0].verdict = Verdict::Steady;
    backend.memory.forecasts.clear();
    backend.memory.vram[0] = Vram { gpu: GpuIndex(0), bytes: 6 * GIB, source: VramSource::Process };
    backend.host = Some(HostMemory { anon: bytes, swap: 0, rss: 0 });
    backend.slots = Some(4);
    backend.ready_since = Some(ReadySince::ago(Duration::from_secs(3700)));
    backend.health = warden_supervisor::HealthView::default();
    backend.next = None;
    backend.work = Work { requests: 100, output_tokens: 5000, ..Work::default() };
    with(name, ModelState::Loaded, vec![backend])
}

fn with(name: &str, state: ModelState, backends: Vec<BackendView>) -> ModelView {
    let mut model = fleet(backends).models[0].as_ref().clone();
    (model.name, model.state) = (ModelName::new(name), state);
    model
}

/// One that leaks, and is replaced when it is quiet.
fn leaky() -> ModelView {
    let mut model = model("qwen2.5-vl-7b", 3 * GIB);
    let mut backend = leaking();
    let (slope, seconds) = (4.63e6, 2100.0);
    let growth = &mut backend.memory.growth[0];
    growth.slope = Some(interval(slope));
    growth.fill = warden_policies::growth::Fill::default();
    growth.blame = Some(warden_policies::growth::Blame::Pays {
        unit: warden_policies::growth::Unit::Image,
        bytes_per_unit: slope,
        share: 0.98,
    });
    let forecast = &mut backend.memory.forecasts[0].forecast;
    (forecast.limit, forecast.requests, forecast.seconds) =
        (4 * GIB, interval(242.0), Some(interval(seconds)));
    let own = &mut model.backends[0];
    (own.memory, own.in_flight) = (backend.memory, 3);
    own.memory.vram[0].bytes = 30 * GIB;
    own.next = backend.next;
    model.policy.clone_from(&own.next);
    model.waiting = 2;
    model.recycles = vec![(Reason::HostSoft, 2)];
    model
}

fn interval(value: f64) -> warden_policies::growth::Interval {
    warden_policies::growth::Interval { value, low: value * 0.99, high: value * 1.01 }
}

fn failed() -> ModelView {
    let mut model = with("broken", ModelState::Failed, Vec::new());
    model.crashes = 5;
    model.last_failure = Some(Failure {
        kind: FailureKind::BadModel,
        message: "the model file /models/broken.gguf is no GGUF file".to_owned(),
        lines: Vec::new(),
        failures: 5,
    });
    model
}

/// What a stranger calls a model to have the terminal obey.
fn evil() -> ModelView {
    let name = "e\u{301}vil\u{1b}]0;owned\u{7}\u{1b}[2J\u{9b}31m模型名字很长很长很长很长很长很长很长很长\u{202e}drawkcab";
    let mut model = model(name, 2 * GIB);
    model.last_failure = Some(Failure {
        kind: FailureKind::Exit,
        message: "it said \u{1b}[31mred\u{1b}[0m\r\nand \u{1b}P\u{1b}\\".to_owned(),
        lines: Vec::new(),
        failures: 1,
    });
    model
}

fn status(models: Vec<ModelView>) -> Status {
    let device = |number, used| DeviceView {
        gpu: GpuIndex(number),
        total: Some(80 * GIB),
        used: Some(used),
        free: Some(80 * GIB - used),
        temperature: Some(54),
        ..DeviceView::default()
    };
    let budget = Budget {
        soft: Some(MemoryLimit::Bytes(ByteSize(4 * GIB))),
        hard: Some(MemoryLimit::Percent(5.0)),
        ..Budget::default()
    };
    let names = models.iter().map(|model| (model.name.as_str().to_owned(), budget));
    Status {
        budgets: names.collect(),
        instance: Instance {
            pid: 4000,
            version: "0.1.0".to_owned(),
            address: "127.0.0.1:8080".to_owned(),
            started_at: "2026-01-01T00:00:00Z".to_owned(),
            memory_anon: Some(5 << 20),
            ..Instance::default()
        },
        advice: std::collections::BTreeMap::new(),
        mitigations: std::collections::BTreeMap::new(),
        binaries: None,
        bound: Vec::new(),
        access_log: None,
        state: warden_supervisor::StateView::default(),
        fleet: FleetView {
            number: 1,
            models: models.into_iter().map(Arc::new).collect(),
            devices: vec![device(0, 71 * GIB), device(1, 12 * GIB)],
            host: Some(HostTotals { total: 128 * GIB, available: 90 * GIB }),
            ..FleetView::default()
        },
    }
}

/// The same instance in so many looks, one each second, with work done in between.
fn looked(models: Vec<ModelView>, looks: u32) -> State {
    let began = "2026-01-01T02:05:00Z".parse::<jiff::Timestamp>().unwrap().as_second();
    let mut state = State { began, ..State::default() };
    let mut status = status(models);
    for second in 1..=looks {
        for backend in status.fleet.models.iter_mut().flat_map(|model| &mut Arc::make_mut(model).backends) {
            backend.work.requests += 2;
            backend.work.output_tokens += 91;
            if let Some(host) = &mut backend.host {
                host.anon += 9 << 20;
            }
        }
        let picture = Picture::of(&status);
        state = step(state, Input::Picture(Duration::from_secs(u64::from(second)), Box::new(picture))).0;
    }
    state
}

fn told(state: State, at: f64, model: &str, text: &str, mark: Option<(char, Tone)>) -> State {
    let told =
        Told { time: "02:05:40".to_owned(), at, model: Some(model.to_owned()), text: tame(text), mark };
    step(state, Input::Told(told)).0
}

fn screen(state: State, (columns, rows): (u16, u16), look: Look) -> Buffer {
    let state = step(state, Input::Size(columns, rows)).0;
    let mut buffer = Buffer::empty(Rect::new(0, 0, columns, rows));
    draw(&state, look, &mut buffer);
    buffer
}

fn text(state: State, size: (u16, u16)) -> String {
    lines(&screen(state, size, UNICODE)).join("\n")
}

fn pressed(state: State, keys: &[Key]) -> State {
    keys.iter().fold(state, |state, key| step(state, Input::Key(*key)).0)
}

fn some() -> Vec<ModelView> {
    vec![model("gemma-3-4b", GIB), leaky(), failed(), with("embed", ModelState::Unloaded, Vec::new())]
}

fn eventful(models: Vec<ModelView>) -> State {
    let state = looked(models, 90);
    let state = told(
        state,
        20.0,
        "qwen2.5-vl-7b",
        "g2 host leaks: each image pays 4.42 MiB",
        Some(('v', Tone::Warn)),
    );
    told(
        state,
        45.0,
        "qwen2.5-vl-7b",
        "g3 replaced: host_soft, 3.1 GiB before, 900 MiB after",
        Some(('R', Tone::Good)),
    )
}

#[test]
fn without_a_model_it_says_so() {
    insta::assert_snapshot!(text(looked(Vec::new(), 2), (80, 24)));
}

#[test]
fn some_models_in_80_columns() {
    insta::assert_snapshot!(text(eventful(some()), (80, 24)));
}

#[test]
fn some_models_in_120_columns() {
    insta::assert_snapshot!(text(eventful(some()), (120, 40)));
}

#[test]
fn some_models_in_200_columns() {
    insta::assert_snapshot!(text(eventful(some()), (200, 50)));
}

#[test]
fn some_models_in_60_columns() {
    insta::assert_snapshot!(text(eventful(some()), (60, 15)));
}

#[test]
fn fifty_models_are_scrolled() {
    let many = (0..50).map(|n| model(&format!("model-{n:02}"), GIB)).collect();
    let state = pressed(step(looked(many, 2), Input::Size(80, 24)).0, &[Key::End, Key::Up]);
    insta::assert_snapshot!(text(state, (80, 24)));
}

#[test]
fn one_model_and_its_memory() {
    let state = pressed(eventful(some()), &[Key::Down, Key::Enter]);
    insta::assert_snapshot!("one_model_and_its_memory_in_80_columns", text(state.clone(), (80, 24)));
    insta::assert_snapshot!("one_model_and_its_memory_in_120_columns", text(state.clone(), (120, 40)));
    let vram = pressed(state.clone(), &[Key::Tab]);
    insta::assert_snapshot!("the_next_memory", text(vram, (60, 15)));
}

#[test]
fn its_last_hour_is_drawn_from_what_was_kept() {
    let state = pressed(eventful(some()), &[Key::Down, Key::Enter, Key::Char('t')]);
    assert!(text(state.clone(), (80, 24)).contains("the last hour (asked for)"));
    let key = state.keys("qwen2.5-vl-7b")[0];
    let points =
        (0..60_u32).map(|minute| (f64::from(minute) * 60.0 - 3500.0, u64::from(minute % 20) * (GIB / 8)));
    let stored = Stored {
        model: "qwen2.5-vl-7b".to_owned(),
        span: Span::Hour,
        lines: vec![(key, points.collect())],
        marks: vec![(-2300.0, 'R', Tone::Good)],
    };
    let state = step(state, Input::Stored(Box::new(stored))).0;
    insta::assert_snapshot!("the_last_hour_of_a_memory", text(state.clone(), (100, 30)));
    // Of another model, or for another time, it is not shown.
    let state = pressed(state, &[Key::Char('t')]);
    assert!(text(state.clone(), (80, 24)).contains("the last day (asked for)"));
    let state = pressed(state, &[Key::Esc, Key::Enter]);
    assert!(!text(state, (80, 24)).contains("the last"));
}

#[test]
fn menus_help_and_questions_lie_over_it() {
    for (name, keys) in [
        ("help", &[Key::F(1)][..]),
        ("sort", &[Key::F(6), Key::Down]),
        ("actions", &[Key::F(9)]),
        ("question", &[Key::Down, Key::Char('r')]),
        ("filter", &[Key::Char('/'), Key::Char('x')]),
    ] {
        insta::assert_snapshot!(format!("over_{name}"), text(pressed(eventful(some()), keys), (80, 24)));
    }
}

#[test]
fn a_terminal_that_knows_only_ascii_gets_nothing_else_and_no_colour() {
    let mut models = some();
    models.push(evil());
    let state = eventful(models);
    for keys in [&[][..], &[Key::Down, Key::Enter], &[Key::End, Key::Enter], &[Key::F(1)], &[Key::Char('d')]]
    {
        let buffer = screen(pressed(state.clone(), keys), (120, 40), ASCII);
        for cell in buffer.content() {
            assert!(cell.symbol().is_ascii(), "{keys:?}: {:?}", cell.symbol());
            assert_eq!((cell.fg, cell.bg), (Color::Reset, Color::Reset), "{keys:?}");
        }
    }
    let one = pressed(state, &[Key::Down, Key::Enter]);
    insta::assert_snapshot!(lines(&screen(one, (80, 24), ASCII)).join("\n"));
}

#[test]
fn nothing_that_a_terminal_obeys_gets_on_the_screen() {
    let state = told(looked(vec![evil()], 2), 1.0, "x\u{1b}[2J", "said \u{1b}[31m\u{7}", None);
    let with_log = step(state.clone(), Input::Key(Key::Char('l'))).0;
    let with_log = step(with_log, Input::Log(tame("a \u{1b}[2J line\u{8}\u{8}"))).0;
    for (keys, state) in [
        (&[][..], &state),
        (&[Key::Enter], &state),
        (&[Key::Char('r')], &state),
        (&[Key::F(9)], &state),
        (&[Key::Char('r'), Key::Char('y')], &state),
        (&[], &with_log),
    ] {
        for size in [(60, 10), (61, 15), (80, 24), (120, 40), (200, 50)] {
            let buffer = screen(pressed(state.clone(), keys), size, UNICODE);
            for cell in buffer.content() {
                let evil = |letter: char| letter.is_control() || ('\u{202a}'..='\u{202e}').contains(&letter);
                assert!(!cell.symbol().contains(evil), "{keys:?} {size:?}: {:?}", cell.symbol());
            }
        }
    }
    insta::assert_snapshot!(text(state, (80, 24)));
}

#[test]
fn every_size_can_be_drawn_and_below_the_least_a_sentence_stands() {
    let mut models = some();
    models.push(evil());
    let state = eventful(models);
    let views = [
        state.clone(),
        pressed(state.clone(), &[Key::Down, Key::Enter]),
        pressed(state.clone(), &[Key::F(6)]),
        pressed(state.clone(), &[Key::Char('l')]),
    ];
    for size in
        (0..130_u16).step_by(7).flat_map(|columns| (0..60).step_by(3).map(move |rows| (columns, rows)))
    {
        for view in &views {
            let _drawn = screen(view.clone(), size, UNICODE);
        }
    }
    let small = text(state, (40, 5));
    assert!(small.contains("60 columns and 10 rows"), "{small}");
}

#[test]
fn who_does_not_answer_is_told_first_and_the_old_picture_stays() {
    let state =
        step(eventful(some()), Input::Silent(Duration::from_secs(95), "no answer within 10 s".to_owned())).0;
    let state = step(state, Input::Tick(Duration::from_secs(107))).0;
    let shown = text(state, (80, 24));
    assert!(shown.starts_with("NO ANSWER for 12s: no answer within 10 s"), "{shown}");
    assert!(shown.contains("qwen2.5-vl-7b"), "{shown}");
}

#[test]
fn a_screen_that_stands_still_is_the_same_cell_by_cell() {
    let state = step(looked(vec![model("a", GIB)], 5), Input::Size(80, 24)).0;
    let later = step(state.clone(), Input::Tick(state.at + Duration::from_secs(20))).0;
    assert_eq!(screen(state, (80, 24), UNICODE), screen(later, (80, 24), UNICODE));
}

#[test]
fn what_is_written_is_what_a_terminal_shows() {
    // The same cells through a backend, from one screen to the next.
    let (first, second) = (eventful(some()), pressed(eventful(some()), &[Key::Down, Key::Enter]));
    let (first, second) = (screen(first, (100, 30), UNICODE), screen(second, (100, 30), UNICODE));
    let mut backend = TestBackend::new(100, 30);
    let blank = Buffer::empty(*first.area());
    backend.draw(blank.diff(&first).into_iter()).unwrap();
    assert_eq!(lines(backend.buffer()), lines(&first));
    backend.draw(first.diff(&second).into_iter()).unwrap();
    assert_eq!(lines(backend.buffer()), lines(&second));
}
