//! Iterates over the complete events of a server-sent event stream. Pure. [`crate::protocol::sse`] splits
//! the stream.

#[derive(Debug, PartialEq, Eq)]
pub(super) struct SseEvent<'a> {
    /// Event name; empty if the event has none.
    pub(super) name: &'a str,
    pub(super) data: &'a str,
}

/// Calls `take` for each event until it returns an error. llama-server writes the data of an event on one
/// line.
pub(super) fn for_each_event<E>(
    whole: &[u8],
    mut take: impl FnMut(SseEvent<'_>) -> Result<(), E>,
) -> Result<(), E> {
    let (text, mut name) = (String::from_utf8_lossy(whole), "");
    for line in text.lines() {
        if let Some(data) = line.strip_prefix("data:") {
            take(SseEvent { name: std::mem::take(&mut name), data: data.trim_start() })?;
        } else if let Some(said) = line.strip_prefix("event:") {
            name = said.trim();
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::protocol::sse::EventSplitter;

    #[test]
    fn events_come_out_whole_however_the_stream_is_cut() {
        let stream = "event: a\ndata: {\"ü\":1}\n\n:\n\ndata: 2\r\n\r\nevent: b\ndata:3\n\ndata: [DONE]\n\n";
        for size in 1..stream.len() {
            let mut cutter = EventSplitter::new(100);
            let mut all = Vec::new();
            for piece in stream.as_bytes().chunks(size) {
                let taken = for_each_event(&cutter.push(Bytes::copy_from_slice(piece)), |event| {
                    all.push(format!("{}={}", event.name, event.data));
                    Ok::<_, ()>(())
                });
                assert_eq!(taken, Ok(()));
            }
            assert_eq!(all, ["a={\"ü\":1}", "=2", "b=3", "=[DONE]"], "{size}");
            assert_eq!(cutter.finish(), "");
        }
    }
}
