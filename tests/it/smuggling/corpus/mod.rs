//! Ambiguous raw requests, each with its expected result.
//!
//! Characters stand for the byte of the same number. Most refused ones are followed by a request to
//! `/smuggled`, which no upstream may see. Sources: RFC 9112, the vectors of common smuggling scanners, old
//! faults of proxies.

mod framing;
mod heads;

/// Expected result of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Refused with this status (0: any), and the connection is closed; the upstream sees nothing.
    Refused(u16),
    /// llama-warden itself answers with this status; the upstream sees nothing.
    Ours(u16),
    /// Arrives as: request line, fields sorted by name, empty line, body. Framing, `host`, `via` and
    /// `x-request-id` are left out and checked separately.
    Passed(String),
    /// The connection is closed, with or without a refusal.
    Closed,
    /// The request never becomes complete, and the upstream sees none.
    Never,
}

#[derive(Clone, Debug)]
pub(crate) struct Case {
    /// Unique name.
    pub(crate) name: String,
    /// Bytes, as characters.
    pub(crate) bytes: String,
    pub(crate) verdict: Verdict,
    /// Reason why we pass a request that nginx or haproxy refuses.
    pub(crate) why: &'static str,
}

impl Case {
    fn but(mut self, why: &'static str) -> Self {
        self.why = why;
        self
    }
}

/// A request that must not reach the upstream.
pub(crate) const SMUGGLED: &str = "GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n";

const CHUNKS: &str = "5\r\nhello\r\n0\r\n\r\n";

fn case(name: &str, bytes: String, verdict: Verdict) -> Case {
    Case { name: name.to_owned(), bytes, verdict, why: "" }
}

/// A POST with these field lines (each with its line end) and this body, then a smuggled request.
fn refused(name: &str, status: u16, fields: &str, body: &str) -> Case {
    let bytes = format!("POST /e HTTP/1.1\r\nHost: x\r\n{fields}\r\n{body}{SMUGGLED}");
    case(name, bytes, Verdict::Refused(status))
}

fn passed(name: &str, fields: &str, body: &str, arrives: &str) -> Case {
    let bytes = format!("POST /e HTTP/1.1\r\nHost: x\r\n{fields}\r\n{body}");
    case(name, bytes, Verdict::Passed(format!("POST /e HTTP/1.1\n{arrives}")))
}

/// A complete head, then a smuggled request.
fn head(name: &str, status: u16, head: &str) -> Case {
    case(name, format!("{head}{SMUGGLED}"), Verdict::Refused(status))
}

fn get(name: &str, head: &str, arrives: &str) -> Case {
    case(name, head.to_owned(), Verdict::Passed(arrives.to_owned()))
}

pub(crate) fn all() -> Vec<Case> {
    let framing = [framing::lengths(), framing::codings(), framing::chunks()];
    let heads = [heads::fields(), heads::request_lines(), heads::hosts(), heads::of_one_connection()];
    framing.into_iter().chain(heads).flatten().collect()
}
