//! Parses answers: the head, the body by length or chunks, and the end. As cheap as possible while right for
//! all servers here.

use memchr::memmem;
use warden_rig::Trouble;

/// Most bytes of a head.
const HEAD: usize = 16 << 10;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Head,
    Length(usize),
    Size { so_far: usize, extension: bool },
    Chunk(usize),
    ChunkEnd,
    Trailers { line: usize },
    Done,
}

/// Answer as far as it has arrived.
#[derive(Debug)]
pub(crate) struct Response {
    state: State,
    head: Vec<u8>,
    pub(crate) status: u16,
    /// True if the server announced that it closes.
    pub(crate) closes: bool,
}

impl Response {
    pub(crate) fn new() -> Self {
        Self { state: State::Head, head: Vec::new(), status: 0, closes: false }
    }

    pub(crate) fn reset(&mut self) {
        self.state = State::Head;
        self.head.clear();
    }

    pub(crate) fn is_done(&self) -> bool {
        self.state == State::Done
    }

    /// Returns true if no byte of the answer has arrived.
    pub(crate) fn is_fresh(&self) -> bool {
        self.state == State::Head && self.head.is_empty()
    }

    /// Parses bytes and passes on the parts of the body.
    ///
    /// # Errors
    /// The bytes are no answer, or continue after its end.
    pub(crate) fn feed(&mut self, mut bytes: &[u8], mut data: impl FnMut(&[u8])) -> Result<(), Trouble> {
        while !bytes.is_empty() {
            match self.state {
                State::Head => bytes = self.head(bytes)?,
                State::Length(left) => {
                    let now = left.min(bytes.len());
                    data(&bytes[..now]);
                    bytes = &bytes[now..];
                    self.state = if now == left { State::Done } else { State::Length(left - now) };
                }
                State::Size { so_far, extension } => {
                    self.state = match bytes[0] {
                        b'\n' if so_far == 0 => State::Trailers { line: 0 },
                        b'\n' => State::Chunk(so_far),
                        b'\r' => State::Size { so_far, extension },
                        digit if digit.is_ascii_hexdigit() && !extension => {
                            let digit = char::from(digit).to_digit(16).unwrap_or_default();
                            State::Size { so_far: so_far * 16 + digit as usize, extension }
                        }
                        _ => State::Size { so_far, extension: true },
                    };
                    bytes = &bytes[1..];
                }
                State::Chunk(left) => {
                    let now = left.min(bytes.len());
                    data(&bytes[..now]);
                    bytes = &bytes[now..];
                    self.state = if now == left { State::ChunkEnd } else { State::Chunk(left - now) };
                }
                State::ChunkEnd => {
                    if bytes[0] == b'\n' {
                        self.state = State::Size { so_far: 0, extension: false };
                    }
                    bytes = &bytes[1..];
                }
                State::Trailers { line } => {
                    self.state = match bytes[0] {
                        b'\n' if line == 0 => State::Done,
                        b'\n' => State::Trailers { line: 0 },
                        b'\r' => State::Trailers { line },
                        _ => State::Trailers { line: line + 1 },
                    };
                    bytes = &bytes[1..];
                }
                State::Done => return Err(Trouble::new("bytes after the end of an answer")),
            }
        }
        Ok(())
    }

    fn head<'a>(&mut self, bytes: &'a [u8]) -> Result<&'a [u8], Trouble> {
        if self.head.is_empty()
            && let Some(end) = memmem::find(bytes, b"\r\n\r\n")
        {
            self.parse(&bytes[..end + 4])?;
            return Ok(&bytes[end + 4..]);
        }
        // The head arrives in several parts, which is rare.
        let before = self.head.len();
        self.head.extend_from_slice(bytes);
        let head = std::mem::take(&mut self.head);
        if let Some(end) = memmem::find(&head, b"\r\n\r\n") {
            self.parse(&head[..end + 4])?;
            return Ok(&bytes[end + 4 - before..]);
        }
        if head.len() > HEAD {
            return Err(Trouble::new("the head of an answer does not end"));
        }
        self.head = head;
        Ok(&[])
    }

    fn parse(&mut self, bytes: &[u8]) -> Result<(), Trouble> {
        let mut fields = [httparse::EMPTY_HEADER; 64];
        let mut head = httparse::Response::new(&mut fields);
        head.parse(bytes)?;
        self.status = head.code.unwrap_or(0);
        self.closes = false;
        self.state = State::Length(0);
        for field in &*head.headers {
            if field.name.eq_ignore_ascii_case("content-length") {
                let length = std::str::from_utf8(field.value)?.trim().parse()?;
                self.state = if length == 0 { State::Done } else { State::Length(length) };
            } else if field.name.eq_ignore_ascii_case("transfer-encoding") {
                self.state = State::Size { so_far: 0, extension: false };
            } else if field.name.eq_ignore_ascii_case("connection") {
                self.closes = field.value.eq_ignore_ascii_case(b"close");
            }
        }
        if self.state == State::Length(0) {
            return Err(Trouble::new(format!("no length: {}", bytes.escape_ascii())));
        }
        Ok(())
    }
}
