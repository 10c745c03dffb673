//! `RAW_LLAMA_BODIES=leave` plays cpp-httplib before 0.40, `discard` a later one. Some answers need only the
//! head: before routing, for a file, for a refused head, and on `/unread`. Then the body is parsed as the
//! next request, or discarded. In both, bytes after an invalid head stay in the connection.

use std::io::{self, BufRead, Read as _};

use crate::{LIMIT, line, rest_of};

/// cpp-httplib's limits for a head.
const LINE_BYTES: usize = 8192;
const FIELDS: usize = 100;
const METHODS: [&str; 8] = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "PRI"];

/// Treatment of a body that was not read before the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bodies {
    Leave,
    Discard,
}

impl Bodies {
    pub(crate) fn from_variable(value: &str) -> Option<Self> {
        match value {
            "leave" => Some(Self::Leave),
            "discard" => Some(Self::Discard),
            _ => None,
        }
    }
}

pub(crate) struct Request {
    pub(crate) raw: Vec<u8>,
    pub(crate) status: &'static str,
    /// True if the request announces the end of the connection.
    closes: bool,
    /// Framing of the body, if it was not read.
    unread: Option<Framing>,
}

#[derive(Clone, Copy, Default)]
pub(crate) struct Framing {
    pub(crate) length: u64,
    pub(crate) chunked: bool,
}

/// Returns the next request of a connection; `None` at its end.
pub(crate) fn next(reader: &mut impl BufRead) -> io::Result<Option<Request>> {
    let mut raw = Vec::new();
    let Some(first) = line(reader, &mut raw)? else { return Ok(None) };
    let mut words = first.split(' ');
    let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let unreadable =
        |raw, status| Ok(Some(Request { raw, status, closes: false, unread: Some(Framing::default()) }));
    if !METHODS.contains(&method) || words.next() != Some("HTTP/1.1") {
        return unreadable(raw, "400 Bad Request");
    }
    let (mut framing, mut closes, mut status, mut fields) = (Framing::default(), false, "200 OK", 0);
    loop {
        let before = raw.len();
        let Some(field) = line(reader, &mut raw)? else { return Ok(None) };
        if field.is_empty() {
            break;
        }
        fields += 1;
        if raw.len() - before > LINE_BYTES || fields > FIELDS {
            return unreadable(raw, "400 Bad Request");
        }
        let Some((name, value)) = field.split_once(':') else { return unreadable(raw, "400 Bad Request") };
        let value = value.trim();
        match name.to_ascii_lowercase().as_str() {
            "content-length" => framing.length = value.parse().unwrap_or(0),
            "transfer-encoding" => framing.chunked = true,
            "connection" => closes = value == "close",
            "accept" if value.starts_with(';') => status = "400 Bad Request",
            "range" if !value.contains('-') => status = "416 Range Not Satisfiable",
            "content-encoding" => status = "415 Unsupported Media Type",
            _ => {}
        }
    }
    if target.len() > LINE_BYTES {
        return unreadable(raw, "414 URI Too Long");
    }
    let by_head = status != "200 OK" || matches!(method, "GET" | "HEAD" | "OPTIONS");
    if by_head || target.starts_with("/unread") {
        return Ok(Some(Request { raw, status, closes, unread: Some(framing) }));
    }
    let whole = rest_of(reader, &mut raw, framing)?;
    Ok(whole.then_some(Request { raw, status, closes, unread: None }))
}

impl Request {
    /// Returns true if the connection accepts another request after the answer.
    pub(crate) fn goes_on(&self, reader: &mut impl BufRead, bodies: Bodies) -> io::Result<bool> {
        match self.unread {
            _ if self.closes => Ok(false),
            // There is no body left.
            None | Some(Framing { length: 0, chunked: false }) => Ok(true),
            Some(_) if bodies == Bodies::Leave => Ok(true),
            Some(_) if self.status != "200 OK" => Ok(false),
            Some(Framing { chunked: true, .. }) => {
                rest_of(reader, &mut Vec::new(), Framing { length: 0, chunked: true })
            }
            Some(Framing { length, .. }) => {
                io::copy(&mut reader.take(length.min(LIMIT)), &mut io::sink()).map(|read| read == length)
            }
        }
    }
}
