//! The view of one model: its memory as a line, what is known of it in words, what happened to it; and the view of its log.

use ratatui_core::layout::Rect;
use ratatui_core::style::Style;
use warden_policies::MemoryKind;
use warden_policies::units::exact;

use super::super::history::{Key, newest};
use super::super::layout;
use super::super::look::{Look, Tone};
use super::super::state::State;
use super::super::stored::Span;
use super::super::text::{bytes, gained, tame, wrapped};
use super::Pen;
use super::plot::{self, Plot};

const KEYS: [(&str, &str); 9] = [
    ("Esc", "Back"),
    ("Tab", "Next"),
    ("t", "Time"),
    ("l", "Log"),
    ("r", "Restart"),
    ("d", "Drain"),
    ("c", "Reclaim"),
    ("p", "Pin"),
    ("q", "Quit"),
];
const FILM: [(&str, &str); 6] = [
    ("Space", "Pause"),
    ("+-", "Speed"),
    ("<->", "Seek"),
    ("Tab", "Next memory"),
    ("Esc", "Back"),
    ("q", "Quit"),
];
const LOG: [(&str, &str); 4] = [("Esc", "Back"), ("PgUp", "Older"), ("End", "Newest"), ("q", "Quit")];

/// The time axis is at least this long, in seconds: one reading is no line.
const SHORTEST: f64 = 60.0;

pub(super) fn draw(state: &State, model: &str, pen: &mut Pen<'_>) {
    let (width, height) = state.size;
    head(state, model, pen);
    let keys = state.keys(model);
    let plotted = !keys.is_empty();
    let mut y = 1;
    if let Some(key) = keys.get(state.series % keys.len().max(1)) {
        let lines = layout::plot(height);
        memory(state, model, *key, keys.len(), pen, Rect::new(0, y, width, lines));
        y += lines;
    }
    let shown = layout::text(state, plotted);
    for (y, (line, tone)) in
        (y..).zip(words(state, model, usize::from(width)).iter().skip(state.scroll).take(shown))
    {
        pen.text(0, y, width, line, pen.look.of_tone(*tone));
    }
    pen.keys(state, if state.film.is_some() { &FILM } else { &KEYS });
}

/// Its name and state; that nobody answers comes before all.
fn head(state: &State, model: &str, pen: &mut Pen<'_>) {
    let width = state.size.0;
    if !matches!(state.link, super::Link::Live) && state.film.is_none() {
        return pen.title(state);
    }
    let x = pen.text(0, 0, width, &tame(model), Look::strong());
    let Some(row) = state.row(model) else {
        let gone = "  is not there any more: Esc";
        pen.text(x, 0, width.saturating_sub(x), gone, pen.look.of_tone(Tone::Warn));
        return;
    };
    let x = pen.text(x, 0, width.saturating_sub(x), "  ", Style::new());
    let x = pen.text(x, 0, width.saturating_sub(x), row.state.0, pen.look.of_tone(row.state.1));
    let separator = pen.look.lines().2;
    // A recording says first where it is.
    let first = match &state.film {
        Some(film) => film.words(),
        None => format!("{} running{separator}{} waiting", row.busy.0, row.waiting),
    };
    let mut facts = vec![format!("{separator}{first}")];
    facts.extend(row.host.map(|host| format!("host {}", bytes(host))));
    facts.extend(row.vram.iter().map(|(gpu, held)| format!("GPU {gpu} {}", bytes(*held))));
    facts.extend(row.slope.map(|slope| format!("{} {} a request", row.verdict.as_str(), gained(slope))));
    pen.text(x, 0, width.saturating_sub(x), &facts.join(separator), Style::new());
}

fn memory(state: &State, model: &str, key: Key, of: usize, pen: &mut Pen<'_>, area: Rect) {
    let read = match &state.film {
        Some(film) => film.points(key),
        None => state.history.points(model, key),
    };
    let stored = state.stored_of(model);
    let points: Vec<(f64, u64)> = match stored {
        Some(stored) => stored.points(key).to_vec(),
        None => read.iter().map(|point| (point.at.as_secs_f64(), point.bytes)).collect(),
    };
    let from_to = if let Some(film) = &state.film {
        film.range()
    } else if let Some(seconds) = stored.and_then(|stored| stored.span.seconds()) {
        let now = state.at.as_secs_f64();
        (now - exact(seconds), now)
    } else {
        let now = points.last().map_or(0.0, |(last, _)| *last);
        let first = points.first().map_or(now, |(first, _)| *first);
        (first.min(now - SHORTEST), now)
    };
    let row = state.row(model);
    let memories = row.map(|row| newest(&row.memories)).unwrap_or_default();
    let held = memories.iter().find(|(own, _)| *own == key).map(|(_, memory)| **memory);
    let mut budgets = Vec::new();
    budgets.extend(held.and_then(|held| held.soft).map(|soft| (soft, "soft budget", Tone::Warn)));
    budgets.extend(held.and_then(|held| held.hard).map(|hard| (hard, "hard budget", Tone::Bad)));
    let until = state.film.as_ref().map_or(f64::MAX, |film| film.at().as_secs_f64());
    let told: Vec<(f64, char, Tone)> = state
        .told_of(model)
        .filter(|told| told.at <= until)
        .filter_map(|told| told.mark.map(|(letter, tone)| (told.at, letter, tone)))
        .collect();
    let marks = stored.map_or(told, |stored| stored.marks.clone());
    let name = match key.kind {
        MemoryKind::Host => "host memory".to_owned(),
        MemoryKind::Vram(gpu) => format!("VRAM on GPU {}", gpu.0),
    };
    let mut title = format!("{name}, replica {}", key.replica);
    if state.span != Span::Live {
        // Until it has come, what is known is shown, and said to be that.
        let what = if stored.is_some() { "" } else { " (asked for)" };
        title.extend([format!(", {}{what}", state.span.words())]);
    }
    title.extend(held.map(|held| format!(", {}", bytes(held.bytes))));
    title.extend(budgets.iter().map(|(limit, name, _)| format!(", {name} {}", bytes(*limit))));
    if of > 1 {
        title.extend([format!("  (Tab: {} of {of})", state.series % of + 1)]);
    }
    pen.text(area.x, area.y, area.width, &title, pen.look.of_tone(Tone::Quiet));
    let inner = Rect::new(area.x, area.y + 1, area.width, area.height.saturating_sub(1));
    let plot = Plot { points: &points, budgets: &budgets, marks: &marks, from_to, ago: state.film.is_none() };
    plot::draw(&plot, pen, inner);
}

/// What is known of a model, in lines of so many columns: the plan, the words of `status`, its events.
pub(in super::super) fn words(state: &State, model: &str, columns: usize) -> Vec<(String, Tone)> {
    let mut lines = Vec::new();
    let mut add = |text: &str, tone: Tone| {
        let indent = text.len() - text.trim_start().len();
        let room = columns.saturating_sub(indent + 2).max(20);
        for (index, line) in wrapped(text.trim_start(), room).into_iter().enumerate() {
            let further = if index > 0 { 2 } else { 0 };
            lines.push((format!("{}{line}", " ".repeat(indent + further)), tone));
        }
    };
    if let Some(row) = state.row(model) {
        if !row.next.0.is_empty() && row.next.1 != Tone::Quiet {
            add(&format!("next: {}", row.next.0), row.next.1);
        }
        // The plan of a process stands above, where it is that of the model.
        let said = format!("next: {}", row.next.0);
        row.words.iter().filter(|line| line.trim_start() != said).for_each(|line| add(line, Tone::Plain));
    }
    let until = state.film.as_ref().map_or(f64::MAX, |film| film.at().as_secs_f64());
    let told: Vec<_> = state.told_of(model).filter(|told| told.at <= until).collect();
    if !told.is_empty() {
        add("", Tone::Plain);
        add("events, the newest first:", Tone::Quiet);
    }
    for one in told {
        add(&format!("  {} {}", one.time, one.text), one.mark.map(|(_, tone)| tone).unwrap_or_default());
    }
    lines
}

/// The log of a model, newest line last.
pub(super) fn log(state: &State, model: &str, pen: &mut Pen<'_>) {
    let width = state.size.0;
    let room = layout::text(state, false);
    if matches!(state.link, super::Link::Live) {
        let older =
            if state.scroll > 0 { format!(", {} newer lines below", state.scroll) } else { String::new() };
        let x = pen.text(0, 0, width, &format!("log of {}", tame(model)), Look::strong());
        pen.text(x, 0, width.saturating_sub(x), &older, pen.look.of_tone(Tone::Quiet));
    } else {
        pen.title(state);
    }
    let end = state.log.len().saturating_sub(state.scroll);
    let lines = state.log.iter().take(end).skip(end.saturating_sub(room));
    for (y, line) in (1..).zip(lines) {
        pen.text(0, y, width, line, Style::new());
    }
    if state.log.is_empty() {
        pen.text(0, 1, width, "nothing yet", pen.look.of_tone(Tone::Quiet));
    }
    pen.keys(state, &LOG);
}
