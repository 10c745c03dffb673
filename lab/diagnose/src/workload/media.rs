//! Generates pictures and sounds. Pictures show gradients with shapes, so that a vision encoder has work to
//! do.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use warden_policies::world::SplitMix;

use crate::error::DiagnoseError;

const SAMPLE_RATE: u32 = 16_000;

pub(crate) fn picture_url(width: u32, height: u32) -> Result<String, DiagnoseError> {
    Ok(format!("data:image/png;base64,{}", STANDARD.encode(make_png(width, height)?)))
}

/// Returns a PNG of this size, the same at every call.
pub(crate) fn make_png(width: u32, height: u32) -> Result<Vec<u8>, DiagnoseError> {
    let mut file = Vec::new();
    let failed =
        |error: png::EncodingError| DiagnoseError::Own { what: "encoding a picture", why: error.to_string() };
    let mut encoder = png::Encoder::new(&mut file, width, height);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    let mut writer = encoder.write_header().map_err(failed)?;
    writer.write_image_data(&pixels(width, height)).map_err(failed)?;
    writer.finish().map_err(failed)?;
    Ok(file)
}

fn pixels(width: u32, height: u32) -> Vec<u8> {
    let mut random = SplitMix::new(u64::from(width) << 32 | u64::from(height));
    let mut draw = |end: u32| u32::try_from(random.below(u64::from(end.max(1)))).unwrap_or(0);
    let discs: Vec<(u32, u32, u32, [u8; 3])> = (0..6)
        .map(|_| {
            let radius = draw(width.min(height) / 4) + 4;
            let colour = [0, 0, 0].map(|_: u8| to_byte(draw(256)));
            (draw(width), draw(height), radius, colour)
        })
        .collect();
    let mut rows = Vec::new();
    for y in 0..height {
        for x in 0..width {
            let inside = |(cx, cy, radius, _): &&(u32, u32, u32, [u8; 3])| {
                let far = u64::from(x.abs_diff(*cx)).pow(2) + u64::from(y.abs_diff(*cy)).pow(2);
                far <= u64::from(*radius).pow(2)
            };
            let sky =
                [to_byte(x * 255 / width.max(1)), to_byte(y * 255 / height.max(1)), to_byte((x + y) % 256)];
            rows.extend(discs.iter().rev().find(inside).map_or(sky, |disc| disc.3));
        }
    }
    rows
}

fn to_byte(value: u32) -> u8 {
    u8::try_from(value.min(255)).unwrap_or(u8::MAX)
}

/// Returns a rising tone as a WAV file: one channel, 16 bits (RIFF, PCM format 1).
pub(crate) fn make_wav(seconds: u32) -> Vec<u8> {
    let samples = SAMPLE_RATE * seconds.max(1);
    let data = samples * 2;
    let mut file = Vec::new();
    file.extend(b"RIFF");
    file.extend((36 + data).to_le_bytes());
    file.extend(b"WAVEfmt ");
    file.extend(16_u32.to_le_bytes());
    // PCM, one channel, rate, bytes per second, bytes per sample, bits per sample.
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
    fn a_picture_is_a_png_of_its_size_and_every_size_is_another_picture() {
        let file = make_png(64, 48).unwrap();
        let decoder = png::Decoder::new(std::io::Cursor::new(&file));
        let reader = decoder.read_info().unwrap();
        assert_eq!((reader.info().width, reader.info().height), (64, 48));
        assert_eq!(file, make_png(64, 48).unwrap());
        assert_ne!(pixels(64, 48)[..48], pixels(48, 64)[..48]);
    }

    #[test]
    fn a_clip_says_its_own_length() {
        let file = make_wav(2);
        assert_eq!((&file[..4], &file[8..12]), (&b"RIFF"[..], &b"WAVE"[..]));
        assert_eq!(file.len(), 44 + 2 * 2 * 16_000);
        assert_eq!(u32::from_le_bytes([file[4], file[5], file[6], file[7]]) as usize, file.len() - 8);
    }
}
