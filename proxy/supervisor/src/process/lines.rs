//! A child's output, line by line: bounded, whatever the child writes.

use std::io;
use std::sync::Arc;

use tokio::net::unix::pipe;
use tokio_util::sync::CancellationToken;

/// Bytes read at a time. A pipe holds 64 KiB; smaller pieces only cost more calls.
const CHUNK: usize = 8 * 1024;

/// Calls `each` with every line until the end of the stream, or until somebody else reads on from there: then this is `over`,
/// and what was read by then is a line.
///
/// A line ends with LF, CR LF or CR (progress bars). Bytes beyond `longest` are left out, bytes that are not UTF-8 are
/// replaced, blank lines are dropped.
pub(crate) async fn follow(
    from: Arc<pipe::Receiver>,
    longest: usize,
    over: CancellationToken,
    mut each: impl FnMut(String),
) {
    let mut chunk = vec![0; CHUNK];
    let mut line = Vec::new();
    loop {
        tokio::select! {
            biased;
            () = over.cancelled() => break,
            ready = from.readable() => if ready.is_err() { break },
        }
        match from.try_read(&mut chunk) {
            Ok(0) => break,
            Ok(count) => take(&mut line, &chunk[..count], longest, &mut each),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                tracing::debug!(%error, "cannot read a child's output");
                break;
            }
        }
    }
    finish(&mut line, &mut each);
}

fn take(line: &mut Vec<u8>, mut rest: &[u8], longest: usize, each: &mut impl FnMut(String)) {
    while let Some(end) = rest.iter().position(|byte| matches!(byte, b'\n' | b'\r')) {
        push(line, &rest[..end], longest);
        finish(line, each);
        rest = &rest[end + 1..];
    }
    push(line, rest, longest);
}

fn push(line: &mut Vec<u8>, bytes: &[u8], longest: usize) {
    let room = longest.saturating_sub(line.len());
    line.extend_from_slice(&bytes[..bytes.len().min(room)]);
}

fn finish(line: &mut Vec<u8>, each: &mut impl FnMut(String)) {
    if !line.trim_ascii().is_empty() {
        each(String::from_utf8_lossy(line).trim_end().to_owned());
    }
    line.clear();
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn lines(text: &[u8], longest: usize) -> Vec<String> {
        let mut lines = Vec::new();
        let (reader, mut writer) = io::pipe().unwrap();
        let reader = Arc::new(pipe::Receiver::from_owned_fd(reader.into()).unwrap());
        let text = text.to_vec();
        let writing = tokio::task::spawn_blocking(move || io::Write::write_all(&mut writer, &text));
        follow(reader, longest, CancellationToken::new(), |line| lines.push(line)).await;
        writing.await.unwrap().unwrap();
        lines
    }

    #[tokio::test]
    async fn lines_end_with_lf_crlf_or_cr_and_the_last_one_with_the_stream() {
        assert_eq!(lines(b"a\nb\r\n\n 10%\r 20%\rend", 99).await, ["a", "b", " 10%", " 20%", "end"]);
    }

    #[tokio::test]
    async fn long_lines_are_cut_and_dirty_bytes_replaced() {
        let mut text = vec![b'x'; 100_000];
        text.extend_from_slice(b"\nshort \xff\n");
        assert_eq!(lines(&text, 10).await, ["xxxxxxxxxx", "short \u{fffd}"]);
    }
}
