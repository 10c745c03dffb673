//! Bytes of the answers, made once.

use std::sync::LazyLock;

const DIGITS: usize = 20;

/// Returns a whole answer with llama-server's head.
pub(crate) fn whole(status: &str, kind: &str, body: &str) -> Vec<u8> {
    let head = format!(
        "HTTP/1.1 {status}\r\nServer: llama.cpp\r\nKeep-Alive: timeout=5, max=100\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    (head + body).into_bytes()
}

/// Answer to a chat request, with about 610 bytes of JSON.
pub(crate) static CHAT: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let body = r#"{"choices":[{"finish_reason":"stop","index":0,"message":{"role":"assistant","content":"The quick brown fox jumps over the lazy dog, and the lazy dog lets it, because it is a warm day and there is nothing else to do."}}],"created":1790000000,"model":"mock","system_fingerprint":"b1-000000000","object":"chat.completion","usage":{"completion_tokens":32,"prompt_tokens":48,"total_tokens":80},"id":"chatcmpl-0123456789abcdefghijklmnopqrstuv","timings":{"cache_n":0,"prompt_n":48,"prompt_ms":12.5,"prompt_per_second":3840.0,"predicted_n":32,"predicted_ms":320.0,"predicted_per_second":100.0}}"#;
    whole("200 OK", "application/json; charset=utf-8", body)
});

pub(crate) const STREAM_HEAD: &[u8] = b"HTTP/1.1 200 OK\r\nServer: llama.cpp\r\nKeep-Alive: timeout=5, max=100\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n";

/// End of a stream: usage, end mark, last chunk.
pub(crate) static STREAM_END: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let usage = r#"data: {"choices":[],"created":1790000000,"id":"chatcmpl-0123456789abcdefghijklmnopqrstuv","model":"mock","object":"chat.completion.chunk","usage":{"completion_tokens":32,"prompt_tokens":48,"total_tokens":80},"timings":{"prompt_n":48,"prompt_ms":12.5,"predicted_n":32,"predicted_ms":320.0}}"#;
    let events = format!("{usage}\n\ndata: [DONE]\n\n");
    format!("{:x}\r\n{events}\r\n0\r\n\r\n", events.len()).into_bytes()
});

/// Event as a chunk, with room for the time of its write in nanoseconds: `"t":` and 20 digits.
static EVENT: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let event = format!(
        "data: {{\"choices\":[{{\"finish_reason\":null,\"index\":0,\"delta\":{{\"content\":\" word\"}}}}],\"created\":1790000000,\"id\":\"chatcmpl-0123456789abcdefghijklmnopqrstuv\",\"model\":\"mock\",\"system_fingerprint\":\"b1-000000000\",\"object\":\"chat.completion.chunk\",\"t\":\"{:020}\"}}\n\n",
        0
    );
    format!("{:x}\r\n{event}\r\n", event.len()).into_bytes()
});

pub(crate) fn event(into: &mut Vec<u8>, time: u64) {
    let start = into.len();
    into.extend_from_slice(&EVENT);
    // The digits precede the quote, the brace, two line feeds of the event, and the end of the chunk.
    let end = start + EVENT.len() - "\"}\n\n\r\n".len();
    let mut rest = time;
    for digit in into[end - DIGITS..end].iter_mut().rev() {
        *digit = b'0' + u8::try_from(rest % 10).unwrap_or_default();
        rest /= 10;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_have_the_size_that_they_should_have() {
        let head = memchr::memmem::find(&CHAT, b"\r\n\r\n").unwrap() + 4;
        assert!((560..=660).contains(&(CHAT.len() - head)), "{}", CHAT.len() - head);
        assert!((235..=275).contains(&EVENT.len()), "{}", EVENT.len());
    }

    #[test]
    fn an_event_tells_its_time_in_twenty_digits() {
        let mut bytes = Vec::new();
        event(&mut bytes, 12_345_678_901);
        assert!(bytes.ends_with(b"\"t\":\"00000000012345678901\"}\n\n\r\n"), "{}", bytes.escape_ascii());
    }
}
