//! Snapshots of whole screens.

use std::sync::Arc;
use std::time::Duration;

use crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui_core::backend::{Backend, TestBackend};
use ratatui_core::style::Color;
use warden_admin::status::{AdminStatus, InstanceInfo};
use warden_policies::growth::GrowthVerdict;
use warden_policies::recycle::MemoryBudget;
use warden_policies::sample::{HostMemory, VramReading, VramSource};
use warden_policies::{GpuIndex, MemoryKind, ModelName, Reason, WorkDone};
use warden_sensors::HostTotals;
use warden_supervisor::{
    BackendFailure, BackendView, BudgetView, DeviceView, FailureKind, FleetView, ModelState, ModelView,
    ReadySince,
};

use super::super::look::GOOD;
use super::super::picture::InstancePicture;
use super::super::state::ScreenInput;
use super::super::step::step;
use super::super::{render_page, screen_lines};
use super::*;
use crate::growth_fixture::{fleet, leaking};

const UNICODE: TerminalLook = TerminalLook { colour: true, unicode: true };
const ASCII: TerminalLook = TerminalLook { colour: false, unicode: false };
const GIB: u64 = 1 << 30;

fn budgets() -> Vec<BudgetView> {
    let budget = MemoryBudget { soft: Some(4 * GIB), hard: Some(6 * GIB) };
    vec![BudgetView { series: MemoryKind::Host, budget }]
}

fn model(name: &str, bytes: u64) -> ModelView {
    let mut backend = leaking();
    backend.memory.growth[0].verdict = GrowthVerdict::Steady;
    backend.memory.forecasts.clear();
    backend.memory.vram[0] = VramReading { gpu: GpuIndex(0), bytes: 6 * GIB, source: VramSource::Process };
    backend.host = Some(HostMemory { anon: bytes, swap: 0, rss: 0 });
    backend.slots = Some(4);
    backend.ready_since = Some(ReadySince::from_age(Duration::from_secs(3700)));
    backend.health = warden_supervisor::HealthView::default();
    backend.next = None;
    backend.memory.budgets = budgets();
    backend.work = WorkDone { requests: 100, output_tokens: 5000, ..WorkDone::default() };
    with(name, ModelState::Loaded, vec![backend])
}

fn with(name: &str, state: ModelState, backends: Vec<BackendView>) -> ModelView {
    let mut model = fleet(backends).models[0].as_ref().clone();
    (model.name, model.state) = (ModelName::new(name), state);
    model
}

/// A model that leaks, and is replaced when quiet.
fn leaky() -> ModelView {
    let mut model = model("qwen2.5-vl-7b", 3 * GIB);
    let mut backend = leaking();
    let (slope, seconds) = (4.63e6, 2100.0);
    let growth = &mut backend.memory.growth[0];
    growth.slope = Some(interval(slope));
    growth.fill = warden_policies::growth::AllowanceFill::default();
    growth.blame = Some(warden_policies::growth::GrowthBlame::Pays {
        unit: warden_policies::growth::WorkUnit::Image,
        bytes_per_unit: slope,
        share: 0.98,
    });
    let forecast = &mut backend.memory.forecasts[0].forecast;
    (forecast.limit, forecast.requests, forecast.seconds) =
        (4 * GIB, interval(242.0), Some(interval(seconds)));
    let own = &mut model.backends[0];
    (own.memory, own.in_flight) = (backend.memory, 3);
    own.memory.vram[0].bytes = 30 * GIB;
    (own.memory.budgets, own.memory.request_rate) = (budgets(), Some(242.0 / seconds));
    own.next = backend.next;
    model.policy.clone_from(&own.next);
    model.waiting = 2;
    model.recycles = vec![(Reason::HostSoft, 2)];
    model
}

fn interval(value: f64) -> warden_policies::growth::IntervalEstimate {
    warden_policies::growth::IntervalEstimate { value, low: value * 0.99, high: value * 1.01 }
}

fn failed() -> ModelView {
    let mut model = with("broken", ModelState::Failed, Vec::new());
    model.crashes = 5;
    model.last_failure = Some(BackendFailure {
        kind: FailureKind::BadModel,
        message: "the model file /models/broken.gguf is no GGUF file".to_owned(),
        lines: Vec::new(),
        failures: 5,
    });
    model
}

/// A malicious model name with control sequences for the terminal.
fn evil() -> ModelView {
    let name = "e\u{301}vil\u{1b}]0;owned\u{7}\u{1b}[2J\u{9b}31m模型名字很长很长很长很长很长很长很长很长\u{202e}drawkcab";
    let mut model = model(name, 2 * GIB);
    model.last_failure = Some(BackendFailure {
        kind: FailureKind::Exit,
        message: "it said \u{1b}[31mred\u{1b}[0m\r\nand \u{1b}P\u{1b}\\".to_owned(),
        lines: Vec::new(),
        failures: 1,
    });
    model
}

fn status(models: Vec<ModelView>) -> AdminStatus {
    let device = |number, used| DeviceView {
        gpu: GpuIndex(number),
        total: Some(80 * GIB),
        used: Some(used),
        free: Some(80 * GIB - used),
        temperature: Some(54),
        ..DeviceView::default()
    };
    AdminStatus {
        budgets: std::collections::BTreeMap::new(),
        instance: InstanceInfo {
            pid: 4000,
            version: "0.1.0".to_owned(),
            address: "127.0.0.1:8080".to_owned(),
            started_at: "2026-01-01T00:00:00Z".to_owned(),
            memory_anon: Some(5 << 20),
            ..InstanceInfo::default()
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

fn began() -> Duration {
    Duration::from_secs(1_767_233_100)
}

/// A series of pictures of one instance, one per second, with work done in between.
fn looked(models: Vec<ModelView>, looks: u64) -> ScreenState {
    let mut state = ScreenState::default();
    let mut status = status(models);
    for second in 1..=looks {
        for backend in status.fleet.models.iter_mut().flat_map(|model| &mut Arc::make_mut(model).backends) {
            backend.work.requests += 2;
            backend.work.output_tokens += 91;
            if let Some(host) = &mut backend.host {
                host.anon += 9 << 20;
            }
        }
        let picture = Box::new(InstancePicture::from_status(&status));
        step(&mut state, ScreenInput::Picture(began() + Duration::from_secs(second), picture));
    }
    state
}

fn happened(state: &mut ScreenState, second: u64, text: &str, tone: Color) {
    let event = EventLine {
        time: "02:05:40".to_owned(),
        at: (began() + Duration::from_secs(second)).as_secs_f64(),
        model: Some("qwen2.5-vl-7b".to_owned()),
        text: sanitize(text),
        tone,
    };
    step(state, ScreenInput::Event(event));
}

fn screen(state: &mut ScreenState, (columns, rows): (u16, u16), look: TerminalLook) -> Buffer {
    let mut buffer = Buffer::empty(Rect::new(0, 0, columns, rows));
    draw_screen(state, look, &mut buffer);
    buffer
}

fn text(state: &mut ScreenState, size: (u16, u16)) -> String {
    screen_lines(&screen(state, size, UNICODE)).join("\n")
}

fn press(state: &mut ScreenState, keys: &[KeyCode]) {
    for key in keys {
        step(state, ScreenInput::Key(KeyEvent::new(*key, KeyModifiers::NONE)));
    }
}

fn some() -> Vec<ModelView> {
    vec![model("gemma-3-4b", GIB), leaky(), failed(), with("embed", ModelState::Unloaded, Vec::new())]
}

/// A screen with events, after these keys.
fn eventful(models: Vec<ModelView>, keys: &[KeyCode]) -> ScreenState {
    let mut state = looked(models, 90);
    happened(&mut state, 20, "g2 host leaks: each image pays 4.42 MiB", WARN);
    happened(&mut state, 45, "g3 replaced: host_soft, 3.1 GiB before, 900 MiB after", GOOD);
    press(&mut state, keys);
    state
}

#[test]
fn without_a_model_it_says_so() {
    insta::assert_snapshot!(text(&mut looked(Vec::new(), 2), (80, 24)));
}

#[test]
fn some_models_in_80_columns() {
    insta::assert_snapshot!(text(&mut eventful(some(), &[]), (80, 24)));
}

#[test]
fn some_models_in_120_columns() {
    insta::assert_snapshot!(text(&mut eventful(some(), &[]), (120, 40)));
}

#[test]
fn some_models_in_200_columns() {
    insta::assert_snapshot!(text(&mut eventful(some(), &[]), (200, 50)));
}

#[test]
fn some_models_in_60_columns() {
    insta::assert_snapshot!(text(&mut eventful(some(), &[]), (60, 15)));
}

#[test]
fn fifty_models_are_scrolled() {
    let mut state = looked((0..50).map(|n| model(&format!("model-{n:02}"), GIB)).collect(), 2);
    press(&mut state, &[KeyCode::End, KeyCode::Up]);
    insta::assert_snapshot!(text(&mut state, (80, 24)));
}

#[test]
fn one_model() {
    let mut state = eventful(some(), &[KeyCode::Down, KeyCode::Enter]);
    insta::assert_snapshot!("one_model_in_80_columns", text(&mut state, (80, 24)));
    insta::assert_snapshot!("one_model_in_120_columns", text(&mut state, (120, 40)));
}

#[test]
fn an_action_is_confirmed_in_the_last_line() {
    let mut state = eventful(some(), &[KeyCode::Down, KeyCode::Char('r')]);
    let shown = text(&mut state, (100, 24));
    let last = shown.lines().last().unwrap_or_default();
    assert!(last.starts_with("restart qwen2.5-vl-7b? y or n: Replace its processes"), "{last}");
}

#[test]
fn once_everything_is_written_without_keys() {
    let mut many = some();
    many.extend((0..40).map(|n| model(&format!("model-{n:02}"), GIB)));
    for (name, state) in [
        ("once", &mut eventful(many, &[])),
        ("once_a_model", &mut eventful(some(), &[KeyCode::Down, KeyCode::Enter])),
    ] {
        state.once = true;
        insta::assert_snapshot!(name, render_page(state, UNICODE, 80));
    }
}

#[test]
fn a_terminal_that_knows_only_ascii_gets_nothing_else_and_no_colour() {
    for keys in
        [&[][..], &[KeyCode::Down, KeyCode::Enter], &[KeyCode::End, KeyCode::Enter], &[KeyCode::Char('d')]]
    {
        let mut models = some();
        models.push(evil());
        let buffer = screen(&mut eventful(models, keys), (120, 40), ASCII);
        for cell in buffer.content() {
            assert!(cell.symbol().is_ascii(), "{keys:?}: {:?}", cell.symbol());
            assert_eq!((cell.fg, cell.bg), (Color::Reset, Color::Reset), "{keys:?}");
        }
    }
    let mut one = eventful(some(), &[KeyCode::Down, KeyCode::Enter]);
    insta::assert_snapshot!(screen_lines(&screen(&mut one, (80, 24), ASCII)).join("\n"));
}

#[test]
fn nothing_that_a_terminal_obeys_gets_on_the_screen() {
    let evil_screen = |keys: &[KeyCode]| {
        let mut state = looked(vec![evil()], 2);
        let mut event = EventLine { model: Some("x\u{1b}[2J".to_owned()), ..state_event() };
        event.text = sanitize("said \u{1b}[31m\u{7}");
        step(&mut state, ScreenInput::Event(event));
        press(&mut state, keys);
        state
    };
    for keys in [&[][..], &[KeyCode::Enter], &[KeyCode::Char('r')], &[KeyCode::Char('r'), KeyCode::Char('y')]]
    {
        for size in [(60, 10), (61, 15), (80, 24), (120, 40), (200, 50)] {
            let buffer = screen(&mut evil_screen(keys), size, UNICODE);
            for cell in buffer.content() {
                let evil = |letter: char| letter.is_control() || ('\u{202a}'..='\u{202e}').contains(&letter);
                assert!(!cell.symbol().contains(evil), "{keys:?} {size:?}: {:?}", cell.symbol());
            }
        }
    }
    insta::assert_snapshot!(text(&mut evil_screen(&[]), (80, 24)));
}

fn state_event() -> EventLine {
    let (time, text) = ("02:05:40".to_owned(), String::new());
    EventLine { time, at: 0.0, model: None, text, tone: PLAIN }
}

#[test]
fn every_size_can_be_drawn_and_below_the_least_a_sentence_stands() {
    let keys: [&[KeyCode]; 3] = [&[], &[KeyCode::Down, KeyCode::Enter], &[KeyCode::Char('r')]];
    for keys in keys {
        let mut models = some();
        models.push(evil());
        let mut state = eventful(models, keys);
        for (columns, rows) in
            (0..130_u16).step_by(7).flat_map(|columns| (0..60).step_by(3).map(move |rows| (columns, rows)))
        {
            let _drawn = screen(&mut state, (columns, rows), UNICODE);
        }
    }
    let small = text(&mut eventful(some(), &[]), (40, 5));
    assert!(small.contains("60 columns and 10 rows"), "{small}");
}

#[test]
fn that_nothing_answers_comes_first_and_the_old_picture_stays() {
    let mut state = eventful(some(), &[]);
    let (since, why) = (began() + Duration::from_secs(95), "no answer within 10 s".to_owned());
    step(&mut state, ScreenInput::Silent(since, why));
    step(&mut state, ScreenInput::Tick(since + Duration::from_secs(12)));
    let shown = text(&mut state, (80, 24));
    assert!(shown.starts_with("NO ANSWER for 12s: no answer within 10 s"), "{shown}");
    assert!(shown.contains("qwen2.5-vl-7b"), "{shown}");
}

#[test]
fn a_screen_without_changes_is_the_same_cell_by_cell() {
    let mut state = looked(vec![model("a", GIB)], 5);
    let before = screen(&mut state, (80, 24), UNICODE);
    let later = state.at + Duration::from_secs(20);
    step(&mut state, ScreenInput::Tick(later));
    assert_eq!(before, screen(&mut state, (80, 24), UNICODE));
}

#[test]
fn what_is_written_is_what_a_terminal_shows() {
    // Pass the same cells through a backend, from one screen to the next.
    let first = screen(&mut eventful(some(), &[]), (100, 30), UNICODE);
    let second = screen(&mut eventful(some(), &[KeyCode::Down, KeyCode::Enter]), (100, 30), UNICODE);
    let mut backend = TestBackend::new(100, 30);
    let blank = Buffer::empty(*first.area());
    backend.draw(blank.diff(&first).into_iter()).unwrap();
    assert_eq!(screen_lines(backend.buffer()), screen_lines(&first));
    backend.draw(first.diff(&second).into_iter()).unwrap();
    assert_eq!(screen_lines(backend.buffer()), screen_lines(&second));
}
