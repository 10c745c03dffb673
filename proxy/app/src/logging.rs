//! Sets up llama-warden's log on standard error: text for people, JSON for programs, or entries of the
//! journal ([`crate::journal`]).
//!
//! Targets: `access` has one line per request, `event` one per event of the fleet, `llama_server` the
//! output of the child processes; all other lines have the name of their crate as the target.

use std::io;
use std::sync::OnceLock;
use std::time::Duration;

use warden_admin::log_writer::LogWriter;
use warden_config::log_filter::log_filter;
use warden_policies::defaults::Log;

use crate::child_lines::ChildLineFormat;
use crate::exit::CommandError;
use crate::journal::{JournalFormat, JournalWriter};

/// Time limit of the last flush; a reader that still reads needs less.
const FLUSH_LIMIT: Duration = Duration::from_secs(1);

static WRITER: OnceLock<LogWriter> = OnceLock::new();

/// Waits until the log is written, within a limit, because its reader may have stopped reading.
pub(crate) fn flush() {
    if let Some(writer) = WRITER.get() {
        writer.flush(FLUSH_LIMIT);
    }
}

pub(crate) fn shows_children() -> bool {
    tracing::enabled!(target: "llama_server", tracing::Level::INFO)
}

pub(crate) fn lost_lines() -> u64 {
    WRITER.get().map_or(0, LogWriter::lost)
}

/// `bare`: in drop-in mode, lines of the child are written unchanged. Only the first call has an effect.
pub(crate) fn start_logging(log: &Log, bare: bool) -> Result<(), CommandError> {
    let mut filter =
        log_filter(&log.level).map_err(|problem| CommandError::usage(format!("log.level: {problem}"), ""))?;
    if !log.children
        && let Ok(directive) = "llama_server=off".parse()
    {
        filter = filter.add_directive(directive);
    }
    let stream = std::env::var_os("JOURNAL_STREAM");
    let journal = if log.format == "text" { JournalWriter::from_stderr(stream.as_deref()) } else { None };
    let is_journal = journal.is_some();
    let out: Box<dyn io::Write + Send> =
        journal.map_or_else(|| Box::new(io::stderr()) as _, |journal| Box::new(journal) as _);
    // Failed writes cannot be reported anywhere else; only the metrics show them.
    let writer = LogWriter::start(log.buffered_lines, out, |_| ())
        .map_err(|problem| CommandError::failed(format!("cannot start the thread of the log: {problem}")))?;
    let builder =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(WRITER.get_or_init(|| writer).clone());
    let started = if is_journal {
        builder.event_format(JournalFormat).try_init()
    } else if log.format == "json" {
        builder.json().flatten_event(true).try_init()
    } else {
        use io::IsTerminal;
        let builder =
            builder.with_ansi(use_colours(io::stderr().is_terminal(), std::env::var_os("NO_COLOR")));
        if bare {
            builder.event_format(ChildLineFormat(tracing_subscriber::fmt::format())).try_init()
        } else {
            builder.try_init()
        }
    };
    // An error means that logging was started before; the earlier setup stays.
    drop(started);
    Ok(())
}

/// Colours lines on a terminal, unless `NO_COLOR` has a non-empty value (<https://no-color.org>).
fn use_colours(terminal: bool, no_color: Option<std::ffi::OsString>) -> bool {
    terminal && no_color.is_none_or(|value| value.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_are_for_terminals_of_people_who_want_them() {
        let value = |text: &str| Some(std::ffi::OsString::from(text));
        assert!(use_colours(true, None) && use_colours(true, value("")));
        assert!(
            !use_colours(true, value("1")) && !use_colours(true, value("0")) && !use_colours(false, None)
        );
    }

    #[test]
    fn a_level_or_a_filter_is_taken_and_anything_else_is_named() {
        assert!(log_filter("info").is_ok());
        assert!(log_filter("info,access=off,warden_gateway=debug").is_ok());
        let error = log_filter("info,access=loud").unwrap_err();
        assert!(error.contains("`info,access=loud`") && error.contains("`debug`"), "{error}");
    }
}
