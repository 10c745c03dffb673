//! Results of the second head reader for bytes, whole and in pieces.

use super::*;
use proptest::prelude::*;

/// Returns the results for `bytes`, fed in pieces of `size`.
fn seen(bytes: &[u8], size: usize) -> Vec<HeadResult> {
    let mut heads = RawHeadReader::new(8192);
    for piece in bytes.chunks(size) {
        heads.feed(piece);
    }
    heads.seen.into_iter().collect()
}

fn all_sizes(bytes: &[u8]) -> Vec<HeadResult> {
    let whole = seen(bytes, bytes.len().max(1));
    for size in [1, 2, 3, 7, 19] {
        assert_eq!(seen(bytes, size), whole, "pieces of {size} of {:?}", String::from_utf8_lossy(bytes));
    }
    whole
}

#[test]
fn requests_behind_each_other_are_each_noted_with_their_framing() {
    let bytes = b"\r\nGET /a HTTP/1.1\r\nHost: x\r\n\r\nPOST /b HTTP/1.1\r\nContent-Length: 5\r\n\r\nab\r\n\r\
                  POST /c HTTP/1.1\r\ntransfer-encoding:CHUNKED \r\n\r\n3 ;x=\"y\"\r\nG\r\n\r\n1\r\nz\r\n00\r\nA: b\r\n\r\n\
                  GET /d HTTP/1.0\r\n\r\n";
    let expected =
        [Ok(BodyFraming::None), Ok(BodyFraming::Length(5)), Ok(BodyFraming::Chunked), Ok(BodyFraming::None)]
            .to_vec();
    assert_eq!(all_sizes(bytes), expected);
}

#[test]
fn what_is_ambiguous_is_a_fault_and_nothing_behind_it_is_read() {
    for (head, fault) in [
        (
            "POST / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
            WireError::LengthAndCoding,
        ),
        (
            "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n",
            WireError::LengthAndCoding,
        ),
        ("POST / HTTP/1.1\r\nContent-Length: 5\r\ncontent-length: 5\r\n\r\n", WireError::TwoLengths),
        ("POST / HTTP/1.1\r\nContent-Length: 5, 5\r\n\r\n", WireError::Length),
        ("POST / HTTP/1.1\r\nContent-Length: +5\r\n\r\n", WireError::Length),
        ("POST / HTTP/1.1\r\nContent-Length: \r\n\r\n", WireError::Length),
        ("POST / HTTP/1.1\r\nContent-Length: 18446744073709551616\r\n\r\n", WireError::Length),
        ("POST / HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", WireError::Coding),
        ("POST / HTTP/1.1\r\nTransfer-Encoding: \u{b}chunked\r\n\r\n", WireError::Coding),
        (
            "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n",
            WireError::Coding,
        ),
        ("GET / HTTP/1.1\nHost: x\n\n", WireError::BareLf),
        ("GET / HTTP/1.1\r\nHost: x\n\r\n", WireError::BareLf),
        ("GET / HTTP/1.1\r\nHost: x\r\n\n", WireError::BareLf),
        ("GET /a#b HTTP/1.1\r\n\r\n", WireError::Target),
        ("GET /\u{fc} HTTP/1.1\r\n\r\n", WireError::Target),
        ("GET /a%00 HTTP/1.1\r\n\r\n", WireError::Target),
        ("GET /a%2 HTTP/1.1\r\n\r\n", WireError::Target),
        ("GET /a b HTTP/1.1\r\n\r\n", WireError::RequestLine),
        ("GET  / HTTP/1.1\r\n\r\n", WireError::RequestLine),
        ("PRI * HTTP/2.0\r\n\r\n", WireError::RequestLine),
        ("get / HTTP/1.1\r\n\r\n", WireError::Method),
        ("GET / HTTP/1.1\r\nNo colon\r\n\r\n", WireError::Field),
    ] {
        let followed = format!("{head}GET /next HTTP/1.1\r\n\r\n");
        assert_eq!(all_sizes(followed.as_bytes()), [Err(fault)].to_vec(), "{head:?}");
    }
}

#[test]
fn chunks_that_are_none_end_the_reading() {
    for body in
        ["0x3\r\nabc\r\n", "+3\r\nabc\r\n", "\r\n", "3\nabc\r\n", "3;a\nabc\r\n", "10000000000000000\r\n"]
    {
        let bytes = format!(
            "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n{body}0\r\n\r\nGET / HTTP/1.1\r\n\r\n"
        );
        assert_eq!(all_sizes(bytes.as_bytes()), [Ok(BodyFraming::Chunked)].to_vec(), "{body:?}");
    }
}

#[test]
fn a_head_that_was_not_seen_is_a_fault() {
    let mut heads = RawHeadReader::new(100);
    assert_eq!(heads.next_result(), Err(WireError::Unseen));
    heads.feed(&[b'a'; 101]);
    heads.feed(b" / HTTP/1.1\r\n\r\n");
    assert_eq!(heads.next_result(), Err(WireError::Unseen));
    assert!(heads.carry.is_empty());
}

proptest! {
    #[test]
    fn any_split_of_any_bytes_gives_the_same_notes(
        parts in proptest::collection::vec(
            "(GET / HTTP/1.1\r\n|POST /a HTTP/1.1\r\n|Host: x\r\n|Content-Length: 4\r\n|Transfer-Encoding: chunked\r\n|\r\n|\n|2\r\n|ab\r\n|0\r\n|;x){0,6}",
            0..6,
        ),
        cuts in proptest::collection::vec(1usize..40, 0..20),
    ) {
        let bytes = parts.concat().into_bytes();
        let whole = seen(&bytes, bytes.len().max(1));
        let mut heads = RawHeadReader::new(8192);
        let mut rest = &bytes[..];
        for cut in cuts {
            let now = cut.min(rest.len());
            heads.feed(&rest[..now]);
            rest = &rest[now..];
        }
        heads.feed(rest);
        prop_assert_eq!(Vec::from(heads.seen), whole);
    }
}
