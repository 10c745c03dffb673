//! Second reader of the raw bytes of a connection, next to hyper. Detects faults that hyper's parsed
//! heads hide: a length with a coding, two lengths, a bare LF, a fragment. Changes and delays no byte.
//! hyper's reading of a message is used; this reader only decides which messages are refused.
//!
//! ```text
//!   Head --complete--> [ valid? ] --no--> Lost: all further requests that hyper reads are refused
//!    ^                     | yes: recorded, in order; how is its body framed?
//!    |     none            |
//!    +---------------------+--- length -----> Skip(n) ----------------------------> Head
//!    |                     +--- chunked ----> Size -> Extension -> Skip(n) -> Size
//!    |                                          | 0
//!    +---------- empty line -- Trailer <--------+
//! ```
//!
//! Request smuggling needs two readers that disagree about lengths. So each request that hyper reads must
//! have a record with the same framing here, or the connection ends with a 400.

use std::collections::VecDeque;

use http::StatusCode;
use memchr::memmem;

use crate::protocol::query;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BodyFraming {
    None,
    Length(u64),
    Chunked,
}

pub(crate) type HeadResult = Result<BodyFraming, WireError>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HeadReaderState {
    Head,
    /// Within a body of known length, or within a chunk and its line end.
    Skip {
        left: u64,
        chunked: bool,
    },
    Size {
        value: u64,
        digits: u8,
    },
    Extension {
        value: u64,
        cr: bool,
    },
    Trailer {
        empty: bool,
        cr: bool,
    },
    Lost,
}

#[derive(Debug)]
pub(crate) struct RawHeadReader {
    at: HeadReaderState,
    carry: Vec<u8>,
    limit: usize,
    seen: VecDeque<HeadResult>,
}

impl RawHeadReader {
    /// Creates a reader that holds at most `limit` bytes of an incomplete head; hyper refuses a longer head.
    pub(crate) fn new(limit: usize) -> Self {
        Self { at: HeadReaderState::Head, carry: Vec::new(), limit, seen: VecDeque::new() }
    }

    /// Stops reading: all further requests are refused.
    pub(crate) fn stop(&mut self) {
        self.at = HeadReaderState::Lost;
        self.carry = Vec::new();
    }

    /// Returns the result for the next head; an error if this reader has seen no such head.
    pub(crate) fn next_result(&mut self) -> HeadResult {
        self.seen.pop_front().unwrap_or(Err(WireError::Unseen))
    }

    pub(crate) fn feed(&mut self, piece: &[u8]) {
        let mut rest = piece;
        while !rest.is_empty() {
            rest = match self.at {
                HeadReaderState::Lost => return,
                HeadReaderState::Head => self.read_head(rest),
                HeadReaderState::Skip { left, chunked } => {
                    let now = usize::try_from(left).unwrap_or(usize::MAX).min(rest.len());
                    let left = left - now as u64;
                    self.at = match (left, chunked) {
                        (0, true) => HeadReaderState::Size { value: 0, digits: 0 },
                        (0, false) => HeadReaderState::Head,
                        _ => HeadReaderState::Skip { left, chunked },
                    };
                    &rest[now..]
                }
                HeadReaderState::Size { .. }
                | HeadReaderState::Extension { .. }
                | HeadReaderState::Trailer { .. } => {
                    self.at = self.at.next_state(rest[0]);
                    &rest[1..]
                }
            };
        }
    }

    fn read_head<'a>(&mut self, piece: &'a [u8]) -> &'a [u8] {
        if self.carry.is_empty() {
            // Skip empty lines before a request (RFC 9112 section 2.2).
            let skip = piece.iter().take_while(|byte| matches!(byte, b'\r' | b'\n')).count();
            let piece = &piece[skip..];
            if let Some(end) = head_end(piece, 0) {
                self.record_head(&piece[..end]);
                return &piece[end..];
            }
            self.hold_head(piece);
            return &[];
        }
        let before = self.carry.len();
        let room = self.limit.saturating_sub(before).min(piece.len());
        self.carry.extend_from_slice(&piece[..room]);
        let Some(end) = head_end(&self.carry, before.saturating_sub(3)) else {
            if room < piece.len() {
                self.stop();
            }
            return &[];
        };
        let whole = std::mem::take(&mut self.carry);
        self.record_head(&whole[..end]);
        &piece[end.saturating_sub(before)..]
    }

    fn hold_head(&mut self, piece: &[u8]) {
        if piece.len() > self.limit {
            self.stop();
        } else {
            self.carry.extend_from_slice(piece);
        }
    }

    fn record_head(&mut self, head: &[u8]) {
        let seen = check_head(head);
        self.at = match seen {
            Ok(BodyFraming::None | BodyFraming::Length(0)) => HeadReaderState::Head,
            Ok(BodyFraming::Length(left)) => HeadReaderState::Skip { left, chunked: false },
            Ok(BodyFraming::Chunked) => HeadReaderState::Size { value: 0, digits: 0 },
            Err(_) => HeadReaderState::Lost,
        };
        self.seen.push_back(seen);
    }
}

impl HeadReaderState {
    /// Advances by one byte of chunked framing, by hyper's rules.
    fn next_state(self, byte: u8) -> Self {
        match self {
            Self::Size { value, digits } => match (byte as char).to_digit(16) {
                Some(digit) if value <= u64::MAX >> 4 => {
                    Self::Size { value: (value << 4) | u64::from(digit), digits: digits.saturating_add(1) }
                }
                None if digits > 0 => match byte {
                    b'\r' => Self::Extension { value, cr: true },
                    b';' | b' ' | b'\t' => Self::Extension { value, cr: false },
                    _ => Self::Lost,
                },
                _ => Self::Lost,
            },
            Self::Extension { value, cr } => match (byte, cr) {
                (b'\n', true) if value == 0 => Self::Trailer { empty: true, cr: false },
                // Skip the chunk and the CRLF after it.
                (b'\n', true) => {
                    value.checked_add(2).map_or(Self::Lost, |left| Self::Skip { left, chunked: true })
                }
                (_, true) | (b'\n', false) => Self::Lost,
                (byte, false) => Self::Extension { value, cr: byte == b'\r' },
            },
            Self::Trailer { empty, cr } => match (byte, cr) {
                (b'\n', true) if empty => Self::Head,
                (b'\n', true) => Self::Trailer { empty: true, cr: false },
                (_, true) | (b'\n', false) => Self::Lost,
                (b'\r', false) => Self::Trailer { empty, cr: true },
                (_, false) => Self::Trailer { empty: false, cr: false },
            },
            other => other,
        }
    }
}

/// Returns the offset after the first empty line after `from`, with or without CRs, as in hyper.
fn head_end(bytes: &[u8], from: usize) -> Option<usize> {
    memchr::memchr_iter(b'\n', &bytes[from..]).map(|at| from + at).find_map(|at| match &bytes[at + 1..] {
        [b'\n', ..] => Some(at + 2),
        [b'\r', b'\n', ..] => Some(at + 3),
        _ => None,
    })
}

/// Checks a head, including the empty line at its end.
fn check_head(head: &[u8]) -> HeadResult {
    let mut begin = 0;
    let mut lines = memchr::memchr_iter(b'\n', head).map(|at| {
        let line = &head[std::mem::replace(&mut begin, at + 1)..=at];
        line.strip_suffix(b"\r\n")
    });
    let first = lines.next().flatten().ok_or(WireError::BareLf)?;
    check_start_line(first)?;
    let mut length = None;
    let mut chunked = false;
    for line in lines {
        let line = line.ok_or(WireError::BareLf)?;
        if line.is_empty() {
            break;
        }
        let colon = memchr::memchr(b':', line).ok_or(WireError::Field)?;
        // A tab is valid white space, too, but some readers refuse it and no client needs it.
        let name = &line[..colon];
        let value = trim_spaces(&line[colon + 1..]);
        if name.eq_ignore_ascii_case(b"content-length") {
            if length.is_some() {
                return Err(WireError::TwoLengths);
            }
            length = Some(parse_number(value).ok_or(WireError::Length)?);
        } else if name.eq_ignore_ascii_case(b"transfer-encoding") {
            if chunked || !value.eq_ignore_ascii_case(b"chunked") {
                return Err(WireError::Coding);
            }
            chunked = true;
        }
    }
    match (length, chunked) {
        (Some(_), true) => Err(WireError::LengthAndCoding),
        (Some(length), false) => Ok(BodyFraming::Length(length)),
        (None, true) => Ok(BodyFraming::Chunked),
        (None, false) => Ok(BodyFraming::None),
    }
}

fn check_start_line(line: &[u8]) -> Result<(), WireError> {
    let mut words = line.split(|byte| *byte == b' ');
    let (Some(method), Some(target), Some(version), None) =
        (words.next(), words.next(), words.next(), words.next())
    else {
        return Err(WireError::RequestLine);
    };
    if !version.starts_with(b"HTTP/1.") {
        return Err(WireError::RequestLine);
    }
    // Methods are case-sensitive (RFC 9110 section 9.1), and no method has other characters.
    if method.is_empty()
        || !method.iter().all(|byte| byte.is_ascii_uppercase() || matches!(byte, b'-' | b'_'))
    {
        return Err(WireError::Method);
    }
    // hyper silently removes a fragment, and accepts bytes beyond ASCII.
    let is_plain = target.iter().all(|byte| byte.is_ascii_graphic() && *byte != b'#');
    if is_plain && is_well_encoded(target) { Ok(()) } else { Err(WireError::Target) }
}

/// Checks that a path has valid percent-encoding and no `%00`, at which some readers end a text.
fn is_well_encoded(target: &[u8]) -> bool {
    let path = &target[..memchr::memchr(b'?', target).unwrap_or(target.len())];
    query::is_encoded(path) && memmem::find(path, b"%00").is_none()
}

fn trim_spaces(mut value: &[u8]) -> &[u8] {
    while let [b' ', rest @ ..] | [rest @ .., b' '] = value {
        value = rest;
    }
    value
}

fn parse_number(digits: &[u8]) -> Option<u64> {
    // `parse` would accept a sign.
    if !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    std::str::from_utf8(digits).ok()?.parse().ok()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum WireError {
    #[error("the request has both Content-Length and Transfer-Encoding; send one of them")]
    LengthAndCoding,
    #[error("the request has more than one Content-Length; send one")]
    TwoLengths,
    #[error("Content-Length must be one decimal number")]
    Length,
    #[error("the only Transfer-Encoding served is one `chunked`")]
    Coding,
    #[error("a line of the request head ends with a bare LF; lines end with CRLF")]
    BareLf,
    #[error("a line of the request head is no header field")]
    Field,
    #[error("the request line is not `METHOD TARGET HTTP/1.1` with single spaces")]
    RequestLine,
    #[error("the method is not one of capital letters")]
    Method,
    #[error(
        "the request target is not valid: a path, or an http URL, of visible ASCII characters without a \
         fragment; percent-encode others"
    )]
    Target,
    #[error("the request needs exactly one Host header")]
    HostCount,
    #[error("the Host header is not a host with an optional port")]
    Host,
    #[error("the Host header and the request target name different hosts")]
    HostDiffers,
    #[error("the only expectation served is `Expect: 100-continue`")]
    Expectation,
    #[error(
        "the request has passed here before: its Via has our name; look for a proxy that sends to itself"
    )]
    Loop,
    #[error("the request's head and body could be read in two ways; send it again on a new connection")]
    Unseen,
}

impl WireError {
    pub(crate) fn status(self) -> StatusCode {
        match self {
            Self::Expectation => StatusCode::EXPECTATION_FAILED,
            Self::Loop => StatusCode::LOOP_DETECTED,
            Self::Coding => StatusCode::NOT_IMPLEMENTED,
            _ => StatusCode::BAD_REQUEST,
        }
    }

    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::LengthAndCoding | Self::TwoLengths | Self::Length | Self::Coding | Self::Unseen => {
                "framing"
            }
            Self::BareLf | Self::Field | Self::RequestLine | Self::Method => "head",
            Self::Target => "target",
            Self::HostCount | Self::Host | Self::HostDiffers => "host",
            Self::Expectation => "expectation",
            Self::Loop => "loop",
        }
    }
}

#[cfg(test)]
#[path = "raw_head_tests.rs"]
mod tests;
