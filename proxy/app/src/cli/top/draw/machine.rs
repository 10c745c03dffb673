//! The memory of the machine: the host's and each GPU's, as bars.

use ratatui_core::style::Style;

use super::super::layout::Overview;
use super::super::look::Tone;
use super::super::picture::{Gpu, Used};
use super::super::state::State;
use super::super::text::bytes;
use super::Pen;

/// Above these shares a memory is nearly full, and as good as full.
const NEARLY: (f64, f64) = (0.85, 0.95);

/// How full something is, in colours.
pub(super) fn tone(share: f64) -> Tone {
    match share {
        share if share >= NEARLY.1 => Tone::Bad,
        share if share >= NEARLY.0 => Tone::Warn,
        _ => Tone::Good,
    }
}

/// Draws them from line 1 on.
pub(super) fn draw(state: &State, layout: Overview, pen: &mut Pen<'_>) {
    let host = state.picture.host.map(|host| ("host".to_owned(), Some(host), String::new(), Tone::Plain));
    let of = |gpu: &Gpu| (format!("GPU {}", gpu.number), gpu.memory, gpu.note.clone(), gpu.tone);
    let all: Vec<_> = host.into_iter().chain(state.picture.gpus.iter().map(of)).collect();
    let places = usize::from(layout.machine) * usize::from(layout.beside);
    let columns = state.size.0 / layout.beside;
    for (index, (name, memory, note, note_tone)) in all.iter().enumerate().take(places) {
        let index = u16::try_from(index).unwrap_or(u16::MAX);
        let (x, y) = (index % layout.beside * columns, 1 + index / layout.beside);
        if usize::from(index) + 1 == places && all.len() > places {
            let more = format!("and {} more GPUs", all.len() + 1 - places);
            pen.text(x, y, columns, &more, pen.look.of_tone(Tone::Quiet));
            break;
        }
        one(pen, (x, y, columns.saturating_sub(2)), name, *memory, (note, *note_tone));
    }
}

fn one(
    pen: &mut Pen<'_>,
    (x, y, columns): (u16, u16, u16),
    name: &str,
    memory: Option<Used>,
    note: (&str, Tone),
) {
    let end = x + columns;
    let mut at = pen.text(x, y, columns, &format!("{name:<6} "), Style::new());
    match memory {
        None => {
            at = pen.text(
                at,
                y,
                end.saturating_sub(at),
                "not told by its driver",
                pen.look.of_tone(Tone::Quiet),
            );
        }
        Some(memory) => {
            let bar = (columns / 2).clamp(10, 40);
            pen.bar(at, y, bar, memory.share(), tone(memory.share()));
            let words = format!(" {} of {}", bytes(memory.used), bytes(memory.total));
            at = pen.text(at + bar, y, end.saturating_sub(at + bar), &words, Style::new());
        }
    }
    if !note.0.is_empty() && end > at + 4 {
        pen.text(at + 1, y, end - at - 1, note.0, pen.look.of_tone(note.1));
    }
}
