//! Draws the whole screen with the widgets of ratatui.

use std::time::Duration;

use ratatui_core::buffer::Buffer;
use ratatui_core::layout::{Constraint, Layout, Rect};
use ratatui_core::style::{Color, Style};
use ratatui_core::text::{Line, Span, Text};
use ratatui_core::widgets::{StatefulWidget, Widget};
use ratatui_widgets::block::Block;
use ratatui_widgets::borders::Borders;
use ratatui_widgets::clear::Clear;
use ratatui_widgets::gauge::LineGauge;
use ratatui_widgets::list::{List, ListState};
use warden_policies::MemoryKind;

use super::columns::{SORT_ORDERS, draw_table};
use super::look::{
    BAD, BOLD, PLAIN, QUIET, REVERSED, TerminalLook, WARN, cut_to_width, sanitize, short_bytes, short_rate,
    signed_bytes, text_width, wrap_text,
};
use super::picture::{EventLine, MemoryGauge};
use super::plot::{HistoryMark, SPANS, draw_plot};
use super::recording::PlayedRecording;
use super::state::{MODEL_ACTIONS, ScreenOverlay, ScreenState, ScreenView};
use crate::cli::status::short_age;

pub(super) const MIN_SCREEN_SIZE: (u16, u16) = (60, 10);
/// Lower screens show no events below the models.
const MIN_EVENT_HEIGHT: u16 = 20;
const MIN_GAUGE_COLUMNS: u16 = 44;
const PLOT_ROWS: (u16, u16) = (6, 20);

const OVERVIEW_KEYS: &str = "F1 help  F4 filter  F6 sort  Enter memory  l log  F9 actions  r restart  q quit";
const MODEL_KEYS: &str = "Esc back  Tab next  t time  l log  r restart  d drain  c reclaim  p pin  q quit";
const LOG_KEYS: &str = "Esc back  PgUp older  End newest  q quit";
const RECORDING_KEYS: &str = "F1 help  Space pause  + - speed  <- -> seek  Tab next memory  Esc back  q quit";

const HELP_TEXT: &str = "\
arrows, j k, PgUp PgDn  choose a model, or scroll
Enter                   the memory of the model; Esc goes back
F4, /                   filter by name, state or verdict
F6, > <                 sort; I reverses the order
l                       the log of the model
Tab                     its next memory (host, GPUs, replicas)
t                       its last 10 minutes, hour or day
F9                      what can be done to it
r d c, p u              restart, drain, reclaim it; pin, unpin it
Space, + -, left right  a recording: pause, speed, seek
Ctrl-Z, Ctrl-L          to the shell (fg comes back); draw again
q, F10, Ctrl-C          quit

USED                    the fullest process, of its budget of host memory
+/REQ, +/HOUR           growth, where it is more than a settling
LEFT                    until the first budget is reached, by the forecast
VERDICT                 warming, steady, bounded, suspected, leaking
R X c u                 marks: replaced, failed, reclaimed, unloaded
v                       mark: it began to look like a leak";

/// Stores in the state how many lines fit, and limits the scroll position.
pub(super) fn draw_screen(state: &mut ScreenState, look: TerminalLook, buffer: &mut Buffer) {
    buffer.reset();
    let area = buffer.area;
    if state.overlay == ScreenOverlay::TooSmall {
        state.overlay = ScreenOverlay::Nothing;
    }
    if area.width < MIN_SCREEN_SIZE.0 || area.height < MIN_SCREEN_SIZE.1 {
        state.overlay = ScreenOverlay::TooSmall;
        let (columns, rows) = MIN_SCREEN_SIZE;
        let sentence =
            format!("top needs {columns} columns and {rows} rows: make the terminal larger, or press q");
        Text::from_iter(wrap_text(&sentence, usize::from(area.width))).render(area, buffer);
        return;
    }
    let [head, body, foot] =
        Layout::vertical([Constraint::Length(1), Constraint::Min(1), Constraint::Length(1)]).areas(area);
    let keys = match &state.view {
        _ if state.recording.is_some() => RECORDING_KEYS,
        ScreenView::Overview => OVERVIEW_KEYS,
        ScreenView::Model(_) => MODEL_KEYS,
        ScreenView::Log(..) => LOG_KEYS,
    };
    match state.view.clone() {
        ScreenView::Overview => draw_overview(state, body, buffer),
        ScreenView::Model(model) => draw_model(state, &model, body, buffer),
        ScreenView::Log(..) => draw_log(state, body, buffer),
    }
    put_line(&head_line(state), head, buffer);
    if !state.once {
        put_line(&foot_line(state, keys), foot, buffer);
    }
    draw_overlay(state, area, buffer);
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
        ScreenView::Log(model, _) => {
            let newer = match state.scroll {
                0 => String::new(),
                lines => format!(", {lines} newer lines below"),
            };
            let name = Span::styled(format!("log of {}", sanitize(model)), BOLD);
            Line::from_iter([name, Span::styled(newer, QUIET)])
        }
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
    facts.extend(state.recording.as_ref().map(PlayedRecording::words));
    facts.extend(state.read_only.then(|| "read only".to_owned()));
    facts.join(" · ")
}

fn model_head(state: &ScreenState, model: &str) -> Line<'static> {
    let name = Span::styled(sanitize(model), BOLD);
    let Some(row) = state.row(model) else {
        return Line::from_iter([name, Span::styled("  is gone: Esc goes back", WARN)]);
    };
    let mut facts = vec![match &state.recording {
        Some(recording) => recording.words(),
        None => format!("{} running · {} waiting", row.load.busy.0, row.load.waiting),
    }];
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

fn foot_line(state: &ScreenState, keys: &'static str) -> Line<'static> {
    if state.overlay == ScreenOverlay::Filter {
        let filter = Span::styled(state.table.filter.clone(), REVERSED);
        let hint = Span::styled("_  Enter keeps, Esc clears", QUIET);
        return Line::from_iter([Span::styled("Filter: ", BOLD), filter, hint]);
    }
    match &state.message {
        Some((_, text, tone)) => Line::styled(text.clone(), Style::from(*tone).patch(BOLD)),
        None => Line::styled(keys, QUIET),
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
        let why = if state.data.picture.rows.is_empty() {
            "there is no model in the configuration".to_owned()
        } else {
            format!("no model has `{}` in its name, state or verdict", state.table.filter)
        };
        Line::styled(why, QUIET).render(Rect { y: table.y + 1, height: 1, ..table }, buffer);
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
    let rows = &state.data.picture.rows;
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
    if !state.table.filter.is_empty() {
        line.push_span(format!(" · filter `{}`: {} shown", state.table.filter, state.rows().len()));
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
    let mut history = state.history_of(model);
    let began = state.events_of(model).filter(|event| event.leaks);
    history.marks.extend(began.map(|event| HistoryMark { at: event.at, letter: 'v', tone: event.tone }));
    let count = history.lines.len();
    let height = if count == 0 { 0 } else { (area.height / 2).clamp(PLOT_ROWS.0, PLOT_ROWS.1) };
    let [title, plot, rest] = Layout::vertical([
        Constraint::Length(height.min(1)),
        Constraint::Length(height.max(1) - 1),
        Constraint::Min(1),
    ])
    .areas(area);
    if let Some(memory) = history.lines.get(state.memory.series % count.max(1)) {
        let name = match memory.kind {
            MemoryKind::Host => "host memory".to_owned(),
            MemoryKind::Vram(gpu) => format!("VRAM on GPU {}", gpu.0),
        };
        let mut facts = vec![name, format!("replica {}", memory.replica)];
        // The previous time range stays until the instance sends the requested one.
        let requested =
            if history.span == Some(SPANS[state.memory.span]) { "" } else { " (another time is requested)" };
        facts.extend(history.span.map(|span| format!("{}{requested}", span.words)));
        facts.extend(memory.held.map(short_bytes));
        facts.extend(memory.soft.map(|soft| format!("soft budget {}", short_bytes(soft))));
        facts.extend(memory.hard.map(|hard| format!("hard budget {}", short_bytes(hard))));
        let next = format!("  (Tab: {} of {count})", state.memory.series % count + 1);
        let words = facts.join(", ") + if count > 1 { &next } else { "" };
        put_line(&Line::styled(words, QUIET), title, buffer);
        draw_plot(&history, memory, plot, buffer);
    }
    let lines = model_words(state, model, usize::from(rest.width));
    state.page = usize::from(rest.height);
    state.scroll = state.scroll.min(lines.len().saturating_sub(state.page));
    lines.into_iter().skip(state.scroll).collect::<Text<'_>>().render(rest, buffer);
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

fn draw_log(state: &mut ScreenState, area: Rect, buffer: &mut Buffer) {
    state.page = usize::from(area.height);
    state.scroll = state.scroll.min(state.data.log.len().saturating_sub(state.page));
    let end = state.data.log.len() - state.scroll;
    if state.data.log.is_empty() {
        Line::styled("nothing yet", QUIET).render(area, buffer);
    }
    for (place, line) in area.rows().zip(state.data.log.iter().take(end).skip(end.saturating_sub(state.page)))
    {
        put_line(&Line::raw(line), place, buffer);
    }
}

fn draw_overlay(state: &ScreenState, area: Rect, buffer: &mut Buffer) {
    let (title, lines, chosen): (String, Vec<String>, Option<usize>) = match &state.overlay {
        ScreenOverlay::Nothing | ScreenOverlay::Filter | ScreenOverlay::TooSmall => return,
        ScreenOverlay::Help => {
            ("help: any key closes it".to_owned(), HELP_TEXT.lines().map(str::to_owned).collect(), None)
        }
        ScreenOverlay::Sort(line) => {
            let mut orders = SORT_ORDERS.map(str::to_owned).to_vec();
            "as configured".clone_into(&mut orders[0]);
            ("sort by".to_owned(), orders, Some(*line))
        }
        ScreenOverlay::Actions(line) => {
            let lines =
                MODEL_ACTIONS.iter().map(|one| format!("{}  {:<8} {}", one.key, one.route, one.words));
            let model = sanitize(state.chosen().unwrap_or_default());
            (format!("what to do to {model}"), lines.collect(), Some(*line))
        }
        ScreenOverlay::Confirm(action, model) => {
            let columns = usize::from(area.width).saturating_sub(6).min(72);
            let mut lines = wrap_text(&format!("{}.", action.words), columns);
            lines.extend([String::new(), "y does it, n or Esc does not".to_owned()]);
            (format!("{} {}?", action.route, sanitize(model)), lines, None)
        }
    };
    let longest =
        lines.iter().map(|line| text_width(line)).chain([text_width(&title)]).max().unwrap_or_default();
    let across = Constraint::Length(u16::try_from(longest + 4).unwrap_or(area.width));
    let down = Constraint::Length(u16::try_from(lines.len() + 2).unwrap_or(area.height));
    let place = area.centered(across, down).intersection(area);
    for y in place.y..place.bottom() {
        // Remove a wide letter as a whole if the box would cover half of it.
        let left = place.x.checked_sub(1).and_then(|x| buffer.cell_mut((x, y)));
        if let Some(cell) = left.filter(|cell| text_width(cell.symbol()) > 1) {
            cell.set_symbol(" ");
        }
    }
    Clear.render(place, buffer);
    let title = Line::styled(format!(" {title} "), BOLD);
    let list = List::new(lines.iter().map(|line| format!(" {line}")))
        .block(Block::bordered().title(title))
        .highlight_style(REVERSED);
    StatefulWidget::render(list, place, buffer, &mut ListState::default().with_selected(chosen));
}

#[cfg(test)]
#[path = "draw_tests.rs"]
mod tests;
