//! Matrices of noise of any size, written by repeating one block of random numbers.
//!
//! Drawing billions of numbers would take minutes. The block's length is prime, and rows are shorter than the
//! block. Rows thus start at different positions, and no two are equal until every position was used.

use std::io::{self, Write};
use std::thread;

use super::super::half;
use super::super::noise::NoiseStream;
use crate::gguf::FillFn;

/// Numbers per block; the largest prime below 2^20.
const BLOCK_NUMBERS: usize = 1_048_573;
const MIN_THREAD_NUMBERS: usize = 1 << 14;
const MIN_WRITE_BYTES: usize = 1 << 20;

pub(super) struct MatrixRow<'a>(&'a mut [u8]);

impl MatrixRow<'_> {
    /// Sets a number; a column beyond the row's end is ignored.
    pub(super) fn set(&mut self, column: usize, number: f32) {
        if let Some(place) = self.0.get_mut(2 * column..2 * column + 2) {
            place.copy_from_slice(&half::to_bits(number).to_le_bytes());
        }
    }

    pub(super) fn clear(&mut self) {
        self.0.fill(0);
    }
}

/// Changes a row, given its index, before it is written.
pub(super) type RowEdit = Box<dyn Fn(u64, &mut MatrixRow<'_>)>;

/// Rows of f16 noise with a standard deviation; `edit` may change each row.
pub(super) fn noise_rows(
    seed: u64,
    name: &str,
    rows: u64,
    columns: u64,
    deviation: f64,
    edit: Option<RowEdit>,
) -> FillFn {
    let name = name.to_owned();
    Box::new(move |out| {
        let columns = usize::try_from(columns).map_err(io::Error::other)?;
        let wanted = u64::try_from(columns).unwrap_or(u64::MAX).saturating_mul(rows);
        let drawn = usize::try_from(wanted).map_or(BLOCK_NUMBERS, |wanted| wanted.min(BLOCK_NUMBERS));
        let block = draw_block(&NoiseStream::new(seed, &name), drawn, deviation)?;
        write_rows(out, &block, rows, 2 * columns, edit.as_ref())
    })
}

/// Draws `count` numbers as f16 on all processors, because drawing takes longer than writing.
fn draw_block(noise: &NoiseStream, count: usize, deviation: f64) -> io::Result<Vec<u8>> {
    let mut block = vec![0; 2 * count];
    let threads = thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let part = count.div_ceil(threads).max(MIN_THREAD_NUMBERS);
    thread::scope(|scope| {
        for (index, bytes) in block.chunks_mut(2 * part).enumerate() {
            let mut noise = noise.skip((index * part) as u64);
            let fill = move || {
                for number in bytes.as_chunks_mut::<2>().0 {
                    number.copy_from_slice(&half::to_bits(noise.draw(deviation)).to_le_bytes());
                }
            };
            thread::Builder::new().spawn_scoped(scope, fill)?;
        }
        io::Result::Ok(())
    })?;
    Ok(block)
}

fn write_rows(
    out: &mut dyn Write,
    block: &[u8],
    rows: u64,
    row_bytes: usize,
    edit: Option<&RowEdit>,
) -> io::Result<()> {
    if row_bytes == 0 || block.is_empty() {
        return Ok(());
    }
    let at_once = (MIN_WRITE_BYTES / row_bytes).max(1);
    let mut chunk = Vec::with_capacity(at_once.saturating_mul(row_bytes));
    let (mut row, mut place) = (0, 0);
    while row < rows {
        chunk.clear();
        let first = row;
        while row < rows && row - first < at_once as u64 {
            let mut missing = row_bytes;
            while missing > 0 {
                let taken = missing.min(block.len() - place);
                chunk.extend_from_slice(&block[place..place + taken]);
                missing -= taken;
                place = (place + taken) % block.len();
            }
            row += 1;
        }
        if let Some(edit) = edit {
            for (number, bytes) in (first..).zip(chunk.chunks_exact_mut(row_bytes)) {
                edit(number, &mut MatrixRow(bytes));
            }
        }
        out.write_all(&chunk)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn written(fill: &FillFn) -> Vec<u8> {
        let mut out = Vec::new();
        fill(&mut out).unwrap();
        out
    }

    #[test]
    fn all_rows_are_written_and_no_two_are_alike_although_the_block_repeats() {
        // Three times the block's length.
        let out = written(&noise_rows(1, "matrix", 6144, 512, 1.0, None));
        assert_eq!(out.len(), 6144 * 512 * 2);
        let rows: BTreeSet<&[u8]> = out.chunks(1024).collect();
        assert_eq!(rows.len(), 6144);
    }

    #[test]
    fn an_edit_changes_its_place_and_nothing_else() {
        let plain = written(&noise_rows(1, "matrix", 10, 8, 1.0, None));
        let edit: RowEdit = Box::new(|row, numbers| match row {
            2 => numbers.clear(),
            _ => numbers.set(1, 1.0),
        });
        let edited = written(&noise_rows(1, "matrix", 10, 8, 1.0, Some(edit)));
        for (row, (before, after)) in plain.chunks(16).zip(edited.chunks(16)).enumerate() {
            if row == 2 {
                assert_eq!(after, [0; 16]);
            } else {
                assert_eq!(after[2..4], 0x3c00_u16.to_le_bytes());
                assert_eq!((&before[..2], &before[4..]), (&after[..2], &after[4..]));
            }
        }
    }
}
