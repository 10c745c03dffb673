//! The table of models: which columns there are, which fall away where there is no room, and what stands in them.

use ratatui_core::style::Style;

use super::super::look::{Look, Tone};
use super::super::picture::Row;
use super::super::state::{Sort, State};
use super::super::text::{self, bytes, gained, rate};
use super::{Pen, machine};

/// Columns between two columns.
const GAP: u16 = 1;
/// What names and plans take at most.
const WIDEST: (u16, u16) = (40, 90);
/// GPUs that have a column of their own, at most.
const GPUS: usize = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Name,
    State,
    Processes,
    Slots,
    Queue,
    Requests,
    Tokens,
    Host,
    Budget,
    Bar,
    Growth,
    Hourly,
    Left,
    Verdict,
    Vram(u32),
    Next,
}

/// One column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Column {
    what: What,
    width: u16,
    /// What is least important falls away first; 0 never does.
    falls: u8,
    sort: Option<Sort>,
}

const fn column(what: What, width: u16, falls: u8, sort: Option<Sort>) -> Column {
    Column { what, width, falls, sort }
}

/// All columns from left to right.
fn all(gpus: &[u32]) -> Vec<Column> {
    let mut all = vec![
        column(What::Name, 12, 0, Some(Sort::Name)),
        column(What::State, 9, 0, Some(Sort::State)),
        column(What::Processes, 4, 9, None),
        column(What::Slots, 6, 1, None),
        column(What::Queue, 5, 2, Some(Sort::Waiting)),
        column(What::Requests, 6, 5, Some(Sort::Requests)),
        column(What::Tokens, 6, 6, Some(Sort::Tokens)),
        column(What::Host, 6, 0, Some(Sort::Memory)),
        column(What::Budget, 4, 1, Some(Sort::Budget)),
        column(What::Bar, 10, 10, None),
    ];
    all.extend(gpus.iter().take(GPUS).map(|gpu| column(What::Vram(*gpu), 6, 7, Some(Sort::Vram))));
    all.extend([
        column(What::Verdict, 9, 0, Some(Sort::Verdict)),
        column(What::Growth, 7, 3, Some(Sort::Growth)),
        column(What::Hourly, 7, 8, None),
        column(What::Left, 7, 4, Some(Sort::Left)),
        column(What::Next, 16, 11, None),
    ]);
    all
}

/// The columns that there is room for, as wide as they are to be.
fn fitting(gpus: &[u32], names: u16, width: u16) -> Vec<Column> {
    let mut columns = all(gpus);
    let total =
        |columns: &[Column]| columns.iter().map(|one| one.width + GAP).sum::<u16>().saturating_sub(GAP);
    while total(&columns) > width {
        let Some(least) = columns.iter().map(|one| one.falls).max().filter(|falls| *falls > 0) else { break };
        columns.retain(|one| one.falls != least);
    }
    let mut spare = width.saturating_sub(total(&columns));
    for (what, widest) in [(What::Name, names.min(WIDEST.0)), (What::Next, WIDEST.1)] {
        if let Some(column) = columns.iter_mut().find(|one| one.what == what) {
            let more = widest.saturating_sub(column.width).min(spare);
            column.width += more;
            spare -= more;
        }
    }
    columns
}

impl What {
    fn head(self) -> String {
        match self {
            Self::Name => "MODEL",
            Self::State => "STATE",
            Self::Processes => "PROC",
            Self::Slots => "SLOTS",
            Self::Queue => "QUEUE",
            Self::Requests => "REQ/S",
            Self::Tokens => "TOK/S",
            Self::Host => "HOST",
            Self::Budget => "USED",
            Self::Bar => "BUDGET",
            Self::Growth => "+/REQ",
            Self::Hourly => "+/HOUR",
            Self::Left => "LEFT",
            Self::Verdict => "VERDICT",
            Self::Vram(gpu) => return format!("GPU{gpu}"),
            Self::Next => "NEXT",
        }
        .to_owned()
    }

    const fn is_number(self) -> bool {
        !matches!(self, Self::Name | Self::State | Self::Bar | Self::Verdict | Self::Next)
    }
}

/// A time that is left, roughly: who reads it wants to know whether to hurry.
fn left(seconds: f64) -> String {
    let seconds = warden_policies::units::whole(seconds.max(0.0));
    match seconds {
        0..60 => format!("{seconds}s"),
        60..7200 => format!("{}m", seconds / 60),
        7200..172_800 => format!("{}h", seconds / 3600),
        172_800..31_536_000 => format!("{}d", seconds / 86_400),
        _ => ">1y".to_owned(),
    }
}

/// What stands in a cell.
fn cell(row: &Row, what: What) -> (String, Tone) {
    let plain = |text: String| (text, Tone::Plain);
    let dash = || ("-".to_owned(), Tone::Quiet);
    let of = |value: Option<String>| value.map_or_else(dash, plain);
    match what {
        What::Name => plain(row.shown.clone()),
        What::State => (row.state.0.to_owned(), row.state.1),
        What::Processes => match row.processes {
            (_, 0) => dash(),
            (ready, all) => plain(format!("{ready}/{all}")),
        },
        What::Slots => match row.busy {
            (0, None) => dash(),
            (busy, Some(slots)) => plain(format!("{busy}/{slots}")),
            (busy, None) => plain(busy.to_string()),
        },
        What::Queue if row.waiting > 0 => (row.waiting.to_string(), Tone::Warn),
        What::Queue => ("0".to_owned(), Tone::Quiet),
        What::Requests => of(row.rate.map(|one| rate(one.requests))),
        What::Tokens => of(row.rate.map(|one| rate(one.tokens))),
        What::Host => of(row.host.map(bytes)),
        What::Budget => match row.fill {
            Some(fill) => (format!("{:.0}%", (fill.share() * 100.0).min(999.0)), machine::tone(fill.share())),
            None => dash(),
        },
        What::Bar => plain(String::new()),
        What::Growth => of(row.slope.map(gained)),
        What::Hourly => of(hourly(row).map(gained)),
        What::Left => match row.left {
            Some(seconds) => (left(seconds), if seconds < 3600.0 { Tone::Warn } else { Tone::Plain }),
            None => dash(),
        },
        What::Verdict => verdict(row),
        What::Vram(gpu) => {
            let found = row.vram.iter().find(|(number, _)| *number == gpu);
            of(found.map(|(_, vram)| bytes(*vram)))
        }
        What::Next => (row.next.0.clone(), row.next.1),
    }
}

/// What the forecast assumes, else at the rate of now.
fn hourly(row: &Row) -> Option<f64> {
    row.hourly.or_else(|| Some(row.slope? * row.rate?.requests * 3600.0))
}

fn verdict(row: &Row) -> (String, Tone) {
    use warden_policies::growth::Verdict;
    let tone = match row.verdict {
        Verdict::Warming => Tone::Quiet,
        Verdict::Steady => Tone::Good,
        Verdict::Bounded => Tone::Plain,
        Verdict::Suspected => Tone::Warn,
        Verdict::Leaking => Tone::Bad,
    };
    if row.host.is_none() && row.vram.is_empty() {
        return ("-".to_owned(), Tone::Quiet);
    }
    (row.verdict.as_str().to_owned(), tone)
}

fn for_state(state: &State, rows: &[&Row]) -> Vec<Column> {
    let mut gpus: Vec<u32> = state.picture.gpus.iter().map(|gpu| gpu.number).collect();
    // Drivers that tell of no device may tell of processes.
    gpus.extend(rows.iter().flat_map(|row| row.vram.iter().map(|(gpu, _)| *gpu)));
    gpus.sort_unstable();
    gpus.dedup();
    let names = rows.iter().map(|row| text::width(&row.shown)).max().unwrap_or_default();
    fitting(&gpus, u16::try_from(names).unwrap_or(u16::MAX), state.size.0)
}

/// Draws the head and the rows that are on the screen.
pub(super) fn draw(state: &State, pen: &mut Pen<'_>, y: u16, height: u16) {
    let rows = state.rows();
    let columns = for_state(state, &rows);
    head(state, pen, &columns, y);
    let shown = rows.iter().skip(state.first).take(usize::from(height));
    for (row_y, row) in (y + 1..).zip(shown) {
        one(pen, &columns, row, row_y);
        if state.selected.as_deref() == Some(row.name.as_str()) {
            pen.line(row_y, Look::bar());
        }
    }
}

fn head(state: &State, pen: &mut Pen<'_>, columns: &[Column], y: u16) {
    pen.line(y, Look::bar());
    let mut x = 0;
    for column in columns {
        let sorted = state.sort != Sort::Configured && column.sort == Some(state.sort);
        let style = if sorted { Look::bar().patch(Look::strong()) } else { Look::bar() };
        let mark = if sorted { if state.turned { "^" } else { "v" } } else { "" };
        let head = format!("{}{mark}", column.what.head());
        put(pen, column, x, y, &head, style);
        x += column.width + GAP;
    }
}

fn one(pen: &mut Pen<'_>, columns: &[Column], row: &Row, y: u16) {
    let mut x = 0;
    for column in columns {
        let (text, tone) = cell(row, column.what);
        if let (What::Bar, Some(fill)) = (column.what, row.fill) {
            pen.bar(x, y, column.width, fill.share(), machine::tone(fill.share()));
        } else {
            put(pen, column, x, y, &text, pen.look.of_tone(tone));
        }
        x += column.width + GAP;
    }
}

fn put(pen: &mut Pen<'_>, column: &Column, x: u16, y: u16, text: &str, style: Style) {
    if column.what.is_number() {
        pen.text_to(x + column.width, y, column.width, text, style);
    } else {
        pen.text(x, y, column.width, text, style);
    }
}

/// How many lines a screen needs that shows all models.
pub(in super::super) fn whole(state: &State) -> u16 {
    let layout = super::layout::overview(state);
    u16::try_from(state.rows().len()).unwrap_or(u16::MAX - 100).saturating_add(5 + layout.machine)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_fall_away_from_the_least_important_and_never_the_name_the_state_the_memory_and_the_verdict() {
        let at = |width| -> Vec<String> {
            let columns = fitting(&[0, 1], 20, width);
            let total: u16 = columns.iter().map(|one| one.width + GAP).sum();
            assert!(total <= width + GAP, "{width}: {total}");
            columns.iter().map(|one| one.what.head()).collect()
        };
        let mut last = usize::MAX;
        for width in (60..=200).rev() {
            let heads = at(width);
            assert!(heads.len() <= last, "{width}: {heads:?}");
            last = heads.len();
            for needed in ["MODEL", "STATE", "HOST", "VERDICT"] {
                assert!(heads.iter().any(|head| head == needed), "{width}: {heads:?}");
            }
        }
        assert_eq!(at(60).join(" "), "MODEL STATE SLOTS QUEUE HOST USED VERDICT");
        assert_eq!(at(80).join(" "), "MODEL STATE SLOTS QUEUE REQ/S HOST USED VERDICT +/REQ LEFT");
        assert_eq!(at(200).len(), 17);
    }

    #[test]
    fn times_that_are_left_are_rough() {
        assert_eq!([5.0, 119.0, 8000.0, 200_000.0, f64::MAX].map(left), ["5s", "1m", "2h", "2d", ">1y"]);
    }
}
