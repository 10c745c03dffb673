//! Clients that send one request after another, most of them streams, and leave some of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::mpsc::UnboundedSender;
use tokio::time::{Instant, sleep};
use warden_rig::Http;
use warden_rig::dice::Dice;
use warden_rig::storm::{Sent, Told, one};
use warden_rig::warden::chat;

use crate::instance::MODELS;

#[derive(Debug)]
pub(crate) struct Progress {
    ended: Vec<AtomicU64>,
    over: AtomicBool,
    /// True while the instance restarts, when it may ask clients to retry.
    pub(crate) restarting: AtomicBool,
}

impl Progress {
    pub(crate) fn new(clients: u64) -> Self {
        Self {
            ended: (0..clients).map(|_| AtomicU64::new(0)).collect(),
            over: AtomicBool::new(false),
            restarting: AtomicBool::new(false),
        }
    }

    pub(crate) fn each(&self) -> Vec<u64> {
        self.ended.iter().map(|count| count.load(Ordering::SeqCst)).collect()
    }

    pub(crate) fn all(&self) -> u64 {
        self.each().into_iter().sum()
    }

    /// Returns true if every request that ran at these counts has ended.
    pub(crate) fn is_behind(&self, before: &[u64]) -> bool {
        self.each().iter().zip(before).all(|(now, before)| now > before)
    }

    pub(crate) fn ended_one(&self, client: u64) {
        self.ended[usize::try_from(client).unwrap_or_default()].fetch_add(1, Ordering::SeqCst);
    }

    pub(crate) fn end(&self) {
        self.over.store(true, Ordering::SeqCst);
    }

    pub(crate) fn is_over(&self) -> bool {
        self.over.load(Ordering::SeqCst)
    }
}

#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) sent: Sent,
    pub(crate) at: Instant,
    /// Number of earlier attempts that had to be retried.
    pub(crate) again: u64,
}

pub(crate) struct Asked {
    number: u64,
    http: Http,
    progress: Arc<Progress>,
    ended: UnboundedSender<Ended>,
}

impl Asked {
    pub(crate) fn new(
        number: u64,
        http: Http,
        progress: Arc<Progress>,
        ended: UnboundedSender<Ended>,
    ) -> Self {
        Self { number, http, progress, ended }
    }

    pub(crate) async fn ask(self, mut dice: Dice) {
        for turn in 0_u64.. {
            if self.progress.is_over() {
                return;
            }
            // Long requests span several upgrades.
            let tokens = if dice.one_in(12) { 100 + dice.below(250) } else { 1 + dice.below(40) };
            let (model, tokens) = match dice.below(10) {
                0..=5 => (MODELS[0], tokens),
                6..=8 => (MODELS[1], tokens),
                // Requests that wait for a turn wait for the end of these.
                _ => (MODELS[2 + usize::from(dice.one_in(2)) + usize::from(dice.one_in(3))], tokens.min(40)),
            };
            let leaves = dice.one_in(25).then(|| Duration::from_millis(dice.below(400)));
            self.one(turn, model, tokens, !dice.one_in(3), leaves).await;
            sleep(Duration::from_millis(dice.below(200))).await;
        }
    }

    async fn one(&self, turn: u64, model: &str, tokens: u64, stream: bool, leaves: Option<Duration>) {
        let mut again = 0;
        let ended = loop {
            let id = format!("c{}-{turn}-{again}", self.number);
            let request = chat(&id, model, &id, tokens, stream);
            let was = self.progress.restarting.load(Ordering::SeqCst);
            let told = one(&self.http, &request, leaves).await;
            let restarts = was || self.progress.restarting.load(Ordering::SeqCst);
            if let Ok(Told::Refused { nothing_ran: true, .. }) = &told
                && restarts
                && again < 100
            {
                again += 1;
                sleep(Duration::from_millis(100)).await;
                continue;
            }
            break Ended { sent: Sent { id, request, told }, at: Instant::now(), again };
        };
        self.progress.ended_one(self.number);
        // Without a receiver, the error was already reported.
        drop(self.ended.send(ended));
    }
}
