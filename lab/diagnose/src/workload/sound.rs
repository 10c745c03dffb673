//! A generated sound: a rising tone as a WAV file with 16,000 samples a second.

/// Samples per second, as expected by speech encoders.
const SAMPLE_RATE: u32 = 16_000;

/// A WAV file of this length: one channel, 16 bits (RIFF, PCM format 1).
pub(crate) fn make_wav(seconds: u32) -> Vec<u8> {
    let samples = SAMPLE_RATE * seconds.max(1);
    let data = samples * 2;
    let mut file = Vec::new();
    file.extend(b"RIFF");
    file.extend((36 + data).to_le_bytes());
    file.extend(b"WAVEfmt ");
    file.extend(16_u32.to_le_bytes());
    // PCM, one channel, rate, bytes a second, bytes a sample, bits a sample.
    file.extend(1_u16.to_le_bytes());
    file.extend(1_u16.to_le_bytes());
    file.extend(SAMPLE_RATE.to_le_bytes());
    file.extend((SAMPLE_RATE * 2).to_le_bytes());
    file.extend(2_u16.to_le_bytes());
    file.extend(16_u16.to_le_bytes());
    file.extend(b"data");
    file.extend(data.to_le_bytes());
    let mut phase = 0.0_f64;
    for n in 0..samples {
        let hertz = 220.0 + 440.0 * f64::from(n) / f64::from(samples);
        phase += std::f64::consts::TAU * hertz / f64::from(SAMPLE_RATE);
        #[expect(clippy::cast_possible_truncation, reason = "a sine times less than what fits")]
        let level = (phase.sin() * 12_000.0) as i16;
        file.extend(level.to_le_bytes());
    }
    file
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clip_says_its_own_length() {
        let file = make_wav(2);
        assert_eq!((&file[..4], &file[8..12]), (&b"RIFF"[..], &b"WAVE"[..]));
        assert_eq!(file.len(), 44 + 2 * 2 * 16_000);
        assert_eq!(u32::from_le_bytes([file[4], file[5], file[6], file[7]]) as usize, file.len() - 8);
    }
}
