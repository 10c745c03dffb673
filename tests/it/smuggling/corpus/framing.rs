//! Cases about the end of a body: lengths, codings, chunks.

use super::{CHUNKS, Case, Verdict, case, get, head, passed, refused};

pub(super) fn lengths() -> Vec<Case> {
    let hello = "\nhello";
    vec![
        refused("cl.te", 400, "Content-Length: 6\r\nTransfer-Encoding: chunked\r\n", "0\r\n\r\n"),
        refused("te.cl", 400, "Transfer-Encoding: chunked\r\nContent-Length: 4\r\n", CHUNKS),
        refused("cl.te.0", 400, "Content-Length: 0\r\nTransfer-Encoding: chunked\r\n", CHUNKS),
        refused("cl twice, unequal", 400, "Content-Length: 5\r\nContent-Length: 6\r\n", "hello"),
        refused("cl twice, equal", 400, "Content-Length: 5\r\nContent-Length: 5\r\n", "hello"),
        refused("cl list, equal", 400, "Content-Length: 5, 5\r\n", "hello"),
        refused("cl list, unequal", 400, "Content-Length: 5, 6\r\n", "hello"),
        refused("cl negative", 400, "Content-Length: -5\r\n", "hello"),
        refused("cl with plus", 400, "Content-Length: +5\r\n", "hello"),
        refused("cl hexadecimal", 400, "Content-Length: 0x5\r\n", "hello"),
        refused("cl with underscore", 400, "Content-Length: 5_0\r\n", "hello"),
        refused("cl empty", 400, "Content-Length: \r\n", "hello"),
        refused("cl of two words", 400, "Content-Length: 5 5\r\n", "hello"),
        refused("cl fraction", 400, "Content-Length: 5.0\r\n", "hello"),
        refused("cl quoted", 400, "Content-Length: \"5\"\r\n", "hello"),
        refused("cl beyond 64 bits", 400, "Content-Length: 18446744073709551621\r\n", "hello"),
        refused("cl of 2^63", 413, "Content-Length: 9223372036854775808\r\n", "hello"),
        refused("cl behind a vertical tab", 400, "Content-Length:\u{b}5\r\n", "hello"),
        refused("cl, space before the colon", 400, "Content-Length : 5\r\n", "hello"),
        refused("cl folded", 400, "Content-Length:\r\n 5\r\n", "hello"),
        passed("cl with leading zeros", "Content-Length: 005\r\n", "hello", hello),
        refused("cl between tabs", 400, "Content-Length:\t5\t\r\n", "hello"),
        passed("cl beside Content_Length", "Content_Length: 90\r\nContent-Length: 5\r\n", "hello", hello),
        passed("cl of 0", "Content-Length: 0\r\n", "", "\n"),
        get(
            "body with GET",
            "GET /e HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello",
            "GET /e HTTP/1.1\n\n",
        ),
        case(
            "body shorter than cl",
            "POST /e HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\nhello".to_owned(),
            Verdict::Never,
        ),
    ]
}

pub(super) fn codings() -> Vec<Case> {
    let mut all = Vec::new();
    for (name, line) in [
        ("te xchunked", "Transfer-Encoding: xchunked"),
        ("te chunk", "Transfer-Encoding: chunk"),
        ("te identity", "Transfer-Encoding: identity"),
        ("te empty", "Transfer-Encoding: "),
        ("te chunked, identity", "Transfer-Encoding: chunked, identity"),
        ("te identity, chunked", "Transfer-Encoding: identity, chunked"),
        ("te gzip, chunked", "Transfer-Encoding: gzip, chunked"),
        ("te chunked, chunked", "Transfer-Encoding: chunked, chunked"),
        ("te chunked with a comma", "Transfer-Encoding: ,chunked"),
        ("te chunked with a parameter", "Transfer-Encoding: chunked;q=1"),
        ("te quoted", "Transfer-Encoding: \"chunked\""),
        ("te in single quotes", "Transfer-Encoding: 'chunked'"),
        ("te twice", "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked"),
        ("te chunked and identity", "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity"),
        ("te identity and chunked", "Transfer-Encoding: identity\r\nTransfer-Encoding: chunked"),
        ("te folded", "Transfer-Encoding:\r\n chunked"),
        ("te with its colon folded", "Transfer-Encoding\r\n : chunked"),
        ("te behind a bare LF", "X: x\nTransfer-Encoding: chunked"),
        ("te behind a bare CR", "X: x\rTransfer-Encoding: chunked"),
        ("te behind LF CR", "X: x\n\rTransfer-Encoding: chunked"),
        ("te with a NUL in its name", "Transfer-Encodi\0ng: chunked"),
        ("te with a NUL in its value", "Transfer-Encoding: chun\0ked"),
        ("te with a wide letter", "Transfer-Encoding: chun\u{212a}ed"),
    ] {
        all.push(refused(name, 0, &format!("{line}\r\n"), CHUNKS));
    }
    // Bytes around name and value; only blanks around the value are harmless.
    for byte in [0x01, 0x04, 0x08, 0x09, 0x0a, 0x0b, 0x0c, 0x0d, 0x1f, 0x20, 0x2f, 0x7f, 0xa0, 0xff_u8] {
        let char = char::from(byte);
        for (place, line) in [
            ("before the name", format!("{char}Transfer-Encoding: chunked\r\n")),
            ("behind the name", format!("Transfer-Encoding{char}: chunked\r\n")),
            ("before the value", format!("Transfer-Encoding:{char}chunked\r\n")),
            ("behind the value", format!("Transfer-Encoding: chunked{char}\r\n")),
        ] {
            let name = format!("te, byte {byte:02x} {place}");
            all.push(match (byte, place) {
                (0x20, "before the value" | "behind the value") => passed(&name, &line, CHUNKS, "\nhello"),
                _ => refused(&name, 0, &line, CHUNKS),
            });
        }
    }
    all.push(passed("te in capitals", "TRANSFER-ENCODING: CHUNKED\r\n", CHUNKS, "\nhello"));
    all.push(passed(
        "te beside Transfer_Encoding",
        "Transfer_Encoding: chunked\r\nContent-Length: 5\r\n",
        "hello",
        "\nhello",
    ));
    let old = format!("POST /e HTTP/1.0\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n{CHUNKS}");
    all.push(head("te in HTTP/1.0", 400, &old));
    all
}

pub(super) fn chunks() -> Vec<Case> {
    let mut all = Vec::new();
    let coded = "Transfer-Encoding: chunked\r\n";
    for (name, body) in [
        ("chunk size 0x5", "0x5\r\nhello\r\n0\r\n\r\n"),
        ("chunk size +5", "+5\r\nhello\r\n0\r\n\r\n"),
        ("chunk size -5", "-5\r\nhello\r\n0\r\n\r\n"),
        ("chunk size 5_", "5_\r\nhello\r\n0\r\n\r\n"),
        ("chunk size behind a blank", " 5\r\nhello\r\n0\r\n\r\n"),
        ("chunk size of two words", "5 5\r\nhello\r\n0\r\n\r\n"),
        ("chunk size of 17 digits", "10000000000000005\r\nhello\r\n0\r\n\r\n"),
        ("chunk size not a number", "g\r\nhello\r\n0\r\n\r\n"),
        ("chunk size empty", "\r\nhello\r\n0\r\n\r\n"),
        ("chunk size only an extension", ";a=b\r\nhello\r\n0\r\n\r\n"),
        ("chunk size ended by a bare LF", "5\nhello\r\n0\r\n\r\n"),
        ("chunk size ended by a bare CR", "5\rhello\r\n0\r\n\r\n"),
        ("chunk extension with a CR", "5;a=\rb\r\nhello\r\n0\r\n\r\n"),
        ("chunk extension with an LF", "5;a=b\nhello\r\n0\r\n\r\n"),
        ("chunk ended by a bare LF", "5\r\nhello\n0\r\n\r\n"),
        ("chunk ended by a bare CR", "5\r\nhello\r0\r\n\r\n"),
        ("chunk without an end", "5\r\nhello0\r\n\r\n"),
        ("chunk shorter than its size", "6\r\nhello\r\n0\r\n\r\n"),
        ("chunk longer than its size", "4\r\nhello\r\n0\r\n\r\n"),
        ("last chunk ended by bare LFs", "5\r\nhello\r\n0\n\n"),
        ("trailer that is none", "5\r\nhello\r\n0\r\nno colon\r\n\r\n"),
    ] {
        all.push(refused(name, 0, coded, body));
    }
    let huge = format!("5\r\nhello\r\n0\r\nX: {}\r\n\r\n", "a".repeat(80_000));
    all.push(refused("trailer of 80,000 bytes", 0, coded, &huge));
    let many = format!("5\r\nhello\r\n0\r\n{}\r\n", "X: a\r\n".repeat(300));
    all.push(refused("trailers, 300 of them", 0, coded, &many));
    let long = format!("5;{}\r\nhello\r\n0\r\n\r\n", "a".repeat(20_000));
    all.push(refused("chunk extension of 20,000 bytes", 0, coded, &long));
    for (name, body) in [
        ("chunks", "3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"),
        ("chunk size with leading zeros", "0005\r\nhello\r\n000\r\n\r\n"),
        ("chunk size before a blank", "5 \r\nhello\r\n0\r\n\r\n"),
        ("chunk extension", "5;a=b\r\nhello\r\n0;c\r\n\r\n"),
        ("chunk extension, quoted", "5;a=\"b;c\"\r\nhello\r\n0\r\n\r\n"),
        ("trailers are dropped", "5\r\nhello\r\n0\r\nX-Sum: 1\r\nContent-Length: 3\r\nHost: y\r\n\r\n"),
    ] {
        all.push(passed(name, coded, body, "\nhello"));
    }
    for (name, body) in [
        ("chunks without a last one", "5\r\nhello\r\n"),
        ("last chunk without an end", "5\r\nhello\r\n0\r\n"),
        ("chunk size of 16 digits", "ffffffffffffffff\r\nhello"),
    ] {
        let bytes = format!("POST /e HTTP/1.1\r\nHost: x\r\n{coded}\r\n{body}");
        all.push(case(name, bytes, Verdict::Never));
    }
    all
}
