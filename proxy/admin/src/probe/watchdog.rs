//! A watchdog that is fed only if every event loop has responded since it was last fed.
//!
//! Each round asks the acceptor, the gateway threads, the model tasks and the admin listener for an answer.
//! If all have answered, the round feeds the watchdog. The log names a silent loop before the manager ends
//! the program. After the end of a loop the next round asks again: a model may just have been removed.

use std::time::Duration;

use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

/// Each loop's name, with a receiver that resolves when the loop responds.
pub type LoopAnswers = Vec<(String, oneshot::Receiver<()>)>;

/// `limit`: time without feeding after which the manager ends the program, or probes fail. `meanwhile`: this
/// consequence in words, for the log.
pub async fn run_watchdog<Fed: Future<Output = ()>>(
    limit: Duration,
    meanwhile: &str,
    ask: impl Fn() -> LoopAnswers,
    feed: impl Fn() -> Fed,
    stop: CancellationToken,
) {
    stop.run_until_cancelled(run_rounds(limit, meanwhile, ask, feed)).await;
}

async fn run_rounds<Fed: Future<Output = ()>>(
    limit: Duration,
    meanwhile: &str,
    ask: impl Fn() -> LoopAnswers,
    feed: impl Fn() -> Fed,
) {
    loop {
        if all_responsive(ask(), limit / 2, meanwhile).await {
            feed().await;
        }
        // This pause leaves time to feed the watchdog even after two late rounds.
        tokio::time::sleep(limit / 4).await;
    }
}

/// Waits for all loops; returns false if a loop has ended. After `patience`, logs the first silent loop.
async fn all_responsive(asked: LoopAnswers, patience: Duration, meanwhile: &str) -> bool {
    let told = tokio::time::sleep(patience);
    tokio::pin!(told);
    let mut all = true;
    let mut silent = false;
    for (who, mut answer) in asked {
        let answered = tokio::select! {
            biased;
            answered = &mut answer => answered,
            () = &mut told, if !silent => {
                silent = true;
                tracing::error!(target: "watchdog", "{who} has not responded for {} s: \
                                                     {meanwhile}", patience.as_secs_f64());
                answer.await
            }
        };
        if answered.is_err() {
            tracing::warn!(target: "watchdog", "{who} has ended");
            all = false;
        }
    }
    if silent {
        tracing::warn!(target: "watchdog", "all loops are responsive again");
    }
    all
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::rc::Rc;

    use super::*;

    const LIMIT: Duration = Duration::from_millis(40);
    const LONG: Duration = Duration::from_secs(30);

    /// Two loops, of which the second answers only while it is not stuck.
    struct Two {
        stuck: Cell<bool>,
        dead: Cell<bool>,
        asked: Cell<u32>,
        held: RefCell<Vec<oneshot::Sender<()>>>,
    }

    impl Two {
        fn ask(&self) -> LoopAnswers {
            self.asked.set(self.asked.get() + 1);
            let mut all = Vec::new();
            for number in 0..2 {
                let (question, answer) = oneshot::channel();
                all.push((format!("number {number}"), answer));
                if number == 1 && self.dead.get() {
                    drop(question);
                } else if number == 1 && self.stuck.get() {
                    self.held.borrow_mut().push(question);
                } else {
                    question.send(()).unwrap();
                }
            }
            all
        }
    }

    #[tokio::test]
    async fn one_that_is_stuck_or_dead_is_enough_not_to_feed_it_and_it_is_fed_when_that_is_over() {
        let (stuck, dead, asked) = (Cell::new(false), Cell::new(false), Cell::new(0));
        let two = Rc::new(Two { stuck, dead, asked, held: RefCell::default() });
        let fed = Rc::new(Cell::new(0));
        let (asks, feeds) = (two.clone(), fed.clone());
        let watching = run_rounds(
            LIMIT,
            "it is told",
            move || asks.ask(),
            move || {
                feeds.set(feeds.get() + 1);
                std::future::ready(())
            },
        );
        tokio::pin!(watching);
        // Runs the watchdog until the condition holds.
        let mut until = async |what: &str, so: &dyn Fn() -> bool| {
            let waits = async {
                while !so() {
                    tokio::time::sleep(LIMIT / 10).await;
                }
            };
            tokio::select! {
                () = &mut watching => panic!("it watches for ever"),
                waited = tokio::time::timeout(LONG, waits) => waited.expect(what),
            }
        };
        until("it is fed again and again", &|| fed.get() >= 5).await;
        two.stuck.set(true);
        until("one is stuck", &|| !two.held.borrow().is_empty()).await;
        let (before, asked, since) = (fed.get(), two.asked.get(), tokio::time::Instant::now());
        until("ten times the limit pass", &|| since.elapsed() > LIMIT * 10).await;
        assert_eq!(fed.get(), before, "one is stuck");
        assert_eq!((two.asked.get(), two.held.borrow().len()), (asked, 1), "and is asked once");
        two.stuck.set(false);
        two.held.borrow_mut().drain(..).for_each(|question| question.send(()).unwrap());
        until("it turns again", &|| fed.get() >= before + 5).await;
        two.dead.set(true);
        let asked = two.asked.get();
        until("the dead one is asked", &|| two.asked.get() > asked).await;
        let (before, asked) = (fed.get(), two.asked.get());
        until("it is asked again and again", &|| two.asked.get() > asked + 5).await;
        assert_eq!(fed.get(), before, "one is gone");
        two.dead.set(false);
        until("there is another one in its place", &|| fed.get() > before).await;
    }
}
