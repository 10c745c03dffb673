//! Cases about heads: fields, request lines, hosts, connection fields.

use super::{CHUNKS, Case, SMUGGLED, Verdict, case, get, head, passed};

pub(super) fn fields() -> Vec<Case> {
    let mut all = Vec::new();
    for (name, line) in [
        ("field, space before the colon", "X-A : b"),
        ("field, tab before the colon", "X-A\t: b"),
        ("field folded", "X-A: b\r\n c"),
        ("field folded with a tab", "X-A: b\r\n\tc"),
        ("field without a colon", "X-A"),
        ("field without a name", ": b"),
        ("field with a space in its name", "X A: b"),
        ("field with an 8-bit name", "X-\u{e4}: b"),
        ("field with brackets in its name", "X[a]: b"),
        ("field with a NUL in its name", "X-\0A: b"),
        ("field with a NUL in its value", "X-A: b\0c"),
        ("field with a bare CR in its value", "X-A: b\rc"),
        ("field with a bare CR at its end", "X-A: b\r"),
        ("field with a bell in its value", "X-A: b\u{7}c"),
        ("field with DEL in its value", "X-A: b\u{7f}c"),
        ("field ended by a bare LF", "X-A: b\nX-C: d"),
    ] {
        all.push(head(name, 0, &format!("GET /e HTTP/1.1\r\nHost: x\r\n{line}\r\n\r\n")));
    }
    all.push(head("blank line in the middle of a head", 0, "GET /e HTTP/1.1\r\nHost: x\r\n\nX-A: b\r\n\r\n"));
    all.push(head("head of bare LFs", 0, "GET /e HTTP/1.1\nHost: x\n\n"));
    all.push(head("blank before the first field", 0, "GET /e HTTP/1.1\r\n X-A: b\r\nHost: x\r\n\r\n"));
    let many = format!("GET /e HTTP/1.1\r\nHost: x\r\n{}\r\n", "X-A: b\r\n".repeat(200));
    all.push(head("fields, 200 of them", 431, &many));
    let long = format!("GET /e HTTP/1.1\r\nHost: x\r\nX-A: {}\r\n\r\n", "a".repeat(90_000));
    all.push(head("field of 90,000 bytes", 431, &long));
    let simple = |name: &str, lines: &str, arrives: &str| {
        let head = format!("GET /e HTTP/1.1\r\nHost: x\r\n{lines}\r\n");
        get(name, &head, &format!("GET /e HTTP/1.1\n{arrives}\n"))
    };
    all.push(simple("field with an 8-bit value", "X-A: \u{e4}\r\n", "x-a: \u{e4}\n"));
    all.push(simple("field twice", "X-A: b\r\nX-A: c\r\n", "x-a: b\nx-a: c\n"));
    all.push(simple("field without a value", "X-A:\r\n", "x-a: \n"));
    all.push(simple("field with an underscore", "X_A: b\r\nX-B: c\r\n", "x-b: c\n"));
    all.push(simple("lines before the request", "", "").but(""));
    if let Some(last) = all.last_mut() {
        last.bytes.insert_str(0, "\r\n");
    }
    all
}

pub(super) fn request_lines() -> Vec<Case> {
    let mut all = Vec::new();
    for (name, line) in [
        ("request line behind a blank", " GET /e HTTP/1.1"),
        ("request line with two spaces", "GET  /e HTTP/1.1"),
        ("request line with a tab", "GET\t/e\tHTTP/1.1"),
        ("request line with a space at its end", "GET /e HTTP/1.1 "),
        ("request line without a version", "GET /e"),
        ("request line without a target", "GET HTTP/1.1"),
        ("request line of HTTP/1.2", "GET /e HTTP/1.2"),
        ("request line of HTTP/2.0", "GET /e HTTP/2.0"),
        ("request line of HTTP/0.9", "GET /e HTTP/0.9"),
        ("request line of HTTP/1", "GET /e HTTP/1"),
        ("request line of HTTP/01.1", "GET /e HTTP/01.1"),
        ("request line of http/1.1", "GET /e http/1.1"),
        ("request line ended by CR CR LF", "GET /e HTTP/1.1\r"),
        ("request line with a second one in it", "GET /e HTTP/1.1 /x HTTP/1.1"),
        ("method in small letters", "get /e HTTP/1.1"),
        ("method with an at sign", "G@T /e HTTP/1.1"),
        ("method with a NUL", "G\0T /e HTTP/1.1"),
        ("method with a colon", "GET: /e HTTP/1.1"),
        ("target with a space", "GET /e f HTTP/1.1"),
        ("target with a tab", "GET /e\tf HTTP/1.1"),
        ("target with a control character", "GET /e\u{1}f HTTP/1.1"),
        ("target with a NUL", "GET /e\0f HTTP/1.1"),
        ("target with DEL", "GET /e\u{7f} HTTP/1.1"),
        ("target with a bare CR", "GET /e\rf HTTP/1.1"),
        ("target with an 8-bit character", "GET /\u{e4} HTTP/1.1"),
        ("target with a fragment", "GET /e#f HTTP/1.1"),
        ("target with a fragment behind a query", "GET /e?a#f HTTP/1.1"),
        ("target with an encoded NUL", "GET /e%00f HTTP/1.1"),
        ("target with a broken encoding", "GET /e%zz HTTP/1.1"),
        ("target with quotes", "GET /e?q=\"a\" HTTP/1.1"),
        ("target that is relative", "GET e HTTP/1.1"),
        ("target that is an asterisk, of GET", "GET * HTTP/1.1"),
        ("target that is an authority, of GET", "GET x:80 HTTP/1.1"),
        ("target empty", "GET  HTTP/1.1"),
    ] {
        all.push(head(name, 0, &format!("{line}\r\nHost: x\r\n\r\n")));
    }
    let long = format!("GET /{} HTTP/1.1\r\nHost: x\r\n\r\n", "a".repeat(70_000));
    all.push(head("target of 70,000 bytes", 0, &long));
    all.push(head("CONNECT", 405, "CONNECT x:80 HTTP/1.1\r\nHost: x:80\r\n\r\n"));
    all.push(head("TRACE", 405, "TRACE /e HTTP/1.1\r\nHost: x\r\n\r\n"));
    all.push(head("garbage", 0, "GARBAGE\r\n\r\n"));
    all.push(head("TLS", 0, "\u{16}\u{3}\u{1}\u{0}\u{5}hello\r\n\r\n"));
    let preface = format!("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n{SMUGGLED}");
    all.push(case("preface of HTTP/2", preface, Verdict::Closed));
    for (name, line) in [
        ("OPTIONS *", "OPTIONS * HTTP/1.1"),
        ("OPTIONS with Max-Forwards 0", "OPTIONS /e HTTP/1.1\r\nMax-Forwards: 0"),
    ] {
        let bytes = format!("{line}\r\nHost: x\r\n\r\n");
        all.push(case(name, bytes, Verdict::Ours(200)));
    }
    let same = |name: &str, target: &str| {
        let head = format!("GET {target} HTTP/1.1\r\nHost: x\r\n\r\n");
        get(name, &head, &format!("GET {target} HTTP/1.1\n\n"))
    };
    all.push(same("target with encoded slashes", "/e%2f..%2Fa%20b"));
    all.push(same("target with two slashes", "//e//f"));
    all.push(same("target with braces", "/e?q={a}"));
    all.push(same("target with a question mark twice", "/e?a=b?c"));
    all.push(same("target that climbs", "/a/../../e").but(
        "nginx resolves dots and refuses to climb above the root; we pass a path byte for byte, and llama-server compares it with its routes as it stands",
    ));
    let query = "GET http://x?a HTTP/1.1\r\nHost: x\r\n\r\n";
    all.push(get("absolute target with a query and no path", query, "GET /?a HTTP/1.1\n\n").but(
        "haproxy 2.6 wants a slash behind the host; an absolute target without a path means `/` (RFC 9110 section 4.2.3), and what is a query is clear to all",
    ));
    all.push(get(
        "Max-Forwards of GET",
        "GET /e HTTP/1.1\r\nHost: x\r\nMax-Forwards: 3\r\n\r\n",
        "GET /e HTTP/1.1\nmax-forwards: 3\n\n",
    ));
    all.push(head("method unknown", 405, "FROB /e HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"));
    all
}

pub(super) fn hosts() -> Vec<Case> {
    let mut all = Vec::new();
    for (name, status, line, lines) in [
        ("host missing", 400, "GET /e HTTP/1.1", ""),
        ("host twice", 400, "GET /e HTTP/1.1", "Host: x\r\nHost: y\r\n"),
        ("host twice, equal", 400, "GET /e HTTP/1.1", "Host: x\r\nHost: x\r\n"),
        ("host empty", 400, "GET /e HTTP/1.1", "Host: \r\n"),
        ("host list", 400, "GET /e HTTP/1.1", "Host: x, y\r\n"),
        ("host of two words", 400, "GET /e HTTP/1.1", "Host: x y\r\n"),
        ("host with a path", 400, "GET /e HTTP/1.1", "Host: x/y\r\n"),
        ("host with a user", 400, "GET /e HTTP/1.1", "Host: a@x\r\n"),
        ("host with a fragment", 400, "GET /e HTTP/1.1", "Host: x#y\r\n"),
        ("host with a backslash", 400, "GET /e HTTP/1.1", "Host: x\\y\r\n"),
        ("host with a bad port", 400, "GET /e HTTP/1.1", "Host: x:y\r\n"),
        ("host with a quote", 400, "GET /e HTTP/1.1", "Host: x\"\r\n"),
        ("host, space before the colon", 400, "GET /e HTTP/1.1", "Host : x\r\n"),
        ("absolute target of another host", 400, "GET http://y/e HTTP/1.1", "Host: x\r\n"),
        ("absolute target of another port", 400, "GET http://x:81/e HTTP/1.1", "Host: x\r\n"),
        ("absolute target with a user", 400, "GET http://a@x/e HTTP/1.1", "Host: x\r\n"),
        ("absolute target of ftp", 400, "GET ftp://x/e HTTP/1.1", "Host: x\r\n"),
        ("absolute target without a host", 400, "GET http:///e HTTP/1.1", "Host: x\r\n"),
        ("absolute target, no Host", 400, "GET http://x/e HTTP/1.1", ""),
        ("expectation unknown", 417, "GET /e HTTP/1.1", "Host: x\r\nExpect: 200-ok\r\n"),
    ] {
        all.push(head(name, status, &format!("{line}\r\n{lines}\r\n")));
    }
    for (name, head, arrives) in [
        ("absolute target", "GET http://x/e?a HTTP/1.1\r\nHost: x\r\n\r\n", "GET /e?a HTTP/1.1\n\n"),
        ("absolute target without a path", "GET http://x HTTP/1.1\r\nHost: x\r\n\r\n", "GET / HTTP/1.1\n\n"),
        ("absolute target of https", "GET https://x/e HTTP/1.1\r\nHost: x\r\n\r\n", "GET /e HTTP/1.1\n\n"),
        ("host with a port", "GET /e HTTP/1.1\r\nHost: [::1]:8080\r\n\r\n", "GET /e HTTP/1.1\n\n"),
        ("HTTP/1.0 without a host", "GET /e HTTP/1.0\r\n\r\n", "GET /e HTTP/1.1\n\n"),
        (
            "HTTP/1.0 with keep-alive",
            "GET /e HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
            "GET /e HTTP/1.1\n\n",
        ),
        (
            "HTTP/1.0 with a body",
            "POST /e HTTP/1.0\r\nContent-Length: 5\r\n\r\nhello",
            "POST /e HTTP/1.1\n\nhello",
        ),
        (
            "expectation in HTTP/1.0",
            "POST /e HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\nhello",
            "POST /e HTTP/1.1\n\nhello",
        ),
        (
            "expectation with its body at once",
            "POST /e HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\nhello",
            "POST /e HTTP/1.1\n\nhello",
        ),
    ] {
        all.push(get(name, head, arrives));
    }
    all
}

pub(super) fn of_one_connection() -> Vec<Case> {
    [
        (
            "fields of one connection",
            "Connection: close, X-Hop\r\nX-Hop: 1\r\nKeep-Alive: timeout=9\r\nProxy-Connection: keep-alive\r\nTE: trailers\r\n\
             Trailer: X-Sum\r\nProxy-Authorization: Basic x\r\nX-Own: 1\r\n",
            "x-own: 1\n",
        ),
        (
            "connection that names others twice",
            "Connection: X-A\r\nConnection: ,x-b ,\r\nX-A: 1\r\nX-B: 2\r\nX-C: 3\r\n",
            "x-c: 3\n",
        ),
        ("connection that names the host", "Connection: Host, X-Request-Id\r\nX-Request-Id: a\r\n", ""),
        (
            "upgrade to a websocket",
            "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n",
            "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\nsec-websocket-version: 13\n",
        ),
        (
            "upgrade to h2c",
            "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n",
            "",
        ),
        ("upgrade that Connection does not name", "Upgrade: h2c\r\n", ""),
        ("id that makes llama-server deaf", "X-Conversation-Id: c\r\nX_Conversation_Id: d\r\n", ""),
    ]
    .into_iter()
    .map(|(name, lines, arrives)| {
        let head = format!("GET /e HTTP/1.1\r\nHost: x\r\n{lines}\r\n");
        get(name, &head, &format!("GET /e HTTP/1.1\n{arrives}\n"))
    })
    .chain([
        passed("connection that names the length", "Connection: Content-Length\r\nContent-Length: 5\r\n", "hello", "\nhello"),
        passed(
            "connection that names the coding",
            "Connection: Transfer-Encoding\r\nTransfer-Encoding: chunked\r\n",
            CHUNKS,
            "\nhello",
        ),
    ])
    .collect()
}
