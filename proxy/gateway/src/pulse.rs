//! Liveness check of the data plane: sends a question to its acceptor and to each of its threads. A stuck
//! event loop does not answer.
//!
//! The check does not keep the gateway alive: once the gateway has ended, no answer comes.

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;

use crate::workers::WorkerProbe;

/// Question to an event loop: a sender on which the loop answers.
pub(crate) type PulseQuestion = oneshot::Sender<()>;

/// Checks whether the loops of the data plane respond. Cheap to clone.
#[derive(Clone, Debug)]
pub struct GatewayPulse {
    acceptor: UnboundedSender<PulseQuestion>,
    workers: Vec<WorkerProbe>,
}

impl GatewayPulse {
    /// Creates the check for these threads. The acceptor must answer the questions from the returned
    /// receiver.
    pub(crate) fn new(workers: Vec<WorkerProbe>) -> (Self, UnboundedReceiver<PulseQuestion>) {
        let (acceptor, asked) = unbounded_channel();
        (Self { acceptor, workers }, asked)
    }

    /// Sends a question to all loops. Returns their names, and receivers that resolve once the loop
    /// answers, or fail if the loop has ended.
    pub fn ask(&self) -> Vec<(String, oneshot::Receiver<()>)> {
        let (question, answer) = oneshot::channel();
        // If the acceptor has ended, the question is dropped, so that its receiver fails.
        drop(self.acceptor.send(question));
        let threads = self.workers.iter().enumerate().map(|(number, worker)| {
            let (question, answer) = oneshot::channel();
            worker.ask(question);
            (format!("the gateway's thread {number}"), answer)
        });
        std::iter::once(("the acceptor of connections".to_owned(), answer)).chain(threads).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;
    use crate::workers::WorkerThreads;

    const LONG: Duration = Duration::from_secs(20);

    #[tokio::test]
    async fn a_thread_that_is_stuck_gives_no_word_until_it_turns_again_and_none_of_it_keeps_the_threads() {
        let workers = WorkerThreads::start(2).unwrap();
        let (pulse, mut asked) = GatewayPulse::new(workers.probes());
        let (release, held) = channel::<()>();
        // The first of two idle threads: number 0.
        workers.run_job(move |_load| assert!(held.recv_timeout(LONG).is_ok()));
        let mut answers = pulse.ask();
        assert_eq!(answers.len(), 3, "{answers:?}");
        asked.recv().await.unwrap().send(()).unwrap();
        for number in [0, 2] {
            let (who, answer) = &mut answers[number];
            tokio::time::timeout(LONG, answer).await.expect(who).expect(who);
        }
        let (who, stuck) = &mut answers[1];
        assert_eq!(who, "the gateway's thread 0");
        assert!(stuck.try_recv().is_err(), "it cannot have answered");
        release.send(()).unwrap();
        tokio::time::timeout(LONG, stuck).await.unwrap().unwrap();
        drop((workers, asked));
        for (who, answer) in pulse.ask() {
            assert!(tokio::time::timeout(LONG, answer).await.expect(&who).is_err(), "{who}");
        }
    }
}
