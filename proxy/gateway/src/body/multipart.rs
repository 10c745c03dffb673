//! Finds the field `model` of a `multipart/form-data` body while the body is passed on unchanged, in pieces
//! of any size. Finds no model in a body that it does not understand.
//!
//! ```text
//!   Preamble --delimiter--> Head --blank line--> Value (of `model`) --delimiter--> found
//!                            ^  \--blank line--> Skip (any other field)
//!                            +--- delimiter ------+
//! ```

use std::ops::Range;

use memchr::memmem;

/// Maximum length of a part's head; usual heads have two short lines.
const MAX_PART_HEAD_BYTES: usize = 8192;
const MAX_MODEL_BYTES: usize = 4096;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MultipartState {
    Preamble,
    Head,
    Value,
    Skip,
    Done,
}

#[derive(Debug)]
pub(crate) struct MultipartScanner {
    delimiter: Vec<u8>,
    at: MultipartState,
    carry: Vec<u8>,
    /// Number of bytes removed from the front of `carry`.
    dropped_bytes: u64,
    model: Option<String>,
    value: Option<Range<u64>>,
}

impl MultipartScanner {
    /// `None` if the content type is not `multipart/form-data` with a boundary.
    pub(crate) fn from_content_type(content_type: &str) -> Option<Self> {
        let (kind, parameters) = content_type.split_once(';')?;
        if !kind.trim().eq_ignore_ascii_case("multipart/form-data") {
            return None;
        }
        let boundary = parameters.split(';').find_map(|parameter| {
            let (name, value) = parameter.split_once('=')?;
            name.trim().eq_ignore_ascii_case("boundary").then(|| value.trim().trim_matches('"'))
        })?;
        if boundary.is_empty() || boundary.len() > 200 {
            return None;
        }
        let delimiter = [b"\r\n--", boundary.as_bytes()].concat();
        // The first delimiter of a body has no line end before it.
        Some(Self {
            delimiter,
            at: MultipartState::Preamble,
            carry: b"\r\n".to_vec(),
            dropped_bytes: 0,
            model: None,
            value: None,
        })
    }

    /// Returns the model name once its field was read.
    pub(crate) fn model(&self) -> Option<&str> {
        self.model.as_deref()
    }

    pub(crate) fn model_value(&self) -> Option<Range<u64>> {
        self.value.clone()
    }

    /// Returns whether the rest of the body can no longer name a model.
    pub(crate) fn is_settled(&self) -> bool {
        self.at == MultipartState::Done
    }

    pub(crate) fn feed(&mut self, piece: &[u8]) {
        if self.at == MultipartState::Done {
            return;
        }
        self.carry.extend_from_slice(piece);
        let mut from = 0;
        while let Some(next) = self.step(from) {
            from = next;
        }
        self.carry.drain(..from);
        self.dropped_bytes += from as u64;
        if self.at == MultipartState::Done {
            self.carry = Vec::new();
        }
    }

    /// Makes one transition over `carry[from..]`. Returns the new start; `None` if more bytes are needed.
    fn step(&mut self, from: usize) -> Option<usize> {
        let rest = &self.carry[from..];
        match self.at {
            MultipartState::Done => None,
            MultipartState::Preamble | MultipartState::Skip => {
                if let Some(end) = memmem::find(rest, &self.delimiter) {
                    self.at = MultipartState::Head;
                    return Some(from + end + self.delimiter.len());
                }
                // The kept bytes may be the beginning of a delimiter.
                let keep = rest.len().min(self.delimiter.len() - 1);
                let next = from + rest.len() - keep;
                (next > from).then_some(next)
            }
            MultipartState::Head => {
                if rest.starts_with(b"--") {
                    self.at = MultipartState::Done;
                    return None;
                }
                let Some(end) = memmem::find(rest, b"\r\n\r\n") else {
                    if rest.len() > MAX_PART_HEAD_BYTES {
                        self.at = MultipartState::Done;
                    }
                    return None;
                };
                self.at =
                    if names_model(&rest[..end]) { MultipartState::Value } else { MultipartState::Skip };
                // Keep the head's last line end: the delimiter of an empty field begins with it.
                Some(from + end + 2)
            }
            MultipartState::Value => {
                // `rest` begins with the line end before the value.
                if let Some(end) = memmem::find(rest, &self.delimiter) {
                    self.model =
                        rest.get(2..end).and_then(|name| std::str::from_utf8(name).ok()).map(str::to_owned);
                    // Offsets in `carry` are two too large, because a line end precedes the body there. The
                    // value begins two bytes after `from`, after its line end. The two cancel out.
                    let start = self.dropped_bytes + from as u64;
                    self.value = self.model.as_ref().map(|name| start..start + name.len() as u64);
                    self.at = MultipartState::Done;
                } else if rest.len() > MAX_MODEL_BYTES + self.delimiter.len() {
                    self.at = MultipartState::Done;
                }
                None
            }
        }
    }
}

/// Returns whether a part's head has `Content-Disposition: form-data; name="model"`.
fn names_model(head: &[u8]) -> bool {
    let Ok(head) = std::str::from_utf8(head) else { return false };
    head.split("\r\n").filter_map(|line| line.split_once(':')).any(|(name, value)| {
        name.trim().eq_ignore_ascii_case("content-disposition")
            && value.split(';').skip(1).any(|parameter| {
                parameter.split_once('=').is_some_and(|(name, value)| {
                    name.trim().eq_ignore_ascii_case("name") && matches!(value.trim(), "\"model\"" | "model")
                })
            })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model_of(body: &str) -> Option<String> {
        let scan = |cut: usize| {
            let mut scanner =
                MultipartScanner::from_content_type("multipart/form-data; boundary=XX").unwrap();
            scanner.feed(&body.as_bytes()[..cut]);
            scanner.feed(&body.as_bytes()[cut..]);
            let model = scanner.model().map(str::to_owned);
            let place = scanner
                .model_value()
                .map(|range| usize::try_from(range.start).unwrap()..usize::try_from(range.end).unwrap());
            assert_eq!(place.map(|range| &body[range]), model.as_deref());
            model
        };
        let whole = scan(0);
        for cut in 1..=body.len() {
            assert_eq!(scan(cut), whole, "cut at {cut}");
        }
        let mut bytewise = MultipartScanner::from_content_type("multipart/form-data; boundary=XX").unwrap();
        body.bytes().for_each(|byte| bytewise.feed(&[byte]));
        assert_eq!(bytewise.model(), whole.as_deref());
        whole
    }

    #[test]
    fn the_model_field_is_found_in_any_position() {
        let file = "--XX\r\nContent-Disposition: form-data; name=\"file\"; filename=\"model\"\r\nContent-Type: audio/wav\r\n\r\nRIFF\r\n--X\r\n\r\nname=\"model\"\r\n";
        let model = "--XX\r\ncontent-disposition: form-data; name=\"model\"\r\n\r\norg/whisper\r\n";
        let end = "--XX--\r\n";
        assert_eq!(model_of(&[model, file, end].concat()).as_deref(), Some("org/whisper"));
        assert_eq!(model_of(&[file, model, end].concat()).as_deref(), Some("org/whisper"));
        assert_eq!(model_of(&["preamble\r\n", model, end].concat()).as_deref(), Some("org/whisper"));
        assert_eq!(model_of(&[file, end, model].concat()), None, "behind the end");
        assert_eq!(model_of(&[file, file].concat()), None);
        assert_eq!(
            model_of("--XX\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\n\r\n--XX--"),
            Some(String::new())
        );
        assert_eq!(model_of("no multipart at all"), None);
    }

    #[test]
    fn only_form_data_with_a_boundary_is_scanned() {
        assert!(
            MultipartScanner::from_content_type("multipart/form-data; charset=x; boundary=\"a b\"").is_some()
        );
        for other in [
            "multipart/form-data",
            "multipart/mixed; boundary=x",
            "application/json",
            "multipart/form-data; boundary=",
        ] {
            assert!(MultipartScanner::from_content_type(other).is_none(), "{other}");
        }
    }

    #[test]
    fn a_large_file_is_not_held() {
        let mut scanner = MultipartScanner::from_content_type("multipart/form-data; boundary=XX").unwrap();
        scanner.feed(b"--XX\r\nContent-Disposition: form-data; name=\"file\"\r\n\r\n");
        for _ in 0..100 {
            scanner.feed(&[b'x'; 10_000]);
            assert!(scanner.carry.len() < 20);
        }
    }
}
