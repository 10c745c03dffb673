//! Logs the lines of a llama-server exactly as it wrote them, in drop-in mode, so that programs that read
//! llama-server's log can read llama-warden's. All other lines are formatted as usual.

use std::fmt;

use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::FmtContext;
use tracing_subscriber::fmt::format::{FormatEvent, FormatFields, Writer};
use tracing_subscriber::registry::LookupSpan;

/// Writes the lines of child processes unchanged, and formats all other lines with `F`.
pub(crate) struct ChildLineFormat<F>(pub(crate) F);

impl<S, N, F> FormatEvent<S, N> for ChildLineFormat<F>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        if event.metadata().target() != "llama_server" {
            return self.0.format_event(context, writer, event);
        }
        let mut line = MessageVisitor(Ok(()), writer.by_ref());
        event.record(&mut line);
        line.0?;
        writeln!(writer)
    }
}

struct MessageVisitor<'a>(fmt::Result, Writer<'a>);

impl Visit for MessageVisitor<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            self.0 = write!(self.1, "{value:?}");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Kept(Arc<Mutex<Vec<u8>>>);

    impl Write for Kept {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn the_childs_lines_are_as_it_wrote_them_and_ours_are_as_always() {
        let kept = Kept::default();
        let writer = kept.clone();
        let format = ChildLineFormat(tracing_subscriber::fmt::format().without_time());
        let subscriber = tracing_subscriber::fmt()
            .with_ansi(false)
            .event_format(format)
            .with_writer(move || writer.clone())
            .finish();
        tracing::subscriber::with_default(subscriber, || {
            tracing::info!(target: "llama_server", model = "m", "0.1 I {} \"model\" loaded", "srv");
            tracing::info!(target: "event", model = "m", "ready");
        });
        let text = String::from_utf8(kept.0.lock().unwrap().clone()).unwrap();
        assert_eq!(text, "0.1 I srv \"model\" loaded\n INFO event: ready model=\"m\"\n");
    }
}
