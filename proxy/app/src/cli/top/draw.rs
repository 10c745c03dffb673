//! Draws the whole screen with the widgets of ratatui.

use std::time::Duration;

use ratatui_core::buffer::Buffer;
use ratatui_core::layout::{Constraint, Layout, Rect};
use ratatui_core::style::{Color, Style};
use ratatui_core::text::{Line, Span, Text};
use ratatui_core::widgets::Widget;
use ratatui_widgets::block::Block;
use ratatui_widgets::borders::Borders;
use ratatui_widgets::gauge::LineGauge;

use super::columns::draw_table;
use super::look::{
    BAD, BOLD, PLAIN, QUIET, REVERSED, TerminalLook, WARN, cut_to_width, sanitize, short_bytes, short_rate,
    signed_bytes, wrap_text,
};
use super::picture::{EventLine, MemoryGauge};
use super::state::{ScreenState, ScreenView};
use crate::cli::status::short_age;

pub(super) const MIN_SCREEN_SIZE: (u16, u16) = (60, 10);
/// Lower screens show no events below the models.
const MIN_EVENT_HEIGHT: u16 = 20;
const MIN_GAUGE_COLUMNS: u16 = 44;

const OVERVIEW_KEYS: &str = "Enter open  r restart  d drain  c reclaim  p pin  u unpin  q quit";
const MODEL_KEYS: &str = "Esc back  r restart  d drain  c reclaim  p pin  u unpin  q quit";

/// Stores in the state how many lines fit, and limits the scroll position.
pub(super) fn draw_screen(state: &mut ScreenState, look: TerminalLook, buffer: &mut Buffer) {
    buffer.reset();
    let area = buffer.area;
    state.too_small = area.width < MIN_SCREEN_SIZE.0 || area.height < MIN_SCREEN_SIZE.1;
    if state.too_small {
        let (columns, rows) = MIN_SCREEN_SIZE;
        let sentence =
            format!("top needs {columns} columns and {rows} rows: make the terminal larger, or press q");
        Text::from_iter(wrap_text(&sentence, usize::from(area.width))).render(area, buffer);
        return;
    }
    let [head, body, foot] =
        Layout::vertical([Constraint::Length(1), Constraint::Min(1), Constraint::Length(1)]).areas(area);
    match state.view.clone() {
        ScreenView::Overview => draw_overview(state, body, buffer),
        ScreenView::Model(model) => draw_model(state, &model, body, buffer),
    }
    put_line(&head_line(state), head, buffer);
    if !state.once {
        put_line(&foot_line(state), foot, buffer);
    }
    look.adapt_screen(buffer);
}

/// A line that is too long ends in `~`.
fn put_line(line: &Line<'_>, area: Rect, buffer: &mut Buffer) {
    line.render(area, buffer);
    if line.width() > usize::from(area.width)
        && let Some(cell) = buffer.cell_mut((area.right().saturating_sub(1), area.y))
    {
        cell.set_symbol("~");
    }
}

/// Reports a silent instance before all else, because the screen is then outdated.
fn head_line(state: &ScreenState) -> Line<'static> {
    if let Some((since, why)) = &state.data.silent {
        let text = format!("NO ANSWER for {}: {why}", short_age(state.at.saturating_sub(*since)));
        let style = Style::from(BAD).patch(REVERSED);
        return Line::from_iter([Span::styled(text, style), Span::raw(format!(" · {}", facts(state)))]);
    }
    match &state.view {
        ScreenView::Overview => Line::styled(facts(state), BOLD),
        ScreenView::Model(model) => model_head(state, model),
    }
}

fn facts(state: &ScreenState) -> String {
    let mut facts = state.data.picture.facts.clone();
    if let Some((_, started)) = state.data.picture.instance {
        let up = state.at.as_secs().saturating_sub(u64::try_from(started.as_second()).unwrap_or_default());
        // Whole minutes, so that an idle screen has nothing to redraw.
        let up = short_age(Duration::from_secs(up / 60 * 60));
        facts.insert(facts.len().min(2), format!("up {}", up.trim_end_matches("00s")));
    }
    facts.extend(state.read_only.then(|| "read only".to_owned()));
    facts.join(" · ")
}

fn model_head(state: &ScreenState, model: &str) -> Line<'static> {
    let name = Span::styled(sanitize(model), BOLD);
    let Some(row) = state.row(model) else {
        return Line::from_iter([name, Span::styled("  is gone: Esc goes back", WARN)]);
    };
    let mut facts = vec![format!("{} running · {} waiting", row.load.busy.0, row.load.waiting)];
    facts.extend(row.host.map(|host| format!("host {}", short_bytes(host))));
    facts.extend(row.vram.iter().map(|(gpu, held)| format!("GPU {gpu} {}", short_bytes(*held))));
    facts.extend(
        row.growth
            .slope
            .map(|slope| format!("{} {} a request", row.growth.verdict.as_str(), signed_bytes(slope))),
    );
    let state = Span::styled(row.state.0, row.state.1);
    Line::from_iter([name, Span::raw("  "), state, Span::raw(format!(" · {}", facts.join(" · ")))])
}

fn foot_line(state: &ScreenState) -> Line<'static> {
    if let Some((action, model)) = &state.asked {
        let model = cut_to_width(&sanitize(model), 30);
        let question = format!("{} {model}? y or n: {}", action.route, action.words);
        return Line::styled(question, REVERSED);
    }
    match (&state.message, &state.view) {
        (Some((_, text, tone)), _) => Line::styled(text.clone(), Style::from(*tone).patch(BOLD)),
        (None, ScreenView::Overview) => Line::styled(OVERVIEW_KEYS, QUIET),
        (None, ScreenView::Model(_)) => Line::styled(MODEL_KEYS, QUIET),
    }
}

fn draw_overview(state: &mut ScreenState, area: Rect, buffer: &mut Buffer) {
    let across = (area.width / MIN_GAUGE_COLUMNS).max(1);
    let gauges = u16::try_from(state.data.picture.gauges.len()).unwrap_or(u16::MAX).div_ceil(across);
    let events = match area.height {
        height if height + 2 < MIN_EVENT_HEIGHT || state.once => 0,
        height => 1 + (height / 8).min(6),
    };
    let [gauges, sums, table, next, events] = Layout::vertical([
        Constraint::Length(if state.once { gauges } else { gauges.min((area.height / 4).max(1)) }),
        Constraint::Length(1),
        Constraint::Min(2),
        Constraint::Length(1),
        Constraint::Length(events),
    ])
    .areas(area);
    draw_gauges(&state.data.picture.gauges, across, gauges, buffer);
    put_line(&sums_line(state), sums, buffer);
    draw_table(state, table, buffer);
    if state.rows().is_empty() {
        Line::styled("there is no model in the configuration", QUIET)
            .render(Rect { y: table.y + 1, height: 1, ..table }, buffer);
    }
    // Show the selected model's plan here, because the table seldom has room for it.
    if let Some(row) =
        state.table.selected.as_ref().and_then(|model| state.row(model)).filter(|_| !state.once)
    {
        let plan = if row.next.0.is_empty() { "nothing is planned" } else { &row.next.0 };
        let name = Span::styled(cut_to_width(&row.shown, 40), BOLD);
        put_line(&Line::from_iter([name, Span::styled(format!(": {plan}"), row.next.1)]), next, buffer);
    }
    let block = Block::new().borders(Borders::TOP).border_style(QUIET).title("── last events ");
    for (area, event) in block.inner(events).rows().zip(state.data.events.iter().rev()) {
        put_line(&event_line(event), area, buffer);
    }
    block.render(events, buffer);
}

fn draw_gauges(all: &[MemoryGauge], across: u16, area: Rect, buffer: &mut Buffer) {
    let lines = Layout::horizontal(vec![Constraint::Fill(1); usize::from(across)]).spacing(2);
    let places: Vec<Rect> = area.rows().flat_map(|row| lines.split(row).to_vec()).collect();
    for (index, (place, gauge)) in places.iter().zip(all).enumerate() {
        if index + 1 == places.len() && all.len() > places.len() {
            let more = format!("and {} more GPUs", all.len() - index);
            Line::styled(more, QUIET).render(*place, buffer);
            break;
        }
        let name = gauge.gpu.map_or_else(|| "host".to_owned(), |gpu| format!("GPU {gpu}"));
        let tone = if gauge.faulty { BAD } else { PLAIN };
        let note = Span::styled(format!("{:<5}", gauge.note), tone);
        let Some(share) = gauge.share else {
            let unknown = Span::styled(format!("{name:<6} not reported by its driver "), QUIET);
            put_line(&Line::from_iter([unknown, note]), *place, buffer);
            continue;
        };
        let words = format!("{name:<6} {:>6} of {:<6} ", short_bytes(share.used), short_bytes(share.total));
        LineGauge::default()
            .label(Line::from_iter([Span::raw(words), note]))
            .ratio(share.fraction().clamp(0.0, 1.0))
            .filled_symbol("█")
            .unfilled_symbol("░")
            .filled_style(share.tone())
            .unfilled_style(QUIET)
            .render(*place, buffer);
    }
}

fn sums_line(state: &ScreenState) -> Line<'static> {
    let rows = state.rows();
    let models = match rows.len() {
        0 => "no models".to_owned(),
        1 => "1 model: ".to_owned(),
        many => format!("{many} models: "),
    };
    let mut line = Line::styled(models, BOLD);
    let mut states: Vec<(&str, Color)> = Vec::new();
    for row in rows {
        if !states.contains(&row.state) {
            states.push(row.state);
        }
    }
    for (index, (name, tone)) in states.into_iter().enumerate() {
        let count = rows.iter().filter(|row| row.state.0 == name).count();
        line.push_span(if index == 0 { "" } else { ", " });
        line.push_span(Span::styled(format!("{count} {name}"), tone));
    }
    let busy: u32 = rows.iter().map(|row| row.load.busy.0).sum();
    let slots: u32 = rows.iter().filter_map(|row| row.load.busy.1).sum();
    let waiting: usize = rows.iter().map(|row| row.load.waiting).sum();
    let requests = short_rate(rows.iter().filter_map(|row| row.load.rate).map(|rate| rate.requests).sum());
    let tokens = short_rate(rows.iter().filter_map(|row| row.load.rate).map(|rate| rate.tokens).sum());
    line.push_span(format!(
        " · {busy}/{slots} slots · {waiting} waiting · {requests} req/s · {tokens} tok/s"
    ));
    line
}

fn event_line(event: &EventLine) -> Line<'static> {
    let model =
        event.model.as_ref().map(|model| cut_to_width(&sanitize(model), 30) + " ").unwrap_or_default();
    Line::from_iter([
        Span::styled(format!("{} ", event.time), QUIET),
        Span::styled(model, BOLD),
        Span::styled(event.text.clone(), event.tone),
    ])
}

fn draw_model(state: &mut ScreenState, model: &str, area: Rect, buffer: &mut Buffer) {
    let lines = model_words(state, model, usize::from(area.width));
    state.page = usize::from(area.height);
    state.scroll = state.scroll.min(lines.len().saturating_sub(state.page));
    lines.into_iter().skip(state.scroll).collect::<Text<'_>>().render(area, buffer);
}

/// Returns the model's plan, the lines of `status` and its events, wrapped at `columns`.
pub(super) fn model_words(state: &ScreenState, model: &str, columns: usize) -> Vec<Line<'static>> {
    let mut lines = Vec::new();
    let mut add = |text: &str, tone: Color| {
        let indent = text.len() - text.trim_start().len();
        let room = columns.saturating_sub(indent + 2).max(20);
        for (index, line) in wrap_text(text.trim_start(), room).into_iter().enumerate() {
            let indent = if index > 0 { indent + 2 } else { indent };
            lines.push(Line::styled(format!("{}{line}", " ".repeat(indent)), tone));
        }
    };
    if let Some(row) = state.row(model) {
        let plan = format!("next: {}", row.next.0);
        if !row.next.0.is_empty() && row.next.1 != QUIET {
            add(&plan, row.next.1);
        }
        // Skip a process's plan that equals the model's plan, as most do.
        row.words.iter().filter(|line| line.trim_start() != plan).for_each(|line| add(line, PLAIN));
    }
    let mut events = state.events_of(model).peekable();
    if events.peek().is_some() {
        add("", PLAIN);
        add("events, the newest first:", QUIET);
    }
    events.for_each(|one| add(&format!("  {} {}", one.time, one.text), one.tone));
    lines
}

#[cfg(test)]
#[path = "draw_tests.rs"]
mod tests;
