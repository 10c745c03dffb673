//! Decoding gives nearly the encoded numbers, in blocks of the right size.

use super::*;
use crate::sample_model::noise::NoiseStream;

fn numbers(seed: u64) -> Vec<f32> {
    NoiseStream::new(seed, "quant").take(4096, 0.1)
}

/// Root mean square of the differences, relative to that of the numbers.
fn relative_error(before: &[f32], after: &[f32]) -> f64 {
    let squares = |numbers: &mut dyn Iterator<Item = f64>| numbers.map(|number| number * number).sum::<f64>();
    let differences =
        squares(&mut before.iter().zip(after).map(|(one, other)| f64::from(*one) - f64::from(*other)));
    (differences / squares(&mut before.iter().map(|number| f64::from(*number)))).sqrt()
}

#[test]
fn what_is_written_in_a_form_is_read_as_nearly_the_same() {
    // A uniform error of half a step is a relative error of step / sqrt(12); a block of 32 normal numbers
    // covers some two standard deviations.
    for (kind, most) in [
        (WeightKind::F32, 0.0),
        (WeightKind::F16, 0.0003),
        (WeightKind::Q8_0, 0.006),
        (WeightKind::Q6K, 0.022),
        (WeightKind::Q5K, 0.045),
        (WeightKind::Q4K, 0.09),
        (WeightKind::Iq4Nl, 0.095),
        (WeightKind::Q4_0, 0.105),
        (WeightKind::Mxfp4, 0.14),
    ] {
        for seed in 0..20 {
            let before = numbers(seed);
            let error = relative_error(&before, &decode(kind, &encode(kind, &before)));
            assert!(error <= most && error >= most / 3.0, "{}: {error}", kind.name());
        }
    }
}

#[test]
fn blocks_have_the_bytes_of_their_layout() {
    for (kind, length, bytes) in [
        (WeightKind::F32, 1, 4),
        (WeightKind::F16, 1, 2),
        (WeightKind::Q8_0, 32, 2 + 32),
        (WeightKind::Q4_0, 32, 2 + 16),
        (WeightKind::Iq4Nl, 32, 2 + 16),
        (WeightKind::Mxfp4, 32, 1 + 16),
        (WeightKind::Q4K, 256, 2 * 2 + 12 + 128),
        (WeightKind::Q5K, 256, 2 * 2 + 12 + 32 + 128),
        (WeightKind::Q6K, 256, 128 + 64 + 16 + 2),
    ] {
        assert_eq!((kind.block_length(), kind.bytes(length as u64)), (length, bytes), "{}", kind.name());
        let written = encode(kind, &numbers(1)[..2 * length]);
        assert_eq!(written.len() as u64, 2 * bytes, "{}", kind.name());
    }
}

#[test]
fn what_was_read_is_written_as_the_same_numbers_again() {
    for kind in WeightKind::ALL {
        let once = decode(kind, &encode(kind, &numbers(3)));
        let twice = decode(kind, &encode(kind, &once));
        // The second scale is computed from rounded numbers, so a part may move by less than the first time.
        let error = relative_error(&once, &twice);
        assert!(error < 0.05, "{}: {error}", kind.name());
    }
}

#[test]
fn zeroes_stay_zeroes_and_one_large_number_keeps_its_size_and_its_neighbours() {
    for kind in WeightKind::ALL {
        assert_eq!(decode(kind, &encode(kind, &[0.0; 256])), [0.0; 256], "{}", kind.name());
        for large in [1000.0_f32, -1000.0, 0.5] {
            let mut block = [0.0; 256];
            block[77] = large;
            let read = decode(kind, &encode(kind, &block));
            let off = (read[77] / large - 1.0).abs();
            assert!(off < 0.34, "{}: {large} became {}", kind.name(), read[77]);
            // Not exactly 0 if a format has no 0, or if the minimum is no multiple of the step.
            let quiet = |number: f32| number.abs() < 0.01 * large.abs();
            assert!(
                read.iter().enumerate().all(|(at, number)| at == 77 || quiet(*number)),
                "{}",
                kind.name()
            );
        }
    }
}

#[test]
fn bits_stand_where_the_layout_has_them() {
    // Steps of 1 from -8 to 7, twice: the scale is 1, and number n is n - 8.
    let ramp: Vec<f32> = (0..32_u8).map(|n| f32::from(n % 16) - 8.0).collect();
    let bytes = encode(WeightKind::Q4_0, &ramp);
    assert_eq!(bytes[..2], half::to_bits(1.0).to_le_bytes());
    assert_eq!(
        bytes[2..],
        [0x00, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88, 0x99, 0xaa, 0xbb, 0xcc, 0xdd, 0xee, 0xff]
    );
    // The largest number is 6 with exponent 2, so the block's exponent is 0, which is stored as 127.
    let mut block = [0.0; 32];
    (block[0], block[1], block[16], block[17]) = (6.0, 0.5, -1.5, -4.0);
    let bytes = encode(WeightKind::Mxfp4, &block);
    assert_eq!(bytes[..3], [127, 0x7 | 0xb << 4, 0x1 | 0xe << 4]);
}
