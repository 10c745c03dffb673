//! Converts f32 to binary16 and back, rounding to nearest, ties to even. Integer arithmetic only, so that a
//! model has the same bytes on every platform.

/// Bits of the nearest binary16; numbers out of range become infinite.
pub(crate) fn to_bits(number: f32) -> u16 {
    let bits = number.to_bits();
    let sign = (bits >> 16) & 0x8000;
    let exponent = (bits >> 23) & 0xff;
    let mantissa = bits & 0x007f_ffff;
    let rounded = match exponent {
        // NaN or infinite.
        0xff => 0x7c00 | (u32::from(mantissa != 0) << 9),
        // Normal, or rounded up into infinity: the exponents of the two types differ by 112.
        113.. => round_off_bits(((exponent - 112) << 23) | mantissa, 13).min(0x7c00),
        // Subnormal, with the leading bit stored. Below 102, numbers are less than half of the smallest
        // subnormal.
        102..113 => round_off_bits(mantissa | 0x0080_0000, 126 - exponent),
        _ => 0,
    };
    u16::try_from(sign | rounded).unwrap_or(u16::MAX)
}

pub(crate) fn from_bits(bits: u16) -> f32 {
    let (sign, exponent, mantissa) =
        (u32::from(bits >> 15) << 31, u32::from(bits >> 10) & 0x1f, u32::from(bits) & 0x3ff);
    let magnitude = match exponent {
        // Subnormal: a multiple of 2^-24, which is exact in f32.
        0 => (f32::from(bits & 0x3ff) * f32::from_bits(0x3380_0000)).to_bits(),
        // Infinite or NaN.
        0x1f => 0x7f80_0000 | mantissa << 13,
        _ => (exponent + 112) << 23 | mantissa << 13,
    };
    f32::from_bits(sign | magnitude)
}

/// Drops `dropped` low bits (1 to 24), rounding to nearest, ties to even.
fn round_off_bits(value: u32, dropped: u32) -> u32 {
    let kept = value >> dropped;
    let rest = value & ((1 << dropped) - 1);
    let half = 1 << (dropped - 1);
    kept + u32::from(rest > half || (rest == half && kept & 1 == 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meaning(bits: u16) -> f64 {
        let sign = if bits >> 15 == 1 { -1.0 } else { 1.0 };
        let (exponent, mantissa) = (i32::from((bits >> 10) & 31), f64::from(bits & 1023));
        sign * match exponent {
            0 => mantissa / 1024.0 * 2.0_f64.powi(-14),
            _ => (1.0 + mantissa / 1024.0) * 2.0_f64.powi(exponent - 15),
        }
    }

    #[test]
    fn every_finite_binary16_is_its_own_nearest() {
        for value in (0..0x7c00_u16).chain(0x8000..0xfc00) {
            #[expect(clippy::cast_possible_truncation, reason = "every binary16 is an f32")]
            let number = meaning(value) as f32;
            assert_eq!(to_bits(number), value, "{number}");
            assert_eq!(from_bits(value).to_bits(), number.to_bits(), "{number}");
        }
    }

    #[test]
    fn ties_go_to_even_and_what_is_too_large_is_infinite() {
        // Halfway between 1 and 1 + 1/1024, and halfway between two numbers of which the upper is even.
        assert_eq!(to_bits(1.0 + 1.0 / 2048.0), 0x3c00);
        assert_eq!(to_bits(1.0 + 3.0 / 2048.0), 0x3c02);
        assert_eq!(to_bits(1.0 + 1.1 / 2048.0), 0x3c01);
        assert_eq!([to_bits(65_519.0), to_bits(65_520.0), to_bits(-1e9)], [0x7bff, 0x7c00, 0xfc00]);
        assert_eq!(
            [to_bits(2.0_f32.powi(-25)), to_bits(2.0_f32.powi(-25) * 1.01), to_bits(-1e-30)],
            [0, 1, 0x8000]
        );
        assert_eq!(to_bits(f32::NAN) & 0x7e00, 0x7e00);
    }
}
