//! Quantises weights to llama.cpp's formats, and back.
//!
//! Written from the public block layouts (ggml's `ggml-common.h`, and OCP's Microscaling for MXFP4). Plain
//! IEEE arithmetic without library functions gives the same bytes on every platform.
//!
//! | format | block |
//! |---|---|
//! | `Q8_0` | scale f16, 32 × i8 |
//! | `Q4_0`, `IQ4_NL` | scale f16, 16 bytes: *n* in the low half of byte *n*, *n* + 16 in the high half |
//! | `MXFP4` | exponent u8, 16 bytes as above |
//! | `Q4_K` | scales f16 × 2, 12 bytes of 6-bit scales and minima, 128 bytes |
//! | `Q5_K` | the same with 32 bytes of fifth bits before the 128 |
//! | `Q6_K` | 128 bytes of low halves, 64 of upper bits, 16 × i8 scales, scale f16 |

mod blocks;
mod super_blocks;

use super::half;
use crate::gguf::WeightKind;

/// Encodes numbers; their count is a multiple of the format's block length.
pub(crate) fn encode(kind: WeightKind, numbers: &[f32]) -> Vec<u8> {
    let mut out = Vec::with_capacity(usize::try_from(kind.bytes(numbers.len() as u64)).unwrap_or(0));
    for block in numbers.chunks_exact(kind.block_length()) {
        match kind {
            WeightKind::F32 => block.iter().for_each(|number| out.extend(number.to_le_bytes())),
            WeightKind::F16 => {
                for number in block {
                    out.extend(half::to_bits(*number).to_le_bytes());
                }
            }
            WeightKind::Q8_0 => blocks::encode_q8_0(block, &mut out),
            WeightKind::Q4_0 => blocks::encode_q4_0(block, &mut out),
            WeightKind::Iq4Nl => blocks::encode_iq4_nl(block, &mut out),
            WeightKind::Mxfp4 => blocks::encode_mxfp4(block, &mut out),
            WeightKind::Q4K => super_blocks::encode_with_minima(block, 4, &mut out),
            WeightKind::Q5K => super_blocks::encode_with_minima(block, 5, &mut out),
            WeightKind::Q6K => super_blocks::encode_q6(block, &mut out),
        }
    }
    out
}

pub(crate) fn decode(kind: WeightKind, bytes: &[u8]) -> Vec<f32> {
    let block = usize::try_from(kind.bytes(kind.block_length() as u64)).unwrap_or(1);
    let mut out = Vec::with_capacity(bytes.len() / block * kind.block_length());
    for block in bytes.chunks_exact(block) {
        match kind {
            WeightKind::F32 => out.push(f32::from_le_bytes([block[0], block[1], block[2], block[3]])),
            WeightKind::F16 => out.push(scale_at(block, 0)),
            WeightKind::Q8_0 => blocks::decode_q8_0(block, &mut out),
            WeightKind::Q4_0 => blocks::decode_q4_0(block, &mut out),
            WeightKind::Iq4Nl => blocks::decode_iq4_nl(block, &mut out),
            WeightKind::Mxfp4 => blocks::decode_mxfp4(block, &mut out),
            WeightKind::Q4K => super_blocks::decode_with_minima(block, 4, &mut out),
            WeightKind::Q5K => super_blocks::decode_with_minima(block, 5, &mut out),
            WeightKind::Q6K => super_blocks::decode_q6(block, &mut out),
        }
    }
    out
}

/// A scale rounded to f16 as stored in the block, so that integers are chosen for the scale that readers see.
fn round_scale(scale: f32) -> (f32, [u8; 2]) {
    let bits = half::to_bits(scale);
    (half::from_bits(bits), bits.to_le_bytes())
}

fn scale_at(block: &[u8], at: usize) -> f32 {
    half::from_bits(u16::from_le_bytes([block[at], block[at + 1]]))
}

/// The nearest integer within these bounds; 0 if the scale is 0.
fn nearest_step(number: f32, scale: f32, least: i8, most: i8) -> i8 {
    let steps = if scale == 0.0 { 0.0 } else { (number / scale).round_ties_even() };
    #[expect(clippy::cast_possible_truncation, reason = "bounded to an i8 just before")]
    let step = steps.clamp(f32::from(least), f32::from(most)) as i8;
    step
}

#[cfg(test)]
mod tests;
