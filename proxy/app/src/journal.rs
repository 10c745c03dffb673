//! Writes llama-warden's log to the systemd journal. Each event is an entry with its own fields (`MODEL=`,
//! `GENERATION=`, …), so that `journalctl MODEL=chat` and `journalctl -p warning` find it.
//!
//! ```text
//!   event --a line--> [bounded queue of `log_writer`] --> its thread: a datagram for each line --> journald
//!                                                                       | cannot be sent
//!                                                                       └─> standard error, `<PRIORITY>text`
//! ```
//!
//! Only the log's thread writes to the journal, so that no other thread waits for journald. In the queue an
//! entry is one line: its fields with separators between them, the message last. The format of the
//! datagrams: <https://systemd.io/JOURNAL_NATIVE_PROTOCOL/>.

use std::ffi::OsStr;
use std::fmt::{self, Write as _};
use std::io::{self, Write};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::FmtContext;
use tracing_subscriber::fmt::format::{FormatEvent, FormatFields, Writer};
use tracing_subscriber::registry::LookupSpan;

const JOURNALD_SOCKET: &str = "/run/systemd/journal/socket";
/// Separator of fields in a line. [`LINE_SEPARATOR`] stands for a line end within a value.
const FIELD_SEPARATOR: char = '\u{1f}';
const LINE_SEPARATOR: char = '\u{1e}';
/// Most bytes of one value. A datagram has to fit into the socket's buffer, 208 KiB by default.
const MAX_VALUE_BYTES: usize = 32 * 1024;
/// Field names that journald interprets, or that this module writes itself.
const RESERVED_FIELDS: [&str; 6] = ["MESSAGE", "MESSAGE_ID", "PRIORITY", "TARGET", "ERRNO", "DOCUMENTATION"];

#[derive(Debug)]
pub(crate) struct JournalWriter {
    from: UnixDatagram,
    to: PathBuf,
}

impl JournalWriter {
    /// Opens journald's socket, if standard error is connected to the journal. `stream`: the variable
    /// `JOURNAL_STREAM`, in which a service manager identifies the file connected to standard error.
    pub(crate) fn from_stderr(stream: Option<&OsStr>) -> Option<Self> {
        let own = rustix::fs::fstat(io::stderr()).ok()?;
        let is_own = stream?.to_str()? == format!("{}:{}", own.st_dev, own.st_ino);
        let journal = Self::with_path(Path::new(JOURNALD_SOCKET)).ok()?;
        (is_own && journal.to.exists()).then_some(journal)
    }

    fn with_path(path: &Path) -> io::Result<Self> {
        Ok(Self { from: UnixDatagram::unbound()?, to: path.to_owned() })
    }
}

impl Write for JournalWriter {
    /// Writes one line per call.
    fn write(&mut self, lines: &[u8]) -> io::Result<usize> {
        let end = lines.iter().position(|&byte| byte == b'\n');
        let line = String::from_utf8_lossy(&lines[..end.unwrap_or(lines.len())]);
        if self.from.send_to(&make_datagram(&line), &self.to).is_err() {
            // journald is unavailable now, but another program may read standard error.
            let (priority, message) = plain_line(&line);
            writeln!(io::stderr().lock(), "<{priority}>{message}")?;
        }
        Ok(end.map_or(lines.len(), |end| end + 1))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn make_datagram(line: &str) -> Vec<u8> {
    let mut out = Vec::with_capacity(line.len() + 64);
    let fields = || line.split(FIELD_SEPARATOR).filter_map(|field| field.split_once('='));
    if !line.contains(FIELD_SEPARATOR) {
        // The log's queue itself wrote this line, which has no fields.
        put_field(&mut out, "PRIORITY", "4");
        put_field(&mut out, "MESSAGE", line);
        return out;
    }
    fields().for_each(|(name, value)| put_field(&mut out, name, value));
    out
}

fn put_field(out: &mut Vec<u8>, name: &str, value: &str) {
    out.extend_from_slice(name.as_bytes());
    if value.contains(LINE_SEPARATOR) {
        let value = value.replace(LINE_SEPARATOR, "\n");
        out.push(b'\n');
        out.extend_from_slice(&(value.len() as u64).to_le_bytes());
        out.extend_from_slice(value.as_bytes());
    } else {
        out.push(b'=');
        out.extend_from_slice(value.as_bytes());
    }
    out.push(b'\n');
}

fn plain_line(line: &str) -> (&str, String) {
    let value = |name: &str| {
        line.split(FIELD_SEPARATOR)
            .find_map(|field| field.split_once('=').filter(|(own, _)| *own == name))
            .map(|(_, value)| value)
    };
    (value("PRIORITY").unwrap_or("4"), value("MESSAGE").unwrap_or(line).replace(LINE_SEPARATOR, " "))
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct JournalFormat;

impl<S, N> FormatEvent<S, N> for JournalFormat
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        _: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let facts = event.metadata();
        let priority = match *facts.level() {
            Level::ERROR => 3,
            Level::WARN => 4,
            Level::INFO => 6,
            _ => 7,
        };
        let mut fields = EventFields::default();
        event.record(&mut fields);
        let target = facts.target();
        write!(
            writer,
            "PRIORITY={priority}{FIELD_SEPARATOR}SYSLOG_IDENTIFIER=llama-warden{FIELD_SEPARATOR}"
        )?;
        write!(writer, "TARGET={target}{FIELD_SEPARATOR}")?;
        writer.write_str(&fields.named)?;
        // The message must be understandable without the fields, so append them as text.
        write!(writer, "MESSAGE={target}:")?;
        if !fields.message.is_empty() {
            write!(writer, " {}", fields.message)?;
        }
        writeln!(writer, "{}", fields.suffix)
    }
}

#[derive(Default)]
struct EventFields {
    message: String,
    named: String,
    /// The fields as text, to be appended to the message.
    suffix: String,
}

impl EventFields {
    fn add(&mut self, field: &Field, value: &str) {
        let value: String = value
            .chars()
            .scan(0, |bytes, char| {
                *bytes += char.len_utf8();
                (*bytes <= MAX_VALUE_BYTES).then_some(match char {
                    '\n' => LINE_SEPARATOR,
                    FIELD_SEPARATOR | LINE_SEPARATOR => ' ',
                    other => other,
                })
            })
            .collect();
        if field.name() == "message" {
            self.message = value;
            return;
        }
        let name: String = field
            .name()
            .chars()
            .map(|char| if char.is_ascii_alphanumeric() { char.to_ascii_uppercase() } else { '_' })
            .collect();
        if !name.starts_with('_') && !name.starts_with("SYSLOG_") && !RESERVED_FIELDS.contains(&name.as_str())
        {
            // Lines of child processes show a generation as `g7`; the journal's field is always a number.
            let value = if name == "GENERATION" { value.trim_start_matches('g') } else { &value };
            let _infallible = write!(self.named, "{name}={value}{FIELD_SEPARATOR}");
        }
        let _infallible = write!(self.suffix, " {}={value}", field.name());
    }
}

impl Visit for EventFields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.add(field, &format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, value);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Kept(Arc<Mutex<Vec<u8>>>);

    impl Write for Kept {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// The lines of the queue for these events.
    fn written(events: impl FnOnce()) -> Vec<u8> {
        let kept = Kept::default();
        let writer = kept.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_writer(move || writer.clone())
            .event_format(JournalFormat)
            .finish();
        tracing::subscriber::with_default(subscriber, events);
        kept.0.lock().unwrap().clone()
    }

    #[test]
    fn an_event_is_an_entry_with_its_fields_and_a_message_that_can_be_read_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        let journald = UnixDatagram::bind(&path).unwrap();
        let lines = written(|| {
            let model = Some("chat");
            tracing::warn!(target: "event", model, generation = 3, none = None::<u32>, "it leaks");
            tracing::error!(priority = 0, _pid = 1, message_id = "x", "two\nlines\u{1f}MODEL=other");
        });
        let mut journal = JournalWriter::with_path(&path).unwrap();
        journal.write_all(&lines).unwrap();
        journal.write_all(b"3 log lines were left out here\n").unwrap();
        let told = || {
            let mut bytes = [0; 512];
            let length = journald.recv(&mut bytes).unwrap();
            bytes[..length].escape_ascii().to_string().replace("\\n", "\n")
        };
        insta::assert_snapshot!([told(), told(), told()].join("--\n"));
        drop(journald);
        journal.write_all(&lines).unwrap();
        let line = String::from_utf8(lines).unwrap();
        assert_eq!(
            plain_line(line.lines().next().unwrap()),
            ("4", "event: it leaks model=chat generation=3".into())
        );
    }

    #[test]
    fn only_what_our_standard_error_was_connected_to_is_the_journal() {
        for stream in [None, Some("0:0"), Some(""), Some("nothing")] {
            assert!(JournalWriter::from_stderr(stream.map(OsStr::new)).is_none(), "{stream:?}");
        }
    }

    #[test]
    fn a_value_without_an_end_fits_into_a_datagram() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal");
        let journald = UnixDatagram::bind(&path).unwrap();
        let long = "ü".repeat(MAX_VALUE_BYTES);
        let lines = written(|| tracing::info!(%long, "{long}"));
        JournalWriter::with_path(&path).unwrap().write_all(&lines).unwrap();
        let mut bytes = vec![0; 8 * MAX_VALUE_BYTES];
        let length = journald.recv(&mut bytes).unwrap();
        assert!((2 * MAX_VALUE_BYTES..4 * MAX_VALUE_BYTES).contains(&length), "{length}");
    }
}
