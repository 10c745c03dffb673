//! The events of a stream, one by one, out of pieces of any size. Pure.

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Event<'a> {
    /// Its name, if it has one.
    pub(super) name: &'a str,
    pub(super) data: &'a str,
}

#[derive(Debug, Default)]
pub(super) struct Lines {
    held: Vec<u8>,
    name: String,
}

impl Lines {
    /// Bytes held of an incomplete line.
    pub(super) fn held(&self) -> usize {
        self.held.len()
    }

    /// Takes a piece and hands over each event that ends in it, until one is refused. llama-server puts the data of an
    /// event on one line.
    pub(super) fn feed<E>(
        &mut self,
        mut piece: &[u8],
        mut take: impl FnMut(Event<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        while let Some(end) = memchr::memchr(b'\n', piece) {
            let (line, rest) = piece.split_at(end);
            piece = &rest[1..];
            let own;
            let line = if self.held.is_empty() {
                line
            } else {
                self.held.extend_from_slice(line);
                own = std::mem::take(&mut self.held);
                &own
            };
            let line = String::from_utf8_lossy(line);
            let line = line.trim_end_matches('\r');
            if let Some(data) = line.strip_prefix("data:") {
                let name = std::mem::take(&mut self.name);
                take(Event { name: &name, data: data.trim_start() })?;
            } else if let Some(name) = line.strip_prefix("event:") {
                name.trim().clone_into(&mut self.name);
            }
        }
        self.held.extend_from_slice(piece);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_out_whole_however_the_stream_is_cut() {
        let stream = "event: a\ndata: {\"ü\":1}\n\n:\n\ndata: 2\r\n\r\nevent: b\ndata:3\n\ndata: [DONE]\n\n";
        for size in 1..stream.len() {
            let mut lines = Lines::default();
            let mut all = Vec::new();
            for piece in stream.as_bytes().chunks(size) {
                let taken = lines.feed(piece, |event| {
                    all.push(format!("{}={}", event.name, event.data));
                    Ok::<_, ()>(())
                });
                assert_eq!(taken, Ok(()));
            }
            assert_eq!(all, ["a={\"ü\":1}", "=2", "b=3", "=[DONE]"], "{size}");
            assert_eq!(lines.held(), 0);
        }
    }
}
