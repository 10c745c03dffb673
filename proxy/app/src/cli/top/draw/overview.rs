//! The overview: the machine, the sums, the models, what happened last.

use ratatui_core::style::Style;

use super::super::input::Told;
use super::super::layout;
use super::super::look::{Look, Tone};
use super::super::picture::Row;
use super::super::state::{Over, State};
use super::super::text::{rate, tame};
use super::{Pen, columns, machine};

const KEYS: [(&str, &str); 8] = [
    ("F1", "Help"),
    ("F4", "Filter"),
    ("F6", "Sort"),
    ("Enter", "Memory"),
    ("l", "Log"),
    ("F9", "Actions"),
    ("r", "Restart"),
    ("q", "Quit"),
];
const FILM: [(&str, &str); 6] = [
    ("F1", "Help"),
    ("Space", "Pause"),
    ("+-", "Speed"),
    ("<->", "Seek"),
    ("Enter", "Memory"),
    ("q", "Quit"),
];

pub(super) fn draw(state: &State, pen: &mut Pen<'_>) {
    let layout = layout::overview(state);
    pen.title(state);
    machine::draw(state, layout, pen);
    let y = 1 + layout.machine;
    sums(state, pen, y);
    columns::draw(state, pen, y + 1, layout.rows);
    if state.picture.rows.is_empty() && layout.rows > 0 {
        let told =
            if state.picture.who.name.is_empty() { "" } else { "there is no model in the configuration" };
        pen.text(0, y + 2, state.size.0, told, pen.look.of_tone(Tone::Quiet));
    } else if state.rows().is_empty() && layout.rows > 0 {
        let told = format!("no model has `{}` in its name, state or verdict", state.filter);
        pen.text(0, y + 2, state.size.0, &told, pen.look.of_tone(Tone::Quiet));
    }
    next(state, pen, y + 2 + layout.rows);
    events(state, pen, y + 3 + layout.rows, layout.events);
    if state.over == Over::Filter {
        let y = state.size.1.saturating_sub(1);
        let x = pen.text(0, y, state.size.0, "Filter: ", Look::strong());
        let x = pen.text(x, y, state.size.0.saturating_sub(x), &state.filter, Look::bar());
        pen.text(
            x,
            y,
            state.size.0.saturating_sub(x),
            "_  Enter keeps, Esc clears",
            pen.look.of_tone(Tone::Quiet),
        );
    } else {
        pen.keys(state, if state.film.is_some() { &FILM } else { &KEYS });
    }
}

/// Models by state, slots, queue and rates, all together.
fn sums(state: &State, pen: &mut Pen<'_>, y: u16) {
    let rows = &state.picture.rows;
    let mut states: Vec<(&str, Tone, usize)> = Vec::new();
    for row in rows {
        match states.iter_mut().find(|(name, ..)| *name == row.state.0) {
            Some((.., count)) => *count += 1,
            None => states.push((row.state.0, row.state.1, 1)),
        }
    }
    let separator = pen.look.lines().2;
    let width = state.size.0;
    let count = match rows.len() {
        0 => "no models".to_owned(),
        1 => "1 model: ".to_owned(),
        many => format!("{many} models: "),
    };
    let mut x = pen.text(0, y, width, &count, Look::strong());
    for (index, (name, tone, count)) in states.iter().enumerate() {
        let comma = if index == 0 { "" } else { ", " };
        x = pen.text(x, y, width.saturating_sub(x), comma, Style::new());
        let style = pen.look.of_tone(*tone);
        x = pen.text(x, y, width.saturating_sub(x), &format!("{count} {name}"), style);
    }
    let busy: u32 = rows.iter().map(|row| row.busy.0).sum();
    let slots: u32 = rows.iter().filter_map(|row| row.busy.1).sum();
    let waiting: usize = rows.iter().map(|row| row.waiting).sum();
    let sum = |of: fn(&Row) -> Option<f64>| rows.iter().filter_map(of).sum::<f64>();
    let (requests, tokens) = (sum(|row| Some(row.rate?.requests)), sum(|row| Some(row.rate?.tokens)));
    let mut facts = vec![
        format!("{busy}/{slots} slots"),
        format!("{waiting} waiting"),
        format!("{} req/s", rate(requests)),
        format!("{} tok/s", rate(tokens)),
    ];
    if !state.filter.is_empty() {
        facts.insert(0, format!("filter `{}`: {} shown", state.filter, state.rows().len()));
    }
    let text = format!("{separator}{}", facts.join(separator));
    pen.text(x, y, width.saturating_sub(x), &text, Style::new());
}

/// What is done next to the chosen model, in full: in the table there is seldom room for it.
fn next(state: &State, pen: &mut Pen<'_>, y: u16) {
    let Some(row) = state.selected.as_ref().and_then(|model| state.row(model)) else { return };
    let width = state.size.0;
    let x = pen.text(0, y, width.min(40), &row.shown, Look::strong());
    let plan = if row.next.0.is_empty() { "nothing is planned" } else { &row.next.0 };
    pen.text(x, y, width.saturating_sub(x), &format!(": {plan}"), pen.look.of_tone(row.next.1));
}

/// What happened last, the newest first.
fn events(state: &State, pen: &mut Pen<'_>, y: u16, lines: u16) {
    if lines == 0 {
        return;
    }
    let width = state.size.0;
    let dash = pen.look.lines().0;
    let head = " last events ";
    let rest = usize::from(width).saturating_sub(head.len() + 2);
    pen.text(
        0,
        y,
        width,
        &format!("{}{head}{}", dash.repeat(2), dash.repeat(rest)),
        pen.look.of_tone(Tone::Quiet),
    );
    for (y, told) in (y + 1..y + lines).zip(state.told.iter().rev()) {
        event(pen, (0, y, width), told, true);
    }
}

/// One event in one line.
pub(super) fn event(pen: &mut Pen<'_>, (x, y, width): (u16, u16, u16), told: &Told, named: bool) {
    let end = x + width;
    let mut x = pen.text(x, y, width, &format!("{} ", told.time), pen.look.of_tone(Tone::Quiet));
    if let Some(model) = told.model.as_ref().filter(|_| named) {
        let model = tame(model);
        x = pen.text(x, y, end.saturating_sub(x).min(30), &model, Look::strong());
        x = pen.text(x, y, end.saturating_sub(x), " ", Style::new());
    }
    let tone = told.mark.map(|(_, tone)| tone).unwrap_or_default();
    pen.text(x, y, end.saturating_sub(x), &told.text, pen.look.of_tone(tone));
}
