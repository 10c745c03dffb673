//! Answers that no HTTP library would write, as raw bytes.

use crate::script::What;

/// Returns the bytes of a dirty fault, `None` for other faults. `mid_stream`: a chunked head was already
/// sent.
pub(crate) fn bytes(what: What, mid_stream: bool) -> Option<Vec<u8>> {
    let ok = "HTTP/1.1 200 OK\r\nServer: llama.cpp\r\nContent-Type: application/json\r\n";
    let text = match what {
        What::BadStatusLine => "ICY 200 OK\r\nContent-Length: 2\r\n\r\n{}".to_owned(),
        What::TwoLengths => format!("{ok}Content-Length: 2\r\nContent-Length: 5\r\n\r\n{{}}"),
        What::LengthAndChunked => {
            format!("{ok}Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{{}}\r\n0\r\n\r\n")
        }
        What::CutHead => "HTTP/1.1 200 OK\r\nContent-Ty".to_owned(),
        What::ShortBody => format!("{ok}Content-Length: 100\r\n\r\n{{\"cut\":"),
        What::CutChunk if mid_stream => "40\r\ndata: {\"choices\":[{\"ind".to_owned(),
        What::CutChunk => format!("{ok}Transfer-Encoding: chunked\r\n\r\n40\r\n{{\"cut\":"),
        What::GarbageAfter if mid_stream => "0\r\n\r\nGARBAGE \u{1}\u{2} AFTER THE END\r\n\r\n".to_owned(),
        What::GarbageAfter => format!("{ok}Content-Length: 2\r\n\r\n{{}}GARBAGE AFTER THE END\r\n\r\n"),
        What::HugeHead => format!("{ok}X-Huge: {}\r\nContent-Length: 2\r\n\r\n{{}}", "a".repeat(300 * 1024)),
        What::Nothing
        | What::Crash
        | What::Hang
        | What::Poison
        | What::Babble
        | What::Mute
        | What::Silence
        | What::Nullify
        | What::Alter
        | What::Wedge
        | What::Stall
        | What::Close
        | What::Error
        | What::Refuse => {
            return None;
        }
    };
    Some(text.into_bytes())
}
