//! Handles each output line of a process: logs the line, and notifies the model's task if it matters.
//!
//! A child may write faster than the task reads. The number of waiting messages per process is limited, so
//! that the inbox stays bounded.

use std::sync::Arc;

use tokio::sync::Semaphore;
use warden_policies::GenerationId;

use super::mailbox::TaskOutbox;
use super::{HelperReport, TaskMessage};
use crate::memory::declared_memory;
use crate::process::{LineSink, discreet, failure};
use crate::spec::ServerCommand;
use crate::view::log::LogRing;

/// Maximum number of lines about memory that wait for the model's task. A start writes some thirty such
/// lines.
const MAX_PENDING_LINES: usize = 256;
/// Maximum number of waiting crash reports. A single report is enough: the task then searches the log for
/// the line.
const MAX_PENDING_ALARMS: usize = 1;

/// Builds the line handler of one generation.
pub(super) fn make_line_sink(
    generation: GenerationId,
    command: &ServerCommand,
    logs: Arc<LogRing>,
    outbox: TaskOutbox,
) -> LineSink {
    let given = discreet::known_secrets(command);
    let said = Arc::new(Semaphore::new(MAX_PENDING_LINES));
    let alarms = Arc::new(Semaphore::new(MAX_PENDING_ALARMS));
    Arc::new(move |stream, text| {
        if declared_memory::is_memory_line(&text)
            && let Ok(pending) = Arc::clone(&said).try_acquire_owned()
        {
            outbox.send(TaskMessage::Report(generation, HelperReport::MemoryLine(text.clone(), pending)));
        }
        let is_crash = failure::is_crash(&text);
        logs.push(generation, stream, given.redact(text));
        // Send the report after logging the line, because the task searches the log for it.
        if is_crash && let Ok(pending) = Arc::clone(&alarms).try_acquire_owned() {
            outbox.send(TaskMessage::Report(generation, HelperReport::CrashLogged(pending)));
        }
    })
}

#[cfg(test)]
mod tests {
    use warden_policies::ModelName;

    use super::*;
    use crate::model::mailbox::{TaskInbox, mailbox};
    use crate::view::log::OutputStream;

    fn command() -> ServerCommand {
        let directory = None;
        ServerCommand { directory, ..ServerCommand::from_binary("/bin/true".into()) }
    }

    #[test]
    fn however_much_a_child_says_its_inbox_stays_small() {
        let logs = Arc::new(LogRing::new(ModelName::new("m"), 10));
        let (outbox, mut inbox) = mailbox();
        let sink = make_line_sink(GenerationId(1), &command(), logs, outbox);
        for n in 0..100_000 {
            sink(OutputStream::Stderr, format!("CUDA error: number {n}"));
            sink(OutputStream::Stderr, format!("load_model: initializing slots, n_slots = {n}"));
        }
        let alarms = |inbox: &mut TaskInbox| {
            let all = std::iter::from_fn(|| inbox.try_recv());
            all.filter(|message| matches!(message, TaskMessage::Report(_, HelperReport::CrashLogged(_))))
                .count()
        };
        assert!(inbox.len() <= MAX_PENDING_LINES + MAX_PENDING_ALARMS, "{}", inbox.len());
        assert_eq!(alarms(&mut inbox), 1);
        sink(OutputStream::Stderr, "CUDA error: the next one".to_owned());
        assert_eq!(alarms(&mut inbox), 1, "once the last one is taken");
    }
}
