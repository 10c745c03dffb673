//! The table of models: its columns, and the columns that a narrow screen drops.

use std::collections::BTreeSet;

use ratatui_core::buffer::Buffer;
use ratatui_core::layout::{Constraint, Rect};
use ratatui_core::style::{Color, Style};
use ratatui_core::text::Line;
use ratatui_core::widgets::StatefulWidget;
use ratatui_widgets::table::{Cell, Row, Table, TableState};
use warden_policies::growth::GrowthVerdict;
use warden_policies::units::truncate_to_u64;

use super::look::{self, BAD, GOOD, PLAIN, QUIET, REVERSED, WARN, short_bytes, short_rate, signed_bytes};
use super::picture::ModelRow;
use super::state::ScreenState;

const WIDEST_NAME: u16 = 40;
const WIDEST_PLAN: u16 = 90;
const MAX_GPU_COLUMNS: usize = 16;
/// Column repeated for each GPU.
const PER_GPU: &str = "GPU";

type ShownCell = (String, Color);

#[derive(Clone, Copy)]
struct TableColumn {
    head: &'static str,
    gpu: u32,
    width: u16,
    expendable: u8,
    is_number: bool,
}

/// All columns from left to right: head, width, and rank. A narrow screen drops the highest rank first, and
/// rank 0 never.
const COLUMNS: [(&str, u16, u8); 15] = [
    ("MODEL", 12, 0),
    ("STATE", 9, 0),
    ("PROC", 4, 9),
    ("SLOTS", 6, 1),
    ("QUEUE", 5, 2),
    ("REQ/S", 6, 5),
    ("TOK/S", 6, 6),
    ("HOST", 7, 0),
    ("USED", 4, 1),
    (PER_GPU, 7, 7),
    ("VERDICT", 9, 0),
    ("+/REQ", 8, 3),
    ("+/HOUR", 8, 8),
    ("LEFT", 5, 4),
    ("NEXT", 16, 11),
];

const LEFT_ALIGNED: [&str; 4] = ["MODEL", "STATE", "VERDICT", "NEXT"];

fn cell(row: &ModelRow, column: &TableColumn) -> ShownCell {
    let known = |value: Option<String>| value.map_or_else(dash, |text| (text, PLAIN));
    match column.head {
        "MODEL" => (row.shown.clone(), PLAIN),
        "STATE" => (row.state.0.to_owned(), row.state.1),
        "PROC" => known(
            (row.load.processes.1 > 0).then(|| format!("{}/{}", row.load.processes.0, row.load.processes.1)),
        ),
        "SLOTS" => known(match row.load.busy {
            (0, None) => None,
            (busy, None) => Some(busy.to_string()),
            (busy, Some(slots)) => Some(format!("{busy}/{slots}")),
        }),
        "QUEUE" if row.load.waiting > 0 => (row.load.waiting.to_string(), WARN),
        "QUEUE" => ("0".to_owned(), QUIET),
        "REQ/S" => known(row.load.rate.map(|one| short_rate(one.requests))),
        "TOK/S" => known(row.load.rate.map(|one| short_rate(one.tokens))),
        "HOST" => known(row.host.map(short_bytes)),
        "USED" => row
            .fill
            .map_or_else(dash, |fill| (format!("{:.0}%", (fill.fraction() * 100.0).min(999.0)), fill.tone())),
        PER_GPU => known(row.vram.get(&column.gpu).map(|held| short_bytes(*held))),
        "VERDICT" => verdict(row),
        "+/REQ" => known(row.growth.slope.map(signed_bytes)),
        "+/HOUR" => known(row.growth.hourly.map(signed_bytes)),
        "LEFT" => row.growth.left.map_or_else(dash, time_left),
        _ => row.next.clone(),
    }
}

fn dash() -> ShownCell {
    ("-".to_owned(), QUIET)
}

fn verdict(row: &ModelRow) -> ShownCell {
    if row.host.is_none() && row.vram.is_empty() {
        return dash();
    }
    let tone = match row.growth.verdict {
        GrowthVerdict::Warming => QUIET,
        GrowthVerdict::Steady => GOOD,
        GrowthVerdict::Bounded => PLAIN,
        GrowthVerdict::Suspected => WARN,
        GrowthVerdict::Leaking => BAD,
    };
    (row.growth.verdict.as_str().to_owned(), tone)
}

/// Uses one unit, because the operator only needs the magnitude.
fn time_left(seconds: f64) -> ShownCell {
    let seconds = truncate_to_u64(seconds.max(0.0));
    let text = match seconds {
        0..60 => format!("{seconds}s"),
        60..7200 => format!("{}m", seconds / 60),
        7200..172_800 => format!("{}h", seconds / 3600),
        172_800..31_536_000 => format!("{}d", seconds / 86_400),
        _ => ">1y".to_owned(),
    };
    (text, if seconds < 3600 { WARN } else { PLAIN })
}

fn fit_columns(gpus: &BTreeSet<u32>, longest_name: u16, width: u16) -> Vec<TableColumn> {
    let mut columns = Vec::new();
    for (head, width, expendable) in COLUMNS {
        let is_number = !LEFT_ALIGNED.contains(&head);
        let column = |gpu: u32| TableColumn { head, gpu, width, expendable, is_number };
        match head {
            PER_GPU => columns.extend(gpus.iter().take(MAX_GPU_COLUMNS).map(|gpu| column(*gpu))),
            _ => columns.push(column(0)),
        }
    }
    let total = |columns: &[TableColumn]| columns.iter().map(|one| one.width + 1).sum::<u16>().max(1) - 1;
    while total(&columns) > width {
        let most = columns.iter().map(|one| one.expendable).max().unwrap_or_default();
        if most == 0 {
            break;
        }
        columns.retain(|one| one.expendable != most);
    }
    let mut spare = width.saturating_sub(total(&columns));
    for (head, widest) in [("MODEL", longest_name.min(WIDEST_NAME)), ("NEXT", WIDEST_PLAN)] {
        if let Some(column) = columns.iter_mut().find(|one| one.head == head) {
            let more = widest.saturating_sub(column.width).min(spare);
            column.width += more;
            spare -= more;
        }
    }
    columns
}

pub(super) fn draw_table(state: &mut ScreenState, area: Rect, buffer: &mut Buffer) {
    let rows = state.rows();
    let devices = state.data.picture.gauges.iter().filter_map(|gauge| gauge.gpu);
    // Include GPUs of processes' readings: a driver that lists no device may still report the memory of
    // processes.
    let gpus = devices.chain(rows.iter().flat_map(|row| row.vram.keys().copied())).collect();
    let longest = rows.iter().map(|row| look::text_width(&row.shown)).max().unwrap_or_default();
    let columns = fit_columns(&gpus, u16::try_from(longest).unwrap_or(u16::MAX), area.width);
    let place = |column: &TableColumn, text: &str, style: Style| {
        let line = Line::styled(look::cut_to_width(text, usize::from(column.width)), style);
        Cell::from(if column.is_number { line.right_aligned() } else { line })
    };
    let head = |column: &TableColumn| {
        let gpu = if column.head == PER_GPU { column.gpu.to_string() } else { String::new() };
        place(column, &format!("{}{gpu}", column.head), Style::new())
    };
    let row = |row: &ModelRow| {
        Row::new(columns.iter().map(|column| {
            let (text, tone) = cell(row, column);
            place(column, &text, tone.into())
        }))
    };
    let page = usize::from(area.height.saturating_sub(1)).max(1);
    let mut shown = TableState::new()
        .with_offset(state.table.first.min(rows.len().saturating_sub(page)))
        .with_selected(state.table.selected.as_ref().map(|_| state.table.cursor));
    let widths = columns.iter().map(|column| Constraint::Length(column.width));
    let table = Table::new(rows.iter().map(row), widths)
        .header(Row::new(columns.iter().map(head)).style(REVERSED))
        .row_highlight_style(REVERSED);
    table.render(area, buffer, &mut shown);
    (state.table.first, state.page) = (shown.offset(), page);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_fall_away_from_the_least_important_and_never_the_name_the_state_the_memory_and_the_verdict() {
        let at = |width| -> Vec<&'static str> {
            let columns = fit_columns(&BTreeSet::from([0, 1]), 20, width);
            let total: u16 = columns.iter().map(|column| column.width + 1).sum();
            assert!(total <= width + 1, "{width}: {total}");
            columns.iter().map(|column| column.head).collect()
        };
        let mut last = usize::MAX;
        for width in (60..=200).rev() {
            let heads = at(width);
            assert!(heads.len() <= last, "{width}: {heads:?}");
            last = heads.len();
            for needed in ["MODEL", "STATE", "HOST", "VERDICT"] {
                assert!(heads.contains(&needed), "{width}: {heads:?}");
            }
        }
        assert_eq!(at(60).join(" "), "MODEL STATE SLOTS QUEUE HOST USED VERDICT");
        assert_eq!(at(80).join(" "), "MODEL STATE SLOTS QUEUE REQ/S HOST USED VERDICT +/REQ LEFT");
        assert_eq!(at(200).len(), 16);
    }

    #[test]
    fn times_that_are_left_are_rough() {
        let text = |seconds| time_left(seconds).0;
        assert_eq!([5.0, 119.0, 8000.0, 200_000.0, f64::MAX].map(text), ["5s", "1m", "2h", "2d", ">1y"]);
    }
}
