//! Replaces pictures and sounds by generated ones of the same size and length.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use crate::workload::media;

const DEFAULT_SIZE: (u32, u32) = (640, 480);
/// Limit of a side in pixels: clients send no larger picture, and generating one could take any time.
const MAX_SIDE: u32 = 4096;

pub(super) fn size_for(data: &str) -> (u32, u32) {
    let (width, height) = picture_size(data).unwrap_or(DEFAULT_SIZE);
    (width.clamp(1, MAX_SIDE), height.clamp(1, MAX_SIDE))
}

/// Estimated bytes of a generated picture: one per pixel, and the overhead of a file.
pub(super) fn picture_cost((width, height): (u32, u32)) -> usize {
    usize::try_from(width * height).unwrap_or(usize::MAX).saturating_add(1024)
}

pub(super) fn encode_picture((width, height): (u32, u32)) -> String {
    STANDARD.encode(media::make_png(width, height).unwrap_or_default())
}

/// Estimates the seconds of a base64 sound at 16,000 samples per second of 16 bits.
pub(super) fn sound_seconds(data: &str) -> u32 {
    u32::try_from(data.len() / 4 * 3 / 32_000).unwrap_or(1).clamp(1, 60)
}

pub(super) fn sound_cost(seconds: u32) -> usize {
    usize::try_from(seconds).unwrap_or(usize::MAX).saturating_mul(43_000)
}

pub(super) fn encode_sound(seconds: u32) -> String {
    STANDARD.encode(media::make_wav(seconds))
}

/// Returns width and height of a base64 picture, from the head of a PNG, JPEG, GIF or BMP file.
pub(super) fn picture_size(data: &str) -> Option<(u32, u32)> {
    // In a JPEG, a preview may precede the size.
    const ENOUGH: usize = 256 << 10;
    let head = data.get(..data.len().min(ENOUGH) / 4 * 4)?;
    let bytes = STANDARD.decode(head).ok()?;
    let short = |at: usize| Some(u32::from(u16::from_le_bytes(bytes.get(at..at + 2)?.try_into().ok()?)));
    if bytes.starts_with(b"\x89PNG\r\n\x1a\n") {
        let number = |at: usize| Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        return Some((number(16)?, number(20)?));
    }
    if bytes.starts_with(b"GIF8") {
        return Some((short(6)?, short(8)?));
    }
    if bytes.starts_with(b"BM") {
        // A negative height means that lines run from top to bottom.
        let number =
            |at: usize| Some(i32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?).unsigned_abs());
        return Some((number(18)?, number(22)?));
    }
    if !bytes.starts_with(&[0xFF, 0xD8]) {
        return None;
    }
    let mut at = 2;
    loop {
        let pair = |at: usize| Some(u32::from(*bytes.get(at)?) << 8 | u32::from(*bytes.get(at + 1)?));
        let marker = *bytes.get(at + 1)?;
        // Frame headers hold the size; C4, C8 and CC are no frame headers (ITU-T T.81, table B.1).
        if (0xC0..=0xCF).contains(&marker) && ![0xC4, 0xC8, 0xCC].contains(&marker) {
            return Some((pair(at + 7)?, pair(at + 5)?));
        }
        at += 2 + usize::try_from(pair(at + 2)?).ok()?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_read_from_each_kind_of_picture() {
        let mut jpeg = vec![0xFF, 0xD8, 0xFF, 0xE0, 0, 4, 0, 0, 0xFF, 0xC0, 0, 11, 8];
        jpeg.extend([0x01, 0xE0, 0x02, 0x80, 1, 0, 0]);
        jpeg.resize(21, 0);
        let gif = b"GIF89a\x80\x02\xe0\x01\0\0".to_vec();
        let mut bmp = b"BM".to_vec();
        bmp.resize(18, 0);
        bmp.extend(640_i32.to_le_bytes());
        bmp.extend((-480_i32).to_le_bytes());
        bmp.resize(27, 0);
        for file in [jpeg, gif, bmp] {
            assert_eq!(picture_size(&STANDARD.encode(file)), Some((640, 480)));
        }
        assert_eq!(picture_size(&encode_picture((31, 17))), Some((31, 17)));
        assert_eq!(picture_size("bm90IGFuIGltYWdl"), None);
        assert_eq!(size_for(""), DEFAULT_SIZE);
    }
}
