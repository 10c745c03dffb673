//! Blocks of 256 numbers whose parts have quantised scales.

use super::blocks::largest_magnitude;
use super::{nearest_step, round_scale, scale_at};

/// Numbers per scale and minimum in `Q4_K` and `Q5_K`.
const PART_LENGTH: usize = 32;
const PART_COUNT: usize = 8;
const MAX_SCALE: i8 = 63;
/// Numbers per scale in `Q6_K`.
const Q6_PART_LENGTH: usize = 16;

/// Encodes `Q4_K` and `Q5_K`: a number is `scale × integer − minimum`.
pub(super) fn encode_with_minima(block: &[f32], bits: u32, out: &mut Vec<u8>) {
    let most = largest_integer(bits);
    let ranges: Vec<(f32, f32)> =
        block.as_chunks::<PART_LENGTH>().0.iter().map(|part| part_range(part, most)).collect();
    let widest =
        |of: fn(&(f32, f32)) -> f32| ranges.iter().map(of).fold(0.0, f32::max) / f32::from(MAX_SCALE);
    let (scale, scale_bytes) = round_scale(widest(|range| range.0));
    let (minimum, minimum_bytes) = round_scale(widest(|range| range.1));
    out.extend(scale_bytes);
    out.extend(minimum_bytes);
    let steps = |number: f32, of: f32| nearest_step(number, of, 0, MAX_SCALE).to_le_bytes()[0];
    let scales: Vec<u8> = ranges.iter().map(|range| steps(range.0, scale)).collect();
    let minima: Vec<u8> = ranges.iter().map(|range| steps(range.1, minimum)).collect();
    out.extend(pack_parts(&scales, &minima));

    let integer = |at: usize| {
        let (scale, minimum) =
            (scale * f32::from(scales[at / PART_LENGTH]), minimum * f32::from(minima[at / PART_LENGTH]));
        nearest_step(block[at] + minimum, scale, 0, most).to_le_bytes()[0]
    };
    let integers: Vec<u8> = (0..block.len()).map(integer).collect();
    if bits == 5 {
        // Bit p of byte n is the fifth bit of number n of part p.
        let fifth = |n: usize| {
            (0..PART_COUNT).fold(0, |byte, part| byte | (integers[part * PART_LENGTH + n] >> 4) << part)
        };
        out.extend((0..PART_LENGTH).map(fifth));
    }
    // Pairs of parts: one in the low halves, the next in the high halves.
    for pair in integers.as_chunks::<{ 2 * PART_LENGTH }>().0 {
        let (low, high) = pair.split_at(PART_LENGTH);
        out.extend(low.iter().zip(high).map(|(low, high)| (low & 0xf) | high << 4));
    }
}

pub(super) fn decode_with_minima(block: &[u8], bits: u32, out: &mut Vec<f32>) {
    let (scale, minimum) = (scale_at(block, 0), scale_at(block, 2));
    let (scales, minima) = unpack_parts(&block[4..16]);
    let (fifths, halves) =
        if bits == 5 { block[16..].split_at(PART_LENGTH) } else { (&[][..], &block[16..]) };
    for part in 0..PART_COUNT {
        let (scale, minimum) = (scale * f32::from(scales[part]), minimum * f32::from(minima[part]));
        for n in 0..PART_LENGTH {
            let half = halves[part / 2 * PART_LENGTH + n] >> (4 * (part % 2)) & 0xf;
            let fifth = fifths.get(n).map_or(0, |byte| byte >> part & 1);
            out.push(scale * f32::from(half | fifth << 4) - minimum);
        }
    }
}

const fn largest_integer(bits: u32) -> i8 {
    if bits == 5 { 31 } else { 15 }
}

/// Scale and minimum with which the integers from 0 to `most` cover all numbers of a part.
fn part_range(part: &[f32], most: i8) -> (f32, f32) {
    let (least, greatest) = part
        .iter()
        .fold((0.0_f32, 0.0_f32), |(least, greatest), number| (least.min(*number), greatest.max(*number)));
    ((greatest - least) / f32::from(most), -least)
}

/// Packs eight six-bit scales and eight six-bit minima into twelve bytes. The first eight bytes have the
/// first four scales and the first four minima in their lower six bits. The upper two bits of these bytes are
/// the upper two bits of the last four scales and minima. The last four bytes have the lower four bits of the
/// last four scales and minima.
fn pack_parts(scales: &[u8], minima: &[u8]) -> [u8; 12] {
    let mut bytes = [0; 12];
    for part in 0..PART_COUNT / 2 {
        let (scale, minimum) = (scales[part + 4], minima[part + 4]);
        bytes[part] = scales[part] | (scale >> 4) << 6;
        bytes[part + 4] = minima[part] | (minimum >> 4) << 6;
        bytes[part + 8] = (scale & 0xf) | (minimum & 0xf) << 4;
    }
    bytes
}

fn unpack_parts(bytes: &[u8]) -> ([u8; PART_COUNT], [u8; PART_COUNT]) {
    let (mut scales, mut minima) = ([0; PART_COUNT], [0; PART_COUNT]);
    for part in 0..PART_COUNT / 2 {
        scales[part] = bytes[part] & 0x3f;
        minima[part] = bytes[part + 4] & 0x3f;
        scales[part + 4] = bytes[part + 8] & 0xf | bytes[part] >> 6 << 4;
        minima[part + 4] = bytes[part + 8] >> 4 | bytes[part + 4] >> 6 << 4;
    }
    (scales, minima)
}

/// Encodes `Q6_K`: a number is `scale × integer`, with integers from −32 to 31.
pub(super) fn encode_q6(block: &[f32], out: &mut Vec<u8>) {
    let wanted: Vec<f32> =
        block.as_chunks::<Q6_PART_LENGTH>().0.iter().map(|part| largest_magnitude(part) / -32.0).collect();
    let (scale, scale_bytes) = round_scale(largest_magnitude(&wanted).abs() / 127.0);
    let scales: Vec<i8> = wanted.iter().map(|part| nearest_step(*part, scale, -127, 127)).collect();
    let integer = |at: usize| {
        let scale = scale * f32::from(scales[at / Q6_PART_LENGTH]);
        (nearest_step(block[at], scale, -32, 31) + 32).to_le_bytes()[0]
    };
    let integers: Vec<u8> = (0..block.len()).map(integer).collect();
    // Each half of the block has four rows of 32: rows 0 and 1 are the low halves of the bytes, rows 2 and
    // 3 the high halves of the same bytes.
    for rows in integers.as_chunks::<128>().0 {
        out.extend((0..64).map(|n| (rows[n] & 0xf) | rows[n + 64] << 4));
    }
    for rows in integers.as_chunks::<128>().0 {
        out.extend(
            (0..32).map(|n| (0..4).fold(0, |byte, row| byte | (rows[32 * row + n] >> 4) << (2 * row))),
        );
    }
    out.extend(scales.iter().map(|scale| scale.to_le_bytes()[0]));
    out.extend(scale_bytes);
}

pub(super) fn decode_q6(block: &[u8], out: &mut Vec<f32>) {
    let (low, rest) = block.split_at(128);
    let (upper, scales) = rest.split_at(64);
    let scale = scale_at(block, 208);
    for at in 0..256 {
        let (half, row, n) = (at / 128, at % 128 / 32, at % 32);
        let four = low[64 * half + 32 * (row % 2) + n] >> (4 * (row / 2)) & 0xf;
        let two = upper[32 * half + n] >> (2 * row) & 3;
        let part = f32::from(i8::from_le_bytes([scales[at / Q6_PART_LENGTH]]));
        out.push(scale * part * (f32::from(four | two << 4) - 32.0));
    }
}
