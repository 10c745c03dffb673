//! Disturbs the instance as the seed says, while earlier disturbances may still have effects.

use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::json;
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};
use warden_rig::dice::Dice;
use warden_rig::storm::PATIENCE;
use warden_rig::warden::SOON;
use warden_rig::{Context as _, Outcome, Trouble, binaries, wait_until};

use crate::clients::Progress;
use crate::instance::Instance;
use crate::readings::Readings;
use crate::{Done, Soak};

const READS: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Deed {
    Kill,
    Restart,
    Drain,
    Reload,
    Change,
    Leave,
    Upgrade,
    UpgradeAndKill,
    UpgradeUnderRestart,
    StartAnew,
}

/// Weighted choice: each entry is equally likely.
const DEEDS: [Deed; 16] = [
    Deed::Kill,
    Deed::Kill,
    Deed::Kill,
    Deed::Kill,
    Deed::Restart,
    Deed::Restart,
    Deed::Drain,
    Deed::Drain,
    Deed::Reload,
    Deed::Reload,
    Deed::Change,
    Deed::Leave,
    Deed::Upgrade,
    Deed::Upgrade,
    Deed::UpgradeAndKill,
    Deed::UpgradeUnderRestart,
];

impl Deed {
    /// Returns true if another program serves afterwards.
    const fn ends_a_program(self) -> bool {
        matches!(self, Self::Upgrade | Self::UpgradeAndKill | Self::UpgradeUnderRestart | Self::StartAnew)
    }
}

/// One disturbance in so many restarts everything; otherwise upgrades would keep the memory of programs
/// young.
const ANEW: u64 = 60;

struct Hand<'a> {
    progress: &'a Progress,
    dice: Dice,
    orders: JoinSet<Outcome>,
    /// Progress of the clients at the last kill.
    killed: Option<Vec<u64>>,
    done: Done,
}

/// Disturbs until the end of the soak; returns the number of disturbances by kind.
pub(crate) async fn disturb(
    instance: &mut Instance,
    soak: &Soak,
    progress: &Progress,
    readings: &mut Readings,
    until: Instant,
) -> Result<Done, Trouble> {
    let mut hand = Hand {
        progress,
        dice: Dice::new(soak.seed),
        orders: JoinSet::new(),
        killed: None,
        done: Done::default(),
    };
    let mut reading = interval(READS);
    reading.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let mut next = Instant::now();
    let mut told = Instant::now();
    while Instant::now() < until {
        tokio::select! {
            _ = reading.tick() => {
                readings.take(instance, progress);
                look(instance).await;
                continue;
            }
            () = tokio::time::sleep_until(next) => {}
        }
        let deed = if hand.dice.one_in(ANEW) {
            Deed::StartAnew
        } else {
            DEEDS[usize::try_from(hand.dice.below(DEEDS.len() as u64))?]
        };
        if soak.one && deed.ends_a_program() {
            continue;
        }
        let at = progress.all();
        hand.act(instance, deed).await.context(format!("{deed:?} after {at} requests"))?;
        crate::say(&format!("{:?}: {deed:?} at request {at}", readings.age()));
        next = Instant::now() + Duration::from_millis(hand.dice.below(2 * soak.pause_ms));
        if told.elapsed() > Duration::from_secs(300) {
            told = Instant::now();
            let memory = readings.memory.map(|(_, last, _)| last >> 20);
            crate::say(&format!("{} requests, {memory:?} MiB, {:?}", progress.all(), hand.done.counts));
        }
    }
    // Even a short soak has one upgrade.
    if !soak.one {
        hand.act(instance, Deed::Upgrade).await?;
    }
    while let Some(ended) = hand.orders.join_next().await {
        ended??;
    }
    Ok(hand.done)
}

/// Sends the usual requests of operators and Prometheus.
async fn look(instance: &Instance) {
    for path in ["/metrics", "/status"] {
        // There is no answer during a restart.
        let _asked = timeout(Duration::from_secs(2), instance.warden().admin().get(path)).await;
    }
}

impl Hand<'_> {
    async fn act(&mut self, instance: &mut Instance, deed: Deed) -> Outcome {
        let models = instance.models();
        let model = models[usize::try_from(self.dice.below(models.len() as u64))?];
        let name = match deed {
            Deed::Kill => self.kill(instance)?,
            Deed::Restart => self.order(instance, model, "restart"),
            Deed::Drain => self.order(instance, model, "drain"),
            Deed::Reload => {
                instance.warden_mut().kid.signal(Signal::HUP);
                "reload"
            }
            Deed::Change => {
                instance.change()?;
                "change"
            }
            Deed::Leave => {
                for path in ["/drain", "/drain?undo=true"] {
                    let answer = instance.warden().admin().post(path, &json!({})).await?;
                    let told = format!("{path}: {}", answer.text());
                    answer.status.is_success().then_some(()).context(told)?;
                }
                "leave and come back"
            }
            Deed::Upgrade => upgrade(instance).await?,
            Deed::UpgradeAndKill => {
                upgrade(instance).await?;
                self.kill(instance)?;
                "upgrade and kill"
            }
            Deed::UpgradeUnderRestart => {
                self.order(instance, model, "restart");
                upgrade(instance).await?;
                "upgrade under a restart"
            }
            Deed::StartAnew => {
                self.anew(instance).await?;
                "start anew"
            }
        };
        *self.done.counts.entry(name).or_default() += 1;
        Ok(())
    }

    /// Kills a llama-server, unless a request may meet a second death, which is another promise.
    fn kill(&mut self, instance: &Instance) -> Result<&'static str, Trouble> {
        if self.killed.as_ref().is_some_and(|before| !self.progress.is_behind(before)) {
            return Ok("no kill");
        }
        let backends = instance.warden().backends();
        let chosen = usize::try_from(self.dice.below((backends.len() as u64).max(1)))?;
        let Some(backend) = backends.get(chosen) else { return Ok("no kill") };
        backend.signal(Signal::KILL);
        self.done.killed.push(backend.pid);
        self.killed = Some(self.progress.each());
        Ok("kill")
    }

    fn order(&mut self, instance: &Instance, model: &str, what: &'static str) -> &'static str {
        let (admin, path) = (instance.warden().admin(), format!("/models/{model}/{what}"));
        self.orders.spawn(async move {
            // An upgrade disconnects operators, but their orders are executed.
            let answer = timeout(PATIENCE, admin.post(&path, &json!({}))).await;
            answer.context(format!("{path} ends")).map(drop)
        });
        what
    }

    /// Restarts everything, as `systemctl restart` does.
    async fn anew(&mut self, instance: &mut Instance) -> Outcome {
        while let Some(ended) = self.orders.join_next().await {
            ended??;
        }
        if let Some(before) = self.killed.take() {
            // A continued request needs the process that continues it.
            wait_until("nothing runs that met a death", SOON * 2, async || self.progress.is_behind(&before))
                .await?;
        }
        self.progress.restarting.store(true, Ordering::SeqCst);
        let again = instance.anew().await;
        self.progress.restarting.store(false, Ordering::SeqCst);
        again
    }
}

async fn upgrade(instance: &Instance) -> Result<&'static str, Trouble> {
    let program = binaries::llama_warden()?;
    let words = ["upgrade", "--wait", "60s", "--to", &program.to_string_lossy()];
    let ran = instance.warden().home().warden(words, SOON * 3).await?;
    match ran.code {
        0 => Ok("upgrade"),
        // An upgrade waits for running work, and is given up if that does not end.
        _ if ran.all().contains("busy") => Ok("upgrade, busy"),
        _ => Err(Trouble::new(ran.all())),
    }
}
