//! Answers out of bytes: the head, the body by its length or by its chunks, and where it ends. As lean as it can be
//! without being wrong about any of the servers here.

use memchr::memmem;
use warden_rig::Trouble;

/// A head is smaller than this.
const HEAD: usize = 16 << 10;

/// Where the reader is.
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

/// An answer as far as it has come.
#[derive(Debug)]
pub(crate) struct Response {
    state: State,
    head: Vec<u8>,
    /// Its status.
    pub(crate) status: u16,
    /// The server says that it closes.
    pub(crate) closes: bool,
}

impl Response {
    pub(crate) fn new() -> Self {
        Self { state: State::Head, head: Vec::new(), status: 0, closes: false }
    }

    /// Begins with the next one.
    pub(crate) fn reset(&mut self) {
        self.state = State::Head;
        self.head.clear();
    }

    pub(crate) fn is_done(&self) -> bool {
        self.state == State::Done
    }

    /// Nothing of it has come.
    pub(crate) fn is_fresh(&self) -> bool {
        self.state == State::Head && self.head.is_empty()
    }

    /// Takes bytes in and hands the body's on, piece by piece.
    ///
    /// # Errors
    /// It is no answer, or something comes after its end.
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
        // In pieces, which is rare.
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
