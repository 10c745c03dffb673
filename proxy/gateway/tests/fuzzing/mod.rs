//! Entry points for the fuzz targets in `tests/fuzz`: the code of this crate that parses bytes from clients
//! and backends. Each function panics if a guarantee is violated. Compiled for tests and with the feature
//! `fuzzing`; never part of the product.
#![expect(clippy::panic, clippy::unwrap_used, clippy::expect_used, reason = "a panic is the finding")]

use std::fmt;
use std::io;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, Response, Uri};
use http_body_util::{BodyExt, Empty, Full};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::answer::meter::AnswerMeter;
use crate::body::scan::{BodyScanner, ScannedModel};
use crate::protocol::raw_head::RawHeadReader;
use crate::protocol::sse::EventSplitter;
use crate::protocol::{headers, wire};
use crate::route::target;

/// Bytes that hyper may buffer for a head.
const HEAD: usize = 8192;
/// Maximum number of fields of a head.
const FIELDS: usize = 100;
/// Maximum number of fields that the gateway adds to a request; a backend must have room for them.
const OURS: usize = 8;

/// A connection whose peer has already sent everything. Written bytes go to `out`.
struct Wire {
    input: Bytes,
    out: Arc<Mutex<Vec<u8>>>,
}

impl AsyncRead for Wire {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        // The input never ends: the end would mean that the client has left and abandoned its request.
        if self.input.is_empty() {
            return Poll::Pending;
        }
        let now = self.input.len().min(buffer.remaining());
        buffer.put_slice(&self.input.split_to(now));
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Wire {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.out.lock().unwrap().extend_from_slice(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// A request that would go to a backend.
#[derive(Debug)]
struct Passed {
    method: http::Method,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
}

/// Returns the requests in `bytes` that pass the checks of hyper and of the second reader. Heads may have
/// this many `more` fields than usual.
fn pass(bytes: &[u8], more: usize) -> Vec<Passed> {
    let mut heads = RawHeadReader::new(2 * HEAD);
    heads.feed(bytes);
    let (heads, passed) = (Mutex::new(heads), Mutex::new(Vec::new()));
    let io = Wire { input: Bytes::copy_from_slice(bytes), out: Arc::default() };
    let service = hyper::service::service_fn(|request: Request<Incoming>| {
        let seen = heads.lock().unwrap().next_result();
        let passed = &passed;
        async move {
            let (parts, body) = request.into_parts();
            let sound = wire::check_request(&parts, &body, seen);
            if sound.is_ok()
                && let Ok(body) = body.collect().await
            {
                let (method, uri, headers, body) = (parts.method, parts.uri, parts.headers, body.to_bytes());
                passed.lock().unwrap().push(Passed { method, uri, headers, body });
                return Ok(Response::new(Empty::<Bytes>::new()));
            }
            // A refused request ends its connection.
            Err(io::Error::other("refused"))
        }
    });
    let mut builder = hyper::server::conn::http1::Builder::new();
    builder.max_buf_size(HEAD + 128 * more).max_headers(FIELDS + more).header_read_timeout(None);
    let mut connection = Box::pin(builder.serve_connection(TokioIo::new(io), service));
    let mut context = Context::from_waker(Waker::noop());
    // All bytes have arrived, so the connection never waits for any, but it may yield.
    for _ in 0..100 {
        if connection.as_mut().poll(&mut context).is_ready() {
            break;
        }
    }
    drop(connection);
    passed.into_inner().unwrap()
}

/// Returns the bytes that a backend gets for a request.
fn forward(passed: &Passed) -> Vec<u8> {
    let mut request = Request::new(Full::new(passed.body.clone()));
    *request.method_mut() = passed.method.clone();
    *request.uri_mut() = target::origin_form(&passed.uri).expect("a target that came is one");
    *request.headers_mut() = passed.headers.clone();
    if passed.body.is_empty() {
        request.headers_mut().insert(http::header::CONTENT_LENGTH, HeaderValue::from(0));
    }
    let out: Arc<Mutex<Vec<u8>>> = Arc::default();
    let io = Wire { input: Bytes::new(), out: out.clone() };
    let mut context = Context::from_waker(Waker::noop());
    let mut shake = pin!(hyper::client::conn::http1::handshake(TokioIo::new(io)));
    let Poll::Ready(Ok((mut sender, connection))) = shake.as_mut().poll(&mut context) else {
        panic!("a handshake of HTTP/1 does nothing")
    };
    let mut connection = pin!(connection);
    let mut answer = pin!(sender.send_request(request));
    for _ in 0..8 {
        assert!(answer.as_mut().poll(&mut context).is_pending(), "nobody answers");
        assert!(connection.as_mut().poll(&mut context).is_pending(), "nobody closes");
    }
    std::mem::take(&mut *out.lock().unwrap())
}

/// Checks any bytes of a client: each request that passes reaches the backend as exactly one request, which
/// would pass again. Method, target, fields and body stay the same; fields of one connection are removed.
pub fn request(bytes: &[u8]) {
    for mut passed in pass(bytes, 0) {
        wire::add_via(&mut passed.headers, http::Version::HTTP_11);
        headers::prepare_for_backend(&mut passed.headers, &HeaderValue::from_static("id"));
        for name in
            ["connection", "keep-alive", "te", "transfer-encoding", "upgrade", "content-length", "expect"]
        {
            assert!(!passed.headers.contains_key(name), "{name} passed");
        }
        assert!(passed.headers.keys().all(|name| !name.as_str().contains('_')), "an underscore passed");
        // With this process's own `Via`, the request would be refused as a loop.
        passed.headers.remove(http::header::VIA);
        let raw = forward(&passed);
        let again = pass(&raw, OURS);
        let [arrived] = &again[..] else {
            panic!("{} requests from {:?}", again.len(), String::from_utf8_lossy(&raw))
        };
        let mut fields = arrived.headers.clone();
        fields.remove(http::header::CONTENT_LENGTH);
        assert_eq!((&arrived.method, &arrived.body), (&passed.method, &passed.body));
        let target = |passed: &Passed| passed.uri.path_and_query().map(ToString::to_string);
        if passed.uri.path().starts_with('/') {
            assert_eq!(target(arrived), target(&passed));
        }
        assert_eq!(fields, passed.headers);
    }
}

/// Checks that the second reader has the same results for bytes in pieces of any size.
pub fn pieces(bytes: &[u8], size: usize) {
    let mut whole = RawHeadReader::new(2 * HEAD);
    whole.feed(bytes);
    let mut parts = RawHeadReader::new(2 * HEAD);
    for piece in bytes.chunks(size.max(1)) {
        parts.feed(piece);
    }
    loop {
        let (one, other) = (whole.next_result(), parts.next_result());
        // When the reader refuses a head beyond the limit depends on the size of the pieces.
        assert!(one == other || bytes.len() > HEAD, "{one:?} {other:?}");
        if one.is_err() {
            return;
        }
    }
}

/// The first `model` of an object, and all its `stream` values.
struct Outer {
    model: Option<Value>,
    streams: Vec<Value>,
}

impl<'de> Deserialize<'de> for Outer {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = Outer;

            fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
                out.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Outer, A::Error> {
                let mut outer = Outer { model: None, streams: Vec::new() };
                while let Some((key, value)) = map.next_entry::<String, Value>()? {
                    match key.as_str() {
                        "model" if outer.model.is_none() => outer.model = Some(value),
                        "stream" => outer.streams.push(value),
                        _ => {}
                    }
                }
                Ok(outer)
            }
        }
        deserializer.deserialize_map(Reader)
    }
}

/// Checks that the scanner agrees with a full parser on valid bodies, and never panics on others.
pub fn model(bytes: &[u8], size: usize) {
    let mut scanner = BodyScanner::default();
    for piece in bytes.chunks(size.max(1)) {
        scanner.feed(piece);
    }
    let Ok(outer) = serde_json::from_slice::<Outer>(bytes) else { return };
    let expected = match outer.model {
        None => ScannedModel::Absent,
        // Skip long names: in an escaped spelling they may exceed the length that the scanner reads.
        Some(Value::String(name)) if name.len() > 600 => return,
        Some(Value::String(name)) => ScannedModel::Named(name),
        Some(_) => ScannedModel::NotText,
    };
    assert_eq!(*scanner.model(), expected, "{:?}", String::from_utf8_lossy(bytes));
    assert!(scanner.is_complete_object());
    assert_eq!(scanner.is_stream(), outer.streams == [Value::Bool(true)]);
}

/// Checks an event stream in pieces: every byte passes once, in order, and the counters stay the same.
pub fn events(bytes: &[u8], sizes: &[u8], limit: usize) {
    let (mut events, mut meter, mut out) =
        (EventSplitter::new(limit.max(4)), AnswerMeter::new(4096), Vec::new());
    let (mut rest, mut sizes) = (bytes, sizes.iter().cycle());
    while !rest.is_empty() {
        let now = usize::from(*sizes.next().unwrap_or(&7)).clamp(1, rest.len());
        let (piece, after) = rest.split_at(now);
        meter.feed(piece);
        out.extend_from_slice(&events.push(Bytes::copy_from_slice(piece)));
        rest = after;
    }
    out.extend_from_slice(&events.finish());
    assert_eq!(out, bytes);
    if bytes.len() <= 4096 {
        let mut whole = AnswerMeter::new(4096);
        whole.feed(bytes);
        assert_eq!(meter.work(None), whole.work(None), "{:?}", String::from_utf8_lossy(bytes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use proptest::sample::{Index, select};

    const REQUESTS: [&str; 4] = [
        "POST /e HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhelloGET / HTTP/1.1\r\nHost: x\r\n\r\n",
        "POST /e?a=%20 HTTP/1.1\r\nHost: x:80\r\nTransfer-Encoding: chunked\r\nConnection: close, x-a\r\nX-A: b\r\n\r\n5;a=b\r\nhello\r\n0\r\nA: b\r\n\r\n",
        "GET http://x/e HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nUpgrade: h2c\r\nX_A: b\r\nVia: 1.1 a\r\n\r\n",
        "OPTIONS * HTTP/1.0\r\nKeep-Alive: x\r\nTE: trailers\r\nX-A: \u{fc}\r\n\r\n",
    ];
    const BODIES: [&str; 3] = [
        r#"{"model":"a","stream":true,"messages":[{"content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,AA"}}]}]}"#,
        r#"{ "a" : [1,-2e5,{"model":"b"}] , "mod\u0065l" : "x\n" ,"stream": false, "model": null}"#,
        r#"{"stream":true,"model":[],"stream":{"model":"a"}}"#,
    ];
    const STREAMS: [&str; 2] = [
        "data: {\"choices\":[]}\n\ndata: {\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":2},\"timings\":{\"prompt_n\":2}}\n\ndata: [DONE]\n\n",
        "event: error\r\ndata: {\"error\":{\"message\":\"Compute error.\"}}\r\n\r\n: ping\r\r",
    ];

    /// Found by fuzzing.
    #[test]
    fn a_name_that_shares_its_quotation_mark_with_another_counts_alike_in_any_pieces() {
        let bytes = b"\"usage\"timings\":{,\"timings\"A{\"s\"x:[ata: {\"usage\":{\"prompt_tokens\":6,\"completion_tokens\":2},\"timings\":{\"prs\":{\"promps\":[]}\n\ndatn\":2}}\n\n";
        for size in 1..40 {
            events(bytes, &[size, 7, 16, 1], 93);
        }
    }

    /// A text with some of its bytes replaced, doubled, dropped, or moved.
    fn mutated(from: &'static [&'static str]) -> impl Strategy<Value = Vec<u8>> {
        let odd = select(&b"\r\n\t \0:;,#%\"\\{}[]x0\x7f\xff"[..]);
        (select(from), proptest::collection::vec((any::<Index>(), 0..5_u8, odd, any::<Index>()), 0..4))
            .prop_map(|(text, changes)| {
                let mut bytes = text.as_bytes().to_vec();
                for (at, how, byte, other) in changes {
                    let at = at.index(bytes.len().max(1)).min(bytes.len().saturating_sub(1));
                    match how {
                        _ if bytes.is_empty() => bytes.push(byte),
                        0 => bytes[at] = byte,
                        1 => bytes.insert(at, byte),
                        2 => drop(bytes.remove(at)),
                        3 => bytes.truncate(at),
                        _ => {
                            let other = other.index(bytes.len());
                            let (from, to) = (at.min(other), at.max(other));
                            bytes.extend_from_within(from..to);
                        }
                    }
                }
                bytes
            })
    }

    #[test]
    fn a_query_without_a_path_arrives() {
        for (target, arrives) in [("http://x?e", "/?e"), ("http://x", "/"), ("http://x/?e", "/?e")] {
            let bytes = format!("GET {target} HTTP/1.1\r\nHost: x\r\n\r\n");
            let [passed] = &pass(bytes.as_bytes(), 0)[..] else { panic!("{target} does not pass") };
            let raw = String::from_utf8(forward(passed)).unwrap();
            assert!(raw.starts_with(&format!("GET {arrives} HTTP/1.1\r\n")), "{raw}");
            request(bytes.as_bytes());
        }
    }

    #[test]
    fn a_head_as_large_as_may_be_has_room_for_what_we_add() {
        let many = "X-A: b\r\n".repeat(FIELDS);
        let head = format!("GET / HTTP/1.1\r\nHost: x\r\n{many}");
        let most =
            format!("{}\r\n\r\n", head.split("\r\n").take(FIELDS + 1).collect::<Vec<_>>().join("\r\n"));
        assert_eq!(pass(most.as_bytes(), 0).len(), 1);
        assert_eq!(pass(format!("{head}\r\n").as_bytes(), 0).len(), 0);
        request(most.as_bytes());
        let long = format!("GET / HTTP/1.1\r\nHost: x\r\nX-A: {}\r\n\r\n", "b".repeat(HEAD - 40));
        assert_eq!(pass(long.as_bytes(), 0).len(), 1);
        request(long.as_bytes());
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases.max(2000), ..ProptestConfig::default() })]

        #[test]
        fn whatever_a_client_sends_one_request_arrives_as_one(bytes in mutated(&REQUESTS), size in 1..40_usize) {
            pieces(&bytes, size);
            request(&bytes);
        }

        #[test]
        fn the_model_is_the_one_that_a_full_parser_finds(bytes in mutated(&BODIES), size in 1..40_usize) {
            model(&bytes, size);
        }

        #[test]
        fn a_stream_passes_the_same_in_any_pieces(
            bytes in mutated(&STREAMS), sizes in proptest::collection::vec(1..30_u8, 1..4), limit in 4..80_usize,
        ) {
            events(&bytes, &sizes, limit);
        }
    }
}
