//! Reads a child's output line by line, within limits.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::net::unix::pipe;
use tokio::time::{Duration, Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use super::flood::FloodGate;

/// Number of bytes read at a time. A pipe holds 64 KiB; smaller pieces only cost more calls.
const CHUNK_BYTES: usize = 8 * 1024;
/// Maximum number of bytes read from one stream per [`SLICE_TIME`]: 16 MB a second. A child that writes
/// more has to wait, so that other models do not have to.
const SLICE_BYTES: usize = 800 * 1024;
const SLICE_TIME: Duration = Duration::from_millis(50);

/// Reads a stream until it ends or `over` is cancelled, because another instance goes on reading. Calls
/// `each` with each line, and adds the number of bytes to `said`. At the cancellation, bytes after the last
/// line end count as a line.
///
/// A line ends with LF, CR LF or CR (progress bars). Bytes beyond `longest` and blank lines are dropped,
/// and invalid UTF-8 is replaced. Repeated lines are counted instead of logged, and a flood is limited
/// ([`FloodGate`]).
pub(crate) async fn follow_lines(
    from: Arc<pipe::Receiver>,
    longest: usize,
    over: CancellationToken,
    said: &AtomicU64,
    mut each: impl FnMut(String),
) {
    let mut chunk = vec![0; CHUNK_BYTES];
    let mut line = Vec::new();
    let mut gate = FloodGate::new(Instant::now());
    let (mut slice, mut of_slice) = (Instant::now(), 0);
    loop {
        let due = gate.next_notice();
        tokio::select! {
            biased;
            () = over.cancelled() => break,
            () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                gate.write_notices(Instant::now(), &mut each);
                continue;
            }
            ready = from.readable() => if ready.is_err() { break },
        }
        match from.try_read(&mut chunk) {
            Ok(0) => break,
            Ok(count) => {
                said.fetch_add(count as u64, Ordering::Relaxed);
                let now = Instant::now();
                take_lines(&mut line, &chunk[..count], longest, &mut |text| {
                    gate.take_line(text, now, &mut each);
                });
                if now.saturating_duration_since(slice) >= SLICE_TIME {
                    (slice, of_slice) = (now, 0);
                }
                of_slice += count;
                if of_slice >= SLICE_BYTES {
                    tokio::select! {
                        () = over.cancelled() => break,
                        () = sleep_until(slice + SLICE_TIME) => {}
                    }
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                tracing::debug!(%error, "cannot read a child's output");
                break;
            }
        }
    }
    let now = Instant::now();
    finish_line(&mut line, &mut |text| gate.take_line(text, now, &mut each));
    gate.finish(now, &mut each);
}

fn take_lines(line: &mut Vec<u8>, mut rest: &[u8], longest: usize, each: &mut impl FnMut(&[u8])) {
    while let Some(end) = rest.iter().position(|byte| matches!(byte, b'\n' | b'\r')) {
        push_bytes(line, &rest[..end], longest);
        finish_line(line, each);
        rest = &rest[end + 1..];
    }
    push_bytes(line, rest, longest);
}

fn push_bytes(line: &mut Vec<u8>, bytes: &[u8], longest: usize) {
    let room = longest.saturating_sub(line.len());
    line.extend_from_slice(&bytes[..bytes.len().min(room)]);
}

fn finish_line(line: &mut Vec<u8>, each: &mut impl FnMut(&[u8])) {
    let text = line.trim_ascii_end();
    if !text.is_empty() {
        each(text);
    }
    line.clear();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[expect(clippy::disallowed_methods, reason = "tests stop where the system has no thread to give")]
    async fn lines(text: &[u8], longest: usize) -> Vec<String> {
        let mut lines = Vec::new();
        let (reader, mut writer) = io::pipe().unwrap();
        let reader = Arc::new(pipe::Receiver::from_owned_fd(reader.into()).unwrap());
        let text = text.to_vec();
        let writing = tokio::task::spawn_blocking(move || io::Write::write_all(&mut writer, &text));
        follow_lines(reader, longest, CancellationToken::new(), &AtomicU64::new(0), |line| lines.push(line))
            .await;
        writing.await.unwrap().unwrap();
        lines
    }

    #[tokio::test]
    async fn lines_end_with_lf_crlf_or_cr_and_the_last_one_with_the_stream() {
        assert_eq!(lines(b"a\nb\r\n\n 10%\r 20%\rend", 99).await, ["a", "b", " 10%", " 20%", "end"]);
    }

    #[tokio::test]
    async fn a_flood_is_folded_and_all_of_it_is_read() {
        let text = "the same\n".repeat(500_000) + "the end";
        let lines = lines(text.as_bytes(), 99).await;
        assert!(lines.len() < 20, "{}", lines.len());
        assert_eq!(lines.last().unwrap(), "the end");
    }

    #[tokio::test]
    async fn long_lines_are_cut_and_dirty_bytes_replaced() {
        let mut text = vec![b'x'; 100_000];
        text.extend_from_slice(b"\nshort \xff\n");
        assert_eq!(lines(&text, 10).await, ["xxxxxxxxxx", "short \u{fffd}"]);
    }
}
