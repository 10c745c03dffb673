//! What lies over the view: help, menus, questions.

use ratatui_core::layout::Rect;
use ratatui_core::style::Style;

use super::super::input::Action;
use super::super::look::{Look, Tone};
use super::super::state::{Over, Sort, State};
use super::super::text::{tame, width, wrapped};
use super::Pen;

/// All keys, and what they do.
const HELP: [(&str, &str); 20] = [
    ("arrows, j k, PgUp PgDn", "choose a model, or scroll"),
    ("Enter", "the memory of the model; Esc goes back"),
    ("F4, /", "filter by name, state or verdict"),
    ("F6, > <", "sort; I reverses the order"),
    ("l", "the log of the model"),
    ("Tab", "its next memory (host, GPUs, replicas)"),
    ("t", "its last hour, its last day, since this screen began"),
    ("F9", "what can be done to it"),
    ("r d c, p u", "restart, drain, reclaim it; pin, unpin it"),
    ("Space, + -, left right", "a recording: pause, speed, seek"),
    ("Ctrl-Z, Ctrl-L", "to the shell (fg comes back); draw anew"),
    ("q, F10, Ctrl-C", "quit"),
    ("", ""),
    ("USED, BUDGET", "the fullest process, of its budget of host memory"),
    ("+/REQ, +/HOUR", "growth, where it is more than a settling"),
    ("LEFT", "until the first budget is reached, by the forecast"),
    ("VERDICT", "warming, steady, bounded, suspected, leaking"),
    ("R X c u", "marks: replaced, failed, reclaimed, unloaded"),
    ("v", "mark: it began to look like a leak"),
    ("", ""),
];

pub(super) fn draw(state: &State, pen: &mut Pen<'_>) {
    match &state.over {
        Over::Nothing | Over::Filter => {}
        Over::Help => {
            let lines: Vec<String> = HELP.iter().map(|(keys, what)| format!("{keys:<23} {what}")).collect();
            boxed(state, pen, "help: any key closes it", &lines, None);
        }
        Over::Sort(line) => {
            let lines: Vec<String> = Sort::ALL.iter().map(|sort| sort.words().to_owned()).collect();
            boxed(state, pen, "sort by", &lines, Some(*line));
        }
        Over::Actions(line) => {
            let lines: Vec<String> = Action::ALL
                .iter()
                .map(|one| format!("{}  {:<8} {}", one.key(), one.route(), one.words()))
                .collect();
            let title = format!("what to do to {}", tame(state.chosen().unwrap_or_default()));
            boxed(state, pen, &title, &lines, Some(*line));
        }
        Over::Ask(action, model) => {
            let text = format!("{}.", action.words());
            let columns = usize::from(state.size.0).saturating_sub(6).min(72);
            let mut lines = wrapped(&text, columns);
            lines.extend([String::new(), "y does it, n or Esc does not".to_owned()]);
            boxed(state, pen, &format!("{} {}?", action.route(), tame(model)), &lines, None);
        }
    }
}

/// A box in the middle, as large as what is in it or as the screen.
fn boxed(state: &State, pen: &mut Pen<'_>, title: &str, lines: &[String], chosen: Option<usize>) {
    let (columns, rows) = state.size;
    let longest = lines.iter().map(|line| width(line)).chain([width(title)]).max().unwrap_or_default();
    let across = u16::try_from(longest + 4).unwrap_or(columns).min(columns);
    let down = u16::try_from(lines.len() + 2).unwrap_or(rows).min(rows);
    let area = Rect::new((columns - across) / 2, (rows - down) / 2, across, down);
    let room = usize::from(down.saturating_sub(2));
    // What is chosen stays in sight.
    let skip = chosen.map_or(0, |line| (line + 1).saturating_sub(room));
    let blank = " ".repeat(usize::from(across));
    for y in area.y..area.bottom() {
        // A wide letter that the box would halve goes as a whole.
        let left = area.x.checked_sub(1).and_then(|x| pen.buffer.cell_mut((x, y)));
        if let Some(cell) = left.filter(|cell| width(cell.symbol()) > 1) {
            cell.set_symbol(" ");
        }
        pen.text(area.x, y, across, &blank, Style::reset());
    }
    let bar = " ".repeat(usize::from(across));
    pen.text(area.x, area.y, across, &bar, Look::bar());
    pen.text(area.x + 2, area.y, across.saturating_sub(4), title, Look::bar().patch(Look::strong()));
    for (y, (index, line)) in (area.y + 1..).zip(lines.iter().enumerate().skip(skip).take(room)) {
        let style = if chosen == Some(index) { Look::bar() } else { Style::new() };
        pen.text(area.x + 2, y, across.saturating_sub(4), line, style);
    }
    let dash = pen.look.lines().0.repeat(usize::from(across));
    pen.text(area.x, area.bottom() - 1, across, &dash, pen.look.of_tone(Tone::Quiet));
}
