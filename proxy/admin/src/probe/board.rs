//! The latest facts and metrics of an instance, which probes can read without waiting.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use warden_gateway::GatewayGauges;
use warden_policies::defaults::Probe;
use warden_policies::pool::agent::{AgentAnswer, agent_answer};
use warden_policies::pool::{InstanceFacts, UnreadyReason, readiness};

#[derive(Clone, Debug)]
struct DatedFacts {
    at: Instant,
    facts: Arc<InstanceFacts>,
}

#[derive(Clone, Debug)]
pub(super) struct MetricsText {
    /// The keeper makes no newer metrics before this time.
    pub(super) fresh_until: Instant,
    /// No client waits for newer metrics before this time.
    pub(super) good_until: Instant,
    pub(super) open_metrics: Bytes,
    pub(super) plain: Bytes,
}

/// Only the keeper writes this board.
#[derive(Debug)]
pub struct ProbeBoard {
    numbers: Probe,
    gauges: Arc<GatewayGauges>,
    seen: watch::Sender<Option<DatedFacts>>,
    /// Last time at which all event loops had responded; `None` while no task checks the loops.
    responsive_at: watch::Sender<Option<Instant>>,
    text: watch::Sender<Option<Arc<MetricsText>>>,
    /// Notified when a client wants fresh metrics.
    wanted: Notify,
}

impl ProbeBoard {
    /// Creates a board without facts.
    pub fn new(numbers: Probe, gauges: Arc<GatewayGauges>) -> Self {
        Self {
            numbers,
            gauges,
            seen: watch::Sender::default(),
            responsive_at: watch::Sender::default(),
            text: watch::Sender::default(),
            wanted: Notify::new(),
        }
    }

    pub(super) const fn numbers(&self) -> &Probe {
        &self.numbers
    }

    pub(super) fn set_facts(&self, facts: InstanceFacts) {
        // Each probe reads the current draining state, because a stored state would be outdated.
        let facts = InstanceFacts { draining: false, ..facts };
        self.seen.send_replace(Some(DatedFacts { at: Instant::now(), facts: Arc::new(facts) }));
    }

    /// `asked`: true if all loops have just responded, false once no task checks the loops (at a stop).
    pub(super) fn set_responsive(&self, asked: bool) {
        self.responsive_at.send_replace(asked.then(Instant::now));
    }

    /// Returns the longer of two times: since the keeper last read facts, and since all loops last responded.
    fn time_stuck(&self) -> Option<Duration> {
        let seen = self.seen.borrow().as_ref().map(|seen| seen.at.elapsed());
        seen.max(self.responsive_at.borrow().map(|at| at.elapsed()))
    }

    pub(super) fn set_metrics(&self, text: MetricsText) {
        self.text.send_replace(Some(Arc::new(text)));
    }

    pub(super) async fn wait_wanted(&self) {
        self.wanted.notified().await;
    }

    /// Returns `None` if the program is stuck. Releases the borrow at once, so that the keeper never waits.
    fn current_facts(&self) -> Option<Arc<InstanceFacts>> {
        self.check_alive().ok()?;
        self.seen.borrow().as_ref().map(|seen| seen.facts.clone())
    }

    fn is_draining(&self) -> bool {
        self.gauges.draining.load(Ordering::Relaxed)
    }

    /// Fails if the keeper or an event loop is stuck: the error is the time since it last responded.
    pub(super) fn check_alive(&self) -> Result<(), Duration> {
        match self.time_stuck() {
            Some(age) if age >= self.numbers.stuck => Err(age),
            // Before the first facts, the program is starting.
            _ => Ok(()),
        }
    }

    /// Fails with the reason if load balancers should send no requests to this instance.
    pub(super) fn check_ready(&self) -> Result<(), UnreadyReason> {
        if self.is_draining() {
            return Err(UnreadyReason::Draining);
        }
        self.current_facts().map_or(Err(UnreadyReason::Unknown), |facts| readiness(&facts))
    }

    pub(super) fn agent_line(&self) -> AgentAnswer {
        match self.current_facts() {
            _ if self.is_draining() => AgentAnswer::Drain,
            Some(facts) => agent_answer(&facts, self.numbers.horizon.as_secs_f64()),
            None => AgentAnswer::Down(UnreadyReason::Unknown),
        }
    }

    /// Returns recent metrics at once, so that frequent clients never wait. Otherwise waits for newer
    /// metrics, up to a configured limit.
    pub(super) async fn metrics(&self) -> Option<Arc<MetricsText>> {
        let mut texts = self.text.subscribe();
        let last = texts.borrow_and_update().clone();
        if last.as_ref().is_some_and(|text| Instant::now() < text.fresh_until) {
            return last;
        }
        self.wanted.notify_one();
        if last.as_ref().is_some_and(|text| Instant::now() < text.good_until) {
            return last;
        }
        let fresh = tokio::time::timeout(self.numbers.patience, texts.changed()).await;
        if fresh.is_ok() {
            return texts.borrow().clone();
        }
        // Return no old metrics of a stuck program, because they would look current.
        last.filter(|text| text.good_until.elapsed() < self.numbers.stuck)
    }
}

#[cfg(test)]
mod tests {
    use warden_policies::pool::BalancedModel;

    use super::*;

    fn board() -> ProbeBoard {
        ProbeBoard::new(warden_policies::defaults().probe.clone(), Arc::default())
    }

    fn serves() -> InstanceFacts {
        let model = BalancedModel { slots: 4, depth: 8, ..BalancedModel::default() };
        InstanceFacts { models: vec![model], ..InstanceFacts::default() }
    }

    #[tokio::test]
    async fn who_leaves_says_so_at_once_and_lives_on_and_who_is_not_looked_at_is_stuck() {
        let board = board();
        assert_eq!((board.check_alive(), board.check_ready()), (Ok(()), Err(UnreadyReason::Unknown)));
        board.set_facts(serves());
        assert_eq!(
            (board.check_ready(), board.agent_line().to_string()),
            (Ok(()), "ready up 100% maxconn:8".into())
        );
        board.gauges.draining.store(true, Ordering::Relaxed);
        assert_eq!(
            (board.check_ready(), board.agent_line()),
            (Err(UnreadyReason::Draining), AgentAnswer::Drain)
        );
        assert_eq!(board.check_alive(), Ok(()));
        // A cancelled drain shows at once, although the last facts were read during the drain.
        board.set_facts(InstanceFacts { draining: true, ..serves() });
        board.gauges.draining.store(false, Ordering::Relaxed);
        assert_eq!(
            (board.check_ready(), board.agent_line().to_string()),
            (Ok(()), "ready up 100% maxconn:8".into())
        );
        let at = Instant::now().checked_sub(board.numbers.stuck).unwrap();
        board.seen.send_replace(Some(DatedFacts { at, facts: Arc::new(serves()) }));
        assert!(board.check_alive().is_err());
        assert_eq!(
            (board.check_ready(), board.agent_line()),
            (Err(UnreadyReason::Unknown), AgentAnswer::Down(UnreadyReason::Unknown))
        );
        board.set_facts(serves());
        assert_eq!((board.check_alive(), board.check_ready()), (Ok(()), Ok(())));
        // The keeper runs, but a loop is stuck.
        board.set_responsive(true);
        assert_eq!((board.check_alive(), board.check_ready()), (Ok(()), Ok(())));
        board.responsive_at.send_replace(Some(at));
        assert!(board.check_alive().is_err());
        assert_eq!(
            (board.check_ready(), board.agent_line()),
            (Err(UnreadyReason::Unknown), AgentAnswer::Down(UnreadyReason::Unknown))
        );
        // Loops that end at a stop do not count as stuck.
        board.set_responsive(false);
        assert_eq!((board.check_alive(), board.check_ready()), (Ok(()), Ok(())));
    }

    #[tokio::test]
    async fn metrics_are_made_when_wanted_and_shared_while_they_are_fresh() {
        let numbers = Probe { patience: Duration::from_millis(1), ..board().numbers };
        let hasty = ProbeBoard::new(numbers, Arc::default());
        assert!(hasty.metrics().await.is_none(), "nobody makes any");
        hasty.wait_wanted().await;
        let text = |words: &'static str, fresh: u64, good: u64| MetricsText {
            fresh_until: Instant::now() + Duration::from_secs(fresh),
            good_until: Instant::now() + Duration::from_secs(good),
            open_metrics: words.into(),
            plain: words.into(),
        };
        hasty.set_metrics(text("one", 0, 0));
        assert_eq!(&hasty.metrics().await.unwrap().plain[..], b"one", "the last ones, where none come");
        let long_ago = Instant::now().checked_sub(hasty.numbers.stuck).unwrap();
        hasty.set_metrics(MetricsText { fresh_until: long_ago, good_until: long_ago, ..text("dead", 0, 0) });
        assert!(hasty.metrics().await.is_none(), "and none where nothing moves");
        let board = board();
        board.set_metrics(text("two", 3600, 3600));
        for _ in 0..3 {
            assert_eq!(&board.metrics().await.unwrap().plain[..], b"two");
        }
        board.set_metrics(text("good", 0, 3600));
        assert_eq!(&board.metrics().await.unwrap().plain[..], b"good", "nobody waits for better ones");
        board.wait_wanted().await;
        board.set_metrics(text("old", 0, 0));
        let (asked, ()) = tokio::join!(board.metrics(), async {
            board.wait_wanted().await;
            board.set_metrics(text("new", 0, 0));
        });
        assert_eq!(&asked.unwrap().plain[..], b"new");
    }
}
