//! Blocks of 32 numbers with one scale.

use super::{nearest_step, round_scale, scale_at};

const BLOCK_LENGTH: usize = 32;

/// Values of the 16 indices of the format `IQ4_NL`, in units of the scale.
const IQ4_NL_VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
/// Values of the 16 four-bit floats (E2M1), doubled so that all are integers.
const DOUBLED_E2M1_VALUES: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];
/// Exponent of the largest E2M1 value, 6 = 2^2 × 1.5. A block's scale has the exponent of the block's largest
/// number minus this one.
const E2M1_EXPONENT: u32 = 2;

/// The number with the largest absolute value, with its sign.
pub(super) fn largest_magnitude(block: &[f32]) -> f32 {
    block.iter().copied().fold(0.0, |far: f32, number| if number.abs() > far.abs() { number } else { far })
}

pub(super) fn encode_q8_0(block: &[f32], out: &mut Vec<u8>) {
    let (scale, bytes) = round_scale(largest_magnitude(block).abs() / 127.0);
    out.extend(bytes);
    out.extend(block.iter().map(|number| nearest_step(*number, scale, -127, 127).to_le_bytes()[0]));
}

pub(super) fn decode_q8_0(block: &[u8], out: &mut Vec<f32>) {
    let scale = scale_at(block, 0);
    out.extend(block[2..].iter().map(|byte| f32::from(i8::from_le_bytes([*byte])) * scale));
}

pub(super) fn encode_q4_0(block: &[f32], out: &mut Vec<u8>) {
    // The integers reach from -8 to 7. The scale's sign maps the largest number, of either sign, to -8.
    let (scale, bytes) = round_scale(largest_magnitude(block) / -8.0);
    out.extend(bytes);
    push_halves(block, out, |number| (nearest_step(number, scale, -8, 7) + 8).to_le_bytes()[0]);
}

pub(super) fn decode_q4_0(block: &[u8], out: &mut Vec<f32>) {
    let scale = scale_at(block, 0);
    pull_halves(&block[2..], out, |half| (f32::from(half) - 8.0) * scale);
}

pub(super) fn encode_iq4_nl(block: &[f32], out: &mut Vec<u8>) {
    let (scale, bytes) = round_scale(largest_magnitude(block) / -127.0);
    out.extend(bytes);
    push_halves(block, out, |number| nearest_index(&IQ4_NL_VALUES, number, scale));
}

pub(super) fn decode_iq4_nl(block: &[u8], out: &mut Vec<f32>) {
    let scale = scale_at(block, 0);
    pull_halves(&block[2..], out, |half| f32::from(IQ4_NL_VALUES[usize::from(half)]) * scale);
}

pub(super) fn encode_mxfp4(block: &[f32], out: &mut Vec<u8>) {
    let exponent = (largest_magnitude(block).abs().to_bits() >> 23).saturating_sub(E2M1_EXPONENT);
    let exponent = u8::try_from(exponent).unwrap_or(u8::MAX);
    out.push(exponent);
    push_halves(block, out, |number| nearest_index(&DOUBLED_E2M1_VALUES, number, halved_power(exponent)));
}

pub(super) fn decode_mxfp4(block: &[u8], out: &mut Vec<f32>) {
    let scale = halved_power(block[0]);
    pull_halves(&block[1..], out, |half| f32::from(DOUBLED_E2M1_VALUES[usize::from(half)]) * scale);
}

/// Half of the scale of an E8M0 exponent, because [`DOUBLED_E2M1_VALUES`] are doubled.
fn halved_power(exponent: u8) -> f32 {
    f32::from_bits(match exponent {
        0 => 0x0020_0000,
        1 => 0x0040_0000,
        exponent => u32::from(exponent - 1) << 23,
    })
}

fn nearest_index(table: &[i8; 16], number: f32, scale: f32) -> u8 {
    let distance = |value: i8| (number - f32::from(value) * scale).abs();
    let (mut best, mut least) = (0, f32::INFINITY);
    for (index, value) in (0_u8..).zip(table) {
        if distance(*value) < least {
            (best, least) = (index, distance(*value));
        }
    }
    best
}

/// Packs 32 four-bit numbers into 16 bytes: number *n* in the low half of byte *n*, *n* + 16 in the high one.
fn push_halves(block: &[f32], out: &mut Vec<u8>, half: impl Fn(f32) -> u8) {
    let (low, high) = block.split_at(BLOCK_LENGTH / 2);
    out.extend(low.iter().zip(high).map(|(low, high)| half(*low) | half(*high) << 4));
}

fn pull_halves(bytes: &[u8], out: &mut Vec<f32>, number: impl Fn(u8) -> f32) {
    out.extend(bytes.iter().map(|byte| number(byte & 0xf)));
    out.extend(bytes.iter().map(|byte| number(byte >> 4)));
}
