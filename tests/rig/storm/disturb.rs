//! Disturbs the backends during a storm.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::json;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::{MODELS, PATIENCE, Storm, Weather};
use crate::dice::Dice;
use crate::warden::Setup;
use crate::{Context as _, Trouble, Warden};

pub(super) fn args(context: u32) -> String {
    format!("args = [\"-np\", \"2\", \"--metrics\", \"-c\", \"{context}\"]\n")
}

fn configuration(setup: &Setup, contexts: [u32; 2]) -> String {
    let mut text = String::new();
    for (n, part) in setup.config().split(&args(1024)).enumerate() {
        if n > 0 {
            text.push_str(&args(contexts[n - 1]));
        }
        text.push_str(part);
    }
    text
}

/// Disturbs until stopped; returns the number of disturbances by kind.
pub(super) async fn disturb(
    warden: &mut Warden,
    calm: &AtomicBool,
    storm: &Storm,
) -> Result<BTreeMap<&'static str, usize>, Trouble> {
    let mut dice = Dice::new(storm.seed);
    let mut done = BTreeMap::new();
    let mut contexts = [1024, 1024];
    let mut orders = JoinSet::new();
    while !calm.load(Ordering::SeqCst) {
        sleep(Duration::from_millis(20 + dice.below(150))).await;
        let model = MODELS[usize::from(!dice.one_in(2))];
        let order = |orders: &mut JoinSet<_>, what: &str| {
            let (admin, path) = (warden.admin(), format!("/models/{model}/{what}"));
            orders.spawn(async move {
                let answer = timeout(PATIENCE, admin.post(&path, &json!({}))).await;
                answer.context(format!("{path} ends"))?.map(drop)
            });
        };
        let what = match dice.below(8) {
            0 | 1 if storm.weather == Weather::Foul => {
                let backends = warden.backends();
                let chosen = dice.below(backends.len() as u64);
                if let Some(backend) = usize::try_from(chosen).ok().and_then(|n| backends.get(n)) {
                    backend.signal(Signal::KILL);
                }
                "kill"
            }
            0..=3 => {
                order(&mut orders, "restart");
                "restart"
            }
            4 => {
                order(&mut orders, "drain");
                "drain"
            }
            5 => {
                warden.kid.signal(Signal::HUP);
                "reload"
            }
            6 => {
                let which = usize::from(model == MODELS[1]);
                contexts[which] = 3072 - contexts[which];
                let config = configuration(&warden.setup, contexts);
                warden.reload(&config)?;
                "change"
            }
            _ => {
                let ran = warden.cli(&["restart", model]).await?;
                if !matches!(ran.code, 0 | 1) || ran.all().contains("panicked") {
                    return Err(Trouble::new(format!("restart: {ran:?}")));
                }
                "command"
            }
        };
        *done.entry(what).or_default() += 1;
    }
    while let Some(ended) = orders.join_next().await {
        ended??;
    }
    Ok(done)
}
