//! Handles each output line of a process: logs it and notifies the model's task of lines that matter.
//!
//! A child may write faster than the task reads. Few messages of one process may wait, so that the inbox
//! stays bounded.

use std::sync::Arc;

use tokio::sync::Semaphore;
use warden_policies::GenerationId;

use super::mailbox::Outbox;
use super::{Message, Report};
use crate::memory::declared_memory;
use crate::process::{Sink, discreet, failure};
use crate::spec::Command;
use crate::view::log::LogRing;

/// Memory lines that may wait for the model's task. A start writes some thirty.
const SAID_PENDING: usize = 256;
/// One alarm is enough: the task looks for the line itself.
const ALARMS_PENDING: usize = 1;

/// Builds the line handler of one generation.
pub(super) fn line_sink(
    generation: GenerationId,
    command: &Command,
    logs: Arc<LogRing>,
    outbox: Outbox,
) -> Sink {
    let given = discreet::known(command);
    let said = Arc::new(Semaphore::new(SAID_PENDING));
    let alarms = Arc::new(Semaphore::new(ALARMS_PENDING));
    Arc::new(move |stream, text| {
        if declared_memory::is_telling(&text)
            && let Ok(pending) = Arc::clone(&said).try_acquire_owned()
        {
            outbox.send(Message::Report(generation, Report::Said(text.clone(), pending)));
        }
        let is_crash = failure::is_crash(&text);
        logs.push(generation, stream, given.hide(text));
        // Send after the line is logged: the task looks for it there.
        if is_crash && let Ok(pending) = Arc::clone(&alarms).try_acquire_owned() {
            outbox.send(Message::Report(generation, Report::Alarmed(pending)));
        }
    })
}

#[cfg(test)]
mod tests {
    use warden_policies::ModelName;

    use super::*;
    use crate::model::mailbox::{Inbox, mailbox};
    use crate::view::log::Stream;

    fn command() -> Command {
        let directory = None;
        Command { directory, ..Command::bare("/bin/true".into()) }
    }

    #[test]
    fn however_much_a_child_says_its_inbox_stays_small() {
        let logs = Arc::new(LogRing::new(ModelName::new("m"), 10));
        let (outbox, mut inbox) = mailbox();
        let sink = line_sink(GenerationId(1), &command(), logs, outbox);
        for n in 0..100_000 {
            sink(Stream::Stderr, format!("CUDA error: number {n}"));
            sink(Stream::Stderr, format!("load_model: initializing slots, n_slots = {n}"));
        }
        let alarms = |inbox: &mut Inbox| {
            let all = std::iter::from_fn(|| inbox.try_recv());
            all.filter(|message| matches!(message, Message::Report(_, Report::Alarmed(_)))).count()
        };
        assert!(inbox.len() <= SAID_PENDING + ALARMS_PENDING, "{}", inbox.len());
        assert_eq!(alarms(&mut inbox), 1);
        sink(Stream::Stderr, "CUDA error: the next one".to_owned());
        assert_eq!(alarms(&mut inbox), 1, "once the last one is taken");
    }
}
